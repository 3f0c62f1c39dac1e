"""The two-tier network: what is built, that a command runs on it, and that nothing of it is left."""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from imbrex.cli import main
from imbrex.launch import netlab

SAY = """
import os, socket, sys, time
here = os.environ
names = {line.split(":")[0].strip() for line in open("/proc/net/dev") if ":" in line}
with open(sys.argv[1] + "/" + here["RANK"], "w") as out:
    out.write(f"{here['WORLD_SIZE']} {here['LOCAL_WORLD_SIZE']} {here['MASTER_ADDR']} {sorted(names)}")
time.sleep(float(sys.argv[2]))
sys.exit(3 if len(sys.argv) > 3 and here["RANK"] == "1" else 0)
"""


def can_make_namespaces() -> bool:
    if any(shutil.which(tool) is None for tool in ("ip", "tc", "unshare")):
        return False
    flags = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    probe = ["unshare", "--net", "--mount", "--pid", "--fork", *flags, "ip", "link", "add", "type", "veth"]
    return subprocess.run(probe, capture_output=True, check=False).returncode == 0


needs_namespaces = pytest.mark.skipif(not can_make_namespaces(), reason="no right to make namespaces")


def command(tmp_path: Path, *words: str) -> list[str]:
    (tmp_path / "say.py").write_text(SAY)
    (tmp_path / "out").mkdir()
    here = [sys.executable, "-m", "imbrex", "netlab", "run", "--nodes", "2", "--ranks-per-node", "1"]
    return [*here, "--inter", "200mbit", "--", str(tmp_path / "say.py"), str(tmp_path / "out"), *words]


@needs_namespaces
def test_a_command_runs_on_every_node_and_its_failure_is_ours(tmp_path: Path) -> None:
    done = subprocess.run(command(tmp_path, "0", "fail"), capture_output=True, text=True, timeout=240)
    assert done.returncode == 3, done.stderr
    for rank in "01":
        said = (tmp_path / "out" / rank).read_text()
        assert said.startswith("2 1 198.18.7.1 ")
        # Nothing of the host's network is there.
        assert said.endswith("['eth0', 'lo']")


def test_the_code_of_the_rank_that_failed_comes_soon() -> None:
    """Ranks that are ended for its sake neither hide it nor are waited for one by one."""
    words = ["exit 3", *["sleep 60"] * 5]
    ranks = [subprocess.Popen(["sh", "-c", word]) for word in words]
    begin = time.monotonic()
    assert netlab._wait(ranks, begin + 50) == 3
    assert time.monotonic() - begin < 3 * netlab.GRACE_S
    assert [rank.poll() for rank in ranks] == [3] + [-9] * 5


def test_the_time_out_ends_what_is_left() -> None:
    ranks = [subprocess.Popen(["sh", "-c", word]) for word in ("exit 0", "sleep 60")]
    assert netlab._wait(ranks, time.monotonic() + 0.3) is None
    assert [rank.poll() for rank in ranks] == [0, -9]


def as_nobody() -> list[str]:
    """Words before a command that run it as another user without any right, whoever runs the tests."""
    if os.geteuid() != 0:
        return []
    words = ["unshare", "--user", "--map-user=1000", "--map-group=1000"]
    works = subprocess.run([*words, "true"], capture_output=True, check=False).returncode == 0
    return words if works else ["false"]


