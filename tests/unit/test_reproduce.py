"""The papers' tables: what is asked and told, the arithmetic behind them, and the pictures."""

from __future__ import annotations

import json
import re
import statistics
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from imbrex.cli import main
from imbrex.cli import reproduce as command
from imbrex.codec import make
from imbrex.contracts import Codec
from imbrex.demo.training import Shape
from imbrex.reproduce import (
    TABLES,
    Finding,
    Options,
    chart,
    find,
    frame,
    hybrid,
    papers,
    table_1,
    table_6,
    table_7,
    table_10,
)
from imbrex.reproduce.convergence import learned, summary
from imbrex.reproduce.exchanges import median
from imbrex.reproduce.figure_9 import _bound
from imbrex.reproduce.layers import Timed, Way, settings
from imbrex.reproduce.stage import Network, RanOn
from imbrex.reproduce.testbed import TESTBED, Layer, every_layer, schemoe, tutel
from imbrex.reproduce.training import VARIANTS, DenseLayer, OnDevice

FOUND = [
    {"variant": "none", "seed": 0, "held_out_nats": 2.0},
    {"variant": "int8", "seed": 0, "held_out_nats": 2.01},
    {"variant": "none", "seed": 1, "held_out_nats": 2.2},
    {"variant": "int8", "seed": 1, "held_out_nats": 2.17},
    {"variant": "int8", "seed": 2, "held_out_nats": 9.0},
]


def test_differences_are_paired_by_seed() -> None:
    none, int8 = learned(FOUND)
    assert none.apart == {0: 0.0, 1: 0.0}
    assert int8.apart == pytest.approx({0: 0.01, 1: -0.03})
    assert int8.mean == pytest.approx(statistics.fmean([2.01, 2.17, 9.0]))
    assert "+0.0100, -0.0300" in summary(FOUND)[-1]


def test_the_testbed_is_the_paper_s() -> None:
    layers = list(every_layer())
    assert len(layers) == 675
    assert sum(layer.nbytes >= 200 << 20 for layer in layers) == 60
    ablation = Layer(tokens=8 * 2048 * 1.2, width=8192, inner=8192)
    assert ablation.nbytes == pytest.approx(644_245_094, abs=1)
    naive = schemoe(ablation, TESTBED, codec=False, order=False, pipe=False)
    assert naive == pytest.approx(2.401, rel=0.02)
    assert schemoe(ablation, TESTBED, order=False, pipe=False) == pytest.approx(1.264, rel=0.05)
    gains = [tutel(layer, TESTBED) / schemoe(layer, TESTBED, codec=False) for layer in layers[::7]]
    assert statistics.fmean(gains) == pytest.approx(1.22, abs=0.03)


def test_eq_18() -> None:
    assert _bound(Network(nodes=2, ranks_per_node=4)) == pytest.approx(28 / 16)
    assert _bound(Network(nodes=2, ranks_per_node=1)) == 1.0


@pytest.mark.parametrize(
    ("picture", "shape", "count"),
    [
        # A background, two series in the legend, three bars.
        (chart.bars({"a": {"x": 1.0, "y": 2.0}, "b": {"x": 3.0}}, "ms"), "rect", 6),
        (chart.lines({"x": [(1, 10), (100, 20)]}, "bytes", "ms", logarithmic=True), "polyline", 1),
        (chart.dots({"int8": [0.01, -0.02], "fp8": [0.0]}, "nats", bands=(-0.02, 0.02)), "circle", 3),
    ],
    ids=["bars", "lines", "dots"],
)
def test_pictures_are_svg(picture: str, shape: str, count: int) -> None:
    root = ET.fromstring(picture)
    assert root.tag.endswith("svg")
    assert len(root.findall(f".//{{*}}{shape}")) == count


def _made(asked: Options) -> Finding:
    return Finding(
        title="A table",
        question="Is it so?",
        head=("way", "here"),
        table=(("naive", "1"),),
        differs=(f"full: {asked.full}",),
        verdict=("It is.",),
        rows=[{"op": "o", "impl": "i", "case": {}, "median_us": 1.0, "n": 20}],
        chart=chart.bars({"naive": {"here": 1.0}}, "times"),
    )


