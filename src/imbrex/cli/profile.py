"""`imbrex profile --out here.json`: this machine's rates, for `imbrex plan --profile here.json`.

One process measures products, copies and codecs. Started as several ranks, by `imbrex netlab run -- imbrex
profile ...` or torchrun, they also measure the links inside nodes and between them. What is not measured here
is taken from a shipped profile, and marked as assumed.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from imbrex.bench.machine import hardware
from imbrex.bench.results import check_file
from imbrex.codec import make
from imbrex.launch.local import meet
from imbrex.runtime.waits import leave
from imbrex.simulate.profile import Entry, Profile
from imbrex.transport.auto import measure
from imbrex.transport.collective import Collective
from imbrex.transport.nodes import Nodes

SOURCE = "imbrex profile on {machine}: {what}, the median of {repeats}"
SIDES = {"cpu": (1024, 512, 1024), "cuda": (8192, 8192, 8192)}
"""Rows, inner values and columns of the product that is timed."""
ROWS = {"cpu": 4096, "cuda": 65536}
WIDTH = 1024


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", required=True, metavar="FILE", help="profile.json")
    parser.add_argument("--codecs", default="bf16,int8,fp8", metavar="NAME,...", help="also timed")
    parser.add_argument("-n", "--repeats", type=int, default=20, metavar="N", help="timed calls of each (20)")


def run(args: argparse.Namespace) -> int:
    if args.repeats < 1:
        raise ValueError(f"--repeats is {args.repeats}: give at least 1")
    check_file("out", args.out)
    several = "RANK" in os.environ and os.environ.get("WORLD_SIZE", "1") != "1"
    device = meet(None) if several else torch.device("cuda" if torch.cuda.is_available() else "cpu")
    clock = _Clock(device, args.repeats)
    base = Profile.load("h200" if device.type == "cuda" else "two-cores")
    carried = {
        name: Entry(value=entry.value, status="assumed", source=f"not measured here; {base.machine}'s")
        for name, entry in base.entries.items()
    }
    figures = _computing(clock, base) | _coding(clock, args.codecs.split(","))
    ranks = 1
    if several:
        ranks = dist.get_world_size()
        figures |= _links(clock)
    profile = Profile(machine=clock.machine, most_ranks=ranks, entries=carried | figures)
    if not several or dist.get_rank() == 0:
        profile.save(args.out)
        print(f"{args.out}: {len(figures)} figures measured, {len(carried.keys() - figures.keys())} assumed")
    if several:
        leave()
    return 0


class _Clock:
    """Median seconds of a call on a device, and the entry that says so."""

    def __init__(self, device: torch.device, repeats: int) -> None:
        self.device, self.repeats = device, repeats
        here = hardware()
        self.machine = str(here.get("gpu") or f"{here['cpu']}, {here['cores']} cores")

    def seconds(self, call: Callable[[], object]) -> float:
        times = []
        for _ in range(self.repeats + 2):
            begin = time.perf_counter()
            call()
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            times.append(time.perf_counter() - begin)
        return statistics.median(times[2:])

    def entry(self, value: float, what: str, status: str = "measured") -> Entry:
        source = SOURCE.format(machine=self.machine, what=what, repeats=self.repeats)
        return Entry(value=float(f"{value:.5g}"), status=status, source=source)


def _computing(clock: _Clock, base: Profile) -> dict[str, Entry]:
    """The rate of a product, and of copied rows."""
    kind = clock.device.type
    dtype = torch.bfloat16 if kind == "cuda" else torch.float32
    rows, inner, columns = SIDES[kind]
    left_RK = torch.randn(rows, inner, device=clock.device).to(dtype)
    right_KN = torch.randn(inner, columns, device=clock.device).to(dtype)
    rate = 2 * rows * inner * columns / clock.seconds(lambda: left_RK @ right_KN)
    rows_RD = torch.randn(ROWS[kind], WIDTH, device=clock.device).to(dtype)
    order_R = torch.randperm(len(rows_RD), device=clock.device)
    copied = rows_RD.nbytes / clock.seconds(lambda: rows_RD[order_R])
    what = f"a product of {rows} x {inner} x {columns}"
    product = clock.entry(rate, what)
    if base["tile_rows"] > 1:
        # Of whole tiles, without the power limit of long launches: as a dense product is to H200's.
        product = clock.entry(
            base["product_flops_s"] * rate / 784e12, f"{what}, as kernels on H200", "fitted"
        )
    return {"product_flops_s": product, "copied_bytes_s": clock.entry(copied, "rows copied in another order")}


def _coding(clock: _Clock, codecs: list[str]) -> dict[str, Entry]:
    kind = clock.device.type
    dtype = torch.bfloat16 if kind == "cuda" else torch.float32
    rows_RD = torch.randn(ROWS[kind], WIDTH, device=clock.device).to(dtype)
    figures = {}
    for name in (codec for codec in codecs if codec != "identity"):
        codec = make(name)
        encoded_RB = codec.encode(rows_RD, dtype)
        encode = clock.seconds(lambda codec=codec: codec.encode(rows_RD, dtype))
        decode = clock.seconds(lambda codec=codec, rows=encoded_RB: codec.decode(rows, WIDTH, dtype))
        for what, took in (("encode", encode), ("decode", decode)):
            entry = clock.entry(rows_RD.numel() / took, f"{what} rows of {WIDTH} values")
            figures[f"{what}_values_s:{name}"] = entry
    return figures


def _links(clock: _Clock) -> dict[str, Entry]:
    """Messages among the ranks of a node, and between ranks of equal place on other nodes."""
    collective = Collective(dist.group.WORLD)
    nodes = Nodes.of_ranks(collective)
    if nodes is None:
        raise ValueError("profile: the ranks are on nodes of unequal size; start as many on each")
    network = measure(collective, nodes)
    figures = {}
    for kind, link in (("node", network.inside), ("network", network.across)):
        if link.per_byte:
            what = f"{nodes.num_nodes} nodes of {nodes.size} ranks, all sending"
            figures[f"{kind}_bytes_s"] = clock.entry(1 / link.per_byte, what)
            figures[f"{kind}_start_s"] = clock.entry(link.start, what)
            figures[f"{kind}_latency_s"] = clock.entry(link.latency, what)
            # All ranks of a node sent at once, so that what they share is in the rate.
            figures[f"{kind}_port_ranks"] = clock.entry(1, what)
    return figures