@pytest.mark.untraced
@needs_namespaces
@pytest.mark.skipif(as_nobody() == ["false"], reason="no right to become another user")
def test_a_user_without_rights_gets_the_same_network(tmp_path: Path) -> None:
    rights = [*as_nobody(), "grep", "CapEff:\t0000000000000000", "/proc/self/status"]
    assert subprocess.run(rights, capture_output=True, check=False).returncode == 0
    done = subprocess.run(
        [*as_nobody(), *command(tmp_path, "0")], capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    for rank in "01":
        assert (tmp_path / "out" / rank).read_text() == "2 1 198.18.7.1 ['eth0', 'lo']"


@pytest.mark.untraced
@needs_namespaces
def test_a_kill_leaves_nothing(tmp_path: Path) -> None:
    process = subprocess.Popen(command(tmp_path, "600"), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    end = time.monotonic() + 200
    while len(list((tmp_path / "out").iterdir())) < 2 and time.monotonic() < end:
        time.sleep(0.2)
    assert len(list((tmp_path / "out").iterdir())) == 2
    process.send_signal(signal.SIGKILL)
    process.wait()
    end = time.monotonic() + 30
    while alive(str(tmp_path)) and time.monotonic() < end:
        time.sleep(0.1)
    assert alive(str(tmp_path)) == []


def alive(word: str) -> list[int]:
    """Processes with `word` in their command line."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                line = (entry / "cmdline").read_bytes().decode(errors="replace")
            except OSError:
                continue
            if word in line and "say.py" in line:
                found.append(int(entry.name))
    return found


def test_the_network_that_is_built() -> None:
    lines = netlab.plan(2, "1gbit", "10gbit")
    limited = [line for line in lines if "qdisc" in line]
    assert [line for line in limited if "rate 1gbit" in line] == [
        "tc -n n0 qdisc add dev eth0 root tbf rate 1gbit burst 256kb limit 64mb",
        "tc qdisc add dev p0 root tbf rate 1gbit burst 256kb limit 64mb",
        "tc -n n1 qdisc add dev eth0 root tbf rate 1gbit burst 256kb limit 64mb",
        "tc qdisc add dev p1 root tbf rate 1gbit burst 256kb limit 64mb",
    ]
    assert len([line for line in limited if "dev lo root tbf rate 10gbit" in line]) == 2
    assert not any("default" in line or "route" in line for line in lines)
    assert not any("qdisc" in line for line in netlab.plan(3, "none", "none"))


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--inter", "fast", "--", "x.py"], "--inter 'fast' is not a rate; use e.g. 1gbit"),
        (["--inter", "0.0gbit", "--", "x.py"], "--inter '0.0gbit' is not a rate; use e.g. 1gbit"),
        (["--timeout", "0", "--", "x.py"], "--timeout 0 is no time; give seconds"),
        (["--nodes", "0", "--", "x.py"], "0 nodes of 2 ranks; use 1 to 64 nodes of at least 1"),
        ([], "no command; give one after --"),
        (["--gpus", "--nodes", "40", "--", "x.py"], "80 ranks want a GPU each, "),
        (["--gpus", "--inter", "1gbit", "--", "x.py"], "limit namespaces; with --gpus leave them out"),
    ],
)
def test_what_cannot_be_built(words: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["netlab", "run", *words])
    assert ended.value.code == 2
    assert says in capsys.readouterr().err


def test_nodes_of_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd) -> None:
    """What every rank is told, without any GPU; and that ranks which do not end are ended."""
    monkeypatch.setattr(netlab.torch.cuda, "device_count", lambda: 4)
    tell = "import os; h=os.environ; print(*(h[k] for k in ('RANK', 'LOCAL_RANK', 'LOCAL_WORLD_SIZE', "
    tell += "'NCCL_HOSTID', 'CUDA_VISIBLE_DEVICES')))"
    words = ["netlab", "run", "--gpus", "--nodes", "2", "--ranks-per-node", "2"]
    assert main([*words, "--", sys.executable, "-c", tell]) == 0
    assert sorted(capfd.readouterr().out.splitlines()) == [
        "0 0 2 netlab-0 0,1",
        "1 1 2 netlab-0 0,1",
        "2 0 2 netlab-1 2,3",
        "3 1 2 netlab-1 2,3",
    ]
    with pytest.raises(SystemExit):
        main([*words, "--", "nowhere.py"])
    assert "nowhere.py is not there; give a script or a command" in capfd.readouterr().err
    begin = time.monotonic()
    assert main([*words, "--timeout", "0.5", "--", "sleep", "60"]) == 124
    assert time.monotonic() - begin < 30
    assert "not done after 0.5 s" in capfd.readouterr().err


def test_ranks_know_the_command_that_started_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    monkeypatch.delenv(netlab.COMMAND, raising=False)
    assert netlab.started_by() == "torchrun --nproc-per-node 3"
    args = argparse.Namespace(gpus=False, inter="1Gbit", intra="none", nodes=2, ranks_per_node=4)
    for name, value in netlab.rank_environment(args, 5, 1, 1).items():
        monkeypatch.setenv(name, value)
    words = "--inter 1Gbit --intra none --nodes 2 --ranks-per-node 4 --"
    assert netlab.started_by() == f"imbrex netlab run {words}"


def test_without_the_right_to_make_namespaces(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    refused = subprocess.CompletedProcess([], 1, "", "unshare: unshare failed: Operation not permitted\n")
    monkeypatch.setattr(netlab.subprocess, "run", lambda *_, **__: refused)
    monkeypatch.setattr(netlab.shutil, "which", lambda tool: tool)
    with pytest.raises(SystemExit):
        main(["netlab", "run", "--", "x.py"])
    assert (
        "cannot be made (unshare: unshare failed: Operation not permitted); be root"
        in capsys.readouterr().err
    )
    monkeypatch.setattr(netlab.shutil, "which", lambda tool: None if tool == "tc" else tool)
    with pytest.raises(SystemExit):
        main(["netlab", "run", "--", "x.py"])
    assert "netlab: tc not found; install iproute2" in capsys.readouterr().err
