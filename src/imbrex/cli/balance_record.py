"""`imbrex balance record`: writes the recorded loads of a run in TensorRT-LLM's format."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np

from imbrex.balancer.report import JOURNAL, METRICS
from imbrex.cli.balance_input import add_input, load_input
from imbrex.placement import LoadHistory, write_history
from imbrex.placement.history_files import whole_numbers
from imbrex.runtime.checks import UNREADABLE, why


def add_record_arguments(parser: argparse.ArgumentParser) -> None:
    add_input(parser, "--run")
    parser.add_argument("--out", required=True, help="directory for meta_info.json and rank0.safetensors")


def record(args: argparse.Namespace) -> int:
    if not args.out.strip():
        raise ValueError("--out is empty: give a folder")
    _refuse_other_ranks(Path(args.out))
    path = Path(args.run_input)
    path = next((path / name for name in (METRICS, JOURNAL) if (path / name).exists()), path)
    history = read_metrics(path) if _has_loads(path) else load_input(args.run_input, args)
    write_history(args.out, history)
    print(
        f"{args.out}: {history.num_iterations} iterations, {len(history.layers)} layers, "
        f"{history.num_experts} experts"
    )
    return 0


def _refuse_other_ranks(folder: Path) -> None:
    """Raise ValueError where the folder holds files of other ranks: readers add them to the one written."""
    others = [
        file.name for file in sorted(folder.glob("rank*.safetensors")) if file.name != "rank0.safetensors"
    ]
    if others:
        raise ValueError(f"--out {folder}: it holds {others[0]}, which would be added; give a new folder")


def _has_loads(path: Path) -> bool:
    """Whether it is a run's metrics or a balancer's journal; other JSON lines are Megatron's."""
    if path.suffix != ".jsonl" or not path.exists():
        return False
    with path.open(encoding="utf-8") as file:
        return path.name == METRICS or '"expert_load"' in file.readline()


def read_metrics(path: Path) -> LoadHistory:
    """`expert_load` [L, E] of every step of a run. Raises ValueError, one sentence, where it is not there."""
    loads, layers = [], None
    try:
        entries = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        counted = [entry for entry in entries if "expert_load" in entry]
        for entry in [entry for entry in counted if "crossings" in entry] or counted:
            layers = entry.get("layers")
            loads.append(whole_numbers(np.rint(np.array(entry["expert_load"], dtype=np.float64))))
        numbers = None if layers is None else tuple(map(int, layers))
    except UNREADABLE as error:
        raise ValueError(f"record: {path} cannot be read ({why(error)})") from None
    if not loads or len({load.shape for load in loads}) > 1 or loads[0].ndim != 2:
        raise ValueError(
            f"record: {path} has no expert_load [layers, experts] in its steps; run the demo anew"
        )
    return LoadHistory(counts_ILE=np.stack(loads), layers=numbers or tuple(range(loads[0].shape[0])))
