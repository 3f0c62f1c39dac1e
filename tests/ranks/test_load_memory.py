"""Loading a checkpoint costs a rank its share: the kernel's own peak of resident memory says so."""

from __future__ import annotations

import ctypes
import importlib.util
import math
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, MixtralConfig
from transformers.distributed.configuration_utils import DistributedConfig

from imbrex.adapters.huggingface import from_pretrained, replace_blocks
from imbrex.adapters.transformers import register
from tests.poison import real_empty
from tests.ranks.pool import Pool, Ranks

MB = 1 << 20
SIZES = {"hidden_size": 256, "intermediate_size": 512, "num_local_experts": 16, "num_hidden_layers": 6}
"""Of 150 MB, 144 of which are experts."""
SLACK = 1.1
CONSTANT = 4 * MB
"""Bytes that no share counts: a piece under way, Python's own."""
M_MMAP_THRESHOLD = -3


def config_of(sizes: dict[str, Any]) -> MixtralConfig:
    heads: dict[str, Any] = {"num_attention_heads": 2, "num_key_value_heads": 2, "num_experts_per_tok": 2}
    return MixtralConfig(**heads, **sizes, vocab_size=64)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Path]]:
    """A checkpoint with a tensor for every matrix of an expert, one with those of a layer in one, and one of
    few bytes, which loads what a first call loads."""
    top = tmp_path_factory.mktemp("checkpoints")
    small = {"hidden_size": 16, "intermediate_size": 16, "num_local_experts": 4, "num_hidden_layers": 1}
    AutoModelForCausalLM.from_config(config_of(small)).save_pretrained(top / "small")
    model: Any = AutoModelForCausalLM.from_config(config_of(SIZES))
    model.save_pretrained(top / "one by one")
    model.config.save_pretrained(top / "fused")
    save_file(model.state_dict(), top / "fused" / "model.safetensors", {"format": "pt"})
    yield {folder.name: folder for folder in top.iterdir()}
    shutil.rmtree(top)


@pytest.fixture(scope="module")
def pair() -> Iterator[Pool]:
    """Ranks that have not loaded anything else, and a world of two for transformers' meshes."""
    pool = Pool(2)
    yield pool
    pool.close(20)


def most(share: int) -> float:
    """Every byte of a share is there twice at most: in the rank, and in the pages of a mapped file."""
    return 2 * SLACK * share + CONSTANT


def resident(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(name))


def load(folder: Path, door: str, group: Any) -> Any:
    if door == "ours":
        return from_pretrained(folder, group)
    if door == "whole":
        model: Any = AutoModelForCausalLM.from_pretrained(folder)
        replace_blocks(model, group)
        return model
    register(experts="grouped")
    config = DistributedConfig(tp_size=2, ep_size=2, ep_implementation="imbrex")
    return AutoModelForCausalLM.from_pretrained(folder, distributed_config=config)


def cost(ranks: Ranks, small: Path, big: Path, door: str) -> tuple[int, int]:
    """Bytes of this rank's parameters, and by how many its resident memory was higher at the peak."""
    os.environ |= {"RANK": str(ranks.rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(ranks.rank)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "LOCAL_WORLD_SIZE": "2"}
    # What is freed goes back at once, and memory that nobody writes to is not touched.
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 1 << 16)
    with real_empty():
        load(small, door, ranks.group)
        dist.barrier(ranks.group)
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")
        before = resident("VmRSS")
        model = load(big, door, ranks.group)
        own = [p.to_local() if hasattr(p, "to_local") else p for p in model.parameters()]
        # Parameters may be the pages of a file themselves, which are read when they are looked at.
        assert math.isfinite(sum(float(p.sum()) for p in own))
        peak = resident("VmHWM") - before
    return sum(p.nbytes for p in own), peak


SPREADS = pytest.mark.skipif(
    importlib.util.find_spec("accelerate") is None,
    reason="transformers spreads a model only where accelerate is installed",
)


@pytest.mark.untraced
@pytest.mark.parametrize("door", ["ours", pytest.param("switch", marks=SPREADS)])
@pytest.mark.parametrize("form", ["one by one", "fused"])
def test_a_rank_reads_and_holds_its_share(pair: Pool, folders: dict[str, Path], form: str, door: str) -> None:
    for share, peak in pair.run(2, cost, folders["small"], folders[form], door):
        assert 70 * MB < share < 82 * MB
        assert 0.9 * share < peak <= most(share), f"{peak / share:.2f} times the share"


@pytest.mark.untraced
def test_a_rank_that_reads_all_experts_shows(pair: Pool, folders: dict[str, Path]) -> None:
    for share, peak in pair.run(2, cost, folders["small"], folders["one by one"], "whole"):
        assert peak > most(share)
