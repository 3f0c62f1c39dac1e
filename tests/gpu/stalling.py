"""Kernels of the exchange with delays in them, for tests of its protocol on a GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from imbrex.kernels import jit


class Stalling:
    """Kernels whose threads stop here and there for up to 30 us."""

    def __init__(self, variant: jit.Variant, device: torch.device) -> None:
        self.variant, self.device = replace(variant, defines=(*variant.defines, ("STALL_NS", 30_000))), device

    def launch(self, **options: Any) -> None:
        jit.load(self.variant, self.device).launch(**options)
