"""Expert-parallel Mixture-of-Experts for PyTorch that covers communication with computation."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from imbrex.contracts import Dispatched, Placement, Routing
    from imbrex.exchange.exchange import Exchange
    from imbrex.layer import MoEConfig, MoELayer, SharedExperts
    from imbrex.parallel.clipping import clip_grad_norm_
    from imbrex.parallel.gradients import aux_loss, expert_parameters, ignore_in_ddp, sync_gradients
    from imbrex.router.gates import Gate
    from imbrex.router.losses import AuxLosses
    from imbrex.runtime.waits import RankLostError
    from imbrex.serve.capture import capture

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
    "capture",
    "clip_grad_norm_",
    "expert_parameters",
    "ignore_in_ddp",
    "sync_gradients",
]

_HOMES = ("contracts", "exchange.exchange", "layer", "parallel.clipping", "parallel.gradients")
_HOMES += ("router.gates", "router.losses", "runtime.waits", "serve.capture")


def __getattr__(name: str) -> Any:
    """The public names, at the first use of one: a command that only says its version loads no torch."""
    if name not in __all__:
        raise AttributeError(f"module 'imbrex' has no attribute {name!r}")
    for home in _HOMES:
        module = import_module(f"imbrex.{home}")
        globals().update({public: getattr(module, public) for public in __all__ if hasattr(module, public)})
    return globals()[name]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
