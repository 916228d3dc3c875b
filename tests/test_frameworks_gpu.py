"""slattn inside other people's frameworks on a GPU: bfloat16, by the kernels. What is not installed is skipped.

A model's own attention in bfloat16 is no truth: both it and slattn's are held to the same model in float32, from which
slattn's may be half as far again. Nothing in these models depends on a choice that rounding could turn: every query
sees every key that it may, and every token goes to every expert.
"""

from __future__ import annotations

import copy
import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import slattn
import test_frameworks_megatron_hooks as megatron_cases
from framework_models import gradients, losses, randomise
from slattn.frameworks import cudnn_dsa, flash_mla, megatron, megatron_hooks, nemo_automodel, transformers

pytestmark = pytest.mark.gpu
DEVICE = "cuda"
TOKENS = 96
LATENT = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 64, "v_head_dim": 64}
INDEXER = {"index_topk": 2 * TOKENS, "index_head_dim": 128}
EVERYTHING = {**INDEXER, "n_routed_experts": 2, "num_local_experts": 2, "num_experts_per_tok": 2}


def error(got: Tensor, truth: Tensor) -> float:
    return float((got.float() - truth.float()).norm() / truth.float().norm().clamp_min(1e-12))


def assert_no_worse(ours: Any, own: Any, truth: Any) -> None:
    """Output and gradients: at most one and a half times as far from the truth as the model's own, or 2e-2."""
    assert error(ours[0], truth[0]) <= 1.5 * error(own[0], truth[0]) + 2e-3
    largest = max(grad.norm() for grad in truth[1].values() if grad is not None)
    for name, grad in truth[1].items():
        assert (grad is None) == (ours[1][name] is None), name
        if grad is not None and grad.norm() > 1e-3 * largest:
            assert error(ours[1][name], grad) <= 1.5 * error(own[1][name], grad) + 2e-2, name


@pytest.mark.parametrize("kind", ["deepseek_v4", "deepseek_v32", "glm_moe_dsa"])
def test_transformers(kind: str) -> None:
    pytest.importorskip("transformers.models.deepseek_v4")
    cases = importlib.import_module("test_frameworks_transformers")
    sizes = {"head_dim": 512, "partial_rotary_factor": 0.125} if kind == "deepseek_v4" else LATENT
    model = cases.model_of(kind, **sizes, **EVERYTHING).to(DEVICE).bfloat16()
    exact = copy.deepcopy(model).float()
    step = cases.step_on(torch.randint(1, 64, (2, TOKENS), device=DEVICE))
    truth, own, own_losses = gradients(exact, step), gradients(model, step), losses(model, step)
    with transformers.patch(model):
        assert_no_worse(gradients(model, step), own, truth)
        assert losses(model, step) == pytest.approx(own_losses, rel=2e-2)
    assert model.config._attn_implementation != "slattn"


@pytest.mark.parametrize(("tokens", "heads", "keys", "slots"), [(16, 8, 20, 16), (192, 128, 240, 176)])
@pytest.mark.parametrize("rounding", [False, True])
def test_automodel_v4_published_cases(tokens: int, heads: int, keys: int, slots: int, rounding: bool) -> None:
    """(B1, S16, H8, D128, K_v 20, K 16) and (B1, S192, H128, D128, 128 + 48), at AutoModel's own tolerances."""
    pytest.importorskip("nemo_automodel.components.models.deepseek_v4.model")
    kernels = importlib.import_module("nemo_automodel.components.models.deepseek_v4.optimized_kernels")
    q = torch.randn(1, tokens, heads, 128, device=DEVICE).bfloat16().requires_grad_()
    kv = torch.randn(1, keys, 128, device=DEVICE).bfloat16().requires_grad_()
    sinks = torch.randn(heads, device=DEVICE, requires_grad=True)
    indices = torch.rand(1, tokens, keys, device=DEVICE).topk(slots).indices
    indices[..., -4:] = -1
    indices[:, 1, 0] = 999
    grad_out = torch.randn(1, heads, tokens, 128, device=DEVICE).bfloat16().transpose(1, 2)
    results = []
    for backend, patch in (("sparse_torch", False), ("tilelang", True)):
        options = {"reference_rounding": True} if patch and rounding else {}
        with nemo_automodel.patch() as handle:
            if not patch:
                handle.undo()
            out = kernels.dsv4_sparse_attention(q, kv, sinks, indices, 128**-0.5, backend=backend, **options)
            results.append((out, *torch.autograd.grad(out, (q, kv, sinks), grad_out)))
    (want, *want_gradients), (out, *out_gradients) = results
    torch.testing.assert_close(out, want, rtol=2e-2, atol=2e-2)
    for ours, theirs in zip(out_gradients, want_gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=5e-2, atol=5e-2)


