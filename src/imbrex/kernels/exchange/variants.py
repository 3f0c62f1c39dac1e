"""The kernels of the exchange, and the threads of their blocks."""

from __future__ import annotations

from dataclasses import replace

from imbrex.kernels import jit
from imbrex.kernels.exchange import layout as lay

MOVER_THREADS = 96
PULL_THREADS = MOVER_THREADS + 32 * 8
REDUCE_THREADS = 32 * lay.REDUCE_WARPS
ROUTE_THREADS, ROUTE_MANY_THREADS = 1024, 128
BESIDE_THREADS, BEFORE_THREADS = 256, 512
"""Threads that route in a kernel that also pushes, and in one that then pulls."""
EXPERT_THREADS = PULL_THREADS + BEFORE_THREADS
STAGE_THREADS, STAGE_AGAIN_THREADS = 32 * 8 + BEFORE_THREADS, 32 * 8 + 256


def shipped_variants() -> list[jit.Variant]:
    return [
        ROUTE,
        ROUTE_MANY,
        *PUSH.values(),
        *DISPATCH.values(),
        EXPERT,
        *STAGE.values(),
        *STAGE_AGAIN.values(),
        PULL,
        SMALL,
        *REDUCE.values(),
        GATHER,
    ]


ROUTE = jit.Variant(source="routing/route.cu", entry="route_choices")
ROUTE_MANY = jit.Variant(
    source="routing/route.cu",
    entry="route_choices",
    defines=(("MOST_OWNERS", lay.MAX_RANKS), ("ROUTE_THREADS", 128), ("ROUTE_FIRST", 0)),
)
"""The routing kernel for more ranks than can exchange rows."""
PUSH = {
    quantise: jit.Variant(
        source="exchange/push.cu",
        entry="push_rows",
        defines=(("QUANTISE", int(quantise)), ("LAG", 1 if quantise else 2)),
    )
    for quantise in (False, True)
}
DISPATCH = {
    quantise: jit.Variant(source="exchange/dispatch.cu", entry="dispatch_rows", defines=push.defines)
    for quantise, push in PUSH.items()
}
SMALL = jit.Variant(source="exchange/small.cu", entry="dispatch_small")
EXPERT = jit.Variant(source="exchange/expert.cu", entry="dispatch_expert")
STAGE = {
    fp8: jit.Variant(source="exchange/stage.cu", entry="route_and_stage", defines=(("WIRE_FP8", int(fp8)),))
    for fp8 in (False, True)
}
STAGE_AGAIN = {
    fp8: jit.Variant(source="exchange/stage_again.cu", entry="stage_again", defines=(("WIRE_FP8", int(fp8)),))
    for fp8 in (False, True)
}
PULL = jit.Variant(source="exchange/pull.cu", entry="pull_rows")
REDUCE = {
    fp8: jit.Variant(source="exchange/reduce.cu", entry="reduce_rows", defines=(("WIRE_FP8", int(fp8)),))
    for fp8 in (False, True)
}
REDUCE_BEHIND = replace(REDUCE[False], defines=(*REDUCE[False].defines, ("BEHIND_DISPATCH", 1)))
"""Sums right behind a launch that dispatches and computes as well."""
DEPENDENT = frozenset((SMALL, REDUCE_BEHIND, *REDUCE.values()))
"""Kernels that may begin before the one before them has ended, and wait for it themselves."""
GATHER = jit.Variant(source="exchange/gather.cu", entry="gather_sums")
