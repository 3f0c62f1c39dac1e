"""Which experts a token visits, with what weights, and what keeps their loads even."""

from imbrex.router.capacity import Capacity
from imbrex.router.gates import Gate, Groups
from imbrex.router.losses import AuxLosses
from imbrex.router.router import Router

__all__ = ["AuxLosses", "Capacity", "Gate", "Groups", "Router"]
