"""The dense reference, and conformity suites for pieces of your own."""

from imbrex.testing.oracle import dense

__all__ = ["dense"]
