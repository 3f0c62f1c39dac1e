"""Decoding of a Hugging Face model, a whole step in one CUDA graph.

    decoding = imbrex.capture(model, batch=8, length=2048)
    answers = decoding.generate(input_ids, max_new_tokens=256)

An eager step of such a model leaves a GPU idle for most of its time (73 to 91 % of a step of Mixtral and Qwen
widths: the host launches a thousand kernels), so the step is recorded once and replayed. Its cache is
transformers' static one, which counts on the device; positions and the mask are made on the device too, so a
replay needs nothing but the newest tokens.

Where experts are spread over ranks, all of them capture, start and step together: `generate` goes on until
the last rank has what it wants, and the others run dummies meanwhile.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from imbrex.layer import MoELayer
from imbrex.runtime import waits
from imbrex.serve.decoding import Captured
from imbrex.serve.request import is_whole
from imbrex.transport.groups import hosts_of

WHOLE = (torch.int64, torch.int32)
"""Dtypes of tokens."""


def why_not_captured(model: nn.Module) -> str | None:
    """Why a step of this model cannot be recorded, or `None`."""
    config = getattr(model, "config", None)
    if config is None or not hasattr(model, "generate"):
        return f"{type(model).__name__} is no model of transformers with generate()"
    try:
        from transformers import StaticCache
    except ImportError:
        return "transformers is not installed"
    layers = StaticCache(config=config, max_cache_len=1).layers
    if not all(isinstance(getattr(layer, "cumulative_length", None), Tensor) for layer in layers):
        import transformers

        return f"the static cache of transformers {transformers.__version__} counts on the host; install 5.23"
    if any(getattr(layer, "is_sliding", False) for layer in layers):
        return "its attention slides, so that a slot of the cache is no position"
    attention = getattr(config, "_attn_implementation", "sdpa")
    if attention != "sdpa":
        return f"its attention is {attention!r}; load it with attn_implementation='sdpa'"
    return None


def capture(model: nn.Module, *, batch: int, length: int, graphs: bool = True) -> Decoding:
    """Record a step of decoding of a Hugging Face model; collective where its experts are spread over ranks.

    batch: sequences at once, of equal prompts' length. length: tokens of a sequence, prompt and answer, that
    the cache has room for. graphs: on a GPU, replay a CUDA graph; else every step runs as it is written, for
    the same tokens.

    Raises ValueError where the model cannot be captured, and says why.
    """
    reason = why_not_captured(model)
    if reason is not None:
        raise ValueError(f"capture: {reason}")
    if not is_whole(batch) or not is_whole(length) or batch < 1 or length < 2:
        raise ValueError(
            f"capture: {batch!r} sequences of {length!r} tokens; give 1 or more, of 2 tokens or more"
        )
    # What a step writes to must be writable outside of inference mode, too.
    with torch.inference_mode(False):
        return Decoding(model, batch, length, graphs=graphs)


class Decoding:
    """A model's static cache and its recorded step. tokens_B1: read by a step. logits_BV: written by it."""

    def __init__(self, model: nn.Module, batch: int, length: int, *, graphs: bool) -> None:
        from transformers import StaticCache

        self.model, self.batch, self.length = model.eval(), batch, length
        weight: Any = model.get_input_embeddings().weight  # type: ignore[operator]
        config: Any = model.config
        self.device = weight.device
        self.cache: Any = StaticCache(config=config, max_cache_len=length)
        self.layers = [module for module in model.modules() if isinstance(module, MoELayer)]
        self.tokens_B1 = torch.zeros(batch, 1, dtype=torch.int64, device=self.device)
        self.position_1 = torch.zeros(1, dtype=torch.int64, device=self.device)
        self.logits_BV = torch.zeros(batch, config.vocab_size, dtype=weight.dtype, device=self.device)
        # The first call allocates the cache: a graph must not hold that.
        self._step()
        self._program = Captured(self._step, self.device, graphs=graphs)
        self._reset()

    @torch.no_grad()
    def start(self, input_ids: Tensor) -> Tensor:
        """Run prompts [B, S] from the beginning; the logits [B, V] behind their last tokens. Not recorded.
        Raises ValueError for what is no such prompts: a GPU would end the process for a wrong id."""
        reason = self._why_not_prompts(input_ids)
        if reason is not None:
            raise ValueError(f"capture: {reason}")
        self._reset()
        size = input_ids.shape[1]
        model: Any = self.model
        output = model(input_ids=input_ids.to(self.device), past_key_values=self.cache, use_cache=True)
        self.position_1.fill_(size)
        self._used = size
        return self.logits_BV.copy_(output.logits[:, -1])

    def step(self, tokens_B: Tensor) -> Tensor:
        """One token a sequence; the logits [B, V] behind it, overwritten by the next step. Raises ValueError
        for another number of tokens, and where the cache has no room: a GPU would write past its end."""
        if not isinstance(tokens_B, Tensor) or tokens_B.dtype not in WHOLE:
            raise ValueError(f"capture: a step takes the tokens that follow as int64 [{self.batch}]")
        if tokens_B.numel() != self.batch or self._used >= self.length:
            raise ValueError(
                f"capture: {tokens_B.numel()} tokens behind {self._used} of a sequence; give {self.batch}, "
                f"and start anew where {self.length} are full, or capture with a larger length"
            )
        self._used += 1
        self.tokens_B1.copy_(tokens_B.view(-1, 1))
        self._program()
        for layer in self.layers:
            layer.check()
        return self.logits_BV

    def generate(self, input_ids: Tensor, *, max_new_tokens: int) -> Tensor:
        """Greedy answers [B, max_new_tokens] on the device. Ranks may want different numbers.

        Raises ValueError for prompts or a number that cannot be; then every rank does, and may ask again.
        """
        reason = self._why_not_prompts(input_ids) or self._why_not_tokens(max_new_tokens, input_ids)
        longest, refused = self._agree(0 if reason else max_new_tokens, reason is not None)
        if refused:
            raise ValueError(
                f"capture: {reason or 'another rank was asked for what cannot be, and says what'}"
            )
        answer = [self.start(input_ids).argmax(-1)]
        for step in range(1, longest):
            if step >= max_new_tokens:
                # Others are not done: a dummy must not write past the room.
                self.rewind()
            token_B = self.step(answer[-1]).argmax(-1)
            if step < max_new_tokens:
                answer.append(token_B)
        return torch.stack(answer, 1)

    def rewind(self) -> None:
        """Forget the newest token of every sequence. Raises ValueError where there is none."""
        if self._used < 1:
            raise ValueError("capture: no token to forget; start with prompts first")
        self._used -= 1
        self.position_1.sub_(1)
        for layer in self.cache.layers:
            layer.cumulative_length.sub_(1)

    def _why_not_tokens(self, max_new_tokens: int, input_ids: Tensor) -> str | None:
        size = input_ids.shape[1]
        if is_whole(max_new_tokens) and 0 < max_new_tokens <= self.length - size:
            return None
        return (
            f"{max_new_tokens!r} tokens behind {size}, with room for {self.length}; ask for a whole number "
            "of at least 1 and no more than fit, or capture with a larger length"
        )

    def _why_not_prompts(self, input_ids: Tensor) -> str | None:
        """Why these are no prompts to start with, or `None`."""
        if not isinstance(input_ids, Tensor):
            return f"prompts are a {type(input_ids).__name__}; give a tensor of tokens [{self.batch}, S]"
        shape = tuple(input_ids.shape)
        if len(shape) != 2 or shape[0] != self.batch or not 0 < shape[1] < self.length:
            return (
                f"prompts of shape {shape}; give [{self.batch}, S] with S below {self.length}, the room of "
                "the cache"
            )
        if input_ids.dtype not in WHOLE:
            return f"prompts of {input_ids.dtype}; give tokens as int64"
        # host sync: a wrong id is told before the device reads behind the embeddings
        least, largest = (int(end) for end in input_ids.aminmax())
        vocabulary = self.logits_BV.shape[1]
        if least < 0 or largest >= vocabulary:
            return f"tokens from {least} to {largest}; give whole numbers from 0 to {vocabulary - 1}"
        return None

    def _agree(self, steps: int, refused: bool) -> tuple[int, bool]:
        """The most steps that a rank wants, and whether one refuses."""
        group = next((layer.ranks.group for layer in self.layers if layer.ranks.size > 1), None)
        if group is None:
            return steps, refused
        hosts, most_2 = hosts_of(group), torch.tensor([steps, refused], dtype=torch.int64, device="cpu")
        waits.run(
            "agreement on the number of steps",
            lambda: dist.all_reduce(most_2, dist.ReduceOp.MAX, group=hosts, async_op=True),
            on_host=True,
            group=hosts,
        )
        return int(most_2[0]), bool(most_2[1])

    def _reset(self) -> None:
        self.cache.reset()
        self.position_1.zero_()
        self._used = 0

    @torch.no_grad()
    def _step(self) -> None:
        of_cache_L = torch.arange(self.length, device=self.device)
        mask_B11L = (of_cache_L <= self.position_1).expand(self.batch, 1, 1, -1)
        model: Any = self.model
        output = model(
            input_ids=self.tokens_B1,
            position_ids=self.position_1.expand(self.batch, 1),
            attention_mask=mask_B11L,
            past_key_values=self.cache,
            use_cache=True,
        )
        self.logits_BV.copy_(output.logits[:, -1])
        self.position_1.add_(1)
