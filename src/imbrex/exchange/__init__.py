"""Rows to the ranks of their experts and sums back home, forward and backward."""

from imbrex.exchange import plan, rows
from imbrex.exchange.agreement import agree
from imbrex.exchange.exchange import Exchange

__all__ = ["Exchange", "agree", "plan", "rows"]
