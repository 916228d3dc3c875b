"""Tensors as our kernels take them."""

from torch import Tensor


def joined(tensor: Tensor, keep: int = 1) -> Tensor:
    """The tensor with all but its last `keep` axes joined."""
    return tensor if tensor.dim() == keep + 1 else tensor.flatten(0, -keep - 1)


def rows(tensor: Tensor, keep: int = 2) -> Tensor:
    """`joined`, at an address that 16-byte loads take."""
    tensor = joined(tensor, keep)
    return tensor if tensor.data_ptr() % 16 == 0 else tensor.clone()


def pieces(tensor: Tensor) -> Tensor:
    """[..., d_v] as [rows, d_v / 64, 64]."""
    return rows(tensor, 1).view(-1, tensor.shape[-1] // 64, 64)


def flat(tensor: Tensor | None, stand_in: Tensor) -> Tensor:
    """The tensor flat; where there is none, one element of another, which the kernel does not read."""
    if tensor is None:
        return stand_in.as_strided((1,), (1,))
    return tensor if tensor.dim() == 1 else tensor.view(-1)
