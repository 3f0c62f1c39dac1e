"""Kept results of tuning: what is written comes back; whatever else lies there is ignored with a sentence."""

from __future__ import annotations

import json
import multiprocessing as mp
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import imbrex
from imbrex.contracts import Roles
from imbrex.experts.experts import Experts
from imbrex.launch import netlab
from imbrex.overlap import tunings
from imbrex.overlap.decision import Decision, Gains, roles_as_json, roles_of_json
from imbrex.overlap.tuner import bucket, fastest, tuner_of
from imbrex.overlap.tunings import Tunings
from imbrex.schedule.choice import Choice

SUBJECT = {"ranks": 2, "tokens": 16}
VALUE = roles_as_json(Roles(stage=64, sums=None), {Roles(): (1.0, 2.0)})


def test_what_is_kept_comes_back(tmp_path: Path) -> None:
    kept = Tunings(tmp_path / "made" / "here")
    assert kept.read("fused", SUBJECT, roles_of_json).value is None
    assert kept.write("fused", SUBJECT, VALUE) is None
    reading = kept.read("fused", SUBJECT, roles_of_json)
    assert reading.value == VALUE
    assert reading.value is not None
    assert reading.problem is None
    assert roles_of_json(reading.value) == Roles(stage=64)
    for roles in (Roles(dy=0), Roles(first=12)):
        assert roles_of_json(roles_as_json(roles, {})) == roles
    assert [path.name for path in kept.folder.iterdir()] == [reading.path.name]
    for other in (SUBJECT | {"tokens": 32}, SUBJECT | {"source": "changed"}):
        assert kept.read("fused", other, roles_of_json).value is None
    assert kept.read("schedule", SUBJECT, Decision.of_json).value is None


def test_the_folder_is_that_of_the_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("IMBREX_CACHE_DIR", str(tmp_path))
    assert Tunings().folder == tmp_path / "tuned"


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("", "holds no result of this (JSONDecodeError"),
        ('{"decision": "fused", ', "holds no result of this (JSONDecodeError"),
        ("[1, 2]", "holds no result of this (TypeError"),
        ("\x00\xff", "holds no result of this"),
        ("[" * 100_000, "holds no result of this (RecursionError"),
        ('{"decision": "fused"}', "holds no result of this (KeyError: 'subject')"),
        ({"subject": {"ranks": 4}}, "it is of another decision, layer, machine or version"),
        ({"decision": "schedule"}, "it is of another decision, layer, machine or version"),
        ({"value": {"stage": 0, "sums": 8}}, "0 is no number from 1"),
        ({"value": {"stage": "8", "sums": 8}}, "'8' is no number from 1"),
        ({"value": {"stage": 1.5, "sums": 8}}, "1.5 is no number from 1"),
        ({"value": {"stage": 8}}, "KeyError: 'sums'"),
        ({"value": {"stage": 8, "sums": 8, "first": None, "dy": "no"}}, "Roles(dy='no'); give None or 0"),
        ({"value": None}, "TypeError"),
    ],
)
def test_what_is_no_result_is_ignored_with_a_sentence(tmp_path: Path, content: Any, why: str) -> None:
    kept = Tunings(tmp_path)
    path = kept.path_of("fused", SUBJECT)
    if isinstance(content, dict):
        whole = {"decision": "fused", "subject": SUBJECT, "value": VALUE, "date": "2026-11-23"}
        content = json.dumps(whole | content)
    path.write_text(content, encoding="latin-1")
    reading = kept.read("fused", SUBJECT, roles_of_json)
    assert reading.value is None
    assert reading.problem is not None
    assert reading.problem.startswith(f"{path} was ignored: ")
    assert why in reading.problem
    assert kept.write("fused", SUBJECT, VALUE) is None
    assert kept.read("fused", SUBJECT, roles_of_json).value == VALUE


