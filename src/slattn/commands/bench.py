"""`slattn bench`: the speed of every willing backend, beside the peers that are installed and a matmul in the same run.

First a few cases of `slattn check`: where one is over its budget no speed is printed. How the times are taken is in
`slattn.commands.timing`. TFLOPS count the arithmetic of the definition (`slattn.testing.Shape`), not what an
implementation does. Backends are called through the library's public functions and peers through theirs, so that
everything a call does is in its time. Forward is `sparse_attention` without autograd, log-sum-exp included; backward
is `sparse_attention_backward` with all three gradients. On a GPU the TileLang kernels of all shapes are compiled
first, side by side (`slattn.commands.ahead`).

    slattn bench --quick                                 a smoke run: one shape, short blocks, one round
    slattn bench --shape v4-flash --pass bwd             one figure
    slattn bench --json bench.json --plot bench.png      all shapes
    slattn bench --pass bwd --deterministic              deterministic mode too
    slattn bench --beside ../before                      another checkout of slattn too, in the same run
"""

from __future__ import annotations

import argparse
import datetime
import functools
import gc
import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

import slattn
from slattn import backends, testing
from slattn.commands import ahead, beside, doctor, edge
from slattn.commands.check import run_backend, text
from slattn.commands.edge import UsageError
from slattn.commands.progress import Progress
from slattn.commands.tables import PASSES, Row, markdown, table
from slattn.commands.timing import Clock, Contestant, describe, measure, warm_up
from slattn.peers import PEERS, Unsuitable

# Checked before anything is timed: the head dimensions and head counts of the shapes, and data that has to be masked.
GATE = (
    "H16-D512-T1-N640-K640",
    "H64-D512-T3-N1592-K640",
    "H128-D512-T2-N2304-K1152",
    "H64-D576-T2-N4096-K2048",
    "H128-D576-T1-N4097-K2048",
    "indices-fillers",
    "sink-mixed",
)

# On a CPU there is no kernel to measure; this shape shows that the command works.
CPU_SHAPE = testing.Shape("cpu", 64, 256, 8, 64, 64)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    shapes = ", ".join(testing.BENCH_SHAPES)
    parser.add_argument(
        "--shape",
        action="append",
        type=parse_shape,
        metavar="NAME",
        help=f"{shapes}, or S,N,H,D,K: queries, keys, heads, head dimension, slots; default: all these names",
    )
    parser.add_argument("--pass", dest="pass_", choices=("fwd", "bwd", "both"), default="both", help="default: both")
    parser.add_argument(
        "--backend",
        choices=tuple(backends.MODULES),
        action="append",
        help="may be given more than once; default: all that run here, on a GPU without the reference",
    )
    parser.add_argument("--no-peers", action="store_true", help="measure no peers")
    parser.add_argument("--deterministic", action="store_true", help="measure the backward in deterministic mode too")
    parser.add_argument(
        "--beside",
        action="append",
        default=[],
        metavar="DIR",
        help="measure the backends of another checkout of slattn too; may be given more than once",
    )
    parser.add_argument("--quick", action="store_true", help="a smoke run: the first shape, short blocks, one round")
    parser.add_argument(
        "--block", type=edge.seconds, default=0.4, metavar="S", help="seconds a block lasts (default 0.4)"
    )
    parser.add_argument("--rounds", type=edge.count, default=3, help="blocks of each contestant (default 3)")
    parser.add_argument(
        "--limit", type=edge.seconds, default=5.0, metavar="S", help="leave out a call longer than this (5)"
    )
    parser.add_argument(
        "--jobs",
        type=edge.count,
        default=ahead.default_processes(),
        metavar="N",
        help="processes that compile kernels before the measurement; 1: none, each is compiled at its first call "
        "(default: one a core, up to 12)",
    )
    parser.add_argument("--device", help="default: cuda where there is one, otherwise cpu")
    parser.add_argument("--seed", type=edge.seed, default=0, help="of the inputs (default 0)")
    parser.add_argument("--json", metavar="FILE", help="write the rows and the machine there; - for the last line")
    parser.add_argument("--plot", metavar="FILE.png", help="draw the rows as bars: PNG, PDF or SVG (needs matplotlib)")
    parser.add_argument("--markdown", action="store_true", help="print the rows as a Markdown table too")
    parser.add_argument("--from", dest="source", metavar="FILE", help="measure nothing: show what --json wrote there")


