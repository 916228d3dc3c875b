"""What tests/test_properties.py draws and compares with: random calls, and a dense formulation of the operation.

`python tests/properties.py` compiles the kernels that the calls of KERNELS need on the GPU here, side by side.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
import sys
import time

import torch
from hypothesis import strategies as st
from torch import Tensor

from slattn.commands import ahead
from slattn.kernels.config import VALUE_DIMS, Config, architecture
from slattn.kernels.needed import needed
from slattn.testing import CASE_BUDGETS, INDEX_PATTERNS, LENGTHS, SINKS, Case, Inputs, Results, counting_slots
from slattn.testing import make_inputs as case_inputs

TENSORS = tuple(CASE_BUDGETS)
LAYOUTS = ("contiguous", "contiguous", "innermost first", "swapped", "every second", "columns of more", "expanded")
# Besides the usual: sinks at which exp overflows or is subnormal, either zero, the largest and smallest floats.
WILD_SINKS = (math.inf, -math.inf, 0.0, -0.0, 1e-38, 1e9, -1e9, 88.8, -104.0, 3.38e38, -3.38e38, 0.7, -2.0)


@dataclasses.dataclass(frozen=True)
class Call:
    """A call in words, from which `build` makes the tensors: hypothesis shrinks and prints this."""

    case: Case  # its `values` and `grad_empty` are applied by `build`, to the mixed indices
    mixed_with: str  # another pattern of indices, which has half of the rows, or of the slots
    mixed_by: str
    wild_sink: bool
    unseen: bool  # NaN and Inf in the keys that nobody names
    grad_empty: bool
    layouts: dict[str, str]  # of each tensor
    seed: int


@st.composite
def calls(draw: st.DrawFn, dims: tuple[int, ...] | None = None, positive: bool = False) -> Call:
    """Calls with one of `dims` as D (None: 1 to 20, and any d_v), or with a positive scale alone."""
    keys = draw(st.integers(0, 70))
    patterns = sorted(name for name in INDEX_PATTERNS if keys or name not in ("duplicates", "one key"))
    dim = draw(st.integers(1, 20) if dims is None else st.sampled_from(dims))
    values = draw(st.sampled_from(["normal", "normal", "large", "negative"]))
    scales = [None, 0.1, 1e-3] if positive else [None, 0.1, 1e-3, 0.0, -0.02, -0.1]
    case = Case(
        "property",
        heads=draw(st.integers(1, 80)),
        head_dim=dim,
        value_dim=draw(st.none() | st.integers(1, dim)) if dims is None else None,
        queries=draw(st.integers(0, 9)),
        keys=keys,
        slots=draw(st.integers(1, 140)),
        batch=draw(st.none() | st.integers(1, 3)),
        indices=draw(st.sampled_from(patterns)),
        int64=draw(st.booleans()),
        lengths=draw(st.none() | st.sampled_from(sorted(LENGTHS))),
        sink=draw(st.none() | st.sampled_from(sorted(SINKS))),
        values=values,
        scale=draw(st.sampled_from(scales)) if values == "normal" else None,
        grad_lse=draw(st.booleans()),
    )
    return Call(
        case,
        draw(st.sampled_from(patterns)),
        draw(st.sampled_from(["rows", "slots"])),
        draw(st.booleans()),
        draw(st.booleans()),
        draw(st.booleans()),
        {field.name: draw(st.sampled_from(LAYOUTS)) for field in dataclasses.fields(Inputs)},
        draw(st.integers(0, 2**32 - 1)),
    )


KERNELS = {"tilelang": calls(dims=tuple(VALUE_DIMS)), "flashmla_cudnn": calls(dims=(512, 576), positive=True)}


def kernels(arch: int) -> list[Config]:
    """What the calls of "tilelang" run: a head count for each tile, with and without what changes a kernel."""
    configs = []
    for heads, head_dim, *flags in itertools.product((64, 32, 16), VALUE_DIMS, (False, True), (False, True)):
        configs += needed(arch, heads, head_dim, grad_lse=flags[0], deterministic=flags[1])
    return sorted(dict.fromkeys(configs), key=lambda config: -getattr(config, "head_dim", 0))


def build(call: Call, device: str = "cpu", dtype: torch.dtype = torch.bfloat16) -> Inputs:
    case, g = call.case, torch.Generator().manual_seed(call.seed)
    inputs = case_inputs(case, device, dtype, call.seed)
    rows = inputs.indices.shape[:-1].numel()
    other = INDEX_PATTERNS[call.mixed_with](rows, case, g).view(inputs.indices.shape).to(inputs.indices)
    half = torch.rand(*inputs.indices.shape[:-1], 1 if call.mixed_by == "rows" else case.slots, generator=g) < 0.5
    changes = {"indices": torch.where(half.to(device), inputs.indices, other)}
    if inputs.attn_sink is not None and call.wild_sink:
        drawn = torch.tensor(WILD_SINKS)[torch.randint(len(WILD_SINKS), (case.heads,), generator=g)]
        changes["attn_sink"] = drawn.to(inputs.attn_sink)
    inputs = dataclasses.replace(inputs, **changes)
    inputs = dataclasses.replace(inputs, **{name: laid_out(x, call.layouts[name]) for name, x in tensors(inputs)})
    counts = counting_slots(inputs)
    if call.unseen and call.layouts["kv"] != "expanded":
        inputs.kv[~named_keys(inputs)] = torch.tensor([math.nan, math.inf, -math.inf])[call.seed % 3]
    if call.grad_empty and call.layouts["grad_out"] != "expanded":
        inputs.grad_out[~counts.any(-1)] = math.inf
    if call.grad_empty and inputs.grad_lse is not None and call.layouts["grad_lse"] != "expanded":
        inputs.grad_lse[~counts.any(-1)] = math.nan
    return inputs


def tensors(inputs: Inputs) -> list[tuple[str, Tensor]]:
    named = [(field.name, getattr(inputs, field.name)) for field in dataclasses.fields(inputs)]
    return [(name, x) for name, x in named if isinstance(x, Tensor)]


def upcast(inputs: Inputs) -> Inputs:
    """Every floating-point tensor in float64, so that every gradient is."""
    return dataclasses.replace(inputs, **{n: x.double() for n, x in tensors(inputs) if x.is_floating_point()})


def laid_out(x: Tensor, layout: str) -> Tensor:
    """x with other strides; "expanded" also has other values: those of its first row (head, key)."""
    if layout == "innermost first":
        return x.movedim(-1, 0).contiguous().movedim(0, -1)
    if layout == "swapped" and x.dim() > 1:
        return x.transpose(0, 1).contiguous().transpose(0, 1)
    if layout in ("every second", "columns of more"):
        *lead, last = x.shape
        more = math.nan if x.is_floating_point() else 0  # a key that there may be, where it must not be read
        view = torch.full((*lead, 2 * last + 8), more, dtype=x.dtype, device=x.device)
        view = view[..., 1 : 1 + 2 * last : 2] if layout == "every second" else view[..., 8 : 8 + last]
        return view.copy_(x)
    if layout == "expanded":
        dim = max(x.dim() - 2, 0)
        return x.narrow(dim, 0, min(1, x.shape[dim])).expand(x.shape)
    return x


def flattened(inputs: Inputs) -> Inputs:
    """A batch as one flat call: the entries' keys one after another."""
    if inputs.q.dim() == 3:
        return inputs
    batch, keys = inputs.kv.shape[:2]
    first = torch.arange(batch, device=inputs.q.device).view(-1, 1, 1) * keys
    indices = torch.where(counting_slots(inputs), inputs.indices.long() + first, -1)
    flat = {name: x.flatten(0, 1) for name, x in tensors(inputs) if name not in ("attn_sink", "indices")}
    return dataclasses.replace(inputs, **flat, indices=indices.flatten(0, 1))


