"""`imbrex plan` as its users call it: words, traces, files in and out."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from imbrex.cli import main
from imbrex.placement import contiguous, plan_layers, read_history, read_plan
from imbrex.placement.bounds import imbalances
from imbrex.simulate import loads
from imbrex.simulate.loads import Spread
from imbrex.simulate.profile import Profile


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--gpus", "0"], "--gpus is 0: give at least 1"),
        (["--gpus", "8", "--model", "64,32,99999999999,2"], "99999999999 experts; give at most 65536"),
        (["--gpus", "8", "--nodes", "-1"], "--nodes is -1: give at least 1"),
        (["--gpus", "8", "--nodes", "3"], "8 GPUs do not divide into 3 nodes"),
        (["--gpus", "12", "--network", "FABRIC"], "12 GPUs are not whole nodes of 8, as the first tier of"),
        (["--gpus", "16", "--nodes", "1", "--network", "FABRIC"], "16 GPUs on 1 nodes are not whole nodes"),
        (["--gpus", "4", "--nodes", "2", "--network", "FABRIC"], "4 GPUs on 2 nodes are not whole nodes"),
        (["--gpus", "8", "--trace", "FABRIC", "--skew", "even"], "a trace says how choices fall"),
        (["--gpus", "8", "--layers", "0"], "0 layers; give at least 1"),
        (["--gpus", "8", "--tokens", "0"], "0 tokens; give at least 1"),
        (["--gpus", "8", "--seed", "-1"], "seed -1; give a number from 0 up"),
        (["--gpus", "8", "--stragglers", "0,2,3"], "a chance of at most 1"),
    ],
)
def test_wrong_words_are_refused(
    words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiers = [{"ranks": 8, "gbytes_s": 300}, {"gbytes_s": 45}]
    (tmp_path / "fabric.json").write_text(json.dumps({"tiers": tiers}))
    with pytest.raises(SystemExit):
        main(["plan", *(str(tmp_path / "fabric.json") if word == "FABRIC" else word for word in words)])
    assert said in capsys.readouterr().err


def test_the_command_writes_a_table_json_and_a_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = ["--json", str(tmp_path / "plan.json"), "--report", str(tmp_path / "plan.html")]
    words = ["plan", "--model", "qwen3-30b-a3b", "--gpus", "16", "--nodes", "2", "--tokens", "2048"]
    assert main([*words, "--mode", "train", "--skew", "zipf:0.5", "--replicas", "0,16", *files]) == 0
    said = capsys.readouterr().out
    for part in ("plan: EP ", "memory a rank", "sent by a rank", "extrapolates:", "why not the others"):
        assert part in said
    content = json.loads((tmp_path / "plan.json").read_text())
    assert content["profile"]["product_flops_s"]["source"].startswith("benchmarks/results/experts.json")
    assert content["plan"]["outcome"]["forward"] > 0
    page = (tmp_path / "plan.html").read_text()
    assert "Why not the others" in page
    assert "<script src" not in page
    assert main(["plan", "--model", "deepseek-v3", "--gpus", "8", "--mode", "train"]) == 1
    assert "nothing fits" in capsys.readouterr().out


def test_a_trace_gives_the_loads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    counts = np.random.default_rng(0).integers(1, 1000, (2, 3, 128)).tolist()
    (tmp_path / "stats.json").write_text(json.dumps({"logical_count": counts}))
    words = ["plan", "--model", "qwen3-30b-a3b", "--gpus", "8", "--trace", str(tmp_path / "stats.json")]
    assert main(words) == 0
    assert "(trace choices, experts where --placement puts them)" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["plan", "--gpus", "7", "--nodes", "2"])
    assert "7 GPUs do not divide into 2 nodes" in capsys.readouterr().err


def test_the_plan_writes_the_homes_of_experts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The file is for the ranks and slots of the plan, and `imbrex balance plan` finds nothing to move in it.
    Loads are so uneven that in order a rank would have half as much again as the mean."""
    counts = np.tile(np.geomspace(1000, 10, 16), (2, 3, 1)).round().astype(int).tolist()
    stats, out, again = (str(tmp_path / name) for name in ("stats.json", "homes.json", "again.json"))
    Path(stats).write_text(json.dumps({"logical_count": counts}))
    words = ["plan", "--model", "64,32,16,2", "--gpus", "4", "--profile", "two-cores", "--replicas", "4"]
    words += ["--tokens", "256", "--json", str(tmp_path / "plan.json")]
    assert main([*words, "--trace", stats, "--placement", out]) == 0
    said = capsys.readouterr().out
    ep = json.loads((tmp_path / "plan.json").read_text())["plan"]["layout"]["ep"]
    assert ep > 1
    assert f"placement: {out}: 3 layers, 20 slots on {ep} ranks" in said
    assert "in the recorded iterations: 0." in said
    history = read_history(stats)
    homes = read_plan(out, ep, 16).placements
    for layer in history.layers:
        ordered, planned = (
            imbalances(history.counts_ILE[:, layer], homes_of, "balanced").mean()
            for homes_of in (contiguous(16, ep), homes[layer])
        )
        assert ordered > 0.5
        assert planned < 0.01
    given = ["--stats", stats, "--ranks", str(ep), "--slots", "20", "--from", out, "--out", again]
    assert main(["balance", "plan", *given]) == 0
    assert "fetches: 0" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main([*words, "--placement", out])
    assert "give --trace" in capsys.readouterr().err


