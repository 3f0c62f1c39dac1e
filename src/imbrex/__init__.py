"""Expert-parallel Mixture-of-Experts for PyTorch that covers communication with computation."""

from imbrex.contracts import Dispatched, Placement, Routing
from imbrex.exchange.exchange import Exchange
from imbrex.layer import MoEConfig, MoELayer, SharedExperts
from imbrex.parallel.clipping import clip_grad_norm_
from imbrex.parallel.gradients import aux_loss, expert_parameters, ignore_in_ddp, sync_gradients
from imbrex.router.gates import Gate
from imbrex.router.losses import AuxLosses
from imbrex.runtime.waits import RankLostError

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
    "clip_grad_norm_",
    "expert_parameters",
    "ignore_in_ddp",
    "sync_gradients",
]
