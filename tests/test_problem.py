"""Every TypeError and ValueError of the public functions: the message names the argument, what fits, and what came."""

from __future__ import annotations

import math
import re

import pytest
import torch

import slattn
from slattn.problem import describe, int32_indices

T, H, D, N, K, B = 3, 2, 8, 10, 4, 2
BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


def flat(**changes: object) -> dict[str, object]:
    return {
        "q": torch.zeros(T, H, D),
        "kv": torch.zeros(N, D),
        "indices": torch.zeros(T, K, dtype=torch.int32),
    } | changes


def batched(**changes: object) -> dict[str, object]:
    return {
        "q": torch.zeros(B, T, H, D),
        "kv": torch.zeros(B, N, D),
        "indices": torch.zeros(B, T, K, dtype=torch.int32),
    } | changes


TYPE_ERRORS = [
    (flat(q=[1.0]), "q must be a torch.Tensor; got list"),
    (flat(kv=None), "kv must be a torch.Tensor; got NoneType"),
    (flat(indices=[[0]]), "indices must be a torch.Tensor; got list"),
    (flat(q=torch.zeros(T, H, D, dtype=torch.int32)), "q must be torch.bfloat16 or .*; got torch.int32"),
    (flat(q=torch.zeros(T, H, D, dtype=torch.complex64)), "q must be torch.bfloat16 or .*; got torch.complex64"),
    (flat(kv=torch.zeros(N, D, dtype=torch.int8)), "kv must be torch.bfloat16 or .*; got torch.int8"),
    (flat(kv=torch.zeros(N, D, dtype=BF16)), "kv must have q's dtype, torch.float32 .*; got torch.bfloat16"),
    (flat(q=torch.zeros(T, H, D, dtype=F16)), "kv must have q's dtype, torch.float16 .*; got torch.float32"),
    (flat(indices=torch.zeros(T, K)), "indices must be torch.int32 or torch.int64; got torch.float32"),
    (flat(indices=torch.zeros(T, K, dtype=torch.int16)), "indices must be torch.int32 or torch.int64; got torch.int16"),
    (flat(kv=torch.zeros(N, D).to_sparse()), "kv must be a dense tensor; got torch.sparse_coo"),
    (flat(q=torch.nested.nested_tensor([torch.zeros(H, D)] * T)), "q must be a dense tensor; got a nested one"),
    (flat(attn_sink=0.5), "attn_sink must be a torch.Tensor; got float"),
    (flat(attn_sink=torch.zeros(H, dtype=F16)), "attn_sink must be torch.float32 or torch.bfloat16; got torch.float16"),
    (flat(topk_length=3), "topk_length must be a torch.Tensor; got int"),
    (flat(topk_length=torch.zeros(T, dtype=torch.int64)), "topk_length must be torch.int32; got torch.int64"),
    (flat(scale=torch.tensor(0.5)), "scale must be a Python number .*; got Tensor"),
    (flat(scale="0.5"), "scale must be a Python number .*; got str"),
    (flat(scale=True), "scale must be a Python number .*; got bool"),
    (flat(d_v=4.0), "d_v must be an int; got float"),
    (flat(d_v=True), "d_v must be an int; got bool"),
    (flat(deterministic=1), "deterministic must be a bool or None; got int"),
]

