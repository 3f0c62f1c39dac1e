"""`imbrex demo` with real ranks: the same curve for any number of them, and files."""

import json
import os
import re
import shutil
import time

import pytest
import torch.distributed as dist

from imbrex.cli import main
from imbrex.demo import rank as demo_rank
from imbrex.observe import death, read_board
from tests import tracing
from tests.ranks.forked import call_ranks, run_ranks

SMALL = ["--steps", "16", "--checkpoint-every", "8", "--batch", "8", "--length", "64", "--hidden", "32"]
SMALL += ["--expert-width", "32", "--layers", "2", "--timeout", "20"]


def demo(*words, ranks, out, hidden=""):
    """The command on ranks that a launcher of the user's started; what it printed."""
    return run_ranks(["demo", "--out", str(out), *map(str, words)], ranks=ranks, folder=out, hidden=hidden)


def records(out):
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def losses(out):
    return [record["loss"] for record in records(out)]


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    out = tmp_path_factory.mktemp("four")
    demo(*SMALL, ranks=4, out=out)
    return out


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    out = tmp_path_factory.mktemp("one")
    with tracing.stopped():
        demo(*SMALL, ranks=1, out=out)
    return out


def test_the_losses_do_not_depend_on_the_number_of_ranks(one, four):
    assert losses(one)[-1] < losses(one)[0] - 0.2, "it learns"
    assert losses(four) == pytest.approx(losses(one), abs=1e-6), "measured: equal to the bit"
    assert records(four)[-1]["held_out_loss"] == pytest.approx(records(one)[-1]["held_out_loss"], abs=1e-4)


@pytest.mark.untraced
@pytest.mark.parametrize("words", ["--ep 1", "--transport allreduce"])
def test_data_parallelism_and_replicated_tokens_give_the_same_losses(one, tmp_path, words):
    demo(*words.split(), *SMALL, "--stop-after", 6, ranks=2, out=tmp_path)
    assert losses(tmp_path) == pytest.approx(losses(one)[:6], abs=1e-4)


@pytest.mark.parametrize("patience", [(), ("--tau", "0", "--epsilon", "1")])
def test_events_give_the_same_losses_or_say_what_they_dropped(one, tmp_path, patience):
    demo("--schedule", "events", *patience, *SMALL, "--stop-after", 3, ranks=2, out=tmp_path)
    summary = json.loads((tmp_path / "summary.json").read_text())
    if not patience:
        assert losses(tmp_path) == pytest.approx(losses(one)[:3], abs=1e-6)
        assert summary["dropped_share"] == 0
    else:
        assert summary["recipe"]["schedule"] == "events(tau=0, epsilon=1)"
        assert 0 < summary["dropped_share"] < 1


def test_what_the_ranks_refuse_leaves_the_earlier_run(one, tmp_path):
    shutil.copytree(one, tmp_path, dirs_exist_ok=True)
    with pytest.raises(AssertionError, match="moves no rows that events could wait for"):
        demo("--overwrite", "--schedule", "events", "--transport", "allreduce", ranks=2, out=tmp_path)
    assert losses(tmp_path) == losses(one)
    assert (tmp_path / "checkpoint").is_dir()


def refuse_late(out):
    """The demo on a rank that meets its peers once more after the other has refused and left."""
    check, board = demo_rank._check_schedule, out / "ranks"

    def late(args, model):
        if os.environ["RANK"] == "0":
            while not death.read_notes(board) or read_board(board)[1].alive:
                time.sleep(0.01)
            dist.barrier()
        check(args, model)

    demo_rank._check_schedule = late
    words = ["--schedule", "events", "--transport", "allreduce", "--timeout", "20"]
    return main(["demo", "--out", str(out), *words])


def test_a_refusal_is_said_although_a_rank_lost_its_peers_by_it(tmp_path):
    """Whoever is still connecting reads gloo's words, which say nothing to the user."""
    ended = call_ranks(refuse_late, tmp_path, ranks=2, folder=tmp_path)
    assert 0 not in [one.poll() for one in ended]
    said = [line for one in ended for line in one.stderr.splitlines() if line.startswith("imbrex: error:")]
    assert len(said) == 1, said
    assert "moves no rows that events could wait for" in said[0]


