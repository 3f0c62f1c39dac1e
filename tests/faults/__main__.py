"""`make faults`: puts known faults back into the code, one at a time, and demands that a test catches each.

    python -m tests.faults [--only NAME ...] [--list]

A fault is an exact text of one file and what stands in its place (`tests.faults.known`). The text must occur
once: a line that has moved makes the script fail, so that the list follows the code. Every fault goes into a
copy of `src` of its own, and the tests that should catch it, few, run against that copy. They are run once
without a fault before: a test that fails anyway catches nothing. A fault is caught by a test that fails, by
the emulated machine, which stops at what no GPU allows, or by the system, which ends a process whose kernel
leaves its memory; not by a test that cannot be collected. The exit code is 1 where one survives, 2 where one
cannot be put in.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from tests.faults.fault import Fault
from tests.faults.known import FAULTS

ROOT = Path(__file__).parents[2]
PACKAGE = Path("src/imbrex")
LIMIT_S = 280
"""Of one selection; pytest's own time-out ends a single test before it."""
MARK = "IMBREX_FAULT"
"""In the environment of everything that a fault's tests start."""
FAILED = 1
"""pytest's exit code where tests ran and some failed; the others say that nothing was tried."""


def why_not_fault(fault: Fault, package: Path) -> str | None:
    """Why a fault cannot be put into the files of `package`, or `None`."""
    path = package / fault.file
    if not path.is_file():
        return f"{fault.name}: there is no src/imbrex/{fault.file}; write down where the code is now"
    times = path.read_text().count(fault.old)
    if times != 1:
        return (
            f"{fault.name}: its text stands {times} times in src/imbrex/{fault.file}, not once; "
            "write down the code as it is now"
        )
    return None


def put_in(fault: Fault, package: Path) -> None:
    path = package / fault.file
    path.write_text(path.read_text().replace(fault.old, fault.new))


def run_tests(selection: Sequence[str], package: Path, limit_s: float = LIMIT_S) -> tuple[int | None, str]:
    """pytest's exit code, `None` where it ran too long, and what it said."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "--no-header", "-p", "no:cacheprovider"]
    # What the emulated machine says before it stops the process is written past Python.
    command += ["--capture=sys"]
    folder = str(package.parent)
    environment = os.environ | {"PYTHONPATH": folder, "OMP_NUM_THREADS": "1", MARK: folder}
    with tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen(
            [*command, *(f"tests/{test}" for test in selection)],
            cwd=ROOT,
            env=environment | {"PYTHONDONTWRITEBYTECODE": "1"},
            stdout=said,
            stderr=said,
        )
        code = None
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            pass
        finally:
            process.kill()
            process.wait()
            end_marked(folder)
        said.seek(0)
        return code, said.read()


def end_marked(folder: str) -> None:
    """Kill what the tests have left behind: ranks that outlive their launcher, where that is the fault."""
    wanted = f"{MARK}={folder}".encode()
    for environ in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            if wanted in environ.read_bytes().split(b"\0"):
                os.kill(int(environ.parent.name), signal.SIGKILL)


def failed_test(said: str) -> str:
    named = re.search(r"^(?:FAILED|ERROR) tests/(\S+)", said, re.MULTILINE)
    return named[1] if named else "a test without a name"


def verdict(fault: Fault, folder: Path) -> tuple[bool, str]:
    """Whether a fault is caught, and by what; else what happened."""
    package = folder / "imbrex"
    shutil.copytree(ROOT / PACKAGE, package, ignore=shutil.ignore_patterns("__pycache__"))
    if (moved := why_not_fault(fault, package)) is not None:
        return False, moved  # somebody has changed the code meanwhile
    put_in(fault, package)
    code, said = run_tests(fault.tests, package)
    if code == FAILED:
        return True, failed_test(said)
    if stopped := re.search(r"^emulated CUDA: .*", said, re.MULTILINE):
        return True, stopped[0]
    if code == -signal.SIGSEGV:
        return True, "a segmentation fault"
    if code is None:
        return False, f"did not end within {LIMIT_S} s"
    return False, "SURVIVES" if code == 0 else f"pytest ended with {code}: {said[-400:]}"


def has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="tests.faults", description="Put known faults back into the code.")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these faults alone")
    parser.add_argument("--list", action="store_true", help="print the faults and run nothing")
    asked = parser.parse_args()
    names = [fault.name for fault in FAULTS]
    unknown = [name for name in asked.only or () if name not in names]
    if unknown:
        parser.error(f"no fault is called {unknown[0]}; --list prints them")
    return asked


def run(faults: Sequence[Fault]) -> int:
    """Try the faults; how many survive."""
    selection = sorted({test for fault in faults for test in fault.tests})
    code, said = run_tests(selection, ROOT / PACKAGE, LIMIT_S * len(selection))
    if code != 0:
        print(f"without any fault the tests end with {code}:\n{said[-3000:]}")
        return len(faults)
    survivors = 0
    for fault in faults:
        begin = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="imbrex-fault-") as folder:
            caught, by = verdict(fault, Path(folder))
        survivors += not caught
        print(f"{fault.name:<42} {fault.file:<34} {time.monotonic() - begin:5.1f} s  {by}", flush=True)
    print(f"{len(faults) - survivors} of {len(faults)} faults are caught")
    return survivors


def main() -> int:
    asked = arguments()
    faults = [fault for fault in FAULTS if not asked.only or fault.name in asked.only]
    problems = [why for fault in faults if (why := why_not_fault(fault, ROOT / PACKAGE))]
    print("\n".join(problems), end="\n" if problems else "")
    if asked.list:
        for fault in faults:
            print(f"{fault.name:<42} {fault.file:<34} {'gpu: ' if fault.gpu else ''}{fault.what}")
    if problems or asked.list:
        return 2 if problems else 0
    gpu = has_gpu()
    for fault in faults:
        if fault.gpu and not gpu:
            print(f"{fault.name:<42} {fault.file:<34}         left out: needs a GPU")
    return int(run([fault for fault in faults if gpu or not fault.gpu]) > 0)


if __name__ == "__main__":
    sys.exit(main())
