"""Every kernel variant the package ships, for the compile tests and for warming the cache.

A kernel family is a module with a function `shipped_variants() -> list[Variant]`.
"""

from __future__ import annotations

import importlib

from imbrex.kernels.jit import Variant

FAMILIES: tuple[str, ...] = (
    "imbrex.kernels.choices",
    "imbrex.kernels.codec",
    "imbrex.kernels.compact",
    "imbrex.kernels.experts_ffn",
    "imbrex.kernels.experts_fp8",
    "imbrex.kernels.experts_gather",
    "imbrex.kernels.exchange_kernels",
    "imbrex.kernels.expand",
    "imbrex.kernels.gates",
    "imbrex.kernels.split",
)


def shipped_variants() -> list[Variant]:
    """All variants of all families, each once, in a fixed order."""
    variants: list[Variant] = []
    for family in FAMILIES:
        for variant in importlib.import_module(family).shipped_variants():
            if variant not in variants:
                variants.append(variant)
    return variants
