"""What each process of test_distributed.py runs: checks of its part of a result against one process's whole result."""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import slattn
from conftest import _poisoning
from distributed_autograd import AUTOGRAD
from distributed_frameworks import FRAMEWORKS
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
    counted,
    even,
    everyone,
    leaf,
    part,
    split,
)
from distributed_refusals import keys_of_all_are_too_many, one_rank_differs, one_rank_is_wrong, refuses, wrong_groups
from slattn import distributed

TIMEOUT = timedelta(seconds=30)


def work(rank: int, world: int, folder: str, names: list[str]) -> None:
    """Run the named checks, and write what failed here, name -> traceback, to `folder`."""
    torch.set_num_threads(1)
    if DEVICE == "cuda":
        torch.cuda.set_device(rank)
        torch.set_default_device("cuda")
        torch.empty(0)  # torch notes now which functions this concerns: after the next lines it would miss these
    for owner, name in ((torch, "empty"), (torch, "empty_like"), (Tensor, "new_empty")):
        setattr(owner, name, _poisoning(getattr(owner, name)))
    backend = "gloo"
    if DEVICE == "cuda":
        backend = "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=rank, world_size=world, timeout=TIMEOUT)
    failures = {}
    for seed, name in enumerate(names):
        torch.manual_seed(seed)
        try:
            CHECKS[name]()
        except Exception:
            failures[name] = traceback.format_exc()
        anywhere = [False] * world
        dist.all_gather_object(anywhere, bool(failures))
        if any(anywhere):  # the ranks may be at different calls now, and what follows would say nothing
            break
    Path(folder, f"{rank}.json").write_text(json.dumps(failures))
    dist.destroy_process_group()


# Results. Each on 2 and on 4 ranks, but those that name a mesh.


def contiguous() -> None:
    rank, world = dist.get_rank(), dist.group.WORLD
    compare(Whole(), even(T)[rank], even(N)[rank], group=world)
    compare(Whole(), even(T)[rank], even(N)[rank], group=init_device_mesh(DEVICE, (dist.get_world_size(),)))


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
    mesh = init_device_mesh(DEVICE, (2, 2), mesh_dim_names=("cp", "tp"))
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
        with counted("reduce_scatter") as reduced:
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
    for rows in even(T):
        q, indices, optional = whole.q[rows], whole.indices[rows], {"topk_length": whole.length[rows]}
        optional["attn_sink"] = whole.attn_sink
        out, lse = slattn.sparse_attention(q, whole.kv, indices, return_lse=True, **optional)
        incoming = (whole.grad_out[rows], whole.grad_lse[rows])
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
        with counted("all_gather") as seen:
            compare(whole, even(T)[rank], keys, group=dist.group.WORLD, keep_gathered=keep)
        assert seen.count(len(keys) * D) == gathers
        assert len(seen) == gathers + 1  # the exchange


def same_bits_again() -> None:
    whole, rank = Whole(torch.bfloat16), dist.get_rank()
    runs = [part(whole, deterministic=True) for _ in range(2)]
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True)), rank


CHECKS: dict[str, Callable[[], None]] = {
    check.__name__: check
    for check in (
        *(contiguous, unequal, zigzag, ranks_without_queries_or_keys, a_rank_of_empty_rows, tensor_parallel),
        *(no_gradient_for_some, lse_alone, sums_in_float32, kept_and_gathered_again, same_bits_again),
        *(one_rank_differs, one_rank_is_wrong, keys_of_all_are_too_many, wrong_groups, *AUTOGRAD, *FRAMEWORKS),
        both_on_a_mesh,
    )
}
