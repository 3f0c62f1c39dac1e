"""Mixture-of-Experts blocks of Hugging Face models as `MoELayer`s: their configuration and their weights.

    layers = replace_blocks(model, torch.distributed.group.WORLD)
    ...
    model.save_pretrained("folder")  # on every rank: all experts, under transformers' names
    restore_blocks(model)            # transformers' own blocks again

replaces every block of a transformers model by a layer. For a single layer from a downloaded checkpoint:

    weights = SafetensorsFolder("Mixtral-8x7B-v0.1")
    layer = MoELayer(moe_config(json.loads(Path("Mixtral-8x7B-v0.1/config.json").read_text())), group)
    load_block(layer, weights, block_prefix(weights, 0))

Every rank reads and keeps only its own experts, or its piece of their width.
"""

from imbrex.adapters.huggingface.blocks import replace_blocks, restore_blocks
from imbrex.adapters.huggingface.families import moe_config
from imbrex.adapters.huggingface.loading import from_pretrained
from imbrex.adapters.huggingface.saving import save_pretrained
from imbrex.adapters.huggingface.weights import SafetensorsFolder, block_prefix, load_block
from imbrex.guards import PartialStateWarning

__all__ = [
    "PartialStateWarning",
    "SafetensorsFolder",
    "block_prefix",
    "from_pretrained",
    "load_block",
    "moe_config",
    "replace_blocks",
    "restore_blocks",
    "save_pretrained",
]
