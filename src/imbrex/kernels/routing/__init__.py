"""Kernels that place every row before any moves, and that choose replicas."""

from imbrex.kernels.routing.routed import Routed

__all__ = ["Routed"]