VALUE_ERRORS = [
    (flat(q=torch.zeros(H, D)), r"q must be \[T, H, D\] or \[B, S, H, D\]; got shape \[2, 8\]"),
    (flat(q=torch.zeros(1, B, T, H, D)), r"q must be \[T, H, D\] or .*; got shape \[1, 2, 3, 2, 8\]"),
    (flat(kv=torch.zeros(N, D + 1)), r"kv must be \[N, D\] or \[N, 1, D\] with D = 8 .*; got \[10, 9\]"),
    (flat(kv=torch.zeros(N, 2, D)), r"kv must be \[N, D\] or \[N, 1, D\] .*; got \[10, 2, 8\]"),
    (flat(kv=torch.zeros(D)), r"kv must be .*; got \[8\]"),
    (batched(kv=torch.zeros(N, D)), r"kv must be \[B, N, D\] with D = 8 and B = 2 .*; got \[10, 8\]"),
    (batched(kv=torch.zeros(B + 1, N, D)), r"kv must be \[B, N, D\] .*; got \[3, 10, 8\]"),
    (flat(indices=torch.zeros(T + 1, K).int()), r"indices must be \[T, K\] or \[T, 1, K\].*\[3, 2, 8\]; got \[4, 4\]"),
    (flat(indices=torch.zeros(T, 2, K).int()), r"indices must be \[T, K\] or \[T, 1, K\].*; got \[3, 2, 4\]"),
    (flat(indices=torch.zeros(T).int()), r"indices must be \[T, K\].*; got \[3\]"),
    (batched(indices=torch.zeros(T, K).int()), r"indices must be \[B, S, K\].*; got \[3, 4\]"),
    (batched(indices=torch.zeros(B, T + 1, K).int()), r"indices must be \[B, S, K\].*; got \[2, 4, 4\]"),
    (flat(indices=torch.zeros(T, 0).int()), r"indices must have at least one slot a row \(K >= 1\); got \[3, 0\]"),
    (flat(q=torch.zeros(T, 0, D)), r"q must have 1 to 256 heads; got 0"),
    (flat(q=torch.zeros(T, 257, D)), r"q must have 1 to 256 heads; got 257"),
    (
        flat(q=torch.zeros(T, H, 0), kv=torch.zeros(N, 0)),
        r"q must have a head dimension of at least 1; got .*\[3, 2, 0\]",
    ),
    (flat(d_v=0), "d_v must lie between 1 and D = 8; got 0"),
    (flat(d_v=D + 1), "d_v must lie between 1 and D = 8; got 9"),
    (flat(attn_sink=torch.zeros(H + 1)), r"attn_sink must be \[H\] = \[2\]; got \[3\]"),
    (flat(attn_sink=torch.zeros(())), r"attn_sink must be \[H\] = \[2\]; got \[\]"),
    (flat(topk_length=torch.zeros(T + 1).int()), r"topk_length must be \[T\] = \[3\]; got \[4\]"),
    (batched(topk_length=torch.zeros(B * T).int()), r"topk_length must be \[B, S\] = \[2, 3\]; got \[6\]"),
    (flat(scale=math.nan), "scale must be finite and within float32; got nan"),
    (flat(scale=math.inf), "scale must be finite and within float32; got inf"),
    (flat(scale=10**400), "scale must be finite and within float32; got 1000"),
    (flat(kv=torch.zeros(N, D, device="meta")), "kv must be on q's device, cpu; got meta"),
    (flat(indices=torch.zeros(T, K, device="meta").int()), "indices must be on q's device, cpu; got meta"),
    (flat(attn_sink=torch.zeros(H, device="meta")), "attn_sink must be on q's device, cpu; got meta"),
    (flat(topk_length=torch.zeros(T, device="meta").int()), "topk_length must be on q's device, cpu; got meta"),
    (
        flat(kv=torch.zeros(1, 1, D).expand(2**31 - 1, 1, D)),
        "kv must have fewer than 2147483647 keys, so that int32 can name each; got 2147483647",
    ),
]


@pytest.mark.parametrize(("arguments", "message"), TYPE_ERRORS, ids=lambda x: x[:40] if isinstance(x, str) else "")
def test_type_errors(arguments: dict[str, object], message: str):
    with pytest.raises(TypeError, match=message):
        slattn.sparse_attention(**arguments)


@pytest.mark.parametrize(("arguments", "message"), VALUE_ERRORS, ids=lambda x: x[:40] if isinstance(x, str) else "")
def test_value_errors(arguments: dict[str, object], message: str):
    with pytest.raises(ValueError, match=message):
        slattn.sparse_attention(**arguments)