def test_automodel_v4_whole_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """The attention kernels alone: AutoModel's indexer and Sinkhorn kernels, and what they need, stay off."""
    pytest.importorskip("nemo_automodel.components.models.deepseek_v4.model")
    cases = importlib.import_module("test_frameworks_nemo")
    kernels = cases.module("deepseek_v4.optimized_kernels")
    decide = kernels._should_use_tilelang

    def only_attention(backend: str, *, kernel_name: str, **more: Any) -> bool:
        return kernel_name == "sparse attention" and decide(backend, kernel_name=kernel_name, **more)

    monkeypatch.setattr(kernels, "_should_use_tilelang", only_attention)
    sizes = {"head_dim": 512, "qk_rope_head_dim": 64, **EVERYTHING}
    sizes.pop("num_local_experts")
    config = cases.module("deepseek_v4.config").DeepseekV4Config(
        **{**cases.V4, **sizes}, compress_ratios=[0, 4, 8], num_hash_layers=0, torch_dtype="float32"
    )
    theirs = cases.module("deepseek_v4.model")
    exact = theirs.DeepseekV4ForCausalLM(config, backend=cases.new_backend("sdpa")).float().to(DEVICE)
    randomise(exact)
    model = copy.deepcopy(exact)
    theirs.cast_model_to_dtype(model, torch.bfloat16)  # what AutoModel keeps in float32 stays
    exact.load_state_dict(model.state_dict())
    ids = torch.randint(0, 64, (2, TOKENS), device=DEVICE)

    def step(model: nn.Module) -> tuple[Tensor, Tensor]:
        result = model(ids)
        logits = getattr(result, "logits", result).float()
        return logits, cases.cross_entropy(logits, ids)

    truth, own = gradients(exact, step), gradients(model, step)
    cases.backend_of(model).attn = "tilelang"
    with nemo_automodel.patch():
        assert_no_worse(gradients(model, step), own, truth)


@pytest.mark.parametrize("attn", ["tilelang", "cudnn"])
def test_automodel_glm5_whole_model(monkeypatch: pytest.MonkeyPatch, attn: str) -> None:
    """Its indexer's kernels stay off, and every query takes all keys that it may see."""
    pytest.importorskip("nemo_automodel.components.models.glm_moe_dsa.model")
    cases = importlib.import_module("test_frameworks_nemo")
    cases.replace_glm_indexer(monkeypatch)
    theirs, sizes = cases.module("glm_moe_dsa.model"), {**cases.GLM, "index_topk": TOKENS, "n_routed_experts": 2}
    config = cases.module("glm_moe_dsa.config").GlmMoeDsaConfig(**sizes, torch_dtype="float32")
    exact = theirs.GlmMoeDsaForCausalLM(config, backend=cases.new_backend("sdpa")).float().to(DEVICE)
    randomise(exact)
    model = copy.deepcopy(exact).bfloat16()
    exact.load_state_dict(model.state_dict())
    step = cases.glm_step_on(torch.randint(0, 64, (1, TOKENS), device=DEVICE))
    truth, own, own_losses = gradients(exact, step), gradients(model, step), losses(model, step)
    cases.backend_of(model).attn = attn
    with nemo_automodel.patch():
        assert_no_worse(gradients(model, step), own, truth)
        assert losses(model, step) == pytest.approx(own_losses, rel=2e-2)


def test_megatron_whole_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """GPTModel with DSA and local layers; every query takes all keys that it may see."""
    pytest.importorskip("megatron.core.models.gpt.gpt_model")
    cases = importlib.import_module("test_frameworks_megatron")
    cases.without_extensions(monkeypatch)
    latents = {"kv_lora_rank": 512, "qk_pos_emb_head_dim": 64, "dsa_indexer_head_dim": 80}
    with cases.one_process(tmp_path / "store"):
        exact, model = (cases.model_of(dsa_indexer_topk=TOKENS, **latents).to(DEVICE) for _ in range(2))
        model.bfloat16()
        model.load_state_dict(exact.state_dict())
        exact.load_state_dict(model.state_dict())
        step = cases.step_on(torch.randint(0, 64, (2, TOKENS), device=DEVICE))
        truth, own, own_losses = gradients(exact, step), gradients(model, step), losses(model, step)
        cases.choose(model, "tilelang")
        with megatron.patch():
            assert_no_worse(gradients(model, step), own, truth)
            assert losses(model, step) == pytest.approx(own_losses, rel=2e-2)


