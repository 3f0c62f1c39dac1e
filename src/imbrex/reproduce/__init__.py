"""The papers' tables and figures, one file each, run by `imbrex reproduce NAME`."""