def shaped_as(results: Results, inputs: Inputs) -> Results:
    lead = inputs.q.shape[:-1]
    return dataclasses.replace(
        results,
        out=results.out.reshape(*lead, results.out.shape[-1]),
        lse=results.lse.reshape(lead),
        dq=results.dq.reshape(inputs.q.shape),
        dkv=results.dkv.reshape(inputs.kv.shape),
    )


def key_counts(inputs: Inputs) -> Tensor:
    """[T, N] float64, of a flat call: how many slots of the row that count name the key."""
    counts = counting_slots(inputs)
    keys = inputs.kv.shape[0]
    index = torch.where(counts, inputs.indices.long(), keys)
    table = torch.zeros(len(index), keys + 1, dtype=torch.float64, device=index.device)
    return table.scatter_add_(1, index, torch.ones_like(index, dtype=torch.float64))[:, :keys]


def named_keys(inputs: Inputs) -> Tensor:
    """Bool, kv's shape without the columns."""
    return (key_counts(flattened(inputs)) > 0).any(0).view(inputs.kv.shape[:-1])


def dense(inputs: Inputs, least: float = 0.0) -> tuple[Results, Results]:
    """The operation over all keys, each weighted by how often a row names it, in float64, differentiated by autograd.

    Also the magnitude of each result: the same sums over absolute values, so that what cancels in a result does not in
    its magnitude. Rounding errors are to be measured against it. A gradient's counts a key's weight as no less than
    `least`.
    """
    x = upcast(flattened(inputs))
    table = key_counts(x)
    rows, named = (table > 0).any(1), (table > 0).any(0)
    value_dim = x.grad_out.shape[-1]
    scale = x.q.shape[-1] ** -0.5 if x.scale is None else x.scale
    table = table[rows][:, None]  # [rows, 1, N]
    sink = torch.full_like(x.q[0, :, 0] if len(x.q) else x.q.new_empty(x.q.shape[1]), -math.inf)
    sink = (sink if x.attn_sink is None else x.attn_sink.clone()).requires_grad_()
    q = x.q.clone().requires_grad_()
    kv = torch.where(named[:, None], x.kv, 0.0).requires_grad_()

    s = scale * torch.einsum("thd,nd->thn", q[rows], kv)
    weighted = s + table.log()
    keys_lse = weighted.logsumexp(-1)
    share = torch.nn.functional.logsigmoid(keys_lse - sink).exp()  # of the keys, beside the sink
    weights = weighted.softmax(-1)
    out = torch.zeros_like(x.grad_out).index_put((rows,), share[..., None] * (weights @ kv[:, :value_dim]))
    lse = torch.full_like(q[..., 0], math.inf).index_put((rows,), keys_lse)
    outputs, grads = [out, lse], [x.grad_out, torch.zeros_like(lse) if x.grad_lse is None else x.grad_lse]
    dq, dkv, dsink = torch.autograd.grad(outputs, [q, kv, sink], grads)
    truth = Results(out.detach(), lse.detach(), dq, dkv, None if x.attn_sink is None else dsink)

    with torch.no_grad():
        do, values, p = x.grad_out[rows].abs(), kv[:, :value_dim].abs(), share[..., None] * weights
        out_size = p @ values
        weights = torch.where(table > 0, weights.clamp(min=least), 0.0)
        p = share[..., None] * weights
        delta = (out_size * do).sum(-1, keepdim=True)
        ds = p * (do @ values.mT + delta)
        if x.grad_lse is not None:
            ds += weights * x.grad_lse[rows].abs()[..., None]
        logits = abs(scale) * torch.einsum("thd,nd->thn", q[rows].abs(), kv.abs()) * (table > 0)
        logits = torch.cat([logits, logits.new_zeros(*logits.shape[:2], 1)], -1)  # there may be no key
        size = Results(
            torch.zeros_like(out).index_put_((rows,), out_size),
            torch.zeros_like(lse).index_put_((rows,), 1.0 + logits.amax(-1)),
            torch.zeros_like(q).index_put_((rows,), abs(scale) * ds @ kv.abs()),
            abs(scale) * torch.einsum("thn,thd->nd", ds, q[rows].abs()),
            None if x.attn_sink is None else ((sink - keys_lse).sigmoid() * delta[..., 0]).sum(0),
        )
        size.dkv[:, :value_dim] += torch.einsum("thn,thd->nd", p, do)
    return shaped_as(truth, inputs), shaped_as(size, inputs)


