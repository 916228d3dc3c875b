"""miles, slime and xtuner, which PyPI does not have: stand-ins that call as they call, by the reference.

Each stand-in reproduces what is known of the real one: how it imports, what shapes and conventions it hands over, and
what it does with the result (docs/frameworks.md says when the real code was read).
"""

from __future__ import annotations

import functools
import math
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import slattn
from slattn.frameworks import miles, slime, xtuner
from test_frameworks import install

LN2 = math.log(2.0)


def glm_inputs(tokens: int = 9, keys: int = 20, heads: int = 4, slots: int = 7) -> dict[str, Tensor]:
    return {
        "q": torch.randn(tokens, heads, 576, requires_grad=True),
        "kv": torch.randn(keys, 1, 576, requires_grad=True),
        "indices": torch.randint(-1, keys, (tokens, 1, slots), dtype=torch.int32),
    }


def truth(call: dict[str, Tensor], scale: float) -> tuple[Tensor, Tensor]:
    out, lse = slattn.sparse_attention(**call, scale=scale, d_v=512, return_lse=True)
    return out, lse.detach()


def assert_gradients_agree(out: Tensor, want: Tensor, call: dict[str, Tensor], tolerance: float = 1e-5) -> None:
    grad_out = torch.randn_like(out)
    inputs = [x for x in call.values() if x.requires_grad]
    for ours, theirs in zip(
        torch.autograd.grad(out, inputs, grad_out),
        torch.autograd.grad(want, inputs, grad_out, retain_graph=True),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


class Theirs(torch.autograd.Function):
    """A kernel of theirs that must not run."""

    @staticmethod
    def forward(*_: Any) -> Any:
        raise AssertionError("the framework's own kernel was called")


# --- miles ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def miles_v4(monkeypatch: pytest.MonkeyPatch) -> Any:
    """DeepSeek-V4's attention as miles ends it: the last columns of the result are rotated in place."""

    def attend(module: Any, q: Tensor, kv: Tensor, sink: Tensor, indices: Tensor) -> Tensor:
        o = module.sparse_attn_tilelang(q, kv, sink, indices, q.shape[-1] ** -0.5)
        o[..., -4:].mul_(-2.0)
        return o

    install(monkeypatch, "miles_plugins.models.glm5.glm5", SparseMLA=Theirs)
    tops = "miles_plugins", "miles_plugins.models"
    kept = {name: sys.modules[name] for name in (*tops, "miles_plugins.models.glm5.glm5")}
    module = install(monkeypatch, "miles_plugins.models.deepseek_v4.deepseek_v4", sparse_attn_tilelang=Theirs.apply)
    for name, package in kept.items():
        monkeypatch.setitem(sys.modules, name, package)
    module.attend = functools.partial(attend, module)
    return module


# (b, s, h, d, kv, K) of tests/manual/models/deepseek_v4/test_v4_tilelang_sparse_mla.py, its lengths by 8 or 16.
V4_SHAPES = [(1, 16, 8, 512, 20, 8), (1, 32, 16, 512, 40, 16), (2, 16, 8, 512, 20, 8), (1, 16, 64, 512, 20, 32)]


@pytest.mark.parametrize("shape", V4_SHAPES)
@pytest.mark.parametrize("sink", ["zero", "positive", "negative", "random"])
def test_miles_v4(miles_v4: Any, shape: tuple[int, ...], sink: str) -> None:
    batch, tokens, heads, dim, keys, slots = shape
    q, kv = torch.randn(batch, tokens, heads, dim), torch.randn(batch, keys, dim)
    sinks = {"zero": 0.0, "positive": 3.0, "negative": -3.0}.get(sink, 1.0) * torch.ones(heads)
    sinks = sinks * torch.randn(heads) if sink == "random" else sinks
    call = {name: x.requires_grad_() for name, x in (("q", q), ("kv", kv), ("sink", sinks))}
    indices = torch.randint(0, keys, (batch, tokens, slots), dtype=torch.int32)
    indices[..., -slots // 4 :] = -1
    with miles.patch() as patch:
        out = miles_v4.attend(q, kv, sinks, indices)
        assert len(patch.replaced) == 2
    want = slattn.sparse_attention(q, kv, indices, attn_sink=sinks)
    want = torch.cat((want[..., :-4], want[..., -4:] * -2.0), dim=-1)
    torch.testing.assert_close(out, want)
    assert_gradients_agree(out, want, call)


def test_miles_v4_keys_in_float32_have_a_float32_gradient(miles_v4: Any) -> None:
    """What makes the tensor-parallel sum of dkv in float32 mean something: keys handed over as float32."""
    q = torch.randn(1, 8, 4, 64).bfloat16().requires_grad_()
    kv = torch.randn(1, 12, 64).requires_grad_()
    indices = torch.randint(0, 12, (1, 8, 5), dtype=torch.int32)
    with miles.patch("deepseek_v4"):
        out = miles_v4.sparse_attn_tilelang(q, kv, torch.zeros(4), indices, 0.1)
    (dkv,) = torch.autograd.grad(out, kv, torch.randn(1, 4, 8, 64).bfloat16().transpose(1, 2))
    assert dkv.dtype == torch.float32
    assert not torch.equal(dkv, dkv.bfloat16().float())


def test_miles_glm5(miles_v4: Any) -> None:
    module = sys.modules["miles_plugins.models.glm5.glm5"]
    call = glm_inputs()
    with miles.patch("glm5"):
        out, lse = module.SparseMLA.apply(*call.values(), 0.07)
        assert miles_v4.sparse_attn_tilelang == Theirs.apply
    want, natural = truth(call, 0.07)
    torch.testing.assert_close(out, want)
    torch.testing.assert_close(lse * LN2, natural)
    assert_gradients_agree(out, want, call)


def test_miles_other_models_are_refused() -> None:
    with pytest.raises(ValueError, match="models must be among"):
        miles.patch("glm6")


# --- slime ------------------------------------------------------------------------------------------------------------


class SGLangSparseMLA(torch.autograd.Function):
    """slime's: SGLang's FlashMLA forward, and a backward that takes the LSE for base 2; heads padded to 64."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, kv: Tensor, indices: Tensor, scaling: float, d_v: int = 512) -> Any:
        from sgl_kernel.flash_mla import flash_mla_sparse_fwd

        padded = nn.functional.pad(q, (0, 0, 0, 64 - q.shape[1]))
        out, _, lse = flash_mla_sparse_fwd(q=padded, kv=kv, indices=indices, sm_scale=scaling, d_v=d_v)
        out, lse = out[:, : q.shape[1]].contiguous(), lse[:, : q.shape[1]].contiguous()
        ctx.scaling, ctx.d_v = scaling, d_v
        ctx.save_for_backward(q, kv, indices, out, lse)
        return out, lse.to(torch.bfloat16)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor, grad_lse: Tensor) -> Any:
        q, kv, indices, out, lse = ctx.saved_tensors
        dq, dkv, _ = slattn.sparse_attention_backward(
            q, kv, indices, out, lse * LN2, grad_output, scale=ctx.scaling, d_v=ctx.d_v
        )
        return dq, dkv, None, None, None


@pytest.fixture(params=["natural", "base-2"])
def slime_glm5(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    def flash_mla_sparse_fwd(q: Tensor, kv: Tensor, indices: Tensor, sm_scale: float, d_v: int = 512) -> Any:
        """FlashMLA's, of January 2026 or before."""
        with torch.no_grad():
            out, lse = slattn.sparse_attention(q, kv, indices, scale=sm_scale, d_v=d_v, return_lse=True)
        if request.param == "base-2":
            lse = torch.where(lse == math.inf, -math.inf, lse / LN2)
        return out, None, lse

    install(monkeypatch, "sgl_kernel.flash_mla", flash_mla_sparse_fwd=flash_mla_sparse_fwd)
    slime.nats_of_lse.cache_clear()
    yield install(monkeypatch, "slime_plugins.models.glm5.glm5", SparseMLA=Theirs, SGLangSparseMLA=SGLangSparseMLA)
    slime.nats_of_lse.cache_clear()


def slime_inputs() -> dict[str, Tensor]:
    call = glm_inputs(tokens=6)
    call["indices"][2] = -1
    return call


def test_slime_sglang_path_is_mended(slime_glm5: Any, request: pytest.FixtureRequest) -> None:
    call = slime_inputs()
    own, _ = slime_glm5.SGLangSparseMLA.apply(*call.values(), 0.07, 512)
    with slime.patch() as patch:
        out, lse = slime_glm5.SGLangSparseMLA.apply(*call.values(), 0.07, 512)
        assert len(patch.replaced) == 2
    want, _ = truth(call, 0.07)
    assert torch.equal(out, own)  # the rollout's forward is left as it is
    assert lse.dtype == torch.bfloat16
    assert_gradients_agree(out, want, call)
    if "natural" in request.node.name:
        with pytest.raises(AssertionError):
            assert_gradients_agree(own, want, call, tolerance=0.5)


def test_slime_sparse_mla(slime_glm5: Any) -> None:
    call = slime_inputs()
    with slime.patch():
        out, lse = slime_glm5.SparseMLA.apply(*call.values(), 0.07)
    want, _ = truth(call, 0.07)
    torch.testing.assert_close(out, want)
    assert not out[2].any()
    assert (lse[2] == -math.inf).all()
    assert_gradients_agree(out, want, call)


def test_slime_a_flash_mla_of_no_known_base(slime_glm5: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    module = sys.modules["sgl_kernel.flash_mla"]
    monkeypatch.setattr(module, "flash_mla_sparse_fwd", lambda **_: (None, None, torch.ones(1, 128)))
    with pytest.raises(RuntimeError, match="neither ln nor log2"):
        slime.nats_of_lse(torch.device("cpu"))


# --- xtuner -----------------------------------------------------------------------------------------------------------


class XTunerAttention(nn.Module):
    """xtuner's DSA attention, as far as it concerns this: the function is asked for once, when the layer is built."""

    def __init__(self, get_sparse_mla: Any, backend: str, heads: int = 16) -> None:
        super().__init__()
        self.sparse_mla_func = get_sparse_mla(backend)
        self.w_vc = nn.Parameter(torch.randn(heads, 24, 512) * 0.05)

    def forward(self, q: Tensor, kv: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
        outputs = self.sparse_mla_func(q, kv, indices, 0.06, value_dim=512)
        return torch.einsum("shm,hdm->shd", outputs.raw_output, self.w_vc), outputs.softmax_lse


@pytest.fixture
def dsa_mla(monkeypatch: pytest.MonkeyPatch) -> Any:
    def get_sparse_mla(backend: str) -> Any:
        raise AssertionError("xtuner's own function was asked for")

    return install(monkeypatch, "xtuner.v1.module.attention.dsa_mla", get_sparse_mla=get_sparse_mla)


@pytest.mark.parametrize("backend", ["torch", "tilelang", "cudnn_dsa"])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("heads", [16, 64])
def test_xtuner(dsa_mla: Any, backend: str, dtype: torch.dtype, heads: int) -> None:
    """tests/module/attention/test_dsa_mla.py: S 64, K 64, sliding and causal with a tail of -1; and holes."""
    call = glm_inputs(tokens=64, keys=64, heads=heads, slots=64)
    position = torch.arange(64)[:, None]
    indices = position - torch.arange(64)
    indices = torch.where((indices >= 0) & (indices % 7 != 3), indices, -1)
    call["indices"] = indices.to(dtype)[:, None]
    with xtuner.patch():
        layer = XTunerAttention(dsa_mla.get_sparse_mla, backend, heads)
    out, lse = layer(*call.values())
    want, natural = truth(call, 0.06)
    want = torch.einsum("shm,hdm->shd", want, layer.w_vc)
    torch.testing.assert_close(out, want)
    torch.testing.assert_close(lse, natural)
    assert_gradients_agree(out, want, call, tolerance=1e-4)


def test_xtuner_any_width_and_the_gradient_of_lse(dsa_mla: Any) -> None:
    call = glm_inputs(slots=13)
    with xtuner.patch():
        layer = XTunerAttention(dsa_mla.get_sparse_mla, "torch", 4)
    _, lse = layer(*call.values())
    _, natural = slattn.sparse_attention(**call, scale=0.06, d_v=512, return_lse=True)
    rows = natural.isfinite().all(-1)
    assert_gradients_agree(lse[rows], natural[rows], call)


def test_xtuner_in_a_checkpoint_and_compiled(dsa_mla: Any) -> None:
    call = glm_inputs()
    with xtuner.patch():
        layer = XTunerAttention(dsa_mla.get_sparse_mla, "torch", 4)
    want, _ = layer(*call.values())
    again, _ = torch.utils.checkpoint.checkpoint(layer, *call.values(), use_reentrant=False)
    assert_gradients_agree(again, want, call)
    compiled, _ = torch.compile(layer, backend="aot_eager", fullgraph=True)(*call.values())
    torch.testing.assert_close(compiled, want)
    assert_gradients_agree(compiled, want, call)
