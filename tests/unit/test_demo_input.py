"""What `imbrex demo` refuses: one line that says what, where and how to mend it, before any rank starts."""

import argparse
import fcntl
import json
import os

import pytest
import torch

from imbrex.cli import demo as command
from imbrex.cli import main
from imbrex.demo import folder
from imbrex.demo import settings as demo
from imbrex.launch.ranks import words_of
from imbrex.parallel import checkpoint


@pytest.fixture(autouse=True)
def no_rank_starts(monkeypatch):
    def started(*_, **__):
        raise AssertionError("a rank was started")

    monkeypatch.setattr(command, "launch", started)
    for name in ("RANK", "WORLD_SIZE", "IMBREX_TIMEOUT_S"):
        monkeypatch.delenv(name, raising=False)


def refused(capsys, *words):
    with pytest.raises(SystemExit) as end:
        main(["demo", *map(str, words)])
    assert end.value.code == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1, lines
    assert lines[0].startswith("imbrex: error: ")
    return lines[0]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--ranks 0", "--ranks is 0: give 1 or more"),
        ("--steps -1", "--steps is -1: give 1 or more"),
        ("--ranks 3 --ep 2", "--ep 2 x --tp 1 does not divide --ranks 3"),
        ("--ranks 4 --tp 3", "--tp 3 does not divide --ranks 4"),
        ("--ranks 2 --tp 2 --expert-width 7", "--tp 2 does not divide --expert-width 7"),
        ("--ranks 4 --batch 3", "--batch 3 leaves some of 4 ranks without a sequence"),
        ("--top-k 9", "--top-k 9 is more than --experts 8"),
        ("--hidden 60", "--hidden 60 is no multiple of twice --heads 4"),
        ("--seed -2", "--seed is -2"),
        ("--seed 99999999999999999999", "--seed is 99999999999999999999: give 0 to 9223372036854775807"),
        ("--timeout 0", "not a number of seconds above 0"),
        ("--transport pigeon", "'pigeon' is not known"),
        ("--codec morse", "morse"),
        ("--schedule tomorrow", "'tomorrow' is not known"),
        ("--schedule events --tau soon --epsilon 1", "tau is 'soon'; give seconds"),
        ("--schedule events --epsilon -1", "epsilon is -1; give how many peers may be missing"),
        ("--schedule events --tau 0.1", "--tau 0.1 with --epsilon 0 waits for all: give --epsilon 1"),
        ("--schedule events --epsilon 4", "--epsilon is 4, but a rank has 3 peers: give 0 to 3"),
        ("--batch 99999999999999999999", "for weights and tokens), and this machine has"),
        ("--hidden 99999992", "give a smaller --batch or --length, or a smaller model"),
        ("--experts 99999999", "and this machine has"),
        ("--data /dev/zero", "the data file /dev/zero is no file, and may have no end"),
        ("--epsilon 1", "--tau and --epsilon are of --schedule events: give it in the place of serial"),
        ("--ranks many", "invalid int value: 'many'; imbrex demo --help lists what there is"),
        ("--lenght 3", "--lenght is not known to imbrex demo: use --length"),
        ("colour", "colour is not known to imbrex demo; imbrex demo --help lists what there is"),
        ("--device cuda --ranks 16", "16 ranks on this machine need a GPU each"),
        ("--data /no/such/file", "cannot read the data file /no/such/file"),
        ("--out /proc/imbrex", "cannot write to --out /proc/imbrex"),
        ("--out /nowhere/at/all --resume", "there is no run to resume in /nowhere/at/all"),
    ],
)
def test_bad_words_are_refused_in_one_line(capsys, tmp_path, words, said):
    out = [] if "--out" in words else ["--out", tmp_path]
    assert said in refused(capsys, *words.split(), *out)


def test_an_empty_file_is_refused(capsys, tmp_path):
    empty = tmp_path / "empty"
    empty.touch()
    assert f"the data file {empty} is empty" in refused(capsys, "--data", empty, "--out", tmp_path / "out")


def test_a_file_in_the_place_of_out_is_refused(capsys, tmp_path):
    (tmp_path / "out").touch()
    assert "cannot write to --out" in refused(capsys, "--out", tmp_path / "out")


def test_a_full_disk_is_refused(capsys, tmp_path, monkeypatch):
    usage = folder.shutil.disk_usage(tmp_path)
    monkeypatch.setattr(folder.shutil, "disk_usage", lambda _: usage._replace(free=1 << 20))
    assert "has 1 MiB left and a run needs 100" in refused(capsys, "--out", tmp_path)


def test_two_runs_at_once_do_not_share_a_folder(capsys, tmp_path):
    other = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(other, fcntl.LOCK_EX)
    assert "belongs to a run that has not ended: wait for it" in refused(capsys, "--out", tmp_path)
    os.close(other)
    run_in(tmp_path)


def test_a_checkpoint_of_another_shape_is_refused(capsys, tmp_path):
    run_in(tmp_path, "--hidden", "64")
    said = refused(capsys, "--out", tmp_path, "--resume", "--hidden", 128)
    assert f"--hidden 128, but the checkpoint in {tmp_path} has 64" in said


def run_in(out, *words):
    """Begin a run as its launcher and its first rank do; the arguments of its ranks."""
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    args = parser.parse_args(["--out", str(out), *words])
    demo.settle(args, worker=False)
    demo.check(args)
    folder.prepare(out, args, [*demo.DEFAULTS])
    folder.begin(out, args, [*demo.DEFAULTS])
    return words_of(args)


