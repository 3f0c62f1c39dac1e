"""How fast are rows written and read on a GPU, beside a copy of the same bytes?

    python -m benchmarks.codecs --out benchmarks/results/codecs.json

Bytes are those read plus those written; `share` is their rate over that of a device-to-device copy in the
same run. `torch` is the same codec in tensor operations, which is what runs where no kernel applies.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
from collections.abc import Callable
from typing import Any

import torch

from imbrex.bench.results import describe_run, write_results
from imbrex.codec import make
from imbrex.kernels.codec import codec as kernels

QUESTION = "How fast are rows written and read on a GPU?"
WITH_RIVAL = ("bf16", "fp16", "int8", "int8-128", "fp8", "fp8-e5m2", "int4", "nvfp4")
NAMES = (*WITH_RIVAL, *(f"zfp{dimensions}d-{rate}" for dimensions in (1, 2) for rate in range(4, 17)))
REPEATS = 20


def main() -> None:
    args = parse()
    copy_gbps = measure_copy()
    sys.stdout.write(f"copy {copy_gbps:.0f} GB/s read and written\n")
    rows: list[dict[str, Any]] = []
    for width in args.widths:
        for dtype in (torch.bfloat16, torch.float32):
            # A cast of bfloat16 to bfloat16 moves nothing.
            for name in (n for n in args.codecs if (n, dtype) != ("bf16", torch.bfloat16)):
                rows += of_codec(name, args.megabytes, width, dtype, copy_gbps, rivals=not args.no_rivals)
    if args.out:
        words = [word for word in sys.argv[1:] if word not in ("--out", args.out)]
        run = describe_run(" ".join(["python -m benchmarks.codecs", *words]), {"copy_tbps": copy_gbps / 1e3})
        write_results(args.out, QUESTION, run, rows)


def of_codec(
    name: str, megabytes: int, width: int, dtype: torch.dtype, copy_gbps: float, *, rivals: bool
) -> list[dict[str, Any]]:
    codec = make(name)
    tokens = (megabytes << 20) // (width * dtype.itemsize)
    rows_ND = torch.randn(tokens, width, device="cuda").to(dtype)
    encoded_NB = codec.encode(rows_ND, dtype)
    nbytes = rows_ND.numel() * dtype.itemsize + encoded_NB.numel()
    found = []
    for impl in ("imbrex", "torch") if rivals and name in WITH_RIVAL else ("imbrex",):
        works = kernels._works
        if impl == "torch":
            kernels._works = lambda device: False
        try:
            for op, call in (
                ("encode", lambda: codec.encode(rows_ND, dtype)),
                ("decode", lambda: codec.decode(encoded_NB, width, dtype)),
            ):
                case = {"codec": name, "T": tokens, "D": width, "dtype": str(dtype).removeprefix("torch.")}
                found.append(row(op, impl, case, times_us(call), nbytes, copy_gbps))
        finally:
            kernels._works = works
    return found


def row(
    op: str, impl: str, case: dict[str, Any], times: list[float], nbytes: int, copy_gbps: float
) -> dict[str, Any]:
    median = statistics.median(times)
    gbps = nbytes / median / 1e3
    sys.stdout.write(
        f"{case['codec']:9} {case['dtype']:8} D={case['D']:5} {op} {impl:6} {median:8.1f} us "
        f"{gbps:6.0f} GB/s {gbps / copy_gbps:6.1%}\n"
    )
    measured = {"median_us": median, "min_us": min(times), "max_us": max(times), "n": len(times)}
    return {"op": op, "impl": impl, "case": case, **measured, "gbps": gbps, "share": gbps / copy_gbps}


def times_us(call: Callable[[], object]) -> list[float]:
    for _ in range(3):
        call()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(REPEATS + 1)]
    torch.cuda.synchronize()
    # The host queues everything behind a pause: its own time is not measured.
    torch.cuda._sleep(10_000_000)
    marks[0].record()
    for mark in marks[1:]:
        call()
        mark.record()
    torch.cuda.synchronize()
    return [1e3 * a.elapsed_time(b) for a, b in itertools.pairwise(marks)]


def measure_copy() -> float:
    """GB/s, read and written, of a copy of 512 MiB."""
    source = torch.randn(128 << 20, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.numel() * 4 / statistics.median(times_us(lambda: target.copy_(source))) / 1e3


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=QUESTION)
    parser.add_argument("--codecs", nargs="*", default=NAMES)
    parser.add_argument("--widths", type=int, nargs="*", default=[7168, 2048, 1024])
    parser.add_argument("--megabytes", type=int, default=256, help="of the rows")
    parser.add_argument("--no-rivals", action="store_true")
    parser.add_argument("--out", default=None, help="a results file")
    return parser.parse_args()


if __name__ == "__main__":
    main()
