"""Two runs of one model compared: what the tests of slattn.frameworks ask of a patched model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

Step = Callable[[nn.Module], tuple[Tensor, Tensor]]  # model -> (its output, its loss)


def gradients(model: nn.Module, step: Step) -> tuple[Tensor, dict[str, Tensor | None]]:
    """The output and every parameter's gradient, by name."""
    model.zero_grad(set_to_none=True)
    out, loss = step(model)
    loss.backward()
    return out.detach().clone(), {name: p.grad if p.grad is None else p.grad.clone() for name, p in named(model)}


def losses(model: nn.Module, step: Step, steps: int = 5) -> list[float]:
    """The losses of a few steps of plain gradient descent; the weights are put back after them."""
    before = [(tensor, tensor.detach().clone()) for tensor in (*model.parameters(), *model.buffers())]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    values = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = step(model)[1]
        loss.backward()
        optimizer.step()
        values.append(loss.item())
    with torch.no_grad():
        for tensor, value in before:
            tensor.copy_(value)
    return values


def assert_agree(
    got: tuple[Tensor, dict[str, Tensor | None]], want: tuple[Tensor, dict[str, Tensor | None]], tolerance: float
) -> None:
    """Output and gradients within a relative error; a gradient that nearly cancels, within one of the largest."""
    assert (got[0] - want[0]).norm() <= tolerance * want[0].norm()
    largest = max(grad.norm() for grad in want[1].values() if grad is not None)
    assert got[1].keys() == want[1].keys()
    for name, grad in want[1].items():
        other = got[1][name]
        assert (grad is None) == (other is None), name
        if grad is not None and other is not None:
            assert (other - grad).norm() <= tolerance * (grad.norm() + 0.01 * largest), name


def assert_equal(got: tuple[Tensor, dict[str, Tensor | None]], want: tuple[Tensor, dict[str, Tensor | None]]) -> None:
    """Bit for bit."""
    assert torch.equal(got[0], want[0])
    for name, grad in want[1].items():
        other = got[1][name]
        assert (grad is None and other is None) or torch.equal(other, grad), name


def named(model: nn.Module) -> Any:
    return model.named_parameters()


def randomise(model: nn.Module, std: float = 0.1) -> None:
    """Random weights that make attention matter; sinks far apart."""
    with torch.no_grad():
        for name, parameter in named(model):
            parameter.normal_(std=1.0 if "sink" in name else std)
