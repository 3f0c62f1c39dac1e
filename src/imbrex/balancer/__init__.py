"""Experts that move while the model runs: statistics, migration, hand-over."""

from imbrex.balancer.migration import Mover
from imbrex.balancer.online import OnlineBalancer
from imbrex.placement.online import Pace

__all__ = ["Mover", "OnlineBalancer", "Pace"]
