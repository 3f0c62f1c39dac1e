"""Reads and writes placements of all layers in the formats of serving engines.

    *.yaml, *.yml   TensorRT-LLM: num_slots, layer_updates_per_iter, initial_global_assignments by layer
    *.json          SGLang: physical_to_logical_map [layers][slots]

Slots are listed rank by rank. If ranks have different numbers of slots, a line `slots_per_rank` is added,
which the engines do not know.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from imbrex.contracts import Placement
from imbrex.placement.layouts import from_slots
from imbrex.placement.packing import spread
from imbrex.runtime.checks import UNREADABLE


@dataclass(frozen=True, kw_only=True, slots=True)
class BalancePlan:
    """Placements of all layers.

    placements: by the model's number of the layer. layer_updates_per_iter: the number of layers that an
    online balancer looks at in an iteration; 0 keeps the plan as it is.
    """

    placements: Mapping[int, Placement]
    layer_updates_per_iter: int = 0

    def of(self, layer: int) -> Placement:
        """The placement of a layer. Raises ValueError if the plan has none."""
        if layer not in self.placements:
            known = ", ".join(map(str, self.placements)) or "none"
            raise ValueError(f"plan: layer {layer} is missing; the plan has layers {known}")
        return self.placements[layer]


def write_plan(path: str | os.PathLike[str], plan: BalancePlan) -> None:
    """Write a plan, in the format of the name's ending. The file is written under another name first, then
    renamed."""
    path = Path(path)
    if not plan.placements:
        raise ValueError("plan: it has no layers; nothing written")
    text = _to_json(plan) if _kind(path) == "json" else _to_yaml(plan)
    draft = path.with_name(f"{path.name}.{os.getpid()}")
    draft.write_text(text, encoding="utf-8")
    draft.replace(path)


def read_plan(
    path: str | os.PathLike[str],
    num_ranks: int,
    num_experts: int,
    *,
    layers: Sequence[int] | None = None,
) -> BalancePlan:
    """Read a plan for `num_ranks` ranks.

    layers: the numbers of the layers in a file of SGLang, which has none; by default 0, 1, ...

    Raises ValueError, in one sentence, if the file is cut off, or if a layer's slots are impossible.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
        content = json.loads(text) if _kind(path) == "json" else _load_yaml(text)
        if not isinstance(content, dict):
            raise ValueError("it is no mapping")
        if "physical_to_logical_map" in content:
            rows = content["physical_to_logical_map"]
            if layers is not None and len(rows) != len(layers):
                raise ValueError(f"it has {len(rows)} layers, not the {len(layers)} of the statistics")
            rows = dict(zip(layers if layers is not None else range(len(rows)), rows, strict=True))
        else:
            rows = content.get("initial_global_assignments") or {}
            _check_num_slots(rows, content["num_slots"])
        slots_per_rank = content.get("slots_per_rank")
        placements = {
            int(layer): _placement(int(layer), slots, slots_per_rank, num_ranks, num_experts)
            for layer, slots in rows.items()
        }
        return BalancePlan(
            placements=placements, layer_updates_per_iter=int(content.get("layer_updates_per_iter", 0))
        )
    except UNREADABLE as error:
        first = " ".join(str(error).split())
        what = f"it has no {first}" if isinstance(error, KeyError) else first
        raise ValueError(f"plan: cannot use {path}: {what}") from None


def _kind(path: Path) -> str:
    kinds = {".json": "json", ".yaml": "yaml", ".yml": "yaml"}
    if path.suffix not in kinds:
        raise ValueError(f"plan: {path} ends in none of {', '.join(kinds)}")
    return kinds[path.suffix]


def _load_yaml(text: str) -> Any:
    try:
        import yaml
    except ImportError:
        raise ValueError("reading YAML needs PyYAML; pip install 'imbrex[yaml]'") from None
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(f"it is no YAML: {error}") from None


def _check_num_slots(rows: Mapping[Any, Sequence[int]], num_slots: int) -> None:
    for layer, slots in rows.items():
        if len(slots) != num_slots:
            raise ValueError(f"layer {layer} has {len(slots)} slots but num_slots is {num_slots}")


def _placement(
    layer: int, slots: Sequence[int], slots_per_rank: Sequence[int] | None, num_ranks: int, num_experts: int
) -> Placement:
    sizes = spread(len(slots), num_ranks) if slots_per_rank is None else slots_per_rank
    if len(sizes) != num_ranks or sum(sizes) != len(slots):
        raise ValueError(f"layer {layer} has {len(slots)} slots; {list(sizes)} do not share them out")
    ranks, at = [], 0
    for size in sizes:
        ranks.append([_whole(expert) for expert in slots[at : at + size]])
        at += size
    try:
        return from_slots(ranks, num_experts)
    except ValueError as error:
        shared = f"its {len(slots)} slots on {num_ranks} ranks, which may be another number than it is for"
        raise ValueError(f"layer {layer}: {error}; {shared}") from None


def _whole(number: Any) -> int:
    """The number of an expert. Raises ValueError where it is none: 1.5 is not expert 1."""
    if isinstance(number, bool) or not isinstance(number, int):
        raise ValueError(f"{number!r} is no whole number")
    return number


def _sizes(plan: BalancePlan) -> list[int] | None:
    """The number of slots of every rank, or `None` if they are spread as evenly as possible."""
    layouts = {p.rank_offsets for p in plan.placements.values()}
    if len(layouts) > 1:
        raise ValueError("plan: layers have different slots per rank; a file holds one kind")
    offsets = layouts.pop()
    sizes = [end - begin for begin, end in pairwise(offsets)]
    return None if tuple(sizes) == spread(sum(sizes), len(sizes)) else sizes


def _to_json(plan: BalancePlan) -> str:
    content: dict[str, Any] = {
        "physical_to_logical_map": [list(plan.placements[layer].slots) for layer in sorted(plan.placements)]
    }
    if sizes := _sizes(plan):
        content["slots_per_rank"] = sizes
    return json.dumps(content) + "\n"


def _to_yaml(plan: BalancePlan) -> str:
    """Lists of numbers only, so no library is needed to write it."""
    first = next(iter(plan.placements.values()))
    lines = [f"num_slots: {first.num_slots}", f"layer_updates_per_iter: {plan.layer_updates_per_iter}"]
    if sizes := _sizes(plan):
        lines.append(f"slots_per_rank: {sizes}")
    lines.append("initial_global_assignments:")
    lines += [f"  {layer}: {list(plan.placements[layer].slots)}" for layer in sorted(plan.placements)]
    return "\n".join(lines) + "\n"
