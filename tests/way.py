"""The files that one call of a layer goes through, forward and back: `python -m tests.way`.

Two gloo ranks call a layer over bytes (`alltoall`) and over NVLink's kernels, emulated on the CPU. It prints
the calls of the package's functions on rank 0's own thread, the number of files they are in, and how often a
call is in another file than the call before, or in another entry of `src/imbrex`.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import imbrex
import tests.way
from tests.ranks.emulated_nvlink import EmulatedNvlink
from tests.ranks.pool import Pool, Ranks

PACKAGE = f"{Path(imbrex.__file__).parent}/"
CONFIG = imbrex.MoEConfig(hidden_size=64, intermediate_size=32, num_experts=4, top_k=2)
WAYS = {"alltoall": torch.float32, "nvlink": torch.bfloat16}


def files_of(call: Callable[[], Any]) -> list[str]:
    """The file of every function of the package that is called, in order, below `src/imbrex`."""
    files: list[str] = []

    def note(frame: Any, event: str, argument: object) -> None:
        path = frame.f_code.co_filename
        if event == "call" and path.startswith(PACKAGE):
            files.append(path.removeprefix(PACKAGE))

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return files


def walk(ranks: Ranks, way: str) -> list[list[str]]:
    """The files of a forward and of its backward, on this rank."""
    group = ranks.group
    transport = EmulatedNvlink(group) if way == "nvlink" else way
    layer = imbrex.MoELayer(CONFIG, group, transport=transport, dtype=WAYS[way])
    x_TD = torch.randn(8, CONFIG.hidden_size, dtype=WAYS[way], requires_grad=True)
    layer(x_TD).sum().backward()  # plans, kernels and the like are made once
    y_TD: list[torch.Tensor] = []
    out = files_of(lambda: y_TD.append(layer(x_TD)))
    with torch.autograd.set_multithreading_enabled(False):  # on the thread that is watched
        back = files_of(y_TD[0].sum().backward)
    return [out, back]


def moves(places: list[str]) -> int:
    """How often a place is another than the one before."""
    return sum(here != before for before, here in itertools.pairwise(places))


def main() -> None:
    pool = Pool(2)
    for way in WAYS:
        for what, files in zip(("forward", "backward"), pool.run(2, tests.way.walk, way)[0], strict=True):
            entries = [file.split("/")[0] for file in files]
            sys.stdout.write(
                f"{way} {what}: {len(files)} calls, {len(set(files))} files, {moves(files)} moves between "
                f"files, {moves(entries)} between entries of src/imbrex\n"
            )
    pool.close()


if __name__ == "__main__":
    main()
