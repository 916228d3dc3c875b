"""The hooks that Megatron's DSA kernel backends have, by the reference: Megatron's published cases, without Megatron.

Its tests: test_dsa_tilelang_kernels.py, test_dsa_native_parity.py, test_attention_variant_dsa.py.
"""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from slattn.frameworks import megatron as adapter
from slattn.frameworks import megatron_hooks as hooks

VARIANT = "megatron.core.transformer.experimental_attention_variant"
SCALE = 0.06


def inputs(sq: int, skv: int, batch: int, heads: int, slots: int, dim: int = 576) -> dict[str, Any]:
    return {
        "query": torch.randn(sq, batch, heads, dim, requires_grad=True),
        "key": torch.randn(skv, batch, 1, dim, requires_grad=True),
        "topk_indices": causal(sq, skv, batch, slots),
    }


def causal(sq: int, skv: int, batch: int, slots: int) -> Tensor:
    """Int32 `[b, sq, K]`: distinct keys up to each query's own, -1 where there are no more."""
    hidden = torch.ones(sq, skv, dtype=torch.bool).triu(skv - sq + 1)
    best, indices = torch.rand(batch, sq, skv).masked_fill(hidden, -1.0).topk(min(slots, skv))
    indices = indices.masked_fill(best < 0, -1).int()
    return nn.functional.pad(indices, (0, slots - indices.shape[-1]), value=-1)


def run(call: dict[str, Any], topk_length: Tensor | None = None, v_channels: int = 512) -> Tensor:
    out = hooks.run_fused_absorbed_sparse_attention(
        call["query"], call["key"], call["topk_indices"], SCALE, v_channels, topk_length
    )
    assert out is not None
    return out


def dense(call: dict[str, Any], v_channels: int = 512) -> Tensor:
    """Softmax over the keys that a row names, in float64; a row that names none gives zeros."""
    query, key, indices = call["query"].double(), call["key"].double(), call["topk_indices"].long()
    named = torch.zeros(*indices.shape[:2], key.shape[0] + 1, dtype=torch.bool, device=indices.device)
    named = named.scatter(-1, torch.where(indices >= 0, indices, key.shape[0]), True)[..., :-1].unsqueeze(1)
    s = torch.einsum("sbhd,tbxd->bhst", query, key) * SCALE
    p = s.masked_fill(~named, -torch.inf).softmax(-1).nan_to_num(0.0)
    return torch.einsum("bhst,tbxd->sbhd", p, key[..., :v_channels])


