"""Expert-parallel Mixture-of-Experts for PyTorch that covers communication with computation."""

from imbrex.contracts import Dispatched, Placement, Routing
from imbrex.exchange import Exchange
from imbrex.gates import Gate
from imbrex.layer import MoEConfig, MoELayer, SharedExperts
from imbrex.losses import AuxLosses
from imbrex.parallel import aux_loss, expert_parameters, ignore_in_ddp, sync_gradients
from imbrex.waiting import RankLostError

__version__ = "0.1.0"

__all__ = [
    "AuxLosses",
    "Dispatched",
    "Exchange",
    "Gate",
    "MoEConfig",
    "MoELayer",
    "Placement",
    "RankLostError",
    "Routing",
    "SharedExperts",
    "aux_loss",
    "expert_parameters",
    "ignore_in_ddp",
    "sync_gradients",
]
