"""Python as a user starts it: bytecode is kept (compiling all sources takes 0.2 s), no coverage is traced."""

from __future__ import annotations

import os
import subprocess
import sys

OURS = ("PYTHONDONTWRITEBYTECODE", "COVERAGE_PROCESS_START", "COVERAGE_PROCESS_CONFIG")


def environment(**others: str) -> dict[str, str]:
    """This process's, without what is for tests alone."""
    return {name: value for name, value in os.environ.items() if name not in OURS} | others


def run_python(code: str) -> str:
    """What `code` prints, in a process of its own that ends well."""
    command = [sys.executable, "-c", code]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment())
    assert ran.returncode == 0, ran.stderr
    return ran.stdout
