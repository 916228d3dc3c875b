"""`slattn scale`: what one layer's attention costs a GPU when a text is split over many; docs/scale.md explains it.

    slattn scale                                            the table: every model, text length and number of GPUs
    slattn scale --model V3.2 --tokens 131072 --gpus 64     every term of one cell
    slattn scale --plot scale.png                           the share of the wire, and the memory, as curves
    torchrun --nproc-per-node 2 -m slattn scale --measure   what it predicts, measured on these GPUs

But for --measure it is arithmetic: the constants say where they come from.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass

from slattn.commands.edge import UsageError, check_plot
from slattn.testing import BENCH_SHAPES, Shape

GIB = 2**30
TOKENS, GPUS = (32_768, 131_072, 524_288, 1_048_576), (8, 16, 64, 256, 1024)


@dataclass(frozen=True)
class Model:
    """The attention of one kind of layer of a released model.

    shape: the benchmark with its heads, D and slots, whose rates were measured. keys_per_token: rows that are gathered,
    for each token of the text; DeepSeek-V4's layers of ratio 4 have a raw key a token and a pooled one every 4.
    """

    name: str
    shape: str
    keys_per_token: float
    forward_tflops: float
    backward_tflops: float

    def part(self, tokens: int, gpus: int) -> Shape:
        """One GPU's queries, and the keys of all."""
        bench = BENCH_SHAPES[self.shape]
        keys = int(tokens * self.keys_per_token)
        return Shape(self.name, tokens // gpus, keys, bench.heads, bench.head_dim, bench.slots)


# TFLOPS of whole calls of the `tilelang` backend, sustained, 1 December 2026: README.md, "Speed". The kernels are those
# of docs/performance.md, "The Hopper forward" and "The Hopper backward".
MODELS = {
    model.name: model
    for model in (
        Model("V4-Flash", "v4-flash", 1.25, 503, 387),
        Model("V4-Pro", "v4-pro", 1.25, 540, 430),
        Model("V3.2", "v32", 1.0, 550, 417),
        Model("GLM-5", "glm5", 1.0, 546, 414),
    )
}


@dataclass(frozen=True)
class Machine:
    """Bytes and seconds of the machine. Of an H200, measured: the first two. Assumed until measured: the others."""

    memory: float = 4.25e12  # bytes a second; what a copy reaches
    cache: float = 50e6  # bytes of L2
    node: int = 8  # GPUs that NVLink joins
    link: float = 360e9  # bytes a second that a GPU takes in from its node in a collective, of 450e9 on the data sheet
    network: float = 42e9  # bytes a second and GPU between nodes, of 50e9 on the data sheet of a 400 Gb/s adapter
    latency: float = 20e-6  # of a collective, and
    hop: float = 5e-6  # more for each doubling of the ranks
    agreement: float = 200e-6  # the exchange between the hosts before a call, where nothing hides it


@dataclass(frozen=True)
class Costs:
    """Of one layer on one GPU: seconds of its kernels and collectives, bytes on the wire and in memory."""

    forward: float
    backward: float
    gather: float  # once; it happens forward and again backward
    reduce: float
    agreement: float
    wire_bytes: float  # in and out of this GPU, both gathers and the reduction
    saved_bytes: float  # from forward to backward
    peak_bytes: float  # at the backward's highest point, saved ones included

    @property
    def compute(self) -> float:
        return self.forward + self.backward

    @property
    def wire(self) -> float:
        return 2 * self.gather + self.reduce + self.agreement

    @property
    def step(self) -> float:
        """Forward and backward with nothing overlapped."""
        return self.compute + self.wire


LEGEND = """One layer: a step of forward and backward, nothing overlapped; the links' share of it; the peak of
memory on a GPU. By a model: kernels and memory as measured on an H200, links as assumed (docs/scale.md).
"""


def costs(model: Model, tokens: int, gpus: int, machine: Machine | None = None) -> Costs:
    """The model of docs/scale.md. `tokens` of all ranks, a multiple of `gpus`, the ranks of the context parallel."""
    machine = machine or Machine()
    part = model.part(tokens, gpus)
    queries, heads, dim, value_dim = part.queries, part.heads, part.head_dim, part.value_dim
    table = part.keys * dim  # numbers: 2 bytes each as keys, 4 as their gradient
    visits = queries * part.slots * dim  # numbers of the rows that the queries name, one after another
    groups = math.ceil(heads / 64)  # each adds its own part of dkv

    def beyond_cache(footprint: float, traffic: float) -> float:
        return max(0.0, 1 - machine.cache / footprint) * traffic / machine.memory

    forward = max(part.forward_flops / model.forward_tflops / 1e12, beyond_cache(2 * table, 2 * visits))
    backward = max(
        part.backward_flops / model.backward_tflops / 1e12, beyond_cache(6 * table, (2 + 8 * groups) * visits)
    )
    backward += 4 * table / machine.memory  # dkv set to zero
    own = queries * heads * (dim + value_dim) * 2  # q and out; also their gradients
    mine = table / gpus
    saved = own + 2 * mine + queries * (4 * heads + 4 * part.slots)
    return Costs(
        forward=forward,
        backward=backward,
        gather=collective(2 * table, gpus, machine),
        reduce=collective(4 * table, gpus, machine),
        agreement=machine.agreement if gpus > 1 else 0.0,
        wire_bytes=(2 * 2 + 4) * table * (gpus - 1) / gpus,
        saved_bytes=saved,
        peak_bytes=saved + own + 6 * table + 4 * mine,  # dq, the gradient of out; keys and dkv of all; the sum
    )


def collective(size: float, gpus: int, machine: Machine) -> float:
    """Seconds of an all-gather to `size` bytes on each GPU, or of a reduce-scatter from as many.

    Inside a node every GPU takes in what the others have. Between nodes each node takes in what the other nodes have,
    through all of its adapters; the two run at once, and the slower counts.
    """
    if gpus == 1:
        return 0.0
    nodes = math.ceil(gpus / machine.node)
    inside = size * (gpus - 1) / gpus / machine.link
    between = size * (nodes - 1) / nodes / (machine.network * min(gpus, machine.node))
    return max(inside, between) + machine.latency + machine.hop * math.log2(gpus)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument("--model", choices=MODELS, help="this one alone")
    parser.add_argument("--tokens", type=int, help="length of the text, over all GPUs, instead of the table's")
    parser.add_argument("--gpus", type=int, help="GPUs that share a text, instead of the table's")
    parser.add_argument("--plot", metavar="FILE.png", help="draw it: PNG, PDF or SVG (needs matplotlib)")
    parser.add_argument("--measure", action="store_true", help="under torchrun: measure what the model predicts")


def main(args: argparse.Namespace) -> int:
    """Print the table, the terms of one cell, or what is measured; returns 0."""
    if args.measure:
        from slattn.commands.scale_measure import measure

        measure(MODELS[args.model or "V3.2"])
        return 0
    tokens = TOKENS if args.tokens is None else (args.tokens,)
    gpus = GPUS if args.gpus is None else (args.gpus,)
    if min(*tokens, *gpus) < 1 or any(length % count for length in tokens for count in gpus):
        raise UsageError("--tokens must be a multiple of --gpus, and both at least 1")
    models = [MODELS[args.model]] if args.model else list(MODELS.values())
    if args.plot:
        check_plot("--plot", args.plot)
        from slattn.commands.scale_plot import plot

        plot(models, tokens, gpus, args.plot)
    if len(models) == len(tokens) == len(gpus) == 1:
        print(terms(costs(models[0], tokens[0], gpus[0])), end="")
    else:
        print(LEGEND, table(models, tokens, gpus), sep="\n", end="")
    return 0


def table(models: list[Model], tokens: tuple[int, ...], gpus: tuple[int, ...]) -> str:
    """Markdown: a row for each model and text length, a column for each number of GPUs."""
    lines = [
        "| model | tokens | " + " | ".join(f"{count} GPUs" for count in gpus) + " |",
        "|---" * (len(gpus) + 2) + "|",
    ]
    for model in models:
        for length in tokens:
            cells = [costs(model, length, count) for count in gpus]
            texts = [f"{c.step * 1e3:.3g} ms, {c.wire / c.step:.0%}, {c.peak_bytes / GIB:.2g} GiB" for c in cells]
            text = str(length) if length % 1024 else f"{length // 1024}k"
            lines.append(f"| {model.name} | {text} | " + " | ".join(texts) + " |")
    return "\n".join(lines) + "\n"


def terms(cost: Costs) -> str:
    """Every term of one cell, a line each."""
    rows = [
        ("forward", f"{cost.forward * 1e3:.3f} ms"),
        ("backward", f"{cost.backward * 1e3:.3f} ms"),
        ("gather, forward and again backward", f"2 x {cost.gather * 1e3:.3f} ms"),
        ("reduction", f"{cost.reduce * 1e3:.3f} ms"),
        ("agreement between the hosts", f"{cost.agreement * 1e3:.3f} ms"),
        ("step, nothing overlapped", f"{cost.step * 1e3:.3f} ms, {cost.wire / cost.step:.1%} of it the wire"),
        ("step, gather_keys hiding all it can", f"{(cost.compute + cost.gather) * 1e3:.3f} ms"),
        ("bytes in and out", f"{cost.wire_bytes / GIB:.3f} GiB"),
        ("saved for backward", f"{cost.saved_bytes / GIB:.3f} GiB"),
        ("peak", f"{cost.peak_bytes / GIB:.3f} GiB"),
    ]
    return "".join(f"{name:<38}{value}\n" for name, value in rows)