def test_the_command_writes_rows_a_plot_and_the_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "find", lambda name, asked: _made(asked))
    assert main(["reproduce", "schemoe-table-10", "--full", "--out", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "| naive | 1" in said
    assert "full: True" in said
    written = json.loads((tmp_path / "schemoe-table-10.json").read_text())
    assert written["rows"][0]["median_us"] == 1.0
    assert written["runs"][0]["command"] == "imbrex reproduce schemoe-table-10 --full"
    assert (tmp_path / "schemoe-table-10.svg").read_text().startswith("<svg")
    assert (tmp_path / "schemoe-table-10.md").read_text() in said


def test_a_busy_machine_is_said_of_what_was_timed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command.os, "cpu_count", lambda: 2)
    busy = "imbrex: others were using the machine (load 1.5 on 2 cores when "
    for load, rows, said in ((0.9, None, ""), (1.5, None, busy), (1.5, [{"op": "predicted"}], "")):
        monkeypatch.setattr(command.os, "getloadavg", lambda load=load: (load, 0.0, 0.0))
        made = _made(Options())
        made = made if rows is None else replace(made, rows=rows)
        monkeypatch.setattr(command, "find", lambda name, asked, made=made: made)
        assert main(["reproduce", "schemoe-table-1", "--out", str(tmp_path)]) == 0
        err = capsys.readouterr().err
        assert err.startswith(said)
        assert bool(err) == bool(said)


def test_the_list_and_an_unknown_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reproduce", "--list"]) == 0
    said = capsys.readouterr().out
    assert [name for name in (*TABLES, "schemoe-figure-8") if f"{name} " not in said] == []
    with pytest.raises(ValueError, match="'table-99' is not known; use one of schemoe-table-1, "):
        find("table-99", Options())


def test_a_text_that_is_not_there_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["reproduce", "schemoe-table-6", "--data", "/no/such/text"])
    said = "cannot read the data file /no/such/text: No such file or directory: give files that can be read"
    assert capsys.readouterr().err == f"imbrex: error: {said}\n"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (
            ["schemoe-table-10", "--rounds", "-3"],
            "-3 rounds; give at least 1, or 0 for schemoe-table-10's own",
        ),
        (["schemoe-figure-8", "--data", "a"], "schemoe-table-4 reads no text; leave --data out, or ask for"),
        (["schemoe-table-6", "--rounds", "2"], "schemoe-table-6 times nothing; leave --rounds out"),
        (["schemoe-table-1", "--out", __file__], "cannot be made (File exists); give another --out"),
        (["schemoe-table-1", "--out", ""], "--out is empty: give a folder"),
    ],
)
def test_what_cannot_be_is_said_before_anything_is_measured(
    words: list[str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        main(["reproduce", *words])
    assert ended.value.code == 2
    assert says in capsys.readouterr().err


def test_where_it_ran_is_the_case_of_a_row() -> None:
    network = Network(nodes=2, ranks_per_node=4, inter="200mbit", intra="70mbit")
    assert RanOn(network=network).case == {
        "nodes": 2, "ranks_per_node": 4, "network": "netlab", "rates": "200mbit between nodes, 70mbit inside"
    }  # fmt: skip
    assert str(RanOn(network=network)) == "netlab 2 x 4, 200mbit between nodes, 70mbit inside"
    plain = RanOn(network=network, why_not="tc not found")
    assert (str(plain), plain.case["network"], plain.case["rates"]) == (
        "loopback (tc not found)", "loopback", "no limit"
    )  # fmt: skip


def test_table_10_from_measured_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Naive 4 s, then 2, 1.6, 1: the gains are 1, 2, 2.5 and 4, and each step's share 2, 1.25 and 1.6."""
    steps = dict(zip(table_10.WAYS, (4.0, 2.0, 1.6, 1.0), strict=True))
    told = {
        name: {
            "forward": s / 4,
            "backward": s * 3 / 4,
            "shortest": s,
            "longest": s,
            "moving": s / 2,
            "experts": 0.5,
        }
        for name, s in steps.items()
    }
    asked: list[dict] = []

    def measured(_job: str, settings: dict, network: Network, **_: float) -> tuple[dict, RanOn]:
        asked.append(settings)
        return {name: told[name] for name in settings["ways"]}, RanOn(network=network)

    monkeypatch.setattr(table_10, "on_ranks", measured)
    found = table_10.find(Options())
    assert "All three together: 4.00 times faster than naive" in found.verdict[0]
    assert "codec alone 2.00, all-to-all and order after it 2.00" in found.verdict[1]
    assert [row[4:] for row in found.table] == [
        ("1.00x", "1.00x"), ("2.00x", "2.00x"), ("2.50x", "1.25x"), ("4.00x", "1.60x")
    ]  # fmt: skip
    assert {row["impl"] for row in found.rows} >= set(table_10.PAPER)
    assert all(row["case"]["network"] == "netlab" for row in found.rows)
    # Experts that take 0.5 s, however wide, where 1.917 / 1.5 = 1.278 s are asked for: 2.556 times as wide.
    assert [(len(one["ways"]), one["work"]["inner"]) for one in asked] == [
        (1, 2816), (4, 7168), (4, 18304), (4, 46784)
    ]  # fmt: skip
    assert found.rows[0]["case"]["exchange_over_experts"] == 3.83
    assert "not held: 3.83 for 1.5" in found.verdict[2]
    assert "hiding everything would be 2.71 times" in found.verdict[3]
    assert not table_10._held(1.41)


def test_table_10_is_measured_again_until_the_ratio_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    """Experts of width 2816 take 1.5 s while the profile runs and 1.2 s afterwards, the link 1.917 s."""
    asked: list[int] = []

    def measured(_job: str, settings: dict, network: Network, **_: float) -> tuple[dict, RanOn]:
        asked.append(settings["work"]["inner"])
        experts = asked[-1] / 2816 * (1.5 if len(asked) == 1 else 1.2)
        times = {"forward": 1.0, "backward": 2.0, "shortest": 3.0, "longest": 3.0, "moving": 1.0}
        return {name: times | {"experts": experts} for name in settings["ways"]}, RanOn(network=network)

    monkeypatch.setattr(table_10, "on_ranks", measured)
    found = table_10.find(Options())
    assert asked == [2816, 2368, 3008]  # 1.90 times the experts with 2368, 1.50 with 3008
    assert found.rows[0]["case"] | {"inner": 3008, "exchange_over_experts": 1.5} == found.rows[0]["case"]
    assert not any("not held" in line for line in found.verdict)


def test_table_1_says_what_is_wrong_with_the_paper_s() -> None:
    assert "21.1, 20.3, 21.0, 21.1 ms and does all else in 20.4, 18.6, 17.5, 14.8 ms" in table_1._growth()
    assert Timed(forward=1.0, backward=2.0, shortest=3, longest=3).step == 3.0
    assert settings({"a": Way()}, table_1.WORK, rounds=2)["ways"]["a"]["schedule"] == "serial"
    assert median({"seconds": [3.0, 1.0, 2.0]}) == 2.0


def test_table_7_says_at_which_share_of_moving_it_ran() -> None:
    def ran(moving: float) -> dict[int, dict[str, Timed]]:
        one = Timed(forward=0.4, backward=0.6, shortest=0.9, longest=1.1, moving=moving)
        return {layers: {"serial": one} for layers in (12, 24)}

    assert table_7.share_of_moving(ran(0.55)).endswith("51% to 59% in the paper's table 1: the same share.")
    assert "72% to 72%" in table_7.share_of_moving(ran(0.72))
    assert "another share" in table_7.share_of_moving(ran(0.72))


def test_table_6_says_whether_experts_gain() -> None:
    for dense, says in ((2.1, "gain 0.100 nats over"), (1.95, "lose 0.050 nats to")):
        found = [*FOUND, *({"variant": v, "seed": 0, "held_out_nats": n} for v, n in
                           (("dense", dense), ("int8-truncated", 2.03)))]  # fmt: skip
        assert any(says in line for line in table_6._verdict(learned(found), full=True))


def test_table_6_names_every_codec_it_claims_for() -> None:
    assert set(table_6.HARMLESS) <= set(VARIANTS)
    assert set(table_6.PAPER) <= set(VARIANTS)


def test_a_codec_on_another_device_writes_the_same() -> None:
    rows, plain = torch.randn(3, 64), make("int8")
    moved = OnDevice(plain, "cpu")
    assert isinstance(moved, Codec)
    assert torch.equal(moved.encode(rows, rows.dtype), plain.encode(rows, rows.dtype))
    assert moved.nbytes(64, rows.dtype) == 68
    assert moved.error_bound(1.0, rows.dtype) == plain.error_bound(1.0, rows.dtype)


def test_the_dense_layer_is_one_expert() -> None:
    layer = DenseLayer(Shape(hidden_size=8, expert_width=4))
    x_BSD = torch.randn(2, 3, 8)
    gate, up = (x_BSD @ layer.gate_up.weight.T).chunk(2, -1)
    wanted = (torch.nn.functional.silu(gate) * up) @ layer.down.weight.T
    assert torch.allclose(layer(x_BSD), wanted, atol=1e-6)


@pytest.mark.parametrize(("name", "dtype"), [("hybrid-ep-bandwidth", "bf16"), ("hybrid-ep-fp8", "fp8")])
def test_hybrid_eps_sweep_without_gpus_is_the_committed_one(
    name: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(frame, "why_not_hopper", lambda: "no GPU")
    finding = find(name, Options())
    rows = json.loads(hybrid.COMMITTED.read_text())["rows"]
    kernels = [row for row in rows if row["case"].get("D") == 8192 and row["case"]["dtype"] == dtype]
    ours = [line for line in finding.table if line[0].endswith("GPUs")]
    assert sorted(cell for line in ours for cell in line[3:-1]) == sorted(
        f"{row['logical_gbps']:.0f}" for row in kernels
    )
    assert [line[-1] for line in finding.table if line[0] == "the paper"] == (
        ["8", "about 4", "16"] if dtype == "bf16" else []
    )
    assert "not this machine" in finding.differs[0]
    assert "revision" in finding.differs[0]
    assert finding.rows == []
    assert "nothing of it was measured now" in finding.verdict[-1]
    ET.fromstring(finding.chart)


def test_hybrid_eps_sweep_is_blank_without_gpus_and_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(frame, "why_not_hopper", lambda: "no GPU")
    monkeypatch.setattr(hybrid, "COMMITTED", tmp_path / "none.json")
    finding = find("hybrid-ep-bandwidth", Options())
    assert {cell for line in finding.table for cell in line[3:-1]} == {""}
    assert "nothing; no GPU here runs our kernels" in finding.differs[0]
    assert finding.verdict == ("Nothing was measured, so nothing is shown.",)


def test_hybrid_eps_sweep_is_of_the_gpus_that_are_here(monkeypatch: pytest.MonkeyPatch) -> None:
    def row(sms: int, dtype: str, rate: float) -> dict:
        case = {"W": 4, "layout": "compact", "dtype": dtype}
        return {"op": "dispatch", "impl": "imbrex", "case": case, "num_sms": sms, "logical_gbps": rate}

    swept = [row(4, "bf16", 200.0), row(8, "bf16", 390.0), row(16, "bf16", 400.0), row(8, "fp8", 1.0)]
    monkeypatch.setattr(frame, "why_not_hopper", lambda: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(hybrid, "measure", lambda world, rounds: swept)
    finding = find("hybrid-ep-bandwidth", Options())
    ours = ("4 GPUs", "dispatch", "compact", "", "", "200", "390", "400", "", "", "8")
    assert [line for line in finding.table if line[0] != "the paper"] == [ours]
    assert finding.rows == swept[:3]
    assert finding.differs[0].startswith("Ours: 4 GPUs of this machine.")


PAPERS_TERA = ["943", "597", "645", "665", "698", "728", "800"]


def test_hybrid_eps_models_are_blank_without_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hybrid, "STEPS", tmp_path / "none.json")
    finding = find("hybrid-ep-end-to-end", Options())
    assert {line[-2:] for line in finding.table} == {("", "")}
    assert [line[3] for line in finding.table] == PAPERS_TERA
    assert finding.differs[0].startswith("Nothing of it is measured here")
    assert finding.verdict[0] == "No claim is made."
    with pytest.raises(ValueError, match="times nothing"):
        find("hybrid-ep-end-to-end", Options(rounds=2))


def test_hybrid_eps_models_stand_beside_the_committed_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def row(model: str, program: str, way: str, tera: float) -> dict:
        return {
            "run": 0,
            "op": "step",
            "impl": way,
            "case": {"model": model, "program": program},
            "tflops": tera,
        }

    machine = {"hardware": {"count": 2, "gpu": "NVIDIA H200"}, "commit": "abc", "date": "2026-11-27", "id": 0}
    rows = [
        row("qwen3-235b-a22b", "ddp", "alltoall", 200.0),
        row("qwen3-235b-a22b", "ddp", "hybridep", 230.0),
        row("deepseek-v3", "fsdp", "hybridep", 99.6),
        row("another", "ddp", "hybridep", 1.0),
    ]
    path = tmp_path / "megatron_models.json"
    path.write_text(json.dumps({"question": "?", "runs": [machine], "rows": rows}))
    monkeypatch.setattr(hybrid, "STEPS", path)
    finding = find("hybrid-ep-end-to-end", Options())
    assert [line[3] for line in finding.table] == [*PAPERS_TERA, ""]
    here = {line[:3]: line[-2:] for line in finding.table if line[-2]}
    assert here == {
        ("Qwen 3 235B", "BF16", "all-to-all"): ("200", "1.00x"),
        ("Qwen 3 235B", "BF16", "Hybrid-EP"): ("230", "1.15x"),
        ("DeepSeek-V3, FSDP", "BF16", "Hybrid-EP"): ("100", ""),
    }
    assert "2 x NVIDIA H200, revision abc, 2026-11-27" in finding.differs[0]
    assert [text for text in finding.differs if "half of its experts" in text]
    assert finding.verdict[0].endswith("1.15 times all-to-all; the paper: 1.05x in BF16 and 1.10x in MXFP8.")
    assert len(finding.verdict) == 2
    rows = [row("deepseek-v3", "ddp", way, tera) for way, tera in (("deepep", 170.0), ("hybridep", 182.0))]
    path.write_text(json.dumps({"question": "?", "runs": [machine], "rows": rows}))
    finding = find("hybrid-ep-end-to-end", Options())
    assert finding.verdict[0].endswith("1.07 times DeepEP; the paper: 1.14x over DeepEP in MXFP8.")
    assert not [text for text in finding.differs if "half of its experts" in text]


SIMULATED = [name for name, (module, _) in TABLES.items() if module.startswith("simulated:")]


@pytest.mark.parametrize("name", SIMULATED)
def test_what_is_simulated_says_so(name: str) -> None:
    finding = find(name, Options())
    text = finding.text()
    assert "imulated" in finding.title
    assert finding.differs[0].startswith("Simulated")
    assert all("simulated" in row["op"] and row["median_us"] > 0 for row in finding.rows)
    assert text == find(name, Options()).text()
    with pytest.raises(ValueError, match="is simulated and times nothing"):
        find(name, Options(rounds=2))


def test_every_table_and_figure_of_the_papers_is_named() -> None:
    named = {word.strip(",;:") for *_, state in papers.PAPERS for word in state.split()}
    assert set(TABLES) - {name for name in TABLES if name.startswith(("aristos-", "comet-figure-"))} <= named
    assert {paper for paper, *_ in papers.PAPERS} == {
        *("Comet", "TensorRT-LLM, slides", "ScheMoE", "Aristos", "Hybrid-EP"),
    }
    assert papers.list_papers()[0] == "Comet:"
    of_papers = {
        "Comet": {"figure": 14, "table": 3},
        "ScheMoE": {"figure": 9, "table": 10},
        "Aristos": {"figure": 2, "table": 1},
    }
    for paper, most in of_papers.items():
        places = [place for name, place, *_ in papers.PAPERS if name == paper]
        wanted = {(kind, number) for kind, last in most.items() for number in range(1, last + 1)}
        assert {one for place in places for one in numbered(place) if one[0] in most} == wanted


def numbered(place: str) -> list[tuple[str, int]]:
    """Tables and figures of words such as `figures 1 b, 2 to 4`."""
    found, kind, upto = list[tuple[str, int]](), "", False
    for word in re.findall(r"[a-z]+|\d+", place):
        if not word.isdigit():
            kind, upto = (word.removesuffix("s"), False) if len(word) > 3 else (kind, word == "to")
            continue
        first = found[-1][1] + 1 if upto else int(word)
        found += [(kind, number) for number in range(first, int(word) + 1)]
    return found


def test_commands_named_beside_the_papers_exist(capsys: pytest.CaptureFixture[str]) -> None:
    """One named an option that there was not."""
    commands = [c for *_, state in papers.PAPERS for c in re.findall(r"`imbrex ([^`]*)`", state)]
    assert len(commands) >= 3
    for words in (one.split() for one in commands):
        with pytest.raises(SystemExit, match="0"):
            main([word for word in words if not word.startswith("--")] + ["--help"])
        said = capsys.readouterr().out
        assert all(word in said for word in words if word.startswith("--")), words
