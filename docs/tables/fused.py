"""The tables of fused.md and fused-kernels.md."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import mean
from typing import Any

from docs.tables.results import Row, Table, last_run, on, read, select

RIVALS = "nccl-a2a", "nccl-agrs-bag"
ORDER = ("qwen2-moe", "qwen3-30b-a3b", "deepseek-v3", "phi3.5-moe", "mixtral")
MODELS = ("qwen2-moe", "qwen3-30b-a3b", "deepseek-v3", "mixtral")
SHARES = [(ranks, model) for ranks in (2, 4) for model in MODELS]
STATIC = (4, 8, 16, 24, 32)
ROWS_FIRST = "rows at the wire's rate, then product"
WAYS = {
    "product": "alone",
    "two products": "alone",
    ROWS_FIRST: "before",
    "sums, then two products": "before",
    "gated movers, wire": "blocks",
    "sums beside": "blocks",
    "gated idle warps, wire": "idle",
}
HELD = {
    "imbrex-serial": "serial",
    "imbrex-fused": "fused",
    "imbrex-experts-alone": "experts alone",
    "imbrex-serial-local": "serial, nothing crosses",
    "imbrex-fused-local": "fused, nothing crosses",
}
FUSED_LOCAL = "imbrex-fused-local"
"""As many rows of every expert, all of its rank's own tokens."""
FIRST = "imbrex-fused-others-first-"
TRIED = {"imbrex-fused": "", "imbrex-fused-dy-before": "dy before", f"{FIRST}24": "others first"}
"""Of the divisions of roles that `auto` and `imbrex tune` try, those that the benchmark times."""
NOISE = 0.02
MOVERS, IDLE = "gated movers, wire", "gated idle warps, wire"


def rows() -> list[Row]:
    return last_run(read("fused_first"))


def layer(gpu: str, count: int) -> Table:
    """Serial and fused layers, their experts alone, and the faster rival over NCCL, on so many GPUs; of every
    case the newest run."""
    head = "model", "tokens", "", "serial", "fused", "gain", "tuned", "gain", "experts alone"
    head += "hidden", "of the wire", "rival"
    lines, used = [], []
    for (model, tokens, op), rows_of in newest(on(read("fused"), gpu, count)).items():
        serial, fused, alone = (rows_of[f"imbrex-{name}"] for name in ("serial", "fused", "experts-alone"))
        rival = fastest(rows_of[name] for name in RIVALS)
        tuned = fastest(rows_of[name] for name in TRIED if name in rows_of)
        used += [serial, fused, tuned, alone, rival]
        saved, beyond = (serial["median_us"] - row["median_us"] for row in (tuned, alone))
        times = [us(serial), us(fused), ratio(serial, fused, 2)]
        times += [f"{us(tuned)} {TRIED[tuned['impl']]}".strip(), ratio(serial, tuned, 2)]
        times += [us(alone), f"{saved / beyond:.0%}", of_the_wire(rows_of), ratio(rival, tuned, 2)]
        lines.append([model, tokens, op.replace("+backward", ", backward"), *times])
    return Table(head=head, body=lines, rows=used)


def newest(measured: Sequence[Row]) -> dict[tuple[str, int, str], dict[str, Row]]:
    """The rows of every case, by implementation, of the newest run in which rivals ran beside it."""
    found: dict[tuple[str, int, str], dict[str, Row]] = {}
    for row in sorted(select(measured, impl=RIVALS[0]), key=lambda row: row["run"]):
        share = select(measured, op=row["op"], run=row["run"], case=row["case"])
        found[row["case"]["model"], row["case"]["M"], row["op"]] = {r["impl"]: r for r in share}
    return dict(sorted(found.items(), key=lambda item: (-item[0][1], ORDER.index(item[0][0]), item[0][2])))


def others_first() -> Table:
    """Forwards with others' rows first, by the blocks that sum them, beside serial and fused ones."""
    measured = [row for row in read("fused") if row["op"] == "forward"]
    tried = sorted({int(r["impl"].removeprefix(FIRST)) for r in measured if r["impl"].startswith(FIRST)})
    lines, used = [], []
    for row in select(measured, impl=f"{FIRST}24"):
        its = {r["impl"]: r for r in measured if (r["run"], r["case"]) == (row["run"], row["case"])}
        shown = [its.get(name) for name in ("imbrex-serial", "imbrex-fused", *(f"{FIRST}{n}" for n in tried))]
        used += [r for r in shown if r is not None]
        gpu = row["measured"]["hardware"]["gpu"].split()[1]
        cells = [us(r) if r is not None else "" for r in shown]
        lines.append([row["case"]["model"], row["case"]["M"], f"{row['case']['W']} {gpu}", *cells])
    head = ["model", "tokens", "GPUs", "serial", "fused", *(f"n = {n}" for n in tried)]
    return Table(head=head, body=lines, rows=used)


