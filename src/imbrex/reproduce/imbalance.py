"""TensorRT-LLM's slides on imbalance: choices by rank and layer, and how alike iterations are.

Of a trace of ids, where one is given with `--data` (`.npz`, or any file that `imbrex balance` reads); else of
the served demo's model, trained for a minute, over held-out text of the standard library.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

from imbrex.placement import read_history
from imbrex.placement.packing import Ints
from imbrex.reproduce import chart
from imbrex.reproduce.frame import Finding, Options

STEPS, TEXTS, LENGTH = 60, 8, 256
BATCH = 32
"""Tokens of an iteration of one request."""


def heat_map(options: Options) -> Finding:
    """Choices by rank and layer with experts in their order, and the fullest rank over the mean."""
    requests, source = _requests(options)
    counts_LE = np.concatenate([of for _, of in requests]).sum(0)
    layers, experts = counts_LE.shape
    ranks = next(w for w in (32, 16, 8, 4, 2, 1) if experts % w == 0 and experts > w)
    loads_LW = counts_LE.reshape(layers, ranks, -1).sum(2)
    share_LW = loads_LW / loads_LW.mean(1, keepdims=True)
    worst = int(share_LW.max(1).argmax())
    hottest = counts_LE[worst].reshape(ranks, -1)[share_LW[worst].argmax()]
    rows = [
        {
            "op": "choices",
            "impl": "contiguous",
            "case": {"layer": layer, "W": ranks, "E": experts, "source": source},
            "most_over_mean": round(float(of.max()), 3),
            "least_over_mean": round(float(of.min()), 3),
        }
        for layer, of in enumerate(share_LW)
    ]
    return Finding(
        title="TensorRT-LLM, heat map of choices by rank and layer",
        question="How uneven are ranks of a wide EP, and in which layers?",
        head=("layer", "fullest rank over the mean", "emptiest rank", "fullest expert of that rank"),
        table=tuple(_line(layer, of, counts_LE[layer]) for layer, of in enumerate(share_LW)),
        differs=(
            f"{source}, {experts} experts on {ranks} ranks of {experts // ranks}; the slides show "
            "DeepSeek-R1 at 32 ranks in a translation task.",
        ),
        verdict=(
            f"Layer {worst} is the hottest: its fullest rank has {share_LW[worst].max():.2f} times the mean, "
            f"so a rank with the mean idles for {1 - 1 / share_LW[worst].max():.0%} of the layer's time.",
            _cause(hottest / counts_LE[worst].mean()),
            f"Layers differ, as in the slides: from {share_LW.max(1).min():.2f} to "
            f"{share_LW.max(1).max():.2f}.",
        ),
        rows=rows,
        chart=chart.heat(share_LW.tolist(), "rank", "layer"),
    )


def _line(layer: int, share_W: np.ndarray, counts_E: Ints) -> tuple[str, ...]:
    fullest = int(share_W.argmax())
    expert = counts_E.reshape(len(share_W), -1)[fullest].max() / counts_E.mean()
    return (
        str(layer),
        f"{share_W.max():.2f} (rank {fullest})",
        f"{share_W.min():.2f}",
        f"{expert:.2f} of the mean expert",
    )


def _cause(of_rank: np.ndarray) -> str:
    """Which of the slides' two causes a rank's experts show; as shares of the mean expert."""
    warm, excess = int((of_rank > 1).sum()), of_rank.sum() - len(of_rank)
    if of_rank.max() - 1 > 0.75 * excess:
        return "One expert is most of what that rank has above the mean: a hot expert, the first cause."
    return (
        f"{warm} of its {len(of_rank)} experts have more than the mean: warm experts on one rank, the second "
        "cause."
    )


def similarity(options: Options) -> Finding:
    """Cosine similarity of experts' loads: of neighbouring iterations, of requests, of tasks."""
    requests, source = _requests(options)
    pairs = _similarities(requests)
    lacking = [name for name in NAMES[:2] if not pairs[name]]
    if lacking:
        raise ValueError(
            f"reproduce: {source} has no {lacking[0]} to compare; give two requests of a task, each of four "
            f"times {BATCH} tokens or more"
        )
    rows: list[dict[str, Any]] = [
        {"op": "similarity", "impl": name, "case": {"source": source, "T": BATCH}, "n": len(of)}
        | {"median": round(float(np.median(of)), 4), "p5": round(float(np.quantile(of, 0.05)), 4)}
        for name, of in pairs.items()
        if len(of)
    ]
    means = {row["impl"]: row["median"] for row in rows}
    near, far = means[NAMES[0]], means[NAMES[1]]
    return Finding(
        title="TensorRT-LLM, similarity of loads between iterations and between requests",
        question="For how long does what was counted say what comes?",
        head=("iterations compared", "median cosine", "5 % quantile", "pairs"),
        table=tuple((row["impl"], f"{row['median']:.3f}", f"{row['p5']:.3f}", str(row["n"])) for row in rows),
        differs=(
            f"{source}, {BATCH} tokens of one request an iteration, second halves of requests, all layers; "
            "the slides show decoding of "
            "DeepSeek-R1 as pictures, without figures.",
        ),
        verdict=(
            f"Neighbouring iterations of a request: {near:.3f}; of two requests: {far:.3f}"
            + (f"; of two tasks: {means[NAMES[2]]:.3f}. " if NAMES[2] in means else ". ")
            + _order(pairs[NAMES[0]], pairs[NAMES[1]]),
        ),
        rows=rows,
        chart=chart.bars({name: {"median": value} for name, value in means.items()}, "cosine"),
    )


