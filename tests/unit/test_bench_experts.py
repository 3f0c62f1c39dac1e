"""`imbrex bench experts` without a GPU: what it refuses, and how it turns times into rates."""

from __future__ import annotations

import argparse

import pytest
import torch

from imbrex.bench.experts import command
from imbrex.bench.experts.timing import COPY_BYTES, DENSE_SIDE
from imbrex.bench.experts.work import Work


def parse(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return parser.parse_args(words)


def work(counts: list[int], width: int, inner: int) -> Work:
    rows, experts = sum(counts), len(counts)
    counts_e = torch.tensor(counts)
    return Work(
        x_TD=torch.empty(rows, width),
        gate_up_eGD=torch.empty(experts, 2 * inner, width),
        down_eDF=torch.empty(experts, width, inner),
        counts_e=counts_e,
        ends_e=counts_e.cumsum(0),
        source_R=torch.arange(rows),
        position_TK=torch.arange(rows).view(-1, 1),
        weights_TK=torch.ones(rows, 1),
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="states what happens without a GPU")
def test_without_a_gpu_it_says_why() -> None:
    with pytest.raises(ValueError, match="bench experts: imbrex kernels need an NVIDIA GPU"):
        command.measure(parse())


@pytest.mark.parametrize("words", ["--ops=ffn,fnn", "--impls=imbrex,tutel"])
def test_what_is_not_known_is_said(monkeypatch: pytest.MonkeyPatch, words: str) -> None:
    monkeypatch.setattr(command, "why_not_hopper", lambda: None)
    option, wrong = words.partition("=")[0], words.rpartition(",")[2]
    with pytest.raises(ValueError, match=f"{option}: '{wrong}' is not known; use some of .*(ffn|torch)"):
        command.measure(parse(words))


def test_rates_by_hand() -> None:
    """10 rows of D = 8, F = 4: 6 * 10 * 32 = 1920 operations forward; the dense product 2 * 8192^3."""
    small = work([10, 0], 8, 4)
    dense_us = 2 * DENSE_SIDE**3 / 800e6
    assert command.rates("ffn", None, small, 1e-3, dense_us) == {
        "tflops": 1.9,
        "limit_tflops": 800.0,
        "share": 0.002,
        "tbps": 0.192,  # 96 values of one expert's weights, 2 bytes each
    }
    assert command.rates("ffn_training", None, small, 1e-3, dense_us)["tflops"] == 5.8
    down = command.rates("grouped_gemm", "down", small, 1e-4, dense_us)
    gate_up = command.rates("grouped_gemm", "gate_up", small, 1e-4, dense_us)
    assert (down["tflops"], gate_up["tflops"]) == (6.4, 12.8)
    assert (down["tbps"], gate_up["tbps"]) == (0.64, 1.28)
    many = command.rates("ffn", None, work([184], 8, 4), 1e-3, dense_us)
    few = command.rates("ffn", None, work([182], 8, 4), 1e-3, dense_us, value_bytes=1)
    assert "tbps" not in many
    assert few["tbps"] == 0.096


def test_decode_counts_the_weights_of_experts_with_rows() -> None:
    """One of two experts: 2 bytes * 3 matrices * 512 * 256 = 786432 bytes in 1 us."""
    small = work([10, 0], 512, 256)
    found = command.rates("decode", None, small, 1.0, 2 * COPY_BYTES / 4e6)
    assert found == {"tbps": 0.786, "limit_tbps": 4.0, "share": 0.197}
    assert command.rates("decode", None, small, 1.0, 1.0, value_bytes=1)["tbps"] == 0.393


def test_the_command_can_be_read_back() -> None:
    args = parse("--model=qwen2-moe", "--rows=64,128", "--ops=decode", "-n=5")
    assert parse(*command.words_of(args)) == args