def assert_close(
    got: Results, want: Results, size: Results, budgets: dict[str, tuple[float, float]]
) -> dict[str, float]:
    """Each element within the first budget of its magnitude, each tensor's norm within the second.

    Exactly zero where the magnitude is; infinite where wanted; nowhere NaN. 1e-30: floats that a GPU takes for zero.
    Returns the larger share of the two budgets that each tensor takes.
    """
    shares = {}
    for name in TENSORS:
        x, y, magnitude = getattr(got, name), getattr(want, name), getattr(size, name)
        if y is None:
            assert x is None, name
            continue
        assert x.shape == y.shape, name
        x, y = x.double(), y.double()
        assert not x.isnan().any(), f"{name}: NaN"
        assert torch.equal(x.isinf(), y.isinf()), f"{name}: infinities"
        error = torch.where(y.isinf(), (x != y) * math.inf, x - y).abs().nan_to_num_(0.0, math.inf)
        each, norm = budgets[name]
        floor = 1e-30 if name == "lse" or got.out.dtype != torch.float16 else 1e-6
        worst = float((error / (each * magnitude + floor)).amax()) if error.numel() else 0.0
        assert worst <= 1.0, f"{name}: an element {worst:.3g} times its budget"
        whole = float(error.norm() / (norm * magnitude.norm() + floor * error.numel())) if error.numel() else 0.0
        assert whole <= 1.0, f"{name}: relative to its magnitude {whole * norm:.3g}"
        if name != "lse":
            assert not x[(magnitude == 0) & ~y.isinf()].any(), f"{name}: not exactly zero"
        shares[name] = max(worst, whole)
    return shares


