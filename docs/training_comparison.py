"""Trains the demo's model by a backend and by the reference, from the same weights and batches, and compares them.

python docs/training_comparison.py --steps 2000 --out out/comparison                      # on a GPU: tilelang
python docs/training_comparison.py --steps 20 --device cpu --backend reference            # whether it works
python docs/training_comparison.py --head-dim 512 --deterministic                         # two runs, bit for bit

What rounding alone does to a run is seen in a third one: the reference again, with each weight at first changed by
about one rounding to bfloat16. The backend's losses have to lie within twice that run's distance. Every hundred steps
the gradients of one batch, at the backend's weights, are compared: each weight's may be off by five times what a
nudge does to it, for the backend rounds in each layer. Writes comparison.json and comparison.png into --out; the exit
status is 1 where a loss or a gradient is not finite, or lies further away.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor

from slattn.demo import data
from slattn.demo.model import Config
from slattn.demo.train import Trainer, device_name

OVER = 50  # steps in a mean of losses
EVERY = 100  # steps between comparisons of gradients
ROUNDING = 2.0**-9  # relative, of bfloat16
COLOURS = {"backend": "#c2541b", "reference": "#2563a8", "nudged": "#8a8a8a"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--backend", default="tilelang")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--head-dim", type=int, default=64, help="the kernels' deterministic mode begins at 512")
    parser.add_argument("--deterministic", action="store_true", help="train twice instead: the same bits")
    parser.add_argument("--out", type=Path, default=Path("out/comparison"))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    if options.deterministic:
        return same_bits(options)
    report = compare(options)
    (options.out / "comparison.json").write_text(json.dumps(report, indent=1) + "\n")
    draw(report, options.out / "comparison.png")
    print(summary(report))
    return 0 if report["passed"] else 1


def trainer(options: argparse.Namespace, backend: str) -> Trainer:
    corpus = data.load()
    settings = argparse.Namespace(steps=options.steps, seed=options.seed, out=options.out, backend=backend)
    made = Trainer(
        Config(vocabulary=len(corpus.characters), head_dim=options.head_dim),
        corpus,
        settings,
        torch.device(options.device),
    )
    made.backend()  # a backend that cannot run says so
    return made


def compare(options: argparse.Namespace) -> dict[str, Any]:
    runs = {"backend": trainer(options, options.backend), "reference": trainer(options, "reference")}
    runs["nudged"] = trainer(options, "reference")
    nudge(runs["nudged"])
    scratch = trainer(options, "reference")
    gradients = []
    for step in range(options.steps):
        if step % EVERY == 0 or step == options.steps - 1:
            gradients.append({"step": step, **gradient_errors(runs["backend"], scratch)})
        for run in runs.values():
            run.one_step()
    losses = {name: run.history["train"] for name, run in runs.items()}
    apart = {name: distance(losses[name], losses["reference"]) for name in ("backend", "nudged")}
    finite = all(map(math.isfinite, [loss for run in losses.values() for loss in run]))
    finite = finite and all(math.isfinite(each["all"]) for each in gradients)
    return {
        "passed": finite and apart["backend"] <= 2 * apart["nudged"] and all(each["excess"] <= 5 for each in gradients),
        "finite": finite,
        "apart": apart,
        "held_out": {name: run.held_out_loss() for name, run in runs.items()},
        "gradients": gradients,
        "losses": losses,
        "steps": options.steps,
        "seed": options.seed,
        "backend": options.backend,
        "device": device_name(torch.device(options.device)),
        "torch": torch.__version__,
    }


def same_bits(options: argparse.Namespace) -> int:
    """Two runs in deterministic mode, and a third that stops half way and goes on from its checkpoint."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    runs = [trainer(options, options.backend) for _ in range(3)]
    for step in range(options.steps):
        if step == options.steps // 2:
            runs[2].save()
            runs[2] = trainer(options, options.backend)
            runs[2].restore()
        for run in runs:
            run.one_step()
    first, *others = ({**run.model.state_dict(), "losses": torch.tensor(run.history["train"])} for run in runs)
    differ = sorted({name for other in others for name in first if not torch.equal(first[name], other[name])})
    print(f"{options.steps} steps of {options.backend} twice, and once resumed: {differ or 'the same bits'}")
    return 1 if differ else 0


def nudge(run: Trainer) -> None:
    """Change each weight by about one rounding to bfloat16."""
    generator = torch.Generator(run.device).manual_seed(run.seed + 1)
    with torch.no_grad():
        for parameter in run.model.parameters():
            parameter *= 1 + ROUNDING * torch.randn(parameter.shape, generator=generator, device=run.device)


