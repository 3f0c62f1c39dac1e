"""Does the time of the glue follow the rows that there are? `make gpu-bench NAME=glue`, on one GPU.

A rank of EP ranks receives T tokens' worth of work whatever EP is: T * K expert-major rows. Buffers that are
sized before the routing is known have room for EP times as many. imbrex loops to the count on the device;
torch's elementwise operators, and its indexing, do every row that there is room for.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from imbrex.bench.experts.timing import summary, time_in_turns
from imbrex.bench.results import describe_run, write_results
from imbrex.bench.shapes import MODELS
from imbrex.kernels.ffn import glue

RESULTS = Path(__file__).parent / "results" / "glue.json"
QUESTION = "Does the time of the glue follow the rows that there are, or those that there is room for?"
COMMAND = "make gpu-bench NAME=glue"
EP = (4, 8, 16, 32, 64)


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """What one rank received: `tokens` rows received [N, D] of EP * T that could come, and their choices.

    choice_R, position_NK: for imbrex, sized for the worst case. source_R: for torch, a row for every choice.
    """

    x_ND: Tensor
    gate_up_RG: Tensor
    d_act_RF: Tensor
    weights_R: Tensor
    weights_NK: Tensor
    choice_R: Tensor
    position_NK: Tensor
    source_R: Tensor
    ends_e: Tensor
    tokens: Tensor


def draw(model: str, tokens: int, ranks: int, experts: int = 8) -> Work:
    """Exactly T * K of the EP * T * K choices are this rank's, at random, for `experts` local experts."""
    shape = MODELS[model]
    rows, valid = ranks * tokens * shape.top_k, tokens * shape.top_k
    make = torch.Generator(device="cuda").manual_seed(ranks)
    mine = torch.randperm(rows, generator=make, device="cuda")[:valid].sort().values
    # received tokens stand one after the other, as compact rows do
    received, place = torch.unique_consecutive(mine // shape.top_k, return_inverse=True)
    choices = place * shape.top_k + mine % shape.top_k
    expert = torch.randint(experts, (valid,), generator=make, device="cuda")
    order = expert.argsort(stable=True)
    choice_R = torch.zeros(rows, dtype=torch.int64, device="cuda")
    choice_R[:valid] = choices[order]
    position = torch.full((rows,), -1, dtype=torch.int64, device="cuda")
    position[choice_R[:valid]] = torch.arange(valid, device="cuda")
    counts_e = torch.bincount(expert, minlength=experts)

    def normal(height: int, width: int) -> Tensor:
        return torch.randn(height, width, device="cuda", dtype=torch.bfloat16, generator=make)

    return Work(
        x_ND=normal(ranks * tokens, shape.hidden_size),
        gate_up_RG=normal(rows, 2 * shape.intermediate_size),
        d_act_RF=normal(rows, shape.intermediate_size),
        weights_R=torch.rand(rows, device="cuda"),
        weights_NK=torch.rand(ranks * tokens, shape.top_k, device="cuda"),
        choice_R=choice_R,
        position_NK=position.view(-1, shape.top_k),
        source_R=choice_R // shape.top_k,
        ends_e=counts_e.cumsum(0).to(torch.int32),
        tokens=torch.tensor([received.numel()], dtype=torch.int32, device="cuda"),
    )


def torch_swiglu(gate_up_RG: Tensor, weights_R: Tensor) -> Tensor:
    gate_RF, up_RF = gate_up_RG.chunk(2, -1)
    return F.silu(gate_RF) * up_RF * weights_R[:, None].to(gate_up_RG.dtype)


def torch_unpermute(rows_RD: Tensor, position_NK: Tensor, weights_NK: Tensor) -> Tensor:
    """Every choice's row gathered and summed by a batched product, which is faster than multiplying."""
    rows_NKD = rows_RD[position_NK.clamp(min=0)]
    return torch.bmm((weights_NK * (position_NK >= 0))[:, None].to(rows_RD.dtype), rows_NKD).squeeze(1)


def calls_of(work: Work) -> dict[tuple[str, str], Callable[[], Any]]:
    """What is timed, by operation and implementation; `torch` computes the same values for the valid rows."""
    w, choices = work, work.position_NK.shape[1]
    rows_RD = w.x_ND[w.source_R]
    gate_up, weights = (t.detach().requires_grad_() for t in (w.gate_up_RG, w.weights_R))
    act_RF = torch_swiglu(gate_up, weights)
    return {
        ("permute", "imbrex"): lambda: glue.gather_rows(w.x_ND, w.choice_R, w.ends_e, choices),
        ("permute", "torch"): lambda: w.x_ND[w.source_R],
        ("swiglu", "imbrex"): lambda: glue.swiglu(w.gate_up_RG, w.weights_R, w.ends_e),
        ("swiglu", "torch"): lambda: torch_swiglu(w.gate_up_RG, w.weights_R),
        ("swiglu_backward", "imbrex"): lambda: glue.swiglu_backward(
            w.d_act_RF, w.gate_up_RG, w.weights_R, w.ends_e, keep=False
        ),
        ("swiglu_backward", "torch"): lambda: torch.autograd.grad(
            act_RF, (gate_up, weights), w.d_act_RF, retain_graph=True
        ),
        ("unpermute", "imbrex"): lambda: glue.sum_rows(rows_RD, w.position_NK, w.weights_NK, w.tokens),
        ("unpermute", "torch"): lambda: torch_unpermute(rows_RD, w.position_NK, w.weights_NK),
    }


def check(work: Work) -> None:
    """Both give the same values where there are rows."""
    calls, valid, received = calls_of(work), int(work.ends_e[-1]), int(work.tokens)
    for op in ("permute", "swiglu", "unpermute"):
        ours, theirs = calls[op, "imbrex"](), calls[op, "torch"]()
        size = received if op == "unpermute" else valid
        torch.testing.assert_close(ours[:size], theirs[:size], rtol=2**-6, atol=2**-5)
    ours, theirs = calls["swiglu_backward", "imbrex"](), calls["swiglu_backward", "torch"]()
    torch.testing.assert_close(ours[0][:valid], theirs[0][:valid], rtol=2**-5, atol=2**-5)


def measure(model: str, tokens: int, repeats: int) -> list[dict[str, Any]]:
    found = []
    for ranks in EP:
        work = draw(model, tokens, ranks)
        check(work)
        case = {
            "model": model,
            "T": tokens,
            "ep": ranks,
            "rows": work.choice_R.numel(),
            "valid_rows": int(work.ends_e[-1]),
            "received": int(work.tokens),
        }
        calls = {" ".join(name): call for name, call in calls_of(work).items()}
        for name, times in time_in_turns(calls, repeats=repeats, warmup=3).items():
            op, impl = name.split()
            found.append({"op": op, "impl": impl, "case": case, **summary(times)})
            row = found[-1]
            print(f"{model} T={tokens} EP {ranks:2} {name:24} {row['median_us']:9.1f} us", flush=True)
        del work, calls
        torch.cuda.empty_cache()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="deepseek-v3", choices=sorted(MODELS))
    parser.add_argument("--tokens", default="128,1024", help="T, tokens of a rank (128,1024)")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--json", type=Path, default=RESULTS)
    args = parser.parse_args()
    rows = []
    for tokens in args.tokens.split(","):
        rows += measure(args.model, int(tokens), args.repeats)
    write_results(args.json, QUESTION, describe_run(COMMAND), rows)


if __name__ == "__main__":
    main()
