"""Whether a small batch over NVLink is dispatched and computed in one kernel (`kernels.fused.few`), and what
a layer's reasons say of it. Ranks need not agree: peers see the same words, tokens and flags.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from imbrex.exchange.kernel_dispatcher import KernelDispatcher
from imbrex.exchange.nvlink_fit import DTYPE, why_not_whole
from imbrex.experts.experts import surely_fit
from imbrex.kernels.fused.few import MOST_TOKENS, why_slower

TWO = "two launches are asked for as well (experts.one_launch)"


def why_apart(
    dispatcher: KernelDispatcher, tokens: int, one_launch: bool | None, sizes: Sequence[int]
) -> str | None:
    """Why a small batch without gradients is to be dispatched by a launch of its own, or `None`. tokens: of
    the rank with most. one_launch: of the experts, whose number here, D and F are `sizes`."""
    if one_launch is False:
        return TWO
    if dispatcher.transport.one_kernel is not None:
        return None if dispatcher.transport.one_kernel else "that is asked for (one_kernel=False)"
    geometry = dispatcher.geometry
    return why_slower(tokens, tokens * geometry.top_k * geometry.tensor_parallel, sizes)


def about_one_kernel(dispatcher: KernelDispatcher, experts: Any, schedule: str, failed: str | None) -> str:
    """A clause about the kernel that dispatches a small batch and computes it, where a layer is to take it:
    `about_whole`'s. failed: why the last batch that was to take it did not, or `None`."""
    choice, why = dispatcher.transport.one_kernel, _why_never(dispatcher, experts, schedule)
    if choice is False or (why is not None and not choice):
        return ""
    if why is None and failed is not None:
        why = f"of the last size of a batch, {failed}"
    if choice:
        kind = "in the one, too" if why is None else "apart"
        return f"; its dispatch {kind}: one_kernel is asked for" + ("" if why is None else f", but {why}")
    sizes = experts.down_proj.shape
    reasons = [why_apart(dispatcher, 1 + more, None, sizes) for more in range(MOST_TOKENS)]
    limit, why = reasons.count(None), why or reasons[0]
    if why is not None:
        return f"; its dispatch apart: {why}"
    return f"; its dispatch in the one, too, up to {limit} token{'s' * (limit > 1)} a rank"


def _why_never(dispatcher: KernelDispatcher, experts: Any, schedule: str) -> str | None:
    """Why no batch of this schedule is dispatched and computed in one kernel, or `None`."""
    if schedule not in ("serial", "fused"):
        return f"schedule '{schedule}' takes steps apart"
    if not surely_fit(experts) or not experts.inputs_unchanged:
        return "experts are not imbrex's own, or a hook reads them"
    if experts.implementation != "kernels":
        return f"experts are computed by '{experts.implementation}', not by 'kernels'"
    if experts.one_launch is False:
        return TWO
    if dispatcher.observer.enabled:
        return "an observer times the steps"
    down_eDF = experts.down_proj
    if down_eDF.dtype != DTYPE:
        return "the experts' weights are not bfloat16"
    return why_not_whole(dispatcher.wire, dispatcher.placed, down_eDF.shape)
