"""Every kernel variant the package ships compiles for sm_90a, without a GPU, spills or local memory."""

from __future__ import annotations

import pytest

pytest.importorskip("cuda.bindings.nvrtc", reason="compiling kernels needs cuda-core and NVRTC")

from imbrex.kernels import shipped_variants
from imbrex.kernels.jit import Variant, compile_variant


@pytest.mark.parametrize("variant", shipped_variants(), ids=str)
def test_variant_compiles_without_spills(variant: Variant) -> None:
    compiled = compile_variant(variant)
    assert compiled.cubin[:4] == b"\x7fELF"
    assert compiled.resources.spill_bytes == 0, compiled.resources
    assert compiled.resources.stack_bytes == 0, compiled.resources
    assert 0 < compiled.resources.registers <= 255
    assert compiled.resources.warnings == ()
