"""The papers' tables and figures, one file each, run by `imbrex reproduce NAME`.

A new one is a file with `find(options: Options) -> Finding` and a line below.
"""

from __future__ import annotations

import importlib

from imbrex.reproduce.frame import Finding, Options

TABLES: dict[str, tuple[str, str]] = {
    "schemoe-table-1": ("table_1", "share of the all-to-all in a step, by number of layers"),
    "schemoe-table-4": ("table_4", "675 layers: how much faster than Tutel (also figure 8)"),
    "schemoe-table-6": ("table_6", "what a codec does to learning"),
    "schemoe-table-7": ("table_7", "step time of Tutel's, FasterMoE's and ScheMoE's ways"),
    "schemoe-table-8": ("table_8", "small messages: the layers of BERT-Large-MoE"),
    "schemoe-table-10": ("table_10", "naive, + codec, + all-to-all, + schedule"),
    "schemoe-figure-9": ("figure_9", "all-to-all algorithms by size"),
    "aristos-figure-1": ("aristos_figure_1", "what a step is spent on, with a straggler and without"),
    "aristos-figure-2": ("aristos_figure_2", "one rank late now and then: steps at several quantiles"),
    "aristos-training": ("aristos_training", "training with patience: loss against wall time, tau, epsilon"),
    "aristos-loss": ("aristos_loss", "what dropped choices cost a training, over many seeds; by no clock"),
    "aristos-sharding": ("sharding", "Eq. 1 and 2: groups of devices by link costs"),
    "aristos-liveness": ("liveness", "theorem 3.1: every interleaving of a few ranks"),
    "comet-figure-8": (
        "comet_figure_8",
        "fused kernels over blocks that communicate; without GPUs, as committed",
    ),
    "comet-figure-1a": ("comet_measured:breakdown", "what communication takes of a layer; as committed"),
    "comet-figure-9": ("comet_measured:end_to_end", "whole models; as committed"),
    "comet-layers": ("comet_measured:layers", "figures 10 and 11 on two and four GPUs; as committed"),
    "comet-figure-12": ("comet_layer:parallelism", "one layer over TP x EP; without GPUs, as committed"),
    "comet-figure-13": (
        "comet_layer:structures",
        "one layer over experts and top-k; without GPUs, as committed",
    ),
    "comet-figure-14": ("comet_layer:skewed", "one layer over skew; without GPUs, as committed"),
    "comet-table-3": ("comet_table_3", "memory that peers see"),
    "schemoe-clusters": ("simulated:schemoe", "simulated: table 10 on its cluster and two others"),
    "comet-figures-10-14": ("simulated:comet", "simulated: one layer over tokens, TP x EP, experts, skew"),
    "hybrid-ep-scale": ("simulated:hybrid_ep", "simulated: bandwidth on 8, 4 x 8 and 36 GPUs"),
    "hybrid-ep-bandwidth": ("hybrid:bandwidth", "bandwidth over multiprocessors; without GPUs, as committed"),
    "hybrid-ep-fp8": ("hybrid:fp8", "the same, rows in fp8"),
    "hybrid-ep-end-to-end": (
        "hybrid:end_to_end",
        "models in Megatron: the paper's on GB200, and few layers of them as committed",
    ),
    "trtllm-pareto": ("serving:pareto", "tokens/s of a GPU over tokens/s of a user: EP, DP, drafts"),
    "trtllm-pareto-replayed": ("serving:pareto_replayed", "the same of real widths, by steps timed on GPUs"),
    "trtllm-lm-head": ("serving:lm_head", "a head split over ranks against a whole one"),
    "trtllm-intensity": ("wide_ep:intensity", "operations a byte of a rank's products over the size of EP"),
    "trtllm-auxiliary-kernels": ("wide_ep:auxiliary", "glue over the rows that there are, or the room"),
    "trtllm-collectives": ("wide_ep:collectives", "AllGather and ReduceScatter against all-to-all"),
    "trtllm-rank-heat-map": ("imbalance:heat_map", "choices by rank and layer; --data takes a trace"),
    "trtllm-load-similarity": ("imbalance:similarity", "loads of iterations and requests; --data, a trace"),
    "tensorrt-llm-ep-scale": ("simulated:wide_ep", "simulated: decode over the size of EP"),
}
"""The module of this room, where it is not `find` its function, and one line, by name."""
ALIASES = {
    "schemoe-figure-8": "schemoe-table-4",
    **{f"comet-figure-{number}": "comet-layers" for number in (10, 11)},
}


TRAINED = ("schemoe-table-6",)
"""The reproductions that read text."""
TRACED = ("trtllm-rank-heat-map", "trtllm-load-similarity")
"""The reproductions that read traces of routing."""


def find(name: str, options: Options) -> Finding:
    """Measure it here. Raises ValueError for a name that is not known, and what it is not measured with."""
    name = ALIASES.get(name, name)
    if name not in TABLES:
        raise ValueError(f"reproduce: {name!r} is not known; use one of {', '.join([*TABLES, *ALIASES])}")
    if options.rounds < 0:
        raise ValueError(f"reproduce: {options.rounds} rounds; give at least 1, or 0 for {name}'s own number")
    if options.data and name not in TRAINED + TRACED:
        raise ValueError(f"reproduce: {name} reads no text; leave --data out, or ask for {TRAINED[0]}")
    if options.rounds and name in (*TRAINED, *TRACED, "hybrid-ep-end-to-end"):
        raise ValueError(f"reproduce: {name} times nothing; leave --rounds out")
    if options.rounds and TABLES[name][0].startswith("simulated:"):
        raise ValueError(f"reproduce: {name} is simulated and times nothing; leave --rounds out")
    module, _, function = TABLES[name][0].partition(":")
    return getattr(importlib.import_module(f"imbrex.reproduce.{module}"), function or "find")(options)


__all__ = ["ALIASES", "TABLES", "Finding", "Options", "find"]
