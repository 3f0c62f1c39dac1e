"""The settings of a run of the demo: defaults, and refusals before a rank starts."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from imbrex.demo import folder

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
    "schedule": "serial",
    "tau": "inf",
    "epsilon": 0,
    "checkpoint_every": 50,
    "balance": False,
    "data": [],
}
"""The value of a flag when neither the command line nor, with --resume, the earlier run says one."""
MAX_SEED = 2**63 - 1
"""The largest seed of a generator of torch."""


def settle(args: argparse.Namespace, *, worker: bool) -> None:
    """Fill in the flags that were left out: from the run to resume, then from the defaults."""
    if worker:
        from imbrex.launch.ranks import take_world

        take_world(args)
    if not args.out.strip():
        raise ValueError("--out is empty: give a folder")
    before = folder.earlier(Path(args.out)) if args.resume else None
    earlier = {} if before is None else before.settings
    for name, default in DEFAULTS.items():
        value = getattr(args, name)
        if name in SHAPE and name in earlier and value not in (None, earlier[name]):
            raise ValueError(
                f"--{name.replace('_', '-')} {value}, but the checkpoint in {args.out} has {earlier[name]}: "
                "leave the flag out, or start anew with another --out"
            )
        if value is None:
            setattr(args, name, earlier.get(name, default))


def check(args: argparse.Namespace) -> None:
    """Raise ValueError for what can be refused before any rank starts."""
    from imbrex import overlap
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
    folder.check(Path(args.out), args)
    args.timeout = timeout_seconds(args.timeout)
    pick(args.transport, num_ranks=args.ranks, top_k=args.top_k)
    make_wire(args.codec)
    overlap.make(schedule_of(args))
    if args.epsilon >= factors.sharing:
        peers = factors.sharing - 1
        raise ValueError(f"--epsilon is {args.epsilon}, but a rank has {peers} peers: give 0 to {peers}")
    args.device = check_device(args.device, args.ranks)
    if args.data:
        from imbrex.demo.corpus import load_corpus

        load_corpus(args.data, length=args.length)
        args.data = [str(Path(path).resolve()) for path in args.data]


def least_bytes(args: argparse.Namespace) -> int:
    """The least that all ranks together hold while they train: batches, and on CPUs what the layers keep of
    one for the backward, and four values a parameter."""
    tokens, copies = args.batch * args.length, 1 if args.ep is None else args.ranks // (args.ep * args.tp)
    batches = 8 * tokens * args.ranks
    if args.device != "cpu":
        return batches
    dense = 4 * args.hidden * args.hidden * args.ranks
    experts = 3 * args.hidden * args.expert_width * args.experts * copies
    return batches + 4 * args.layers * (4 * (dense + experts) + tokens * args.hidden)


def _check_numbers(args: argparse.Namespace) -> None:
    """Check the numbers, each by itself, and those of the model together."""
    for name in ("steps", "batch", "length", "checkpoint_every", "stop_after", *SHAPE):
        if (value := getattr(args, name)) is not None and value < 1:
            raise ValueError(f"--{name.replace('_', '-')} is {value}: give 1 or more")
    if not 0 <= args.seed <= MAX_SEED:
        raise ValueError(f"--seed is {args.seed}: give 0 to {MAX_SEED}")
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


def schedule_of(args: argparse.Namespace) -> str:
    """The schedule's whole name. Raises ValueError for patience without events, or of half of it."""
    if args.epsilon == 0 and args.tau == "inf":
        return args.schedule
    if args.schedule != "events":
        raise ValueError(
            f"--tau and --epsilon are of --schedule events: give it in the place of {args.schedule}"
        )
    if args.epsilon == 0:
        raise ValueError(f"--tau {args.tau} with --epsilon 0 waits for all: give --epsilon 1 or more")
    return f"events(tau={args.tau}, epsilon={args.epsilon})"


def check_device(device: str, num_ranks: int) -> str:
    """The device to run on, `cuda` or `cpu`. Raises ValueError where a rank would have no GPU."""
    import torch

    available = torch.cuda.device_count() if torch.cuda.is_available() else 0
    here = int(os.environ.get("LOCAL_WORLD_SIZE", num_ranks))
    if device == "cuda" and available < here:
        raise ValueError(
            f"--device cuda: {here} ranks on this machine need a GPU each, and it has {available}: "
            "lower --ranks or use --device cpu"
        )
    return "cuda" if device != "cpu" and available >= here else "cpu"


def say(lines: Sequence[str]) -> None:
    """Print lines on the first rank's terminal at once."""
    print("\n".join(lines), file=sys.stdout, flush=True)
