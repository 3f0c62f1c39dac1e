"""Routings to measure with: uniform, skewed by a law, or recorded from a real model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from imbrex.bench.shapes import Shape
from imbrex.contracts import Routing
from imbrex.placement.history_files import read_trace


def make_routing(skew: str, shape: Shape, num_tokens: int, *, rank: int = 0, seed: int = 0) -> Routing:
    """Routing of the `num_tokens` tokens of `rank`, on the CPU; all ranks share the experts' popularity.

    skew: `uniform`; `zipf:A`, the e-th most popular expert in proportion to e^-A; `std:S`, shares of the load
    with standard deviation S over the experts (Comet section 5.4: 0.032 is their production average);
    `trace:FILE[:ARRAY[:LAYER]]`, ids [T, K] or [layers, T, K] of a `.npy` or `.npz`, repeated as needed;
    `load:FILE[:ARRAY[:LAYER]]`, drawn at random with the shares that as many experts, the first ones, have in
    such a trace, whatever its top-k; a model of more experts takes those of the layers that follow.
    Weights are positive and sum to 1 per token, or the trace's where it has them.
    Raises ValueError for a skew that cannot be read or reached.
    """
    kind, _, value = skew.partition(":")
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    if kind == "trace":
        return _from_trace(value, shape, num_tokens, rank, generator)
    popularity = _shares(kind, value, skew, shape, torch.Generator().manual_seed(seed))
    ids_TK = draw_choices(popularity, num_tokens, shape.top_k, generator)
    return Routing(ids_TK=ids_TK, weights_TK=_random_weights(ids_TK.shape, generator))


def draw_choices(shares_E: Tensor, num_tokens: int, top_k: int, generator: torch.Generator) -> Tensor:
    """`top_k` different experts for every token, int64 [T, K], in exactly its share on average.

    Systematic sampling (Madow 1949) over a new order of the experts for each token: with probabilities
    K * share laid end to end, every point u, u + 1, ... u + K - 1 falls on another expert.
    Example: shares [.5, .25, .25], K = 2: lengths [1, .5, .5]; u = .3 hits experts 0 and 1, u = .7 0 and 2.
    """
    num_experts = shares_E.numel()
    order_TE = torch.rand(num_tokens, num_experts, generator=generator).argsort(1)
    ends_TE = (shares_E.double() * top_k)[order_TE].cumsum(1)
    points_TK = torch.rand(num_tokens, 1, generator=generator) + torch.arange(top_k)
    found_TK = torch.searchsorted(ends_TE, points_TK.double(), right=True).clamp_(max=num_experts - 1)
    return order_TE.gather(1, found_TK)


def _shares(kind: str, value: str, skew: str, shape: Shape, generator: torch.Generator) -> Tensor:
    num_experts, largest = shape.num_experts, 1 / shape.top_k
    if kind == "uniform" and not value:
        return torch.full((num_experts,), 1 / num_experts, dtype=torch.float64)
    if kind == "load":
        return _cap(_recorded_shares(value, num_experts), largest)
    if kind not in ("zipf", "std"):
        raise ValueError(f"--skew: {skew!r} is unknown; use uniform, zipf:A, std:S, trace:FILE or load:FILE")
    try:
        number = float(value)
    except ValueError:
        raise ValueError(f"--skew: {value!r} is not a number; use {kind}:0.5, for example") from None
    if not 0 <= number < float("inf"):
        raise ValueError(f"--skew: {number} makes no popularity; use a number from 0 up")
    if kind == "zipf":
        shares = (torch.arange(num_experts, dtype=torch.float64) + 1) ** -number
        return _cap(shares / shares.sum(), largest)[torch.randperm(num_experts, generator=generator)]
    return _shares_of_std(number, num_experts, largest, generator)


def _cap(shares_E: Tensor, cap: float) -> Tensor:
    """No expert above `cap`, as a token chooses it at most once; the others get the rest in proportion."""
    for _ in range(shares_E.numel()):
        full = shares_E >= cap
        free = 1 - cap * int(full.sum())
        if free <= 0 or not full.any():
            break
        rest = shares_E.masked_fill(full, 0)
        shares_E = torch.where(full, cap, rest * (free / rest.sum().clamp(min=1e-300)))
    return shares_E / shares_E.sum()


def _shares_of_std(std: float, num_experts: int, cap: float, generator: torch.Generator) -> Tensor:
    direction = torch.randn(num_experts, dtype=torch.float64, generator=generator)
    direction = (direction - direction.mean()) / max(float(direction.std(correction=0)), 1e-300)
    mean, low, high = 1 / num_experts, 0.0, 1e3 / num_experts
    # Clipping at 0 and `cap` pulls the deviation in, so the length along `direction` is searched for.
    for _ in range(80):
        length = (low + high) / 2
        shares = _cap((mean + length * direction).clamp(min=0), cap)
        low, high = (length, high) if float(shares.std(correction=0)) < std else (low, length)
    shares = _cap((mean + high * direction).clamp(min=0), cap)
    reached = float(shares.std(correction=0))
    if abs(reached - std) > 0.02 * std + 1e-9:
        raise ValueError(f"--skew: {num_experts} experts do not reach std:{std}; use less than {reached:.3f}")
    return shares


def _random_weights(shape: torch.Size, generator: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=generator).softmax(1)


def _recorded_shares(value: str, num_experts: int) -> Tensor:
    layers, _ = _read_layers(value)
    known = int(layers.max()) + 1
    needed = -(-num_experts // known)
    if needed > len(layers):
        raise ValueError(
            f"--skew: {known} experts in every layer of the trace, layers {len(layers)}, are too few for "
            f"{num_experts}; choose another --model or trace"
        )
    counts = np.concatenate([np.bincount(ids.flatten(), minlength=known) for ids in layers[:needed]])
    shares_E = torch.from_numpy(counts[:num_experts].astype(np.float64))
    if not shares_E.any():
        raise ValueError(
            f"--skew: the trace never chose the first {num_experts} of its {known} experts; choose another"
        )
    return shares_E / shares_E.sum()


def _from_trace(value: str, shape: Shape, num_tokens: int, rank: int, generator: torch.Generator) -> Routing:
    path = value.split(":")[0]
    layers, layer_weights = _read_layers(value)
    ids, weights = layers[0], None if layer_weights is None else layer_weights[0]
    if ids.shape[1] != shape.top_k or ids.max() >= shape.num_experts:
        raise ValueError(
            f"--skew: the trace {path} has ids {ids.shape} up to {ids.max()} but the model routes to "
            f"{shape.top_k} of {shape.num_experts} experts; choose another --model or trace"
        )
    rows = (np.arange(num_tokens) + rank * num_tokens) % ids.shape[0]
    ids_TK = torch.from_numpy(ids[rows].astype(np.int64))
    if weights is None:
        return Routing(ids_TK=ids_TK, weights_TK=_random_weights(ids_TK.shape, generator))
    return Routing(ids_TK=ids_TK, weights_TK=torch.from_numpy(weights[rows].astype(np.float32)))


def _read_layers(value: str) -> tuple[np.ndarray, np.ndarray | None]:
    """ids [layers, T, K] of `FILE[:ARRAY[:LAYER]]`, from that layer on and round; weights where there are."""
    path, array, layer = [*value.split(":"), "", ""][:3]
    try:
        ids, weights = read_trace(Path(path), array)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"--skew: cannot read the trace {path} ({error}); give a .npy or .npz file"
        ) from None
    if ids.ndim == 2:
        ids, weights = ids[None], None if weights is None else weights[None]
    if ids.ndim != 3 or not ids.size:
        raise ValueError(f"--skew: ids of {path} are {ids.shape}; give [T, K] or [layers, T, K]")
    layers = {str(i): i for i in range(ids.shape[0])} | {"": ids.shape[0] // 2}
    if layer not in layers:
        raise ValueError(
            f"--skew: the trace has layers 0 to {ids.shape[0] - 1}, not {layer}; name one of these"
        )
    first = layers[layer]
    return np.roll(ids, -first, 0), None if weights is None else np.roll(weights, -first, 0)
