"""The host side of our TileLang kernels: pick a configuration, allocate, launch.

The kernels themselves are in slattn.kernels; what they are compiled for is in slattn.kernels.config.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from slattn.kernels import build
from slattn.kernels.build import kernel
from slattn.kernels.config import (
    VALUE_DIMS,
    CompactConfig,
    FinishConfig,
    FoldConfig,
    HopperBackwardConfig,
    PrepareConfig,
    architecture,
    backward_config,
    forward_config,
    slot_probs_config,
)
from slattn.problem import Problem, int32_indices

Pair = tuple[Tensor, Tensor]
PARTIAL_BYTES = 2 * 1024**3  # of partial rows at once, in deterministic mode


def refusal(problem: Problem) -> str | None:
    """Why the kernels cannot run this problem, in a sentence; None if they can."""
    if problem.device.type != "cuda":
        return f"the kernels need an NVIDIA GPU, and the tensors are on {problem.device}"
    if problem.dtype != torch.bfloat16:
        return f"the kernels take bfloat16, and q is {problem.dtype}"
    if VALUE_DIMS.get(problem.head_dim) != problem.value_dim:
        pairs = ", ".join(f"({d}, {v})" for d, v in VALUE_DIMS.items())
        return f"the kernels take (D, d_v) of {pairs}, not ({problem.head_dim}, {problem.value_dim})"
    if problem.batch * problem.keys >= 2**31:
        return f"the kernels count keys in int32, and {problem.batch} batch entries of {problem.keys} are too many"
    if problem.slots > 2**31 - 256:
        return f"the kernels count slots in int32, and {problem.slots} a row are too many"
    reason = _machine_refusal(problem.device.index or 0)
    if reason is None and problem.deterministic and not (_arch(problem.device) == 90 and problem.head_dim >= 512):
        return (
            "deterministic gradients come from a kernel for D = 512 and 576 on compute capability 9.0; the others sum "
            "dkv by atomics, in an order that differs from run to run"
        )
    return reason


@functools.cache
def _machine_refusal(device: int) -> str | None:
    reason = build.missing()
    if reason is not None:
        return reason
    capability = torch.cuda.get_device_capability(device)
    if architecture(capability) is None:
        return (
            f"the kernels are written for compute capability 8.0, 9.0 and 10.0, and "
            f"{torch.cuda.get_device_name(device)} has {capability[0]}.{capability[1]}"
        )
    return None


def kernels(problem: Problem) -> dict[str, str]:
    """The configurations of the forward and of the backward with all gradients but that of lse."""
    shape = _arch(problem.device), problem.heads, problem.head_dim
    backward = backward_config(*shape, deterministic=problem.deterministic)
    return {"forward": str(forward_config(*shape)), "backward": str(backward)}


def forward(
    problem: Problem,
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    attn_sink: Tensor | None,
    topk_length: Tensor | None,
    *,
    reference_rounding: bool = False,
    block: int | None = None,
    threads: int | None = None,
) -> Pair:
    """out [B, S, H, d_v] bf16 and lse [B, S, H] fp32, natural logarithm, keys only, +inf for an empty row.

    `reference_rounding`, `block` and `threads` are the V4 drop-in's; see docs/contract.md for the first.
    """
    out = q.new_empty(*q.shape[:-1], problem.value_dim)
    lse = q.new_empty(q.shape[:-1], dtype=torch.float32)
    if problem.tokens == 0 or problem.keys == 0:
        return out.zero_(), lse.fill_(torch.inf)
    config = forward_config(
        _arch(q.device),
        problem.heads,
        problem.head_dim,
        reference_rounding=reference_rounding,
        block=block,
        threads=threads,
    )
    sink = None if attn_sink is None else attn_sink.float()
    indices = int32_indices(indices, problem.keys)
    with torch.cuda.device(q.device):
        kernel(config)(
            _rows(q),
            _rows(kv, 1),
            indices.view(-1, problem.slots),
            _flat(topk_length, indices),
            _flat(sink, lse),
            _rows(out),
            lse.view(-1, problem.heads),
            problem.queries,
            problem.keys,
            int(topk_length is not None),
            int(sink is not None),
            problem.scale,
        )
    return out, lse


def backward(
    problem: Problem,
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    attn_sink: Tensor | None,
    topk_length: Tensor | None,
    out: Tensor,
    lse: Tensor,
    grad_out: Tensor,
    grad_lse: Tensor | None,
    *,
    needs: tuple[bool, bool, bool],
    dkv_dtype: torch.dtype,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """(dq, dkv in `dkv_dtype`, dsink in fp32), None where `needs` says so."""
    delta, lse2, dsink = prepare(problem, out, lse, grad_out, attn_sink)
    dq, dkv = main_backward(
        *(problem, q, kv, indices, topk_length, grad_out, lse2, delta, lse, grad_lse),
        needs=needs[:2],
        dkv_dtype=dkv_dtype,
    )
    return dq, dkv, dsink if needs[2] else None


def prepare(
    problem: Problem, out: Tensor, lse: Tensor, grad_out: Tensor, attn_sink: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """(delta [B, S, H], lse in base 2 with the sink [B, S, H], dsink [H] where there is a sink), all fp32."""
    delta, lse2 = torch.empty_like(lse), torch.empty_like(lse)
    sink = None if attn_sink is None else attn_sink.float()
    shares = lse2 if sink is None else torch.empty_like(lse)
    if lse.numel():
        with torch.cuda.device(out.device):
            kernel(PrepareConfig(_arch(out.device)))(
                _pieces(out),
                _pieces(grad_out),
                lse.view(-1),
                _flat(sink, lse),
                delta.view(-1),
                lse2.view(-1),
                shares.view(-1),
                problem.heads,
                1,
                int(sink is not None),
            )
    return delta, lse2, None if sink is None else shares.sum((0, 1))


def delta_of(out: Tensor, grad_out: Tensor) -> Tensor:
    """<out, grad_out> over the last axis, a multiple of 64, in fp32; out and grad_out bf16, contiguous."""
    delta = out.new_empty(out.shape[:-1], dtype=torch.float32)
    flat = delta.view(-1)
    if flat.numel():
        with torch.cuda.device(out.device):
            kernel(PrepareConfig(_arch(out.device)))(
                _pieces(out),
                _pieces(grad_out),
                flat,
                flat[:1],
                flat,
                flat,
                flat,
                1,
                0,
                0,
            )
    return delta


def main_backward(
    problem: Problem,
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    topk_length: Tensor | None,
    grad_out: Tensor,
    lse2: Tensor,
    delta: Tensor,
    lse: Tensor | None = None,
    grad_lse: Tensor | None = None,
    *,
    needs: tuple[bool, bool] = (True, True),
    dkv: Tensor | None = None,
    dkv_dtype: torch.dtype = torch.float32,
) -> tuple[Tensor | None, Tensor | None]:
    """(dq [B, S, H, D] bf16, dkv [B, N, D] in `dkv_dtype`), from delta and an lse in base 2 with the sink.

    Adds into `dkv`, fp32, where it is given. lse is natural and over the keys alone; without it the portable kernel
    runs, or in deterministic mode it is made anew.
    """
    need_q, need_kv = needs
    if not (need_q or need_kv):
        return None, None
    dq = torch.empty_like(q) if need_q else None
    if problem.tokens == 0 or problem.keys == 0:
        if need_kv and dkv is None:
            dkv = kv.new_zeros(kv.shape, dtype=dkv_dtype)
        return None if dq is None else dq.zero_(), dkv
    config = backward_config(
        *(_arch(q.device), problem.heads, problem.head_dim),
        grad_lse=grad_lse is not None,
        dq=need_q,
        dkv=need_kv,
        deterministic=problem.deterministic,
        lse=lse is not None,
    )
    if isinstance(config, HopperBackwardConfig) and lse is None:
        lse = forward(problem, q, kv, indices, None, topk_length)[1]
    indices = int32_indices(indices, problem.keys)
    statistics = lse2.view(-1, problem.heads), delta.view(-1, problem.heads)
    lses = [(lse2 if x is None else x).view(-1, problem.heads) for x in (lse, grad_lse)]
    with torch.cuda.device(q.device):
        if isinstance(config, HopperBackwardConfig):
            call = Call(q, kv, indices, topk_length, grad_out, (*statistics, *lses), grad_lse is not None)
            into = kv.new_empty(kv.shape, dtype=dkv_dtype) if dkv is None else dkv
            _hopper_backward(problem, config, call, torch.empty_like(q) if dq is None else dq, into, dkv is not None)
            return dq, into
        total = kv.new_zeros(kv.shape, dtype=torch.float32) if need_kv and dkv is None else dkv
        kernel(config)(
            _rows(q),
            _rows(kv, 1),
            _rows(grad_out),
            indices.view(-1, problem.slots),
            _flat(topk_length, indices),
            *statistics,
            _rows(q if dq is None else dq),
            lse2.new_empty(1, problem.head_dim) if total is None else _rows(total, 1),
            problem.queries,
            problem.keys,
            int(topk_length is not None),
            problem.scale,
            *lses,
        )
    return dq, dkv if total is None or dkv is not None else total.to(dkv_dtype)


def slot_probs(
    problem: Problem,
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    attn_sink: Tensor | None,
    topk_length: Tensor | None,
    lse: Tensor,
) -> Tensor:
    """[B, S, K] fp32: each slot's probability, summed over the heads; 0 where a slot does not count."""
    probs = lse.new_empty(indices.shape)
    if problem.tokens == 0 or problem.keys == 0:
        return probs.zero_()
    lse_all = lse if attn_sink is None else torch.logaddexp(lse, attn_sink.float())
    indices = int32_indices(indices, problem.keys)
    with torch.cuda.device(q.device):
        kernel(slot_probs_config(_arch(q.device), problem.heads, problem.head_dim))(
            _rows(q),
            _rows(kv, 1),
            indices.view(-1, problem.slots),
            _flat(topk_length, indices),
            lse_all.view(-1, problem.heads),
            probs.view(-1, problem.slots),
            problem.queries,
            problem.keys,
            int(topk_length is not None),
            problem.scale,
        )
    return probs


