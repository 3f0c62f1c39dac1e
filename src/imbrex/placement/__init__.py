"""Where experts live, and which replica takes which choice. Pure functions on any device."""

from imbrex.placement.layouts import contiguous, from_slots
from imbrex.placement.split import split_evenly

__all__ = ["contiguous", "from_slots", "split_evenly"]