def test_a_folder_that_cannot_be_written_is_no_failure(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    kept = Tunings(tmp_path / "file" / "tuned")
    problem = kept.write("fused", SUBJECT, VALUE)
    assert problem is not None
    assert problem.startswith(f"{kept.path_of('fused', SUBJECT)} could not be written (")
    assert "cannot be read" in (kept.read("fused", SUBJECT, roles_of_json).problem or "")
    taken = Tunings(tmp_path)
    taken.path_of("fused", SUBJECT).mkdir()
    assert "could not be written (" in (taken.write("fused", SUBJECT, VALUE) or "")
    assert len([*tmp_path.iterdir()]) == 2  # no draft


def write_often(folder: Path, number: int) -> None:
    for count in range(100):
        assert (
            Tunings(folder).write("fused", SUBJECT, VALUE | {"stage": 1 + number, "tried": [count] * 500})
            is None
        )


def test_of_several_writers_the_last_ones_file_is_whole(tmp_path: Path) -> None:
    writers = [mp.get_context("fork").Process(target=write_often, args=(tmp_path, n)) for n in range(2)]
    for writer in writers:
        writer.start()
    seen = set()
    while any(writer.is_alive() for writer in writers):
        reading = Tunings(tmp_path).read("fused", SUBJECT, roles_of_json)
        assert reading.problem is None
        seen.add(reading.value and reading.value["stage"])
    for writer in writers:
        writer.join()
        assert writer.exitcode == 0
    assert seen - {None} <= {1, 2}
    assert len(list(tmp_path.iterdir())) == 1


SECONDS = dict.fromkeys(("encode_out", "move_out", "decode_out", "experts", "encode_back"), 0.25)
SECONDS |= {"move_back": 0.5, "decode_back": 0.0}
CHOICE = Choice(scheduler="exact", degree=3, forward=1.5, backward=2.5)
DECISION = Decision(
    choice=CHOICE,
    seconds=(SECONDS, SECONDS | {"weights": 1.0}),
    gains=Gains(device=1.05, host=1.0, baseline="serial"),
)


def test_a_decision_comes_back_with_its_order() -> None:
    again = Decision.of_json(json.loads(json.dumps(DECISION.as_json())))
    assert again == DECISION
    assert again.pipelined().orders() == DECISION.pipelined().orders()
    assert again.name == "exact-3"


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"scheduler": "best"}, "'best' is not a scheduler"),
        ({"degree": True}, "True is no number"),
        ({"degree": 1000}, "1000 is no number from 1 to 256"),
        ({"forward_s": -1.0}, "-1.0 is no time"),
        ({"backward_s": float("nan")}, "nan is no time"),
        ({"tasks_s": {"forward": SECONDS, "backward": {}}}, "encode_out"),
        ({"tasks_s": {"forward": SECONDS | {"tea": 1.0}, "backward": SECONDS}}, "tea"),
        ({"fused": {"device": "fast", "host": 1.0, "baseline": "serial"}}, "'fast' is no time"),
        ({"fused": {"device": 1.1, "host": 1.0}}, "baseline"),
        ({"fused": {"device": 1.1, "host": 1.0, "baseline": "exact-4"}}, "neither serial nor exact-3"),
    ],
)
def test_what_is_no_decision_is_refused(change: dict[str, Any], why: str) -> None:
    with pytest.raises((ValueError, KeyError, TypeError), match=why):
        Decision.of_json(DECISION.as_json() | change)


def test_fused_gains_over_the_fastest_without_it() -> None:
    device = {"serial": (1.0, 2.0), "exact-3": (2.0, 2.0), "fused": (1.0, 1.5)}
    host = {"serial": (4.0, 4.0), "exact-3": (3.0, 3.0), "fused": (4.0, 6.0)}
    gains = Gains.of(device, host, "fused")
    assert gains == Gains(device=1.2, host=0.8, baseline="serial")
    assert replace(DECISION, gains=gains).without_fused().name == "serial"
    assert replace(DECISION, gains=replace(gains, baseline="exact-3")).without_fused().name == "exact-3"
    assert replace(DECISION, gains=None).without_fused().name == "exact-3"


def subject_of(
    *, tokens: int = 5, dtype: torch.dtype = torch.float32, fuses: bool = False, top_k: int = 2, **change: Any
) -> dict[str, Any]:
    """The subject of a layer of one rank. change: sizes and pieces other than those here."""
    settings = {"width": 8, "inner": 12, "slots": (0, 1, 2), "implementation": "grouped", "codec": "identity"}
    settings |= change
    width, slots = settings["width"], settings["slots"]
    placement = imbrex.Placement(num_experts=3, slots=slots, rank_offsets=(0, len(slots)))
    exchange = imbrex.Exchange(placement, width, top_k, codec=settings["codec"])
    experts = Experts(slots, width, settings["inner"], implementation=settings["implementation"])
    x_TD = torch.zeros(tokens, width, dtype=dtype)
    return dict(tuner_of(exchange, experts, x_TD, fuses=fuses, uses_files=False, renews=False).subject)


@pytest.mark.parametrize(
    "change",
    [
        {"tokens": 9},
        {"dtype": torch.bfloat16},
        {"fuses": True},
        {"top_k": 1},
        {"width": 16},
        {"inner": 16},
        {"slots": (0, 1, 2, 0)},
        {"implementation": "loop"},
        *({"codec": {step: "bf16"}} for step in ("dispatch", "combine", "dispatch_backward")),
    ],
)
def test_a_result_is_not_that_of_a_layer_with_another_setting(change: dict[str, Any]) -> None:
    assert subject_of(tokens=8) == subject_of()
    assert subject_of(**change) != subject_of()


def test_tokens_are_tuned_in_powers_of_two() -> None:
    assert [bucket(tokens) for tokens in (0, 1, 2, 3, 4096, 4097)] == [1, 1, 2, 4, 4096, 8192]


def test_the_default_stays_where_nothing_gains_a_hundredth() -> None:
    seconds = {"default": (1.0, 1.0), "other": (0.995, 0.98)}
    assert [fastest(seconds, side, "default") for side in (0, 1)] == ["default", "other"]


def test_the_network_of_netlab_is_told_apart() -> None:
    assert tunings.NETLAB == netlab.COMMAND
