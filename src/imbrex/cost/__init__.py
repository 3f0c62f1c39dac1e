"""How long things take: models fitted from measurements. Pure functions."""

from imbrex.cost.curve import Curve

__all__ = ["Curve"]