# Faults: each is a way to run another call than the one that was meant.
def lengths_ignored(inputs: Inputs) -> Inputs:
    return dataclasses.replace(inputs, topk_length=None)


def the_last_key_for_fillers_past_it(inputs: Inputs) -> Inputs:
    return dataclasses.replace(inputs, indices=inputs.indices.clamp(max=inputs.kv.shape[-2] - 1))


def key_0_for_fillers_below_it(inputs: Inputs) -> Inputs:
    return dataclasses.replace(inputs, indices=inputs.indices.clamp(min=0))


def indices_cut_to_32_bits(inputs: Inputs) -> Inputs:
    return dataclasses.replace(inputs, indices=inputs.indices.int())


def keys_named_twice_counted_once(inputs: Inputs) -> Inputs:
    first = (inputs.indices[..., None, :] == inputs.indices[..., None]).int().argmax(-1)  # where each stands first
    again = first < torch.arange(inputs.indices.shape[-1])
    return dataclasses.replace(inputs, indices=inputs.indices.masked_fill(again & counting_slots(inputs), -1))


def no_sink(inputs: Inputs) -> Inputs:
    return inputs if inputs.attn_sink is None else dataclasses.replace(inputs, attn_sink=inputs.attn_sink - torch.inf)


def gradients_as_if_contiguous(inputs: Inputs) -> Inputs:
    x = inputs.grad_out
    room = x.untyped_storage().nbytes() // x.element_size() - x.storage_offset()
    return (
        dataclasses.replace(inputs, grad_out=x.as_strided(x.shape, x.contiguous().stride()))
        if room >= x.numel()
        else inputs
    )


def no_gradient_of_lse(inputs: Inputs) -> Inputs:
    return dataclasses.replace(inputs, grad_lse=None)


FAULTS = (
    lengths_ignored,
    the_last_key_for_fillers_past_it,
    key_0_for_fillers_below_it,
    indices_cut_to_32_bits,
    keys_named_twice_counted_once,
    no_sink,
    gradients_as_if_contiguous,
    no_gradient_of_lse,
)


def main() -> int:
    """Compile; what does not, the tests tell."""
    arch = architecture(torch.cuda.get_device_capability()) if torch.cuda.is_available() else None
    configs, begun = [] if arch is None else kernels(arch), time.monotonic()
    with ahead.processes(len(os.sched_getaffinity(0))) as pool:
        ahead.wait(ahead.submit(pool, [(ahead.compile_own, (config,)) for config in configs]), lambda: None)
    print(f"{len(configs)} kernels compiled in {time.monotonic() - begun:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
