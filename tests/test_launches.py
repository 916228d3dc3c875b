"""What the host hands to the kernels, without a GPU: each argument's place, dtype and shape against the program's."""

from __future__ import annotations

import contextlib
import functools
import types

import pytest
import torch

from slattn.backends import tilelang
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

    monkeypatch.setattr(tilelang, "kernel", kernel)
    monkeypatch.setattr(tilelang, "_arch", lambda device: 90)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
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
    if deterministic and head_dim < 512:
        pytest.skip("refused")
    for lengths, index_dtype in ((False, torch.int32), (True, torch.int64)):
        problem, tensors, grad_out = call(
            heads, head_dim, lengths=lengths, index_dtype=index_dtype, deterministic=deterministic
        )
        out, lse = tilelang.forward(problem, *tensors)
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
            if deterministic and needs[1]:
                assert kinds == ["Prepare", "Compact", "HopperBackward", "Fold"]
            elif heads > 32 and head_dim >= 512 and needs[0] and needs[1]:
                assert kinds == ["Prepare", "Compact", "HopperBackward", "Finish"]
            else:
                assert kinds == ["Prepare", "Backward"]


def test_deterministic_mode_takes_queries_in_parts(launches, monkeypatch):
    monkeypatch.setattr(tilelang, "PARTIAL_BYTES", 800_000)
    problem, tensors, grad_out = call(96, 576, deterministic=True)
    out, lse = tilelang.forward(problem, *tensors)
    tilelang.backward(*(problem, *tensors, out, lse, grad_out, None), needs=(True,) * 3, dkv_dtype=torch.float32)
    parts = [sizes["tokens"] for kind, sizes in launches if kind == "HopperBackward"]
    assert sum(parts) == BATCH * QUERIES
    assert parts == [2] * 7  # 2 groups of 64 heads, 128 slots and 1161 bytes each


@pytest.mark.usefixtures("launches")
def test_the_sort_meets_nothing_but_rows(monkeypatch):
    """What the list of rows leaves as it was, which here is everything, names no key."""
    sorted_rows, by_key = [], tilelang._by_key
    monkeypatch.setattr(tilelang, "_by_key", lambda rows, *sizes: sorted_rows.append(rows) or by_key(rows, *sizes))
    problem, tensors, grad_out = call(64, 512, deterministic=True)
    out, lse = tilelang.forward(problem, *tensors)
    tilelang.backward(*(problem, *tensors, out, lse, grad_out, None), needs=(True,) * 3, dkv_dtype=torch.bfloat16)
    assert [rows.shape for rows in sorted_rows] == [(BATCH * QUERIES, 128)]
    assert (sorted_rows[0] == -1).all()


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
    kinds = ["Forward", "Compact", "HopperBackward", "Fold"] if deterministic else ["Backward"]
    assert [kind for kind, _ in launches] == kinds


@pytest.mark.parametrize("head_dim", [64, 576])
@pytest.mark.parametrize("heads", [8, 128])
def test_the_indexers_target(launches, heads, head_dim):
    problem, (q, kv, indices, sink, count), _ = call(heads, head_dim, lengths=True)
    probs = tilelang.slot_probs(problem, q, kv, indices, sink, count, torch.randn(BATCH, QUERIES, heads))
    assert (probs.dtype, probs.shape) == (torch.float32, indices.shape)
    assert [kind for kind, _ in launches] == ["SlotProbs"]
