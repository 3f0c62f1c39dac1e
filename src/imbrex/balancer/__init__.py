"""The online balancer: moves experts between ranks while the model runs."""

from imbrex.balancer.migration import Mover
from imbrex.balancer.online import OnlineBalancer
from imbrex.placement.online import Pace

__all__ = ["Mover", "OnlineBalancer", "Pace"]
