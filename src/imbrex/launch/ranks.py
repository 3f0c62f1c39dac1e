"""Starts, joins and ends the ranks of a command; for all commands that have some."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from imbrex.launch.local import Rank, end_with_launcher, launch
from imbrex.launch.memory import check_memory

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
"""The dtypes of tokens and experts, as `--dtype` names them."""
START_S = 300.0
"""Seconds that ranks have to start and to make their experts, whatever the time-out of a step."""


def hint() -> str:
    """Advice at the end of an error, for a user whose rank was lost."""
    return "run the command again"


def take_world(args: argparse.Namespace) -> None:
    """Fill in `ranks` from the environment of the launcher that started this rank."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        number = os.environ.get(name, "0")
        if not number.isdecimal():
            raise ValueError(f"{name} is {number!r} in the environment: unset it, or start ranks by torchrun")
    world = int(os.environ["WORLD_SIZE"])
    if args.ranks not in (None, world):
        raise ValueError(f"--ranks {args.ranks}, but torchrun started {world}: leave --ranks out")
    args.ranks = world


def settle(args: argparse.Namespace, *, worker: bool) -> None:
    """Fill in `ranks`, `device` and `dtype`, options whose defaults depend on the machine."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if worker:
        take_world(args)
    elif args.ranks is None:
        args.ranks = 2 if args.device == "cpu" or not gpus else gpus
    local = int(os.environ.get("LOCAL_WORLD_SIZE", args.ranks))
    if args.device == "auto":
        args.device = "cuda" if gpus >= local > 0 else "cpu"
    if args.device == "cuda" and gpus < local:
        raise ValueError(
            f"--device cuda: {local} ranks need a GPU each, and this machine has {gpus}; lower --ranks"
        )
    args.dtype = args.dtype or ("bfloat16" if args.device == "cuda" else "float32")


def run_on_ranks(
    args: argparse.Namespace,
    command: Sequence[str],
    work: Callable[[int, Any], None],
    *,
    worker: bool,
    layer_bytes: int = 0,
) -> int:
    """Start ranks that run `imbrex` with the words of `command` and of `args`; or, as one of them (`worker`),
    call `work`. Returns the exit code.

    layer_bytes: memory that the ranks hold together. Raises ValueError if they do not fit into this machine's
    memory.
    """
    if worker:
        return be_a_rank(args, work)
    check_memory(args.ranks, layer_bytes)
    args.board = tempfile.mkdtemp(prefix=f"imbrex-{command[-1]}-")
    words = [*command, *words_of(args)]
    try:
        code = launch(words, num_ranks=args.ranks, board=Path(args.board), timeout_s=args.timeout, hint=hint)
    except OSError:
        # Of a full disk, say: no rank has left anything to read.
        shutil.rmtree(args.board, ignore_errors=True)
        raise
    if not code:
        # After a failure the ranks' tracebacks stay there.
        shutil.rmtree(args.board)
    return code


def words_of(args: argparse.Namespace) -> list[str]:
    """The options of a command line that sets `args`, without the command's own words."""
    words: list[str] = []
    for name, value in vars(args).items():
        if name in ("run", "bench", "command", "what") or value is None or value is False or value == []:
            continue
        words.append(f"--{name.replace('_', '-')}")
        if value is not True:
            words += map(str, value if isinstance(value, list) else [value])
    return words


def be_a_rank(args: argparse.Namespace, work: Callable[[int, Any], None]) -> int:
    """Call `work` with this rank's number and its phase board. Returns the exit code 0, and ends the process
    if there is another."""
    from imbrex.observe import PhaseBoard, death

    end_with_launcher()
    rank = int(os.environ["RANK"])
    run_id = f"{os.environ.get('TORCHELASTIC_RUN_ID', 'run')}-{os.environ.get('MASTER_PORT', '')}"
    board_at = Path(args.board or Path(tempfile.gettempdir()) / f"imbrex-bench-{run_id}")
    board_at.mkdir(exist_ok=True)
    death.forget(board_at, rank)
    board = PhaseBoard(board_at, rank)
    results = [f"--{name}" for name in ("json", "report") if vars(args).get(name)]
    end = Rank(
        board_at,
        rank=rank,
        num_ranks=args.ranks,
        timeout_s=args.timeout,
        hint=hint,
        # A command without files of results writes the boards of its ranks alone.
        files=" or ".join(results) or "TMPDIR",
    )
    end_as(end, work, board)
    if args.board is None and rank == 0:
        shutil.rmtree(board_at, ignore_errors=True)
    return 0


def end_as(rank: Rank, work: Callable[[int, Any], None], board: Any) -> None:
    """Call `work` with this rank's number and its phase board. Ends the process if it fails."""
    code = rank.run(lambda: work(rank.rank, board))
    sys.stdout.flush()
    sys.stderr.flush()
    if code:
        # A peer is gone: what waits for it in a destructor would wait for ever.
        os._exit(code)


def join(args: argparse.Namespace, start_s: float = START_S) -> torch.device:
    """Join the other ranks. Returns this rank's device. start_s: seconds that ranks have to start, whatever
    the time-out of a step."""
    device = torch.device("cpu")
    if args.device == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=timedelta(seconds=max(start_s, args.timeout)))
    return device
