"""What each process of test_distributed.py runs: checks of its part of a result against one process's whole result."""

from __future__ import annotations

import copy
import json
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils.checkpoint import checkpoint

import slattn
from conftest import _poisoning
from distributed_refusals import one_rank_differs, one_rank_is_wrong, refuses, wrong_groups
from slattn import distributed

T, H, D, N, K = 12, 4, 16, 24, 7
TIMEOUT = timedelta(seconds=30)


def work(rank: int, world: int, folder: str, names: list[str]) -> None:
    """Run the named checks, and write what failed here, name -> traceback, to `folder`."""
    torch.set_num_threads(1)
    for owner, name in ((torch, "empty"), (torch, "empty_like"), (Tensor, "new_empty")):
        setattr(owner, name, _poisoning(getattr(owner, name)))
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world, timeout=TIMEOUT)
    failures = {}
    for seed, name in enumerate(names):
        torch.manual_seed(seed)
        try:
            CHECKS[name]()
        except Exception:
            failures[name] = traceback.format_exc()
    Path(folder, f"{rank}.json").write_text(json.dumps(failures))
    dist.destroy_process_group()


@dataclass
class Whole:
    """One problem as a single process holds it, with the gradients that come in. Equal on all ranks: one seed."""

    dtype: torch.dtype = torch.float64
    empty_queries: list[int] = field(default_factory=list)
    sink: bool = True

    def __post_init__(self) -> None:
        self.q = torch.randn(T, H, D, dtype=torch.float64).to(self.dtype).requires_grad_()
        self.kv = torch.randn(N, D, dtype=torch.float64).to(self.dtype).requires_grad_()
        self.indices = torch.randint(-3, N + 2, (T, K))
        self.indices[1, :3] = self.indices[1, 3]  # a key named four times
        self.indices[self.empty_queries] = -1
        self.length = torch.randint(1, K + 1, (T,), dtype=torch.int32)
        self.attn_sink = torch.randn(H, dtype=self.dtype).requires_grad_() if self.sink else None
        self.grad_out = torch.randn(T, H, D, dtype=torch.float64).to(self.dtype)
        self.grad_lse = torch.randn(T, H, dtype=torch.float64 if self.dtype == torch.float64 else torch.float32)

    def run(self) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        """out, lse and the gradients of q, kv and the sink, in this one process."""
        optional = {"attn_sink": self.attn_sink, "topk_length": self.length}
        out, lse = slattn.sparse_attention(self.q, self.kv, self.indices, return_lse=True, **optional)
        leaves = [x for x in (self.q, self.kv, self.attn_sink) if x is not None]
        return out, lse, torch.autograd.grad((out, lse), leaves, (self.grad_out, self.grad_lse))

    def in_float64(self) -> Whole:
        """The same values, so that its results are what rounding is measured against."""
        exact = copy.copy(self)
        for name, x in vars(self).items():
            if isinstance(x, Tensor) and x.is_floating_point():
                setattr(exact, name, x.detach().double().requires_grad_(x.requires_grad))
        return exact


def even(rows: int) -> list[Tensor]:
    return list(torch.arange(rows).chunk(dist.get_world_size()))


def split(*lengths: int) -> list[Tensor]:
    return list(torch.arange(sum(lengths)).split(list(lengths)))


def chunks_of(rank: int, ranks: int) -> Tensor:
    """The rows of zigzag's rank: chunks r and 2R - 1 - r."""
    chunks = torch.arange(N).chunk(2 * ranks)
    return torch.cat([chunks[rank], chunks[2 * ranks - 1 - rank]])


def leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_()


def compare(whole: Whole, queries: Tensor, keys: Tensor, heads: slice = slice(None), **options: Any) -> list[Tensor]:
    """This rank's rows and heads of `whole`, run together with the other ranks', against one process."""
    out, lse, (dq, dkv, dsink) = whole.run()
    mine = [leaf(whole.q[queries][:, heads]), leaf(whole.kv[keys]), leaf(whole.attn_sink[heads])]
    got_out, got_lse = distributed.sparse_attention(
        *(mine[0], mine[1], whole.indices[queries]),
        **{"attn_sink": mine[2], "topk_length": whole.length[queries], "return_lse": True, **options},
    )
    incoming = (whole.grad_out[queries][:, heads], whole.grad_lse[queries][:, heads])
    got = list(torch.autograd.grad((got_out, got_lse), mine, incoming))
    assert [x.dtype for x in got] == [x.dtype for x in mine]
    if options.get("group") is not None:
        group = options["group"]
        dist.all_reduce(got[2], group=group.get_group() if isinstance(group, DeviceMesh) else group)
    close(got_out, out[queries][:, heads])
    close(got_lse, lse[queries][:, heads])
    for grad, true in zip(got, (dq[queries][:, heads], dkv[keys], dsink[heads]), strict=True):
        close(grad, true)
    return got


