"""Launches without a GPU: what the driver is given, of a call and of one made again; and what it refuses."""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from imbrex.kernels import jit
from imbrex.kernels.ffn.both import BOTH, both_variant
from imbrex.kernels.jit import Kernel, KernelError
from imbrex.kernels.records import word_of

DEVICE, STREAM = 0, 77


class Driver:
    """The driver's call: keeps the stream, and the struct and the number that it is given."""

    def __init__(self, *codes: int) -> None:
        self.codes, self.heard = list(codes), list[tuple[int, Any, int]]()

    def queue(self, stream: int, pointers: int, extra: int) -> tuple[Any, ...]:
        assert extra == 0
        at = (ctypes.c_void_p * 2).from_address(pointers)
        both = BOTH.from_buffer_copy(ctypes.string_at(at[0] or 0, ctypes.sizeof(BOTH)))
        self.heard.append((stream, both, ctypes.c_int32.from_address(at[1] or 0).value))
        return (jit.cuda_binding("driver").CUresult(self.codes.pop(0) if self.codes else 0),)


def make_kernel(monkeypatch: pytest.MonkeyPatch, driver: Driver) -> Kernel:
    def current_stream(_: int) -> int:
        return STREAM

    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", current_stream, raising=False)
    monkeypatch.setattr(jit, "_latest", {})
    kernel = Kernel.__new__(Kernel)
    kernel.device, kernel.variant = DEVICE, both_variant(weighted=False)
    kernel._queues = {}
    monkeypatch.setattr(kernel, "_make_queue", lambda how, stream: functools.partial(driver.queue, stream))
    return kernel


def make_both(**fields: int) -> Any:
    given: dict[str, Any] = dict.fromkeys((name for name, *_ in BOTH._fields_), 0)
    return BOTH(**given | fields)


HOW: dict[str, Any] = {"grid": 3, "block": 64}


def again(kernel: Kernel, both: Any) -> Callable[[], None]:
    return kernel.prepare(args=[both, 5], **HOW).launch


def filled(kernel: Kernel, both: Any) -> Callable[[], None]:
    launch = kernel.blank(args=[both, 5], words=[(0, word_of(BOTH, "hits"))], **HOW)
    return lambda: launch.launch(1 << 40)


@pytest.mark.parametrize(("make", "hits"), [(again, 12), (filled, 1 << 40)])
def test_one_made_again_gives_the_driver_the_same(
    monkeypatch: pytest.MonkeyPatch, make: Any, hits: int
) -> None:
    driver, both = Driver(), make_both(hits=12, counter=13, experts=4, width=256)
    kernel = make_kernel(monkeypatch, driver)
    kernel.launch(args=[both, 5], **HOW)
    launch = make(kernel, both)
    launch()
    launch()
    assert [(stream, number) for stream, _, number in driver.heard] == [(STREAM, 5)] * 3
    seen = [(of.hits, of.counter, of.experts, of.width) for _, of, _ in driver.heard]
    assert seen == [(12, 13, 4, 256), (hits, 13, 4, 256), (hits, 13, 4, 256)]
    assert jit.latest_launch(DEVICE) == kernel.variant
    kernel.launch(args=[both, 5], stream=78, **HOW)
    assert driver.heard[-1][0] == 78


@pytest.mark.parametrize("make", [again, filled, None])
def test_what_the_driver_refuses_is_said(monkeypatch: pytest.MonkeyPatch, make: Any) -> None:
    """A thread that is new to CUDA begins once more; anything else is an error."""
    new, wrong = 201, 1
    driver, both, entered = Driver(new, 0, wrong), make_both(), list[int]()
    kernel = make_kernel(monkeypatch, driver)
    monkeypatch.setattr(jit, "enter_context", entered.append)
    launch = make(kernel, both) if make else lambda: kernel.launch(args=[both, 5], **HOW)
    launch()
    assert entered == [DEVICE]
    assert len(driver.heard) == 2
    with pytest.raises(KernelError, match=r"INVALID_VALUE while launching .*grid 3, block 64, 0 bytes"):
        launch()


def test_launches_behind_one_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is launched behind one that the driver refuses."""
    new, wrong = 201, 1
    driver, entered = Driver(new, 0, 0, wrong), list[int]()
    kernel = make_kernel(monkeypatch, driver)
    monkeypatch.setattr(jit, "enter_context", entered.append)
    launches = [kernel.prepare(args=[make_both(hits=hits), 5], **HOW) for hits in (1, 2)]
    jit.launch_all([])
    jit.launch_all(launches)
    assert entered == [DEVICE]
    assert {stream for stream, _, _ in driver.heard} == {STREAM}
    assert [both.hits for _, both, _ in driver.heard] == [1, 1, 2]
    assert jit.latest_launch(DEVICE) == kernel.variant
    with pytest.raises(KernelError, match="INVALID_VALUE"):
        jit.launch_all(launches)
    assert len(driver.heard) == 4


def test_threads_do_not_fill_in_each_others_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread launches the same while the driver has not read the first one's arguments yet."""
    driver = Driver()
    kernel = make_kernel(monkeypatch, driver)
    launch = jit.addressed(kernel, [make_both(hits=3), ...], **HOW)
    read = driver.queue

    def interrupted(*how: int) -> tuple[Any, ...]:
        if threading.current_thread() is threading.main_thread():
            other = threading.Thread(target=launch.launch, args=(8,))
            other.start()
            other.join()
        return read(*how)

    monkeypatch.setattr(driver, "queue", interrupted)
    launch.launch(7)
    assert [(both.hits, number) for _, both, number in driver.heard] == [(3, 8), (3, 7)]
