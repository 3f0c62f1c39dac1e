"""Makes `import deep_ep` find this adapter."""

from __future__ import annotations

import importlib.util
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from imbrex.adapters.deep_ep import config, elastic, events, hybrid, legacy

MARK = "_imbrex"


def install() -> None:
    """Register the modules `deep_ep`, `deep_ep.utils`, `deep_ep.utils.event` and `deep_ep.hybrid_ep_buffer`,
    so that programs written for DeepEP find `Buffer`, `HybridEPBuffer` and their events here. Call it before
    such a program is imported; a second call changes nothing.

    Raises RuntimeError where another deep_ep has been imported: programs may already hold its classes.
    """
    module = sys.modules.get("deep_ep")
    if module is not None and getattr(module, MARK, False):
        return
    foreign = [name for name in ("deep_ep", "deep_ep_cpp", "hybrid_ep_cpp") if name in sys.modules]
    if foreign:
        raise RuntimeError(
            f"imbrex.adapters.deep_ep.install: another {foreign[0]} is already imported; call install() "
            "before anything imports deep_ep, or leave it out to go on with that one"
        )
    event_names: dict[str, Any] = {"EventHandle": events.EventHandle, "EventOverlap": events.EventOverlap}
    hybrid_names = {"HybridEPBuffer": hybrid.HybridEPBuffer, "indices_to_map": hybrid.indices_to_map}
    event = _module("deep_ep.utils.event", event_names)
    utils = _module("deep_ep.utils", {**event_names, "event": event})
    hybrid_module = _module("deep_ep.hybrid_ep_buffer", hybrid_names)
    top = {
        "Buffer": legacy.Buffer,
        "Config": config.Config,
        "EPHandle": elastic.EPHandle,
        "ElasticBuffer": elastic.ElasticBuffer,
        "HybridEPBuffer": hybrid.HybridEPBuffer,
        "topk_idx_t": legacy.topk_idx_t,
        "utils": utils,
        "hybrid_ep_buffer": hybrid_module,
    }
    package = _module("deep_ep", {**event_names, **top})
    sys.modules.update({module.__name__: module for module in (package, utils, event, hybrid_module)})


def plug_in() -> None:
    """Install for vLLM and SGLang, which call this in each of their processes where imbrex is installed. A
    deep_ep that is there itself is left alone. Nothing uses ours before a DeepEP back end is asked for.
    """
    if "deep_ep" not in sys.modules and importlib.util.find_spec("deep_ep") is None:
        install()


def _module(name: str, names: dict[str, Any]) -> ModuleType:
    module = ModuleType(name, "imbrex.adapters.deep_ep under the name that programs import.")
    # Programs ask importlib whether deep_ep is there; it wants a spec.
    is_package = name in ("deep_ep", "deep_ep.utils")
    module.__spec__ = ModuleSpec(name, loader=None, origin="imbrex.adapters.deep_ep", is_package=is_package)
    if is_package:
        module.__path__ = []
    module.__dict__.update(names, **{MARK: True})
    return module
