"""Do experts keep their contract?"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from imbrex.contracts import Dispatched, Experts, Handle
from imbrex.runtime.checks import piece
from imbrex.runtime.words import words
from imbrex.testing.conformity import FLOATS, on, require


def check_experts(
    experts: Experts,
    hidden_size: int,
    num_slots: int,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    tolerance: float = 1e-5,
    seed: int = 0,
) -> None:
    """Check experts that were built for `num_slots` local slots of rows of `hidden_size`.

    Rows come out in shape and dtype as they went in; a row's result depends on its slot and its values only,
    not on its place, its neighbours, how many there are or what lies behind the counted rows; slots without
    rows and no rows at all are fine; the same bits twice; nothing given changes; gradients reach the rows,
    the weights where `applies_weights`, and every parameter, and are those of a function of single rows; in
    float32 and float64 they are the slopes that differences of outputs have, within 5 %.

    tolerance: relative to the largest magnitude, where the order of sums may differ.
    Raises ConformityError that says what does not hold, and on what input.
    """
    piece("experts", experts)
    require(isinstance(experts.applies_weights, bool), "`applies_weights` is not a bool")
    drawn = torch.Generator().manual_seed(seed)
    for name, counts in _layouts(num_slots):
        total = sum(counts)
        rows_RD = torch.randn(total, hidden_size, generator=drawn, **FLOATS).to(dtype).to(device)
        weights_R = (torch.rand(total, generator=drawn, **FLOATS) + 0.5).to(device)
        run, where = _Run(experts, device), f"{name} (counts {counts})"
        with on(where):
            _check_layout(run, where, rows_RD, weights_R, counts, tolerance)
            if name == "ragged" and dtype in (torch.float32, torch.float64):
                _check_slopes(run, where, rows_RD, weights_R, counts, drawn)


def _layouts(num_slots: int) -> Iterator[tuple[str, list[int]]]:
    yield "no rows", [0] * num_slots
    yield "one row each", [1] * num_slots
    yield "all in the first slot", [9] + [0] * (num_slots - 1)
    yield "all in the last slot", [0] * (num_slots - 1) + [9]
    yield "ragged", [(5 * s + 3) % 7 for s in range(num_slots)]


class _Run:
    def __init__(self, experts: Experts, device: torch.device | str) -> None:
        self.experts, self.device = experts, device

    def __call__(self, rows_RD: Tensor, weights_R: Tensor, counts: Sequence[int]) -> Tensor:
        return self.experts(make_dispatched(rows_RD, weights_R, counts, self.device))


def make_dispatched(
    rows_RD: Tensor, weights_R: Tensor, counts: Sequence[int], device: torch.device | str = "cpu"
) -> Dispatched:
    """Rows as if dispatched, each its own token of this one rank."""
    handle = Handle(weights_R=weights_R, state=(), num_tokens=rows_RD.shape[0])
    return Dispatched(rows_RD=rows_RD, counts_e=words(*counts).to(device), handle=handle)


def _check_layout(
    run: _Run, where: str, rows_RD: Tensor, weights_R: Tensor, counts: list[int], tolerance: float
) -> None:
    before = rows_RD.clone()
    with torch.no_grad():
        out_RD = run(rows_RD, weights_R, counts)
        again_RD = run(rows_RD, weights_R, counts)
    require(out_RD.shape == rows_RD.shape, f"{where}: rows come out as {list(out_RD.shape)}")
    require(out_RD.dtype == rows_RD.dtype, f"{where}: rows come out as {out_RD.dtype}")
    require(torch.equal(out_RD, again_RD), f"{where}: other bits a second time")
    require(torch.equal(before, rows_RD), f"{where}: the rows given were changed")
    require(bool(torch.isfinite(out_RD).all()), f"{where}: something not finite comes out")
    behind = torch.cat(
        [rows_RD, torch.full_like(rows_RD[:1].expand(3, -1) if len(rows_RD) else rows_RD, torch.nan)]
    )
    with torch.no_grad():
        weights = torch.cat([weights_R, weights_R.new_zeros(len(behind) - len(rows_RD))])
        longer_RD = run(behind, weights, counts)
        shape = list(longer_RD.shape)
        require(
            shape == list(behind.shape), f"{where}: {len(behind)} rows, some not counted, leave as {shape}"
        )
        close(longer_RD[: len(rows_RD)], out_RD, tolerance, f"{where}: rows behind the counts are read")
        _check_alone(run, where, rows_RD, weights_R, counts, out_RD, tolerance)
    _check_gradients(run, where, rows_RD, weights_R, counts, tolerance)


def _check_alone(
    run: _Run,
    where: str,
    rows_RD: Tensor,
    weights_R: Tensor,
    counts: list[int],
    out_RD: Tensor,
    tolerance: float,
) -> None:
    """Every row computed as the only one, with weight 1, gives the same."""
    begin = 0
    for slot, count in enumerate(counts):
        for row in range(begin, begin + count):
            only = [int(s == slot) for s in range(len(counts))]
            alone = run(rows_RD[row : row + 1], torch.ones_like(weights_R[:1]), only)
            if run.experts.applies_weights:
                alone = (alone.float() * weights_R[row]).to(alone.dtype)
            close(alone[0], out_RD[row], tolerance, f"{where}: row {row} depends on more than itself")
        begin += count


def _check_gradients(
    run: _Run, where: str, rows_RD: Tensor, weights_R: Tensor, counts: list[int], tolerance: float
) -> None:
    """Gradients of all rows at once are the sums of those of the two halves of every slot."""
    parameters = [p for p in run.experts.parameters() if p.requires_grad]
    whole = _gradients(
        run,
        rows_RD,
        weights_R,
        counts,
        parameters,
        torch.ones(len(rows_RD), dtype=torch.float32, device=run.device),
    )
    for name, grad in zip(["the rows", *["a parameter"] * len(parameters)], whole, strict=False):
        require(bool(torch.isfinite(grad).all()), f"{where}: the gradient of {name} is not finite")
    slot_R = torch.repeat_interleave(torch.arange(len(counts), device="cpu"), words(*counts)).to(run.device)
    first_R = torch.arange(len(rows_RD), device=run.device) % 2 == 0
    parts = []
    for half_R in (first_R, ~first_R):
        sizes = torch.bincount(slot_R[half_R], minlength=len(counts)).tolist()
        scale = torch.ones(int(half_R.sum()), dtype=torch.float32, device=run.device)
        parts.append(_gradients(run, rows_RD[half_R], weights_R[half_R], sizes, parameters, scale))
    for number, (first, two) in enumerate(zip(parts[0][2:], parts[1][2:], strict=True)):
        close(
            first + two,
            whole[number + 2],
            tolerance,
            f"{where}: the gradient of parameter {number} does not add up",
        )
    close(parts[0][0], whole[0][first_R], tolerance, f"{where}: a row's gradient depends on other rows")
    if run.experts.applies_weights:
        close(
            parts[0][1], whole[1][first_R], tolerance, f"{where}: a weight's gradient depends on other rows"
        )
        reaches = not len(rows_RD) or bool((whole[1] != 0).any())
        require(reaches, f"{where}: no gradient reaches the weights")


def _check_slopes(
    run: _Run,
    where: str,
    rows_RD: Tensor,
    weights_R: Tensor,
    counts: list[int],
    drawn: torch.Generator,
    step: float = 1e-2,
) -> None:
    """Along a random direction, a gradient is what the sum of outputs gains."""
    named = [(f"parameter {n}", p) for n, p in enumerate(run.experts.parameters()) if p.requires_grad]
    if isinstance(run.experts, torch.nn.Module):
        named = [(f"`{name}`", p) for name, p in run.experts.named_parameters() if p.requires_grad]
    ones_R = torch.ones(len(rows_RD), dtype=torch.float32, device=run.device)
    gradients = _gradients(run, rows_RD, weights_R, counts, [p for _, p in named], ones_R)
    inputs = [("the rows", rows_RD), ("the weights", weights_R), *named]
    with torch.no_grad():
        parts_RD = run(rows_RD, weights_R, counts).double() * _direction(rows_RD)
        noise = 3e-3 * parts_RD.norm().item()
        for (name, value), gradient in zip(inputs, gradients, strict=True):
            if value is weights_R and not run.experts.applies_weights:
                continue
            along = torch.randn(value.shape, generator=drawn, **FLOATS).to(value)
            before, sums = value.clone(), []
            for sign in (1, -1):
                value.copy_(before + sign * step * along)
                sums.append((run(rows_RD, weights_R, counts).double() * _direction(rows_RD)).sum().item())
            value.copy_(before)
            slope, claim = (sums[0] - sums[1]) / (2 * step), (gradient.double() * along).sum().item()
            require(
                abs(slope - claim) <= noise + 0.05 * abs(slope),
                f"{where}: the gradient of {name} is wrong: {claim:g} along a direction where outputs gain "
                f"{slope:g}",
            )


def _direction(rows_RD: Tensor) -> Tensor:
    return torch.cos(torch.arange(rows_RD.shape[1], device=rows_RD.device))


def _gradients(run: _Run, rows_RD: Tensor, weights_R: Tensor, counts, parameters, scale_R: Tensor):
    rows_RD, weights_R = (
        rows_RD.detach().clone().requires_grad_(),
        weights_R.detach().clone().requires_grad_(),
    )
    out_RD = run(rows_RD, weights_R, counts)
    leaves = [rows_RD, weights_R, *parameters]
    if not out_RD.requires_grad:
        return [torch.zeros_like(w) for w in leaves]
    direction = _direction(out_RD) * scale_R[:, None]
    gradients = torch.autograd.grad((out_RD.float() * direction).sum(), leaves, allow_unused=True)
    return [torch.zeros_like(w) if g is None else g for w, g in zip(leaves, gradients, strict=True)]


def close(ours: Tensor, theirs: Tensor, tolerance: float, what: str) -> None:
    """Raise ConformityError unless equal within `tolerance` of the largest magnitude."""
    if not theirs.numel():
        return
    error = (ours.double() - theirs.double()).abs().max().item()
    limit = tolerance * max(1.0, theirs.double().abs().max().item())
    require(error <= limit, f"{what} (off by {error:g})")
