"""Statistics and plans on disk: every format read back, every broken file one sentence."""

from __future__ import annotations

import json
import re
import sys
from functools import partial

import numpy as np
import pytest
import torch

from imbrex.placement import (
    BalancePlan,
    LoadHistory,
    from_slots,
    history_of_ids,
    plan_layers,
    read_history,
    read_plan,
    write_history,
    write_plan,
)
from imbrex.placement.history_files import read_trace
from imbrex.placement.safetensors_file import read_arrays

COUNTS = np.arange(3 * 2 * 4, dtype=np.int64).reshape(3, 2, 4)
HISTORY = LoadHistory(counts_ILE=COUNTS, layers=(3, 7), top_k=2, first_iteration=10)


def test_tensorrt_llm_directory_sums_over_ranks(tmp_path) -> None:
    write_history(tmp_path, HISTORY)
    write_history(tmp_path, HISTORY, rank=1)
    (tmp_path / "rank0_raw.safetensors").write_bytes(b"raw ids, not read")
    assert json.loads((tmp_path / "meta_info.json").read_text()) == {
        "num_experts": 4,
        "num_experts_per_token": 2,
    }
    back = read_history(tmp_path)
    assert np.array_equal(back.counts_ILE, 2 * COUNTS)
    assert (back.layers, back.top_k, back.first_iteration) == ((3, 7), 2, 10)


def test_safetensors_agree_with_the_library(tmp_path) -> None:
    library = pytest.importorskip("safetensors.torch")
    write_history(tmp_path, HISTORY)
    theirs = library.load_file(tmp_path / "rank0.safetensors")
    assert torch.equal(theirs["11_7"], torch.from_numpy(COUNTS[1, 1]))
    library.save_file({"a": torch.arange(6, dtype=torch.int32).reshape(2, 3)}, tmp_path / "other.safetensors")
    assert read_arrays(tmp_path / "other.safetensors")["a"].tolist() == [[0, 1, 2], [3, 4, 5]]


def test_sglang_json_and_pt(tmp_path) -> None:
    (tmp_path / "counts.json").write_text(json.dumps({"logical_count": COUNTS.tolist()}))
    torch.save({"rank": 0, "logical_count": torch.from_numpy(COUNTS[0])}, tmp_path / "counts.pt")
    assert np.array_equal(read_history(tmp_path / "counts.json").counts_ILE, COUNTS)
    assert np.array_equal(read_history(tmp_path / "counts.pt").counts_ILE, COUNTS[:1])


def test_vllm_load_history(tmp_path) -> None:
    content = {"load_history": [{"logical_expert_load": step.tolist()} for step in COUNTS]}
    (tmp_path / "loads.json").write_text(json.dumps(content))
    assert np.array_equal(read_history(tmp_path / "loads.json").counts_ILE, COUNTS)


def test_megatron_counts_and_traces(tmp_path) -> None:
    for rank in range(2):
        lines = [
            {"iter": 5 + i, "block": "decoder", "layer": layer, "tpe": COUNTS[i, at].tolist()}
            for i in range(3)
            for at, layer in enumerate((3, 7))
        ]
        (tmp_path / f"rank{rank}.jsonl").write_text("\n".join(map(json.dumps, lines)))
    back = read_history(tmp_path)
    assert np.array_equal(back.counts_ILE, 2 * COUNTS)
    assert (back.layers, back.first_iteration) == ((3, 7), 5)
    trace = {"step": 0, "stage": 0, "block": "decoder", "layer": 1, "rank": 0, "num_tokens": 2, "topk": 2}
    (tmp_path / "trace.jsonl").write_text(json.dumps(trace | {"top_indices": [[0, 2], [2, 3]]}))
    assert read_history(tmp_path / "trace.jsonl").counts_ILE.tolist() == [[[1, 0, 2, 1]]]
    # Of another block's layer of the same number, whose tokens want no expert above the first.
    other = [trace | {"block": block, "top_indices": [[0, top]]} for block, top in (("a", 2), ("b", -1))]
    (tmp_path / "trace.jsonl").write_text("\n".join(map(json.dumps, other)))
    back = read_history(tmp_path / "trace.jsonl")
    assert (back.layers, back.counts_ILE.tolist()) == ((0, 1), [[[1, 0, 1], [1, 0, 0]]])