def test_backend_argument():
    with pytest.raises(ValueError, match=r"backend must be 'auto' or one of .*'reference'; got 'cuda'"):
        slattn.sparse_attention(**flat(backend="cuda"))
    with pytest.raises(TypeError, match="backend must be a str; got NoneType"):
        slattn.sparse_attention(**flat(backend=None))


BACKWARD_ERRORS = [
    ({"out": torch.zeros(T, H, D, dtype=F64)}, TypeError, "out must be torch.float32; got torch.float64"),
    ({"out": None}, TypeError, "out must be a torch.Tensor; got NoneType"),
    ({"grad_out": torch.zeros(T, H, D, dtype=BF16)}, TypeError, "grad_out must be torch.float32; got torch.bfloat16"),
    ({"lse": torch.zeros(T, H, dtype=F64)}, TypeError, "lse must be torch.float32; got torch.float64"),
    ({"grad_lse": torch.zeros(T, H, dtype=F64)}, TypeError, "grad_lse must be torch.float32; got torch.float64"),
    ({"dkv_dtype": BF16}, TypeError, "dkv_dtype must be torch.float32.*; got torch.bfloat16"),
    ({"out": torch.zeros(T, H, D - 1)}, ValueError, r"out must be \[.., H, d_v\] = \[3, 2, 8\]; got \[3, 2, 7\]"),
    ({"grad_out": torch.zeros(T, D, H)}, ValueError, r"grad_out must be .* = \[3, 2, 8\]; got \[3, 8, 2\]"),
    ({"lse": torch.zeros(T)}, ValueError, r"lse must be \[.., H\] = \[3, 2\]; got \[3\]"),
    ({"grad_lse": torch.zeros(H, T)}, ValueError, r"grad_lse must be \[.., H\] = \[3, 2\]; got \[2, 3\]"),
    ({"lse": torch.zeros(T, H, device="meta")}, ValueError, "lse must be on q's device, cpu; got meta"),
]


@pytest.mark.parametrize(
    ("changes", "error", "message"), BACKWARD_ERRORS, ids=lambda x: x if isinstance(x, str) else ""
)
def test_backward_errors(changes: dict[str, object], error: type[Exception], message: str):
    out, lse = slattn.sparse_attention(**flat(), return_lse=True)
    arguments = flat(out=out, lse=lse, grad_out=torch.zeros_like(out)) | changes
    with pytest.raises(error, match=message):
        slattn.sparse_attention_backward(**arguments)


def test_what_fits():
    """The forms that the contract allows, and the defaults."""
    assert describe(**flat()).scale == D**-0.5
    assert describe(**flat(kv=torch.zeros(N, 1, D), indices=torch.zeros(T, 1, K).long())).keys == N
    assert describe(**batched(topk_length=torch.zeros(B, T).int())).tokens == B * T
    assert describe(**flat(q=torch.zeros(T, H, D, dtype=BF16), attn_sink=torch.zeros(H, dtype=BF16))).dtype == BF16
    assert describe(**flat(scale=2)).scale == 2.0
    wide = describe(**flat(q=torch.zeros(T, H, 576), kv=torch.zeros(N, 576)))
    assert (wide.head_dim, wide.value_dim) == (576, 512)
    assert describe(**flat()).value_dim == D
    assert describe(**flat(q=torch.zeros(0, H, D), kv=torch.zeros(0, D), indices=torch.zeros(0, K).int())).keys == 0


def test_errors_name_what_they_are_about():
    """One form for all messages: "<argument> must ...; got ..."."""
    for arguments, message in TYPE_ERRORS + VALUE_ERRORS:
        with pytest.raises((TypeError, ValueError)) as caught:
            describe(**arguments)
        assert re.fullmatch(r"[a-z_]+ must .*; got .+", str(caught.value)), message


def test_int64_indices_that_int32_cannot_hold_name_nothing():
    wide = torch.tensor([[0, 9, 10, 2**32 + 1, -(2**32) + 1, 2**62, -1]])
    assert int32_indices(wide, 10).tolist() == [[0, 9, -1, -1, -1, -1, -1]]
    assert int32_indices(wide, 10).dtype == torch.int32