def test_resuming_with_other_ranks_goes_on_along_the_same_curve(one, tmp_path):
    demo(*SMALL, "--stop-after", 11, ranks=2, out=tmp_path)
    assert len(records(tmp_path)) == 11
    demo("--ep", 2, "--tp", 2, "--resume", ranks=4, out=tmp_path)
    assert [record["step"] for record in records(tmp_path)] == list(range(16))
    assert losses(tmp_path) == pytest.approx(losses(one), abs=1e-4)


def test_a_record_accounts_for_the_whole_step(four):
    phases = ("route_ms", "plan_ms", "dispatch_ms", "experts_ms", "combine_ms", "rest_ms")
    for record in records(four):
        assert sum(record[name] for name in phases) == pytest.approx(record["step_ms"])
        assert min(record[name] for name in phases) > 0
        assert record["tokens_per_s"] > 0
        assert [sum(of_layer) for of_layer in record["expert_load"]] == [8 * 64 * 2] * 2
        assert [sum(of_layer) for of_layer in zip(*record["rank_rows"], strict=True)] == [8 * 64 * 2] * 2
        assert all(1 <= worst <= 8 for worst in record["imbalance"])


def test_a_machine_that_cannot_draw_keeps_the_figures_and_is_told(tmp_path):
    printed = demo(*SMALL, "--stop-after", 2, ranks=1, out=tmp_path, hidden="plotly")
    mend = f"no report: pip install plotly, then imbrex demo --resume --out {tmp_path} draws it"
    assert mend in printed
    assert (tmp_path / "summary.json").exists()
    assert not (tmp_path / "report.html").exists()
    # Its folder is replaced by a run that says so.
    demo(*SMALL, "--stop-after", 1, "--overwrite", ranks=1, out=tmp_path)
    assert len(records(tmp_path)) == 1
    assert [path.name for path in (tmp_path / "checkpoint").iterdir()] == ["step_00000001"]


def test_the_trace_has_every_rank_and_phase(four):
    events = json.loads((four / "trace.json").read_text())["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    assert {event["pid"] for event in spans} == {0, 1, 2, 3}
    names = {
        "route",
        "plan",
        "dispatch",
        "experts",
        "combine",
        "dispatch_backward",
        "experts_backward",
        "combine_backward",
    }
    for rank in range(4):
        of_rank = [event for event in spans if event["pid"] == rank]
        assert names <= {event["name"] for event in of_rank}
        assert {event["args"]["step"] for event in of_rank} == set(range(16))
    assert min(event["ts"] for event in spans) == 0


def test_the_summary_counts_bytes_per_pair_of_ranks(four):
    summary = json.loads((four / "summary.json").read_text())
    assert summary["ranks"] == summary["expert"] == 4
    sent = summary["bytes_sent"]
    assert all((sent[i][j] > 0) == (i != j) for i in range(4) for j in range(4))
    assert 0 < summary["communicating_share"] < 1
    assert summary["host_syncs"] > 0


def test_the_report_opens_without_a_network(four):
    page = (four / "report.html").read_text()
    assert page.count("Plotly.newPlot(") == 6
    for source in ('src="http', "src='http", "<link", "@import"):
        assert source not in page
    for heading in ("Loss", "Throughput", "Where the time goes", "One step across ranks"):
        assert f"<h2>{heading}</h2>" in page


def test_experts_follow_the_tokens_while_it_trains(one, tmp_path, capsys):
    """The same losses with every expert that moved, its optimizer's state and its replicas."""
    printed = demo("--balance", *SMALL, ranks=2, out=tmp_path)
    assert losses(tmp_path) == pytest.approx(losses(one), abs=1e-3)
    said = re.search(r"more than the mean; with the experts in order, .*; (\d+) new placements", printed)
    assert said
    assert int(said[1]) >= 2
    lines = [json.loads(line) for line in (tmp_path / "balance.jsonl").read_text().splitlines()]
    assert sum(len(line["switched"]) for line in lines) == int(said[1])
    assert len(lines) == 16
    assert "without" in (tmp_path / "balance.html").read_text()
    with pytest.raises(SystemExit) as refused:
        main(["demo", "--ranks", "2", "--ep", "1", "--balance", *SMALL, "--out", str(tmp_path)])
    assert refused.value.code == 2
    assert "--balance: all experts live on one rank" in capsys.readouterr().err
