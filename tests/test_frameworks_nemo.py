"""slattn inside NVIDIA NeMo AutoModel: its models at a tiny size, and its published kernel cases, by the reference.

AutoModel calls its optional kernels on CUDA tensors in bfloat16 alone. To be compared on a CPU, and in float32, the
check for that is lifted here; what decides it on a GPU is untouched by the adapter (test_frameworks_gpu.py).
"""

from __future__ import annotations

import importlib
import sys
import types
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from framework_models import assert_agree, assert_equal, gradients, losses, randomise
from slattn.frameworks import nemo_automodel as adapter

pytest.importorskip("nemo_automodel.components.models.deepseek_v4.model", reason="nemo-automodel is not installed")

MODELS = "nemo_automodel.components.models"
TOKENS = 24
SIZES: dict[str, Any] = {
    **{"vocab_size": 64, "hidden_size": 48, "moe_intermediate_size": 32, "num_attention_heads": 4},
    **{"n_routed_experts": 4, "num_experts_per_tok": 2, "q_lora_rank": 32, "max_position_embeddings": 128},
}
V4: dict[str, Any] = {
    **SIZES,
    **{"num_hidden_layers": 3, "head_dim": 32, "qk_rope_head_dim": 8, "o_lora_rank": 16, "o_groups": 2},
    **{"sliding_window": 6, "hc_mult": 2, "index_head_dim": 16, "index_n_heads": 2, "index_topk": 2},
    "num_nextn_predict_layers": 0,
}
GLM: dict[str, Any] = {  # kv_lora_rank and rope as released: SparseMLA's value width is fixed at 512
    **SIZES,
    **{
        "num_hidden_layers": 2,
        "intermediate_size": 64,
        "num_key_value_heads": 4,
        "mlp_layer_types": ["dense", "sparse"],
    },
    **{"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 32, "v_head_dim": 32, "index_topk": 8},
    **{"index_head_dim": 80, "index_n_heads": 2, "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"}},
}


def module(name: str) -> Any:
    return importlib.import_module(f"{MODELS}.{name}")


def backend_of(model: nn.Module) -> Any:
    """The one object that says which attention runs; the model's own, so that it can be switched under it."""
    (backend,) = {id(b): b for b in (getattr(m, "backend", None) for m in model.modules()) if b is not None}.values()
    return backend


def new_backend(attn: str, rms_norm: str = "torch") -> Any:
    return module("common.utils").BackendConfig(
        attn=attn, linear="torch", rms_norm=rms_norm, experts="torch", dispatcher="torch", rope_fusion=False
    )


@pytest.fixture(autouse=True)
def _on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """V4's sparse attention may run here; its indexer and Sinkhorn kernels stay AutoModel's plain torch."""

    def only_attention(backend: str, *, kernel_name: str, **_: Any) -> bool:
        return backend == "tilelang" and kernel_name == "sparse attention"

    monkeypatch.setattr(module("deepseek_v4.optimized_kernels"), "_should_use_tilelang", only_attention)


class Float32Torch:
    """`torch` for a module that rounds to bfloat16 on its way to the kernels: here it does not."""

    bfloat16 = torch.float32

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


@pytest.fixture
def _glm_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    replace_glm_indexer(monkeypatch)
    monkeypatch.setattr(module("glm_moe_dsa.layers"), "torch", Float32Torch())


def replace_glm_indexer(monkeypatch: pytest.MonkeyPatch) -> None:
    """GLM's indexer kernels, replaced by what they compute."""

    def topk(q: Tensor, k: Tensor, weights: Tensor, _: Tensor, count: int, **__: Any) -> Tensor:
        scores = (torch.einsum("thd,sd->ths", q, k).relu() * weights[..., None]).sum(1)
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf)
        best, indices = scores.topk(count)
        return indices.masked_fill(best == -torch.inf, -1).int()[:, None]

    def metadata(bounds: Tensor, tokens: int, **__: Any) -> Any:
        lengths = torch.arange(1, tokens + 1, dtype=torch.int32, device=bounds.device)
        return types.SimpleNamespace(causal_lengths=lengths, all_rows_nonempty=True, valid_row_indices=None)

    layers = module("glm_moe_dsa.layers")
    monkeypatch.setattr(layers, "should_use_tilelang", lambda *_, **__: True)
    monkeypatch.setattr(layers, "is_cudnn_dsa_available", lambda: True)
    monkeypatch.setattr(layers, "tilelang_indexer_topk", topk)
    monkeypatch.setattr(layers, "cudnn_indexer_topk", topk)
    monkeypatch.setattr(module("glm_moe_dsa.model"), "prepare_cudnn_dsa_packed_metadata", metadata)


