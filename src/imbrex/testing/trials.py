"""Every piece of the library, tried on this machine: does it give the numbers it promises, and if not, why.

Transports are tried between two real ranks, everything else in this process.
"""

from __future__ import annotations

import importlib
import multiprocessing as mp
import signal
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import timedelta
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from imbrex import overlap
from imbrex.codec import CODECS
from imbrex.codec import make as make_codec
from imbrex.contracts import Routing
from imbrex.exchange.exchange import Exchange
from imbrex.experts.experts import IMPLEMENTATIONS, Experts
from imbrex.kernels import FAMILIES, why_not_hopper
from imbrex.kernels.jit import ARCH, PORTABLE, KernelError, arch_of, compile_variant, why_not_portable
from imbrex.placement import contiguous
from imbrex.runtime.waits import leave
from imbrex.testing.conformity import FLOATS
from imbrex.transport import TRANSPORTS

TOKENS, WIDTH, EXPERTS, TOP_K, RANKS = 12, 128, 4, 2, 2
TOLERANCE = 1e-5
BF16_TOLERANCE = 3e-2
FP8_TOLERANCE = 1e-1
UNFIT = "not for this machine"
"""How a problem begins where a transport refuses the ranks it is built on."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """The outcome of a trial. room: transport, codec, strategy, experts, kernels. why: what was seen, or what
    is missing."""

    room: str
    name: str
    device: str
    works: bool
    why: str


def try_everything(timeout_s: float) -> Iterator[Finding]:
    """All findings, each as soon as it is found, room by room, the processor first."""
    # A thread a core for a dozen tokens is slow where there are many cores.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield from _try_rooms(timeout_s)
    finally:
        torch.set_num_threads(threads)


def _try_rooms(timeout_s: float) -> Iterator[Finding]:
    gpu = torch.cuda.is_available()
    on = ["cpu", *(["cuda"] if gpu else [])]
    for device in on:
        yield from try_transports(device, timeout_s)
    if not gpu:
        yield from (_finding("transport", name, "cuda", "torch sees no GPU") for name in TRANSPORTS)
    for room, names, trial in (
        ("codec", CODECS, _try_codec),
        ("strategy", overlap.STRATEGIES, _try_strategy),
    ):
        yield from (_attempt(room, name, device, trial) for name in names for device in on)
    yield from (_try_implementation(name, device) for name in IMPLEMENTATIONS for device in on)
    yield from try_kernels()


def _finding(room: str, name: str, device: str, problem: str, seen: str = "") -> Finding:
    return Finding(room=room, name=name, device=device, works=not problem, why=problem or seen)


def _attempt(room: str, name: str, device: str, trial: Callable[[str, torch.device], str]) -> Finding:
    try:
        return _finding(room, name, device, "", trial(name, torch.device(device)))
    except Exception as error:  # noqa: BLE001 (whatever goes wrong is the finding)
        return _finding(room, name, device, f"{type(error).__name__}: {_one_line(error)}")


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]


def _close(actual: Tensor, expected: Tensor, within: float = TOLERANCE) -> str:
    """Say how near the result is; raises ArithmeticError where it is too far off."""
    error = float((actual.double().cpu() - expected.double().cpu()).abs().max() / expected.abs().max().cpu())
    if not error <= within:
        raise ArithmeticError(f"off by {error:.1e} of the largest value, more than {within:.1e}")
    return f"within {max(error, 1e-9):.0e} of the reference" if error else "equal to the reference"


def _try_codec(name: str, device: torch.device) -> str:
    codec, dtype = make_codec(name), torch.float32
    rows_ND = torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(0), **FLOATS).to(device)
    back_ND = codec.decode(codec.encode(rows_ND, dtype), WIDTH, dtype)
    for row_D, back_D in zip(rows_ND, back_ND, strict=True):
        error, bound = float((back_D - row_D).abs().max()), codec.error_bound(float(row_D.abs().max()), dtype)
        if not error <= bound:
            raise ArithmeticError(f"off by {error:.2e}, more than its bound {bound:.2e}")
    return f"{codec.nbytes(4096, torch.bfloat16)} bytes for 4096 bfloat16"


def _routing(rank: int) -> Routing:
    generator = torch.Generator().manual_seed(rank)
    ids_TK = torch.rand(TOKENS, EXPERTS, generator=generator, **FLOATS).argsort(1)[:, :TOP_K]
    return Routing(ids_TK=ids_TK, weights_TK=torch.rand(TOKENS, TOP_K, generator=generator, **FLOATS))


def _tokens(rank: int) -> Tensor:
    return torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(100 + rank), **FLOATS)


def _dtype(device: torch.device) -> torch.dtype:
    """float32 on processors, bfloat16 on GPUs: what each is used with."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def _experts(implementation: str, device: torch.device) -> Experts:
    here: dict[str, Any] = {"device": device, "dtype": _dtype(device)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        ids = tuple(range(EXPERTS))
        return Experts(ids, WIDTH, 2 * WIDTH, implementation=implementation, seed=1, **here)


def _run_layer(strategy: str, experts: Experts) -> Tensor:
    device, dtype = experts.down_proj.device, experts.down_proj.dtype
    routing = _routing(0)
    exchange = Exchange(contiguous(EXPERTS, 1), WIDTH, TOP_K)
    routing = Routing(ids_TK=routing.ids_TK.to(device), weights_TK=routing.weights_TK.to(device))
    with torch.no_grad():
        x_TD = _tokens(0).to(device, dtype)
        y_TD = overlap.make(strategy).run(x_TD, routing, exchange, experts, None).y_TD
    exchange.close()
    return y_TD


def _try_strategy(name: str, device: torch.device) -> str:
    experts = _experts("loop", device)
    return _close(_run_layer(name, experts), _run_layer("serial", experts))


def _try_implementation(name: str, device: str) -> Finding:
    """Try an implementation; one that a processor cannot have is a finding about GPUs."""
    experts = _experts(name, torch.device(device))
    if experts.implementation != name:
        return _finding("experts", name, "cuda", experts.implementation_reason)
    reference = _experts("loop", torch.device("cpu"))
    rounded = FP8_TOLERANCE if name.endswith("fp8") else BF16_TOLERANCE
    within = TOLERANCE if device == "cpu" else rounded

    def compare(*_: object) -> str:
        return _close(_run_layer("serial", experts), _run_layer("serial", reference), within)

    return _attempt("experts", name, device, compare)


def try_kernels() -> Iterator[Finding]:
    """Whether each family of CUDA kernels compiles for this GPU, and whether it can run."""
    arch = arch_of()
    for family in FAMILIES:
        name = family.rpartition(".")[2]
        try:
            variants = importlib.import_module(family).shipped_variants()
            # Elsewhere one of every source, since some of a family may do without what Hopper alone has.
            tried = variants[:1] if arch == ARCH else {v.source: v for v in reversed(variants)}.values()
            *_, compiled = (compile_variant(replace(variant, arch=arch)) for variant in tried)
        except (ImportError, KernelError) as error:
            yield _finding("kernels", name, "cuda", f"does not compile: {_one_line(error)}")
            continue
        portable = all(variant.source in PORTABLE for variant in variants)
        missing = why_not_portable() if portable else why_not_hopper()
        untried = "" if arch == ARCH else ", never run by us"
        seen = f"compiles for {arch}{untried} ({compiled.resources.registers} registers a thread)"
        yield _finding("kernels", name, "cuda", f"{seen}; {missing}" if missing else "", seen)


def try_transports(device: str, timeout_s: float) -> list[Finding]:
    """Every transport between two ranks of this machine, with gloo on processors and NCCL on GPUs."""
    if device == "cuda" and torch.cuda.device_count() < RANKS:
        why = f"needs {RANKS} GPUs and torch sees {torch.cuda.device_count()}"
        return [_finding("transport", name, device, why) for name in TRANSPORTS]
    with tempfile.TemporaryDirectory(prefix="imbrex-doctor-") as folder:
        answers = _ask_ranks(device, Path(folder) / "store", timeout_s)
    trials = []
    for name in TRANSPORTS:
        words = [answer.get(name, answer.get("", "no answer")) for answer in answers]
        problem = next((text for text in words if text), "")
        if device == "cpu" and problem.startswith(UNFIT):
            # A transport for GPUs only is no fault of the processor.
            continue
        backend = "gloo" if device == "cpu" else "NCCL"
        trials.append(_finding("transport", name, device, problem, f"{RANKS} ranks over {backend}"))
    return trials


def _ask_ranks(device: str, store: Path, timeout_s: float) -> list[dict[str, str]]:
    """The report of each rank on each transport: nothing where it works; under `` what stopped the rank."""
    context = mp.get_context("spawn")
    pipes, processes = [], []
    # Ctrl-C ends this process, which ends them: they would each say so in a traceback.
    resource_tracker.ensure_running()  # which lets SIGINT in again
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        for rank in range(RANKS):
            ours, theirs = context.Pipe()
            arguments = (rank, device, str(store), timeout_s, theirs)
            processes.append(context.Process(target=_be_a_rank, args=arguments, daemon=True))
            processes[-1].start()
            theirs.close()
            pipes.append(ours)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    answers = [_answer(pipe, timeout_s) for pipe in pipes]
    for process, answer in zip(processes, answers, strict=True):
        process.join(0 if "" in answer else 5)
        process.kill()
    return answers


def _answer(pipe: Connection, timeout_s: float) -> dict[str, str]:
    if not wait([pipe], timeout_s):
        return {"": f"a rank did not answer within {timeout_s:g} s"}
    try:
        return pipe.recv()
    except EOFError:
        return {"": "a rank died before it answered"}


def _be_a_rank(rank: int, device: str, store: str, timeout_s: float, pipe: Connection) -> None:
    torch.set_num_threads(1)
    try:
        here = torch.device("cpu") if device == "cpu" else torch.device("cuda", rank)
        if device == "cuda":
            torch.cuda.set_device(here)
        dist.init_process_group(
            "gloo" if device == "cpu" else "cpu:gloo,cuda:nccl",
            init_method=f"file://{store}",
            rank=rank,
            world_size=RANKS,
            timeout=timedelta(seconds=timeout_s),
        )
        pipe.send({name: _try_transport(name, rank, here, timeout_s) for name in TRANSPORTS})
        leave()
    except Exception as error:  # noqa: BLE001 (whatever goes wrong is the finding)
        pipe.send({"": f"{type(error).__name__}: {_one_line(error)}"})


def _try_transport(name: str, rank: int, device: torch.device, timeout_s: float) -> str:
    """Dispatch and combine with experts that multiply by 1 + their number; the problem, or nothing."""
    try:
        return _crossing(name, rank, device, timeout_s)
    except Exception as error:  # noqa: BLE001 (whatever goes wrong is the finding)
        return f"{type(error).__name__}: {_one_line(error)}"


def _crossing(name: str, rank: int, device: torch.device, timeout_s: float) -> str:
    placement = contiguous(EXPERTS, RANKS)
    group: Any = dist.group.WORLD
    try:
        exchange = Exchange(placement, WIDTH, TOP_K, group=group, transport=name, timeout=timeout_s)
    except ValueError as error:
        return f"{UNFIT}: {_one_line(error)}"
    who = 0 if exchange.transport.replicated else rank
    routing, x_TD = _routing(who), _tokens(who)
    on_device = Routing(ids_TK=routing.ids_TK.to(device), weights_TK=routing.weights_TK.to(device))
    dtype = _dtype(device)
    dispatched = exchange.dispatch(x_TD.to(device, dtype), on_device)
    factors_e = torch.tensor(placement.local(rank), device=device, dtype=dtype) + 1
    factors = factors_e.repeat_interleave(dispatched.counts_e.to(device))
    factors_R = dispatched.rows_RD.new_ones(dispatched.rows_RD.shape[0])
    factors_R[: factors.numel()] = factors
    y_TD = exchange.combine(dispatched.rows_RD * factors_R[:, None], dispatched.handle)
    exchange.close()
    wanted_TD = (routing.weights_TK * (routing.ids_TK + 1)).sum(1, keepdim=True) * x_TD
    _close(y_TD, wanted_TD, TOLERANCE if dtype == torch.float32 else BF16_TOLERANCE)
    return ""
