"""The families of kernels in one translation unit, as a kernel of several of them needs it."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("cuda.bindings.nvrtc", reason="compiling kernels needs cuda-core and NVRTC")

from imbrex.kernels import jit, structs
from imbrex.kernels.gemm.gemm import Epilogue, Layout, gemm_variant
from imbrex.kernels.gemm.tiling import SHARED

TOGETHER = """
#include "exchange/pull.cuh"
#include "exchange/push.cuh"
#include "exchange/reduce.cuh"
#include "ffn/plan.cuh"
#include "gemm/gemm.cu"
#include "routing/early.cuh"
#include "routing/whole.cuh"
#include "routing/windows.cuh"

extern "C" __global__ void together(u32* sizes) {
    sizes[0] = sizeof(gemm::Ring<gemm::C>), sizes[1] = sizeof(mover::Ring);
    sizes[2] = gemm::kSlots, sizes[3] = sums::Form<8, 6, 8, 4>::kSlots;
}
"""
FOLDERS = ("codec", "exchange", "ffn", "gemm", "peers", "ptx", "routing")


def test_products_movers_sums_and_routing_stand_in_one_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in FOLDERS:
        (tmp_path / folder).symlink_to(structs.SOURCES / folder)
    (tmp_path / "together.cu").write_text(TOGETHER)
    monkeypatch.setattr(structs, "SOURCES", tmp_path)
    defines = gemm_variant(Layout.FORWARD, Epilogue.PLAIN, SHARED).defines
    variant = jit.Variant(source="together.cu", entry="together", defines=defines)
    compiled = jit.compile_variant(variant)
    assert compiled.resources.warnings == ()
    assert b"grouped_gemm" in compiled.cubin
