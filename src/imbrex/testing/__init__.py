"""The dense reference, and conformity suites for pieces of your own."""

from imbrex.testing.oracle import dense, round_trip, wired

__all__ = ["dense", "round_trip", "wired"]