def test_the_loads_shown_are_those_of_the_plan_that_is_written(tmp_path: Path) -> None:
    """Seven ranks with a slot more each, iterations that differ: a plan for even shares would leave other
    ranks full. Layer 1 was never chosen from."""
    random = np.random.default_rng(3)
    counts = random.multinomial(3000, random.dirichlet([0.5] * 32, (6, 5)))
    counts[:, 1] = 0
    stats, out, said = (str(tmp_path / name) for name in ("stats.json", "homes.json", "plan.json"))
    Path(stats).write_text(json.dumps({"logical_count": counts.tolist()}))
    words = ["plan", "--model", "64,33,32,4", "--gpus", "7", "--profile", "two-cores", "--replicas", "7"]
    # So many layers fit on no fewer ranks.
    words += ["--layers", "50000", "--tokens", "512", "--trace", stats, "--json", said, "--placement", out]
    assert main(words) == 0
    plan = json.loads(Path(said).read_text())["plan"]
    assert plan["layout"]["ep"] == 7
    homes, history = read_plan(out, 7, 32).placements, read_history(stats)
    load_LE = Spread.of_history(history).draw(32, 7 * 512 * 4, 0, top_k=4)
    scored = [
        imbalances(load_E[None].astype(np.int64), homes[layer], "balanced")[0]
        for load_E, layer in zip(load_LE, (0, 2, 3, 4), strict=True)
    ]
    assert plan["imbalance"] == pytest.approx(sorted(scored)[2], abs=2e-3)
    even = loads.of_homes(load_LE, plan_layers(load_LE, 7, 32 + 7)).max(1) - 1
    assert abs(sorted(even)[2] - plan["imbalance"]) > 0.01


def test_this_machine_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "here.json"
    assert main(["profile", "--out", str(out), "--repeats", "1", "--codecs", "bf16"]) == 0
    assert "figures measured" in capsys.readouterr().out
    profile = Profile.load(out)
    assert profile.entries["product_flops_s"].status == "measured"
    assert profile.entries["encode_values_s:int8"].status == "assumed"
    assert main(["plan", "--model", "64,32,8,2", "--gpus", "4", "--nodes", "2", "--profile", str(out)]) == 0


def test_a_network_says_what_its_nodes_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiers = [{"ranks": 8, "gbytes_s": 300}, {"gbytes_s": 45}]
    (tmp_path / "fabric.json").write_text(json.dumps({"tiers": tiers}))
    words = ["plan", "--gpus", "16", "--model", "64,32,8,2", "--network", str(tmp_path / "fabric.json")]
    assert main(words) == 0
    alone = capsys.readouterr().out
    assert main([*words, "--nodes", "2"]) == 0
    assert capsys.readouterr().out == alone


def test_a_trace_of_another_model_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Ids of 15 experts, two a token: of a model of 16 the last may never have been chosen, which has to be
    said; a model of four choices has no such tokens."""
    ids = np.tile(np.arange(14)[:, None] + np.arange(2), (50, 1))[None]
    np.save(tmp_path / "ids.npy", ids)
    words = ["plan", "--gpus", "2", "--trace", str(tmp_path / "ids.npy"), "--model"]
    for model, said in (
        ("64,32,16,2", "it has 15 experts, the model 16; give a trace of this model, or --experts 16"),
        ("64,32,15,4", "its tokens have 2 choices, the model's 4; give a trace of this model"),
    ):
        with pytest.raises(SystemExit):
            main([*words, model])
        assert said in capsys.readouterr().err
    assert main([*words, "64,32,16,2", "--experts", "16"]) == 0


def test_json_for_a_program_is_all_that_stands_in_the_output(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["plan", "--gpus", "2", "--model", "64,32,8,2", "--json", "-"]
    assert main(words) == 0
    said = capsys.readouterr()
    assert json.loads(said.out)["plan"]["layout"]["ep"] >= 1
    assert said.err.startswith("plan: EP ")
