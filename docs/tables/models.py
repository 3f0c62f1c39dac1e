"""The tables of huggingface.md: steps and prefills of models."""

from __future__ import annotations

from dataclasses import replace
from statistics import geometric_mean

from docs.tables.results import Row, Table, read, select

DDP, FSDP2, EP = THEIRS = ("transformers-ddp", "transformers-fsdp2", "transformers-ep")
SWITCH = "imbrex-ep"
FASTEST = {DDP, EP}
"""The sides one of which is the fastest of transformers' own: FSDP2 never was."""


def races(op: str) -> list[list[dict[str, Row]]]:
    """Complete steps, or prefills, in which imbrex raced one of the others: a case each, by run and side."""
    found: dict[tuple[str, int, int], dict[int, dict[str, Row]]] = {}
    for row in select(read("models"), op=op):
        case = row["case"]
        runs = found.setdefault((case["model"], case["layers"], case["T"]), {})
        runs.setdefault(row["run"], {})[row["impl"]] = row
    return [list(runs.values()) for runs in found.values()]


def cases(op: str) -> list[dict[str, Row]]:
    """Of every case the race with the most of `FASTEST`, the last of equals; and behind their switch the last
    row of all."""
    whole = []
    for runs in races(op):
        raced = [sides for sides in runs if "imbrex" in sides and sides.keys() & set(THEIRS)]
        if raced:
            sides = max(reversed(raced), key=lambda sides: len(sides.keys() & FASTEST))
            last = [others[SWITCH] for others in runs if SWITCH in others]
            whole.append(sides | ({SWITCH: last[-1]} if last else {}))
    return whole


def sharded() -> Table:
    """Steps by FSDP2 that were timed in a run of their own, on another host."""
    shown = [sides.get(FSDP2) for sides in cases("step")]
    lines, used = [], []
    for sides in (sides for runs in races("step") for sides in runs):
        if FSDP2 in sides and "imbrex" in sides and sides[FSDP2] not in shown:
            case = sides["imbrex"]["case"]
            names = (DDP, FSDP2, "imbrex")
            times = [f"{sides[name]['median_us'] / 1e3:.1f}" if name in sides else "-" for name in names]
            lines.append([f"{case['model']}, {case['layers']}", case["T"], *times])
            used += [sides[name] for name in names if name in sides]
    return Table(head=("model, layers", "tokens", "DDP", "FSDP2", "blocks"), body=lines, rows=used)


def compiled() -> Table:
    """A step of a training as it is and by `torch.compile(model)`, on several GPUs."""
    lines, used = [], []
    for sides in (sides for runs in races("step") for sides in runs):
        pairs = [(name, f"{name}-compiled") for name in (DDP, "imbrex") if f"{name}-compiled" in sides]
        if len(pairs) < 2:
            continue
        rows = [sides[name] for pair in pairs for name in pair]
        case, times = rows[0]["case"], [row["median_us"] / 1e3 for row in rows]
        gains = [f"{times[0] / times[1]:.2f}, {times[2] / times[3]:.2f}", f"{times[1] / times[3]:.2f}"]
        name = f"{case['model']}, {case['layers']}"
        lines.append([name, case["W"], case["T"], *(f"{ms:.1f}" for ms in times), *gains])
        used += rows
    head = ("model, layers", "GPUs", "tokens", "DDP", "compiled", "blocks", "compiled", "compiling gains")
    return Table(head=(*head, "blocks over DDP, compiled"), body=lines, rows=used)


def gain(sides: dict[str, Row], side: str = "imbrex") -> float:
    best = min(sides[name]["median_us"] for name in THEIRS if name in sides)
    return best / sides[side]["median_us"]


def steps() -> Table:
    """Steps of a training, with the peak of a rank's memory."""
    table = _times("step")
    lines = []
    for cells, sides in zip(table.body, cases("step"), strict=True):
        names = ("transformers-ep", SWITCH, "imbrex")
        memory = (f"{sides[n]['peak_gib']:.1f}" if n in sides else "-" for n in names)
        lines.append([*cells, ", ".join(memory)])
    return replace(table, head=[*table.head, "GiB"], body=lines)


def prefill() -> Table:
    """Prefills, of few layers and of whole models."""
    return _times("prefill")


def _times(op: str) -> Table:
    """Milliseconds by case and side, and the gain over the best of transformers' own."""
    head = ("model, layers", "tokens", "DDP", "FSDP2", "their EP", "their switch", "blocks", "gain")
    lines, used = [], []
    for sides in cases(op):
        case, names = sides["imbrex"]["case"], (*THEIRS, SWITCH, "imbrex")
        times = [f"{sides[n]['median_us'] / 1e3:.1f}" if n in sides else "-" for n in names]
        used += [sides[name] for name in names if name in sides]
        lines.append([f"{case['model']}, {case['layers']}", case["T"], *times, f"{gain(sides):.2f}"])
    return Table(head=head, body=lines, rows=used)


def tokens() -> Table:
    """Milliseconds of a token of greedy answers, as models are and captured."""
    sides = {"transformers": "transformers", "transformers-ep": "their EP", "imbrex": "blocks"}
    found: dict[tuple[str, int, int, int], dict[str, Row]] = {}
    for row in read("captured"):
        case = row["case"]
        found.setdefault((case["model"], case["layers"], case["W"], case["B"]), {})[row["impl"]] = row
    sides = {name: title for name, title in sides.items() if any(name in of for of in found.values())}
    lines, used = [], []
    for (model, layers, world, batch), of in sorted(found.items()):
        graph, eager = of["imbrex-captured"], [of[name] for name in sides if name in of]
        times = [f"{of[name]['median_us'] / 1e3:.1f}" if name in of else "-" for name in sides]
        times.append(f"{graph['median_us'] / 1e3:.1f}")
        best = min(row["median_us"] for row in eager) / graph["median_us"]
        lines.append([f"{model}, {layers}", world, batch, *times, f"{best:.1f}"])
        used += [*eager, graph]
    head = ("model, layers", "GPUs", "sequences a rank", *sides.values(), "captured", "gain")
    return Table(head=head, body=lines, rows=used)


def mean() -> str:
    """A sentence: how much faster in the mean than the best of transformers' own ways, where DDP ran too."""
    raced = [sides for sides in cases("step") if "transformers-ddp" in sides]
    by_tokens = []
    for tokens in sorted({sides["imbrex"]["case"]["T"] for sides in raced}):
        gains = [gain(sides) for sides in raced if sides["imbrex"]["case"]["T"] == tokens]
        by_tokens.append(f"{geometric_mean(gains):.2f} at {tokens}")
    switched = geometric_mean(gain(sides, SWITCH) for sides in raced if SWITCH in sides)
    return (
        "Over the best of transformers' own ways a step with replaced blocks is "
        f"{geometric_mean(gain(sides) for sides in raced):.2f} times as fast in the geometric mean of the "
        f"{len(raced)} cases with DDP, {' and '.join(by_tokens)} tokens a rank; "
        f"behind their switch {switched:.2f}."
    )
