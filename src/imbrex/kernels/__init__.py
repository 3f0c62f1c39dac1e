"""The only room that knows CUDA.

Importing this package imports neither cuda-core nor compiles anything; `why_not_hopper()` says in a
sentence why the kernels cannot run here, or is `None`.
"""

import importlib

from imbrex.kernels.jit import KernelError, Variant, why_not_hopper, why_not_portable

FAMILIES: tuple[str, ...] = (
    "imbrex.kernels.rows.choices",
    "imbrex.kernels.codec.codec",
    "imbrex.kernels.rows.compact",
    "imbrex.kernels.rows.keys",
    "imbrex.kernels.rows.labels",
    "imbrex.kernels.ffn.both",
    "imbrex.kernels.ffn.ffn",
    "imbrex.kernels.ffn.fp8",
    "imbrex.kernels.ffn.tokens",
    "imbrex.kernels.gemm.portable",
    "imbrex.kernels.exchange.variants",
    "imbrex.kernels.events.events",
    "imbrex.kernels.fused.down_home",
    "imbrex.kernels.fused.few",
    "imbrex.kernels.fused.home",
    "imbrex.kernels.fused.others_first",
    "imbrex.kernels.fused.rows_out",
    "imbrex.kernels.rows.expand",
    "imbrex.kernels.gate.choose",
    "imbrex.kernels.gate.logits",
    "imbrex.kernels.rows.weights",
    "imbrex.kernels.routing.split",
)
"""Modules with a function `shipped_variants() -> list[Variant]`: all that the package ships."""


def shipped_variants() -> list[Variant]:
    """All variants of all families, each once, in a fixed order."""
    variants: list[Variant] = []
    for family in FAMILIES:
        for variant in importlib.import_module(family).shipped_variants():
            if variant not in variants:
                variants.append(variant)
    return variants


__all__ = ["FAMILIES", "KernelError", "shipped_variants", "why_not_hopper", "why_not_portable"]
