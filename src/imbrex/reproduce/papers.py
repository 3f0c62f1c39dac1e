"""Every table and figure of the five papers: what reproduces it here, or why nothing does."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

COMET, SLIDES, SCHEMOE = "Comet", "TensorRT-LLM, slides", "ScheMoE"
ARISTOS, HYBRID = "Aristos", "Hybrid-EP"
DRAWN = "an illustration: nothing is measured in it"

PAPERS: Sequence[tuple[str, str, str, str]] = (
    (
        COMET,
        "figure 1 a",
        "time breakdown of models on 8 H800",
        "comet-figure-1a, of one layer on two and four GPUs; whole models need Megatron-LM's",
    ),
    (COMET, "figures 1 b, 2 to 7", "designs", DRAWN),
    (COMET, "table 1", "symbols", "a notation"),
    (COMET, "table 2", "models", "a configuration: `imbrex.bench.shapes` has its three"),
    (
        COMET,
        "figure 8",
        "layer 1 over blocks that communicate",
        "comet-figure-8, on two Hopper GPUs or more",
    ),
    (
        COMET,
        "figure 9",
        "whole models on 8 H800",
        "comet-figure-9, layers of models on two GPUs; its own need Megatron-LM's",
    ),
    (
        COMET,
        "figures 10 to 14",
        "one layer over tokens, TP x EP, experts, skew, L20s",
        "10 and 11 on two and four GPUs: comet-layers; comet-figure-12, -13 and -14 on two or more; all five "
        "simulated: comet-figures-10-14",
    ),
    (
        COMET,
        "table 3",
        "memory of its heap",
        "comet-table-3",
    ),
    (SLIDES, "expected Pareto curve", "EP 4 and 8 on GB200", "needs GB200s; at a small size trtllm-pareto"),
    (
        SLIDES,
        "heat maps of imbalance",
        "choices by rank and layer",
        "trtllm-rank-heat-map; of all that was replayed: `imbrex balance replay --html`",
    ),
    (SLIDES, "patterns of communication, both balancers' design", "who sends what, and when", DRAWN),
    (
        SLIDES,
        "offline balancer",
        "rows by rank with and without",
        "benchmarks/placement.py, docs/placement.md; of a trace: `imbrex balance replay --html`",
    ),
    (
        SLIDES,
        "online balancer",
        "rows by rank over iterations; how alike iterations are",
        "trtllm-load-similarity; benchmarks/placement_online.py, docs/placement.md",
    ),
    (SLIDES, "table of both balancers", "what each is for", "words: docs/placement.md has both"),
    (
        SLIDES,
        "profiles of AllGather and all-to-all",
        "times over the size of EP",
        "trtllm-collectives; simulated: tensorrt-llm-ep-scale; 2 and 4 GPUs: docs/exchange.md",
    ),
    (
        SLIDES,
        "all-to-all before and after",
        "ids by all-to-all, a combine in few bits, one kernel",
        "nothing to set beside it: dispatch gathers no ids and is one kernel; a combine in bf16 and in fp8: "
        "docs/exchange.md",
    ),
    (SLIDES, "why wide EP", "intensity of a rank's products", "trtllm-intensity"),
    (
        SLIDES,
        "auxiliary kernels",
        "time over valid rows",
        "trtllm-auxiliary-kernels; on GPUs: `make gpu-bench NAME=glue`, docs/exchange.md",
    ),
    (SLIDES, "LM head", "tensor parallel head of small batches", "trtllm-lm-head"),
    (
        SLIDES,
        "Pareto curves",
        "tokens a second and user",
        "trtllm-pareto; real widths: trtllm-pareto-replayed",
    ),
    (SCHEMOE, "table 1", "share of the all-to-all", "schemoe-table-1"),
    (SCHEMOE, "tables 2, 9", "notations", "a notation"),
    (SCHEMOE, "tables 3, 5", "servers and models", "a configuration"),
    (SCHEMOE, "figures 1 to 7", "designs and timelines", DRAWN),
    (SCHEMOE, "table 4, figure 8", "675 layers", "schemoe-table-4"),
    (SCHEMOE, "table 6", "learning under codecs", "schemoe-table-6"),
    (SCHEMOE, "table 7", "step of models", "schemoe-table-7"),
    (SCHEMOE, "table 8", "BERT-Large-MoE", "schemoe-table-8"),
    (SCHEMOE, "figure 9", "all-to-all by size", "schemoe-figure-9"),
    (
        SCHEMOE,
        "table 10",
        "naive, + codec, + all-to-all, + schedule",
        "schemoe-table-10; on its cluster, simulated: schemoe-clusters",
    ),
    (
        ARISTOS,
        "figure 1",
        "kernels of a training step on a supercomputer",
        "its share of the all-to-all needs its supercomputer; a small one: aristos-figure-1",
    ),
    (
        ARISTOS,
        "figure 2",
        "stragglers in 21,000 all-to-alls",
        "needs its clusters; with injected delays: aristos-figure-2; simulated: `imbrex plan --stragglers`",
    ),
    (ARISTOS, "table 1, algorithm 1", "notation and algorithm", "a design: docs/events.md"),
    (ARISTOS, "equations 1 and 2", "experts to groups of devices", "aristos-sharding"),
    (ARISTOS, "theorem 3.1", "liveness", "aristos-liveness"),
    (HYBRID, "figures of the design", "pipelines of warp groups, buffers", DRAWN),
    (
        HYBRID,
        "bandwidth over SMs, 8 GPUs",
        "dispatch and combine over NVLink",
        "hybrid-ep-bandwidth, hybrid-ep-fp8, on 2 and 4 GPUs; simulated at 8: hybrid-ep-scale",
    ),
    (
        HYBRID,
        "bandwidth, 4 x 8 and 36 GPUs",
        "over cards of 400 Gb/s and one domain",
        "simulated: hybrid-ep-scale",
    ),
    (
        HYBRID,
        "table of models",
        "TFLOP/s in Megatron on GB200",
        "hybrid-ep-end-to-end: few layers of them in Megatron-Core on two GPUs, in bfloat16",
    ),
)
"""(paper, table or figure, what it shows, what there is or why nothing is)."""


def list_papers() -> list[str]:
    """A line for each, by paper."""
    return [
        line
        for paper, of_paper in itertools.groupby(PAPERS, key=lambda line: line[0])
        for line in (
            f"{paper}:",
            *(f"  {place}: {about}\n      {state}" for _, place, about, state in of_paper),
        )
    ]


__all__ = ["PAPERS", "list_papers"]
