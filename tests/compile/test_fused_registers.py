"""Registers of a fused kernel's roles: no more than a block begins with, or its launch fails."""

from __future__ import annotations

from dataclasses import replace

import pytest

from imbrex.kernels.fused.down_home import shipped_variants
from imbrex.kernels.jit import KernelError, compile_variant


@pytest.mark.parametrize(("idle", "fits"), [(104, True), (112, False)])
def test_roles_together_have_what_the_block_has(idle: int, fits: bool) -> None:
    """168 a thread in three groups: 200 + 200 + 104, and not 196 + 196 + 112."""
    variant = next(v for v in shipped_variants() if ("GROUPS", 2) in v.defines)
    given = replace(variant, defines=(*variant.defines, ("BESIDE", idle)))
    if fits:
        assert compile_variant(given).resources.registers == 168
        return
    with pytest.raises(KernelError):
        compile_variant(given)