def main(args: argparse.Namespace) -> int:
    """Check, measure, print; 1 if the check is red or nothing could be measured.

    Raises:
        UsageError: an option that cannot be used, before anything is measured.
    """
    if args.plot:
        edge.check_plot("--plot", args.plot, ", or draw later from what --json writes, by --from FILE")
    if args.source:
        return _show(args)
    if args.json and args.json != "-":
        edge.check_writable("--json", args.json)
    device = edge.usable_device(args.device)
    if device.type == "cuda":
        torch.cuda.set_device(device.index or 0)  # whose stream the clock listens to
        edge.quiet_tilelang()
    if args.quick:
        args.block, args.rounds = min(args.block, 0.05), 1
    if args.deterministic and args.pass_ == "fwd":
        raise UsageError("--deterministic is about the backward, and --pass fwd measures none: give bwd or both")
    for checkout in args.beside:
        beside.load(checkout)
    names = args.backend or [name for name in backends.MODULES if name != "reference" or device.type == "cpu"]
    shapes = args.shape or (list(testing.BENCH_SHAPES.values()) if device.type == "cuda" else [CPU_SHAPE])
    if device.type == "cpu" and not args.shape:
        print(f"On a CPU: {CPU_SHAPE.queries} queries of {CPU_SHAPE.heads} heads, to see it at work. The shapes of the")
        print("documents want a GPU, or --shape NAME and patience.\n")
    if args.quick and not args.shape:
        shapes = shapes[:1]
    passes = tuple(PASSES) if args.pass_ == "both" else (args.pass_,)
    if not _ready(names, shapes, passes, device, args):
        print("no speed is printed, because the check is red; `slattn check` has the details")
        return 1
    result: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "block_s": args.block,
        "rounds": args.rounds,
        "machine": doctor.gather(),
    }
    rows: list[Row] = []
    per_group = (1 + len(names) * (1 + len(args.beside)) * (1 + args.deterministic) + len(PEERS)) * args.rounds * 2
    with Progress(len(shapes) * len(passes) * per_group) as progress:
        for shape in shapes:
            for pass_ in passes:
                group = bench_group(shape, pass_, names, device, args, progress)
                rows += group
                progress.clear()
                print(table(group), flush=True)  # now, so that a run that is cut short has shown what it measured
                result["rows"] = [vars(row) for row in rows]
                if args.json and args.json != "-":
                    Path(args.json).write_text(json.dumps(result, indent=1) + "\n")
    _render(rows, result["machine"], args)
    if args.json == "-":
        print(json.dumps(result))
    return 0 if any(row.ms is not None and row.kind == "backend" for row in rows) else 1


def _ready(
    names: Sequence[str],
    shapes: Sequence[testing.Shape],
    passes: Sequence[str],
    device: torch.device,
    args: argparse.Namespace,
) -> bool:
    """What `gate` says, with the kernels compiled that it and the measurement call; the peers' while it runs."""
    if device.type != "cuda" or args.jobs == 1:
        return gate(names, device, args.seed)
    calls = [(case.heads, case.head_dim, {"grad_lse": case.grad_lse}) for case in testing.CASES if case.name in GATE]
    for deterministic in (False, True) if args.deterministic else (False,):
        calls += [(shape.heads, shape.head_dim, {"deterministic": deterministic}) for shape in shapes]
    capability = torch.cuda.get_device_capability(device)
    own_jobs = ahead.own_jobs(calls, capability) if "tilelang" in names else []
    peer_jobs = [] if args.no_peers else ahead.peer_jobs(shapes, passes, device, args.seed)
    if not own_jobs + peer_jobs:
        return gate(names, device, args.seed)
    with ahead.processes(min(args.jobs, len(own_jobs + peer_jobs))) as pool:
        own, peers = ahead.submit(pool, own_jobs), ahead.submit(pool, peer_jobs)
        with Progress(len(own)) as progress:
            ahead.wait(own, lambda: progress.step("compiling kernels"))
        good = gate(names, device, args.seed)
        if good:
            with Progress(len(peers)) as progress:
                ahead.wait(peers, lambda: progress.step("compiling the peers' kernels"))
    return good