def _order(near: Sequence[float], far: Sequence[float]) -> str:
    """Whether neighbours are more alike than two requests: how often, of all pairs of one and the other."""
    ahead = np.sign(np.subtract.outer(near, far)).mean() / 2 + 0.5
    often = f"neighbours are the more alike in {ahead:.0%} of all comparisons with two requests"
    if ahead >= CLEAR:
        return f"The slides' order holds: {often}."
    reverse = "the reverse of the slides' order" if ahead <= 1 - CLEAR else "no clear order"
    return f"It is {reverse}: {often}."


CLEAR = 0.6
"""The share of comparisons from which on an order is said to hold."""
NAMES = ("neighbours of a request", "two requests", "two tasks")


def _similarities(requests: Sequence[tuple[str, Ints]]) -> dict[str, list[float]]:
    """Similarities of loads by kind of pair, over all layers, of the second halves of requests: prompts of a
    task begin alike. Of two requests their last iterations, of neighbours in order."""
    cosines: dict[str, list[float]] = {name: [] for name in NAMES}
    later = [(task, of[len(of) // 2 :]) for task, of in requests]
    for (task, of), (other_task, other) in zip(later, [*later[1:], later[0]], strict=True):
        cosines[NAMES[0]] += [x for a, b in pairwise(of) for x in _cosines(a, b)]
        cosines[NAMES[1 if task == other_task else 2]] += _cosines(of[-1], other[-1])
    return cosines


def _cosines(a_LE: Ints, b_LE: Ints) -> list[float]:
    both = (a_LE * b_LE).sum(1) / (np.linalg.norm(a_LE, axis=1) * np.linalg.norm(b_LE, axis=1))
    return both.tolist()


def _requests(options: Options) -> tuple[list[tuple[str, Ints]], str]:
    """Requests, each with its task and counts [iterations, layers, experts], and what they are of."""
    if not options.data:
        return _of_demo(), f"the demo's model after {STEPS} steps"
    requests = [request for name in options.data for request in _of_file(Path(name))]
    if len(requests) < 2:
        raise ValueError(
            f"reproduce: {options.data[0]} has one request; give a longer trace, or several files"
        )
    return requests, ", ".join(Path(name).name for name in options.data)


def _of_file(path: Path) -> list[tuple[str, Ints]]:
    """Arrays `{task}_ids` are tasks, `{task}_lens` says where their requests end. Without, and of other
    files, sixteen iterations are taken for a request."""
    if path.suffix != ".npz":
        counts_ILE = read_history(path, batch=BATCH).counts_ILE
        return [(path.stem, counts_ILE[at : at + 16]) for at in range(0, len(counts_ILE), 16)]
    try:
        arrays = dict(np.load(path, allow_pickle=False))
    except (OSError, ValueError) as error:
        raise ValueError(f"reproduce: {path} cannot be read as a trace: {error}") from None
    tasks = [name for name in arrays if name.endswith("ids")]
    if not tasks:
        raise ValueError(f"reproduce: {path} has no array of ids; name it ..._ids, [layers, tokens, choices]")
    of_tasks = {name: _ids_and_lens(path, name, arrays) for name in tasks}
    experts = 1 + max(int(ids_LTK.max()) for ids_LTK, _ in of_tasks.values())
    requests = []
    for name, (ids_LTK, lens) in of_tasks.items():
        for begin, length in zip(np.cumsum(lens) - lens, lens, strict=True):
            counts = _counted(ids_LTK[:, begin : begin + length], experts)
            requests += [(name, counts)] if len(counts) else []
    return requests


def _ids_and_lens(path: Path, name: str, arrays: Mapping[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """The ids of a task and the lengths of its requests. Raises ValueError for what is no trace."""
    ids = arrays[name]
    if ids.ndim != 3 or ids.dtype.kind not in "iu" or not ids.size or not 0 <= ids.max() < MOST_EXPERTS:
        raise ValueError(
            f"reproduce: {name} of {path} is no trace ({ids.dtype}, shape {ids.shape}); give ids of experts "
            "as whole numbers, [layers, tokens, choices]"
        )
    tokens, of_lens = ids.shape[1], name.removesuffix("ids") + "lens"
    lens = arrays.get(of_lens, np.full(tokens // (16 * BATCH), 16 * BATCH))
    if lens.ndim != 1 or lens.dtype.kind not in "iu" or (lens < 0).any() or lens.sum() > tokens:
        raise ValueError(
            f"reproduce: {of_lens} of {path} does not part {tokens} tokens; give the tokens of every request"
        )
    return ids.astype(np.int64), lens.astype(np.int64)


MOST_EXPERTS = 1 << 16


def _counted(ids_LTK: np.ndarray, experts: int) -> Ints:
    """Counts [iterations, layers, experts] of whole batches."""
    layers, batches = ids_LTK.shape[0], ids_LTK.shape[1] // BATCH
    counts = np.zeros((batches, layers, experts), dtype=np.int64)
    for at in range(batches):
        for layer in range(layers):
            ids = ids_LTK[layer, at * BATCH : (at + 1) * BATCH].ravel()
            counts[at, layer] = np.bincount(ids[ids >= 0], minlength=experts)
    return counts


def _of_demo() -> list[tuple[str, Ints]]:
    from imbrex.bench.serve.models import MODELS, Way, make_model
    from imbrex.bench.serve.training import train
    from imbrex.demo.corpus import load_corpus
    from imbrex.layer import MoELayer
    from imbrex.serve.attention import Span

    options = {"positions": LENGTH, "device": torch.device("cpu"), "dtype": torch.float32, "drafting": False}
    model = make_model("demo", Way(), None, **options)
    corpus = load_corpus(length=LENGTH)
    train(model, corpus, STEPS, None)
    requests = []
    for tokens_S in corpus.held_out_batches(TEXTS, batch=1, length=LENGTH)[:, 0, :LENGTH]:
        with torch.no_grad():
            model(tokens_S[None], Span(torch.zeros(1, dtype=torch.int64), LENGTH, 0))
        layers = [module for module in model.modules() if isinstance(module, MoELayer)]
        ids_LTK = np.stack([layer.routing.ids_TK.numpy() for layer in layers if layer.routing is not None])
        requests.append(("held-out text", _counted(ids_LTK, MODELS["demo"].moe.num_experts)))
    return requests
