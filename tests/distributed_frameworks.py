"""`slattn.distributed` under what trains models: fully_shard, checkpointing, torch.compile, keys gathered early, and a
rank that fails (run by distributed_worker.py)."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

import slattn
from distributed_helpers import (
    DEVICE,
    D,
    H,
    K,
    N,
    T,
    Whole,
    chunks_of,
    close,
    compare,
    even,
    leaf,
    part,
    split,
)
from distributed_refusals import refuses
from slattn import distributed
from slattn.distributed import operators
from slattn.testing import CASE_BUDGETS, relative_error


class Layer(torch.nn.Module):
    """Projections, attention over `group` (all processes; None: over this one's alone), projection."""

    def __init__(self, group: Any, *, early: bool = False) -> None:
        super().__init__()
        self.group, self.early = group, early
        self.to_q = torch.nn.Linear(D, H * D, dtype=torch.float64)
        self.to_kv = torch.nn.Linear(D, D, dtype=torch.float64)
        self.attn_sink = torch.nn.Parameter(torch.randn(H, dtype=torch.float64))

    def forward(self, x: Tensor, indices: Tensor) -> Tensor:
        kv = self.to_kv(x)
        if self.early:
            kv = distributed.gather_keys(kv, group=self.group)
        q = self.to_q(x).unflatten(-1, (H, D))
        if self.group is None:
            return x + slattn.sparse_attention(q, kv, indices, attn_sink=self.attn_sink).sum(1)
        group = None if self.early else self.group
        out = distributed.sparse_attention(q, kv, indices, attn_sink=self.attn_sink, group=group)
        return x + out.sum(1)


def stacks(wrap: Callable[[torch.nn.Module], Callable[..., Tensor]], **options: Any) -> None:
    """Two layers on this rank's tokens, each run as `wrap` says, under fully_shard, against one process's."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    x, indices = torch.randn(N, D, dtype=torch.float64), torch.randint(-3, N + 2, (N, K))
    one = torch.nn.ModuleList([Layer(None) for _ in range(2)])
    many = torch.nn.ModuleList([Layer(dist.group.WORLD, **options) for _ in range(2)])
    many.load_state_dict(one.state_dict())
    for layer in many:
        fully_shard(layer, mesh=init_device_mesh(DEVICE, (ranks,)))
    whole, mine = x, x[even(N)[rank]]
    for single, shared in zip(one, many, strict=True):
        whole, mine = single(whole, indices), wrap(shared)(mine, indices[even(N)[rank]])
    close(mine, whole[even(N)[rank]])
    whole.square().sum().backward()
    mine.square().sum().backward()
    # fully_shard averages gradients over the ranks: one process has R times them.
    for true, got in zip(one.parameters(), many.parameters(), strict=True):
        torch.testing.assert_close(got.grad.full_tensor() * ranks, true.grad, rtol=1e-10, atol=1e-10)


def checkpointed(reentrant: bool) -> Callable[[torch.nn.Module], Callable[..., Tensor]]:
    return lambda layer: lambda *args: checkpoint(layer, *args, use_reentrant=reentrant)


def under_checkpoint() -> None:
    whole = Whole()
    plain = part(whole)
    for early in (False, True):
        for reentrant in (True, False):
            again = part(whole, lambda call, *args, how=reentrant: checkpoint(call, *args, use_reentrant=how), early)
            for a, b in zip(plain, again, strict=True):
                if DEVICE == "cpu":
                    assert torch.equal(a, b)
                close(a, b)  # a GPU's sums are in no order


def under_fsdp() -> None:
    stacks(lambda layer: layer)
    stacks(lambda layer: layer, early=True)
    stacks(checkpointed(False))
    stacks(checkpointed(False), early=True)


def in_one_graph(call: Callable[..., Any], *args: Tensor) -> Any:
    return torch.compile(call, backend="aot_eager", fullgraph=True)(*args)


def under_compile() -> None:
    """One graph, the collectives inside; under fully_shard and a checkpoint the layer alone is compiled."""
    whole = Whole()
    torch._dynamo.reset()
    for options in ({}, {"keep_gathered": True}):
        plain = part(whole, **options)
        traced = part(
            whole, lambda call, *args: torch.compile(call, backend="aot_eager", fullgraph=True)(*args), **options
        )
        for a, b in zip(plain, traced, strict=True):
            close(b, a)
    stacks(lambda layer: torch.compile(layer, backend="aot_eager"))
    stacks(lambda layer: checkpointed(False)(torch.compile(layer, backend="aot_eager")))
    kv = torch.randn(N, D)
    with pytest.raises(Exception, match="gather_keys cannot be traced"):
        torch.compile(lambda kv: distributed.gather_keys(kv).keys(), backend="aot_eager", fullgraph=True)(kv)


def under_compile_ranks_still_agree() -> None:
    """What the operator compares when no Python runs before it."""
    first = dist.get_rank() == 0
    call = torch.compile(
        lambda q, kv, indices: distributed.sparse_attention(q, kv, indices, group=dist.group.WORLD, layout="zigzag"),
        backend="aot_eager",
        fullgraph=True,
    )
    q, kv, indices = torch.randn(3, H, D), torch.randn(6, D), torch.zeros(3, K, dtype=torch.int32)
    call(q, kv, indices)
    with pytest.raises(ValueError, match="same even number of keys on each rank"):
        call(q, kv[1:] if first else kv, indices)


# Keys that are gathered early.


def early_keys() -> None:
    rank, ranks, world = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
    for keep in (False, True):
        compare(Whole(), even(T)[rank], even(N)[rank], early={"group": world, "keep_gathered": keep})
    keys = split(15, 9) if ranks == 2 else split(9, 2, 12, 1)
    compare(Whole(), even(T)[rank], keys[rank], early={"group": world})
    compare(Whole(), even(T)[rank], chunks_of(rank, ranks), early={"group": world, "layout": "zigzag"})
    heads = slice(rank * H // ranks, (rank + 1) * H // ranks)
    compare(Whole(), torch.arange(T), torch.arange(N), heads, early={"tp_group": world})


def early_keys_used_twice() -> None:
    """Two calls with the same keys: dkv is the sum of both, in float32, and rounded once."""
    whole, rank = Whole(torch.bfloat16), dist.get_rank()
    q, kv, indices = whole.q[even(T)[rank]].detach(), leaf(whole.kv[even(N)[rank]]), whole.indices[even(T)[rank]]
    keys = distributed.gather_keys(kv, group=dist.group.WORLD)
    first, second = (distributed.sparse_attention(q * factor, keys, indices) for factor in (1, 3))
    grad = whole.grad_out[even(T)[rank]]
    torch.autograd.backward((first, second), (grad, grad))
    exact = leaf(kv.double())
    total = sum(
        distributed.sparse_attention((q * factor).double(), exact, indices, group=dist.group.WORLD) for factor in (1, 3)
    )
    total.backward(grad.double())
    assert relative_error(kv.grad, exact.grad) < 5e-3  # of 600 draws the mean is 2.6e-3 and the largest 4.1e-3
    wide = leaf(kv.float())
    out = distributed.sparse_attention(q, distributed.gather_keys(wide, group=dist.group.WORLD, dtype=q.dtype), indices)
    out.backward(grad)
    assert wide.grad.dtype == torch.float32
    with torch.no_grad():
        assert not distributed.sparse_attention(q, keys, indices).requires_grad


def what_runs_meanwhile() -> None:
    """Forward: the gather is under way while q is made. Backward: so is the sum of dkv while q's gradient is."""
    events: list[str] = []

    class Watched(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            events.append("q")
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            events.append("dq")
            return grad

    def watched(name: str) -> Callable[..., Any]:
        start = getattr(operators, name)

        def call(*args: Any) -> Any:
            pending = start(*args)
            events.append(name)
            result = pending.result
            pending.result = lambda: (events.append(f"{name} waited"), result())[1]
            return pending

        return call

    whole, rank = Whole(), dist.get_rank()
    x, kv = leaf(whole.q[even(T)[rank]]), leaf(whole.kv[even(N)[rank]])
    with pytest.MonkeyPatch.context() as patch:
        for name in ("gather", "reduce"):
            patch.setattr(operators, name, watched(name))
        keys = distributed.gather_keys(kv, group=dist.group.WORLD, keep_gathered=True)
        out = distributed.sparse_attention(Watched.apply(x), keys, whole.indices[even(T)[rank]])
        out.sum().backward()
    assert events == ["gather", "q", "gather waited", "reduce", "dq", "reduce waited"], events


def early_keys_refuse() -> None:
    first, world = dist.get_rank() == 0, dist.group.WORLD
    q, kv, indices = torch.randn(3, H, D), torch.randn(6, D), torch.zeros(3, K, dtype=torch.int32)
    own = "" if first else "the arguments of rank 0 do not fit: "
    same = "must be the same on every rank; got"

    def gather_refuses(message: str, kv: Any, error: type[Exception] = ValueError, **options: Any) -> None:
        with pytest.raises(error, match=message):
            distributed.gather_keys(kv, **{"group": world, **options})

    kind = TypeError if first else ValueError
    gather_refuses(f"{own}kv must be a float tensor", None if first else kv, kind)
    gather_refuses(rf"{own}kv must be \[N, D\] or", kv[0] if first else kv)
    gather_refuses(f"{own}dtype must be torch.float32 or torch.bf", kv, kind, dtype=torch.half if first else None)
    gather_refuses(f"{own}layout must be 'contiguous' or", kv, layout="x" if first else "contiguous")
    gather_refuses(f"D of q and kv {same} 8 on rank 0, 16", kv[:, :8] if first else kv)
    gather_refuses(f"q's dtype {same} torch.bfloat16", kv, dtype=torch.bfloat16 if first else None)
    keys = distributed.gather_keys(kv, group=world)
    refuses(f"{own}group, tp_group, layout and keep_gathered are", q, keys, indices, group=world if first else None)
    refuses(f"{own}keys that travelled as torch.float32 must", q.bfloat16() if first else q, keys, indices, error=kind)
    refuses(
        f"whether the keys come from gather_keys {same} False", q, kv if first else keys, indices, **by(first, world)
    )
    if first:
        refuses("the function that is called", q, kv, indices, group=world)
    else:
        gather_refuses("the function that is called", kv)


def by(first: bool, world: Any) -> dict[str, Any]:
    return {"group": world} if first else {}


# A rank that fails.


def a_rank_that_fails() -> None:
    """Rank 0 raises on its own, before its call: the others say so within the group's timeout, here 5 s."""
    group = dist.new_group(timeout=timedelta(seconds=5))
    q, kv, indices = torch.randn(3, H, D), torch.randn(6, D), torch.zeros(3, K, dtype=torch.int32)
    if dist.get_rank() == 0:
        dist.barrier()
        return
    begun = time.monotonic()
    try:
        with pytest.raises(RuntimeError, match="another rank did not come to this call"):
            distributed.sparse_attention(q, kv, indices, group=group)
        assert time.monotonic() - begun < 25
    finally:
        dist.barrier()


def with_the_kernels() -> None:
    """bfloat16 through the TileLang kernels, against float64."""
    rank, world = dist.get_rank(), dist.group.WORLD
    q, kv, grad = (torch.randn(*size, 512).bfloat16() for size in ((64, 64), (256,), (64, 64)))
    indices = torch.rand(64, 256).topk(130).indices
    exact = leaf(q.double()), leaf(kv.double())
    want = slattn.sparse_attention(*exact, indices, backend="reference")
    want.backward(grad.double())
    queries, keys = (torch.arange(n).chunk(dist.get_world_size())[rank] for n in (64, 256))
    for early in (False, True):
        mine = leaf(q[queries]), leaf(kv[keys])
        source = distributed.gather_keys(mine[1], group=world) if early else mine[1]
        options = {} if early else {"group": world}
        out = distributed.sparse_attention(mine[0], source, indices[queries], backend="tilelang", **options)
        out.backward(grad[queries])
        assert relative_error(out, want[queries]) < CASE_BUDGETS["out"]
        assert relative_error(mine[0].grad, exact[0].grad[queries]) < CASE_BUDGETS["dq"]
        assert relative_error(mine[1].grad, exact[1].grad[keys]) < CASE_BUDGETS["dkv"]


FRAMEWORKS = (
    *(under_checkpoint, under_fsdp, under_compile, under_compile_ranks_still_agree),
    *(early_keys, early_keys_used_twice, what_runs_meanwhile, early_keys_refuse, a_rank_that_fails, with_the_kernels),
)