@dataclass(frozen=True)
class Call:
    """What the Hopper backward reads: the tensors of a call; lse2, delta, lse and grad_lse [T, H]."""

    q: Tensor
    kv: Tensor
    indices: Tensor
    topk_length: Tensor | None
    grad_out: Tensor
    statistics: tuple[Tensor, ...]
    use_grad_lse: bool


def _hopper_backward(
    problem: Problem, config: HopperBackwardConfig, call: Call, dq: Tensor, dkv: Tensor, add: bool
) -> None:
    """Write dq and write dkv or add to it."""
    room = max((problem.slots + 63) // 64, 1) * 64
    rows = call.indices.new_empty(problem.tokens, room)
    if config.partials:
        rows.fill_(-1)  # the sort reads what follows a query's slots too
    counts = call.indices.new_empty(problem.tokens)
    kernel(CompactConfig())(
        call.indices.view(-1, problem.slots),
        _flat(call.topk_length, call.indices),
        rows,
        counts,
        problem.queries,
        problem.keys,
        int(call.topk_length is not None),
    )
    sms = torch.cuda.get_device_properties(dq.device).multi_processor_count
    table = dkv.new_zeros(problem.batch * problem.keys, problem.head_dim, dtype=torch.float32)
    q, kv, grad_out, dq = _rows(call.q), _rows(call.kv, 1), _rows(call.grad_out), _rows(dq)

    def launch(part: slice, total: Tensor, exponents: Tensor) -> None:
        kernel(config)(
            *(q[part], kv, grad_out[part], rows[part], counts[part]),
            *(x[part] for x in call.statistics[:2]),
            *(dq[part], total, exponents),
            *(x[part] for x in call.statistics[2:]),
            int(call.use_grad_lse),
            problem.scale,
            sms,
        )

    if not config.partials:
        launch(slice(None), table, rows.new_empty(1, problem.head_dim // 64, dtype=torch.uint8))
        kernel(FinishConfig(str(dkv.dtype).removeprefix("torch.")))(table.view(-1, 32), dkv.view(-1, 32), int(add))
        return
    groups = (problem.heads + config.head_tile - 1) // config.head_tile
    queries = _queries_at_once(groups, room, problem.head_dim, sms)
    partials = table.new_empty(min(queries, problem.tokens) * groups * room, problem.head_dim, dtype=torch.float16)
    exponents = rows.new_empty(len(partials), problem.head_dim // 64, dtype=torch.uint8)
    for start in range(0, problem.tokens, queries):
        part = slice(start, start + queries)
        launch(part, partials, exponents)
        kernel(FoldConfig(problem.head_dim))(
            partials, exponents, *_by_key(rows[part], len(table), groups), table, groups, room
        )
    dkv.copy_(table.view_as(dkv) + dkv if add else table.view_as(dkv))


def _queries_at_once(groups: int, room: int, head_dim: int, sms: int) -> int:
    """Queries whose partial rows fit in `PARTIAL_BYTES`: full rounds of the multiprocessors where that is possible."""
    tasks = max(PARTIAL_BYTES // (room * (2 * head_dim + head_dim // 64)), groups)
    return (tasks // sms * sms if tasks >= sms else tasks) // groups


def _by_key(rows: Tensor, keys: int, groups: int) -> Pair:
    """(order, starts): the slots that count sorted by the row of kv that they name, as the first group's partial rows,
    and where each row's begin. A stable sort keeps queries and slots in their order.
    """
    room = rows.shape[1]
    narrow = rows.view(-1).short() if keys < 2**15 else rows.view(-1)  # sorted by half of the passes
    row, slot = narrow.sort(stable=True)
    starts = torch.searchsorted(row, torch.arange(keys + 1, dtype=row.dtype, device=row.device), out_int32=True)
    return (slot + slot // room * ((groups - 1) * room)).int(), starts


def _arch(device: torch.device) -> int:
    arch = architecture(torch.cuda.get_device_capability(device))
    assert arch is not None, "refusal() comes first"
    return arch


def _rows(tensor: Tensor, keep: int = 2) -> Tensor:
    """The tensor with all but its last `keep` axes joined, at an address that 16-byte loads take."""
    tensor = tensor.view(-1, *tensor.shape[-keep:])
    return tensor if tensor.data_ptr() % 16 == 0 else tensor.clone()


def _pieces(tensor: Tensor) -> Tensor:
    """[..., d_v] as [rows, d_v / 64, 64]."""
    return _rows(tensor, 1).view(-1, tensor.shape[-1] // 64, 64)


def _flat(tensor: Tensor | None, stand_in: Tensor) -> Tensor:
    """The tensor flat; where there is none, one element of another, which the kernel does not read."""
    return stand_in.view(-1)[:1] if tensor is None else tensor.view(-1)
