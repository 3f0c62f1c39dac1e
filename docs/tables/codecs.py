"""The tables and the picture of codecs.md."""

from __future__ import annotations

import torch
from docs.tables.results import Row, Table, read, select, sources

from imbrex.codec import CODECS, make
from imbrex.reproduce import convergence

WIDTH = 7168
SHOWN_RATES = ("4", "8", "12", "16")
COLUMNS = [(op, dtype) for dtype in ("bfloat16", "float32") for op in ("encode", "decode")]


def of_kernels() -> list[Row]:
    return select(read("codecs"), impl="imbrex", case={"D": WIDTH})


def shares() -> dict[str, dict[tuple[str, str], float]]:
    """Rate over a copy's, by codec, then by direction and dtype."""
    found: dict[str, dict[tuple[str, str], float]] = {}
    for row in of_kernels():
        found.setdefault(row["case"]["codec"], {})[row["op"], row["case"]["dtype"]] = row["share"]
    return found


def rates() -> str:
    """A line per codec: bytes of a row, bound, share of a copy's rate by direction and dtype."""
    share, lines = shares(), []
    for name in (name for name in CODECS if name in share):
        if name.startswith("zfp") and name.split("-")[1] not in SHOWN_RATES:
            continue
        codec = make(name)
        stated = codec.nbytes(WIDTH, torch.bfloat16), f"{codec.error_bound(1.0, torch.float32):.2g}"
        cells = (f"{share[name][column]:.0%}" if column in share[name] else "" for column in COLUMNS)
        lines.append([f"`{name}`", *stated, *cells])
    head = ["codec", f"bytes of a row of {WIDTH}", "bound", *(f"{op}, {dtype}" for op, dtype in COLUMNS)]
    return f"{Table(head=head, body=lines, rows=of_kernels())}\n\n{slowest(share)}"


def slowest(share: dict[str, dict[tuple[str, str], float]]) -> str:
    """A sentence: which of ZFP's rates is slowest, each way."""
    found = []
    for op in ("encode", "decode"):
        value, name, dtype = min(
            (value, name, dtype)
            for name, of in share.items()
            for (way, dtype), value in of.items()
            if way == op and name.startswith("zfp")
        )
        found.append(f"{op} {value:.0%} (`{name}`, {dtype})")
    return f"The slowest of ZFP's 26 rates: {', '.join(found)}."


def trainings() -> list[Row]:
    """A result for every training, as `reproduce.training` returns it."""
    return [{**row, "variant": row["impl"], "seed": row["case"]["seed"]} for row in read("convergence")]


def learning() -> str:
    """A line per variant, the least loss first: held-out loss, and its difference from none, seed by seed."""
    results = trainings()
    means = {one.variant: one.mean for one in convergence.learned(results)}
    lines = convergence.summary(sorted(results, key=lambda result: means[result["variant"]]))
    return "\n".join([*lines, "", sources(results)])