def gradients(out: Tensor, call: dict[str, Any], grad_out: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(out, (call["query"], call["key"]), grad_out.to(out.dtype), retain_graph=True)


@pytest.mark.parametrize("heads", [8, 48, 64, 96])
def test_heads_of_the_published_cases(heads: int) -> None:
    """S 256, K 256 there; K = 64 here, so that the choice matters in every row."""
    call = inputs(256, 256, 1, heads, 64)
    out, want = run(call), dense(call)
    torch.testing.assert_close(out, want.float(), rtol=1e-4, atol=1e-4)
    grad_out = torch.randn_like(out)
    for ours, theirs in zip(gradients(out, call, grad_out), gradients(want, call, grad_out), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)


def test_parity_of_whole_sequences() -> None:
    """test_dsa_native_parity's measure, 1 - cos and 1 - 2ab / (a^2 + b^2), at H 128, shortened to S 128."""
    call = inputs(128, 128, 1, 128, 128)
    out, want = run(call), dense(call)
    grad_out = torch.randn_like(out)
    pairs = [(out, want), *zip(gradients(out, call, grad_out), gradients(want, call, grad_out), strict=True)]
    for a, b in pairs:
        a, b = a.flatten().double(), b.flatten().double()
        assert 1 - torch.dot(a, b) / (a.norm() * b.norm()) < 1e-9
        assert 1 - 2 * torch.dot(a, b) / (a.square().sum() + b.square().sum()) < 1e-9


def test_an_empty_first_row_is_exactly_zero() -> None:
    call = inputs(16, 32, 1, 8, 64)
    call["topk_indices"][:, 0] = -1
    out = run(call)
    dq, dkv = gradients(out, call, torch.randn_like(out))
    assert not out[0].any()
    assert not dq[0].any()
    assert all(x.isfinite().all() for x in (out, dq, dkv))


def test_rows_that_are_all_empty_are_finite_and_zero() -> None:
    call = inputs(16, 32, 2, 8, 64)
    call["topk_indices"].fill_(-1)
    out = run(call)
    assert not out.any()
    assert not any(x.any() for x in gradients(out, call, torch.randn_like(out)))


def test_a_batch_is_its_entries() -> None:
    call = inputs(12, 20, 3, 4, 9)
    out = run(call)
    for b in range(3):
        one = {name: call[name][:, b : b + 1] for name in ("query", "key")}
        alone = run({**one, "topk_indices": call["topk_indices"][b : b + 1]})
        torch.testing.assert_close(out[:, b : b + 1], alone)


def test_lengths_cut_rows_short() -> None:
    call = inputs(12, 20, 2, 4, 9)
    lengths = torch.randint(0, 12, (2, 12))
    cut = call["topk_indices"].masked_fill(torch.arange(9) >= lengths.unsqueeze(-1), -1)
    torch.testing.assert_close(run(call, lengths), run({**call, "topk_indices": cut}))


def test_padded_heads_leak_no_gradient() -> None:
    """A gradient in some heads alone reaches no other head's query."""
    call = inputs(12, 20, 1, 8, 9)
    out = run(call)
    grad_out = torch.randn_like(out)
    grad_out[:, :, 4:] = 0
    dq, _ = gradients(out, call, grad_out)
    assert not dq[:, :, 4:].any()
    assert dq[:, :, :4].any()


def test_odd_strides_of_a_batch_of_one() -> None:
    call = inputs(12, 20, 1, 4, 9)
    want = run(call)
    assert want.is_contiguous()
    query = torch.empty_strided((12, 1, 4, 576), (4 * 576, 7, 576, 1)).copy_(call["query"].detach())
    key = torch.empty_strided((20, 1, 1, 576), (576, 3, 5, 1)).copy_(call["key"].detach())
    assert torch.equal(run({**call, "query": query, "key": key}), want)


def test_a_backward_that_comes_late() -> None:
    """After other calls have run: nothing that the first one saved was theirs to use again."""
    call = inputs(16, 32, 2, 8, 16)
    grad_out = torch.randn(16, 2, 8, 512)
    first = run(call)
    want = gradients(first, call, grad_out)
    again, others = run(call), [run(inputs(16, 32, 2, 8, 16)) for _ in range(3)]
    for other in others:
        other.sum().backward()
    assert all(torch.equal(a, b) for a, b in zip(gradients(again, call, grad_out), want, strict=True))


@pytest.mark.parametrize(
    "change",
    [
        {"key": torch.randn(20, 1, 2, 576)},  # keys that are not shared by the heads
        {"query": torch.randn(12, 1, 4, 500)},
        {"query": torch.randn(12, 4, 576)},
        {"topk_indices": torch.zeros(1, 12, 9)},
        {"query": torch.randn(12, 1, 257, 576)},
    ],
    ids=["expanded", "other-width", "packed", "float-indices", "heads"],
)
def test_what_does_not_fit_is_declined(change: dict[str, Tensor]) -> None:
    call = {**inputs(12, 20, 1, 4, 9), **change}
    result = hooks.run_fused_absorbed_sparse_attention(call["query"], call["key"], call["topk_indices"], SCALE, 512)
    assert result is None


class Indexer:
    """The indexer's tensors, and its loss as Megatron's plain torch has it."""

    def __init__(self, sq: int = 12, skv: int = 12, batch: int = 2, topk: int = 5) -> None:
        self.q = torch.randn(sq, batch, 3, 16, requires_grad=True)
        self.k = torch.randn(skv, batch, 16, requires_grad=True)
        self.weights = torch.randn(sq, batch, 3, requires_grad=True)
        self.query, self.key = torch.randn(sq, batch, 4, 40), torch.randn(skv, batch, 1, 40)
        self.starts, self.ends = torch.zeros(sq, dtype=torch.int32), torch.arange(1, sq + 1, dtype=torch.int32)
        self.topk = topk

    def hook(self, **more: Any) -> Any:
        tp = types.SimpleNamespace(size=lambda: 1)
        names = ("q", "k", "weights", "starts", "ends", "query", "key")
        return hooks.run_fused_qk_topk_with_loss(
            **{name: getattr(self, name) for name in names},
            **{"index_topk": self.topk, "softmax_scale": 0.3, "loss_coeff": 0.5, "block_size": 8192},
            **{"pg_collection": types.SimpleNamespace(tp=tp), "config": None, **more},
        )

    def rows(self, use_relu: bool = True) -> tuple[Tensor, Tensor]:
        """Each row's KL `[b, sq]`, over its own top-k, and the scores `[b, sq, skv]`."""
        s = torch.einsum("sbhd,tbd->bsht", self.q, self.k)
        s = torch.einsum("bsht,sbh->bst", s.relu() if use_relu else s, self.weights)
        position = torch.arange(self.k.shape[0])
        s = s.masked_fill((position < self.starts[:, None]) | (position >= self.ends[:, None]), -torch.inf)
        best = s.topk(self.topk)
        chosen = torch.zeros_like(s, dtype=torch.bool).scatter(-1, best.indices, best.values > -torch.inf)
        main = torch.einsum("sbhd,tbxd->bhst", self.query, self.key) * 0.3
        target = main.masked_fill(~chosen.unsqueeze(1), -torch.inf).softmax(-1).nan_to_num(0.0).sum(1)
        target = target / target.sum(-1, keepdim=True).clamp_min(1e-10)
        log_p = s.masked_fill(~chosen, -torch.inf).log_softmax(-1)
        terms = torch.where(target > 0, target * (target.clamp_min(1e-10).log() - log_p), 0.0)
        return terms.sum(-1), s

    def inputs(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.q, self.k, self.weights


@pytest.mark.parametrize("use_relu", [True, False])
@pytest.mark.parametrize("per_token", [False, True])
def test_the_indexers_loss(use_relu: bool, per_token: bool) -> None:
    indexer = Indexer()
    indices, lengths, loss = indexer.hook(use_relu=use_relu, calculate_per_token_loss=per_token)
    rows, scores = indexer.rows(use_relu)
    want = 0.5 * (rows.sum() if per_token else rows.mean())
    torch.testing.assert_close(loss, want, rtol=1e-4, atol=1e-6)
    best = scores.topk(5)
    assert torch.equal(indices, best.indices.masked_fill(best.values == -torch.inf, -1).int())
    assert lengths is None
    for ours, theirs in zip(
        torch.autograd.grad(loss, indexer.inputs()), torch.autograd.grad(want, indexer.inputs()), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-5)


def test_the_indexers_loss_over_the_rows_that_count() -> None:
    indexer = Indexer()
    valid = torch.rand(2, 12) > 0.3
    _, _, loss = indexer.hook(query_valid_rows=valid)
    rows, _ = indexer.rows()
    torch.testing.assert_close(loss, 0.5 * rows[valid].sum() / valid.sum(), rtol=1e-4, atol=1e-6)


def test_the_indexers_loss_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    indexer = Indexer()
    whole = indexer.hook()
    monkeypatch.setattr("slattn.frameworks.megatron_indexer._SCORES", 2 * 3 * 12 * 5)  # five queries at a time
    parts = indexer.hook()
    assert torch.equal(parts[0], whole[0])
    torch.testing.assert_close(parts[2], whole[2])
    for a, b in zip(*(torch.autograd.grad(x[2], indexer.inputs()) for x in (parts, whole)), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("layout", [{"cp_size": 2}, {"packed_seq_params": object()}])
def test_packed_and_context_parallel_indexers_are_declined(layout: dict[str, Any]) -> None:
    assert Indexer().hook(**layout) is None


def test_the_top_k_alone_is_megatrons() -> None:
    indexer = Indexer()
    assert hooks.run_fused_qk_topk(q=indexer.q, k=indexer.k, weights=indexer.weights, index_topk=5) is None


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """A megatron-core with kernel backends, as far as the adapter looks at it."""
    for name in ("megatron", "megatron.core", "megatron.core.transformer", VARIANT):
        package = types.ModuleType(name)
        package.__path__ = []
        monkeypatch.setitem(sys.modules, name, package)
    for name, contents in (
        ("dsa", {"DSAttention": type("DSAttention", (), {})}),
        ("dsa_kernels", {"_BACKEND_MODULE_NAME_BY_BACKEND": {"tilelang": "theirs", "cudnn": "theirs too"}}),
    ):
        module = types.ModuleType(f"{VARIANT}.{name}")
        module.__dict__.update(contents, __spec__=types.SimpleNamespace(name=module.__name__))
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return sys.modules[f"{VARIANT}.dsa_kernels"]


def test_one_key_is_re_pointed(stand_in: types.ModuleType) -> None:
    names = stand_in._BACKEND_MODULE_NAME_BY_BACKEND
    with adapter.patch() as patch:
        assert names == {"tilelang": hooks.__name__, "cudnn": "theirs too"}
        assert patch.replaced == (f"{VARIANT}.dsa_kernels:_BACKEND_MODULE_NAME_BY_BACKEND['tilelang']",)
    assert names == {"tilelang": "theirs", "cudnn": "theirs too"}


def test_a_backend_of_another_name_is_refused(stand_in: types.ModuleType) -> None:
    del stand_in._BACKEND_MODULE_NAME_BY_BACKEND["tilelang"]
    with pytest.raises(
        RuntimeError, match=r"has no .*\['tilelang'\] that slattn could replace; this adapter knows 0\.16"
    ):
        adapter.patch()