def contents(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def earlier_run(out):
    """A run that has trained, with a checkpoint, and beside its files those of somebody else."""
    run_in(out, "--ranks", "2", "--steps", "30", "--hidden", "64")
    checkpoint.save(out / "checkpoint", torch.nn.Linear(2, 2), None, 20)
    (out / "metrics.jsonl").write_text('{"step": 0}\n')
    (out / "thesis.tex").write_text("mine")
    (out / "checkpoint" / "best").mkdir()
    (out / "checkpoint" / "best" / "weights").write_text("mine")
    return contents(out)


def test_resuming_asks_for_what_the_earlier_run_asked(tmp_path):
    before = earlier_run(tmp_path)
    words = run_in(tmp_path, "--resume", "--steps", "50")
    assert words[words.index("--hidden") + 1] == "64"
    assert words[words.index("--steps") + 1] == "50"
    assert words[words.index("--ranks") + 1] == "2"
    assert {**contents(tmp_path), "run.json": ""} == {**before, "run.json": ""}
    assert run_in(tmp_path, "--resume") == words


@pytest.mark.parametrize("words", ["", "--steps 5", "--overwrite --resume"])
def test_an_earlier_run_is_not_touched_unasked(capsys, tmp_path, words):
    before = earlier_run(tmp_path)
    said = refused(capsys, "--out", tmp_path, *words.split())
    mend = "give --resume to go on with it, --overwrite to replace it, or another --out"
    assert f"--out {tmp_path} holds an earlier run: {mend}" in said or "give one of them" in said
    assert contents(tmp_path) == before


@pytest.mark.parametrize("words", ["--seed 99999999999999999999", "--top-k 9", "--timeout inf"])
def test_a_run_that_is_refused_replaces_nothing(capsys, tmp_path, words):
    before = earlier_run(tmp_path)
    refused(capsys, "--out", tmp_path, "--overwrite", *words.split())
    assert contents(tmp_path) == before


def test_replacing_an_earlier_run_removes_what_it_wrote(tmp_path):
    earlier_run(tmp_path)
    run_in(tmp_path, "--overwrite")
    left = contents(tmp_path)
    assert json.loads(left.pop("run.json"))["settings"]["hidden"] == 128
    assert left == {"thesis.tex": b"mine", "checkpoint/best/weights": b"mine"}


def test_the_launcher_alone_removes_nothing(monkeypatch, tmp_path):
    """A GPU that is full, say, is known on the ranks only."""
    before = earlier_run(tmp_path)
    hints = []
    monkeypatch.setattr(command, "launch", lambda *_, hint, **__: hints.append(hint()) or 1)
    assert main(["demo", "--out", str(tmp_path), "--overwrite", "--hidden", "32"]) == 1
    assert contents(tmp_path) == before
    assert hints == [f"the earlier run in {tmp_path} is as it was"]


def test_a_run_that_did_nothing_yet_can_be_started_anew(tmp_path):
    run_in(tmp_path)
    (tmp_path / "ranks" / "rank-00000.phase").touch()
    run_in(tmp_path, "--ranks", "2")


@pytest.mark.parametrize(
    "names",
    ["checkpoint/weights", "metrics.jsonl", "report.html summary.json", "ranks/rank-1.txt", "run.json"],
)
@pytest.mark.parametrize("words", ["", "--overwrite"])
def test_files_that_no_run_wrote_are_not_touched(capsys, tmp_path, names, words):
    for name in names.split():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("[]")
    before = contents(tmp_path)
    said = refused(capsys, "--out", tmp_path, *words.split())
    assert all(name.split("/")[0] in said for name in names.split())
    assert said.endswith("choose another --out")
    assert contents(tmp_path) == before


def test_resuming_with_a_balancer_does_not_take_a_users_journal(capsys, tmp_path):
    earlier_run(tmp_path)
    (tmp_path / "balance.jsonl").write_text("mine")
    said = refused(capsys, "--out", tmp_path, "--resume", "--balance")
    assert f"--out {tmp_path} holds balance.jsonl, which no run of the demo wrote" in said
    run_in(tmp_path, "--overwrite")
    assert (tmp_path / "balance.jsonl").read_text() == "mine"


@pytest.mark.parametrize("out", ["", " "])
def test_no_folder_is_refused(capsys, tmp_path, monkeypatch, out):
    monkeypatch.chdir(tmp_path)
    assert refused(capsys, "--out", out).endswith("--out is empty: give a folder")
    assert list(tmp_path.iterdir()) == []


def test_under_an_outer_torchrun_its_ranks_count(capsys, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert "--ranks 4, but torchrun started 3" in refused(capsys, "--ranks", 4)
    assert "--ep 2 x --tp 1 does not divide --ranks 3" in refused(capsys, "--ep", 2)


def test_a_rank_that_is_no_number_is_refused(capsys, monkeypatch):
    monkeypatch.setenv("RANK", "first")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "RANK is 'first' in the environment: unset it, or start ranks by torchrun" in refused(capsys)


def test_a_path_that_cannot_be_written_is_one_sentence(capsys, tmp_path, monkeypatch):
    def full(args):
        raise PermissionError(13, "Permission denied", "/locked/plan.json")

    monkeypatch.setattr(command, "run", full)
    assert refused(capsys).endswith("/locked/plan.json: Permission denied: give another path")
