"""Rows of `exchange.json`: one call timed on all ranks, with the bytes it moves and the times it stops the
host."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from imbrex.bench.exchange.clock import Clock
from imbrex.bench.exchange.job import Job
from imbrex.kernels.exchange.exchange import Routed

DEFINITIONS = {
    "full_call": "from ids and tokens to finished rows, routing included; false: a kernel alone",
    "wire_gbps": "bytes of deduplicated rows that the busiest rank receives or sends, over median_us",
    "logical_gbps": "the same with the rows that it keeps",
    "share_of_push": "wire_gbps over the push ceiling of the same run",
    "num_sms": "multiprocessors asked for",
    "sms": "multiprocessors of every kernel of the call, by its phase; one kernel may be of two phases",
    "host_us": "of a call that does not wait for the GPU: what its host takes to queue it; a median of 20",
    "called_us": "from an idle GPU to the results, by the host's clock; a median of 20",
    "host_syncs": "how often one call makes the host wait for the GPU, by torch's account",
}
FP8_SHARE = (1 + 4 / 128) / 2
"""Bytes of an fp8 row with its scales over those of a bf16 row."""

TIMES = "median_us", "host_us", "called_us"
SHOWN = (*TIMES, "wire_gbps", "share_of_push", "slowdown", "nbytes", "host_syncs", "skipped")
"""Fields that a line for the terminal ends with, where they say something."""


class Rows:
    """The rows measured so far, and the traffic of the job in hand. Collective: every rank makes the same
    calls; rank 0 prints."""

    def __init__(self, rank: int, clock: Clock) -> None:
        self.rank, self.clock = rank, clock
        self.entries: list[dict[str, Any]] = []
        self.push_gbps = 0.0
        self.launched: dict[str, int] = {}

    def begin(self, job: Job, routed: Routed, launched: dict[str, int]) -> None:
        """The rows timed from here on are of `job`. launched: where its exchange notes the multiprocessors
        of every kind of kernel. The busiest rank's traffic is what a time is compared
        with: the most rows that any rank receives or sends, and the most that any keeps."""
        self.job, self.launched = job, launched
        leaves_TW = routed.send_row_LTW[0] >= 0
        counts = torch.stack([leaves_TW.sum() - leaves_TW[:, self.rank].sum(), routed.totals_L4[0, 1].long()])
        maxima = torch.stack([counts.max(), leaves_TW[:, self.rank].sum()])
        dist.all_reduce(maxima, op=dist.ReduceOp.MAX)
        # host sync: once a job
        self.crossing, self.staying = (2 * job.D * count for count in maxima.tolist())

    def time(
        self,
        op: str,
        impl: str,
        layout: str,
        call: Callable[[], Any],
        *,
        dtype: str = "bf16",
        calls: int = 1,
        full_call: bool = True,
        **more: Any,
    ) -> float:
        """Microseconds of one of the `calls` calls that `call` makes, put into a row. more: its fields."""
        self.launched.clear()
        syncs, timing = count_host_syncs(call), self.clock(call)
        share = FP8_SHARE if dtype == "fp8" else 1.0
        median = timing.median_us / calls
        row = {
            "op": op,
            "impl": impl,
            "case": {**self.job.case, "layout": layout, "dtype": dtype},
            "median_us": round(median, 1),
            "min_us": round(timing.min_us / calls, 1),
            "max_us": round(timing.max_us / calls, 1),
            "n": timing.n,
            "host_syncs": syncs,
            "full_call": full_call,
            **more,
        }
        if impl == "imbrex" and self.launched:
            row["sms"] = dict(self.launched)
        if op in ("dispatch", "combine") and self.crossing:
            wire = self.crossing * share / median / 1e3
            row["wire_gbps"] = round(wire, 1)
            row["logical_gbps"] = round((self.crossing + self.staying) * share / median / 1e3, 1)
            if self.push_gbps:
                row["share_of_push"] = round(wire / self.push_gbps, 3)
        self.add(row)
        return median

    def add(self, row: dict[str, Any]) -> None:
        self.entries.append(row)
        if self.rank == 0:
            print(describe(row), flush=True)


def describe(row: dict[str, Any]) -> str:
    """One line for the terminal."""
    case = row.get("case", {})
    words = [row["op"], row["impl"], *(f"{name}{case[name]}" for name in "TDKEW" if name in case)]
    words += [str(case[name]) for name in ("routing", "layout", "dtype") if name in case]
    words += [f"on {row['num_sms']} SMs"] if "num_sms" in row else []
    words += ["kernel"] if row.get("full_call") is False else []
    figures = [f"{name} {row[name]}" for name in SHOWN if row.get(name)]
    return f"{' '.join(words)}: {', '.join(figures)}"


def count_host_syncs(call: Callable[[], Any]) -> int:
    """How often one call makes the host wait for the GPU, by torch's own account."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            call()
    finally:
        torch.cuda.set_sync_debug_mode(before)
    return sum("synchroniz" in str(warning.message) for warning in caught)
