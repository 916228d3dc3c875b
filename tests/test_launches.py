"""What the host hands to the kernels, without a GPU: each argument's place, dtype and shape against the program's."""

from __future__ import annotations

import contextlib
import functools
import types

import pytest
import torch

import slattn
from slattn.automodel.tilelang_sparse_mla_fwd import sparse_mqa_fwd_interface
from slattn.backends import exact, tilelang
from slattn.kernels.config import HopperBackwardConfig, PrepareConfig
from slattn.problem import describe

BATCH, QUERIES, KEYS, SLOTS = 2, 7, 30, 70


@functools.cache
def parameters(config):
    """(name, buffer or None) of a program's parameters."""
    from slattn.kernels.build import program

    function = program(config)
    return [(parameter.name, function.buffer_map.get(parameter)) for parameter in function.params]


@pytest.fixture
def launches(monkeypatch):
    """The kernels launched, by kind and size; each launch is compared with what its program declares."""
    pytest.importorskip("tilelang", reason="TileLang is not installed: pip install tilelang==0.1.15")
    seen = []

    def kernel(config):
        def launch(*arguments):
            declared = parameters(config)
            assert len(arguments) == len(declared), config
            sizes = {}
            for argument, (name, buffer) in zip(arguments, declared, strict=True):
                if buffer is None:
                    assert isinstance(argument, (int, float)), (config, name)
                    continue
                assert isinstance(argument, torch.Tensor), (config, name)
                assert argument.is_contiguous(), (config, name)
                assert str(argument.dtype) == f"torch.{buffer.dtype}", (config, name)
                assert argument.dim() == len(buffer.shape), (config, name)
                for size, symbol in zip(argument.shape, map(str, buffer.shape), strict=True):
                    assert size == (int(symbol) if symbol.isdigit() else sizes.setdefault(symbol, size)), (config, name)
            seen.append((type(config).__name__.removesuffix("Config"), sizes))

        return launch

    for module in (tilelang, exact):
        monkeypatch.setattr(module, "kernel", kernel)
    monkeypatch.setattr(tilelang, "_arch", lambda device: 90)
    monkeypatch.setattr(tilelang, "_on", lambda device: contextlib.nullcontext())
    properties = types.SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    return seen


def call(heads, head_dim, *, lengths=False, index_dtype=torch.int32, deterministic=False):
    """(problem, tensors, gradient of out)."""
    d_v = 512 if head_dim == 576 else head_dim
    q = torch.randn(BATCH, QUERIES, heads, head_dim).bfloat16()
    kv = torch.randn(BATCH, KEYS, head_dim).bfloat16()
    indices = torch.zeros(BATCH, QUERIES, SLOTS, dtype=index_dtype)
    sink = torch.randn(heads)
    count = torch.full((BATCH, QUERIES), 3, dtype=torch.int32) if lengths else None
    problem = describe(q, kv, indices, attn_sink=sink, topk_length=count, d_v=d_v, deterministic=deterministic)
    return problem, (q, kv, indices, sink, count), torch.randn(BATCH, QUERIES, heads, d_v).bfloat16()


@pytest.mark.parametrize("head_dim", [64, 512, 576])
@pytest.mark.parametrize("heads", [8, 64, 96])
@pytest.mark.parametrize("needs", [(True, True, True), (True, False, True), (False, True, False)])
@pytest.mark.parametrize("deterministic", [False, True])
def test_forward_and_backward(launches, heads, head_dim, needs, deterministic):
    for lengths, index_dtype in ((False, torch.int32), (True, torch.int64)):
        problem, tensors, grad_out = call(
            heads, head_dim, lengths=lengths, index_dtype=index_dtype, deterministic=deterministic
        )
        launches.clear()
        out, lse = tilelang.forward(problem, *tensors)
        many = heads > 32 and head_dim >= 512
        assert [kind for kind, _ in launches] == ["HopperForward" if heads > 16 and head_dim >= 512 else "Forward"]
        for grad_lse in (None, torch.randn_like(lse)):
            launches.clear()
            gradients = tilelang.backward(
                *(problem, *tensors, out, lse, grad_out, grad_lse), needs=needs, dkv_dtype=torch.bfloat16
            )
            assert [gradient is not None for gradient in gradients] == list(needs)
            assert gradients[1] is None or (gradients[1].dtype, gradients[1].shape) == (
                torch.bfloat16,
                tensors[1].shape,
            )
            kinds = [kind for kind, _ in launches]
            hopper = many and needs[0] and needs[1]
            wanted = ["Compact", "Prepare"] if hopper else ["Prepare"]
            if deterministic and needs[1]:
                wanted += ["Tally", "Weigh", "Units"]
            wanted += ["HopperBackward"] if hopper else ["Backward"]
            if needs[1] and (hopper or deterministic):
                wanted += ["Finish"]
            assert kinds == wanted