def close(got: Tensor, true: Tensor) -> None:
    assert got.shape == true.shape
    torch.testing.assert_close(got, true, rtol=1e-12, atol=1e-12)


def everyone(tensor: Tensor, group: Any = None) -> list[Tensor]:
    gathered = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
    dist.all_gather(gathered, tensor.contiguous(), group=group)
    return gathered


@contextmanager
def counted(name: str) -> Iterator[list[int]]:
    """The elements that each collective of that name hands over, while the block runs."""
    true, seen = getattr(distributed, name), []

    def counting(output: Tensor, mine: Tensor, group: Any) -> None:
        seen.append(mine.numel())
        true(output, mine, group)

    setattr(distributed, name, counting)
    try:
        yield seen
    finally:
        setattr(distributed, name, true)


# Results. Each on 2 and on 4 ranks, but those that name a mesh.


def contiguous() -> None:
    rank, world = dist.get_rank(), dist.group.WORLD
    compare(Whole(), even(T)[rank], even(N)[rank], group=world)
    compare(Whole(), even(T)[rank], even(N)[rank], group=init_device_mesh("cpu", (dist.get_world_size(),)))


def unequal() -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    keys = split(15, 9) if ranks == 2 else split(9, 2, 12, 1)
    queries = split(5, 7) if ranks == 2 else split(1, 5, 2, 4)
    compare(Whole(), queries[rank], keys[rank], group=dist.group.WORLD)


def zigzag() -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    compare(Whole(), even(T)[rank], chunks_of(rank, ranks), group=dist.group.WORLD, layout="zigzag")


