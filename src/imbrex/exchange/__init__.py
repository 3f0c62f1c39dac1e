"""Rows to the ranks of their experts and sums back home, forward and backward."""

from imbrex.exchange.exchange import Exchange

__all__ = ["Exchange"]
