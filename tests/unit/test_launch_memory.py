"""More ranks than this machine's memory can hold are refused by every command before it starts anything."""

from __future__ import annotations

import subprocess
from typing import Any

import pytest
import torch.distributed.launcher.api

from imbrex.cli import main
from imbrex.launch import memory, netlab
from imbrex.launch.local import launch
from imbrex.reproduce import stage, teams
from imbrex.reproduce.training import Size

TOO_MANY = 3
"""With the 500 MB that `small_machine` says are available."""
SAID = (
    "3 ranks need some 0.6 GB of memory (200 MB each, before tokens and experts), and this machine has "
    "0.5 GB available: start at most 2 here, or spread them over several machines with torchrun"
)


@pytest.fixture(autouse=True)
def small_machine(monkeypatch, tmp_path):
    """500 MB, and nothing of it is started: the check is what this is about."""

    def started(*_, **__):
        raise AssertionError("a rank was started")

    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:       24000000 kB\nMemFree:     1 kB\nMemAvailable:     488282 kB\n")
    monkeypatch.setattr(memory.available_bytes, "__defaults__", (meminfo,))
    monkeypatch.setattr(torch.distributed.launcher.api, "elastic_launch", started)
    for room, name in ((subprocess, "Popen"), (teams, "spawn"), (stage.subprocess, "run")):
        monkeypatch.setattr(room, name, started)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", netlab.INSIDE):
        monkeypatch.delenv(name, raising=False)
    return meminfo


@pytest.mark.parametrize(
    "words",
    [
        "demo --device cpu --ep 1 --layers 1 --out {}/out",
        "tune --model 64,64,8,2 --tokens 64 --device cpu",
        "bench layer --model 64,64,8,2 --tokens 64 --device cpu",
        "bench serve --device cpu",
        "netlab run --nodes 1 --inter none -- true",
    ],
)
def test_a_command_refuses_in_one_line(capsys, tmp_path, words):
    flag = "--ranks-per-node" if words.startswith("netlab") else "--ranks"
    command = words.format(tmp_path).split()
    split = command.index("--") if "--" in command else len(command)
    with pytest.raises(SystemExit) as end:
        main([*command[:split], flag, str(TOO_MANY), *command[split:]])
    assert end.value.code == 2
    assert capsys.readouterr().err.splitlines() == [f"imbrex: error: {SAID}"]
    # A run that was there keeps its folder.
    assert [path.name for path in tmp_path.iterdir()] == ["meminfo"]


@pytest.mark.parametrize("command", ["tune", "bench layer"])
def test_a_layer_that_is_larger_than_the_machine_is_refused(capsys, command):
    """DeepSeek-V3's experts take 45.1 GB in float32, and no torch would say so before they are written."""
    words = "--model deepseek-v3 --scale 1 --tokens 64 --ranks 2 --device cpu"
    with pytest.raises(SystemExit):
        main([*command.split(), *words.split()])
    assert capsys.readouterr().err.splitlines() == [
        "imbrex: error: 2 ranks need some 45.5 GB of memory (200 MB each, and 45.1 GB for weights and "
        "tokens), and this machine has 0.5 GB available: give fewer --tokens, or a smaller layer with --scale"
    ]


def test_what_starts_ranks_refuses(tmp_path):
    with pytest.raises(ValueError, match="3 ranks need some"):
        launch([], num_ranks=TOO_MANY, board=tmp_path, timeout_s=1, hint=str)
    with pytest.raises(ValueError, match="3 ranks need some"):
        stage.on_ranks("layers", {}, stage.Network(nodes=1, ranks_per_node=TOO_MANY, inter="none"))
    tasks: Any = [("serial", 0), ("serial", 1)]
    corpus: Any = None
    with pytest.raises(ValueError, match="4 ranks need some"):
        teams.train_all(tasks, corpus, size=Size(), teams=2, folder=str(tmp_path))


def test_what_fits_is_refused_by_nobody():
    """And a count that no float holds is refused like another."""
    assert memory.why_not_start(2, memory.available_bytes()) is None
    assert memory.why_not_start(10**400, 10**9) is not None


def test_a_system_that_does_not_say_refuses_nothing(small_machine):
    small_machine.write_text("MemTotal: 1 kB\n")
    memory.check_memory(10**6)
    small_machine.unlink()
    memory.check_memory(10**6)
