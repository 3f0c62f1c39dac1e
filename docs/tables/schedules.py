"""The tables of schedules.md."""

from __future__ import annotations

from docs.tables.results import Row, Table, last_run, read, select

TITLES = {"qwen2-moe": "Qwen2-MoE", "deepseek-v3": "DeepSeek-V3"}
CHUNKS = ("serial", "optsche-1", "optsche-2", "optsche-4")
NAMES = {"identity": "bfloat16"}
JOINED = ("serial", "optsche-2", "optsche-2-joined", "optsche-4", "optsche-4-joined")


def order_loss() -> Table:
    """How much longer than the best order `optsche` takes on random times."""
    rows = select(read("schedule"), op="order-loss")
    sizes = sorted({row["case"]["chunks"] for row in rows})
    lines = []
    for family in dict.fromkeys(row["case"]["family"] for row in rows):
        by_size = {row["case"]["chunks"]: row for row in select(rows, case={"family": family})}
        lines.append([family, *(loss(by_size[size]) for size in sizes)])
    return Table(head=["times", *(f"{size} chunks" for size in sizes)], body=lines, rows=rows)


def loss(row: Row) -> str:
    if not row["worse_share"]:
        return "0"
    return f"{row['mean_percent']:.1f} %, {row['max_percent']:.0f} % ({row['worse_share']:.0%})"


def two_nodes() -> Table:
    """Every schedule between two nodes of one rank."""
    rows = last_run(select(read("schedule"), op="layer", case={"network": "netlab"}))
    rows = [row for row in read("schedule") if row["run"] == rows[0]["run"]]
    lines = [
        [f"`{impl}`", *(f"{us_of(rows, impl, op) / 1e3:.1f}" for op in ("layer-forward", "layer-backward"))]
        for impl in dict.fromkeys(row["impl"] for row in rows)
    ]
    return Table(head=["schedule", "forward, ms", "backward, ms"], body=lines, rows=rows)


def us_of(rows: list[Row], impl: str, op: str) -> float:
    (row,) = select(rows, impl=impl, op=op)
    return row["median_us"]


def four_gpus() -> Table:
    """Chunks over NCCL: between nodes of two GPUs, and on plain NVLink."""
    networks = {"nccl-2x2": "2 + 2 over sockets", "nvlink": "NVLink"}
    names = ("serial", "optsche-2", "optsche-4", "optsche-8")
    lines, used = [], []
    for network, title in networks.items():
        of_network = select(read("schedule"), case={"network": network, "transport": "alltoall"})
        for codec in dict.fromkeys(row["case"]["codec"] for row in of_network):
            rows = select(of_network, case={"codec": codec})
            cells = (both_ways(rows, name) for name in names)
            lines.append([f"{title}, {NAMES.get(codec, codec)}", *cells])
            used += rows
    return Table(head=["network, codec", *(f"`{name}`" for name in names)], body=lines, rows=used)


def both_ways(rows: list[Row], impl: str) -> str:
    if not select(rows, impl=impl):
        return ""
    return " + ".join(f"{us_of(rows, impl, f'layer-{way}') / 1e3:.1f}" for way in ("forward", "backward"))


def nvlink() -> Table:
    """Chunks over the kernels: milliseconds, and times `serial`."""
    rows, lines = select(read("schedule"), case={"network": "nvlink", "transport": "nvlink"}), []
    cases = dict.fromkeys((row["case"]["W"], row["case"]["model"], row["case"]["M"]) for row in rows)
    for ranks, model, tokens in sorted(cases, key=lambda case: case[0]):
        mine = select(rows, case={"W": ranks, "model": model, "M": tokens})
        for op, title in (("layer-forward", "forward"), ("layer", "and backward")):
            serial = us_of(mine, "serial", op)
            times = [us_of(mine, name, op) for name in CHUNKS]
            cells = (f"{us / 1e3:.2f} ({us / serial:.2f})" for us in times[1:])
            lines.append([ranks, f"{TITLES[model]}, {tokens}", title, f"{serial / 1e3:.2f}", *cells])
    head = ["GPUs", "layer, tokens", "pass", *(f"`{name}`" for name in CHUNKS)]
    return Table(head=head, body=lines, rows=rows)


def weights_in_the_waits() -> Table:
    """The backward with the weights' gradients as a task of their own, or joined to the rows'."""
    rows = select(read("schedule"), op="layer-backward", case={"network": "nccl-1x1"})
    lines = []
    for case in {repr(row["case"]): row["case"] for row in rows}.values():
        experts = "fused kernels" if "experts" in case else "grouped products"
        mine = [row for row in rows if row["case"] == case]
        cells = (f"{us_of(mine, name, 'layer-backward') / 1e3:.1f}" for name in JOINED)
        lines.append([f"{experts}, {NAMES.get(case['codec'], case['codec'])}", *cells])
    head = ["experts, codec", "`serial`", "`optsche-2`", "joined", "`optsche-4`", "joined"]
    return Table(head=head, body=sorted(lines), rows=rows)
