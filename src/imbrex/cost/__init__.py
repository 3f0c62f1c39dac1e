"""Cost models: how long things take, fitted to measurements. Pure functions."""

from imbrex.cost.curve import Curve
from imbrex.cost.network import COSTS, Link, Load, Network

__all__ = ["COSTS", "Curve", "Link", "Load", "Network"]
