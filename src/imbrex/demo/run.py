"""A run of the demo on one rank: train, record, save, and report what happened."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from imbrex.demo.folder import METRICS
from imbrex.demo.training import Recipe, Shape, Trainer
from imbrex.observe import PHASES, Recorder, Span, fold, merge_traces, trace_events
from imbrex.observe.report import communicating_share, write_report
from imbrex.runtime import waits

_TIMES: tuple[str, ...] = ("step", *PHASES, "rest")


@dataclass(frozen=True, kw_only=True, slots=True)
class Saving:
    """save(step): write a checkpoint after `step` steps. every: steps between two."""

    save: Callable[[int], None]
    every: int


class Run:
    """Steps from `first_step` on, with their records.

    host_group: a group of all ranks that moves CPU tensors, or `None` for one rank alone.
    progress: told every record; called on rank 0 only.
    """

    def __init__(
        self,
        trainer: Trainer,
        shape: Shape,
        recorder: Recorder,
        out: Path,
        *,
        host_group: dist.ProcessGroup | None,
        progress: Callable[[Mapping[str, Any]], None],
    ) -> None:
        self.trainer, self.shape, self.recorder, self.out = trainer, shape, recorder, out
        self.recipe: Recipe = trainer.recipe
        self.rank, self.num_ranks = trainer.rank, trainer.factors.num_ranks
        self.host_group, self.progress = host_group, progress
        self.bytes_sent_W = torch.zeros(self.num_ranks, dtype=torch.float64)
        self.host_syncs = 0

    def train(self, first_step: int, end: int, saving: Saving) -> None:
        """Train the steps from `first_step` to before `end`, recording and saving on the way."""
        path = self.out / METRICS
        if self.rank == 0:
            keep_before(path, first_step)
        for step in range(first_step, end):
            record = self._step(step)
            if step == end - 1 or (step + 1) % saving.every == 0:
                record["held_out_loss"] = self.held_out_loss()
                self.recorder.phase("checkpoint")
                saving.save(step + 1)
                self.recorder.phase("rest")
            if self.rank == 0:
                with path.open("a") as file:
                    file.write(json.dumps(record) + "\n")
                self.progress(record)

    def held_out_loss(self) -> float:
        """Nats a byte over the held-out windows."""
        nats = self.trainer.held_out_nats().cpu()
        self.recorder.end_step(keep=False)
        self.recorder.take_counters()
        return self._sum_tokens(self._gather(nats[None])) / self.trainer.held_out_bytes

    def _step(self, step: int) -> dict[str, Any]:
        self.recorder.begin_step(step)
        began = time.perf_counter()
        nats = self.trainer.step(step)
        # host sync: the loss of the step, once a step
        nats = nats.cpu()
        times_ms = self.recorder.end_step()
        step_ms = 1e3 * (time.perf_counter() - began)
        folded = fold(times_ms, step_ms)
        load_LE, rows_L, drops = self._counted()
        parts = (
            nats[None],
            drops,
            torch.tensor([step_ms, *folded.values()]).double(),
            load_LE.flatten(),
            rows_L,
        )
        self.recorder.phase("record")
        gathered = self._gather(torch.cat(parts))
        self.recorder.phase("rest")
        return self._record(step, gathered)

    def _counted(self) -> tuple[Tensor, Tensor, Tensor]:
        """Choices per layer and expert of this rank's tokens, rows per layer on this rank, choices that were
        dropped [1]; float64."""
        shape = self.shape
        load_LE = torch.zeros(shape.num_layers, shape.num_experts, dtype=torch.float64)
        rows_L = torch.zeros(shape.num_layers, dtype=torch.float64)
        drops = torch.zeros(1, dtype=torch.float64)
        for (name, where), value in self.recorder.take_counters().items():
            layer = dict(where).get("layer", 0)
            if name == "expert_load":
                load_LE[layer] += torch.tensor(value)
            elif name == "rows":
                rows_L[layer] += value
            elif name == "drops":
                drops += value
            elif name == "bytes_sent":
                to = torch.tensor(value, dtype=torch.float64)
                first = self.rank - self.rank % len(to)
                self.bytes_sent_W[first : first + len(to)] += to
            elif name == "host_syncs":
                self.host_syncs += value
        return load_LE, rows_L, drops

    def _record(self, step: int, gathered_WX: Tensor) -> dict[str, Any]:
        shape, recipe = self.shape, self.recipe
        nats, drops, times, load, rows = gathered_WX.split(
            [1, 1, len(_TIMES), shape.num_layers * shape.num_experts, shape.num_layers], dim=1
        )
        load_LE = load.sum(0).view(shape.num_layers, shape.num_experts)
        tokens = recipe.batch * recipe.length
        mean_ms = dict(zip(_TIMES, times.mean(0).tolist(), strict=True))
        return {
            "step": step,
            "loss": self._sum_tokens(nats[:, 0]) / tokens,
            "tokens_per_s": tokens / (times[:, 0].max().item() / 1e3),
            **{f"{name}_ms": value for name, value in mean_ms.items()},
            "communicating": communicating_share(mean_ms) if self.num_ranks > 1 else 0.0,
            "imbalance": (load_LE.amax(1) / load_LE.mean(1).clamp_min(1e-9)).tolist(),
            "expert_load": load_LE.tolist(),
            "dropped": (drops.sum() / load.sum().clamp_min(1.0)).item(),
            "rank_rows": rows.tolist(),
        }

    def _sum_tokens(self, of_rank_W: Tensor) -> float:
        """Sum over the parts of the global batch; ranks with the same tokens count once."""
        factors = self.trainer.factors
        return of_rank_W.flatten()[:: self.num_ranks // factors.token_ranks].sum().item()

    def _gather(self, vector: Tensor) -> Tensor:
        if self.host_group is None:
            return vector[None]
        gathered = vector.new_empty(self.num_ranks * vector.numel())
        waits.all_gather_single(gathered, vector.contiguous(), group=self.host_group)
        return gathered.view(self.num_ranks, -1)

    def report(self, facts: Mapping[str, Any], references: Mapping[str, float]) -> dict[str, Any] | None:
        """Write `summary.json`, `trace.json` and, where plotly is installed, `report.html`; the summary, on
        rank 0."""
        spans = self._gather_spans()
        sent_WW = self._gather(self.bytes_sent_W)
        if self.rank != 0:
            return None
        path = self.out / METRICS
        metrics = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        summary = {
            **facts,
            "shape": asdict(self.shape),
            "recipe": asdict(self.recipe),
            "reference_losses": dict(references),
            **_digest(metrics),
            "bytes_sent": sent_WW.long().tolist(),
            "host_syncs": self.host_syncs,
        }
        (self.out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
        merge_traces([trace_events(of_rank, r) for r, of_rank in enumerate(spans)], self.out / "trace.json")
        # Figures of a long run must not be lost to a package that only draws them.
        if find_spec("plotly") is not None:
            write_report(
                self.out / "report.html",
                title=f"imbrex demo: {self.num_ranks} ranks, {len(metrics)} steps",
                facts=_table(summary),
                metrics=metrics,
                spans=spans,
                references=references,
            )
        return summary

    def _gather_spans(self) -> list[list[Span]]:
        own = list(self.recorder.spans)
        if self.host_group is None:
            return [own]
        gathered: list[Any] | None = [None] * self.num_ranks if self.rank == 0 else None
        dist.gather_object(own, gathered, dst=0, group=self.host_group)
        return gathered or []


def keep_before(path: Path, step: int) -> None:
    """Keep the records in `path` of the steps before `step`, and drop the others."""
    lines = path.read_text().splitlines() if step and path.exists() else []
    earlier = [line for line in lines if line.endswith("}") and json.loads(line)["step"] < step]
    path.write_text("".join(f"{line}\n" for line in earlier))


def _median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


def _digest(metrics: list[dict[str, Any]]) -> dict[str, Any]:
    if not metrics:
        return {"steps": 0}
    settled = metrics[len(metrics) // 10 :]
    return {
        "steps": len(metrics),
        "first_loss": metrics[0]["loss"],
        "last_loss": metrics[-1]["loss"],
        "held_out_loss": metrics[-1].get("held_out_loss"),
        "train_s": sum(m["step_ms"] for m in metrics) / 1e3,
        "tokens_per_s": _median([m["tokens_per_s"] for m in settled]),
        "dropped_share": sum(m.get("dropped", 0.0) for m in metrics) / len(metrics),
        "communicating_share": _median([m["communicating"] for m in settled]),
        "imbalance": max(
            _median(list(of_layer)) for of_layer in zip(*(m["imbalance"] for m in settled), strict=True)
        ),
        **{f"{name}_ms": _median([m[f"{name}_ms"] for m in settled]) for name in _TIMES},
    }


def _table(summary: Mapping[str, Any]) -> dict[str, str]:
    shape = summary["shape"]
    table = {
        "ranks": "{ranks} = data {data} x expert {expert} x tensor {tensor}".format(**summary),
        "device": str(summary["device"]),
        "transport": f"{summary['transport']} ({summary['transport_reason']}), codec {summary['codec']}",
        "model": "{num_layers} layers, D {hidden_size}, {num_experts} experts of {expert_width}, "
        "top-{top_k}".format(**shape),
        "text": str(summary["text"]),
        "versions": str(summary["versions"]),
    }
    if summary["steps"]:
        table |= {
            "held-out loss": f"{summary['held_out_loss']:.3f} nats a byte",
            "throughput": f"{summary['tokens_per_s']:,.0f} tokens/s, median",
            "communicating": f"{summary['communicating_share']:.0%} of the time, median",
            "schedule": f"{summary['recipe']['schedule']}, {summary['dropped_share']:.2%} of choices dropped",
            "largest over mean expert load": f"{summary['imbalance']:.2f}, median of the worst layer",
        }
    return table