def gradient_errors(run: Trainer, scratch: Trainer) -> dict[str, Any]:
    """Relative errors of a batch's gradients against the reference's at the same weights, and of the worst weight's.

    Beside them those of the reference at nudged weights; excess is the worst weight's error over its nudged one.
    """
    scratch.model.load_state_dict(run.model.state_dict())
    scratch.step = run.step
    got, want = gradients_of(run), gradients_of(scratch)
    nudge(scratch)
    nudged = gradients_of(scratch)
    shares = {name: relative([got[name]], [want[name]]) for name in want}
    allowed = {name: relative([nudged[name]], [want[name]]) for name in want}
    excess = {name: share / max(allowed[name], 1e-12) for name, share in shares.items()}
    worst = max(excess, key=lambda name: excess[name])
    return {
        "excess": excess[worst],
        "all": relative(got.values(), want.values()),
        "nudged": relative(nudged.values(), want.values()),
        "norm": math.hypot(*(float(x.norm()) for x in want.values())),
        "worst": shares[worst],
        "worst_name": worst,
    }


def gradients_of(run: Trainer) -> dict[str, Tensor]:
    run.gradients()
    return {name: x.grad.clone() for name, x in run.model.named_parameters() if x.grad is not None}


def relative(got: Iterable[Tensor], want: Iterable[Tensor]) -> float:
    pairs = list(zip(got, want, strict=True))
    error = math.hypot(*(float((x - y).norm()) for x, y in pairs))
    return error / max(math.hypot(*(float(y.norm()) for _, y in pairs)), 1e-12)


def means(losses: list[float]) -> list[float]:
    total = torch.tensor(losses, dtype=torch.float64)
    if len(total) < 2 * OVER:
        return total.tolist()
    sums: Tensor = total.unfold(0, OVER, 1).mean(-1)
    return sums.tolist()


def distance(losses: list[float], reference: list[float]) -> float:
    """Root mean square of the difference of the running means, over the last half, where the runs have parted."""
    differences = [a - b for a, b in zip(means(losses), means(reference), strict=True)]
    half = differences[len(differences) // 2 :]
    return math.sqrt(sum(x * x for x in half) / len(half))


def draw(report: dict[str, Any], path: Path) -> None:
    figure = Figure(figsize=(9, 7), layout="constrained")
    losses, apart, gradients = figure.subplots(3, 1, sharex=True, height_ratios=(3, 1.4, 1.4))
    names = {"backend": report["backend"], "reference": "reference", "nudged": "reference, weights nudged"}
    reference = means(report["losses"]["reference"])
    first = report["steps"] - len(reference) + 1
    steps = range(first, first + len(reference))
    for name, label in names.items():
        curve = means(report["losses"][name])
        style = {"color": COLOURS[name], "linewidth": 2.6 if name == "reference" else 1.0}
        losses.plot(steps, curve, **style, label=f"{label}: held out {report['held_out'][name]:.4f}")
        if name != "reference":
            apart.plot(steps, [a - b for a, b in zip(curve, reference, strict=True)], **style)
    losses.set_ylabel(f"nats a character, mean of {OVER}")
    losses.legend(frameon=False)
    apart.set_ylabel("less the reference")
    at = [each["step"] for each in report["gradients"]]
    for name, label, style, colour in (
        ("all", "all", "o-", COLOURS["backend"]),
        ("worst", "the worst weight", "x-", COLOURS["backend"]),
        ("nudged", "all, weights nudged", "-", COLOURS["nudged"]),
    ):
        values = [max(each[name], 1e-8) for each in report["gradients"]]
        gradients.semilogy(at, values, style, label=label, color=colour)
    gradients.set_ylabel("gradients: relative error")
    gradients.set_xlabel(f"step; {report['device']}, torch {report['torch']}, seed {report['seed']}")
    gradients.legend(frameon=False)
    figure.savefig(path, dpi=110)


def summary(report: dict[str, Any]) -> str:
    largest, apart = max(report["gradients"], key=lambda each: each["all"]), report["apart"]
    return (
        f"{report['steps']} steps on {report['device']}: losses of {report['backend']} are {apart['backend']:.2g} from "
        f"the reference's, those of a nudged reference {apart['nudged']:.2g} (nats, root mean square).\n"
        f"Held out: {', '.join(f'{name} {loss:.4f}' for name, loss in report['held_out'].items())}.\n"
        f"Gradients differ by {largest['all']:.2g} at most (step {largest['step']}); a weight's by "
        f"{max(each['excess'] for each in report['gradients']):.2g} times what a nudge of the weights does to it.\n"
        f"{'Passed' if report['passed'] else 'FAILED'}: {'all finite' if report['finite'] else 'NOT FINITE'}."
    )


if __name__ == "__main__":
    sys.exit(main())
