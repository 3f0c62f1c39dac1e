"""Loads a transformers model from a checkpoint's folder, with each rank reading its own experts only.

transformers builds the model without memory for its weights and without its MoE blocks, and reads the rest.
The layers that replace the blocks read their own tensors from the same files. So a rank never holds another
rank's experts, and no weights are initialised to be overwritten.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from imbrex.adapters.huggingface.blocks import moe_blocks, replace_blocks
from imbrex.adapters.huggingface.gathering import Team
from imbrex.adapters.huggingface.weights import BLOCK_NAMES, SafetensorsFolder


def from_pretrained(
    folder: str | Path,
    group: dist.ProcessGroup | DeviceMesh | None = None,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    **options: Any,
) -> Any:
    """Load the causal language model of a checkpoint, with its MoE blocks replaced as by `replace_blocks`.

    folder: with config.json and *.safetensors, as downloaded. dtype: `None` is the checkpoint's own. options:
    those of `replace_blocks`.

    Raises ValueError for a quantised checkpoint, for one that lacks a tensor, and for what `replace_blocks`
    refuses.
    """
    team = Team((group, options.get("data_group")), "from_pretrained")
    team.meet()
    # A rank may read for longer than it may be silent.
    weights, model = team.attempt(lambda: (SafetensorsFolder(folder), _load_dense(folder, dtype, device)))
    replace_blocks(model, group, weights=weights, device=device, **options)
    return model


def _load_dense(folder: str | Path, dtype: torch.dtype | None, device: torch.device | str) -> Any:
    """The model with blocks that have no values."""
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    config = AutoConfig.from_pretrained(folder)
    if getattr(config, "quantization_config", None):
        raise ValueError(
            f"from_pretrained: {folder} is quantised, which transformers would undo for all experts; build "
            "the layers with MoELayer(moe_config(config), group) and load_block"
        )
    kind: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    hollow, blocks = _without_blocks(kind)
    loaded: Any = hollow.from_pretrained(folder, dtype=dtype or "auto", output_loading_info=True)
    model, report = loaded
    if missing := sorted(report["missing_keys"]):
        raise ValueError(
            f"from_pretrained: {folder} lacks {', '.join(missing[:3])}{' and others' * (len(missing) > 3)}, "
            "which transformers would draw, another on every rank; give the folder of a whole checkpoint"
        )
    model.__class__ = kind
    model.to(device)
    for path, block in blocks.items():
        model.set_submodule(path, block)
    return model


def _without_blocks(kind: Any) -> tuple[Any, dict[str, nn.Module]]:
    """A class of the same model without its MoE blocks, and the blocks of the last one made, by name."""
    blocks: dict[str, nn.Module] = {}

    class Hollow(kind):
        """The blocks' tensors are then of no parameter, and transformers leaves them unread."""

        _keys_to_ignore_on_load_unexpected: ClassVar = [rf"\.({'|'.join(BLOCK_NAMES)})\."]

        def __init__(self, *arguments: Any, **settings: Any) -> None:
            super().__init__(*arguments, **settings)
            blocks.clear()
            for path, block in moe_blocks(self):
                blocks[path] = block
                self.set_submodule(path, nn.Module())

    Hollow.__name__ = Hollow.__qualname__ = kind.__name__
    return Hollow, blocks
