"""The small operators between the products of a block: residual sums, norms, rotary positions, writes to the
cache, and the softmax of latent attention.

A launch takes 2 to 3 us in a graph, however little it does, and a layer had fourteen of these. So each is a
function from tensors to tensors, of which `torch.compile` makes one or two kernels on a GPU that decodes.
Elsewhere, and in calls with gradients, they run as they are written.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def residual_norm(x_TD: Tensor, added_TD: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The rows with what the part before adds to them, and those normed."""
    x_TD = x_TD + added_TD
    return x_TD, F.rms_norm(x_TD, weight_D.shape, weight_D, eps)


def turned(x_THC: Tensor, turn_TC: Tensor) -> Tensor:
    """Heads by their token's position: (l, r) turns to (l cos - r sin, r cos + l sin), which is
    x * (cos, cos) + (r, l) * (-sin, sin)."""
    cos, sin = turn_TC[:, None].chunk(2, -1)
    return torch.addcmul(x_THC * cos, x_THC.roll(x_THC.shape[-1] // 2, -1), sin)


def put(cache_RC: Tensor, row_TC: Tensor, place_T: Tensor) -> None:
    """Put a row a token into its place. The cache is flat and the call is `index_put_`, since of all ways to
    write rows the compiler does this one in place: of `index_copy_` it made two copies of the whole cache."""
    cache_RC.index_put_((place_T,), row_TC)


def normed_heads(both_THC: Tensor, weights: tuple[Tensor, Tensor], heads: int, eps: float) -> Tensor:
    """Queries, and keys behind them, normed by head. One reduction for both, each with its own weight."""
    queries_H = torch.arange(both_THC.shape[1], device=both_THC.device) < heads
    weight_HC = torch.where(queries_H[:, None], *weights)
    return F.rms_norm(both_THC, both_THC.shape[-1:], None, eps) * weight_HC


def grouped_heads(
    qkv_THC: Tensor, norms: tuple[Tensor, Tensor] | None, turn_TC: Tensor, heads: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of grouped-query attention. norms: weights of queries' and keys'."""
    groups = (qkv_THC.shape[1] - heads) // 2
    both, values = qkv_THC.split([heads + groups, groups], 1)
    if norms is not None:
        both = normed_heads(both, norms, heads, eps)
    queries, keys = turned(both, turn_TC).split([heads, groups], 1)
    return queries, keys, values


def grouped_into_cache(
    qkv_THC: Tensor,
    norms: tuple[Tensor, Tensor] | None,
    turn_TC: Tensor,
    heads: int,
    eps: float,
    cache: tuple[Tensor, Tensor],
    place_T: Tensor,
) -> Tensor:
    """Queries; keys and values are in the cache, [rows of all slots, G, C]."""
    queries, keys, values = grouped_heads(qkv_THC, norms, turn_TC, heads, eps)
    put(cache[0], keys, place_T)
    put(cache[1], values, place_T)
    return queries


def latent_row(kept_TC: Tensor, weight_C: Tensor, turn_TC: Tensor, eps: float) -> Tensor:
    """The row that the cache keeps of a token: the latent, normed, and the turned key of all heads."""
    latent, key = kept_TC.split([len(weight_C), kept_TC.shape[1] - len(weight_C)], -1)
    key = turned(key[:, None], turn_TC)[:, 0]
    return torch.cat((F.rms_norm(latent, weight_C.shape, weight_C, eps), key), -1)


def latent_into_cache(
    kept_TC: Tensor, weight_C: Tensor, turn_TC: Tensor, eps: float, cache_RC: Tensor, place_T: Tensor
) -> None:
    """Norm and turn latent rows, and write them to their places in the cache."""
    put(cache_RC, latent_row(kept_TC, weight_C, turn_TC, eps), place_T)


def latent_queries(absorbed_HTC: Tensor, rope_THC: Tensor, turn_TC: Tensor, scale: float) -> Tensor:
    """Queries in the latents' space, scaled, [T, H, kv_rank + rope]."""
    return torch.cat((absorbed_HTC.transpose(0, 1), turned(rope_THC, turn_TC)), -1) * scale


def latent_heads(q_THC: Tensor, turn_TC: Tensor) -> Tensor:
    """Queries of expanded latents, the part with positions first, turned."""
    rope = turn_TC.shape[-1] // 2
    nope, turning = q_THC.split([q_THC.shape[-1] - rope, rope], -1)
    return torch.cat((turned(turning, turn_TC), nope), -1)


def latent_up(k_up_HNK: Tensor, v_up_HVK: Tensor, rope: int) -> Tensor:
    """The weight that takes a row of the cache to a value and a key of every head, [H, value + rope + nope,
    kv_rank + rope]. The turned key goes through as it is."""
    heads, _, rank = k_up_HNK.shape
    as_it_is = F.pad(torch.eye(rope, dtype=k_up_HNK.dtype, device=k_up_HNK.device), (rank, 0))
    values, keys = F.pad(v_up_HVK, (0, rope)), F.pad(k_up_HNK, (0, rope))
    return torch.cat((values, as_it_is.expand(heads, -1, -1), keys), 1)


def latent_weights(scores_BXL: Tensor, hidden_BSL: Tensor) -> Tensor:
    """The softmax of a row's scores, X = S * H, but for the tokens that each does not see; takes the place of
    the scores. Never compiled: as one kernel it took 111 us of scores whose bytes take 20 to read and write.
    """
    rows, length, positions = hidden_BSL.shape
    scores = scores_BXL.view(rows, length, -1, positions).masked_fill_(hidden_BSL[:, :, None], -torch.inf)
    return scores.softmax(-1).view_as(scores_BXL)


@dataclass(frozen=True, kw_only=True, slots=True)
class Between:
    """The functions of this file that a block calls, as written or compiled."""

    residual_norm: Callable[..., tuple[Tensor, Tensor]] = residual_norm
    grouped_into_cache: Callable[..., Tensor] = grouped_into_cache
    latent_into_cache: Callable[..., None] = latent_into_cache
    latent_queries: Callable[..., Tensor] = latent_queries
    latent_heads: Callable[..., Tensor] = latent_heads
    latent_up: Callable[..., Tensor] = latent_up


AS_WRITTEN = Between()


@functools.cache
def compiled() -> Between:
    """All of them by `torch.compile`, each once for all layers; sizes that change become variables."""
    names, how = Between.__dataclass_fields__, {"fullgraph": True, "options": early_launches()}
    return Between(**{name: torch.compile(getattr(AS_WRITTEN, name), **how) for name in names})


EARLY = "triton.enable_pdl"


def early_launches() -> dict[str, Any] | None:
    """Options of the compiler by which its kernels begin while those before them end, where it has them and
    the GPU does that: 0.2 to 0.5 % of a step of Qwen3-30B-A3B."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0):
        return None
    from torch._inductor import list_options

    return {EARLY: True} if EARLY in list_options() else None


def between(device: torch.device, compiles: bool | None) -> Between:
    """The functions for a call on a device. compiles: whether, where not by what there is."""
    if torch.is_grad_enabled():
        return AS_WRITTEN
    if compiles is None:
        compiles = device.type == "cuda" and find_spec("triton") is not None
    return compiled() if compiles else AS_WRITTEN