def _show(args: argparse.Namespace) -> int:
    """What an earlier run wrote to a JSON file."""
    if args.json:
        raise UsageError("--json is for what is measured, and --from measures nothing: copy the file instead")
    try:
        result = json.loads(Path(args.source).read_text())
        rows = [Row(**row) for row in result["rows"]]
        shown = [f"{_machine_line(result['machine'])}, {result['date']}\n"]
        for group in dict.fromkeys((row.shape, row.direction) for row in rows):
            shown.append(table([row for row in rows if (row.shape, row.direction) == group]))
    except OSError as error:
        raise UsageError(f"--from {args.source} cannot be read: {error.strerror or error}") from None
    except (ArithmeticError, AttributeError, KeyError, RecursionError, TypeError, ValueError):
        raise UsageError(f"--from {args.source} is not what `slattn bench --json` writes") from None
    if not rows:
        raise UsageError(f"--from {args.source} holds no rows")
    print("\n".join(shown))
    _render(rows, result["machine"], args)
    return 0


def _render(rows: Sequence[Row], machine: dict[str, Any], args: argparse.Namespace) -> None:
    if args.markdown:
        print(markdown(rows))
    if args.plot:
        from slattn.commands.plot import plot

        plot(rows, args.plot, title=_machine_line(machine))


def _machine_line(machine: dict[str, Any]) -> str:
    devices = machine["devices"]
    device = devices[0]["name"] if isinstance(devices, list) and devices else "CPU"
    return f"{device}, torch {machine['torch']}, slattn {machine['slattn']}"


def parse_shape(argument: str) -> testing.Shape:
    """A name of BENCH_SHAPES, or S,N,H,D,K."""
    if argument in testing.BENCH_SHAPES:
        return testing.BENCH_SHAPES[argument]
    try:
        queries, keys, heads, head_dim, slots = (int(part) for part in argument.split(","))
    except ValueError:
        names = ", ".join(testing.BENCH_SHAPES)
        raise argparse.ArgumentTypeError(f"expected one of {names}, or S,N,H,D,K; got {argument!r}") from None
    if min(queries, keys, heads, head_dim, slots) < 1 or slots > keys:
        raise argparse.ArgumentTypeError(f"S, N, H, D and K must be positive and K at most N; got {argument!r}")
    return testing.Shape(argument, queries, keys, heads, head_dim, slots)


def gate(names: Sequence[str], device: torch.device, seed: int) -> bool:
    """Whether every backend is within its budgets on the gate's cases. Prints the table of one that is not."""
    cases = [case for case in testing.CASES if case.name in GATE]
    good = True
    with Progress(len(names) * len(cases)) as progress:
        for name in names:
            report = run_backend(name, str(device), cases, seed, progress)
            if report.failures:
                print(text(report, verbose=False))
                good = False
    return good


def bench_group(
    shape: testing.Shape,
    pass_: str,
    names: Sequence[str],
    device: torch.device,
    args: argparse.Namespace,
    progress: Progress,
) -> list[Row]:
    """The rows of one shape and pass: the matmul, the backends, the peers, in alternating blocks."""
    clock = Clock(device)
    try:
        inputs = testing.bench_inputs(shape, device, args.seed)
        contestants = list(_contestants(inputs, pass_, names, device, args))
    except Exception as error:
        return [Row(shape.name, pass_, "inputs", "matmul", *(None,) * 6, note=describe(error))]
    where = f"{shape.name} {pass_}"
    progress.show(f"{where}: compiling")
    warm_up(contestants, clock, args.limit)
    measure(
        contestants,
        clock,
        block=args.block,
        rounds=args.rounds,
        report=lambda what: progress.step(f"{where}: {what}"),
    )
    for contestant in contestants:
        contestant.call = None  # it holds the tensors of this group
    del inputs
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    flops = shape.forward_flops if pass_ == "fwd" else shape.backward_flops
    return _rows(shape.name, pass_, flops, matmul_flops(device), contestants)


