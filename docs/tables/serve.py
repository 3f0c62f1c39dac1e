"""The tables of serving: steps of decoding, their parts, steps that draft."""

from __future__ import annotations

from collections.abc import Sequence

from docs.tables.results import Row, Table, read, select

WAYS = {
    "nvlink": "imbrex",
    "nvlink-fp8": "rows and experts in fp8",
    "nvlink-fp8-experts": "experts in fp8",
    "gather-scatter": "AllGather, ReduceScatter",
    "transformers": "the same, transformers' experts",
    "alltoall": "all-to-all",
    "alone": "data parallelism only",
    "alone-fp8": "the same, experts in fp8",
}
RIVALS = ("gather-scatter", "transformers", "alltoall", "alone")
NAMES = {
    "qwen3-30b-a3b": "Qwen3-30B-A3B",
    "deepseek-v3-8": "DeepSeek-V3's widths, 8 layers",
    "qwen3-30b-a3b-half": "Qwen3-30B-A3B, half of the experts",
    "deepseek-v3-8-half": "DeepSeek-V3's widths, 8 layers, half of the experts",
}
ONE_GPU = {
    "auto": "imbrex",
    "auto-fp8": "imbrex, fp8",
    "gather-scatter": "torch's grouped product",
    "transformers": "transformers' experts",
}
PARTS = {
    "experts": ("experts",),
    "attention": ("attention",),
    "projections": ("projections",),
    "choice and order": ("routing",),
    "norms, positions, logits": ("norms and positions", "logits"),
    "sums": ("sums",),
    "head": ("head",),
    "what a step counts": ("steps",),
}


def steps() -> Table:
    """Steps of decoding of two GPUs in ms, every way's newest beside the floor."""
    newest = {(r["impl"], _place(r)): r for r in read("serve") if _is_plain_step(r)}
    ways = [way for way in WAYS if any(impl == way for impl, _ in newest)]
    head = ["model", "rows a rank", "tokens before", *(WAYS[way] for way in ways), "over the best rival"]
    body, used = [], []
    for ours in sorted((r for (impl, _), r in newest.items() if impl == "nvlink"), key=_order):
        beside = {way: newest.get((way, _place(ours))) for way in ways}
        gain = _over_best(beside, read("serve"), "nvlink")
        times = ["" if row is None else f"{row['median_us'] / 1e3:.2f}" for row in beside.values()]
        floor = [f"{ours['floor_us'] / 1e3:.2f}", f"{ours['times_floor']:.2f}"]
        model, tokens, rows = _place(ours)
        body.append([NAMES[model], rows, tokens, *times, gain, *floor])
        used += [row for row in beside.values() if row]
    return Table(head=[*head, "floor", "of the floor"], body=body, rows=used)


LOOPS = {
    "auto": "imbrex",
    "auto kernels-fp8": "imbrex, experts in fp8",
    "alone": WAYS["alone"],
    "alone kernels-fp8": "data parallelism only, experts in fp8",
    "gather-scatter": WAYS["gather-scatter"],
}


def loops() -> Table:
    """Closed loops of users on two GPUs, the newest of each."""
    newest = {(r["impl"], *r["case"].items()): r for r in sorted(read("serve_loops"), key=lambda r: r["run"])}
    rows = sorted((r for r in newest.values() if r["impl"] in LOOPS), key=_loop_order)
    drafting, idle = any(r["case"]["drafts"] for r in rows), any("no_step_share" in r for r in rows)
    head = ["model", "tokens in, out", "users", "way", *["drafts (forced)"] * drafting, "tokens/s a GPU"]
    head += ["tokens/s a user", "ms a token, median, p99", *["no step ran, %"] * idle]
    body = []
    for row in rows:
        case, gap = row["case"], row["gap_ms"]
        drafts = f"{case['drafts']} ({case['forced']:g})" if case["drafts"] else "0"
        share = f"{100 * row['no_step_share']:.1f}" if "no_step_share" in row else ""
        load = [NAMES[case["model"]], f"{case['input']}, {case['output']}", case["users"], LOOPS[row["impl"]]]
        rates = [f"{row[name]:.0f}" for name in ("tokens_per_s_gpu", "tokens_per_s_user")]
        gaps = f"{gap['p50']:.1f}, {gap['p99']:.1f}"
        body.append([*load, *[drafts] * drafting, *rates, gaps, *[share] * idle])
    return Table(head=head, body=body, rows=rows)


def _loop_order(row: Row) -> tuple[int, ...]:
    """Loads stand together, and in them ways."""
    case = row["case"]
    load = case["input"], case["output"], case["users"]
    return list(NAMES).index(case["model"]), *load, list(LOOPS).index(row["impl"]), case["drafts"]


AIM = 1.3
"""How many times the tokens/s of the best rival were to be reached."""


PAIRS = {"bf16": ("nvlink", "alone"), "fp8": ("nvlink-fp8-experts", "alone-fp8")}
"""Experts that are spread, and whole on every rank."""


