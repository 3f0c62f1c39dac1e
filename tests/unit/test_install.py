"""`make` sets up on a fresh machine, and again after a set-up that failed; every pin can be installed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

ROOT = Path(__file__).parents[2]
PYTHON = """#!/bin/sh
# A Python {version} whose pip {does}.
case "$1" in
-c) exec {real} "$@" ;;
-V) echo "Python {version}" ;;
-m) case "$2" in
    venv) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" {venv} ;;
    pip) echo "pip of {version}"; exit {code} ;;
    esac ;;
esac
"""


def fake_python(folder: Path, version: str, *, code: int = 0, venv: str = "") -> str:
    path = folder / f"python{version}"
    does = "fails" if code else "works"
    path.write_text(PYTHON.format(version=version, does=does, real=sys.executable, code=code, venv=venv))
    path.chmod(0o755)
    return str(path)


@pytest.fixture
def make(tmp_path):
    if shutil.which("make") is None:
        pytest.skip("no make")
    for name in ("Makefile", "constraints.txt", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path / name)

    def run(*words: str) -> tuple[int, str]:
        # Not what the `make test` that runs this was told.
        fresh = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
        command = ["make", *words]
        ran = subprocess.run(command, cwd=tmp_path, env=fresh, capture_output=True, text=True, check=False)
        return ran.returncode, ran.stdout + ran.stderr

    return run


@pytest.mark.parametrize("fails", [{"code": 1}, {"venv": "&& exit 1"}], ids=["pip", "venv"])
def test_after_a_failed_set_up_another_python_works(make, tmp_path, fails):
    first, second = fake_python(tmp_path, "3.11.2", **fails), fake_python(tmp_path, "3.12.1")
    code, said = make("install", f"PYTHON={first}")
    assert code
    if "code" in fails:
        assert "could not be installed with Python 3.11.2, see above: mend that, or give another" in said
    code, said = make("install", f"PYTHON={second}")
    assert code == 0, said
    assert "pip of 3.12.1" in said
    # What is installed stays, and is not taken for what was not asked for.
    assert make("install") == (0, "")
    assert "pip" not in make("install", f"PYTHON={second}")[1]
    code, said = make("install", f"PYTHON={first}")
    assert code
    assert f".venv has Python 3.12.1: make clean, then make PYTHON={first}" in said


def test_a_venv_of_the_users_is_installed_into_and_runs_are_not_cleaned(make, tmp_path):
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / "mine").touch()
    python = fake_python(tmp_path, "3.11.2")
    shutil.copy(python, tmp_path / ".venv" / "bin" / "python")
    assert make("install", f"PYTHON={python}")[0] == 0
    assert (tmp_path / ".venv" / "mine").exists()
    (tmp_path / "runs" / "demo").mkdir(parents=True)
    assert make("clean")[0] == 0
    assert (tmp_path / "runs" / "demo").exists()


def test_a_benchmark_finds_what_it_shares_with_the_tests():
    takes = [path.name for path in (ROOT / "benchmarks").glob("*.py") if "from tests." in path.read_text()]
    said = subprocess.run(["make", "-n", "gpu-bench"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert takes
    assert "PYTHONPATH=src:. " in said.stdout


def test_every_pin_can_be_installed_on_the_oldest_python_that_is_promised():
    oldest = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"]
    assert oldest == ">=3.11", "as the README, the Makefile and CONTRIBUTING say"
    newer = []
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        if line.startswith("#"):
            continue
        pin = Requirement(line)
        try:
            wants = metadata.metadata(pin.name)["Requires-Python"] or ""
            version = metadata.version(pin.name)
        except metadata.PackageNotFoundError:
            continue
        if version in pin.specifier and "3.11.0" not in SpecifierSet(wants):
            newer.append(f"{line} wants Python {wants}")
    assert not newer
