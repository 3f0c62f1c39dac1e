"""`imbrex doctor` tries what it says works, and says why the rest does not."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from multiprocessing.context import SpawnProcess

import pytest
import torch

from imbrex import overlap
from imbrex.bench import machine
from imbrex.cli import doctor, main
from imbrex.codec import CODECS
from imbrex.codec.int8 import Int8
from imbrex.contracts import Output
from imbrex.overlap.serial import Serial
from imbrex.testing import trials
from imbrex.transport import TRANSPORTS
from tests.ranks.pool import warm

TOPO = (
    "\tGPU0\tGPU1\tNIC0\tCPU Affinity\n"
    "GPU0\t X \tNV18\tSYS\t0-63\n"
    "GPU1\tNV18\t X \tPIX\t0-63\n"
    "NIC0\tSYS\tPIX\t X \n"
)


@pytest.mark.untraced
def test_everything_a_processor_needs_works_here(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = warm()  # else its ranks import torch anew
    monkeypatch.setattr(trials.mp, "get_context", lambda _: loaded)
    assert main(["doctor", "--json", "--timeout", "240"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["versions"]["torch"] == torch.__version__
    assert report["devices"][0]["kind"] == "cpu"
    assert report["devices"][0]["cores"] >= 1
    on_cpu = {(c["room"], c["name"]): c for c in report["checks"] if c["device"] == "cpu"}
    named = {("transport", n) for n in TRANSPORTS if n != "nvlink"} | {("codec", n) for n in CODECS}
    named |= {("strategy", n) for n in overlap.STRATEGIES} | {("experts", "loop"), ("experts", "grouped")}
    assert not {("experts", "kernels"), ("transport", "nvlink")} & on_cpu.keys()
    assert on_cpu.keys() >= named
    assert all(c["works"] for c in on_cpu.values()), on_cpu
    assert on_cpu["transport", "alltoall"]["why"] == "2 ranks over gloo"
    assert on_cpu["codec", "int8"]["why"] == "4100 bytes for 4096 bfloat16"
    text = "\n".join(doctor._lines(report))
    assert "works  alltoall       cpu   2 ranks over gloo" in text
    assert "works  zfp1d-4..16    cpu   2048 bytes for 4096 bfloat16 .. 8192 bytes" in text
    if not torch.cuda.is_available():
        assert "  -    alltoall       cuda  torch sees no GPU" in text
        assert "  -    kernels        cuda  imbrex kernels need an NVIDIA GPU" in text


class Boastful(Int8):
    def error_bound(self, amax: float, dtype: torch.dtype) -> float:
        return amax * 1e-6


class Wrong(Serial):
    def run(self, *args, **kwargs) -> Output:
        return Output(y_TD=super().run(*args, **kwargs).y_TD * 1.001)


@pytest.fixture
def few_codecs() -> Iterator[None]:
    """Two codecs and one that is wrong. Afterwards all are there in their order, which tables of pages have:
    `monkeypatch.delitem` would put back those left out behind the others."""
    every = dict(CODECS)
    CODECS.clear()
    CODECS.update({"identity": every["identity"], "int8": every["int8"], "boastful": Boastful})
    yield
    CODECS.clear()
    CODECS.update(every)


@pytest.mark.usefixtures("few_codecs")
def test_a_broken_piece_is_found_and_fails_the_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(overlap.STRATEGIES, "wrong", Wrong)
    monkeypatch.setattr(trials, "try_transports", lambda device, timeout_s: [])
    assert main(["doctor"]) == 1
    printed = capsys.readouterr().out
    assert "  -    boastful       cpu   ArithmeticError: off by" in printed
    assert "  -    wrong          cpu   ArithmeticError: off by 1.0e-03 of the largest value" in printed


def test_ranks_that_do_not_answer_are_the_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    """They begin where Ctrl-C, which ends the command and so them, is not theirs to hear."""
    masks, start = [], SpawnProcess.start

    def look(process: SpawnProcess) -> None:
        start(process)
        masks.append(signal.pthread_sigmask(signal.SIG_BLOCK, ()))

    monkeypatch.setattr(SpawnProcess, "start", look)
    found = trials.try_transports("cpu", timeout_s=0.01)
    assert [signal.SIGINT in mask for mask in masks] == [True, True]
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())
    assert [f.works for f in found] == [False] * len(TRANSPORTS)
    assert found[0].why == "a rank did not answer within 0.01 s"


def test_a_transport_that_gives_wrong_numbers_is_found() -> None:
    with pytest.raises(ArithmeticError, match=r"off by 1\.0e-02"):
        trials._close(torch.tensor([1.0, 1.01]), torch.tensor([1.0, 1.0]))
    with pytest.raises(ArithmeticError, match="off by nan"):
        trials._close(torch.tensor([float("nan")]), torch.tensor([1.0]))


def test_links_are_read_from_the_topology(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_nvidia_smi", lambda *words: TOPO if words == ("topo", "-m") else "")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: True)
    link = machine.links()[0]
    assert link == {"between": [0, 1], "via": "NV18", "peer_access": True}
    report = {"versions": {}, "devices": [], "links": machine.links()[:1], "checks": []}
    assert "  gpu 0 - gpu 1: NV18" in doctor._lines(report)


@pytest.mark.parametrize("seconds", ["0", "nan", "inf"])
def test_a_wrong_timeout_is_refused(capsys: pytest.CaptureFixture[str], seconds: str) -> None:
    with pytest.raises(SystemExit):
        main(["doctor", "--timeout", seconds])
    assert "is not a number of seconds above 0" in capsys.readouterr().err
