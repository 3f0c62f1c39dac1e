"""The documentation's tables and pictures, made from benchmarks/results and written into the pages.

A page says where a table stands by two comments, and `python -m docs.tables` (or `make docs-tables`) writes
what is between them, so that people who read on a forge see what the result files say:

    <!-- table: doors -->
    ...
    <!-- end of the table -->

One module a room makes tables; `pages` knows which page has which.
"""
