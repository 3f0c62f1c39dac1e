"""All benchmarks one after the other: what is started, and that what hangs ends with all it has started."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest
from benchmarks import every

NO_GPU = "runs on a CPU"
OTHERS = {
    "attention": "prints, and has no result file",
    "collectives": NO_GPU,
    "convergence": NO_GPU,
    "events_layer": "is what events.py --layer runs",
    "every": "runs them",
    "exchange_first": "prints, and has no result file",
    "megatron_program": "is what megatron_models.py runs",
    "pareto": NO_GPU,
    "placement": NO_GPU,
    "placement_online": NO_GPU,
    "schedule": NO_GPU,
    "schedule_loss": NO_GPU,
    "simulate": NO_GPU,
    "simulate_cores": NO_GPU,
    "simulate_fit": NO_GPU,
    "simulate_rows": NO_GPU,
}
"""Files of benchmarks/ that `every.py` does not run, and why."""


@pytest.mark.parametrize("gpus", [1, 2, 4])
def test_every_part_is_a_benchmark_that_takes_a_result_file(gpus: int) -> None:
    parts = every.chosen(gpus, None)
    assert parts
    assert len({part.results for part in parts}) == len(parts)
    for part in parts:
        assert (every.HERE / f"{part.name}.py").exists()
        assert (every.HERE / "results" / part.results).exists()
        assert part.command(Path("out"))[-2:] == [part.into, f"out/{part.results}"]
        assert f'"{part.into}' in (every.HERE / f"{part.name}.py").read_text()


def test_every_benchmark_is_a_part_or_says_why_not() -> None:
    parts = {part.name for part in every.PARTS}
    assert parts.isdisjoint(OTHERS)
    assert parts | OTHERS.keys() == {script.stem for script in every.HERE.glob("*.py")}


def test_names_are_those_for_the_gpus() -> None:
    assert [part.name for part in every.chosen(2, ["tiers", "decode"])] == ["tiers", "decode"]
    with pytest.raises(SystemExit, match="--only decode_one: for 2 GPUs there are"):
        every.chosen(2, ["decode_one"])
    assert not every.chosen(0, None)


@pytest.mark.parametrize("script", sorted(every.HERE.glob("*.py")), ids=lambda script: script.stem)
def test_what_a_benchmark_imports_is_there(monkeypatch: pytest.MonkeyPatch, script: Path) -> None:
    """Most of them run on GPUs alone. A script finds its neighbours by their names."""
    monkeypatch.syspath_prepend(str(every.HERE))
    assert importlib.import_module(f"benchmarks.{script.stem}")


SCRIPT = """import os, sys, time
from pathlib import Path
child = os.fork()
if not child or "hangs" in sys.argv:
    time.sleep(60 if "hangs" in sys.argv else 0)
    os._exit(0)
Path(sys.argv[-1]).with_name("said").write_text(" ".join(sys.argv[1:]))
print("done")
sys.exit(3)
"""


def test_a_benchmark_that_hangs_takes_nothing_from_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(every, "HERE", tmp_path)
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "b.json").write_text("kept")
    (tmp_path / "script.py").write_text(SCRIPT)
    options = {"name": "script", "gpus": (1, 1)}
    parts = (
        every.Part(results="a.json", seconds=0.5, words="hangs", **options),
        every.Part(results="b.json", seconds=20, words="x --y 2", into="--json", **options),
        every.Part(results="c.json", seconds=2000, **options),
    )
    monkeypatch.setattr(every, "PARTS", parts)
    monkeypatch.setattr(
        sys, "argv", ["every.py", "--gpus", "1", "--seconds", "100", "--out", str(tmp_path / "o")]
    )
    assert every.main() == 1
    printed = capsys.readouterr().out
    for words in ("its time ran out", "exit 3", "left out: "):
        assert words in printed
    assert (tmp_path / "o" / "b.json").read_text() == "kept"
    assert (tmp_path / "o" / "b.json.log").read_text() == "done\n"
    assert (tmp_path / "o" / "said").read_text() == f"x --y 2 --json {tmp_path / 'o' / 'b.json'}"
