"""The dense reference, and conformity suites for pieces of your own."""

from imbrex.testing.codecs import CodecReport, check_codec
from imbrex.testing.conformity import ConformityError
from imbrex.testing.experts import check_experts
from imbrex.testing.oracle import dense, round_trip, wired
from imbrex.testing.schedules import check_schedule
from imbrex.testing.splits import check_split
from imbrex.testing.transports import check_transport

__all__ = [
    "CodecReport",
    "ConformityError",
    "check_codec",
    "check_experts",
    "check_schedule",
    "check_split",
    "check_transport",
    "dense",
    "round_trip",
    "wired",
]
