"""Faults of how ranks start and end."""

from __future__ import annotations

from tests.faults.fault import Fault

LAUNCHES = [
    Fault(
        "ranks-outlive-their-launcher",
        "launch/parent.py",
        "a launcher that is killed leaves its ranks running",
        "    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)\n",
        "",
        ("ranks/test_demo_death.py::test_ranks_end_with_a_launcher_that_is_killed",),
    ),
    Fault(
        "more-ranks-than-memory",
        "launch/memory.py",
        "ranks are started whatever memory there is",
        "    if reason is not None:\n",
        "    if reason is not None and available_bytes() is None:\n",
        ("unit/test_launch_memory.py",),
    ),
    Fault(
        "a-killed-rank-unnamed",
        "launch/local.py",
        "a rank that was killed is not said to be the cause",
        "    if dead:\n        complain(",
        "    if dead and notes and not notes:\n        complain(",
        ("ranks/test_demo_death.py::test_a_killed_rank_is_named_with_its_phase_and_the_run_resumes",),
    ),
    Fault(
        "a-rank-told-to-stop-unnamed",
        "observe/death.py",
        "where a rank alone was told to stop, one that still runs is said to be silent",
        "        if notes and notes[0].kind == STOPPED:\n            return notes[0].sentence\n",
        "",
        ("unit/test_observe_death.py::test_a_rank_that_alone_was_told_to_stop_is_the_one_that_others_lost",),
    ),
    Fault(
        "a-rank-that-hung-was-told-to-stop",
        "observe/death.py",
        "a rank that hung is said to have been told to stop, which it was when others had lost it",
        "notes[0].kind == STOPPED:\n            return notes[0].sentence",
        "notes[-1].kind == STOPPED:\n            return notes[-1].sentence",
        ("unit/test_observe_death.py::test_a_rank_that_alone_was_told_to_stop_is_the_one_that_others_lost",),
    ),
    Fault(
        "a-full-disk-of-another-command",
        "launch/ranks.py",
        "a command whose disk is full is told to choose an option that it does not have",
        'files=" or ".join(results) or "TMPDIR"',
        'files="--out"',
        ("unit/test_reader.py::test_a_full_disk_of_ranks_names_what_the_command_has",),
    ),
    Fault(
        "a-full-disk-of-the-demo",
        "demo/rank.py",
        "the demo whose disk is full is told to choose another TMPDIR",
        'files="--out"',
        'files="TMPDIR"',
        ("unit/test_reader.py::test_a_full_disk_of_ranks_names_what_the_command_has",),
    ),
    Fault(
        "few-choices-by-old-weights",
        "exchange/alone_recorded.py",
        "a rank alone repeats launches with weights that have moved since",
        "key = size, piece.data_ptr(), gate_up_eGD.data_ptr(), down_eDF.data_ptr()",
        "key = size, piece.data_ptr(), gate_up_eGD.data_ptr()",
        ("unit/test_alone_dispatcher.py::test_few_choices_are_launched_from_a_record",),
    ),
    Fault(
        "few-choices-lose-a-gradient",
        "exchange/alone_recorded.py",
        "a shared expert that alone is trained gets no gradient of few tokens",
        "plain(added_TD) and not differentiated(added_TD) and",
        "plain(added_TD) and",
        ("unit/test_alone_dispatcher.py::test_calls_that_no_record_serves",),
    ),
    Fault(
        "few-that-learn-from-a-record",
        "exchange/alone_recorded.py",
        "few choices of one GPU teach experts nothing where no shared expert is added",
        " or differentiated(x_TD, weights_TK, *weights):",
        ":",
        ("unit/test_alone_dispatcher.py::test_experts_that_learn_or_lie_apart_are_not_recorded",),
    ),
]