def of_the_wire(rows_of: dict[str, Row]) -> str:
    """Comet's measure of what is hidden: the share of what serial takes longer with the wire than without.
    Empty where that is less than `NOISE` of serial."""
    if FUSED_LOCAL not in rows_of:
        return ""
    names = "imbrex-serial", "imbrex-fused", "imbrex-serial-local", FUSED_LOCAL
    serial, fused, serial_local, fused_local = (rows_of[name]["median_us"] for name in names)
    wire = serial - serial_local
    return f"{1 - (fused - fused_local) / wire:.0%}" if wire >= NOISE * serial else ""


def fastest(found: Iterable[Row]) -> Row:
    return min(found, key=lambda row: row["median_us"])


def ratio(slow: Row, fast: Row, digits: int = 3) -> str:
    return f"{slow['median_us'] / fast['median_us']:.{digits}f}"


def us(row: Row) -> str:
    return f"{row['median_us']:.0f}"


def gradient() -> Table:
    """The gradient through down (SwiGLU's, to D = 4096) whose rows come over the wire."""
    head = ("model", "wire", "product", "rows, then product", "blocks move (how many)")
    lines, used = [], []
    for model in MODELS:
        share = select(rows(), op="down_gradient", case={"model": model, "ep": 2})
        alone, before, blocks = picked = [
            fastest(select(share, impl=n)) for n in ("product", ROWS_FIRST, MOVERS)
        ]
        used += picked
        wire, many = f"{alone['case']['wire_us']:.0f}", blocks["case"]["movers"]
        lines.append([model, wire, us(alone), us(before), f"{us(blocks)} ({many}), {ratio(before, blocks)}"])
    return Table(head=head, body=lines, rows=used)


def rows_out() -> Table:
    """Gate and up whose rows come over the wire: before the product, by some blocks, by idle warps."""
    head = (
        "model",
        "ranks",
        "wire",
        "product",
        "rows, then product",
        "blocks move (how many)",
        "idle warps move",
    )
    lines, used = [], []
    for ranks, model in SHARES:
        share = select(rows(), op="gate_up", case={"model": model, "ep": ranks})
        names = ("product", ROWS_FIRST, MOVERS, IDLE)
        alone, before, blocks, idle = picked = [fastest(select(share, impl=name)) for name in names]
        used += picked
        by_blocks = f"{us(blocks)} ({blocks['case']['movers']}), {ratio(before, blocks)}"
        wire = f"{alone['case']['wire_us']:.0f}"
        lines.append(
            [model, ranks, wire, us(alone), us(before), by_blocks, f"{us(idle)}, {ratio(before, idle)}"]
        )
    return Table(head=head, body=lines, rows=used)


def movers() -> Table:
    """Single blocks, of which the first n move rows before they multiply, over rows before the product."""
    head = ("model", "ranks", *(f"n = {n}" for n in STATIC), "idle warps")
    lines, used = [], []
    for ranks, model in SHARES:
        share = select(rows(), op="gate_up", case={"model": model, "ep": ranks, "blocks": "single"})
        before = select(share, impl=ROWS_FIRST)[0]
        ways = [select(share, impl=MOVERS, case={"movers": n})[0] for n in STATIC]
        ways.append(select(share, impl=IDLE)[0])
        used += [before, *ways]
        lines.append([model, ranks, *(ratio(way, before, 2) for way in ways)])
    return Table(head=head, body=lines, rows=used)


