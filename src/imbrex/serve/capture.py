"""Captures a whole decoding step of a Hugging Face model in one CUDA graph.

    decoding = imbrex.capture(model, batch=8, length=2048)
    answers = decoding.generate(input_ids, max_new_tokens=256)

In an eager step of such a model the GPU is idle most of the time (73 to 91 % of a step with Mixtral's and
Qwen's widths), because the host launches a thousand kernels. So the step is captured once and replayed. The
cache is transformers' static one, which counts tokens on the device. Positions and the mask are computed on
the device too, so a replay needs nothing but the newest tokens.

If experts are spread over ranks, all ranks capture, start and step together, since each needs the others'
experts. A rank that has no prompts, or whose input is refused, runs with dummy tokens beside the others, and
raises its error afterwards, so nobody waits for it. `generate` goes on until the last rank has its tokens.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from imbrex.exchange.agreement import is_plain
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

    batch: sequences at once, whose prompts are equally long. length: tokens of a sequence, prompt and answer,
    that the cache has room for. graphs: on a GPU, replay a CUDA graph; else every step runs as it is written,
    for the same tokens.

    Raises ValueError where the model cannot be captured, and says why.
    """
    reason = why_not_captured(model)
    if reason is None and (not is_whole(batch) or not is_whole(length) or batch < 1 or length < 2):
        reason = f"{batch!r} sequences of {length!r} tokens; give 1 or more, of 2 tokens or more"
    # A first step waits for all ranks, so what one of them refuses ends the call on all.
    if _max_over_ranks(model, int(reason is not None), "agreement on a capture"):
        raise ValueError(f"capture: {reason or 'another rank cannot capture its model, and says why'}")
    # What a step writes to must be writable outside of inference mode, too.
    with torch.inference_mode(False):
        return Decoding(model, batch, length, graphs=graphs)


def _layers(model: object) -> list[MoELayer]:
    modules = model.modules() if isinstance(model, nn.Module) else ()
    return [module for module in modules if isinstance(module, MoELayer)]


def _is_spread(model: object) -> bool:
    """Whether transformers has spread its experts, which it does over all ranks."""
    modules = model.modules() if isinstance(model, nn.Module) else ()
    return any(getattr(module, "_is_expert_parallel", False) for module in modules)


def _max_over_ranks(model: object, number: int, what: str) -> int:
    """The largest of a number that every rank of the model's experts gives; a small message between hosts."""
    group = next((layer.ranks.group for layer in _layers(model) if layer.ranks.size > 1), None)
    if group is None and _is_spread(model):
        group = dist.group.WORLD
    if group is None:
        return number
    hosts, most_1 = hosts_of(group), torch.tensor([number], dtype=torch.int64, device="cpu")
    waits.run(
        what,
        lambda: dist.all_reduce(most_1, dist.ReduceOp.MAX, group=hosts, async_op=True),
        on_host=True,
        group=hosts,
    )
    return int(most_1)