def ranks_without_queries_or_keys() -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    none_first, none_last = ([0, 1], [1, 0]) if ranks == 2 else ([0, 1, 0, 2], [2, 0, 1, 0])
    some = even(T)[0]
    for parts in (none_first, none_last):
        queries = split(*(part * T // sum(parts) for part in parts))[rank]
        keys = split(*(part * N // sum(parts) for part in parts))[rank]
        compare(Whole(), queries, even(N)[rank], group=dist.group.WORLD)
        compare(Whole(), even(T)[rank], keys, group=dist.group.WORLD)
        compare(Whole(), queries, keys, group=dist.group.WORLD)
    q, kv = torch.randn(len(some), H, D, requires_grad=True), torch.randn(0, D, requires_grad=True)
    out = distributed.sparse_attention(q, kv, torch.zeros(len(some), K).int(), group=dist.group.WORLD)
    out.sum().backward()
    assert not out.any()
    assert not q.grad.any()
    assert kv.grad.shape == (0, D)


def a_rank_of_empty_rows() -> None:
    rank = dist.get_rank()
    whole = Whole(empty_queries=even(T)[0].tolist())
    dq, *_ = compare(whole, even(T)[rank], even(N)[rank], group=dist.group.WORLD)
    assert rank or not dq.any()


def tensor_parallel() -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    heads = slice(rank * H // ranks, (rank + 1) * H // ranks)
    _, dkv, _ = compare(Whole(), torch.arange(T), torch.arange(N), heads, tp_group=dist.group.WORLD)
    assert all(torch.equal(other, dkv) for other in everyone(dkv))


def both_on_a_mesh() -> None:
    """The result, that two ranks with the same keys get the same bits, and that nobody misses an error far away."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp"))
    row, column = mesh.get_coordinate()
    heads = slice(column * H // 2, (column + 1) * H // 2)
    groups = {"group": mesh["cp"], "tp_group": mesh["tp"]}
    queries, keys = split(5, 7)[row], split(15, 9)[row]
    _, dkv, _ = compare(Whole(), queries, keys, heads, **groups)
    assert all(torch.equal(other, dkv) for other in everyone(dkv, mesh["tp"].get_group()))
    compare(Whole(), queries, chunks_of(row, 2), heads, layout="zigzag", **groups)
    whole = Whole()
    mine = (whole.q[queries][:, heads], whole.kv[keys], whole.indices[queries])
    first = dist.get_rank() == 0
    refuses("N of kv must be the same over tp_group", mine[0], mine[1][first:], mine[2], **groups)
    refuses("T of q must be the same over tp_group", mine[0][first:], mine[1], mine[2][first:], **groups)
    refuses("indices must be" if first else "rank 0 do not fit: indices", *mine[:2], mine[2][first:], **groups)


def no_gradient_for_some() -> None:
    """Backward where kv or q alone wants one, and forward where nobody does."""
    whole, rank = Whole(), dist.get_rank()
    _, _, (dq, dkv, _) = whole.run()
    queries, keys = even(T)[rank], even(N)[rank]
    optional = {"attn_sink": whole.attn_sink.detach(), "topk_length": whole.length[queries], "return_lse": True}
    for needs_q, needs_kv in ((True, False), (False, True)):
        q = whole.q[queries].detach().requires_grad_(needs_q)
        kv = whole.kv[keys].detach()[:, None].requires_grad_(needs_kv)
        with counted("_reduce_scatter") as reduced:
            results = distributed.sparse_attention(q, kv, whole.indices[queries], group=dist.group.WORLD, **optional)
            torch.autograd.backward(results, (whole.grad_out[queries], whole.grad_lse[queries]))
        assert len(reduced) == needs_kv
        close(q.grad if needs_q else kv.grad.squeeze(1), dq[queries] if needs_q else dkv[keys])
        assert (kv if needs_q else q).grad is None
        with torch.no_grad():
            results = distributed.sparse_attention(q, kv, whole.indices[queries], group=dist.group.WORLD, **optional)
        assert not any(x.requires_grad for x in results)


def lse_alone() -> None:
    whole, rank = Whole(), dist.get_rank()
    _, lse = slattn.sparse_attention(whole.q, whole.kv, whole.indices, topk_length=whole.length, return_lse=True)
    finite = lse.isfinite()
    (true,) = torch.autograd.grad(lse[finite].square().sum(), whole.kv)
    q, kv, indices = whole.q[even(T)[rank]], leaf(whole.kv[even(N)[rank]]), whole.indices[even(T)[rank]]
    _, mine = distributed.sparse_attention(
        *(q, kv, indices), topk_length=whole.length[even(T)[rank]], group=dist.group.WORLD, return_lse=True
    )
    (got,) = torch.autograd.grad(mine[finite[even(T)[rank]]].square().sum(), kv)
    close(got, true[even(N)[rank]])


def sums_in_float32() -> None:
    """bf16 dkv is nearer to float64's than a sum over ranks in bf16 is; an fp32 kv gets the sum unrounded."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    whole = Whole(torch.bfloat16)
    queries, keys = even(T)[rank], even(N)[rank]
    true = whole.in_float64().run()[2][1][keys]
    rounded = torch.zeros(N, D, dtype=torch.bfloat16)
    for part in even(T):
        q, indices, optional = whole.q[part], whole.indices[part], {"topk_length": whole.length[part]}
        optional["attn_sink"] = whole.attn_sink
        out, lse = slattn.sparse_attention(q, whole.kv, indices, return_lse=True, **optional)
        incoming = (whole.grad_out[part], whole.grad_lse[part])
        _, dkv, _ = slattn.sparse_attention_backward(
            q, whole.kv, indices, out, lse, incoming[0], grad_lse=incoming[1], **optional
        )
        rounded += dkv
    errors = []
    for dtype in (torch.bfloat16, torch.float32):
        kv = leaf(whole.kv[keys].to(dtype))
        optional = {"attn_sink": whole.attn_sink, "topk_length": whole.length[queries], "return_lse": True}
        results = distributed.sparse_attention(
            whole.q[queries], kv, whole.indices[queries], group=dist.group.WORLD, **optional
        )
        torch.autograd.backward(results, (whole.grad_out[queries], whole.grad_lse[queries]))
        assert kv.grad.dtype == dtype
        errors.append(sum_over_ranks((kv.grad - true).square().sum()))
    by_sum = sum_over_ranks((rounded[keys] - true).square().sum())
    assert errors[0] < (0.9 if ranks == 2 else 0.7) * by_sum, (errors, by_sum)
    assert errors[1] < 0.7 * errors[0], errors


def sum_over_ranks(value: Tensor) -> float:
    value = value.detach().double()
    dist.all_reduce(value)
    return float(value)


# How it is called.


def kept_and_gathered_again() -> None:
    whole, rank = Whole(), dist.get_rank()
    keys = even(N)[rank]
    for keep, gathers in ((False, 2), (True, 1)):
        with counted("_all_gather") as seen:
            compare(whole, even(T)[rank], keys, group=dist.group.WORLD, keep_gathered=keep)
        assert seen.count(len(keys) * D) == gathers
        assert len(seen) == gathers + 1  # the exchange


def same_bits_again() -> None:
    whole, rank = Whole(torch.bfloat16), dist.get_rank()
    runs = [part(whole, deterministic=True) for _ in range(2)]
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True)), rank


def part(whole: Whole, wrap: Callable[..., Any] = lambda call, *args: call(*args), **options: Any) -> list[Tensor]:
    """out and gradients of this rank's even part of `whole`."""
    rank = dist.get_rank()
    queries, mine = even(T)[rank], [leaf(whole.q[even(T)[rank]]), leaf(whole.kv[even(N)[rank]]), leaf(whole.attn_sink)]

    def call(q: Tensor, kv: Tensor, attn_sink: Tensor) -> Tensor:
        return distributed.sparse_attention(
            q.sin(), kv.sin(), whole.indices[queries], attn_sink=attn_sink, group=dist.group.WORLD, **options
        )

    out = wrap(call, *mine)
    out.backward(whole.grad_out[queries])
    return [out, *(x.grad for x in mine)]


def under_checkpoint() -> None:
    whole = Whole()
    plain = part(whole)
    for reentrant in (True, False):
        again = part(whole, lambda call, *args, how=reentrant: checkpoint(call, *args, use_reentrant=how))
        assert all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))


class Layer(torch.nn.Module):
    """Projections, attention over `group` (all processes; None: over this one's alone), projection."""

    def __init__(self, group: Any) -> None:
        super().__init__()
        self.group = group
        self.to_q = torch.nn.Linear(D, H * D, dtype=torch.float64)
        self.to_kv = torch.nn.Linear(D, D, dtype=torch.float64)
        self.attn_sink = torch.nn.Parameter(torch.randn(H, dtype=torch.float64))

    def forward(self, x: Tensor, indices: Tensor) -> Tensor:
        q, kv = self.to_q(x).unflatten(-1, (H, D)), self.to_kv(x)
        if self.group is None:
            return x + slattn.sparse_attention(q, kv, indices, attn_sink=self.attn_sink).sum(1)
        out = distributed.sparse_attention(q, kv, indices, attn_sink=self.attn_sink, group=self.group)
        return x + out.sum(1)


def under_fsdp() -> None:
    """Two layers under fully_shard; it averages gradients over ranks, so that one process has R times them."""
    from torch.distributed.fsdp import fully_shard

    rank, ranks = dist.get_rank(), dist.get_world_size()
    x, indices = torch.randn(N, D, dtype=torch.float64), torch.randint(-3, N + 2, (N, K))
    one = torch.nn.ModuleList([Layer(None) for _ in range(2)])
    many = torch.nn.ModuleList([Layer(dist.group.WORLD) for _ in range(2)])
    many.load_state_dict(one.state_dict())
    for layer in many:
        fully_shard(layer, mesh=init_device_mesh("cpu", (ranks,)))
    whole, mine = x, x[even(N)[rank]]
    for single, shared in zip(one, many, strict=True):
        whole, mine = single(whole, indices), shared(mine, indices[even(N)[rank]])
    close(mine, whole[even(N)[rank]])
    whole.square().sum().backward()
    mine.square().sum().backward()
    for true, got in zip(one.parameters(), many.parameters(), strict=True):
        torch.testing.assert_close(got.grad.full_tensor() * ranks, true.grad, rtol=1e-10, atol=1e-10)


def second_derivative() -> None:
    whole, rank = Whole(), dist.get_rank()
    kv = leaf(whole.kv[even(N)[rank]])
    out = distributed.sparse_attention(whole.q[even(T)[rank]], kv, whole.indices[even(T)[rank]], group=dist.group.WORLD)
    (dkv,) = torch.autograd.grad(out.square().sum(), kv, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dkv.sum().backward()


CHECKS: dict[str, Callable[[], None]] = {
    check.__name__: check
    for check in (
        *(contiguous, unequal, zigzag, ranks_without_queries_or_keys, a_rank_of_empty_rows, tensor_parallel),
        *(no_gradient_for_some, lse_alone, sums_in_float32, kept_and_gathered_again, same_bits_again),
        *(under_checkpoint, under_fsdp, one_rank_differs, one_rank_is_wrong, wrong_groups, second_derivative),
        both_on_a_mesh,
    )
}
