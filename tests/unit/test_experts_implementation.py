"""Which implementation computes the experts, and why."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from imbrex import MoEConfig, MoELayer
from imbrex.contracts import Dispatched, Handle, RowForm
from imbrex.exchange.alone import AloneDispatcher
from imbrex.experts import experts
from imbrex.experts.experts import Experts, pick_implementation
from imbrex.kernels import jit
from imbrex.kernels.ffn.glue import COUNTERS, Groups
from imbrex.kernels.gemm import portable
from tests.poison import real_empty


@pytest.fixture
def kernels_available(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experts, "why_not_hopper", lambda: None)
    monkeypatch.setattr(experts, "why_not_portable", lambda: None)


@pytest.mark.skipif(torch.cuda.is_available(), reason="states what happens without a GPU")
def test_without_a_gpu_auto_is_grouped_and_kernels_warns() -> None:
    name, reason = pick_implementation("auto")
    assert name == "grouped"
    assert "need an NVIDIA GPU" in reason
    with pytest.warns(UserWarning, match="grouped products instead of kernels: .*need an NVIDIA GPU"):
        assert pick_implementation("kernels")[0] == "grouped"


@pytest.mark.usefixtures("kernels_available")
def test_auto_takes_the_kernels_where_they_run() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert pick_implementation("auto")[0] == "kernels"
        assert pick_implementation("kernels") == ("kernels", "asked for")
    assert pick_implementation("loop") == ("loop", "asked for")


@pytest.mark.parametrize(
    ("capability", "name", "reason"),
    [
        ((7, 5), "grouped", "need compute capability 8.0 or more and this GPU has 7.5"),
        ((8, 0), "kernels", "products by mma.sync, compiled for sm_80, never run by us on such a GPU"),
        ((8, 9), "kernels", "compiled for sm_89"),
        ((9, 0), "kernels", "the fastest for bfloat16 on this GPU"),
        ((10, 0), "grouped", "torch has a grouped product for compute capability 10.0"),
        ((12, 0), "kernels", "compiled for sm_120"),
    ],
)
def test_every_gpu_has_its_products(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], name: str, reason: str
) -> None:
    monkeypatch.setattr(jit, "_why_not_cuda", lambda: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    picked = pick_implementation("auto")
    assert picked[0] == name
    assert reason in picked[1]
    portable._lacks_wgmma.cache_clear()
    assert portable.is_portable(0) == (capability != (9, 0))
    portable._lacks_wgmma.cache_clear()
    if capability >= (8, 0):
        assert pick_implementation("kernels")[0] == "kernels"
        fp8 = "kernels-fp8" if capability == (9, 0) else "kernels"
        with warnings.catch_warnings(record=True) as said:
            assert pick_implementation("kernels-fp8")[0] == fp8
        assert ["compute capability 9.0" in str(warning.message) for warning in said] == [True] * (
            fp8 == "kernels"
        )


@pytest.mark.usefixtures("kernels_available")
@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"activation": "gelu"}, "not gelu"),
        ({"bias": True}, "no biases"),
    ],
)
def test_what_the_kernels_cannot_do_is_grouped_with_the_reason(options: dict, reason: str) -> None:
    made = Experts((0,), 16, 24, **options)
    assert made.implementation == "grouped"
    assert reason in made.implementation_reason


@pytest.mark.usefixtures("kernels_available")
def test_other_widths_are_padded_and_it_is_said() -> None:
    made = Experts((0,), 16, 12)
    assert made.implementation == "kernels"
    assert made.implementation_reason.endswith("; every call pads D and F to multiples of 8")
    assert "pads" not in Experts((0,), 16, 24).implementation_reason


@pytest.mark.usefixtures("kernels_available")
def test_fp8_is_the_kernels_where_widths_do_not_fit() -> None:
    assert Experts((0,), 128, 256, implementation="kernels-fp8").implementation == "kernels-fp8"
    with pytest.warns(UserWarning, match="bfloat16 instead of fp8: .* multiples of 128, not 16 and 256"):
        made = Experts((0,), 16, 256, implementation="kernels-fp8")
    assert made.implementation == "kernels"


@pytest.mark.usefixtures("kernels_available")
@pytest.mark.parametrize(
    ("codec", "said"),
    [
        ({"dispatch": "fp8"}, "rows come in fp8"),
        ("int8", "rows are quantised here: they cross as int8, not as fp8"),
        ("fp8-e5m2", "rows are quantised here: they cross as fp8-e5m2, not as fp8"),
    ],
)
def test_whether_rows_come_in_fp8_is_said(codec: Any, said: str) -> None:
    config = MoEConfig(hidden_size=128, intermediate_size=128, num_experts=2, top_k=1)
    layer = MoELayer(config, codec=codec, experts="kernels-fp8", dtype=torch.bfloat16)
    assert layer.reasons["experts"] == f"kernels-fp8: asked for; {said}"


@pytest.mark.usefixtures("kernels_available")
def test_launches_of_a_small_batch_over_nvlink_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    config = MoEConfig(hidden_size=128, intermediate_size=128, num_experts=2, top_k=1)
    layer = MoELayer(config, experts="kernels", dtype=torch.bfloat16)
    assert "launch" not in layer.reasons["experts"]
    nvlink = SimpleNamespace(name="nvlink")
    monkeypatch.setattr(layer.exchange, "transport", nvlink)
    said = "; products of a small batch in "
    either = "one launch or two, whichever is faster for its rows and weights"
    assert layer.reasons["experts"].endswith(said + either)
    for asked, way in ((True, "one launch"), (False, "two launches")):
        layer.experts.one_launch = asked
        assert layer.reasons["experts"].endswith(f"{said}{way}: asked for")
    about = "; and what the dispatcher says"
    monkeypatch.setattr(layer.exchange.dispatcher, "about_whole", lambda experts, schedule: about + schedule)
    assert layer.reasons["experts"].endswith(f"two launches: asked for{about}serial")


@pytest.mark.usefixtures("kernels_available")
@pytest.mark.parametrize("one_launch", [False, True, None])
def test_one_launch_is_asked_for_with_the_rows(
    monkeypatch: pytest.MonkeyPatch, one_launch: bool | None
) -> None:
    asked: list[bool | None] = []
    monkeypatch.setattr(experts, "ffn", lambda *_, beside, **more: asked.append(beside.one_launch))
    made = Experts((0,), 128, 128, implementation="kernels", dtype=torch.bfloat16)
    made.one_launch = one_launch
    handle = Handle(weights_R=torch.ones(4), state=(), num_tokens=4)
    groups = Groups(torch.zeros(COUNTERS + 1, dtype=torch.int32), expected=4)
    with FakeTensorMode():
        rows = torch.empty(4, 128, dtype=torch.bfloat16, device="cuda")
    made(Dispatched(rows_RD=rows, counts_e=torch.tensor([4]), handle=handle, beside=groups))
    assert asked == [one_launch]


@pytest.mark.usefixtures("kernels_available")
@pytest.mark.parametrize("one_launch", [False, True])
def test_in_fp8_one_launch_is_asked_for_with_the_rows(
    monkeypatch: pytest.MonkeyPatch, one_launch: bool
) -> None:
    """And so are rows, of few tokens of a rank alone, where tokens would do."""
    came: list[Groups] = []
    monkeypatch.setattr(experts, "ffn_fp8", lambda *_, groups, **more: came.append(groups))
    made = Experts((0,), 128, 128, implementation="kernels-fp8", dtype=torch.bfloat16)
    made.one_launch = one_launch
    handle = Handle(weights_R=torch.ones(4), state=(), num_tokens=4)
    groups = Groups(torch.zeros(COUNTERS + 1, dtype=torch.int32), expected=4)
    with FakeTensorMode():
        rows = torch.empty(4, 128, dtype=torch.bfloat16, device="cuda")
    with torch.no_grad():
        made(Dispatched(rows_RD=rows, counts_e=torch.tensor([4]), handle=handle, beside=groups))
        alone: Any = None  # the form goes by the call
        form = AloneDispatcher.form_of(alone, made.forms, torch.ones(3, 128), torch.ones(3, 1))
    assert came == [groups]
    assert groups.one_launch is one_launch
    assert form is (RowForm.ROWS if one_launch else RowForm.INDEXED)


R, X, U, C = RowForm.ROWS, RowForm.INDEXED, RowForm.UNDER_WAY, RowForm.FP8


@pytest.mark.usefixtures("kernels_available")
@pytest.mark.parametrize(
    ("implementation", "inner", "training", "inference"),
    [
        ("grouped", 128, (R,), (R,)),
        ("kernels", 128, (R, U), (X, R, U)),
        ("kernels", 12, (R,), (R,)),
        ("kernels-fp8", 128, (R,), (C, R, X)),
    ],
)
def test_rows_come_as_the_experts_take_them(
    implementation: str, inner: int, training: tuple[RowForm, ...], inference: tuple[RowForm, ...]
) -> None:
    """And their weights are a dispatcher's where kernels compute them in bfloat16, and nobody else hears."""
    made = Experts((0, 1), 128, inner, implementation=implementation, dtype=torch.bfloat16)
    assert made.forms == training
    with torch.no_grad():
        assert made.forms == inference
    plain = (made.gate_up_proj, made.down_proj, None) if X in inference and C not in inference else None
    assert made.kernel_weights == plain
    for hook in (made.register_forward_hook(print), made.register_forward_pre_hook(print)):
        assert made.kernel_weights is None
        with torch.no_grad():
            assert made.forms == training  # plain rows, for the hook before
        hook.remove()
    assert made.kernel_weights == plain
    made.forward = lambda dispatched: dispatched.rows_RD
    assert made.forms == (R,)


