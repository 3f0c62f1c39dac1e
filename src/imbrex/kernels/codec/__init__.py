"""Kernels that write and read the codecs' formats."""
