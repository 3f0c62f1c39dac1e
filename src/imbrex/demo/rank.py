"""One rank of `imbrex demo`."""

from __future__ import annotations

import argparse
import os
import platform
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from imbrex import MoELayer
from imbrex.demo import balance, folder, settings
from imbrex.demo.corpus import Corpus, load_corpus
from imbrex.demo.progress import Progress
from imbrex.demo.run import Run, Saving
from imbrex.demo.training import Recipe, Shape, Trainer, make_model
from imbrex.launch.factors import Factors, factorise, new_group
from imbrex.launch.local import EXIT_REFUSED, Rank, complain, is_launched
from imbrex.launch.ranks import end_as, join
from imbrex.observe import PhaseBoard, Recorder, death
from imbrex.overlap.events import why_not_events
from imbrex.parallel import checkpoint

START_S = 120.0
"""Ranks may take this long to come up, whatever the time-out of a step."""


def work(args: argparse.Namespace) -> int:
    """Be the rank that the environment says; does not return where the rank ends early."""
    rank = int(os.environ["RANK"])
    out = Path(args.out)
    board_at = out / folder.RANKS
    try:
        death.forget(board_at, rank)
        board = PhaseBoard(board_at, rank)
        death.reserve_note(board_at, rank)
    except OSError as error:
        if death.may_speak(board_at):
            complain(f"cannot write to --out {args.out}: {error.strerror}: choose another --out")
        return EXIT_REFUSED
    end = Rank(
        board_at,
        rank=rank,
        num_ranks=args.ranks,
        timeout_s=args.timeout,
        hint=lambda: folder.hint(out, args),
        files="--out",
    )
    end_as(end, lambda rank, board: _train(args, rank, board), board)
    return 0


def _train(args: argparse.Namespace, rank: int, board: PhaseBoard) -> None:
    corpus = load_corpus(args.data, length=args.length)
    device = _join(args)
    recorder = Recorder(rank=rank, device=device, board=board, keep_spans=20_000)
    shape, _ = _shape_and_recipe(args)
    host_group = new_group(None, args.timeout, backend="gloo") if args.ranks > 1 else None
    trainer = _make_trainer(args, rank, corpus, recorder, device)
    recipe = trainer.recipe
    first_step, saving = _checkpoints(args, trainer, host_group)
    _check_schedule(args, trainer.model)
    if rank == 0:
        folder.begin(Path(args.out), args, [*settings.DEFAULTS])
    # Whoever was slow to come up is here now; from the first step on the time-out counts.
    dist.barrier()
    end = min(recipe.steps, args.stop_after or recipe.steps)
    with Progress(first_step=first_step, steps=end, shown=rank == 0) as progress:
        run = Run(trainer, shape, recorder, Path(args.out), host_group=host_group, progress=progress)
        run.train(first_step, end, saving)
    recorder.phase("report")
    if trainer.balancer is not None:
        trainer.balancer.close()
    summary = run.report(
        _facts(args, trainer.factors, corpus.name, trainer.model),
        corpus.reference_losses() if rank == 0 else {},
    )
    recorder.phase("done")
    if summary is not None:
        settings.say(_closing(summary, Path(args.out)) + balance.closing(Path(args.out)))


def _make_trainer(
    args: argparse.Namespace, rank: int, corpus: Corpus, recorder: Recorder, device: torch.device
) -> Trainer:
    shape, recipe = _shape_and_recipe(args)
    factors = factorise(args.ranks, expert=args.ep, tensor=args.tp, same_tokens=args.transport == "allreduce")
    balancer = balance.make(args, rank) if args.balance else None
    options: dict[str, Any] = {"timeout_s": args.timeout, "observer": recorder, "balancer": balancer}
    model = make_model(shape, recipe, factors, transport=args.transport, codec=args.codec, **options)
    return Trainer(model.to(device), corpus, recipe, factors, rank=rank, **options)


def _check_schedule(args: argparse.Namespace, model: torch.nn.Module) -> None:
    """Raise ValueError, on every rank, for what the first step would refuse: then the earlier run is gone."""
    exchanges = [module.exchange for module in model.modules() if isinstance(module, MoELayer)]
    if args.schedule == "events" and args.ranks > 1:
        reason = why_not_events(exchanges[0], args.epsilon)
        if reason is not None:
            raise ValueError(f"schedule: {reason}")


def _join(args: argparse.Namespace) -> torch.device:
    # torch 2.13 deprecates names that 2.11 has no others for.
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
    os.environ["IMBREX_TIMEOUT_S"] = str(args.timeout)
    device = join(args, START_S)
    if not is_launched() and dist.get_rank() == 0:
        folder.prepare(Path(args.out), args, [*settings.DEFAULTS])
    dist.barrier()
    return device


def _shape_and_recipe(args: argparse.Namespace) -> tuple[Shape, Recipe]:
    shape = Shape(
        hidden_size=args.hidden,
        num_layers=args.layers,
        num_heads=args.heads,
        num_experts=args.experts,
        top_k=args.top_k,
        expert_width=args.expert_width,
    )
    schedule = settings.schedule_of(args)
    return shape, Recipe(
        steps=args.steps, batch=args.batch, length=args.length, seed=args.seed, schedule=schedule
    )


def _checkpoints(
    args: argparse.Namespace, trainer: Trainer, group: dist.ProcessGroup | None
) -> tuple[int, Saving]:
    directory, model, optimizer = Path(args.out) / folder.CHECKPOINT, trainer.model, trainer.optimizer

    def save(step: int) -> None:
        checkpoint.save(directory, model, optimizer, step, keep=2, group=group)

    loaded = checkpoint.load_latest(directory, model, optimizer, group=group) if args.resume else None
    return loaded or 0, Saving(save=save, every=args.checkpoint_every)


def _facts(args: argparse.Namespace, factors: Factors, text: str, model: torch.nn.Module) -> dict[str, Any]:
    layer = next(module for module in model.modules() if isinstance(module, MoELayer))
    return {
        "ranks": args.ranks,
        "data": factors.data,
        "expert": factors.expert,
        "tensor": factors.tensor,
        "device": torch.cuda.get_device_name() if args.device == "cuda" else _processor(),
        "transport": layer.exchange.transport.name,
        "transport_reason": layer.exchange.transport_reason,
        "codec": args.codec,
        "text": text,
        "versions": f"torch {torch.__version__}, Python {platform.python_version()}",
    }


def _processor() -> str:
    return f"CPU, {os.cpu_count()} cores, {torch.get_num_threads()} threads a rank"


def _closing(summary: Mapping[str, Any], out: Path) -> list[str]:
    report = out / "report.html"
    drawn = f"report: {report}"
    if not report.exists():
        drawn = f"no report: pip install plotly, then imbrex demo --resume --out {out} draws it"
    references = ", ".join(f"{name} {loss:.2f}" for name, loss in summary["reference_losses"].items())
    dropped = f"{summary['dropped_share']:.2%} of the choices dropped; " if summary["dropped_share"] else ""
    return [
        f"held-out loss {summary['held_out_loss']:.3f} nats a byte ({references})",
        f"{summary['tokens_per_s']:,.0f} tokens/s, "
        f"{dropped}{summary['communicating_share']:.0%} of the time communicating",
        drawn,
        f"trace for https://ui.perfetto.dev: {out / 'trace.json'}",
    ]
