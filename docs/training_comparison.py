"""Trains the demo's model by a backend and by the reference, from the same weights and batches, and compares them.

python docs/training_comparison.py --steps 2000 --out out/comparison                      # on a GPU: tilelang
python docs/training_comparison.py --steps 20 --device cpu --backend reference            # whether it works
python docs/training_comparison.py --from out/comparison/training.json --out docs         # draws it elsewhere

Eight runs, a process each, spread over the GPUs there are:

    backend         every hundred steps also the gradients of a batch, against the reference's at the same weights
    reference
    nudged 1 to 4   the reference again, each weight at first changed by about one rounding to bfloat16, four ways: what
                    rounding alone does to a run
    deterministic   the backend in deterministic mode
    resumed         the same, stopped half way and gone on with from its checkpoint by a new trainer

The backend's losses, in either mode, may be twice as far from the reference's as those two of the reference's five
runs that are furthest apart; each weight's gradient five times as far as a nudge moves it, for the backend rounds in
each layer; the last two runs have to end in the same bits. Writes training.json and training.png into --out; the exit
status is 1 where something is not finite, lies further away, differs, or is not complete for --seconds.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import itertools
import json
import math
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slattn.commands.edge import quiet_tilelang
from slattn.demo import data
from slattn.demo.model import Config
from slattn.demo.train import Trainer, device_name

OVER = 50  # steps in a mean of losses
EVERY = 100  # steps between comparisons of gradients
ROUNDING = 2.0**-9  # relative, of bfloat16
COLOURS = {"backend": "#c2541b", "deterministic": "#d89a3a", "reference": "#2563a8", "nudged": "#8a8a8a"}
NUDGED = tuple(f"nudged {number}" for number in (1, 2, 3, 4))
RUNS = ("backend", "reference", *NUDGED, "deterministic", "resumed")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--backend", default="tilelang")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=math.inf, help="when a run that is not done stops")
    parser.add_argument("--jobs", type=int, default=len(RUNS), help="runs at once (default: all)")
    parser.add_argument("--out", type=Path, default=Path("out/comparison"))
    parser.add_argument("--from", dest="saved", type=Path, help="draw this comparison.json and train nothing")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    if options.saved:
        report = json.loads(options.saved.read_text())
    else:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # deterministic products
        with ProcessPoolExecutor(options.jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
            jobs = {name: pool.submit(train, options, name) for name in RUNS}
            report = compared(options, {name: job.result() for name, job in jobs.items()})
        (options.out / "training.json").write_text(json.dumps(report, indent=1) + "\n")
    print(summary(report))
    try:
        draw(report, options.out / "training.png")
    except ModuleNotFoundError as error:
        print(f"No picture: {error}. --from {options.out / 'training.json'} draws it where that is installed.")
    return 0 if report["passed"] else 1


def trainer(options: argparse.Namespace, name: str, backend: str, folder: str = ".") -> Trainer:
    """`folder`: where its checkpoint goes."""
    corpus, device = data.load(), options.device
    if device == "cuda" and name in RUNS:
        device = f"cuda:{RUNS.index(name) % torch.cuda.device_count()}"
    made = Trainer(
        Config(vocabulary=len(corpus.characters), heads=options.heads, head_dim=options.head_dim),
        corpus,
        argparse.Namespace(steps=options.steps, seed=options.seed, out=Path(folder), backend=backend),
        torch.device(device),
    )
    made.backend()  # a backend that cannot run says so
    return made


def train(options: argparse.Namespace, name: str) -> dict[str, Any]:
    """One run: its losses, seconds and held-out loss, hashes of its last weights, errors of gradients."""
    if options.device.startswith("cuda"):
        quiet_tilelang()
    else:
        torch.set_num_threads(1)  # runs side by side have the cores already
    exact = name in ("deterministic", "resumed")
    with deterministic() if exact else contextlib.nullcontext():
        return trained(options, name, "reference" if name in ("reference", *NUDGED) else options.backend)


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # a launch more for each tensor that is made
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def trained(options: argparse.Namespace, name: str, backend: str) -> dict[str, Any]:
    run = trainer(options, name, backend)
    scratch = trainer(options, name, "reference") if name == "backend" else None
    if name in NUDGED:
        nudge(run, 1 + NUDGED.index(name))
    gradients, begun = [], time.monotonic()
    while run.step < options.steps and time.monotonic() - begun < options.seconds:
        if scratch is not None and (run.step % EVERY == 0 or run.step == options.steps - 1):
            gradients.append({"step": run.step, **gradient_errors(run, scratch)})
        if name == "resumed" and run.step == options.steps // 2:
            with tempfile.TemporaryDirectory() as folder:
                run.checkpoint = Path(folder) / run.checkpoint.name
                run.save()
                run = trainer(options, name, backend, folder)
                run.restore()
        run.one_step()
        if run.step % 200 == 0:
            print(f"{name}: {run.step} steps, {time.monotonic() - begun:.0f} s", file=sys.stderr, flush=True)
    return {
        "losses": run.history["train"],
        "seconds": round(time.monotonic() - begun, 1),
        "held_out": run.held_out_loss(),
        "weights": {key: digest(value) for key, value in run.model.state_dict().items()},
        "gradients": gradients,
        "device": device_name(run.device),
    }


def digest(x: Tensor) -> str:
    return hashlib.sha256(x.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


def compared(options: argparse.Namespace, runs: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """What comparison.json holds, from what `train` gave for each of RUNS."""
    steps = min(len(run["losses"]) for run in runs.values())
    losses = {name: run["losses"][:steps] for name, run in runs.items()}
    gradients = runs["backend"]["gradients"]
    apart = {name: distance(losses[name], losses["reference"]) for name in ("backend", "deterministic")}
    alike = itertools.combinations(("reference", *NUDGED), 2)
    apart["nudged"] = max(distance(losses[name], losses[other]) for name, other in alike)
    finite = all(math.isfinite(loss) for run in losses.values() for loss in run)
    finite = finite and all(math.isfinite(each["all"]) for each in gradients)
    once, again = runs["deterministic"], runs["resumed"]
    differ = [name for name, bits in once["weights"].items() if bits != again["weights"][name]]
    differ += ["losses"] * (once["losses"] != again["losses"])
    near = all(apart[name] <= 2 * apart["nudged"] for name in apart) and all(each["excess"] <= 5 for each in gradients)
    complete = steps == options.steps
    return {
        "passed": finite and near and complete and not differ,
        "finite": finite,
        "complete": complete,
        "differ": differ,
        "apart": apart,
        "held_out": {name: run["held_out"] for name, run in runs.items()},
        "seconds": {name: run["seconds"] for name, run in runs.items()},
        "gradients": gradients,
        "losses": losses,
        "steps": steps,
        "seed": options.seed,
        "heads": options.heads,
        "head_dim": options.head_dim,
        "backend": options.backend,
        "device": runs["backend"]["device"],
        "torch": torch.__version__,
    }


def nudge(run: Trainer, number: int = 1) -> None:
    """Change each weight by about one rounding to bfloat16; each number another way."""
    generator = torch.Generator(run.device).manual_seed(run.seed + number)
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
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 7), layout="constrained")
    losses, apart, gradients = figure.subplots(3, 1, sharex=True, height_ratios=(3, 1.4, 1.4))
    names = {"backend": report["backend"], "deterministic": f"{report['backend']}, deterministic"}
    names |= {"reference": "reference", **{name: f"reference, weights {name}" for name in NUDGED}}
    reference = means(report["losses"]["reference"])
    first = report["steps"] - len(reference) + 1
    steps = range(first, first + len(reference))
    for name, label in names.items():
        curve = means(report["losses"][name])
        style = {"color": COLOURS[name.partition(" ")[0]], "linewidth": 2.6 if name == "reference" else 1.0}
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
    apart, worst = report["apart"], max(report["gradients"], key=lambda each: each["all"])
    excess = max(each["excess"] for each in report["gradients"])
    trained = sum(report["seconds"].values())
    return (
        f"{report['steps']} steps on {report['device']}, {report['heads']} heads of {report['head_dim']}: losses of "
        f"{report['backend']} are {apart['backend']:.2g} and, deterministic, {apart['deterministic']:.2g} from the "
        f"reference's, nudged references' up to {apart['nudged']:.2g} from one another (nats, root mean square).\n"
        f"Held out: {', '.join(f'{name} {loss:.4f}' for name, loss in report['held_out'].items())}.\n"
        f"Gradients of {len(report['gradients'])} batches differ by {worst['all']:.2g} at most (step {worst['step']}); "
        f"a weight's by {excess:.2g} times what a nudge of the weights does to it.\n"
        f"Deterministic and resumed: {', '.join(report['differ']) or 'the same bits'}.\n"
        f"{trained:.0f} s of training in {len(report['seconds'])} runs: "
        f"{', '.join(f'{name} {seconds:.0f}' for name, seconds in report['seconds'].items())}.\n"
        f"{'Passed' if report['passed'] else 'FAILED'}: {'all finite' if report['finite'] else 'NOT FINITE'}"
        f"{'' if report['complete'] else ', CUT SHORT'}."
    )


if __name__ == "__main__":
    sys.exit(main())