def matmul_size(device: torch.device) -> int:
    """The side of the square bfloat16 matmul that stands for what the chip can do: 8192, on a CPU 512."""
    return 8192 if device.type == "cuda" else 512


def matmul_flops(device: torch.device) -> int:
    """Of one such matmul."""
    return int(2 * matmul_size(device) ** 3)


def _contestants(
    inputs: testing.Inputs, pass_: str, names: Sequence[str], device: torch.device, args: argparse.Namespace
) -> Iterator[Contestant]:
    side = matmul_size(device)
    generator = torch.Generator(device).manual_seed(0)
    a, b = (torch.randn(side, side, generator=generator, device=device, dtype=torch.bfloat16) for _ in range(2))
    yield Contestant(f"matmul {side}", "matmul", functools.partial(torch.matmul, a, b))
    others = [beside.load(checkout) for checkout in args.beside]
    packages = {"": slattn} | {f" of {package.__name__}": package for package in others}
    modes = {"": None} | ({", deterministic": True} if args.deterministic and pass_ == "bwd" else {})
    for name, (whose, package), (how, mode) in itertools.product(names, packages.items(), modes.items()):
        yield _made(name + whose + how, "backend", functools.partial(_backend_call, inputs, pass_, name, package, mode))
    for peer in PEERS if not args.no_peers else ():
        make = peer.make_forward if pass_ == "fwd" else peer.make_backward
        if make is None:
            continue
        if device.type == "cpu":
            yield Contestant(peer.name, "peer", None, note="needs a GPU")
            continue
        missing = peer.missing()
        if missing is None:
            yield _made(peer.name, "peer", functools.partial(make, inputs))
        else:
            yield Contestant(peer.name, "peer", None, note=f"cannot be imported: {missing}")


def _made(name: str, kind: str, make: Callable[[], Callable[[], object]]) -> Contestant:
    try:
        return Contestant(name, kind, make())
    except (backends.BackendRefusal, Unsuitable) as refusal:
        return Contestant(name, kind, None, note=f"refuses: {refusal}")
    except Exception as error:
        return Contestant(name, kind, None, note=describe(error))


def _backend_call(
    inputs: testing.Inputs, pass_: str, name: str, package: Any = slattn, deterministic: bool | None = None
) -> Callable[[], object]:
    """A call of a package's public functions. Raises BackendRefusal where the backend does not take these inputs."""
    tensors = (inputs.q, inputs.kv, inputs.indices)
    settings: dict[str, Any] = {
        "attn_sink": inputs.attn_sink,
        "topk_length": inputs.topk_length,
        "scale": inputs.scale,
        "d_v": inputs.d_v,
        "backend": name,
        "deterministic": deterministic,
    }
    package.select_backend(*tensors, **settings)

    @torch.no_grad()
    def forward() -> Any:
        return package.sparse_attention(*tensors, **settings, return_lse=True)

    if pass_ == "fwd":
        return forward
    out, lse = forward()
    return lambda: package.sparse_attention_backward(*tensors, out, lse, inputs.grad_out, **settings)


def _rows(shape: str, pass_: str, flops: int, of_matmul: int, contestants: Sequence[Contestant]) -> list[Row]:
    def tflops(contestant: Contestant, ms: float | None) -> float | None:
        if ms is None:
            return None
        return (of_matmul if contestant.kind == "matmul" else flops) / ms / 1e9

    matmul = next((tflops(c, c.ms) for c in contestants if c.kind == "matmul"), None)
    peers = [tflops(c, c.ms) for c in contestants if c.kind == "peer"]
    best = max((rate for rate in peers if rate is not None), default=None)
    rows = []
    for contestant in contestants:
        rate = tflops(contestant, contestant.ms)
        against_peer = best is not None and contestant.kind != "matmul"
        rows.append(
            Row(
                shape=shape,
                direction=pass_,
                name=contestant.name,
                kind=contestant.kind,
                ms=contestant.ms,
                burst_ms=contestant.burst_ms,
                tflops=rate,
                burst_tflops=tflops(contestant, contestant.burst_ms),
                of_matmul=rate / matmul if rate is not None and matmul else None,
                of_best_peer=rate / best if rate is not None and against_peer and best else None,
                note=contestant.note,
            )
        )
    return rows