@pytest.mark.parametrize("head_dim", [512, 576])
@pytest.mark.parametrize("deterministic", [False, True])
def test_two_kernels_share_out_delta(launches, monkeypatch, head_dim, deterministic):
    """By how many slots of a query count, of which both are told the same."""
    problem, (q, kv, indices, sinks, count), grad_out = call(64, head_dim, deterministic=deterministic)
    tensors = q, kv, indices, sinks, count
    out, lse = tilelang.forward(problem, *tensors)
    checked, launched = tilelang.kernel, {}

    def kernel(config):
        return lambda *given: (launched.update({type(config): given}), checked(config)(*given))

    monkeypatch.setattr(tilelang, "kernel", kernel)
    tilelang.backward(
        *(problem, *tensors, out, lse, grad_out, torch.randn_like(lse)),
        needs=(True, True, True),
        dkv_dtype=torch.float32,
    )
    before, main = launched[PrepareConfig], launched[HopperBackwardConfig]
    within = tilelang.NEVER if deterministic else tilelang.DELTA_WITHIN
    assert (before[-1], main[-3]) == (within, within)
    assert before[-2].data_ptr() == main[4].data_ptr()
    assert before[-2].dtype == torch.int32
    assert before[0].data_ptr() == out.data_ptr()
    assert main[-4].data_ptr() == (grad_out if deterministic else out).data_ptr()


@pytest.mark.parametrize("heads", [8, 64])
@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("deterministic", [False, True])
def test_the_main_kernel_alone(launches, heads, given, deterministic):
    """Without lse over the keys alone, which Hopper's kernel needs."""
    problem, (q, kv, indices, _, count), grad_out = call(heads, 512, deterministic=deterministic)
    lse = torch.randn(BATCH, QUERIES, heads)
    total = torch.zeros(kv.shape) if given else None
    dq, dkv = tilelang.main_backward(problem, q, kv, indices, count, grad_out, lse, lse.clone(), dkv=total)
    assert dq is not None
    assert dkv is total if given else (dkv.dtype, dkv.shape) == (torch.float32, kv.shape)
    main = ["Compact", "HopperBackward"] if heads > 32 and deterministic else ["Backward"]
    first = "HopperForward" if heads > 32 else "Forward"
    kinds = [first, "Tally", "Weigh", "Units", *main, "Finish"] if deterministic else main
    assert [kind for kind, _ in launches] == kinds


@pytest.mark.parametrize("head_dim", [64, 576])
@pytest.mark.parametrize("heads", [8, 128])
def test_the_indexers_target(launches, heads, head_dim):
    problem, (q, kv, indices, sink, count), _ = call(heads, head_dim, lengths=True)
    probs = tilelang.slot_probs(problem, q, kv, indices, sink, count, torch.randn(BATCH, QUERIES, heads))
    assert (probs.dtype, probs.shape) == (torch.float32, indices.shape)
    assert [kind for kind, _ in launches] == ["SlotProbs"]


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ({}, "HopperForward"),
        ({"reference_rounding": True}, "HopperForward"),
        ({"block_I": 32}, "Forward"),
        ({"threads": 128}, "Forward"),
    ],
)
def test_the_v4_drop_in(launches, monkeypatch, options, kind):
    """Hopper's own forward unless the caller fixes what only the portable one has."""
    monkeypatch.setattr(tilelang, "refusal", lambda problem: None)
    _, (q, kv, indices, sink, _), _ = call(64, 512)
    sparse_mqa_fwd_interface(q, kv, sink, indices, **options)
    assert [kind for kind, _ in launches] == [kind]


@pytest.mark.parametrize(("heads", "kind"), [(16, "ForwardConfig"), (17, "HopperForwardConfig")])
def test_the_forward_can_be_asked(launches, heads, kind):
    assert tilelang.kernels(call(heads, 512)[0])["forward"].partition("(")[0] == kind


@pytest.mark.parametrize("layout", ["flat", "an axis of one", "batched", "strided"])
def test_results_have_the_callers_layout_and_are_nobodys_views(launches, monkeypatch, layout):
    """A view would be tied to its base, and a change in place would raise an error that speaks of views."""
    monkeypatch.setattr(tilelang, "refusal", lambda problem: None)
    _, (q, kv, indices, sink, count), _ = call(64, 512, lengths=True)
    q.requires_grad_()
    if layout == "strided":
        kv, indices = kv.mT.contiguous().mT, indices.mT.contiguous().mT
    elif layout != "batched":
        q, kv, indices, count = q[0], kv[0], indices[0], count[0]
        if layout == "an axis of one":
            kv, indices = kv[:, None], indices[:, None]
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            out, lse = slattn.sparse_attention(
                *(q, kv, indices), attn_sink=sink, topk_length=count, return_lse=True, backend="tilelang"
            )
        assert (out.shape, lse.shape) == (q.shape, q.shape[:-1])
        assert out.requires_grad is grad
        assert not any(result._is_view() for result in (out, lse))
        out.mul_(2)
    assert [kind for kind, _ in launches] == ["HopperForward"] * 2


def test_the_current_device_is_changed_only_where_it_is_another(monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "device", lambda device: ("changed to", device.index))
    assert tilelang._on(torch.device("cuda", 0)) == ("changed to", 0)
    with tilelang._on(torch.device("cuda", 1)):
        pass
