"""What `imbrex demo` refuses: one line that says what, where and how to mend it, before any rank starts."""

import json

import pytest

from imbrex.cli import demo as command
from imbrex.cli import main
from imbrex.demo import asked as demo


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
        ("--timeout 0", "not a number of seconds above 0"),
        ("--transport pigeon", "'pigeon' is not known"),
        ("--codec morse", "morse"),
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
    usage = demo.shutil.disk_usage(tmp_path)
    monkeypatch.setattr(demo.shutil, "disk_usage", lambda _: usage._replace(free=1 << 20))
    assert "has 1 MiB left and a run needs 100" in refused(capsys, "--out", tmp_path)


def test_a_checkpoint_of_another_shape_is_refused(capsys, tmp_path):
    (tmp_path / demo.ASKED).write_text(json.dumps({**demo.DEFAULTS, "hidden": 64}))
    said = refused(capsys, "--out", tmp_path, "--resume", "--hidden", 128)
    assert f"--hidden 128, but the checkpoint in {tmp_path} has 64" in said


def test_resuming_asks_for_what_the_earlier_run_asked(tmp_path, monkeypatch):
    asked = {}
    monkeypatch.setattr(command, "launch", lambda words, **more: asked.update(words=words, **more) or 0)
    assert main(["demo", "--out", str(tmp_path), "--ranks", "2", "--steps", "30", "--hidden", "64"]) == 0
    (tmp_path / "metrics.jsonl").touch()
    assert main(["demo", "--out", str(tmp_path), "--resume", "--steps", "50"]) == 0
    words = asked["words"]
    assert words[words.index("--hidden") + 1] == "64"
    assert words[words.index("--steps") + 1] == "50"
    assert asked["num_ranks"] == 2
    assert (tmp_path / "metrics.jsonl").exists()
    assert main(["demo", "--out", str(tmp_path)]) == 0
    assert not (tmp_path / "metrics.jsonl").exists(), "a new run replaces the files of an earlier one"


def test_under_an_outer_torchrun_its_ranks_count(capsys, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert "--ranks 4, but torchrun started 3" in refused(capsys, "--ranks", 4)
    assert "--ep 2 x --tp 1 does not divide --ranks 3" in refused(capsys, "--ep", 2)


def test_a_path_that_cannot_be_written_is_one_sentence(capsys, tmp_path, monkeypatch):
    def full(args):
        raise PermissionError(13, "Permission denied", "/locked/plan.json")

    monkeypatch.setattr(command, "run", full)
    assert refused(capsys).endswith("/locked/plan.json: Permission denied: give another path")