def cross_entropy(logits: Tensor, ids: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def v4() -> tuple[nn.Module, Any]:
    config = module("deepseek_v4.config").DeepseekV4Config(
        **V4, compress_ratios=[0, 4, 8], num_hash_layers=0, torch_dtype="float32"
    )
    model = module("deepseek_v4.model").DeepseekV4ForCausalLM(config, backend=new_backend("sdpa")).float()
    return model, step_of(mask=None)


def v41() -> tuple[nn.Module, Any]:
    """With padding at the end of one text, where AutoModel empties whole rows."""
    text = {"compress_ratios": [0, 2, 4], "kv_source_layer_ids": [1, 2], "index_source_layer_ids": [1, 2]}
    config = module("deepseek_v41.config").DeepseekV41Config(
        text_config={**V4, **text, "candidate_source_layer_id": 2, "engram_layer_ids": [], "dtype": "float32"},
        dtype="float32",
    )
    model = module("deepseek_v41.model").DeepseekV41ForCausalLM(config, backend=new_backend("eager", "torch_fp32"))
    mask = torch.ones(2, TOKENS, dtype=torch.long)
    mask[1, 20:] = 0
    return model.float(), step_of(mask)


def step_of(mask: Tensor | None) -> Any:
    ids = torch.randint(0, 64, (2, TOKENS))

    def step(model: nn.Module) -> tuple[Tensor, Tensor]:
        result = model(ids, attention_mask=mask)
        logits = getattr(result, "logits", result)
        return logits, cross_entropy(logits, ids)

    return step


def glm() -> tuple[nn.Module, Any]:
    config = module("glm_moe_dsa.config").GlmMoeDsaConfig(**GLM, torch_dtype="float32")
    model = module("glm_moe_dsa.model").GlmMoeDsaForCausalLM(config, backend=new_backend("sdpa")).float()
    return model, glm_step_on(torch.randint(0, 64, (1, TOKENS)))


def glm_step_on(ids: Tensor) -> Any:
    def step(model: nn.Module) -> tuple[Tensor, Tensor]:
        """Batched in the dense path, packed for the kernels: each takes the one form alone."""
        positions = torch.arange(ids.shape[1], device=ids.device)
        if backend_of(model).attn == "sdpa":
            result = model(ids, position_ids=positions[None])
        else:
            bounds = torch.tensor([0, ids.shape[1]], dtype=torch.int32, device=ids.device)
            result = model(ids[0], position_ids=positions, qkv_format="thd", cu_seqlens=bounds)
        logits = getattr(result, "logits", result).reshape(*ids.shape, -1).float()
        return logits, cross_entropy(logits, ids)

    return step


CASES = [(v4, "tilelang"), (v41, "tilelang"), (glm, "tilelang"), (glm, "cudnn")]


@pytest.mark.usefixtures("_glm_on_a_cpu")
@pytest.mark.parametrize(("build", "attn"), CASES, ids=lambda x: x if isinstance(x, str) else x.__name__)
def test_a_whole_model_agrees_and_comes_back(build: Any, attn: str) -> None:
    model, step = build()
    randomise(model)
    backend = backend_of(model)
    dense = backend.attn
    own, own_losses = gradients(model, step), losses(model, step)
    backend.attn = attn
    with adapter.patch():
        assert_agree(gradients(model, step), own, 1e-4)
        assert losses(model, step) == pytest.approx(own_losses, rel=1e-4)
    backend.attn = dense
    assert_equal(gradients(model, step), own)


def test_glm53_document_by_document() -> None:
    """GLM-5.3's sparse layer: two packed documents, K = index_topk + kpool - 1 slots, D = 512."""
    sizes = {"index_head_dim": 16, "index_kpool": 4, "qk_rope_head_dim": 0, "num_hidden_layers": 2}
    kinds = {"layer_types": ["linear_attention", "full_attention"], "linear_head_dim": 16, "linear_num_heads": 2}
    config = module("glm5_next.config").Glm5NextTextConfig(
        **{**GLM, **sizes, **kinds, "torch_dtype": "float32", "pad_token_id": 0}
    )
    layer = module("glm5_next.layers").Glm5NextSparseAttention(config, 1, new_backend("sdpa")).float()
    randomise(layer)
    hidden = torch.randn(1, TOKENS, 48)
    documents = torch.tensor([[1] * 10 + [2] * 14])
    context = types.SimpleNamespace(cp_enabled=False, seq_start=0, doc_ids=documents)

    def step(layer: nn.Module) -> tuple[Tensor, Tensor]:
        out = layer(hidden, packed_context=context)
        return out, out.square().mean()

    own = gradients(layer, step)
    layer.backend.attn = "cudnn"
    with adapter.patch():
        assert_agree(gradients(layer, step), own, 1e-4)


def v4_call(*, tokens: int, heads: int, dim: int, keys: int, slots: int) -> dict[str, Any]:
    q = torch.randn(1, tokens, heads, dim, requires_grad=True)
    kv = torch.randn(1, keys, dim, requires_grad=True)
    sinks = torch.randn(heads, requires_grad=True)
    return {"q": q, "kv": kv, "sinks": sinks, "topk_idxs": torch.randint(0, keys, (1, tokens, slots))}


def v4_result(call: dict[str, Any], grad_out: Tensor, backend: str) -> list[Tensor]:
    run = module("deepseek_v4.optimized_kernels").dsv4_sparse_attention
    out = run(**call, sm_scale=call["q"].shape[-1] ** -0.5, backend=backend)
    return [out, *torch.autograd.grad(out, [call[name] for name in ("q", "kv", "sinks")], grad_out)]


# Heads below 16 are padded by AutoModel, those above in groups of 16 (D >= 256) or 64 go to the head-chunked entry.
@pytest.mark.parametrize(
    ("tokens", "heads", "dim", "keys", "slots"), [(16, 8, 128, 20, 16), (24, 40, 256, 60, 24), (8, 128, 128, 40, 33)]
)
def test_v4_cases_of_automodel(tokens: int, heads: int, dim: int, keys: int, slots: int) -> None:
    call = v4_call(tokens=tokens, heads=heads, dim=dim, keys=keys, slots=slots)
    indices = call["topk_idxs"]
    indices[..., -4:] = -1
    indices[:, 3, 1] = 99 if keys < 99 else keys  # outside, and above
    grad_out = torch.randn(1, heads, tokens, dim).transpose(1, 2)
    assert not grad_out.is_contiguous()
    want = v4_result(call, grad_out, "sparse_torch")
    with adapter.patch():
        got = v4_result(call, grad_out, "tilelang")
    for ours, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_v4_window_and_pooled_keys_with_holes_and_empty_rows() -> None:
    """(B1, S192, H128, D128) cut to 32 heads: a causal window of 128, then 48 pooled keys; padding rows at the end."""
    tokens, window, pooled = 192, 128, 48
    call = v4_call(tokens=tokens, heads=32, dim=128, keys=tokens + pooled, slots=window + pooled)
    position = torch.arange(tokens)[:, None]
    local = position - torch.arange(window).flip(0)
    entries = torch.arange(pooled).expand(tokens, -1)
    indices = torch.cat((local, torch.where(entries < (position + 1) // 4, entries + tokens, -1)), dim=1)
    indices = torch.where(indices < 0, -1, indices)
    indices[-7:] = -1
    call["topk_idxs"] = indices[None]
    grad_out = torch.randn(1, tokens, 32, 128)
    with adapter.patch():
        out, dq, dkv, dsink = v4_result(call, grad_out, "tilelang")
    assert not out[:, -7:].any()
    assert not dq[:, -7:].any()
    some = {name: call[name][:, :-7] for name in ("q", "topk_idxs")}  # AutoModel's dsink of an empty row is NaN
    want = v4_result({**call, **some}, grad_out[:, :-7], "sparse_torch")
    for ours, theirs in zip((out[:, :-7], dq[:, :-7], dkv, dsink), want, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_v4_pooled_key_zero_is_not_a_masked_slot() -> None:
    call = v4_call(tokens=1, heads=16, dim=64, keys=3, slots=2)
    with adapter.patch():
        named = [
            v4_result({**call, "topk_idxs": torch.tensor([[row]])}, torch.ones(1, 1, 16, 64), "tilelang")[0]
            for row in ([0, -1], [-1, -1], [0, 0])
        ]
    assert named[0].any()
    assert not named[1].any()
    assert not torch.equal(named[0], named[2])  # twice is twice


def test_v4_packed_is_unpacked() -> None:
    """Two texts in one row, each seeing its own keys, are the two in a batch."""
    call = v4_call(tokens=12, heads=16, dim=64, keys=20, slots=9)
    halves = {"q": call["q"].reshape(2, 6, 16, 64), "kv": call["kv"].reshape(2, 10, 64), "sinks": call["sinks"]}
    local = torch.randint(-1, 10, (2, 6, 9))
    packed = torch.where(local >= 0, local + torch.tensor([0, 10])[:, None, None], -1).reshape(1, 12, 9)
    with adapter.patch():
        one = v4_result({**call, "topk_idxs": packed}, torch.ones(1, 12, 16, 64), "tilelang")
        two = v4_result({**halves, "topk_idxs": local}, torch.ones(2, 6, 16, 64), "tilelang")
    torch.testing.assert_close(one[0].reshape(2, 6, 16, 64), two[0])
    torch.testing.assert_close(one[3], two[3])


def test_v4_names_of_the_package_are_all_its_own_again() -> None:
    kernels = module("deepseek_v4.optimized_kernels")
    own = kernels._miles_sparse_attn_tilelang
    with adapter.patch():
        assert kernels._miles_sparse_attn_tilelang is not own
        assert kernels.is_dsv4_kernel_available("sparse_attn") == kernels.HAS_TILELANG
    assert kernels._miles_sparse_attn_tilelang is own


def cosine(a: Tensor, b: Tensor) -> float:
    a, b = (x.detach().flatten().double() for x in (a, b))
    return float(nn.functional.cosine_similarity(a, b, dim=0))


@pytest.mark.parametrize(("tokens", "slots"), [(256, 64), (20, 64)], ids=["published", "shorter-than-topk"])
def test_glm_tilelang_cases_of_automodel(tokens: int, slots: int) -> None:
    """T256, H16, K64, causal; and a text shorter than the top-k. bfloat16, cosine above 0.99 as AutoModel asks."""
    kernels = module("glm_moe_dsa.optimized_kernels")
    q = torch.randn(tokens, 16, 576).bfloat16().requires_grad_()
    kv = torch.randn(tokens, 1, 576).bfloat16().requires_grad_()
    w_vc = torch.randn(16, 32, 512).mul(0.05).bfloat16().requires_grad_()
    scores = torch.rand(tokens, tokens).masked_fill(torch.ones(tokens, tokens, dtype=torch.bool).triu(1), -1.0)
    best, indices = scores.topk(min(slots, tokens))
    indices = indices.masked_fill(best < 0, -1).int()
    indices = nn.functional.pad(indices, (0, slots - indices.shape[1]), value=-1)[:, None]
    with adapter.patch():
        out = kernels.tilelang_sparse_attention(q, kv, indices, w_vc, 0.06)
    seen = torch.zeros(tokens, tokens + 1, dtype=torch.bool).scatter(1, indices[:, 0].long() % (tokens + 1), True)
    p = (torch.einsum("thd,sd->hts", q.double(), kv[:, 0].double()) * 0.06).masked_fill(~seen[:, :-1], -torch.inf)
    want = torch.einsum("hts,sc,hdc->thd", p.softmax(-1), kv[:, 0, :512].double(), w_vc.double())
    assert cosine(out, want) > 0.9999
    grad_out = torch.randn_like(out)
    for ours, theirs in zip(
        torch.autograd.grad(out, (q, kv, w_vc), grad_out),
        torch.autograd.grad(want, (q, kv, w_vc), grad_out.double()),
        strict=True,
    ):
        assert cosine(ours, theirs) > 0.999


def cudnn_call(queries: int = 64, heads: int = 64, slots: int = 32, keys: int = 80) -> dict[str, Any]:
    """Local queries against global keys, as a rank of a context-parallel group has them."""
    return {
        "q": torch.randn(queries, heads, 576).bfloat16().requires_grad_(),
        "kv_latent": torch.randn(keys, 1, 576).bfloat16().requires_grad_(),
        "topk_indices": torch.randint(0, keys, (queries, 1, slots), dtype=torch.int32),
        "softmax_scale": 0.06,
    }


def cudnn_result(call: dict[str, Any], **more: Any) -> list[Tensor]:
    out = module("glm_moe_dsa.optimized_kernels").cudnn_sparse_attention(**call, **more)
    grad_out = torch.linspace(-1, 1, 512).expand_as(out).to(out.dtype)
    return [out, *torch.autograd.grad(out, (call["q"], call["kv_latent"]), grad_out)]


def test_cudnn_rows_of_length_zero_are_rows_left_out() -> None:
    call = cudnn_call()
    lengths = torch.randint(1, 33, (64,), dtype=torch.int32)
    lengths[::5] = 0
    some = lengths.nonzero().flatten()
    fewer = {**call, "q": call["q"].detach()[some].requires_grad_(), "topk_indices": call["topk_indices"][some]}
    with adapter.patch():
        out, dq, dkv = cudnn_result(call, topk_length=lengths, valid_row_indices=some)
        out_of_some, dq_of_some, dkv_of_some = cudnn_result(fewer, topk_length=lengths[some], all_rows_nonempty=True)
    assert torch.equal(out[some], out_of_some)
    assert torch.equal(dq[some], dq_of_some)
    assert torch.equal(dkv, dkv_of_some)
    assert not out[::5].any()
    assert not dq[::5].any()


def test_cudnn_a_rank_of_empty_rows_has_zeros() -> None:
    call = cudnn_call()
    with adapter.patch():
        results = cudnn_result(call, topk_length=torch.zeros(64, dtype=torch.int32))
    assert all(
        x.shape == y.shape and not x.any() for x, y in zip(results[1:], (call["q"], call["kv_latent"]), strict=True)
    )
    assert not results[0].any()


@pytest.mark.parametrize("heads", [8, 40])
def test_cudnn_sizes_that_cudnn_does_not_take(heads: int) -> None:
    """GLM-5.3's 2063 slots, and heads that do not divide 64."""
    call = cudnn_call(queries=6, heads=heads, slots=2063)
    with adapter.patch():
        out = module("glm5_next.layers").cudnn_sparse_attention(**call)
        (dq,) = torch.autograd.grad(out, (call["q"],), torch.ones_like(out))
    assert out.shape == (6, heads, 512)
    assert dq.isfinite().all()


def test_captured_names_are_replaced_and_given_back() -> None:
    """Where AutoModel's modules imported the function, also in one that is imported while the patch is on."""
    common, glm53 = module("common.cudnn_sparse_attention"), module("glm5_next.layers")
    own, later = common.cudnn_sparse_attention, types.ModuleType("nemo_automodel._later")
    with adapter.patch() as patch, pytest.MonkeyPatch.context() as context:
        assert glm53.cudnn_sparse_attention is common.cudnn_sparse_attention is not own
        assert glm53.is_cudnn_sparse_attention_available()
        context.setitem(sys.modules, "nemo_automodel._later", later)
        later.__dict__["captured"] = common.cudnn_sparse_attention
        assert f"{MODELS}.glm5_next.layers:cudnn_sparse_attention" in patch.replaced
        patch.undo()
        assert later.__dict__["captured"] is own
    assert glm53.cudnn_sparse_attention is common.cudnn_sparse_attention is own
