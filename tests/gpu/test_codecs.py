"""The codecs on a GPU: the CPU's bytes to the bit, no host synchronisation, the whole contract."""

from __future__ import annotations

import pytest
import torch

from imbrex.codec import make
from imbrex.kernels.codec import codec as kernels
from imbrex.testing import check_codec
from tests.unit.test_codec_kernels import hard_rows, same_bytes

pytestmark = pytest.mark.gpu
NAMES = ["bf16", "fp16", "int8", "int8-128", "fp8", "fp8-e5m2", "int4", "nvfp4"]
ZFP = ["zfp1d-4", "zfp1d-7", "zfp1d-16", "zfp2d-4", "zfp2d-8", "zfp2d-11", "zfp2d-16"]


@pytest.mark.parametrize("name", NAMES + ZFP)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("width", [64, 192, 1088, 4160])
def test_the_cpu_s_bytes(name: str, dtype: torch.dtype, width: int) -> None:
    if name in ZFP and width > 1088:
        pytest.skip("the tensor operations take a second, and the kernel knows no rows")
    if (name, dtype) == ("bf16", torch.bfloat16):
        pytest.skip("the bytes that are there")
    codec, rows = make(name), hard_rows(width, dtype)
    wanted = codec.encode(rows, dtype)
    written = kernels.encode(name, rows.cuda(), codec.nbytes(width, dtype))
    assert written is not None
    matches = same_bytes(name, written.cpu(), wanted)
    assert matches.all(), (~matches).any(1).nonzero().flatten()
    back = codec.decode(wanted, width, dtype)
    read = kernels.decode(name, wanted.cuda(), width, dtype)
    assert read is not None
    same = (read.cpu() == back) & (read.cpu().signbit() == back.signbit())
    assert (same | (read.cpu().isnan() & back.isnan())).all()


@pytest.mark.parametrize("name", NAMES + ZFP)
def test_the_contract(name: str) -> None:
    check_codec(
        name, widths=(64, 130, 256), dtypes=(torch.float32, torch.bfloat16, torch.float16), device="cuda"
    )


@pytest.mark.parametrize("name", ["int8", "fp8", "nvfp4", "zfp2d-8"])
def test_a_cuda_graph_holds_both_directions(name: str) -> None:
    codec, rows = make(name), torch.randn(33, 512, device="cuda", dtype=torch.bfloat16)
    wanted = codec.decode(codec.encode(rows, rows.dtype), 512, rows.dtype)
    graph, fed = torch.cuda.CUDAGraph(), torch.zeros_like(rows)
    with torch.cuda.graph(graph):
        decoded = codec.decode(codec.encode(fed, rows.dtype), 512, rows.dtype)
    fed.copy_(rows)
    graph.replay()
    assert torch.equal(decoded, wanted)


def test_other_rows_take_tensor_operations() -> None:
    odd, half = torch.randn(3, 65, device="cuda"), torch.randn(3, 64, device="cuda", dtype=torch.float16)
    assert kernels.encode("fp8", odd, 69) is None
    assert kernels.encode("fp8", half, 68) is None
    for rows in (odd, half):
        codec = make("fp8")
        assert torch.equal(codec.encode(rows, rows.dtype).cpu(), codec.encode(rows.cpu(), rows.dtype))
