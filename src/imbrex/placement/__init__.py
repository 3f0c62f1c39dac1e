"""Where experts are placed, and how choices are split over replicas. Pure functions, most on any device."""

from imbrex.placement.engines import rebalance_experts
from imbrex.placement.flow import split_balanced, split_nearest
from imbrex.placement.history import LoadHistory, history_of_ids
from imbrex.placement.history_files import read_history, write_history
from imbrex.placement.layouts import contiguous, from_slots
from imbrex.placement.plan_files import BalancePlan, read_plan, write_plan
from imbrex.placement.planner import imbalance, plan_layers
from imbrex.placement.renewal import Target, plan_history
from imbrex.placement.split import SPLITS, make_split, split_evenly

__all__ = [
    "SPLITS",
    "BalancePlan",
    "LoadHistory",
    "Target",
    "contiguous",
    "from_slots",
    "history_of_ids",
    "imbalance",
    "make_split",
    "plan_history",
    "plan_layers",
    "read_history",
    "read_plan",
    "rebalance_experts",
    "split_balanced",
    "split_evenly",
    "split_nearest",
    "write_history",
    "write_plan",
]