def test_token_traces(tmp_path) -> None:
    ids = np.array([[[0, 1], [1, 2], [2, 3], [3, -1], [0, 1]]])
    np.savez(tmp_path / "trace.npz", law_ids=ids, law_w=np.zeros(ids.shape))
    np.save(tmp_path / "trace.npy", ids[0])
    for name in ("trace.npz", "trace.npy"):
        assert read_history(tmp_path / name, batch=2).counts_ILE.tolist() == [[[1, 2, 1, 0]], [[0, 0, 1, 2]]]
    stored, weights = read_trace(tmp_path / "trace.npz")
    assert weights is not None
    assert stored.shape == weights.shape == ids.shape
    assert read_trace(tmp_path / "trace.npy")[1] is None
    for wrong in (ids + 0.5, ids[0, 0], ids[:, :0]):
        np.save(tmp_path / "wrong.npy", wrong)
        with pytest.raises(ValueError, match=r"expected integers \[layers, tokens, choices\]"):
            read_history(tmp_path / "wrong.npy")
    with pytest.raises(ValueError, match="no array 'intent_ids'; it has law_ids, law_w"):
        read_history(tmp_path / "trace.npz", array="intent_ids")
    with pytest.raises(ValueError, match="use -1 to 2"):
        history_of_ids(ids, 3, 2)
    with pytest.raises(ValueError, match="batches of 6 tokens from 5"):
        history_of_ids(ids, 4, 6)


def test_window_and_decay() -> None:
    assert np.array_equal(HISTORY.load(), COUNTS.sum(0))
    assert np.allclose(HISTORY.load(0.5), 0.25 * COUNTS[0] + 0.5 * COUNTS[1] + COUNTS[2])
    assert np.array_equal(HISTORY.window(11, 99).counts_ILE, COUNTS[1:])
    assert HISTORY.window(11, 99).first_iteration == 11
    with pytest.raises(ValueError, match="there are 10 to 12"):
        HISTORY.window(0, 10)
    assert np.array_equal(HISTORY.pool(2).counts_ILE, COUNTS[:2].sum(0, keepdims=True))
    with pytest.raises(ValueError, match="3 iterations, fewer than the 4 to sum"):
        HISTORY.pool(4)
    with pytest.raises(ValueError, match="decay 0"):
        HISTORY.load(0)


def cut(tmp_path):
    write_history(tmp_path, HISTORY)
    file = tmp_path / "rank0.safetensors"
    file.write_bytes(file.read_bytes()[:-8])
    return tmp_path


def missing_layer(tmp_path):
    (tmp_path / "rank0.jsonl").write_text(
        '{"iter": 0, "layer": 0, "tpe": [1]}\n{"iter": 1, "layer": 1, "tpe": [1]}'
    )
    return tmp_path


def other_layers(tmp_path):
    (tmp_path / "rank0.jsonl").write_text(
        '{"iter": 0, "layer": 3, "tpe": [1, 2]}\n{"iter": 0, "layer": 4, "tpe": [1, 2, 3]}'
    )
    return tmp_path


def other_model(tmp_path):
    (tmp_path / "rank0.jsonl").write_text(
        '{"iter": 0, "layer": 3, "tpe": [1, 2]}\n{"iter": 1, "layer": 3, "tpe": [1, 2, 3]}'
    )
    return tmp_path


def other_rank(tmp_path):
    (tmp_path / "rank0.jsonl").write_text('{"iter": 0, "layer": 3, "tpe": [1, 2]}\n')
    (tmp_path / "rank1.jsonl").write_text('{"iter": 0, "layer": 3, "tpe": [1]}\n')
    return tmp_path


