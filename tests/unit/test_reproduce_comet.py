"""Comet's figures and its table: blank, from results that are committed, and as they are measured."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import pytest
import torch

from imbrex.bench.results import write_results
from imbrex.bench.shapes import parse_shape
from imbrex.contracts import Output, Roles
from imbrex.experts.experts import Experts
from imbrex.overlap import Fused
from imbrex.reproduce import Options, comet_figure_8, comet_layer, comet_measured, find, frame
from imbrex.reproduce.frame import Finding

RUN = {
    "command": "by hand",
    "commit": "0000000",
    "date": "2026-11-27",
    "hardware": {"gpu": "H200", "count": 4},
    "versions": {},
}


def check_elsewhere(
    name: str, module: ModuleType, finding: Finding, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where there is no GPU, what is committed says the same, and that it is not of this machine."""
    write_results(folder / f"{name}.json", finding.question, RUN, finding.rows)
    monkeypatch.setattr(frame, "why_not_hopper", lambda: "no GPU")
    monkeypatch.setattr(module, "RESULTS", folder)
    elsewhere = find(name, Options())
    assert (elsewhere.table, elsewhere.verdict) == (finding.table, finding.verdict)
    assert elsewhere.rows == []
    assert f"not this machine, but benchmarks/results/{name}.json (4 x H200" in elsewhere.differs[0]


def test_comets_memory_beside_ours() -> None:
    finding = find("comet-table-3", Options())
    assert [row[2] for row in finding.table] == ["32", "16", "32", "64", "32", "64"]
    assert len(finding.rows) == 18
    # Two buffers of own tokens alone: 2 * 2 MiB * 4096 / 2 tokens of 4096 values.
    mixtral = next(row for row in finding.rows if row["case"] == {"model": "mixtral", "M": 4096, "W": 2})
    assert 32 < mixtral["mib"] < 200
    assert "it is 2.0 times at most" in finding.verdict[0]


