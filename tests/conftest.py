"""Rules for every test: fixed seeds, poisoned `torch.empty`, GPU tests only where there is a Hopper GPU."""

from __future__ import annotations

import os
import random
import shutil
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from imbrex.kernels.jit import cache_directory
from tests import tracing
from tests.garbage import collect_seldom
from tests.poison import poison_empty

HOPPER = (9, 0)
LONGEST = [
    "ranks/test_demo_death",
    "ranks/test_fused",
    "ranks/test_balancer",
    "ranks/test_matrix",
    "ranks/test_demo",
    "unit/test_readme",
    "unit/test_compiled_models",
    "ranks/test_hierarchical",
    "ranks/test_tiered",
    "ranks/test_tiered_hostile",
    "ranks/test_layer_nvlink",
    "ranks/test_memory",
    "ranks/test_tuning",
    "ranks/test_fused_moving",
    "ranks/test_pipelined",
    "unit/test_home_beside_gradients",
    "unit/test_codec_suite",
    "unit/test_compiled_generate",
    "unit/test_rows_out",
    "unit/test_down_home",
    "unit/test_others_first",
    "ranks/test_defaults",
    "ranks/test_reproduce",
    "ranks/test_megatron_models",
    "unit/test_exchange_routing",
    "ranks/test_events_nvlink",
    "ranks/test_autograd",
    "ranks/test_serve",
    "unit/test_events_kernels",
    "unit/test_gate_emulated",
    "ranks/test_recorded",
    "unit/test_launches_that_overlap",
    "ranks/test_schedule_suite",
    "unit/test_placement_planner",
    "ranks/test_checkpoint",
    "unit/test_exchange_promises",
    "unit/test_exchange_out_of_step",
    "unit/test_house_rules",
    "unit/test_simulate_plans",
    "ranks/test_events",
    "unit/test_few_in_one",
    "unit/test_one_launch",
    "unit/test_portable_gemm",
    "unit/test_expert_kernels_emulated",
    "unit/test_doctor",
    "unit/test_netlab",
    "ranks/test_rank_lost",
    "ranks/test_sync_in_backward",
    "unit/test_liveness",
    "unit/test_plan_cli",
    "ranks/test_fsdp_models",
    "unit/test_exchange_failed",
    "unit/test_deep_ep",
    "ranks/test_compile",
    "unit/test_experts_emulated",
    "unit/test_expert_kernels_compiled",
    "unit/test_schedule_orders",
    "ranks/test_bench_layer",
    "unit/test_huggingface",
    "ranks/test_layer",
    "unit/test_serve_between",
    "unit/test_fused_counters",
    "ranks/test_global_batch",
    "ranks/test_deep_ep_nvlink",
    "unit/test_serve",
    "ranks/test_huggingface_saving",
    "unit/test_placement_online",
    "unit/test_placement_renewal",
    "ranks/test_parallel",
    "ranks/test_properties",
    "unit/test_placement_cli",
    "unit/test_logits",
    "ranks/test_transport_suite",
    "unit/test_placement_split",
    "unit/test_exchange_balanced",
    "unit/test_checkpoint",
    "unit/test_products_that_follow",
    "unit/test_observe_death",
    "unit/test_fp8_experts_emulated",
    "unit/test_docs",
    "unit/test_claims",
    "unit/test_alone_dispatcher",
]
"""Files that take longest, first: no worker is left alone with one at the end."""


def pytest_configure(config: pytest.Config) -> None:
    """Results of tuning are this session's own; compiled kernels are everybody's."""
    kernels, folder = cache_directory().resolve(), Path(tempfile.mkdtemp(prefix="imbrex-cache-"))
    kernels.mkdir(parents=True, exist_ok=True)
    (folder / "kernels").symlink_to(kernels)
    os.environ["IMBREX_CACHE_DIR"] = str(folder)
    config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))
    do_not_interrupt_each_other()


def do_not_interrupt_each_other() -> None:
    """A thread that wakes up waits until the processor is free, in all processes that are started from here:
    ranks are more than processors, and gloo's threads wake up for every message."""
    if hasattr(os, "SCHED_BATCH"):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def pytest_collection_finish() -> None:
    collect_seldom()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """Nothing counts the lines of a test marked `untraced`, nor of parameters that bring no new ones."""
    test = item.nodeid.partition("[")[0]
    counts = not item.get_closest_marker("untraced") and tracing.may_bring_lines(test)
    with tracing.looking_for_lines(test) if counts else tracing.stopped():
        return (yield)


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
    order = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: order.get(f"{item.path.parent.name}/{item.path.stem}", len(order)))
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if on_gpu and (reason := _no_hopper()):
        for item in on_gpu:
            item.add_marker(pytest.mark.skip(reason=reason))


def _no_hopper() -> str:
    if not torch.cuda.is_available():
        return "no CUDA device"
    found = torch.cuda.get_device_capability()
    return "" if found == HOPPER else f"compute capability {found}, kernels are built for {HOPPER}"
