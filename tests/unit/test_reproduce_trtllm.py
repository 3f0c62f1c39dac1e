"""TensorRT-LLM's smaller figures: imbalance of traces whose loads are known, and the smallest timings."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from pathlib import Path

import numpy as np
import pytest

from imbrex.reproduce import Options, find, wide_ep
from imbrex.reproduce.imbalance import BATCH


def write_trace(path: Path, *experts: tuple[int, ...], batches: int = 2) -> Options:
    """Requests of as many batches each, one layer: every token of request r wants the experts of
    `experts[r]`."""
    ids = np.concatenate([np.tile(of, (batches * BATCH, 1)) for of in experts])
    lens = np.full(len(experts), batches * BATCH, dtype=np.int64)
    np.savez(path, words_ids=ids[None].astype(np.int16), words_lens=lens)
    return Options(data=(str(path),))


def test_a_heat_map_of_known_loads(tmp_path: Path) -> None:
    """Eight experts on four ranks; 128 choices of 6, 64 of 0, 64 of 7, so that rank 3 has 192 of 256, three
    times the mean."""
    found = find("trtllm-rank-heat-map", write_trace(tmp_path / "trace.npz", (6, 0), (6, 7)))
    assert found.rows[0]["most_over_mean"] == 3.0
    assert found.rows[0]["least_over_mean"] == 0.0
    assert "Layer 0 is the hottest: its fullest rank has 3.00 times the mean" in found.verdict[0]
    assert "idles for 67% of the layer's time" in found.verdict[0]
    assert "2 of its 2 experts have more than the mean" in found.verdict[1]
    cells = ET.fromstring(found.chart).findall(".//{*}rect/{*}title")
    assert [cell.text for cell in cells] == ["1.00", "0.00", "0.00", "3.00"]


def test_one_hot_expert_is_the_cause(tmp_path: Path) -> None:
    found = find("trtllm-rank-heat-map", write_trace(tmp_path / "trace.npz", (6, 0), (6, 1), (6, 7)))
    assert "a hot expert, the first cause" in found.verdict[1]


def test_similarity_of_known_loads(tmp_path: Path) -> None:
    """Requests are of four batches; second halves want {0, 1}, {0, 1}, {0, 2}, so neighbours are the same,
    and of requests one pair is the same and two share one expert of two: 1, 0.5, 0.5."""
    asked = write_trace(tmp_path / "trace.npz", (0, 1), (0, 1), (0, 2), batches=4)
    found = find("trtllm-load-similarity", asked)
    assert [(row["impl"], row["median"], row["n"]) for row in found.rows] == [
        ("neighbours of a request", 1.0, 3),
        ("two requests", 0.5, 3),
    ]
    assert "The slides' order holds" in found.verdict[0]


def test_an_order_is_claimed_where_there_is_one(tmp_path: Path) -> None:
    """Requests that are all the same; and one whose iterations differ while requests end alike."""
    alike = write_trace(tmp_path / "alike.npz", (0, 1), (0, 1), (0, 1), batches=4)
    assert "It is no clear order: " in find("trtllm-load-similarity", alike).verdict[0]
    ids = np.concatenate([np.tile(of, (BATCH, 1)) for of in ((0, 1), (0, 1), (2, 3), (0, 1)) * 2])
    lens = np.full(2, 4 * BATCH, dtype=np.int64)
    np.savez(tmp_path / "reverse.npz", words_ids=ids[None].astype(np.int16), words_lens=lens)
    found = find("trtllm-load-similarity", Options(data=(str(tmp_path / "reverse.npz"),)))
    assert "the reverse of the slides' order: neighbours are the more alike in 0% of" in found.verdict[0]


@pytest.mark.parametrize(
    ("ids", "lens", "said"),
    [
        (np.zeros((0, 0, 0), dtype=np.int64), [], "words_ids of .* is no trace"),
        (np.zeros((256, 2), dtype=np.int64), [128, 128], r"is no trace \(int64, shape \(256, 2\)\)"),
        (np.zeros((1, 256, 2)), [128, 128], "is no trace .float64"),
        (np.full((1, 256, 2), -1), [128, 128], "is no trace"),
        (np.full((1, 256, 2), 10**12), [128, 128], "is no trace"),
        (np.zeros((1, 256, 2), dtype=np.int64), [128, 129], "does not part 256 tokens"),
        (np.zeros((1, 256, 2), dtype=np.int64), [-1, 128], "does not part 256 tokens"),
        (np.zeros((1, 256, 2), dtype=np.int64), [1.5, 128], "does not part 256 tokens"),
    ],
)
@pytest.mark.parametrize("name", ["trtllm-rank-heat-map", "trtllm-load-similarity"])
def test_arrays_that_are_no_trace(name: str, ids: np.ndarray, lens: list, said: str, tmp_path: Path) -> None:
    np.savez(tmp_path / "trace.npz", words_ids=ids, words_lens=np.array(lens))
    with pytest.raises(ValueError, match=said):
        find(name, Options(data=(str(tmp_path / "trace.npz"),)))


def test_requests_too_short_to_compare_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has no neighbours of a request to compare"):
        find("trtllm-load-similarity", write_trace(tmp_path / "short.npz", (0, 1), (0, 2), batches=1))


def test_traces_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "text.npz").write_text("no archive")
    np.savez(tmp_path / "other.npz", x=np.zeros(3))
    with pytest.raises(ValueError, match="cannot be read as a trace"):
        find("trtllm-rank-heat-map", Options(data=(str(tmp_path / "text.npz"),)))
    with pytest.raises(ValueError, match="no array of ids"):
        find("trtllm-rank-heat-map", Options(data=(str(tmp_path / "other.npz"),)))
    one = write_trace(tmp_path / "one.npz", (0, 1))
    with pytest.raises(ValueError, match="has one request"):
        find("trtllm-load-similarity", one)
    with pytest.raises(ValueError, match="times nothing; leave --rounds out"):
        find("trtllm-rank-heat-map", Options(rounds=2))


def test_intensity_grows_as_weights_are_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wide_ep, "SIZES", (1, 32))
    alone, wide = find("trtllm-intensity", Options(rounds=1)).rows
    # 6 x 256 x 256 x 512 operations; weights of 64 and of 2 experts, rows of 256 + 4 x 512 + 256 values.
    assert alone["flop_byte"] == pytest.approx(201326592 / (4 * (64 * 393216 + 256 * 2560)))
    assert wide["flop_byte"] == pytest.approx(201326592 / (4 * (2 * 393216 + 256 * 2560)))


def test_glue_over_rows_and_over_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wide_ep, "SIZES", (1, 4))
    found = find("trtllm-auxiliary-kernels", Options(rounds=1))
    assert [line[:3] for line in found.table] == [("1", "256", "256"), ("4", "1024", "256")]
    assert len(found.rows) == 4
