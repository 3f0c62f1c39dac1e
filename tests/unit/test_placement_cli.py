"""`imbrex balance`: a trace in, a plan out, policies compared."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

from imbrex.balancer.report import Story, write_story
from imbrex.cli import main
from imbrex.placement import LoadHistory, read_history, read_plan
from imbrex.placement.replay import replay


@pytest.fixture
def trace(tmp_path):
    draw = np.random.default_rng(0)
    popularity = [draw.dirichlet(np.full(8, 0.5), size=3) for _ in range(2)]
    for name, shares in zip(("one", "two"), popularity, strict=True):
        ids = np.stack(
            [
                np.stack([draw.choice(8, 2, p=0.9 * p + 0.0125, replace=False) for _ in range(400)])
                for p in shares
            ]
        )
        np.save(tmp_path / f"{name}.npy", ids)
    return tmp_path


def test_plan_then_renew(trace, capsys) -> None:
    pytest.importorskip("yaml")
    out = trace / "plan.yaml"
    common = ["--ranks", "3", "--slots", "11", "--batch", "50", "--experts", "8"]
    assert main(["balance", "plan", "--stats", str(trace / "one.npy"), "--out", str(out), *common]) == 0
    old = read_plan(out, 3, 8)
    assert list(old.placements) == [0, 1, 2]
    assert old.of(0).rank_offsets == (0, 4, 8, 11)
    new = trace / "new.yaml"
    arguments = ["--stats", str(trace / "two.npy"), "--from", str(out), "--max-moves", "2", "--out", str(new)]
    assert main(["balance", "plan", *arguments, *common]) == 0
    said = capsys.readouterr().out
    assert "before: " in said
    for layer in range(3):
        assert (
            sum(
                a != b for a, b in zip(old.of(layer).slots, read_plan(new, 3, 8).of(layer).slots, strict=True)
            )
            <= 2
        )


def test_layers_without_choices_count_nothing(tmp_path, capsys) -> None:
    """Two batches [6, 3, 3] and [0, 8, 0] of one layer beside a layer that is empty."""
    counts = [[[0, 0, 0], [6, 3, 3]], [[0, 0, 0], [0, 8, 0]]]
    (tmp_path / "stats.json").write_text(json.dumps({"logical_count": counts}))
    given = ["--stats", str(tmp_path / "stats.json"), "--ranks", "2", "--slots", "3"]
    assert main(["balance", "plan", *given, "--out", str(tmp_path / "plan.json")]) == 0
    said = capsys.readouterr().out
    assert (
        "balanced split, mean of 2 iterations: 50.00%, at most 50.00% (layer 1); layers without choices: 1"
        in said
    )


def test_replay_does_not_count_layers_without_choices() -> None:
    """One of two layers is empty, and so is the second iteration: the mean is that of the one load."""
    counts = np.array([[[6, 1, 1], [0, 0, 0]], [[0, 0, 0], [0, 0, 0]]])
    history = LoadHistory(counts_ILE=counts, layers=(0, 1))
    scored = replay(history, history, "none", 2, 3)
    assert scored.imbalance_IL.tolist() == [[0.75, 0.0], [0.0, 0.0]]
    assert scored.imbalance_I.tolist() == [0.75]
    with pytest.raises(ValueError, match="has no choices"):
        replay(history, LoadHistory(counts_ILE=counts[1:], layers=(0, 1)), "none", 2, 3)


def test_ranks_that_an_engine_cannot_have_do_not_end_a_replay(trace, capsys) -> None:
    """The default policies and slots, 8 experts and 2 more a rank: 14 on 3 ranks."""
    given = ["--trace", str(trace / "one.npy"), "--batch", "50", "--experts", "8"]
    assert main(["balance", "replay", *given, "--ranks", "3,4"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[1:]]
    assert [row[2] for row in rows] == ["none", "deepseek", "balanced"] * 2
    assert " ".join(rows[1][3:]) == "14 slots do not divide over 3 ranks, as it needs"
    assert float(rows[4][3]) > 0
    with pytest.raises(SystemExit):
        main(["balance", "replay", *given, "--ranks", "3", "--policy", "deepseek,tensorrt_llm"])
    assert "no policy can be scored" in capsys.readouterr().err


def test_nothing_recorded_is_not_stable(tmp_path, capsys) -> None:
    (tmp_path / "stats.json").write_text(json.dumps({"logical_count": [[[0, 0]], [[0, 0]]]}))
    with pytest.raises(SystemExit):
        main(["balance", "stability", "--trace", str(tmp_path / "stats.json")])
    assert "nothing was chosen in any two neighbouring iterations" in capsys.readouterr().err


def test_colours_tell_ten_percent_from_the_mean(tmp_path) -> None:
    """Rank loads are drawn around the mean, and full colour is at most 40 % away."""
    loads = np.array([[[11.0, 9.0], [0.0, 0.0]]])
    story = Story(layers=(0, 1), loads_ILW=loads, counts_ILE=loads, facts={})
    write_story(tmp_path / "story.html", "Test", story)
    text = (tmp_path / "story.html").read_text()
    assert text.count('"zmax":1.4,"zmin":0.6') == 3


def test_replay_compares_policies(trace, capsys) -> None:
    out = trace / "replay.json"
    policies = "none,deepseek,tensorrt_llm,even,balanced,online"
    arguments = ["--trace", str(trace / "one.npy"), "--trace", str(trace / "two.npy"), "--policy", policies]
    rest = ["--ranks", "2,4", "--slots", "12", "--batch", "50", "--json", str(out)]
    rest += ["--html", str(trace / "replay.html")]
    assert main(["balance", "replay", *arguments, *rest]) == 0
    rows = json.loads(out.read_text())
    assert [row["policy"] for row in rows] == policies.split(",") * 2
    mean = {(row["ranks"], row["policy"]): np.mean(row["imbalance"]) for row in rows}
    for ranks in (2, 4):
        assert mean[ranks, "balanced"] < mean[ranks, "none"]
        assert mean[ranks, "online"] <= mean[ranks, "balanced"] + 1e-9
    for row in rows:
        assert np.allclose(np.sum(row["loads"], axis=2), 100, atol=0.05)
        moves = row["policy"] == "online" and row["ranks"] == 4
        assert (sum(row["fetched"]) > 0) == moves
    assert capsys.readouterr().out.count("\n") == 13
    text = (trace / "replay.html").read_text()
    assert "Layer and rank, without" in text
    assert "<td>policy</td><td>online: as balanced, renewed while it runs</td>" in text


def test_stability_finds_what_is_stable(trace, capsys) -> None:
    traces = ["--trace", str(trace / "one.npy"), "--trace", str(trace / "two.npy")]
    assert main(["balance", "stability", *traces, "--batch", "50"]) == 0
    said = capsys.readouterr().out
    assert "decay that predicts best 1" in said
    assert f"{trace / 'one.npy'}: 1.000 " in said


def test_record_from_a_run_and_from_a_trace(tmp_path, trace) -> None:
    steps = [{"step": n, "loss": 1.0, "expert_load": [[n, 2.0], [3.0, 4.0]]} for n in range(3)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, steps)))
    assert main(["balance", "record", "--run", str(tmp_path), "--out", str(tmp_path / "stats")]) == 0
    assert read_history(tmp_path / "stats").counts_ILE.tolist() == [[[n, 2], [3, 4]] for n in range(3)]
    (tmp_path / "metrics.jsonl").rename(tmp_path / "balance.jsonl")
    assert main(["balance", "record", "--run", str(tmp_path), "--out", str(tmp_path / "stats")]) == 0
    assert read_history(tmp_path / "stats").counts_ILE.sum() == 3 * 9 + 3
    arguments = ["--run", str(trace / "one.npy"), "--batch", "100", "--out", str(tmp_path / "again")]
    assert main(["balance", "record", *arguments]) == 0
    assert read_history(tmp_path / "again").counts_ILE.sum() == 400 * 2 * 3


SMALL = ["--ranks", "2", "--slots", "8", "--batch", "50", "--out", "p.json"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["plan", "--stats", "no.npy", "--ranks", "2", "--slots", "8", "--out", "p.yaml"], "does not exist"),
        (["replay", "--trace", "one.npy", "--batch", "50", "--policy", "best"], "use one of none"),
        (["replay", "--trace", "one.npy", "--batch", "50", "--train", "0"], "leaves none to plan from"),
        (["replay", "--trace", "one.npy", "--batch", "50", "--ranks", "four"], "give whole numbers"),
        (["replay", "--trace", "one.npy", "--batch", "50", "--ranks", "0"], "give whole numbers from 1 up"),
        (["replay", "--trace", "one.npy", "--batch", "50", "--slots", "8,-2"], "from 1 up, as in 4,8"),
        (["replay", "--trace", "sum.json"], "use --train 1 to plan from all of the first --trace"),
        (["report", "--journal", "run", "--out", "r.html"], "has no line of a balancer; run with"),
        (["record", "--run", ".", "--out", "stats"], "holds no lines"),
        (["replay", "--trace", "one.npy", "--batch", "50", "--train", "nan"], "--train: nan is no share"),
        (["record", "--run", "one.npy", "--out", ""], "--out is empty: give a folder"),
        (["plan", "--stats", "one.npy", *SMALL, "--updates", "-1"], "--updates is -1: give 0 or more"),
        (["plan", "--stats", "one.npy", *SMALL, "--ranks", "99999999"], "there must be 1 to 65536"),
        (["plan", "--stats", "huge.npy", *SMALL], "experts; more than 1048576 are no layer's"),
        (["report", "--journal", "one.npy", "--out", "r.html"], "no whole journal"),
        (["report", "--journal", "deep.json", "--out", "r.html"], "no whole journal"),
        (["report", "--journal", "sum.json", "--out", "./sum.json"], "--journal is the same file"),
        (["plan", "--stats", "one.npy", *SMALL, "--from", ""], "plan: cannot use .: "),
        (["plan", "--stats", "p.json", *SMALL], "--out p.json: --stats is the same file; give another"),
        (["replay", "--trace", "one.npy", "--json", "a", "--html", "a"], "--json is the same file"),
        (["replay", "--trace", "one.npy", "--json", "-"], "--json -: a file is wanted"),
        (["replay", "--trace", "one.npy", "--batch", "50", "--slots", ""], "--slots: ''; give whole numbers"),
        (["record", "--run", "one.npy", "--out", "ranks"], "rank1.safetensors, which would be added"),
        (["record", "--run", "lists.jsonl", "--out", "stats"], "lists.jsonl cannot be read (AttributeError"),
    ],
)
def test_mistakes_are_one_sentence(trace, monkeypatch, capsys, arguments, says) -> None:
    monkeypatch.chdir(trace)
    (trace / "sum.json").write_text(json.dumps({"logical_count": [[[3, 2, 1]]]}))
    np.save(trace / "huge.npy", np.full((1, 100, 2), 2**40))
    (trace / "deep.json").write_text("[" * 100_000)
    (trace / "lists.jsonl").write_text('["expert_load"]')
    (trace / "ranks").mkdir()
    (trace / "ranks/rank1.safetensors").write_bytes(b"")
    (trace / "run").mkdir()
    (trace / "run/metrics.jsonl").write_text(json.dumps({"step": 0, "loss": 2.0}) + "\n")
    with pytest.raises(SystemExit) as left:
        main(["balance", *arguments])
    assert left.value.code == 2
    said = capsys.readouterr().err
    assert says in said
    assert said.count("\n") == 1
    assert len(said) < 400


def test_the_code_of_the_page_runs() -> None:
    page = Path(__file__).resolve().parents[2] / "docs/placement.md"
    found = re.findall(r"^```python\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    assert len(found) == 4
    for code in found:
        exec(compile(code, page.name, "exec"), {})


@pytest.mark.parametrize(
    ("counts", "says"),
    [
        ([[[1, 2, float("nan")]]], "1 of them NaN; expected whole numbers"),
        ([[[1, 2, 3], [1, 2]]], "rows of counts differ in length"),
        ([[[1, -2, 3]]], "not negative"),
        ([[[0.5, 2, 3]]], "expected whole numbers"),
    ],
)
def test_counts_that_are_none_leave_no_plan(tmp_path, capsys, counts: list, says: str) -> None:
    (tmp_path / "stats.json").write_text(json.dumps({"logical_count": counts}))
    out = tmp_path / "plan.json"
    given = ["--stats", str(tmp_path / "stats.json"), "--ranks", "2", "--slots", "4", "--out", str(out)]
    with pytest.raises(SystemExit):
        main(["balance", "plan", *given])
    told = capsys.readouterr().err.strip().splitlines()
    assert len(told) == 1
    assert says in told[0]
    assert not out.exists()


def test_an_old_plan_without_a_layer(tmp_path, capsys) -> None:
    (tmp_path / "stats.json").write_text(json.dumps({"logical_count": [[[1, 2], [3, 4]]]}))
    (tmp_path / "old.json").write_text(json.dumps({"physical_to_logical_map": [[0, 1]]}))
    given = ["--stats", "stats.json", "--from", "old.json", "--out", "new.json"]
    given = [str(tmp_path / name) if name.endswith("json") else name for name in given]
    with pytest.raises(SystemExit):
        main(["balance", "plan", *given, "--ranks", "2", "--slots", "2"])
    assert "it has 1 layers, not the 2 of the statistics" in capsys.readouterr().err
    assert not (tmp_path / "new.json").exists()
