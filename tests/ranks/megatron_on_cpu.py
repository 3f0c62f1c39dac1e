"""Megatron-Core's training program on a CPU: what it asks of a GPU beside its arithmetic is lent here.

Its optimizers and Megatron-FSDP make tensors on "cuda", compare `Tensor.type()` with names of CUDA's types
and order work on streams. Inside `on_cpu` such tensors are the CPU's, the names are as on a GPU, and streams
do nothing, since all is in order there.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.overrides import TorchFunctionMode


class Stream:
    """A CUDA stream or event by its methods; work on a CPU is done when a call returns."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def wait_stream(self, other: Any) -> None: ...

    def wait_event(self, event: Any) -> None: ...

    def wait(self, stream: Any = None) -> None: ...

    def record(self, stream: Any = None) -> None: ...

    def record_event(self, event: Any = None) -> Any:
        return event or Stream()

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


class OnCpu(TorchFunctionMode):
    """Makes on the CPU what is to be made on "cuda", and names types as on a GPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if kwargs.get("device") is not None:
            kwargs["device"] = "cpu"
        if func is torch.device:
            return func("cpu")
        if func is torch.Tensor.to:
            args = tuple("cpu" if isinstance(arg, str) and arg.startswith("cuda") else arg for arg in args)
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.record_stream:
            return None
        answer = func(*args, **kwargs)
        if func is torch.Tensor.type and isinstance(answer, str):
            return answer.replace("torch.", "torch.cuda.", 1)
        return answer


def on_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """Megatron's copy to the host, which leaves counts of a CPU tensors where lists are asked for."""
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


class Mesh:
    """Torch's `DeviceMesh` for Megatron-FSDP, which makes those of CUDA alone."""

    @staticmethod
    def from_group(groups: Any, device_type: str, **settings: Any) -> DeviceMesh:
        return DeviceMesh.from_group(groups, device_type="cpu", **settings)


ENGINE = torch.autograd.graph._engine_run_backward


def _seen(*args: Any, **kwargs: Any) -> Any:
    """A backward whose hooks and functions the mode sees, though it was called in a call that it saw."""
    with OnCpu():
        return ENGINE(*args, **kwargs)


@contextmanager
def on_cpu() -> Iterator[None]:
    """Until the end, `torch.cuda` is a device that is the CPU."""
    from megatron.core.distributed.fsdp import (  # pyright: ignore[reportMissingImports]
        mcore_fsdp_adapter,
    )
    from megatron.core.tensor_parallel.random import (  # pyright: ignore[reportMissingImports]
        CudaRNGStatesTracker,
    )
    from megatron.core.transformer.moe import token_dispatcher  # pyright: ignore[reportMissingImports]

    lent: dict[str, Any] = {
        "current_device": lambda: 0,
        "synchronize": lambda *_: None,
        "empty_cache": lambda: None,
        "stream": lambda *_: nullcontext(),
        "Stream": Stream,
        "Event": Stream,
        "current_stream": lambda *_: Stream(),
        "default_stream": lambda *_: Stream(),
    }
    with ExitStack() as stack:
        for name, thing in lent.items():
            stack.enter_context(patch.object(torch.cuda, name, thing))
        stack.enter_context(patch.object(CudaRNGStatesTracker, "fork", lambda *_, **__: nullcontext()))
        stack.enter_context(patch.object(token_dispatcher, "maybe_move_tensor_to_cpu", on_host))
        stack.enter_context(patch.object(mcore_fsdp_adapter, "DeviceMesh", Mesh))
        stack.enter_context(patch.object(torch.autograd, "_engine_run_backward", _seen))
        stack.enter_context(OnCpu())
        yield
