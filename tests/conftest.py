"""Rules for every test: fixed seeds, poisoned `torch.empty`, GPU tests only where there is a Hopper GPU."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from tests.poison import poison_empty

HOPPER = (9, 0)


@pytest.fixture(autouse=True)
def _seeds() -> None:
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _poisoned_empty() -> Iterator[None]:
    restore = poison_empty()
    yield
    restore()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--matrix",
        choices=("share", "full"),
        default="share",
        help="cells of codec x transport x schedule x tensor ranks: a share in which any two meet, or all",
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if on_gpu and (reason := _no_hopper()):
        for item in on_gpu:
            item.add_marker(pytest.mark.skip(reason=reason))


def _no_hopper() -> str:
    if not torch.cuda.is_available():
        return "no CUDA device"
    found = torch.cuda.get_device_capability()
    return "" if found == HOPPER else f"compute capability {found}, kernels are built for {HOPPER}"