def test_rows_in_fp8_want_experts_in_fp8() -> None:
    handle = Handle(weights_R=torch.ones(4), state=(), num_tokens=4)
    rows = torch.zeros(4, 128, dtype=torch.float8_e4m3fn)
    coded = {"form": RowForm.FP8, "scales_RB": torch.ones(4, 1)}
    given = Dispatched(rows_RD=rows, counts_e=torch.tensor([4]), handle=handle, **coded)
    with pytest.raises(ValueError, match="rows in fp8 for 'grouped'"), torch.no_grad():
        Experts((0,), 128, 128, implementation="grouped")(given)


@pytest.mark.usefixtures("kernels_available")
def test_fp8_weights_follow_the_parameters() -> None:
    made = Experts((0, 1), 128, 128, implementation="kernels-fp8", dtype=torch.bfloat16)
    first = made.quantised()
    assert made.quantised() is first
    with torch.no_grad():
        made.down_proj.mul_(2)
    second = made.quantised()
    assert torch.equal(second.down_scales, 2 * first.down_scales)
    assert torch.equal(second.gate_up_eGD.view(torch.uint8), first.gate_up_eGD.view(torch.uint8))


@pytest.mark.usefixtures("kernels_available")
def test_fp8_weights_are_traced_as_they_were_last_made() -> None:
    made = Experts((0, 1), 128, 128, implementation="kernels-fp8", dtype=torch.bfloat16)
    with real_empty(), torch.no_grad():
        traced = torch.compile(lambda: 2 * made.quantised().down_scales, fullgraph=True, backend="eager")
        for _ in range(2):
            made.down_proj.mul_(2)
            wanted = 2 * made.quantised().down_scales
            assert torch.equal(traced(), wanted)