def waits() -> Table:
    """Waits with full counters, over the product without any."""
    head = ("model", "ranks", "gate and up, single blocks", "gate and up, pairs", "gradient through down")
    lines, used = [], []
    for ranks, model in SHARES:
        cells: list[Any] = [model, ranks]
        share = select(rows(), case={"model": model, "ep": ranks})
        for op, blocks in (
            ("gate_up", ("single",)),
            ("gate_up", ("pairs",)),
            ("down_gradient", ("turns", "pairs")),
        ):
            found = [row for row in select(share, op=op) if row["case"].get("blocks") in blocks]
            pair = [*select(found, impl="full counters"), *select(found, impl="product")]
            used += pair
            cells.append(ratio(pair[0], pair[1]) if pair else "")
        lines.append(cells)
    return Table(head=head, body=lines, rows=used)


def home() -> Table:
    """Sums of the rank's rows, as dx goes home, beside both weights' gradients."""
    head = (
        "model",
        "ranks",
        "two products",
        "sums",
        "one after the other",
        "sums, then one launch",
        "beside, n = 0, 16, 24",
    )
    lines, used = [], []
    for ranks, model in SHARES:
        share = select(rows(), op="home", case={"model": model, "ep": ranks})
        names = ("two products", "sums, 16 warps a block", "sums, then two products", "sums, then one launch")
        first = [select(share, impl=name)[0] for name in names]
        form = {"step_bytes": 4096}
        ways = [select(share, impl="sums beside", case=form | {"movers": n})[0] for n in (0, 16, 24)]
        used += [*first, *ways]
        cells = f"{', '.join(map(us, ways))}: {', '.join(ratio(first[2], way) for way in ways)}"
        lines.append([model, ranks, *map(us, first), cells])
    return Table(head=head, body=lines, rows=used)


def sums() -> Table:
    """GB/s that an SM reads while eight of them sum, by form of the summing warps."""
    found = select(rows(), op="sums", case={"sms": 8})
    shares = list(dict.fromkeys((row["case"]["model"], row["case"]["ep"]) for row in found))
    form = ("warps", "slots", "step_bytes", "lists")
    forms = list(dict.fromkeys(tuple(row["case"][name] for name in form) for row in found))
    lines = []
    for values in forms:
        case = dict(zip(form, values, strict=True))
        cells = [select(found, case=case | {"model": model, "ep": ranks})[0] for model, ranks in shares]
        lines.append([*values, *(f"{row['read_gbps_per_sm']:.0f}" for row in cells)])
    names = [f"{model}, {ranks} ranks" for model, ranks in shares]
    return Table(head=("warps", "slots", "bytes of a slot", "open tokens", *names), body=lines, rows=found)


def sustained() -> Table:
    """Every way for a second, at the clock that it has then; two figures: measured twice."""
    head = (
        "product",
        "model",
        "alone",
        "before it",
        "16 or 24 blocks",
        "idle warps",
        "before / blocks",
        "before / idle",
    )
    lines, used = [], []
    for op, name in (("gate_up sustained", "gate and up"), ("home sustained", "both weights")):
        for model in ("qwen2-moe", "deepseek-v3", "mixtral"):
            share = [
                row for row in select(rows(), op=op, case={"model": model}) if row["case"].get("movers") != 8
            ]
            by_way: dict[str, list[Row]] = {}
            for row in share:
                by_way.setdefault(WAYS[row["impl"]], []).append(row)
            used += share
            cells = [_twice(by_way.get(way, ())) for way in ("alone", "before", "blocks", "idle")]
            gains = [_mean_ratio(by_way["before"], by_way.get(way, ())) for way in ("blocks", "idle")]
            lines.append([name, model, *cells, *gains])
    return Table(head=head, body=lines, rows=used)


def held() -> Table:
    """Forwards for seconds, one after the other: their time, what the card draws, and joules of a call."""
    head = "model", "", "us", "W", "J of a call"
    measured = last_run(select(read("fused"), op="forward, held"))
    lines = [
        [
            row["case"]["model"],
            HELD[row["impl"]],
            f"{row['mean_us']:.0f}",
            f"{row['watts']:.0f}",
            f"{row['joules']:.3f}",
        ]
        for row in measured
        if row["impl"] in HELD
    ]
    return Table(head=head, body=lines, rows=measured)


def _twice(found: Sequence[Row]) -> str:
    if not found:
        return ""
    return f"{', '.join(map(us, found))} us at {mean(row['mhz'] for row in found):.0f} MHz"


def _mean_ratio(slow: Sequence[Row], fast: Sequence[Row]) -> str:
    if not fast:
        return ""
    return f"{mean(row['median_us'] for row in slow) / mean(row['median_us'] for row in fast):.3f}"
