"""Kernels with stamps (`benchmarks/decode_one.py --stamps`) compile, and what ships knows nothing of them."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("cuda.bindings.nvrtc", reason="compiling kernels needs cuda-core and NVRTC")

from imbrex.bench.stamps import stamped
from imbrex.kernels.exchange.variants import REDUCE, REDUCE_BEHIND, SMALL
from imbrex.kernels.ffn.both import both_variant
from imbrex.kernels.fused.few import few_variant
from imbrex.kernels.jit import Variant, compile_variant

KERNELS = few_variant(), both_variant(weighted=True), SMALL, REDUCE[False], REDUCE_BEHIND


@pytest.mark.parametrize("variant", KERNELS, ids=str)
def test_stamps_compile_without_spills(variant: Variant) -> None:
    compiled = compile_variant(stamped(variant))
    assert compiled.resources.spill_bytes == 0
    assert compiled.resources.warnings == ()
    assert compile_variant(replace(stamped(variant), entry="read_stamps")).cubin == compiled.cubin
    assert b"stamps" not in compile_variant(variant).cubin
