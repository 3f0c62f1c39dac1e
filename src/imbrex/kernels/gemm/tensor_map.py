"""Descriptors of tensors for the tiled copy engine (TMA), encoded by the driver."""

from __future__ import annotations

import ctypes
import functools

import torch

from imbrex.kernels.jit import ByValue, cuda_binding, cuda_ok, enter_context

_ELEMENTS = {
    torch.bfloat16: "BFLOAT16",
    torch.float16: "FLOAT16",
    torch.float32: "FLOAT32",
    torch.uint8: "UINT8",
    torch.float8_e4m3fn: "UINT8",
    torch.int32: "INT32",
}
_SWIZZLES = {0: "NONE", 32: "32B", 64: "64B", 128: "128B"}


@functools.lru_cache(maxsize=4096)
def tensor_map(
    address: int,
    dtype: torch.dtype,
    sizes: tuple[int, ...],
    strides_bytes: tuple[int, ...],
    box: tuple[int, ...],
    swizzle: int = 128,
) -> ByValue:
    """Encode a tiled TMA descriptor (CUtensorMap), for a `const __grid_constant__ TensorMap` parameter.

    `sizes` and `box` count elements, innermost first; `strides_bytes` leaves out the innermost dimension.
    Reads outside `sizes` give zeros and writes outside are dropped.

    Raises ValueError where the address is not 16-byte aligned or a stride is no multiple of 16 bytes.
    """
    if address % 16 or any(stride % 16 for stride in strides_bytes):
        raise ValueError(
            f"TMA needs 16-byte aligned rows, got address {address:#x} and strides {strides_bytes} bytes"
        )
    driver = cuda_binding("driver")
    element = getattr(driver.CUtensorMapDataType, f"CU_TENSOR_MAP_DATA_TYPE_{_ELEMENTS[dtype]}")
    if not int(cuda_ok(driver.cuCtxGetCurrent(), "finding the context")):
        enter_context(torch.cuda.current_device())
    encoded = cuda_ok(
        driver.cuTensorMapEncodeTiled(
            element,
            len(sizes),
            address,
            [driver.cuuint64_t(size) for size in sizes],
            [driver.cuuint64_t(stride) for stride in strides_bytes],
            [driver.cuuint32_t(size) for size in box],
            [driver.cuuint32_t(1)] * len(sizes),
            driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            getattr(driver.CUtensorMapSwizzle, f"CU_TENSOR_MAP_SWIZZLE_{_SWIZZLES[swizzle]}"),
            driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        ),
        f"encoding a tensor map of sizes {sizes}, strides {strides_bytes}, box {box}",
    )
    return ByValue(ctypes.string_at(encoded.getPtr(), 128))
