"""What is asked of a run of the demo: defaults, what is refused before a rank starts, the output folder."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

SHAPE = {"hidden": 128, "layers": 3, "heads": 4, "experts": 8, "top_k": 2, "expert_width": 192}
DEFAULTS: dict[str, Any] = {
    **SHAPE,
    "ranks": 4,
    "ep": None,
    "tp": 1,
    "steps": 200,
    "batch": 16,
    "length": 128,
    "seed": 0,
    "device": "auto",
    "transport": "auto",
    "codec": "identity",
    "checkpoint_every": 50,
    "balance": False,
    "data": [],
}
"""What a flag is when neither the command line nor, with --resume, the earlier run says."""

ASKED = "run.json"
JOURNAL, BALANCE = "balance.jsonl", "balance.html"
OUTPUTS = (ASKED, "metrics.jsonl", "summary.json", "trace.json", "report.html", "checkpoint")
OUTPUTS += (JOURNAL, BALANCE)
NEEDED_BYTES = 100 << 20


def hint(out: Path) -> str:
    """What to do after a run that ended early."""
    from imbrex.parallel import checkpoint

    if checkpoint.latest(out / "checkpoint") is None:
        return "it ended before its first checkpoint: start anew"
    return "give --resume to go on from the last complete checkpoint"


def arguments_of(args: argparse.Namespace) -> list[str]:
    """The command line that says what `args` say."""
    words: list[str] = []
    for name, value in vars(args).items():
        if name in ("run", "command") or value is None or value is False or value == []:
            continue
        words.append(f"--{name.replace('_', '-')}")
        if value is not True:
            words += map(str, value if isinstance(value, list) else [value])
    return words


def settle(args: argparse.Namespace, *, worker: bool) -> None:
    """Fill in the flags that were left out: from the run to resume, then from the defaults."""
    if worker:
        world = int(os.environ["WORLD_SIZE"])
        if args.ranks not in (None, world):
            raise ValueError(f"--ranks {args.ranks}, but torchrun started {world}: leave --ranks out")
        args.ranks = world
    earlier = asked_before(Path(args.out)) if args.resume else {}
    for name, default in DEFAULTS.items():
        given = getattr(args, name)
        if name in SHAPE and name in earlier and given not in (None, earlier[name]):
            raise ValueError(
                f"--{name.replace('_', '-')} {given}, but the checkpoint in {args.out} has {earlier[name]}: "
                "leave the flag out, or start anew with another --out"
            )
        if given is None:
            setattr(args, name, earlier.get(name, default))


def asked_before(out: Path) -> dict[str, Any]:
    try:
        return json.loads((out / ASKED).read_text())
    except FileNotFoundError:
        raise ValueError(f"there is no run to resume in {out}: leave out --resume") from None
    except (OSError, json.JSONDecodeError) as error:
        raise ValueError(f"cannot read {out / ASKED}: {error}: start anew with another --out") from None


def check(args: argparse.Namespace) -> None:
    """Raise ValueError for what can be refused before any rank starts."""
    from imbrex.codec import make_wire
    from imbrex.launch.factors import factorise
    from imbrex.runtime.waits import timeout_seconds
    from imbrex.transport import pick

    _check_numbers(args)
    factors = factorise(args.ranks, expert=args.ep, tensor=args.tp, same_tokens=args.transport == "allreduce")
    if factors.token_ranks > args.batch:
        raise ValueError(
            f"--batch {args.batch} leaves some of {factors.token_ranks} ranks without a sequence: "
            f"give --batch {factors.token_ranks} or more, or fewer --ranks"
        )
    if args.balance and factors.expert < 2:
        raise ValueError("--balance: all experts live on one rank: give --ranks or --ep 2 or more")
    args.timeout = timeout_seconds(args.timeout)
    pick(args.transport, num_ranks=args.ranks, top_k=args.top_k)
    make_wire(args.codec)
    args.device = check_device(args.device, args.ranks)
    if args.data:
        from imbrex.demo.corpus import load_corpus

        load_corpus(args.data, length=args.length)
        args.data = [str(Path(path).resolve()) for path in args.data]


def _check_numbers(args: argparse.Namespace) -> None:
    """Each by itself, and those of the model together."""
    for name in ("steps", "batch", "length", "checkpoint_every", "stop_after", *SHAPE):
        if (value := getattr(args, name)) is not None and value < 1:
            raise ValueError(f"--{name.replace('_', '-')} is {value}: give 1 or more")
    if args.seed < 0:
        raise ValueError(f"--seed is {args.seed}: give 0 or more")
    if args.top_k > args.experts:
        raise ValueError(f"--top-k {args.top_k} is more than --experts {args.experts}: lower it")
    if args.tp > 0 and args.expert_width % args.tp:
        raise ValueError(
            f"--tp {args.tp} does not divide --expert-width {args.expert_width}: give a width that it divides"
        )
    if args.hidden % (2 * args.heads):
        raise ValueError(
            f"--hidden {args.hidden} is no multiple of twice --heads {args.heads}: give a multiple of "
            f"{2 * args.heads}"
        )


def check_device(wanted: str, num_ranks: int) -> str:
    import torch

    available = torch.cuda.device_count() if torch.cuda.is_available() else 0
    here = int(os.environ.get("LOCAL_WORLD_SIZE", num_ranks))
    if wanted == "cuda" and available < here:
        raise ValueError(
            f"--device cuda: {here} ranks on this machine need a GPU each, and it has {available}: "
            "lower --ranks or use --device cpu"
        )
    return "cuda" if wanted != "cpu" and available >= here else "cpu"


def prepare(out: Path, args: argparse.Namespace) -> None:
    """Make the output directory; without --resume, remove what an earlier run left there."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out) as file:
            file.write(b"imbrex")
        free = shutil.disk_usage(out).free
        if free < NEEDED_BYTES:
            raise ValueError(
                f"--out {out} has {free >> 20} MiB left and a run needs {NEEDED_BYTES >> 20}: "
                "free some, or choose another --out"
            )
        for name in () if args.resume else OUTPUTS:
            path = out / name
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        (out / "ranks").mkdir(exist_ok=True)
        (out / ASKED).write_text(
            json.dumps({name: getattr(args, name) for name in DEFAULTS}, indent=2) + "\n"
        )
    except OSError as error:
        raise ValueError(f"cannot write to --out {out}: {error.strerror}: choose another --out") from None


def say(lines: Sequence[str]) -> None:
    print("\n".join(lines), file=sys.stdout, flush=True)
