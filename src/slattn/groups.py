"""The process groups that callers hand over."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch.distributed as dist

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def process_group(name: str, group: Any) -> ProcessGroup | None:
    """The ProcessGroup of an argument of that name: itself, that of a DeviceMesh of one dimension, or None.

    Raises:
        RuntimeError: torch.distributed is not initialised.
        TypeError: no group.
        ValueError: a mesh of more dimensions, or a group that this process is not in.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError("torch.distributed is not initialised: call torch.distributed.init_process_group first")
    from torch.distributed.device_mesh import DeviceMesh

    if group is None:
        return None
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise ValueError(f"{name} must be a DeviceMesh of one dimension; got {group.ndim}: slice it by name")
        group = group.get_group()
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(f"{name} must be a ProcessGroup, a DeviceMesh or None; got {type(group).__name__}")
    if dist.get_rank(group) < 0:
        raise ValueError(f"{name} must be a group that this process is in")
    return group