def test_comets_figure_8_without_gpus_is_blank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In an installed package, where no results are committed."""
    monkeypatch.setattr(frame, "why_not_hopper", lambda: "no GPU")
    monkeypatch.setattr(comet_figure_8, "RESULTS", tmp_path)
    finding = find("comet-figure-8", Options())
    assert [row[1:5] for row in finding.table] == [
        ("(not said)", "1 x 8", "4096", "18"),
        ("(not said)", "1 x 8", "16384", "26"),
        ("(not said)", "2 x 4", "16384", "46"),
    ]
    assert {cell for row in finding.table for cell in row[5:]} == {""}
    assert finding.rows == []
    assert "Nothing of it was measured" in finding.verdict[-1]


def test_comets_figure_8_names_the_best_split(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    times = {"rows": {-1: 10.0, 4: 30.0, 8: 12.0, 12: 13.0}, "sums": {-1: 20.0, 4: 19.0, 8: 22.0, 12: 25.0}}
    case = {"model": "mixtral", "M": 4096, "W": 4, "TP": 2}
    rows = [
        {"op": op, "impl": comet_figure_8.impl_of(kind, n), "case": case, "median_us": us}
        for kind, op in comet_figure_8.KINDS.items()
        for n, us in times[kind].items()
    ]
    monkeypatch.setattr(frame, "why_not_hopper", lambda: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(comet_figure_8, "measure", lambda model, world, rounds: rows)
    finding = find("comet-figure-8", Options())
    ratios = ["3.000", "1.200"], ["0.950", "1.100"]
    lines = [("rows", "8"), ("sums", "4")]
    assert [row[:7] for row in finding.table[-2:]] == [
        (kind, "mixtral", "2 x 2", "4096", best, *over)
        for (kind, best), over in zip(lines, ratios, strict=True)
    ]
    assert {row[7:] for row in finding.table} == {("",) * 6}
    assert finding.rows == rows
    assert "1.200 to 1.200 times as long" in finding.verdict[-1]

    check_elsewhere("comet-figure-8", comet_figure_8, finding, tmp_path, monkeypatch)


def test_comets_figure_8_times_later_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the first of a schedule ranks compare roles, for which a host waits: those that are timed are of the
    same object."""
    made, ran = [], []

    class Noting(Fused):
        def __init__(self, roles: Any) -> None:
            super().__init__(roles)
            made.append(roles)

        def run(self, x_TD: torch.Tensor, routing: Any, exchange: Any, experts: Any, addend: Any) -> Any:
            ran.append(self.roles)
            used = sum(weight.sum() for weight in experts.parameters())
            return Output(y_TD=x_TD + used)

    monkeypatch.setattr(comet_figure_8, "Fused", Noting)
    experts, none = Experts((0, 1), 8, 8, dtype=torch.bfloat16), cast("Any", None)
    calls = comet_figure_8.calls_of(none, experts, parse_shape("8,8,2,1"), 4, 0)
    for _ in range(2):
        for kind in ("rows", "sums"):
            for call in calls[kind].values():
                call()
    assert ran[: len(ran) // 2] == ran[len(ran) // 2 :]
    assert ran[:3] == [Roles(), Roles(rows=4), Roles(rows=8)]
    assert len(made) == len(ran) // 2 == 2 * 15


@pytest.mark.parametrize(("number", "cases"), [(12, 4), (13, 5), (14, 6)])
def test_comets_layers_without_gpus_are_blank(
    number: int, cases: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In an installed package, where no results are committed."""
    monkeypatch.setattr(frame, "why_not_hopper", lambda: "no GPU")
    monkeypatch.setattr(comet_layer, "RESULTS", tmp_path)
    finding = find(f"comet-figure-{number}", Options())
    assert len(finding.table) == 1 + cases
    assert {cell for row in finding.table[1:] for cell in row[2:]} == {""}
    assert finding.rows == []
    assert "Nothing of it was measured" in finding.verdict[-1]


def test_comets_layers_over_ways_to_divide_the_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    times = {"over NCCL": 3000.0, "serial": 2000.0, "fused": 1000.0}

    def measure(cases: list[comet_layer.Case], world: int, rounds: int) -> list[dict[str, Any]]:
        return [
            {"op": "forward", "impl": way, "case": comet_layer.describe(case, world), "median_us": us}
            for case in cases
            for way, us in times.items()
        ]

    monkeypatch.setattr(frame, "why_not_hopper", lambda: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(comet_layer, "measure", measure)
    finding = find("comet-figure-12", Options())
    assert [row[:2] for row in finding.table[1:]] == [("EP 2 x TP 1", "8192"), ("EP 1 x TP 2", "8192")]
    assert finding.table[1][2:] == ("3.00", "2.00", "1.00", "3.00", "2.00")
    assert len(finding.rows) == 6
    assert "3.00 to 3.00 times as fast" in finding.verdict[-1]

    check_elsewhere("comet-figure-12", comet_layer, finding, tmp_path, monkeypatch)


def layer_row(impl: str, us: float, op: str = "forward", run: int = 0) -> dict[str, Any]:
    return {"run": run, "op": op, "impl": impl, "case": {"model": "mixtral", "M": 4096}, "median_us": us}


def run_on(machine: str, number: int, date: str = "2026-11-27") -> dict[str, Any]:
    count, gpu = machine.split()
    hardware = {"count": int(count), "gpu": f"NVIDIA {gpu}"}
    return {"id": number, "hardware": hardware, "commit": f"abc{number}", "date": date}


def test_comets_layers_are_those_of_a_committed_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The wire costs serial 4 us and fused 1 of them; the faster layer over NCCL takes twice its experts'
    time. A newer run without rivals does not lend its rows, nor other GPUs theirs; on those the wire costs
    nothing that could be told from noise."""
    times = {
        "nccl-a2a": 2500.0,
        "nccl-agrs-bag": 2000.0,
        "floor": 1000.0,
        "imbrex-serial": 1600.0,
        "imbrex-fused": 1250.0,
        "imbrex-experts-alone": 1200.0,
        "imbrex-serial-local": 1200.0,
        "imbrex-fused-local": 1150.0,
    }
    rows = [layer_row("floor", 9.0, "forward+backward")]
    rows += [layer_row(impl, us, run=run) for run in (0, 2) for impl, us in times.items()]
    rows += [layer_row("imbrex-serial-local", 1580.0, run=2), layer_row("imbrex-fused", 1.0, run=1)]
    runs = [run_on(machine, number) for number, machine in enumerate(("2 H200", "2 H200", "4 H100"))]
    (tmp_path / "fused.json").write_text(json.dumps({"rows": rows, "runs": runs}))
    monkeypatch.setattr(comet_measured, "RESULTS", tmp_path)
    found = comet_measured.layers(Options())
    assert found.table[1:] == (
        ("2 H200", "mixtral", "4096", "2.00", "1.60", "1.25", "1.60", "75%"),
        ("4 H100", "mixtral", "4096", "2.00", "1.60", "1.25", "1.60", ""),
    )
    assert "abc1" not in found.differs[0]
    assert comet_measured.breakdown(Options()).table[1:] == (
        ("2 H200", "mixtral", "4096", "50%", "25%", "4%"),
        ("4 H100", "mixtral", "4096", "50%", "25%", "4%"),
    )
    blank = comet_measured.end_to_end(Options())
    assert len(blank.table) == 1
    assert blank.differs[0].startswith("Blank")


def test_comets_models_of_few_layers_are_not_those_of_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both may be in the file; figure 9 is of whole models, and says how many layers a row has. What raced in
    another run is compared with that run's."""
    times = {
        ("imbrex", 2, 0): 1000.0,
        ("transformers-ep", 2, 0): 2000.0,
        ("imbrex", 2, 1): 1500.0,
        ("transformers-ddp", 2, 1): 2000.0,
        ("imbrex", 32, 1): 9000.0,
        ("transformers-ep", 32, 1): 12000.0,
        ("imbrex", 32, 2): 1.0,
    }
    rows = [
        {"impl": impl, "op": "prefill", "median_us": us, "run": run}
        | {"case": {"model": "mixtral-8x7b", "layers": layers, "T": 4096}}
        for (impl, layers, run), us in times.items()
    ]
    runs = [run_on("2 H200", number) for number in range(3)]
    (tmp_path / "models.json").write_text(json.dumps({"rows": rows, "runs": runs}))
    monkeypatch.setattr(comet_measured, "RESULTS", tmp_path)
    found = comet_measured.end_to_end(Options())
    assert found.table[:-1] == (
        ("Mixtral", "2", "8192", "1.00", "2.00", "", ""),
        ("Mixtral", "2", "8192", "1.50", "", "2.00", ""),
        ("Mixtral", "32", "8192", "9.00", "12.00", "", ""),
    )
    assert found.table[-1][4:] == ("38 %", "25 %", "")
    assert "abc2" not in found.differs[0]
