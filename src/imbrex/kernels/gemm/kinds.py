"""The kinds of products, for the host and, as the header gemm/kinds.cuh, for the kernel."""

from __future__ import annotations

from enum import IntEnum

from imbrex.kernels.arguments import declare_enums


class Layout(IntEnum):
    """The dimension that is contracted: see `gemm/gemm.cu`, which has it as `Layout::kForward` and so on."""

    FORWARD = 0
    DGRAD = 1
    WGRAD = 2


class Epilogue(IntEnum):
    """The end of a tile; as in gemm/gemm.cu."""

    PLAIN = 0
    SWIGLU = 1
    SWIGLU_KEEP = 2
    WEIGHTED = 3
    SWIGLU_GRADIENT = 4
    ADD = 5
    ADD_FLOAT = 6


declare_enums("gemm/kinds.cuh", "gemm", Layout, Epilogue)
