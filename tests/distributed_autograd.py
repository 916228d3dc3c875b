"""What autograd asks of `slattn.distributed` beyond one backward (run by distributed_worker.py)."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import forward_ad

import slattn
from distributed_helpers import N, T, Whole, close, even, leaf
from slattn import distributed
from slattn.distributed.operators import EARLY_CALLS


def mine(whole: Whole) -> tuple[Tensor, Tensor, Tensor]:
    """This rank's q, kv and indices."""
    rank = dist.get_rank()
    return leaf(whole.q[even(T)[rank]]), leaf(whole.kv[even(N)[rank]]), whole.indices[even(T)[rank]]


def at_once(q: Tensor, kv: Tensor, indices: Tensor) -> Tensor:
    return distributed.sparse_attention(q, kv, indices, group=dist.group.WORLD)


def early(q: Tensor, kv: Tensor, indices: Tensor) -> Tensor:
    return distributed.sparse_attention(q, distributed.gather_keys(kv, group=dist.group.WORLD), indices)


def raises(message: str) -> pytest.RaisesContext[NotImplementedError]:
    return pytest.raises(NotImplementedError, match=re.escape(message))


def second_derivative() -> None:
    """Refused, also where the gradient of out carries no graph and the second derivative would silently be zero."""
    for call in (at_once, early):
        for number in (0, 1):
            for loss in (Tensor.sum, lambda out: out.square().sum()):
                tensors = mine(Whole())
                (gradient,) = torch.autograd.grad(loss(call(*tensors)), tensors[number], create_graph=True)
                with raises("cannot be differentiated again"):
                    gradient.sum().backward()


def forward_mode_and_transforms() -> None:
    q, kv, indices = (x.detach() for x in mine(Whole()))
    tangent, sentence = torch.ones_like(q), "take the batched layout [B, S, H, D] for vmap"
    for call in (at_once, early):
        with raises(sentence):
            torch.func.jvp(lambda x, call=call: call(x, kv, indices), (q,), (tangent,))
        with raises(sentence):
            torch.func.vmap(lambda x, call=call: call(x, kv, indices))(torch.stack((q, q)))
        with raises(sentence):
            torch.func.grad(lambda x, call=call: call(x, kv, indices).sum())(q)
        with raises(sentence):
            x = leaf(q)
            torch.autograd.grad(call(x, kv, indices), x, torch.stack((tangent, tangent)), is_grads_batched=True)
        with forward_ad.dual_level(), raises("has no forward-mode derivative"):
            call(forward_ad.make_dual(q, tangent), kv, indices)


def gradients_one_after_the_other() -> None:
    """Each pass gives what it is asked for, and nothing of an earlier one's that nobody took."""
    for call in (at_once, early):
        tensors = mine(Whole())
        wanted = torch.autograd.grad(call(*tensors).square().sum(), tensors[:2])
        loss = call(*tensors).square().sum()
        for number in (0, 0, 1, 0, 1):
            (gradient,) = torch.autograd.grad(loss, tensors[number], retain_graph=True)
            close(gradient, wanted[number])


def calls_with_the_same_keys() -> None:
    """More than have their sums prepared; any of them alone, and together once others were gone through for q alone."""
    q, kv, indices = mine(Whole())
    (one,) = torch.autograd.grad(at_once(q, kv, indices).sum(), kv)
    keys = distributed.gather_keys(kv, group=dist.group.WORLD)
    outs = [distributed.sparse_attention(q * i, keys, indices).sum() for i in range(EARLY_CALLS + 2)]
    alone = [torch.autograd.grad(at_once(q * i, kv, indices).sum(), kv)[0] for i in range(len(outs))]
    close(alone[1], one)

    def ask(numbers: tuple[int, ...], leaf: Tensor) -> Tensor:
        (gradient,) = torch.autograd.grad(sum(outs[i] for i in numbers), leaf, retain_graph=True)
        return gradient

    for numbers in ((0, 1, 2, 3, 4, 5), (2,), (5,), (1, 4)):
        ask((0, 3, 5), q)
        close(ask(numbers, kv), sum(alone[i] for i in numbers))


def one_rounding_of_many_calls() -> None:
    """Of a bfloat16 kv, as of two calls, also where calls are more than have their sums prepared."""
    whole, rank = Whole(torch.bfloat16), dist.get_rank()
    q, kv, indices = mine(whole)
    errors = []
    for calls in (2, 3 * EARLY_CALLS):
        keys = distributed.gather_keys(kv, group=dist.group.WORLD)
        scales = torch.linspace(0.5, 2.0, calls, dtype=torch.float64).tolist()
        outs = [distributed.sparse_attention(q, keys, indices, scale=scale) for scale in scales]
        (got,) = torch.autograd.grad(outs, kv, [out.detach() for out in outs])
        exact, true = whole.in_float64(), torch.zeros(N, q.shape[-1], dtype=torch.float64)
        for scale in scales:
            out = slattn.sparse_attention(exact.q, exact.kv, exact.indices, scale=scale)
            true += torch.autograd.grad(out, exact.kv, out.detach())[0]
        true = true[even(N)[rank]]
        errors.append(float((got - true).norm() / true.norm()))
    assert errors[1] < 1.2 * errors[0], errors


def gradients_can_be_changed_in_place() -> None:
    for call in (at_once, early):
        tensors = mine(Whole())
        for gradient in torch.autograd.grad(call(*tensors).sum(), tensors[:2], create_graph=True):
            gradient.mul_(2.0)


def keys_changed_in_place() -> None:
    """On one rank: it says so, and the others that it did."""
    q, kv, indices = (x.detach() for x in mine(Whole()))
    first = dist.get_rank() == 0
    keys = distributed.gather_keys(kv, group=dist.group.WORLD)
    if first:
        kv.mul_(2.0)
    error, before = (RuntimeError, "") if first else (ValueError, "rank 0 do not fit: ")
    with pytest.raises(error, match=f"{before}kv was changed in place after gather_keys"):
        distributed.sparse_attention(q, keys, indices)
    assert at_once(q, kv, indices).shape == q.shape
    fused = torch.cat((kv, kv), 1)  # a part that is copied to travel: what becomes of the rest is all the same
    keys = distributed.gather_keys(fused[:, : kv.shape[1]], group=dist.group.WORLD)
    fused.zero_()
    close(distributed.sparse_attention(q, keys, indices), at_once(q, kv, indices))


AUTOGRAD: tuple[Callable[[], None], ...] = (
    second_derivative,
    forward_mode_and_transforms,
    gradients_one_after_the_other,
    calls_with_the_same_keys,
    one_rounding_of_many_calls,
    gradients_can_be_changed_in_place,
    keys_changed_in_place,
)
