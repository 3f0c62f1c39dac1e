"""Calls that may do without a late peer, over the peers' memory."""

from imbrex.kernels.events.events import EventsCall, EventsKernels, Patience, Room

__all__ = ["EventsCall", "EventsKernels", "Patience", "Room"]
