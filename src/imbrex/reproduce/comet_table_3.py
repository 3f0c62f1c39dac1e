"""Comet's table 3: memory that peers see, of a layer's exchange."""

from __future__ import annotations

from imbrex.bench.shapes import MODELS
from imbrex.kernels.exchange.layout import layout
from imbrex.placement import contiguous
from imbrex.reproduce import chart
from imbrex.reproduce.frame import Finding, Options
from imbrex.transport.nvlink import Size

PAPER_MB = {
    ("mixtral", 4096): 32,
    ("qwen2-moe", 4096): 16,
    ("phi3.5-moe", 4096): 32,
    ("mixtral", 8192): 64,
    ("qwen2-moe", 8192): 32,
    ("phi3.5-moe", 8192): 64,
}
RANKS = (2, 4, 8)


def heap_mb(model: str, tokens: int, ranks: int) -> tuple[float, float]:
    """MiB of a rank's heap for `tokens` of all ranks, evenly, in bfloat16, as `Nvlink` makes it; and how many
    of them are room for calls of few tokens, which come in one kernel."""
    shape = MODELS[model]
    size = Size(
        rank_offsets=contiguous(shape.num_experts, ranks).rank_offsets,
        tensor=1,
        experts=shape.num_experts,
        choices=shape.top_k,
        row_bytes=2 * shape.hidden_size,
    )
    parts = layout(size.shape(tokens // ranks), compact=size.compact)
    return parts.nbytes / 2**20, (parts.values - parts.small_ids) / 2**20


def find(options: Options) -> Finding:
    table, rows, ratios, main = [], [], [], []
    for (model, tokens), paper in PAPER_MB.items():
        ours = [heap_mb(model, tokens, ranks) for ranks in RANKS]
        table.append((model, str(tokens), str(paper), *(f"{mb:.0f} ({few:.0f})" for mb, few in ours)))
        ratios += [mb / paper for mb, _ in ours]
        main += [(mb - few) / paper for mb, few in ours]
        for ranks, (mb, _) in zip(RANKS, ours, strict=True):
            case = {"model": model, "M": tokens, "W": ranks}
            rows.append(
                {"op": "heap", "impl": "imbrex", "case": case, "mib": round(mb, 1), "paper_mb": paper}
            )
    return Finding(
        title="Comet, table 3: memory that peers see",
        question="How much memory does the exchange of a layer hold, besides the layer's own?",
        head=("model", "M", "Comet, MB", *(f"imbrex, {ranks} ranks" for ranks in RANKS)),
        table=tuple(table),
        differs=(
            "Computed from the layout that the kernels are given, which is the same on every machine. One "
            "heap serves all layers of a size.",
            "In brackets: the parts of it that calls of few tokens use, which come in one kernel.",
        ),
        verdict=(
            f"Ours is {min(ratios):.1f} to {max(ratios):.1f} times Comet's 2 M N bytes. Without the room for "
            f"calls of few tokens it is {max(main):.1f} times at most: tokens and the sums of "
            "peers have two buffers, so that no call waits for a barrier behind the one before.",
        ),
        rows=rows,
        chart=chart.bars(
            {
                f"{model} {tokens}": {"Comet": paper, "imbrex, 8 ranks": heap_mb(model, tokens, 8)[0]}
                for (model, tokens), paper in PAPER_MB.items()
            },
            "MB",
        ),
    )