def reach() -> Table:
    """What a step reads by experts that are spread and by data parallelism alone, of one run, and what that
    leaves of the aim; beside it a GPU with half of the experts, of which nothing crosses."""
    head = ["model", "experts", "rows a rank", "tokens before", "GB read, spread", "GB read, alone"]
    head += ["ratio of the floors", "ratio of the steps", f"{AIM} wants a step within"]
    head += ["where nothing crosses"]
    body, used = [], []
    rows = [r for r in read("serve") if _is_plain_step(r)]
    halves = {_place(r): r for r in _one() if _is_plain_step(r) and r["impl"] == "auto"}
    for dtype, (spread, whole) in PAIRS.items():
        ours = {(r["run"], _place(r)): r for r in select(rows, impl=spread)}
        alone = {_place(r): r for r in select(rows, impl=whole) if (r["run"], _place(r)) in ours}
        for rival in sorted(alone.values(), key=_order):
            own = ours[rival["run"], _place(rival)]
            (model, tokens, count), us = _place(own), rival["median_us"]
            half = halves.get((f"{model}-half", tokens, count)) if dtype == "bf16" else None
            ratios = rival["read_gb"] / own["read_gb"], us / own["median_us"], us / AIM / own["floor_us"]
            still = f"{us / half['median_us']:.2f}" if half else ""
            figures = [f"{row['read_gb']:.1f}" for row in (own, rival)] + [f"{x:.2f}" for x in ratios]
            body.append([NAMES[model], dtype, count, tokens, *figures, still])
            used += [own, rival] + ([half] if half else [])
    return Table(head=head, body=body, rows=used)


def one_gpu_drafts() -> Table:
    """Steps of one GPU that draft, and what leaves of them."""
    return _drafts(read("serve_one"), ONE_GPU)


def two_gpu_drafts() -> Table:
    """The same on two GPUs."""
    return _drafts(read("serve"), WAYS)


def _drafts(rows: Sequence[Row], names: dict[str, str]) -> Table:
    """The newest steps that draft beside those without, of the same run or, where it has none, the newest."""
    head = ["way", "rows", "tokens before", "drafts", "forced", "step, ms", "tokens/s a GPU", "over none"]
    steps = sorted(select(rows, op="decode step"), key=lambda row: row["run"])
    newest = {(r["impl"], *r["case"].items()): r for r in steps if "drafts" in r["case"]}
    plain = {
        (r["impl"], *_place(r), run): r for r in steps if _is_plain_step(r) for run in (r["run"], "newest")
    }
    body, used = [], []
    for row in sorted(newest.values(), key=_draft_order):
        case, of = row["case"], (row["impl"], *_place(row))
        beside = plain.get((*of, row["run"])) or plain[*of, "newest"]
        gain = row["tokens_per_s_gpu"] / beside["tokens_per_s_gpu"]
        figures = [f"{row['median_us'] / 1e3:.1f}", row["tokens_per_s_gpu"], f"{gain:.2f}"]
        chosen = [names[row["impl"]], case["B"], case["context"], case["drafts"], case["forced"]]
        body.append([*chosen, *figures, f"{row['times_floor']:.2f}"])
        used += [row, beside]
    return Table(head=[*head, "of the floor"], body=body, rows=used)


def one_gpu() -> Table:
    """Steps of decoding of one GPU in ms, beside the floor."""
    steps = [r for r in _one() if _is_plain_step(r)]
    ways = [way for way in ONE_GPU if select(steps, impl=way)]
    head = ["model", "rows", *(ONE_GPU[way] for way in ways), "over the best of torch", "GB read", "floor"]
    head += ["of the floor"]
    body, used = [], []
    for ours in sorted(select(steps, impl="auto"), key=_order):
        beside = {way: next(iter(select(steps, impl=way, case=ours["case"])), None) for way in ways}
        gain = _over_best(beside, read("serve_one"), "auto")
        times = ["" if row is None else f"{row['median_us'] / 1e3:.2f}" for row in beside.values()]
        floor = [ours["read_gb"], f"{ours['floor_us'] / 1e3:.2f}", f"{ours['times_floor']:.2f}"]
        body.append([NAMES[ours["case"]["model"]], ours["case"]["B"], *times, gain, *floor])
        used += [row for row in beside.values() if row]
    return Table(head=head, body=body, rows=used)


def parts() -> Table:
    """What took how much of such a step, in ms."""
    rows = sorted((r for r in _one() if "parts_us" in r), key=_order)
    body = [
        [
            NAMES[r["case"]["model"]],
            r["case"]["B"],
            *(f"{sum(r['parts_us'].get(p, 0) for p in of) / 1e3:.2f}" for of in PARTS.values()),
        ]
        for r in rows
    ]
    return Table(head=["model", "rows", *PARTS], body=body, rows=rows)


def _one() -> list[Row]:
    """The rows of all runs of one GPU, which has no time for all in one; of equal ones the newest."""
    rows = sorted(read("serve_one"), key=lambda row: row["run"])
    return list({(row["op"], row["impl"], *row["case"].items()): row for row in rows}.values())


def _over_best(beside: dict[str, Row | None], rows: Sequence[Row], way: str) -> str:
    """The least factor of a rival's step over ours by `way` of the rival's own run; of runs without ours
    there is none."""
    ours = {(r["run"], *r["case"].items()): r["median_us"] for r in select(rows, op="decode step", impl=way)}
    rivals = [row for name, row in beside.items() if row and name in RIVALS]
    of_run = [(row["median_us"], ours.get((row["run"], *row["case"].items()))) for row in rivals]
    gains = [rival / own for rival, own in of_run if own]
    return f"{min(gains):.2f}" if gains else ""


def _is_plain_step(row: Row) -> bool:
    return row["op"] == "decode step" and "drafts" not in row["case"]


def _order(row: Row) -> tuple[int, int, int]:
    case = row["case"]
    return list(NAMES).index(case["model"]), case["context"], case["B"]


def _draft_order(row: Row) -> tuple[int, int, int, int]:
    return row["case"]["drafts"], *_order(row)


def _place(row: Row) -> tuple[str, int, int]:
    case = row["case"]
    return case["model"], case["context"], case["B"]