@pytest.mark.usefixtures("kernels_available")
def test_the_width_that_counts_is_the_shards() -> None:
    made = Experts((0,), 16, 24, shard=experts.Shard(rank=0, size=2))
    assert "pads D and F" in made.implementation_reason


@pytest.mark.usefixtures("kernels_available")
def test_rows_elsewhere_go_through_grouped(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU tensor in experts that would use the kernels: the loop's numbers, times the weights of the rows
    as from the kernels."""
    counts, weights_R = torch.tensor([3, 1]), torch.tensor([0.5, 1.0, 2.0, -1.0])
    handle = Handle(weights_R=weights_R, state=(), num_tokens=4)
    rows = Dispatched(rows_RD=torch.randn(4, 16), counts_e=counts, handle=handle)
    made = Experts((0, 1), 16, 24)
    assert made.implementation == "kernels"
    monkeypatch.setattr(experts, "ffn", lambda *_, **__: pytest.fail("the kernels got rows on the CPU"))
    loop = Experts((0, 1), 16, 24, implementation="loop")
    assert made.applies_weights
    assert not loop.applies_weights
    assert torch.allclose(made(rows), loop(rows) * weights_R[:, None], atol=1e-6)


@pytest.mark.usefixtures("kernels_available")
@pytest.mark.parametrize("implementation", ["kernels", "grouped"])
def test_sums_of_gradients_want_rows_that_the_kernels_take(implementation: str) -> None:
    handle = Handle(weights_R=torch.ones(4), state=(), num_tokens=4)
    rows = Dispatched(rows_RD=torch.randn(4, 16), counts_e=torch.tensor([4]), handle=handle)
    made = Experts((0,), 16, 24, implementation=implementation)
    made.gradient_sums = torch.zeros(1, 48, 16), torch.zeros(1, 16, 24)
    with pytest.raises(ValueError, match=f"gradient_sums want implementation='kernels' .*'{implementation}'"):
        made(rows)
    with torch.no_grad():
        assert made(rows).shape == (4, 16)


@pytest.mark.usefixtures("kernels_available")
def test_other_rows_are_in_the_reason() -> None:
    assert "other rows go through grouped" in Experts((0,), 16, 24, dtype=torch.float32).implementation_reason


@pytest.mark.usefixtures("kernels_available")
def test_weights_made_for_inference_are_quantised() -> None:
    """They count no versions: who writes them says so."""
    with torch.inference_mode():
        made = Experts((0, 1), 128, 128, implementation="kernels-fp8", dtype=torch.bfloat16)
        first = made.quantised()
        before = first.down_scales.clone()
        made.down_proj[1].mul_(2)
        assert made.quantised() is first
        made.weights_written([1])
        assert torch.equal(made.quantised().down_scales, before * torch.tensor([1.0, 2.0])[:, None, None])
