"""Loops replayed from the rows that `benchmarks/serve.py` writes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from imbrex.bench.serve.loop import Load
from imbrex.bench.serve.models import MODELS
from imbrex.bench.serve.replay import StepTimes, replay
from imbrex.serve.attention import Latent
from imbrex.serve.decoding import Drafting
from imbrex.serve.engine import Settings

Row = Mapping[str, Any]
LOADS = ((1024, 1024), (4096, 1024), (8192, 1024))
"""Tokens in and out, as on TensorRT-LLM's slides."""
USERS = (8, 32, 128)
"""Users of a GPU: the rows of the steps that are timed."""
USABLE = 0.93
"""The share of a GPU's memory that weights and caches may take."""
GIB = 1 << 30
TIMED_AS = {
    "auto": "nvlink",
    "auto kernels-fp8": "nvlink-fp8-experts",
    "alone kernels-fp8": "alone-fp8",
}
"""Names in files of timed steps of ways that served several GPUs under another name."""


def timed_as(loop: Row) -> str:
    """The name that steps have of the way by which a loop ran."""
    way: str = loop["impl"]
    return TIMED_AS.get(way, way) if loop["case"]["W"] > 1 else way


def key_of(row: Row) -> tuple[str, str, int]:
    """The model, the way and the drafts of a timed step or chunk, or of a loop."""
    return row["case"]["model"], row["impl"], row["case"].get("drafts", 0)


def newest_steps(content: Mapping[str, Any]) -> list[tuple[Mapping[str, Any], list[Row]]]:
    """Runs of a result file with their steps and chunks: those of every model, way and draft length, of the
    newest run that has both."""
    known, runs = set[tuple[str, str, int]](), list[tuple[Mapping[str, Any], list[Row]]]()
    for run in reversed(content["runs"]):
        of_op: dict[str, list[Row]] = {"decode step": [], "chunk": []}
        for row in content["rows"]:
            if row["run"] == run["id"] and row["op"] in of_op:
                of_op[row["op"]].append(row)
        steps, chunks = ({key_of(row) for row in rows} for rows in of_op.values())
        fresh = (steps & chunks) - known
        if fresh:
            known |= fresh
            runs.append((run, [r for rows in of_op.values() for r in rows if key_of(r) in fresh]))
    return runs


def about(run: Mapping[str, Any]) -> str:
    """The GPUs, revision and date of a run."""
    return f"{run['hardware']['count']} x {run['hardware']['gpu']}, {run['commit']}, {run['date']}"


def step_times(rows: Iterable[Row], model: str, way: str, drafts: int = 0) -> StepTimes:
    """The times of a way with so many drafts a step. Raises ValueError where there are none. Latent attention
    goes through all of a slot; in chunks it did where these name its room."""
    latent, prefill_by_room = isinstance(MODELS[model].attention, Latent), False
    decode: dict[int, list[tuple[float, float]]] = {}
    prefill: dict[int, list[tuple[float, float]]] = {}
    for row in rows:
        case = row["case"]
        if (case.get("model"), row["impl"], case.get("drafts", 0)) != (model, way, drafts):
            continue
        by_room = latent and "room" in case
        point = case.get("room" if by_room else "context", 0), row.get("median_us", 0) / 1e6
        if row["op"] == "decode step":
            decode.setdefault(case["B"], []).append(point)
        elif row["op"] == "chunk":
            prefill.setdefault(case.get("live", case["rows"]), []).append(point)
            prefill_by_room |= by_room
    if not decode or not prefill:
        raise ValueError(
            f"serve: no steps of {model} by {way} with {drafts} drafts were measured; on two GPUs or more, "
            "`make gpu-bench NAME=serve` measures them"
        )
    # Chunks may have been timed more than once at the same place: the first counts.
    return StepTimes(
        decode={b: sorted(of) for b, of in decode.items()},
        prefill={live: sorted(dict(reversed(of)).items()) for live, of in prefill.items()},
        decode_by_room=latent,
        prefill_by_room=prefill_by_room,
    )


def replayed(
    rows: Sequence[Row], memory_gib: float, loads: Sequence[tuple[int, int]] = LOADS
) -> list[dict[str, Any]]:
    """A row for every way, draft length and load whose steps and chunks were measured and whose weights and
    caches fit. Steps that were timed behind one length of caches tell nothing of longer prompts."""
    points = []
    ways, with_chunks = ({key_of(r): r for r in rows if r["op"] == op} for op in ("decode step", "chunk"))
    for (model, way, drafts), step in ways.items():
        if (model, way, drafts) not in with_chunks:
            continue
        times = step_times(rows, model, way, drafts)
        chunk = next(r["case"] for r in rows if r["op"] == "chunk" and r["case"]["model"] == model)
        lengths = {r["case"]["context"] for r in rows if key_of(r) == (model, way, drafts)} - {0}
        for tokens, output in loads:
            if len(lengths) == 1 and tokens > max(lengths):
                continue
            for users in sorted(set(USERS) & set(times.decode)):
                settings = _settings(step["case"], users, tokens + output, (chunk["rows"], chunk["tokens"]))
                if step["weights_gib"] + _cache_gib(model, settings) > USABLE * memory_gib:
                    continue
                load = Load(users=users, input=tokens, output=output)
                points.append(_row(step, load, settings, replay(times, load, settings)))
    return points


def _settings(case: Mapping[str, Any], users: int, room: int, chunk: tuple[int, int]) -> Settings:
    drafts = case.get("drafts", 0)
    drafting = Drafting(length=drafts, forced=case["forced"] if drafts else None)
    return Settings(slots=users, room=room, chunk=chunk, interval=4, sizes=(users,), drafting=drafting)


def _cache_gib(model: str, settings: Settings) -> float:
    return settings.slots * settings.capacity * MODELS[model].cache_bytes(2) / GIB


def _row(step: Row, load: Load, settings: Settings, point: Mapping[str, Any]) -> dict[str, Any]:
    names = ("model", "W", "dtype", "forced")
    case = {name: value for name, value in step["case"].items() if name in names}
    case |= {"users": load.users * case["W"], "input": load.input, "output": load.output}
    case |= {"drafts": settings.drafting.length, "interval": settings.interval}
    figures = {name: round(point[name], 2) for name in ("tokens_per_s_gpu", "tokens_per_s_user", "step_ms")}
    figures["gap_ms"] = {name: round(value, 2) for name, value in point["gap_ms"].items()}
    counts = {name: point[name] for name in ("tokens_per_row_step", "steps", "requests")}
    return {"op": "replayed", "impl": step["impl"], "case": case} | figures | counts