class Decoding:
    """A model's static cache and its recorded step. tokens_B1: read by a step. logits_BV: written by it."""

    def __init__(self, model: nn.Module, batch: int, length: int, *, graphs: bool) -> None:
        from transformers import StaticCache

        self.model, self.batch, self.length = model.eval(), batch, length
        weight: Any = model.get_input_embeddings().weight  # type: ignore[operator]
        config: Any = model.config
        self.device = weight.device
        # Its counts are made where torch's default is.
        with self.device:
            self.cache: Any = StaticCache(config=config, max_cache_len=length)
        self.layers = _layers(model)
        self.tokens_B1 = torch.zeros(batch, 1, dtype=torch.int64, device=self.device)
        self.position_1 = torch.zeros(1, dtype=torch.int64, device=self.device)
        self.logits_BV = torch.zeros(batch, config.vocab_size, dtype=weight.dtype, device=self.device)
        # The first call allocates the cache: a graph must not hold that.
        self._step()
        self._program = Captured(self._step, self.device, graphs=graphs)
        self._reset()

    def start(self, input_ids: Tensor | None) -> Tensor:
        """Run prompts [B, S] from the beginning; the logits [B, V] behind their last tokens. Not recorded.
        `None`: this rank has none, helps the others, and keeps what it has; the logits mean nothing.

        Raises ValueError for what is no such prompts, since a GPU would end the process for a wrong id. The
        others' starts go on then, and this rank is where it was."""
        reason = None if input_ids is None else self._why_not_prompts(input_ids)
        if input_ids is None or reason is not None:
            self._help_start()
        if reason is not None:
            raise ValueError(f"capture: {reason}")
        return self.logits_BV if input_ids is None else self._start(input_ids)

    def step(self, tokens_B: Tensor | None) -> Tensor:
        """One token a sequence; the logits [B, V] behind it, overwritten by the next step. `None`: this rank
        has none, helps the others, and keeps what it has; the logits mean nothing.

        Raises ValueError for another number of tokens, for wrong ones where the host has them, and where the
        cache has no room: a GPU would write past its end. The others' steps go on then, and this rank is
        where it was. Tokens on a GPU are not looked at, since that would wait for it."""
        reason = None if tokens_B is None else self._why_not_step(tokens_B)
        if tokens_B is None or reason is not None:
            self._help_step()
        else:
            self._replay(tokens_B)
        if reason is not None:
            raise ValueError(f"capture: {reason}")
        return self.logits_BV

    def generate(self, input_ids: Tensor | None, *, max_new_tokens: int) -> Tensor:
        """Greedy answers [B, max_new_tokens] on the device. Ranks may want different numbers; `None` for
        prompts wants none, and gives [B, 0].

        Raises ValueError for prompts or a number that cannot be, when the others have their answers.
        """
        reason = size = None
        if input_ids is not None:
            reason = self._why_not_prompts(input_ids) or self._why_not_tokens(max_new_tokens, input_ids)
            size = None if reason else max_new_tokens
        answer: list[Tensor] = []
        for step in range(_max_over_ranks(self.model, size or 0, "agreement on the number of steps")):
            if input_ids is None or size is None or step >= size:
                self._help_step() if step else self._help_start()
            else:
                logits_BV = self._replay(answer[-1]) if step else self._start(input_ids)
                answer.append(logits_BV.argmax(-1))
        if reason is not None:
            raise ValueError(f"capture: {reason}")
        return torch.stack(answer, 1) if answer else self.tokens_B1.new_empty(self.batch, 0)

    def rewind(self) -> None:
        """Forget the newest token of every sequence. Raises ValueError where there is none."""
        if self._used < 1:
            raise ValueError("capture: no token to forget; start with prompts first")
        self._used -= 1
        self.position_1.sub_(1)
        for layer in self.cache.layers:
            layer.cumulative_length.sub_(1)

    @torch.no_grad()
    def _start(self, input_ids: Tensor) -> Tensor:
        self._reset()
        self._used = input_ids.shape[1]
        model: Any = self.model
        output = model(input_ids=input_ids.to(self.device), past_key_values=self.cache, use_cache=True)
        self.position_1.fill_(self._used)
        return self.logits_BV.copy_(output.logits[:, -1])

    @torch.no_grad()
    def _help_start(self) -> None:
        """One token of nobody's beside the others' prompts."""
        model: Any = self.model
        model(input_ids=torch.zeros(1, 1, dtype=torch.int64, device=self.device), use_cache=False)

    def _replay(self, tokens_B: Tensor | None) -> Tensor:
        if tokens_B is None:
            self.tokens_B1.zero_()
        else:
            self.tokens_B1.copy_(tokens_B.reshape(-1, 1))
        self._program()
        self._used += 1
        for layer in self.layers:
            layer.check()
        return self.logits_BV

    def _help_step(self) -> None:
        """A step of nobody's tokens beside the others'. It is forgotten, and the next one writes over it; of
        full sequences it writes over the newest, which only a rewind goes on from."""
        full = self._used >= self.length
        if full:
            self.rewind()
        self._replay(None)
        if not full:
            self.rewind()

    def _why_not_step(self, tokens_B: Tensor) -> str | None:
        """Why no step can be made of these tokens, or `None`."""
        reason = self._why_not_ids(tokens_B)
        if reason is not None:
            return f"a step takes the tokens that follow as int64 [{self.batch}]: {reason}"
        if tokens_B.numel() == self.batch and self._used < self.length:
            return None if tokens_B.is_cuda else self._why_not_known(tokens_B)
        return (
            f"{tokens_B.numel()} tokens behind {self._used} of a sequence; give {self.batch}, and start anew "
            f"where {self.length} are full, or capture with a larger length"
        )

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
        reason = self._why_not_ids(input_ids)
        if reason is not None:
            return f"prompts are tokens [{self.batch}, S]: {reason}"
        shape = tuple(input_ids.shape)
        if len(shape) != 2 or shape[0] != self.batch or not 0 < shape[1] < self.length:
            return (
                f"prompts of shape {shape}; give [{self.batch}, S] with S below {self.length}, the room of "
                "the cache"
            )
        return self._why_not_known(input_ids)

    @staticmethod
    def _why_not_ids(ids: object) -> str | None:
        """Why these are no tokens, whatever their number and values, or `None`."""
        if not isinstance(ids, Tensor):
            return f"a {type(ids).__name__} came; give a tensor"
        if ids.dtype not in WHOLE:
            return f"{ids.dtype} came; give int64"
        if not is_plain(ids) or ids.is_meta:
            return "a tensor came that is sparse, nested or without values; give a plain one"
        return None

    def _why_not_known(self, ids: Tensor) -> str | None:
        # host sync: of prompts alone; a wrong id is told before the device reads behind the embeddings
        least, largest = (int(end) for end in ids.aminmax())
        vocabulary = self.logits_BV.shape[1]
        if least < 0 or largest >= vocabulary:
            return f"tokens from {least} to {largest}; give whole numbers from 0 to {vocabulary - 1}"
        return None

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
