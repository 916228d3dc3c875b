"""Deterministic mode of the kernels: that it runs where the usual does, and that the bits depend on no order."""

from __future__ import annotations

import pytest
import torch

import slattn
from slattn import selection, testing
from slattn.backends import tilelang
from slattn.backends.exact import size_of_lse_part
from slattn.problem import describe


@pytest.fixture
def _hopper(monkeypatch):
    monkeypatch.setattr(tilelang, "_machine_refusal", lambda device: None)
    monkeypatch.setattr(tilelang, "_arch", lambda device: 90)


def on_a_gpu(head_dim, deterministic):
    q = torch.empty(2, 16, head_dim, dtype=torch.bfloat16)
    d_v = 512 if head_dim == 576 else None
    call = describe(
        q, q.new_empty(5, head_dim), torch.empty(2, 4, dtype=torch.int32), d_v=d_v, deterministic=deterministic
    )
    return call._replace(device=torch.device("cuda", 0))


@pytest.mark.usefixtures("_hopper")
@pytest.mark.parametrize("head_dim", [64, 512, 576])
def test_which_kernels_run_can_be_asked(head_dim):
    usual, same_bits = (tilelang.kernels(on_a_gpu(head_dim, deterministic)) for deterministic in (False, True))
    assert usual["forward"] == same_bits["forward"]
    assert usual["backward"].startswith("BackwardConfig(arch=90, head_tile=16")
    assert same_bits["backward"] == usual["backward"].replace("deterministic=False", "deterministic=True")
    assert tilelang.refusal(on_a_gpu(head_dim, True)) is None


@pytest.mark.usefixtures("_hopper")
def test_they_are_told_with_the_backends_name(monkeypatch):
    monkeypatch.setattr(selection, "describe", lambda *tensors, **settings: on_a_gpu(512, False))
    told = slattn.select_kernels(None, None, None, backend="tilelang")
    assert told == {"backend": "tilelang", **tilelang.kernels(on_a_gpu(512, False))}
    assert slattn.select_backend(None, None, None, backend="tilelang") == "tilelang"


def test_a_backend_without_a_choice_names_itself():
    q, kv, indices = torch.zeros(2, 16, 64), torch.zeros(5, 64), torch.zeros(2, 4, dtype=torch.int32)
    assert slattn.select_kernels(q, kv, indices) == {"backend": "reference"}


@pytest.fixture
def _kernels():
    reason = tilelang.refusal(on_a_gpu(512, True)._replace(head_dim=512))
    if reason is not None:
        pytest.skip(reason)


@pytest.mark.parametrize(
    ("size", "scale", "grad"), [(1, 0.1, 1), (1e11, -1e-20, 1e30), (1e-30, 1e20, 1e-9), (1, 0.0, 1e38)]
)
def test_what_a_gradient_of_lse_adds_is_known_whatever_its_factors(size, scale, grad):
    q = (torch.randn(5, 3, 512) * size).bfloat16()
    grad_lse = torch.full((5, 3), float(grad))
    want = abs(scale) * grad * q.double().square().mean(-1).sqrt()
    got = size_of_lse_part(q, grad_lse, scale).double().abs()
    torch.testing.assert_close(got, want, rtol=0.2, atol=0)


def gradients(q, kv, indices, grad_out, *, deterministic=True, grad_lse=None, **options):
    """(dq, dkv in fp32, dsink), from the kernels."""
    d_v = grad_out.shape[-1]
    results = slattn.sparse_attention(q, kv, indices, d_v=d_v, return_lse=True, backend="tilelang", **options)
    return slattn.sparse_attention_backward(
        *(q, kv, indices, *results, grad_out),
        grad_lse=grad_lse,
        dkv_dtype=torch.float32,
        deterministic=deterministic,
        backend="tilelang",
        **options,
    )


