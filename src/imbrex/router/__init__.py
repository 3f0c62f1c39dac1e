"""The router: the experts that a token goes to, their weights, and the losses that keep their loads even."""

from imbrex.router.capacity import Capacity
from imbrex.router.gates import Gate, Groups
from imbrex.router.losses import AuxLosses
from imbrex.router.router import Router

__all__ = ["AuxLosses", "Capacity", "Gate", "Groups", "Router"]