def other_rows(tmp_path):
    (tmp_path / "a.json").write_text('{"logical_count": [[1, 2], [1, 2, 3]]}')
    return tmp_path / "a.json"


def negative(tmp_path):
    (tmp_path / "a.json").write_text('{"logical_count": [[1, -1]]}')
    return tmp_path / "a.json"


def fraction(tmp_path):
    (tmp_path / "a.json").write_text('{"logical_count": [[1, 0.5]]}')
    return tmp_path / "a.json"


def half_json(tmp_path):
    (tmp_path / "a.json").write_text('{"logical_count": [[1, ')
    return tmp_path / "a.json"


def unknown(tmp_path):
    (tmp_path / "a.txt").write_text("")
    return tmp_path / "a.txt"


def objects(tmp_path):
    np.save(tmp_path / "a.npy", np.array([{}], dtype=object))
    return tmp_path / "a.npy"


def objects_by_name(tmp_path):
    np.savez(tmp_path / "a.npz", ids=np.array([{}], dtype=object))
    return tmp_path / "a.npz"


def no_numpy(tmp_path):
    (tmp_path / "a.npy").write_text("1 2 3")
    return tmp_path / "a.npy"


def objects_of_torch(tmp_path):
    torch.save({"logical_count": HISTORY}, tmp_path / "a.pt")
    return tmp_path / "a.pt"


def one_line(tmp_path, tpe):
    line = tpe if isinstance(tpe, str) else json.dumps({"iter": 0, "layer": 0, "tpe": tpe})
    (tmp_path / "a.jsonl").write_text(line)
    return tmp_path / "a.jsonl"


WRONG_LINES = [
    ([1.5, 2], "whole numbers"),
    ([1e30, 2], "whole numbers"),
    ([10**30, 2], "something else than numbers"),
    ([1 << 53, 1 << 53], r"more than 2\^53 choices"),
    ("[]", "IndexError|AttributeError"),
    ('{"iter": 1e999, "layer": 0, "tpe": [1]}', "OverflowError"),
    ('{"step": 0, "layer": 0, "top_indices": [[0, 1.5]]}', "whole numbers"),
    ('{"step": 0, "layer": 0, "top_indices": [[-5, 1]]}', "expert ids from -5 to 1; use -1 to 1"),
    ('{"step": 0, "layer": 0, "top_indices": [[0, 10000000]]}', "more than 1048576 are no layer's"),
]


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (objects, "no array of numbers as numpy.save and numpy.savez write them"),
        (objects_by_name, "no array of numbers"),
        (no_numpy, "no array of numbers"),
        (objects_of_torch, "other things than tensors and numbers"),
        (cut, "ends 8 bytes early"),
        (missing_layer, "layer 1 is missing in iteration 0"),
        (other_layers, "layers 3 and 4 differ in their experts; give layers of one kind in a file"),
        (other_model, "layer 3 has 2 experts in iteration 0 and 3 in iteration 1; give records of one model"),
        (other_rank, "lines of layer 3 in iteration 0 differ in their experts; give the ranks of"),
        (other_rows, "rows of counts differ in length, .* give layers of one kind in a file"),
        (negative, "not negative"),
        (fraction, "whole numbers"),
        (half_json, "JSONDecodeError"),
        *((partial(one_line, tpe=tpe), "a.jsonl .*" + says) for tpe, says in WRONG_LINES),
        (unknown, "ends in none of"),
        (lambda path: path / "nothing", "does not exist"),
        (lambda path: path, "holds no lines"),
    ],
)
def test_broken_statistics_are_one_sentence(tmp_path, make, says) -> None:
    with pytest.raises(ValueError, match=says) as caught:
        read_history(make(tmp_path))
    assert "\n" not in str(caught.value)
    assert not re.search("pickle|trust|weights_only", str(caught.value)), "advice to run what is in the file"


