"""The table of huggingface.md: steps of whole models."""

from __future__ import annotations

from statistics import geometric_mean

from docs.tables.results import Row, Table, read, select

THEIRS = ("transformers-ddp", "transformers-fsdp2", "transformers-ep")
SWITCH = "imbrex-ep"


def cases() -> list[dict[str, Row]]:
    """The complete steps by side, a case each: those of the last run in which imbrex raced one of the others,
    and behind their switch the last of all."""
    steps = select(read("models"), op="step")
    found: dict[tuple[str, int], dict[int, dict[str, Row]]] = {}
    for row in steps:
        runs = found.setdefault((row["case"]["model"], row["case"]["T"]), {})
        runs.setdefault(row["run"], {})[row["impl"]] = row
    whole = []
    for runs in found.values():
        races = [sides for sides in runs.values() if "imbrex" in sides and sides.keys() & set(THEIRS)]
        if races:
            for sides in runs.values():
                races[-1].update((name, row) for name, row in sides.items() if name == SWITCH)
            whole.append(races[-1])
    return whole


def gain(sides: dict[str, Row]) -> float:
    best = min(sides[name]["median_us"] for name in THEIRS if name in sides)
    return best / sides["imbrex"]["median_us"]


def steps() -> Table:
    head = ("model, layers", "tokens", "DDP", "FSDP2", "their EP", "their switch", "blocks", "gain", "GiB")
    lines, used = [], []
    for sides in cases():
        case, names = sides["imbrex"]["case"], (*THEIRS, SWITCH, "imbrex")
        times = [f"{sides[n]['median_us'] / 1e3:.1f}" if n in sides else "-" for n in names]
        memory = [
            f"{sides[n]['peak_gib']:.1f}" if n in sides else "-"
            for n in ("transformers-ep", SWITCH, "imbrex")
        ]
        used += [sides[name] for name in names if name in sides]
        cells = (f"{case['model']}, {case['layers']}", case["T"], *times, f"{gain(sides):.2f}")
        lines.append([*cells, ", ".join(memory)])
    return Table(head=head, body=lines, rows=used)


def mean() -> str:
    """A sentence: how much faster in the mean than the best of transformers' own ways."""
    gains = [gain(sides) for sides in cases()]
    return (
        f"Over the best of transformers' own ways a step with replaced blocks is {geometric_mean(gains):.2f} "
        f"times as fast in the geometric mean of these {len(gains)} cases."
    )
