"""Which kernels compile for GPUs that nobody has run them on: all but the wgmma products on Blackwell, those
without Hopper's copies and barriers on Ampere. A kernel that ceases to compile there is seen here."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("cuda.bindings.nvrtc", reason="compiling kernels needs cuda-core and NVRTC")

import torch

from imbrex.kernels import shipped_variants
from imbrex.kernels.gemm import portable
from imbrex.kernels.jit import DEPENDENT_CAPABILITY, PORTABLE, capability_of, compile_variant
from imbrex.testing import trials

PRODUCTS = {
    "gemm/gemm.cu",
    "gemm/behind.cu",
    "gemm/follow.cu",
    "ffn/both.cu",
    "fused/down_home.cu",
    "fused/few.cu",
    "fused/home.cu",
    "fused/others_first.cu",
    "fused/rows_out.cu",
}
BLACKWELL = ("sm_100", "sm_120")
HOPPER = PRODUCTS | {
    "events/events.cu",
    "exchange/dispatch.cu",
    "exchange/expert.cu",
    "exchange/gather.cu",
    "exchange/pull.cu",
    "exchange/push.cu",
    "ffn/quantise.cu",
    "fused/rows_before.cu",
    "rows/expand.cu",
}


@pytest.mark.timeout(900)  # without a cache on a busy machine
@pytest.mark.parametrize(
    ("arch", "not_there"), [("sm_80", HOPPER), *((arch, PRODUCTS) for arch in BLACKWELL)]
)
def test_a_variant_of_every_source_compiles_but_for_these(
    arch: str, not_there: set[str], request: pytest.FixtureRequest
) -> None:
    """Without `--matrix full` sources take turns on Blackwell's two, of 20 s each in an empty cache."""
    first = {variant.source: variant for variant in reversed(shipped_variants())}
    assert not_there < first.keys()
    sources = sorted(first.keys() - not_there)
    if arch in BLACKWELL and request.config.getoption("--matrix") != "full":
        sources = sources[BLACKWELL.index(arch) :: len(BLACKWELL)]
    for source in sources:
        compiled = compile_variant(replace(first[source], arch=arch))
        assert compiled.cubin[:4] == b"\x7fELF"


@pytest.mark.timeout(900)
@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_89", "sm_100", "sm_120"])
def test_the_products_without_wgmma_compile_without_spills(arch: str) -> None:
    for variant in portable.shipped_variants():
        compiled = compile_variant(replace(variant, arch=arch))
        assert compiled.resources.spill_bytes == compiled.resources.stack_bytes == 0, (variant, arch)
        assert compiled.resources.warnings == ()


def test_a_block_fits_into_the_smallest_multiprocessor() -> None:
    # CUDA C++ Programming Guide: 100 KB a multiprocessor at 8.6, 8.9 and 12.0, of which a block costs 1 KB
    assert all(shape.smem + 1024 <= 100 * 1024 for shape in portable.SHAPES)


def test_ptx_for_the_oldest_gpus() -> None:
    """Of one variant of every source: what PTX is made of is what `sm_80` is, and it tells no registers."""
    first = {variant.source: variant for variant in reversed(shipped_variants())}
    for source in PORTABLE:
        assert b".target sm_80" in compile_variant(replace(first[source], arch="compute_80")).cubin


def test_doctor_says_what_was_never_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (10, 0))
    families = "rows.keys", "ffn.ffn", "gemm.portable", "gate.choose", "rows.choices"
    monkeypatch.setattr(trials, "FAMILIES", tuple(f"imbrex.kernels.{name}" for name in families))
    monkeypatch.setattr(trials, "why_not_hopper", lambda: "this GPU has 10.0")
    monkeypatch.setattr(trials, "why_not_portable", lambda: None)
    keys, ffn, *portable = trials.try_kernels()
    assert keys.why.startswith("compiles for sm_100, never run by us (")
    assert keys.why.endswith(" registers a thread); this GPU has 10.0")
    assert ffn.why.startswith("does not compile: NVRTC could not compile ")
    for family in portable:
        assert family.works
        assert family.why.startswith("compiles for sm_100, never run by us (")


@pytest.mark.timeout(900)
@pytest.mark.parametrize("arch", ["sm_80", "sm_89", "sm_120"])
def test_all_that_a_rank_alone_needs_compiles_without_spills(arch: str) -> None:
    for variant in shipped_variants():
        if variant.source in PORTABLE:
            resources = compile_variant(replace(variant, arch=arch)).resources
            assert resources.spill_bytes == resources.stack_bytes == 0, (variant, arch)
            assert resources.warnings == ()


def test_only_code_for_hopper_and_newer_begins_before_the_kernel_before_it() -> None:
    names = ("sm_80", "compute_80", "sm_89", "sm_90a", "sm_120")
    assert [capability_of(name) >= DEPENDENT_CAPABILITY for name in names] == [False] * 3 + [True] * 2
