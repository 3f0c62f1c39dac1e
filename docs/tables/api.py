"""Tables of the public names: each with its parameters and the first sentence of its docstring."""

from __future__ import annotations

import ast
import inspect
import re
import sys
from importlib import import_module
from itertools import pairwise
from types import ModuleType
from typing import Any

MODULES: dict[str, tuple[str, ...]] = {
    "imbrex": (),
    "imbrex.router": (),
    "imbrex.experts": ("Experts", "ExternalExperts", "Shard", "SharedExpert"),
    "imbrex.transport": (),
    "imbrex.transport.sockets": ("widen",),
    "imbrex.codec": (),
    "imbrex.overlap": (),
    "imbrex.parallel.backward": (),
    "imbrex.parallel.batches": (),
    "imbrex.parallel.checkpoint": (),
    "imbrex.placement": (),
    "imbrex.placement.sharding": (),
    "imbrex.balancer": (),
    "imbrex.adapters.huggingface": (),
    "imbrex.adapters.huggingface.training": ("ReplacedBlocks",),
    "imbrex.adapters.transformers": ("register",),
    "imbrex.adapters.deep_ep": (),
    "imbrex.observe": (),
    "imbrex.testing": (),
    "imbrex.cost": (),
    "imbrex.simulate": (),
    "imbrex.kernels": (),
    "imbrex.kernels.exchange": (),
    "imbrex.kernels.ffn.ffn": ("ffn",),
    "imbrex.kernels.ffn.tokens": ("ffn_in_place", "ffn_tokens"),
    "imbrex.kernels.ffn.fp8": ("ffn_fp8", "quantise_experts"),
    "imbrex.kernels.ffn.fp8_tokens": ("ffn_tokens_fp8",),
    "imbrex.kernels.ffn.inputs": ("why_not_ffn",),
    "imbrex.kernels.ffn.operators": ("permute", "swiglu", "unpermute"),
    "imbrex.contracts": (
        *("Arrived", "Backend", "Codec", "Crossing", "Dispatched", "Dispatcher", "Experts", "Geometry"),
        *("Handle", "Output", "Pending", "Placement", "Plan", "Roles", "Routing", "RowExchange", "RowForm"),
        *("Split", "Strategy", "Traffic", "Transport", "Wire"),
    ),
}
"""The modules of docs/api.md, with the names that are shown where these are not all of `__all__`."""
END_OF_SENTENCE = r"(?<=[\w)`\]]\.)\s(?=[A-Z`]|[a-z_]\w*(?:, \w+)*: )"


def names_of(module: str) -> tuple[str, ...]:
    """The public names of a module."""
    return MODULES[module] or tuple(sorted(import_module(module).__all__, key=str.lower))


def table(module: str) -> str:
    """The names of a module as Markdown."""
    home = import_module(module)
    names = names_of(module)
    lines = [f"| `{_call(getattr(home, name), name)}` | {describe(home, name)} |" for name in names]
    return "\n".join(["| name | what it is |", "| --- | --- |", *lines])


def describe(module: ModuleType, name: str) -> str:
    """The first sentence of what is said of a name. Raises ValueError where nothing is."""
    value = getattr(module, name)
    text = inspect.getdoc(value) if _speaks(value) else _text_under(name, value)
    if not text:
        raise ValueError(f"{module.__name__}.{name} says nothing of itself; give it a docstring")
    paragraph = " ".join(text.split("\n\n")[0].split())
    return re.split(END_OF_SENTENCE, paragraph)[0].replace("|", "\\|")


def _speaks(value: Any) -> bool:
    return inspect.ismodule(value) or inspect.isclass(value) or inspect.isroutine(value)


def _call(value: Any, name: str) -> str:
    """A function with the names of its parameters; anything else by its name."""
    if not inspect.isroutine(value):
        return name
    shown, keyword_only = [], False
    for parameter in inspect.signature(value).parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and not keyword_only:
            keyword_only = True
            shown.append("*")
        keyword_only = keyword_only or parameter.kind is parameter.VAR_POSITIONAL
        shown.append(str(parameter.replace(annotation=parameter.empty, default=parameter.empty)))
    return f"{name}({', '.join(shown)})"


def _text_under(name: str, value: Any) -> str | None:
    """The string that stands under the assignment of a constant, wherever in imbrex that is."""
    for module in [module for key, module in sys.modules.items() if key.split(".")[0] == "imbrex"]:
        if getattr(module, name, None) is not value:
            continue
        for node, below in pairwise(ast.parse(inspect.getsource(module)).body):
            assigned = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
            if isinstance(assigned, ast.Name) and assigned.id == name and isinstance(below, ast.Expr):
                return ast.literal_eval(below.value)
    return None