@pytest.mark.parametrize("heads", [8, 48, 64, 96])
def test_megatron_published_cases(heads: int) -> None:
    """S 256, K 256, D 576, at Megatron's own 2e-2; the first row empty."""
    call = megatron_cases.inputs(256, 256, 2, heads, 256)
    call["topk_indices"][:, 0] = -1
    call = {name: x.detach().to(DEVICE) for name, x in call.items()}
    narrow = {name: call[name].bfloat16().requires_grad_() for name in ("query", "key")}
    exact = {name: call[name].bfloat16().float().requires_grad_() for name in ("query", "key")}
    out = megatron_cases.run({**call, **narrow})
    want = megatron_cases.dense({**call, **exact})
    grad_out = torch.randn_like(out)
    assert error(out, want) < 2e-2
    got = torch.autograd.grad(out, tuple(narrow.values()), grad_out)
    for ours, theirs in zip(
        got, torch.autograd.grad(want, tuple(exact.values()), grad_out.to(want.dtype)), strict=True
    ):
        assert error(ours, theirs) < 2e-2
    assert not out[0].any()
    assert not got[0][0].any()


def test_megatron_declines_what_no_kernel_takes() -> None:
    call = {name: x.detach().to(DEVICE) for name, x in megatron_cases.inputs(12, 20, 1, 4, 9).items()}
    result = megatron_hooks.run_fused_absorbed_sparse_attention(*call.values(), megatron_cases.SCALE, 512)
    assert result is None  # float32


def vendor_inputs(queries: int, keys: int, slots: int, heads: int = 64, dim: int = 576) -> dict[str, Any]:
    cases = importlib.import_module("test_frameworks_vendors")
    call = cases.inputs(queries, keys, slots, heads, dim, torch.bfloat16)
    return {name: x.to(DEVICE) if isinstance(x, Tensor) else x for name, x in call.items()}


def test_flash_mla_beside_the_real_one() -> None:
    real = importlib.import_module("slattn.backends.vendor_runtimes").flash_mla()
    if real.found is None:
        pytest.skip(real.missing)
    nats = importlib.import_module("slattn.backends.vendor_runtimes").ask(real.found, torch.device(DEVICE)).nats
    call = vendor_inputs(62, 592, 128)
    theirs = real.found(*call.values(), d_v=512)
    ours = flash_mla.flash_mla_sparse_fwd(**call)
    assert error(ours[0], theirs[0]) < 1e-2
    torch.testing.assert_close(ours[1], theirs[1] * nats, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(ours[2], theirs[2] * nats, rtol=1e-4, atol=1e-4)


def test_flash_mla_more_queries_than_a_grid_is_high() -> None:
    """s_q = 70000: past 65535, and more than one chunk of the largest logits."""
    call = vendor_inputs(70000, 256, 64, heads=1, dim=512)
    out, largest, lse = flash_mla.flash_mla_sparse_fwd(**call)
    last = {name: x[-5:] if name in ("q", "indices") else x for name, x in call.items()}
    want = flash_mla.flash_mla_sparse_fwd(**last)
    assert error(out[-5:], want[0]) < 1e-2
    torch.testing.assert_close(largest[-5:], want[1])
    torch.testing.assert_close(lse[-5:], want[2])


def test_cudnn_backward_beside_the_real_one() -> None:
    real = importlib.import_module("slattn.backends.vendor_runtimes").cudnn_dsa()
    if real.found is None:
        pytest.skip(real.missing)
    call = vendor_inputs(62, 592, 128)
    q, kv, indices = call["q"], call["kv"][:, 0].contiguous(), call["indices"][:, 0].clamp(0, 591).contiguous()
    sink = torch.randn(64, device=DEVICE)
    out, _, lse = cudnn_dsa.sparse_attention(q, kv, indices, attn_sink=sink, softmax_scale=0.05)
    arguments = (q, kv, out, torch.randn_like(out), lse, sink, indices, 0.05)
    ours = cudnn_dsa.sparse_attention_backward_wrapper(*arguments)
    theirs = real.found.sparse_attention_backward_wrapper(*arguments)
    for name in ("dq", "dkv", "d_sink"):
        assert error(ours[name], theirs[name]) < 2e-2, name
    natural = slattn.sparse_attention(q, kv, indices, attn_sink=sink, scale=0.05, return_lse=True)[1]
    assert torch.equal(lse, natural)
