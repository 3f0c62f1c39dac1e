"""Limits of a machine, and the floor of a layer in decoding that is drawn from them."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from benchmarks import decode
from docs.tables.decode import COPY, least_us

import imbrex
from imbrex.bench import ceilings
from imbrex.bench.shapes import MODELS


@pytest.fixture
def times(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds of calls behind the three that warm up; of those the work is done, on a CPU."""
    seconds, calls = [2e-6, 1e-6, 4e-6] * 4, list[int]()

    def taken(work: Callable[[], object]) -> float:
        work()
        calls.append(1)
        return 1.0 if len(calls) <= 3 else seconds[len(calls) - 4]

    monkeypatch.setattr(ceilings, "seconds_of", taken)
    monkeypatch.setattr(ceilings, "COPY_BYTES", 1000)
    monkeypatch.setattr(ceilings, "READ_BYTES", 4000)
    return seconds[: ceilings.REPEATS]


def test_a_copy_reads_and_writes(times: list[float]) -> None:
    assert ceilings.copy_tbps("cpu") == pytest.approx(2000 / statistics.median(times) / 1e12)


def test_a_sum_reads(times: list[float]) -> None:
    assert ceilings.read_tbps("cpu") == pytest.approx(4000 / 1e-6 / 1e12)


def test_a_machine_without_gpus_has_no_ceilings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert ceilings.measure_ceilings() == {}


def test_weights_take_as_long_as_the_cards_own_rate_says() -> None:
    """Three matrices of 2048 x 768 in two bytes each, of ten experts."""
    qwen = MODELS["qwen3-30b-a3b"]
    assert decode.read_us(qwen, 10, 4.27) == round(6 * 2048 * 768 * 10 / 4.27e6, 1)
    assert decode.read_us(qwen, 10, 2.98) == round(6 * 2048 * 768 * 10 / 2.98e6, 1)


def test_the_rank_with_most_chosen_experts_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode.dist, "all_reduce", lambda *_, **__: None)
    config = imbrex.MoEConfig(hidden_size=8, intermediate_size=8, num_experts=6, top_k=2)
    ids_TK = torch.tensor([[0, 3], [3, 5], [4, 3]])
    layer = SimpleNamespace(config=config, gate=lambda x_TD: SimpleNamespace(ids_TK=ids_TK))
    assert decode.experts_hit(layer, torch.zeros(3, 8), 2) == 3
    assert decode.experts_hit(layer, torch.zeros(3, 8), 3) == 2


def test_the_table_takes_a_rows_own_rate_where_it_has_one() -> None:
    assert least_us({"read_us": 100.0, "copy_tbps": 2.9}, "H100") == 100.0
    assert least_us({"read_us": 100.0, "copy_tbps": 4.3}, "H200") == 100.0
    assert least_us({"read_us": 100.0}, "H200") == 100.0
    assert least_us({"read_us": 100.0}, "H100") == pytest.approx(100 * COPY["H200"] / COPY["H100"])
