"""Compiled models of transformers have as many graphs with imbrex as without: the default way and dynamic."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._dynamo

from imbrex.adapters.huggingface import replace_blocks
from imbrex.adapters.transformers import register
from tests.poison import real_empty
from tests.tiny_models import model_of

pytestmark = pytest.mark.untraced
COUNTERS = torch._dynamo.utils.counters
STATIC: dict[str, Any] = {"cache_implementation": "static", "disable_compile": True}
LENGTH: dict[str, Any] = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False}


@pytest.fixture(autouse=True)
def no_poison() -> Iterator[None]:
    with real_empty():
        yield


def made(side: str) -> Any:
    model = model_of("qwen3_moe")
    if side == "blocks":
        replace_blocks(model)
    if side == "switch":
        register()
        model.set_experts_implementation("imbrex")
    return model


def graphs_of(run: Callable[[], Any]) -> int:
    """How many graphs `run` makes, none of them for a break."""
    torch.compiler.reset()
    COUNTERS.clear()
    run()
    assert not COUNTERS["graph_break"], COUNTERS["graph_break"]
    return COUNTERS["stats"]["unique_graphs"]


@pytest.mark.parametrize("side", ["blocks", "switch"])
def test_generate_is_a_graph_of_the_prompt_and_one_of_a_step(side: str) -> None:
    """From the first call on: nothing of it has run before it is compiled. transformers alone has two."""
    ids = torch.randint(32, (2, 6))
    model, answers = made(side), []
    model.compile(backend="eager")
    assert graphs_of(lambda: answers.append(model.generate(ids, **STATIC, **LENGTH))) == 2
    assert torch.equal(answers[0], made("transformers").generate(ids, **LENGTH))


@pytest.mark.parametrize(("side", "dynamic"), [("blocks", True), ("switch", None)])
def test_steps_of_three_lengths(side: str, dynamic: bool | None) -> None:
    """By default one of the first length and one of all others; transformers alone has as many."""
    model = made(side).train()
    compiled = torch.compile(model, backend="eager", dynamic=dynamic)

    def steps() -> None:
        for length in (6, 9, 11):
            ids = torch.randint(32, (2, length))
            compiled(input_ids=ids, labels=ids, use_cache=False).loss.backward()

    assert graphs_of(steps) == (1 if dynamic else 2)


def test_layers_compiled_one_by_one_share_graphs() -> None:
    """Two layers, two lengths: neither a graph of every layer, nor of every length after the second."""
    model = made("blocks")
    for layer in model.model.layers:
        layer.compile(backend="eager")

    def forwards() -> None:
        for length in (6, 9, 11):
            model(torch.randint(32, (2, length)), use_cache=False)

    with torch._dynamo.config.patch(allow_unspec_int_on_nn_module=True):
        assert graphs_of(forwards) <= 3
