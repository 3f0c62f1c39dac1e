"""A downloaded checkpoint is served with the tokens of transformers' own generation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from imbrex.bench.serve.models import Way, make_model
from imbrex.cli import main
from imbrex.serve.checkpoint import served_config, why_not_served
from imbrex.serve.engine import Engine, Settings
from imbrex.serve.request import Request

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts_per_tok": 2,
    "vocab_size": 61,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
}


def save(kind: str, folder: Path) -> Any:
    """A small random model in `folder`, its weights large enough that experts matter."""
    transformers = pytest.importorskip("transformers")
    if kind == "qwen3_moe":
        own = {"num_experts": 4, "moe_intermediate_size": 24, "norm_topk_prob": True}
        config = transformers.Qwen3MoeConfig(**SIZES, **own, mlp_only_layers=[], rope_theta=1e5)
    else:
        config = transformers.MixtralConfig(**SIZES, num_local_experts=4, intermediate_size=24)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    for weight in model.parameters():
        if weight.dim() > 1:
            torch.nn.init.normal_(weight, std=weight.shape[-1] ** -0.5)
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral"])
def test_tokens_are_those_of_generate(kind: str, tmp_path: Path) -> None:
    truth = save(kind, tmp_path)
    options = {"positions": 64, "device": torch.device("cpu"), "dtype": torch.float32}
    model = make_model(str(tmp_path), Way(), None, **options)
    engine = Engine(model, Settings(slots=2, room=30, chunk=(1, 4)))
    prompts = [[5, 17, 3, 42, 8], [1], [60, 2, 2]]
    answers = [engine.submit(Request(prompt=prompt, max_tokens=12)) for prompt in prompts]
    engine.run()
    for prompt, answer in zip(prompts, answers, strict=True):
        whole = truth.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False)
        assert answer.tokens == whole[0, len(prompt) :].tolist()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"model_type": "gpt2"}, "model_type 'gpt2' is not among qwen3_moe, mixtral"),
        ({"mlp_only_layers": [0]}, "some of its layers have no experts"),
        ({"attention_bias": True}, "its attention has biases"),
        ({"sliding_window": 8, "use_sliding_window": True}, "its attention slides"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "its rotary positions are scaled (yarn)"),
        (
            {"quantization_config": {"quant_method": "fp8"}},
            "its weights are quantised; give one in bfloat16 (--experts kernels-fp8 quantises experts)",
        ),
        ({"sliding_window": 8}, None),
    ],
)
def test_what_is_not_served(change: dict[str, Any], reason: str | None) -> None:
    assert why_not_served({"model_type": "qwen3_moe"} | change) == reason


def test_a_folder_without_a_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match=r"config.json cannot be read"):
        served_config(tmp_path)
    sizes = dict.fromkeys(SIZES, 8) | {"model_type": "mixtral", "rms_norm_eps": 1e-6}
    for text, said in (
        ("[]", "cannot be read: it holds no settings by name"),
        ("[" * 100_000, "cannot be read: maximum recursion depth"),
        (
            json.dumps({**sizes, "vocab_size": "many"}),
            "says vocab_size is 'many'; give a check",
        ),
        (json.dumps({**sizes, "rms_norm_eps": None}), "says rms_norm_eps is None"),
    ):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ValueError, match=said):
            served_config(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    with pytest.raises(SystemExit):
        main(["bench", "serve", "--device", "cpu", "--weights", str(tmp_path)])
    assert "is not served: model_type 'gpt2'" in capsys.readouterr().err


def test_requests_longer_than_a_model_was_trained_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its positions turn on behind them, and nobody would be told."""
    sizes = SIZES | {"model_type": "mixtral", "rms_norm_eps": 1e-6, "hidden_act": "silu"}
    sizes |= {"num_local_experts": 4, "intermediate_size": 24}
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    assert served_config(tmp_path).positions == 64
    with pytest.raises(SystemExit):
        main(["bench", "serve", "--device", "cpu", "--weights", str(tmp_path), "--input", "8,60"])
    assert "a request takes 76 tokens, and" in capsys.readouterr().err
