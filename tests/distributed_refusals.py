"""What `slattn.distributed` refuses: every rank raises, none hangs, and they go on together (run by
distributed_worker.py)."""

from __future__ import annotations

import re
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import slattn
from distributed_helpers import DEVICE
from slattn import distributed, reference

H, D, K = 4, 16, 7


def refuses(message: str, *args: Any, error: type[Exception] = ValueError, **options: Any) -> None:
    with pytest.raises(error, match=re.escape(message)):
        distributed.sparse_attention(*args, **options)


def one_rank_differs() -> None:
    """Rank 0's call differs in one thing; each rank says so."""
    first, world = dist.get_rank() == 0, dist.group.WORLD
    q, kv, indices = torch.randn(3, H, D), torch.randn(6, D), torch.zeros(3, K, dtype=torch.int32)
    same = "must be the same on every rank; got"
    refuses(
        f"D of q and kv {same} 8 on rank 0, 16", *(x[..., :8] if first else x for x in (q, kv)), indices, group=world
    )
    half = torch.bfloat16 if first else torch.float32
    refuses(f"q's dtype {same} torch.bfloat16", q.to(half), kv.to(half), indices, group=world)
    refuses(f"d_v {same} 8 on rank 0, 16", q, kv, indices, d_v=8 if first else None, group=world)
    refuses(f"scale {same} 0.5 on rank 0, 0.25", q, kv, indices, scale=0.5 if first else None, group=world)
    backend = "reference" if first else "auto"
    refuses(f"backend {same} reference on rank 0, auto", q, kv, indices, backend=backend, group=world)
    layout = "zigzag" if first else "contiguous"
    refuses(f"layout {same} zigzag on rank 0, contiguous", q, kv, indices, layout=layout, group=world)
    refuses(f"keep_gathered {same} True", q, kv, indices, keep_gathered=first, group=world)
    wants = kv.clone().requires_grad_(first)
    refuses(f"whether kv requires a gradient {same} True", q, wants, indices, group=world)
    wants = q.clone().requires_grad_(first)
    refuses("whether any of q, kv and attn_sink requires a gradient", wants, kv, indices, group=world)
    odd = kv[1:] if first else kv
    refuses("same even number of keys on each rank for layout 'zigzag'", q, odd, indices, layout="zigzag", group=world)
    refuses("same even number of keys", q, kv[1:], indices, layout="zigzag", group=world)


def one_rank_is_wrong() -> None:
    """Rank 0's own arguments do not fit: it says so itself, and the others repeat it."""
    first, world = dist.get_rank() == 0, dist.group.WORLD
    q, kv, indices = torch.randn(3, H, D), torch.randn(6, D), torch.zeros(3, K, dtype=torch.int32)
    own = "" if first else "the arguments of rank 0 do not fit: "
    kind, refusal = (TypeError, slattn.BackendRefusal) if first else (ValueError, ValueError)
    refuses(f"{own}indices must be [T, K]", q, kv, indices[0] if first else indices, group=world)
    refuses(f"{own}indices must be a torch.Tensor", q, kv, None if first else indices, group=world, error=kind)
    refuses(f"{own}kv must have q's dtype", q, kv.double() if first else kv, indices, group=world, error=kind)
    refuses(f"{own}layout must be 'contiguous'", q, kv, indices, group=world, layout="x" if first else "contiguous")
    refuses(f"{own}keep_gathered must be", q, kv, indices, group=world, keep_gathered=1 if first else True, error=kind)
    refuses(f"{own}return_lse must be", q, kv, indices, group=world, return_lse=None if first else True, error=kind)
    backend = "tilelang" if first else "auto"
    refuses(f"{own}backend 'tilelang' cannot", q, kv, indices, group=world, backend=backend, error=refusal)
    batched = [x[None] if first else x for x in (q, kv, indices)]
    refuses(f"{own}q must be [T, H, D], without a batch dimension", *batched, group=world)


def keys_of_all_are_too_many() -> None:
    """A backend that takes a rank's keys and not those of all: every rank raises, and the next call is a call again."""
    args = torch.randn(3, H, D), torch.randn(6, D), torch.zeros(3, K, dtype=torch.int32)
    options = {"group": dist.group.WORLD, "backend": "reference"}
    with mock.patch.object(reference, "refusal", lambda problem: "too many keys" if problem.keys > 6 else None):
        refuses("'reference' cannot run this call: too many keys", *args, error=slattn.BackendRefusal, **options)
    assert distributed.sparse_attention(*args, **options).shape == (3, H, D)


def wrong_groups() -> None:
    """Nothing to exchange over: each rank sees it by itself."""
    args = torch.randn(3, H, D), torch.randn(6, D), torch.zeros(3, K, dtype=torch.int32)
    refuses("group must be a ProcessGroup, a DeviceMesh or None; got str", *args, group="cp", error=TypeError)
    mesh = init_device_mesh(DEVICE, (dist.get_world_size(), 1))
    refuses("tp_group must be a DeviceMesh of one dimension; got 2", *args, tp_group=mesh)
    world = dist.group.WORLD
    refuses("group and tp_group must be the two dimensions of one mesh", *args, group=world, tp_group=world)
