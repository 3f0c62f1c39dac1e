"""Every family whose experts transformers keeps fused computes the same behind its switch with imbrex."""

from __future__ import annotations

import importlib
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from imbrex.adapters.transformers import register, why_not_own

pytestmark = pytest.mark.untraced
MODELS = Path(transformers.__file__).parent / "models"
CLASS = re.compile(r"@use_experts_implementation[^\n]*\n(?:@[^\n]*\n)*class (\w+)")
SIZES = (("expert.*(num|n_)|(num|n_|moe_).*expert(?!.*(tok|shared))", 6), ("tok|top", 2))
SIZES = (*SIZES, ("intermediate|ffn", 24), ("hidden_size|_dim$|d_model|_size", 16))


class Config:
    """Whatever a family calls its widths: D 16, F 24, six experts."""

    _experts_implementation = "eager"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if "bias" in name or name == "moe_latent_size":
            return None if name == "moe_latent_size" else False
        if "act" in name:
            return "silu"
        if "eps" in name:
            return 1e-6
        found = (size for words, size in SIZES if re.search(words, name))
        # A limit or a slope of the gate, which values here come to.
        return next(found, 0.1)


def families() -> list[tuple[str, str]]:
    """(module, class) of every family's experts."""
    return [
        (f"transformers.models.{file.parent.name}.{file.stem}", name)
        for file in sorted(MODELS.glob("*/modeling_*.py"))
        for name in CLASS.findall(file.read_text())
    ]


def experts_of(module: str, name: str) -> Any:
    torch.manual_seed(0)
    experts = getattr(importlib.import_module(module), name)(Config()).float()
    for parameter in experts.parameters():
        nn.init.normal_(parameter, std=0.3)
    return experts


@torch.no_grad()
def test_every_family_computes_the_same() -> None:
    register()
    torch.manual_seed(1)
    x, ids, weights = torch.randn(7, 16), torch.rand(7, 6).argsort(1)[:, :2], torch.rand(7, 2)
    own, theirs = [], []
    for module, name in families():
        experts = experts_of(module, name)
        want = experts(x, ids, weights)
        (own if why_not_own(experts) is None else theirs).append(name)
        experts.config._experts_implementation = "imbrex"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            got = experts(x, ids, weights)
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4 * float(want.abs().max()), msg=name)
    assert len(own) >= 54, own
    assert "Lfm2MoeExperts" in own
    assert len(theirs) <= 11, theirs
