"""The dense reference, and conformity suites for pieces of your own."""

from imbrex.testing.codecs import CodecReport, check_codec
from imbrex.testing.conformity import ConformityError
from imbrex.testing.oracle import dense, round_trip, wired

__all__ = ["CodecReport", "ConformityError", "check_codec", "dense", "round_trip", "wired"]
