"""Runs code or tests under compute-sanitizer, which sees one GPU's memory: virtual ranks show it the peers'
too."""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest

FOUND = 9
"""The exit code where the tool has found something."""


def check_tests(tool: str, *tests: str) -> None:
    """The tests pass once more and the tool, memcheck or racecheck, finds nothing."""
    _check(tool, "-m", "pytest", "-q", "-m", "gpu", *tests)


def check_code(tool: str, code: str) -> None:
    """As `check_tests`, for code that runs to its end."""
    assert "ran" in _check(tool, "-c", f"{code}\nprint('ran')").splitlines()


def _check(tool: str, *words: str) -> str:
    if shutil.which("compute-sanitizer") is None:
        pytest.skip("compute-sanitizer is not installed")
    command = ["compute-sanitizer", "--tool", tool, "--report-api-errors", "no"]
    command += ["--error-exitcode", str(FOUND), sys.executable, *words]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=290, check=False)
    assert ran.returncode == 0, ran.stdout[-4000:] + ran.stderr[-1000:]
    return ran.stdout
