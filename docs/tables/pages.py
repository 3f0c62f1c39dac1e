"""Which page has which tables, and the pages with them written in."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

from docs.tables import (
    api,
    codecs,
    decode,
    events,
    exchange,
    experts,
    fused,
    host,
    layer,
    megatron,
    models,
    pictures,
    placement,
    schedules,
    serve,
    simulate,
    tiers,
    tiles,
)
from docs.tables.results import ROOT, Table

TABLES: dict[str, dict[str, Callable[[], Table | str]]] = {
    "README.md": {"claim": layer.claim, "layer": layer.shown},
    "docs/nvlink.md": {
        "layer": layer.every,
        "missing": layer.missing,
        "decode": partial(decode.decode, "H200"),
        "decode on H100": partial(decode.decode, "H100"),
        "host": host.host,
    },
    "docs/exchange.md": {
        "targets": exchange.targets,
        "skew": exchange.skew,
        "sweep": exchange.sweep,
        "doors": exchange.doors,
        "glue": exchange.glue,
    },
    "docs/experts.md": {
        "few rows in fp8": decode.few_rows_in_fp8,
        "over torch": experts.over_torch,
        "launches and memory": experts.needs,
        "layer in fp8": experts.layer_fp8,
        "fp8": experts.fp8,
        "tall tiles": tiles.tall,
        "telling of tiles": tiles.telling,
    },
    "docs/fused.md": {
        "two H200": partial(fused.layer, "H200", 2),
        "four H200": partial(fused.layer, "H200", 4),
        "four H100": partial(fused.layer, "H100", 4),
        "two H100": partial(fused.layer, "H100", 2),
        "held": fused.held,
    },
    "docs/fused-kernels.md": {
        "rows out": fused.rows_out,
        "movers": fused.movers,
        "waits": fused.waits,
        "gradient": fused.gradient,
        "home": fused.home,
        "sums": fused.sums,
        "others first": fused.others_first,
        "sustained": fused.sustained,
    },
    "docs/events.md": {
        "stragglers": events.stragglers,
        "training": events.training,
        "losses": events.losses,
        "one gpu": events.one_gpu,
        "layers": events.layers,
    },
    "docs/huggingface.md": {
        "tokens": models.tokens,
        "steps": models.steps,
        "sharded": models.sharded,
        "compiled": models.compiled,
        "mean": models.mean,
        "prefill": models.prefill,
    },
    "docs/megatron.md": {"steps": megatron.steps},
    "docs/serving.md": {
        "two gpus": serve.steps,
        "reach": serve.reach,
        "two gpu drafts": serve.two_gpu_drafts,
        "loops": serve.loops,
        "one gpu": serve.one_gpu,
        "parts": serve.parts,
        "drafts": serve.one_gpu_drafts,
    },
    "docs/codecs.md": {"rates": codecs.rates, "learning": codecs.learning},
    "docs/placement.md": {
        "halves": placement.halves,
        "scale": placement.scale,
        "unseen": placement.unseen,
        "drift": placement.drift,
        "split": placement.split,
        "iterations": placement.iterations,
        "skewed": placement.skewed,
    },
    "docs/plan.md": {
        "answer": simulate.answer,
        "validated": simulate.validated,
        "cores": simulate.cores,
        "gains": simulate.gains,
    },
    "docs/api.md": {module: partial(api.table, module) for module in api.MODULES},
    "docs/tiers.md": {"measured": tiers.measured},
    "docs/schedules.md": {
        "order loss": schedules.order_loss,
        "nvlink": schedules.nvlink,
    },
}
END = "<!-- end of the table -->"
PLACE = re.compile(r"(<!-- table: ([^>]+?) -->\n).*?" + re.escape(END), re.DOTALL)


def places(text: str) -> list[str]:
    """The names of the tables that a page has room for, in its order."""
    return [name for _, name in PLACE.findall(text)]


def filled(page: str, text: str) -> str:
    """The page's text with every table as the result files have it."""
    makers = TABLES.get(page, {})
    if sorted(places(text)) != sorted(makers):
        raise ValueError(
            f"{page} has room for tables {places(text)}, and docs/tables/pages.py makes {[*makers]}"
        )
    return PLACE.sub(lambda place: f"{place[1]}\n{makers[place[2]]()}\n\n{END}", text)


def current() -> dict[Path, str]:
    """Every page and picture as it should stand."""
    texts = {ROOT / page: filled(page, (ROOT / page).read_text(encoding="utf-8")) for page in TABLES}
    return texts | {ROOT / file: make() for file, make in pictures.PICTURES.items()}


def stale() -> dict[Path, str]:
    """The pages and pictures that stand otherwise, as they should."""
    return {
        path: text
        for path, text in current().items()
        if not path.exists() or path.read_text(encoding="utf-8") != text
    }
