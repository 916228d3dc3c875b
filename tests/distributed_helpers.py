"""What the checks of several processes share: one problem as a single process holds it, and a rank's part of it."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import slattn
from slattn import distributed
from slattn.distributed import collectives

T, H, D, N, K = 12, 4, 16, 24, 7
DEVICE = os.environ.get("SLATTN_TEST_DEVICE", "cpu")  # "cuda": each process has a GPU of its own


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


def compare(
    whole: Whole,
    queries: Tensor,
    keys: Tensor,
    heads: slice = slice(None),
    early: dict[str, Any] | None = None,
    **options: Any,
) -> list[Tensor]:
    """This rank's rows and heads of `whole`, run together with the other ranks', against one process.

    early: options of gather_keys, where the keys are to be gathered by it.
    """
    out, lse, (dq, dkv, dsink) = whole.run()
    mine = [leaf(whole.q[queries][:, heads]), leaf(whole.kv[keys]), leaf(whole.attn_sink[heads])]
    kv = mine[1] if early is None else distributed.gather_keys(mine[1], **early)
    got_out, got_lse = distributed.sparse_attention(
        *(mine[0], kv, whole.indices[queries]),
        **{"attn_sink": mine[2], "topk_length": whole.length[queries], "return_lse": True, **options},
    )
    incoming = (whole.grad_out[queries][:, heads], whole.grad_lse[queries][:, heads])
    got = list(torch.autograd.grad((got_out, got_lse), mine, incoming))
    assert [x.dtype for x in got] == [x.dtype for x in mine]
    if (group := (early or options).get("group")) is not None:
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
    true, seen = getattr(collectives, name), []

    def counting(output: Tensor, mine: Tensor, group: Any) -> Any:
        seen.append(mine.numel())
        return true(output, mine, group)

    setattr(collectives, name, counting)
    try:
        yield seen
    finally:
        setattr(collectives, name, true)


def part(
    whole: Whole,
    wrap: Callable[..., Any] = lambda call, *args: call(*args),
    early: bool = False,
    **options: Any,
) -> list[Tensor]:
    """out and gradients of this rank's even part of `whole`."""
    rank = dist.get_rank()
    queries, mine = even(T)[rank], [leaf(whole.q[even(T)[rank]]), leaf(whole.kv[even(N)[rank]]), leaf(whole.attn_sink)]

    def call(q: Tensor, kv: Tensor, attn_sink: Tensor) -> Tensor:
        group = {"group": dist.group.WORLD}
        keys = distributed.gather_keys(kv.sin(), **group) if early else kv.sin()
        return distributed.sparse_attention(
            q.sin(), keys, whole.indices[queries], attn_sink=attn_sink, **({} if early else group), **options
        )

    out = wrap(call, *mine)
    out.backward(whole.grad_out[queries])
    return [out, *(x.grad for x in mine)]
