"""Runs code or tests under compute-sanitizer, which sees one GPU's memory: virtual ranks show it the peers'
too."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace

import pytest

from imbrex.kernels import jit

RACECHECK = "IMBREX_TEST_RACECHECK"
"""A variable of the environment: kernels are compiled as racecheck understands them (`RACECHECK` in
kernels/gemm/shape.cuh)."""
FOUND = 9
"""The exit code where the tool has found something."""


def check_tests(tool: str, *tests: str) -> None:
    """The tests pass once more and the tool, memcheck or racecheck, finds nothing."""
    _check(tool, "-m", "pytest", "-q", "-m", "gpu", *tests)


def check_reads(*tests: str) -> None:
    """The tests pass once more and no kernel reads memory that nobody has written, as initcheck sees it.
    Every tensor has its own. Torch's copies of whole tensors, written or not, are not counted."""
    words = "--print-limit", "100000", sys.executable, "-m", "pytest", "-q", "-m", "gpu", *tests
    seen = _run("initcheck", words, PYTORCH_NO_CUDA_MEMORY_CACHING="1")
    assert "ERROR SUMMARY" in seen, seen[-4000:]
    assert "passed" in seen, seen[-4000:]
    assert "Uninitialized __global__" not in seen, seen[seen.index("Uninitialized __global__") :][:4000]


def check_code(tool: str, code: str) -> None:
    """As `check_tests`, for code that runs to its end."""
    assert "ran" in _check(tool, "-c", f"{code}\nprint('ran')").splitlines()


def compile_for_racecheck() -> None:
    """Lets every kernel of this process be such a variant, where a tool started it."""
    if os.environ.get(RACECHECK):
        load = jit._load
        more = (("RACECHECK", 1),)
        jit._load = lambda variant, device: load(  # type: ignore[assignment]
            replace(variant, defines=(*variant.defines, *more)), device
        )


def _check(tool: str, *words: str) -> str:
    variables = {RACECHECK: "1"} if tool == "racecheck" else {}
    return _run(tool, ("--error-exitcode", str(FOUND), sys.executable, *words), **variables)


def _run(tool: str, words: Sequence[str], **environment: str) -> str:
    if shutil.which("compute-sanitizer") is None:
        pytest.skip("compute-sanitizer is not installed")
    command = ["compute-sanitizer", "--tool", tool, "--report-api-errors", "no", *words]
    ran = subprocess.run(
        command, capture_output=True, text=True, timeout=290, check=False, env=os.environ | environment
    )
    assert ran.returncode == 0, ran.stdout[-4000:] + ran.stderr[-1000:]
    return ran.stdout
