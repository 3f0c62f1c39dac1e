"""`imbrex demo`: checks the options, then starts the local ranks, or runs as one of them."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from imbrex.demo import folder, settings
from imbrex.demo.settings import DEFAULTS
from imbrex.launch.local import EXIT_REFUSED, end_with_launcher, is_worker, launch

MODEL = {
    "hidden": "model width D",
    "layers": "transformer blocks",
    "heads": "attention heads",
    "experts": "experts of a layer, E",
    "top-k": "experts of a token, K",
    "expert-width": "expert width F",
}
"""The flags of the model's shape."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    def flag(name: str, about: str, **more: Any) -> None:
        default = DEFAULTS.get(name.replace("-", "_"))
        about += f" ({default})" if default not in (None, [], False) else ""
        parser.add_argument(f"--{name}", help=about, default=None, **more)

    number: dict[str, Any] = {"type": int, "metavar": "N"}
    flag("ranks", "local processes; under an outer torchrun its number of ranks", **number)
    flag("ep", "ranks that the experts are spread over (all that --tp leaves)", **number)
    flag("tp", "ranks that every expert is split over", **number)
    flag("steps", "training steps in all, those before --resume included", **number)
    parser.add_argument("--out", default="runs/demo", help="where the files go (runs/demo)", metavar="DIR")
    parser.add_argument("--resume", action="store_true", help="go on from the last complete checkpoint")
    parser.add_argument("--overwrite", action="store_true", help="replace the earlier run in --out")
    flag("device", "auto takes a GPU per rank where there is one", choices=("auto", "cpu", "cuda"))
    flag("data", "text to train on instead of the standard library's source", nargs="+", metavar="FILE")
    flag("seed", "of the parameters and the batches", **number)
    flag("transport", "how rows move: auto, alltoall, allgather, hierarchical, ...", metavar="NAME")
    flag("codec", "how rows are written on the wire: identity, bf16, fp8, int8, ...", metavar="NAME")
    flag("schedule", "when the steps of a layer run: serial, events, optsche-2, ...", metavar="NAME")
    flag("tau", "of events: seconds to wait for the last peers, or learnt, as p95 or '1.5 p50'", metavar="T")
    flag("epsilon", "of events: peers that a rank may do without", **number)
    flag("balance", "let experts move to where their tokens are, while it trains", action="store_true")
    flag("batch", "sequences in the global batch", **number)
    flag("length", "bytes in a sequence", **number)
    flag("checkpoint-every", "steps between two checkpoints", **number)
    parser.add_argument(
        "--stop-after",
        type=int,
        metavar="N",
        help="stop, with a checkpoint, when so many of the steps are done; --resume goes on",
    )
    parser.add_argument(
        "--timeout",
        type=float,
        metavar="SECONDS",
        help="until a rank that does not answer ends the run (IMBREX_TIMEOUT_S, 60)",
    )
    for name, about in MODEL.items():
        flag(name, about, **number)


def run(args: argparse.Namespace) -> int:
    """Exit code 0; 1 where a rank was lost or failed, 2 where the input was refused."""
    worker = is_worker()
    end_with_launcher()
    try:
        settings.settle(args, worker=worker)
        settings.check(args)
    except ValueError:
        if os.environ.get("LOCAL_RANK", "0") != "0":
            # The first rank of the host says the same.
            return EXIT_REFUSED
        raise
    if worker:
        from imbrex.demo.rank import work

        return work(args)
    from imbrex.launch.memory import check_memory
    from imbrex.launch.ranks import words_of

    # Before the folder of an earlier run is emptied.
    smaller = "give a smaller --batch or --length, or a smaller model"
    check_memory(args.ranks, settings.least_bytes(args), smaller)
    out = Path(args.out)
    folder.prepare(out, args, [*DEFAULTS])
    # The words of this command, after its name, are those of its ranks.
    return launch(
        ["demo", *words_of(args)],
        num_ranks=args.ranks,
        board=out / folder.RANKS,
        timeout_s=args.timeout,
        hint=lambda: folder.hint(out, args),
    )