def plan_of(slots: int) -> BalancePlan:
    load = np.random.default_rng(0).gamma(0.6, size=(2, 6))
    placements = plan_layers(load, 3, slots)
    return BalancePlan(placements=dict(zip((3, 7), placements, strict=True)), layer_updates_per_iter=2)


@pytest.mark.parametrize("slots", [9, 10])
def test_plans_read_back(tmp_path, slots: int) -> None:
    pytest.importorskip("yaml")
    plan = plan_of(slots)
    write_plan(tmp_path / "plan.yaml", plan)
    assert read_plan(tmp_path / "plan.yaml", 3, 6) == plan
    write_plan(tmp_path / "plan.json", plan)
    assert read_plan(tmp_path / "plan.json", 3, 6, layers=(3, 7)).placements == plan.placements


def test_yaml_is_the_slides_configuration(tmp_path) -> None:
    yaml = pytest.importorskip("yaml")
    plan = plan_of(9)
    write_plan(tmp_path / "plan.yaml", plan)
    content = yaml.safe_load((tmp_path / "plan.yaml").read_text())
    assert content == {
        "num_slots": 9,
        "layer_updates_per_iter": 2,
        "initial_global_assignments": {n: list(p.slots) for n, p in plan.placements.items()},
    }


def test_uneven_slots_are_written_down(tmp_path) -> None:
    pytest.importorskip("yaml")
    plan = BalancePlan(placements={0: from_slots([[0], [1, 0, -1]], 2)})
    for name in ("plan.yaml", "plan.json"):
        write_plan(tmp_path / name, plan)
        assert read_plan(tmp_path / name, 2, 2) == plan


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            "num_slots: 4\ninitial_global_assignments:\n  0: [0, 1, 5, 0]\n",
            "layer 0: placement: rank 1 holds expert 5",
        ),
        (
            "num_slots: 4\ninitial_global_assignments:\n  0: [0, 0, 1, 2]\n",
            "holds expert 0 twice.*4 slots on 2 ranks, which may be",
        ),
        ("num_slots: 4\ninitial_global_assignments:\n  0: [0, 1, 0, 1]\n", "expert 2 has no slot"),
        (
            "num_slots: 4\ninitial_global_assignments:\n  0: [0, 1, 2]\n",
            "layer 0 has 3 slots but num_slots is 4",
        ),
        ("initial_global_assignments:\n  0: [0, 1, 2]\n", "it has no 'num_slots'"),
        ("num_slots: 4\ninitial_global_assignments:\n  0: [0, 1, ", "it is no YAML"),
        (
            "num_slots: 4\ninitial_global_assignments:\n  0: [0, 1, 1.5, 0]\n",
            "1.5 is no whole number",
        ),
        (
            "num_slots: 4\ninitial_global_assignments:\n  .inf: [0, 1, 2, 0]\n",
            "cannot convert float infinity",
        ),
        ("[" * 2000, "recursion"),
        ("", "it is no mapping"),
    ],
)
def test_broken_plans_are_one_sentence(tmp_path, text: str, says: str) -> None:
    pytest.importorskip("yaml")
    path = tmp_path / "plan.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=says) as caught:
        read_plan(path, 2, 3)
    assert "\n" not in str(caught.value)


def test_a_missing_layer_and_a_missing_library(tmp_path, monkeypatch) -> None:
    with pytest.raises(ValueError, match="layer 5 is missing; the plan has layers 3, 7"):
        plan_of(9).of(5)
    with pytest.raises(ValueError, match="no layers; nothing written"):
        write_plan(tmp_path / "plan.json", BalancePlan(placements={}))
    with pytest.raises(ValueError, match="ends in none"):
        write_plan(tmp_path / "plan.txt", plan_of(9))
    write_plan(tmp_path / "plan.yaml", plan_of(9))
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(ValueError, match=r"pip install 'imbrex\[yaml\]'"):
        read_plan(tmp_path / "plan.yaml", 3, 6)
