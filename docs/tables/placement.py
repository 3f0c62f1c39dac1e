"""The tables of placement.md."""

from __future__ import annotations

from collections.abc import Iterable

from docs.tables.results import Row, Table, last_run, read, select

POLICIES = {
    ("none", 64): "experts in order",
    ("deepseek", 68): "DeepSeek's EPLB, 4 extra slots, replicas in turn",
    ("balanced", 68): "this plan and split, 4 extra slots",
}
LINES = {"none": "no balancer", "stale": "stale plan", "online": "online", "hindsight": "hindsight"}
VARIANTS = {"off": "off", "nothing_to_do": "on, nothing to do", "two_experts": "experts moving"}


def rows_of(op: str) -> list[Row]:
    """The rows of the last run that has some."""
    return last_run(select(read("placement"), op=op))


def halves() -> Table:
    """Imbalance on the second half of a task, by policy and tokens a batch."""
    rows, lines, used = rows_of("second_half"), [], []
    for task in dict.fromkeys(row["case"]["task"] for row in rows):
        for (impl, slots), about in POLICIES.items():
            mine = select(rows, impl=impl, case={"task": task, "S": slots})
            mine.sort(key=lambda row: row["case"]["batch"])
            lines.append([f"{task}: {about}", *(f"{row['imbalance']:.4f}" for row in mine)])
            used += mine
    return Table(head=["tokens a batch, all ranks", "128", "512", "2048"], body=lines, rows=used)


def scale() -> Table:
    """Imbalance of batches of 512 tokens under the balanced split, mean over tasks and layers."""
    rows, lines = select(rows_of("at_scale"), case={"batch": 512}), []
    impls = {"deepseek": "DeepSeek's placement", "even_plan": "plan for even shares", "balanced": "this plan"}
    known = ["balanced", *(["in_sample"] if select(rows, impl="in_sample") else [])]
    for ranks, slots in dict.fromkeys((row["case"]["W"], row["case"]["S"]) for row in rows):
        cells = []
        for impl in impls:
            mine = select(rows, impl=impl, case={"W": ranks, "S": slots})
            mean = sum(row["imbalance"] for row in mine) / max(len(mine), 1)
            cells.append(f"{mean:.4f}" if mine else "slots uneven")
        for impl in known:
            ours = select(rows, impl=impl, case={"W": ranks, "S": slots})
            cells.append(f"{sum(row['over_bound'] for row in ours) / len(ours):.3f}")
            cells.append(f"{max(row['worst_over_bound'] for row in ours):.3f}")
        lines.append([f"{ranks}, {slots}", *cells])
    over = ["this plan over the lowest possible", "planned from these batches"][: len(known)]
    head = ["ranks, slots", *impls.values(), *(word for one in over for word in (one, "its worst layer"))]
    return Table(head=head, body=lines, rows=rows)


def unseen() -> Table:
    """What of the excess over the lowest possible is of what: means and worst layers, batches of 512."""
    rows = select(rows_of("at_scale"), case={"batch": 512})
    steady, lines, used = rows_of("without_drift"), [], []
    for ranks, slots in dict.fromkeys((row["case"]["W"], row["case"]["S"]) for row in steady):
        case = {"W": ranks, "S": slots}
        known, other, fourth, first = (
            select(some, impl=impl, case=case)
            for some, impl in (
                (rows, "in_sample"),
                (steady, "every_other"),
                (steady, "every_fourth"),
                (rows, "balanced"),
            )
        )
        ours = [known, other, first]
        cells = [f"{_mean(of):.3f}, {max(row['worst_over_bound'] for row in of):.3f}" for of in ours]
        cells.insert(1, f"{2 * _mean(other) - _mean(fourth):.3f}")
        lines.append([f"{ranks}, {slots}", *cells])
        used += [row for of in (*ours, fourth) for row in of]
    head = ["ranks, slots", "these batches", "a record without end", "every other batch", "the first half"]
    return Table(head=head, body=lines, rows=used)


def _mean(rows: list[Row]) -> float:
    return sum(row["over_bound"] for row in rows) / len(rows)


def drift() -> Table:
    """Imbalance after one cycle, by task and tokens an iteration."""
    rows, lines = rows_of("drift"), []
    for batch, task in dict.fromkeys((row["case"]["batch"], row["case"]["task"]) for row in rows):
        by_impl = {row["impl"]: row for row in select(rows, case={"batch": batch, "task": task})}
        after = (f"{by_impl[impl]['imbalance_after_a_cycle']:.3f}" for impl in LINES)
        lines.append([batch, task, *after])
    return Table(head=["tokens an iteration", "task", *LINES.values()], body=lines, rows=rows)


def split() -> Table:
    rows, lines = last_run(select(read("placement_gpu"), op="split")), []
    impls = list(dict.fromkeys(row["impl"] for row in rows))
    for key in dict.fromkeys(tuple(row["case"][x] for x in "WES") for row in rows):
        by_impl = {row["impl"]: row for row in select(rows, case=dict(zip("WES", key, strict=True)))}
        lines.append([", ".join(map(str, key)), *(f"{by_impl[impl]['median_us']:.0f}" for impl in impls)])
    return Table(head=["ranks, experts, slots", *(f"{impl}, us" for impl in impls)], body=lines, rows=rows)


def iterations() -> Table:
    """Medians and, where written down, means, which have the iterations in which a migration ends."""
    rows, lines = select(read("placement_gpu"), op="iteration"), []
    for row in rows:
        off = next(r for r in rows if r["impl"] == "off" and r["case"] == row["case"])
        over = [f"{row[name] / off[name] - 1:+.1%}" for name in ("median_us", "mean_us") if name in row]
        lines.append(
            [
                row["case"]["W"],
                row["case"]["T"],
                VARIANTS[row["impl"]],
                f"{row['median_us'] / 1000:.2f}",
                *[*over, ""][:2],
                f"{row.get('fetched_an_iteration', 0):.1f}",
            ]
        )
    head = ["GPUs", "tokens a rank", "balancer", "iteration, ms", "over off", "mean over off", "experts"]
    return Table(head=head, body=lines, rows=rows)


def skewed() -> Table:
    rows, lines = select(read("placement_gpu"), op="skewed"), []
    planned = select(rows, impl="planned")
    for gpus, model in dict.fromkeys((row["case"]["W"], row["case"]["model"]) for row in planned):
        case = {"W": gpus, "model": model}
        before, behind = (select(rows, impl=impl, case=case) for impl in ("in_order", "planned"))
        imbalance = span((row["imbalance"] for row in before), ".2f")
        off = span((100 * (row["measured_over_predicted"] - 1) for row in behind), "+.1f")
        times = [span((row["median_us"] / 1000 for row in of), ".2f") for of in (before, behind)]
        lines.append([gpus, model, len(behind), f"{times[0]} ({imbalance})", times[1], f"{off} %"])
    head = ["GPUs", "model", "layers", "in order: ms (imbalance)", "planned: ms", "off the prediction"]
    return Table(head=head, body=lines, rows=rows)


def span(values: Iterable[float], form: str) -> str:
    """The least and the largest."""
    values = list(values)
    return f"{min(values):{form}} to {max(values):{form}}"