def drawn(heads, head_dim, *, queries=150, keys=400, slots=200):
    """A call's tensors on the GPU, a third of the slots naming no key."""
    random = torch.Generator("cuda").manual_seed(torch.initial_seed() % 2**31)

    def normal(*shape):
        return torch.randn(shape, generator=random, device="cuda", dtype=torch.bfloat16)

    indices = torch.randint(-keys // 2, keys, (queries, slots), generator=random, device="cuda", dtype=torch.int32)
    indices[3] = -1
    return (
        normal(queries, heads, head_dim),
        normal(keys, head_dim),
        indices,
        normal(queries, heads, min(head_dim, 512)),
    )


@pytest.mark.gpu
@pytest.mark.usefixtures("_kernels")
@pytest.mark.parametrize("head_dim", [64, 256, 512, 576])
@pytest.mark.parametrize("heads", [8, 16, 64, 96])
@pytest.mark.parametrize("with_grad_lse", [False, True])
def test_the_bits_do_not_depend_on_the_order_of_the_queries(heads, head_dim, with_grad_lse):
    q, kv, indices, grad_out = drawn(heads, head_dim)
    sink = torch.randn(heads, device="cuda")
    lengths = torch.randint(0, 201, (len(q),), device="cuda", dtype=torch.int32)
    grad_lse = torch.randn(len(q), heads, device="cuda") if with_grad_lse else None
    dq, dkv, _ = gradients(q, kv, indices, grad_out, grad_lse=grad_lse, attn_sink=sink, topk_length=lengths)
    for _ in range(3):
        order = torch.randperm(len(q), device="cuda")
        moved = [None if x is None else x[order] for x in (q, indices, grad_out, grad_lse, lengths)]
        again = gradients(moved[0], kv, *moved[1:3], grad_lse=moved[3], attn_sink=sink, topk_length=moved[4])
        assert torch.equal(again[0], dq[order])
        assert torch.equal(again[1], dkv)


def one_hot(q, kv, indices, grad_out):
    return q * 30, kv, indices, grad_out


def few_keys(q, kv, indices, grad_out):
    return q, kv[:3], indices % 3, grad_out


def loud_queries(q, kv, indices, grad_out):
    loudness = torch.exp(3 * torch.randn(len(q), 1, 1, device="cuda"))
    return q, kv, indices, (grad_out * loudness).bfloat16()


def faint(q, kv, indices, grad_out):
    return q, kv, indices, grad_out * 1e-25


def huge(q, kv, indices, grad_out):
    return q, kv, indices, grad_out * 1e25


def large_keys(q, kv, indices, grad_out):
    return q / 1024, kv * 1024, indices, grad_out


def one_column(q, kv, indices, grad_out):
    return q, kv, indices, torch.where(torch.arange(grad_out.shape[-1], device="cuda") == 5, grad_out * 100, 0)


@pytest.mark.gpu
@pytest.mark.usefixtures("_kernels")
@pytest.mark.parametrize("change", [one_hot, few_keys, loud_queries, faint, huge, large_keys, one_column])
@pytest.mark.parametrize(("heads", "head_dim"), [(16, 128), (16, 576), (64, 512), (128, 576)])
def test_as_exact_as_the_usual_mode(heads, head_dim, change):
    """Against float64, for parts of very different sizes: what is beyond a row's limit takes the detour."""
    q, kv, indices, grad_out = change(*drawn(heads, head_dim))
    d_v = grad_out.shape[-1]
    results = slattn.sparse_attention(q, kv, indices, d_v=d_v, return_lse=True, backend="tilelang")
    want = slattn.sparse_attention_backward(
        *(x.double() for x in (q, kv)), indices, *(x.double() for x in (*results, grad_out)), backend="reference"
    )
    runs = [gradients(q, kv, indices, grad_out) for _ in range(3)]
    usual = gradients(q, kv, indices, grad_out, deterministic=False)
    for run in runs:
        assert torch.equal(run[1], runs[0][1])
        assert torch.equal(run[0], usual[0])
    assert testing.relative_error(runs[0][1], want[1]) < 1.05 * testing.relative_error(usual[1], want[1]) + 1e-4


@pytest.mark.gpu
@pytest.mark.usefixtures("_kernels")
@pytest.mark.parametrize(("heads", "head_dim"), [(16, 512), (64, 576)])
def test_what_is_no_number_stays_none(heads, head_dim):
    q, kv, indices, grad_out = drawn(heads, head_dim)
    grad_out[7, 3, 5], grad_out[9, 2, 1] = torch.nan, torch.inf
    runs = [gradients(q, kv, indices, grad_out, deterministic=deterministic)[1] for deterministic in (True, False)]
    finite = [run.isfinite().all(-1) for run in runs]
    assert torch.equal(*finite)
    assert 0 < finite[0].sum() < len(kv)


@pytest.mark.gpu
@pytest.mark.usefixtures("_kernels")
@pytest.mark.parametrize("heads", [16, 64])
def test_a_gradient_of_lse_alone(heads):
    q, kv, indices, grad_out = drawn(heads, 512)
    grad_out.zero_()
    grad_lse = torch.randn(len(q), heads, device="cuda")
    exact, usual = (gradients(q, kv, indices, grad_out, grad_lse=grad_lse, deterministic=x)[1] for x in (True, False))
    assert testing.relative_error(exact, usual) < 1e-3


@pytest.mark.gpu
@pytest.mark.usefixtures("_kernels")
@pytest.mark.parametrize("sink", [20.0, 60.0, torch.inf])
@pytest.mark.parametrize("heads", [16, 64])
def test_a_gradient_of_lse_is_not_the_smaller_for_a_sink(heads, sink):
    """lse is over the keys alone, so that its gradient stays where a sink leaves nothing of grad_out's."""
    q, kv, indices, grad_out = drawn(heads, 512)
    sinks = torch.full((heads,), sink, device="cuda")
    grad_lse = torch.randn(len(q), heads, device="cuda")
    exact, usual = (
        gradients(q, kv, indices, grad_out, grad_lse=grad_lse, attn_sink=sinks, deterministic=x)[1]
        for x in (True, False)
    )
    assert usual.any()
    assert testing.relative_error(exact, usual) < 1e-3


@pytest.mark.gpu
@pytest.mark.usefixtures("_kernels")
@pytest.mark.parametrize(("scale", "size"), [(0.0, 1.0), (1e-20, 1.0), (None, 2**-30), (None, 2**30)])
@pytest.mark.parametrize("heads", [9, 64])
def test_a_gradient_of_lse_is_as_small_as_scale_and_q_make_it(heads, scale, size):
    """What a sink leaves of grad_out's may then be all there is, and no unit may be of the other's size."""
    q, kv, indices, grad_out = drawn(heads, 512)
    q, kv = q * size, kv / size
    sinks = torch.full((heads,), 30.0, device="cuda")
    grad_lse = torch.randn(len(q), heads, device="cuda")
    exact, usual = (
        gradients(q, kv, indices, grad_out, grad_lse=grad_lse, attn_sink=sinks, scale=scale, deterministic=x)[1]
        for x in (True, False)
    )
    assert usual.any()
    assert testing.relative_error(exact, usual) < 1e-3


@pytest.mark.gpu
@pytest.mark.usefixtures("_kernels")
@pytest.mark.parametrize("loudness", [0, 1, 2])
@pytest.mark.parametrize(("heads", "head_dim"), [(16, 128), (64, 512)])
def test_rows_of_thousands_of_unequal_parts(heads, head_dim, loudness):
    """A row's unit is of what all of its queries expect, not of what the loudest does."""
    q, kv, indices, grad_out = drawn(heads, head_dim, queries=2048, keys=96, slots=64)
    grad_out = (grad_out * torch.exp(loudness * torch.randn(len(q), 1, 1, device="cuda"))).bfloat16()
    results = slattn.sparse_attention(q, kv, indices, return_lse=True, backend="tilelang")
    want = slattn.sparse_attention_backward(
        *(x.double() for x in (q, kv)), indices, *(x.double() for x in (*results, grad_out)), backend="reference"
    )[1]
    exact, usual = (gradients(q, kv, indices, grad_out, deterministic=x)[1] for x in (True, False))
    assert testing.relative_error(exact, want) < 1.05 * testing.relative_error(usual, want)
