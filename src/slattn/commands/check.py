"""`slattn check`: every willing backend against the float64 reference, over the shared list of special cases.

On a CPU the one backend is the reference itself, checked in bfloat16 and in float32 against float64.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch

from slattn import backends, testing
from slattn.commands import edge
from slattn.commands.progress import Progress

# Relative error of the float32 reference against float64. Logits of -120 that cancel in ds (values-negative) reach 4e-5
# in dq, everything else is below 1e-6.
FLOAT32_BUDGET = 1e-4


@dataclass
class Report:
    """What one backend did with the cases: its rows, and the cases it refused with the reason."""

    backend: str
    rows: list[testing.Row] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)
    crashed: dict[str, str] = field(default_factory=dict)

    @property
    def failures(self) -> int:
        """How many rows are over their budget, and cases that raised."""
        return sum(not row.passed for row in self.rows) + len(self.crashed)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument(
        "--backend",
        choices=tuple(backends.MODULES),
        action="append",
        help="check this one (may be given more than once); default: all that run here",
    )
    parser.add_argument("--device", help="default: cuda where there is one, otherwise cpu")
    parser.add_argument("--seed", type=edge.seed, default=0, help="of the inputs (default 0)")
    parser.add_argument("--case", default="", metavar="TEXT", help="only the cases whose name contains TEXT")
    parser.add_argument("--verbose", action="store_true", help="a line for each tensor of each case, not the worst")


def main(args: argparse.Namespace) -> int:
    """Check and print; 1 if anything is over its budget, raised, or if nothing ran.

    Raises:
        UsageError: a device that is not here, a name that no case has.
    """
    found = edge.usable_device(args.device)
    device = str(found)
    cases = [case for case in testing.CASES if args.case in case.name]
    if not cases:
        raise edge.UsageError(
            f"--case {args.case}: no case has that in its name; names are like {testing.CASES[0].name}"
        )
    if found.type == "cuda":
        edge.quiet_tilelang()
    names = args.backend or list(backends.MODULES)
    jobs: list[tuple[str, Runner]] = [(name, _runner(name, device)) for name in names]
    if found.type == "cpu" and "reference" in names:
        jobs.append(("reference, in float32", lambda case, seed: check_float32(case, device, seed)))
    with Progress(len(jobs) * len(cases)) as progress:
        reports = [run_cases(name, run, cases, args.seed, progress) for name, run in jobs]
    for report in reports:
        print(text(report, verbose=args.verbose))
    ran = [report for report in reports if report.rows or report.crashed]
    failures = sum(report.failures for report in ran)
    named_in_vain = bool(args.backend) and len(ran) < len(reports)
    tensors = sum(len(report.rows) for report in ran)
    print(f"ran on {device}: {'; '.join(report.backend for report in ran) or 'none'}")
    print(f"{tensors} tensors, {failures} over budget or failed")
    return 1 if failures or not ran or named_in_vain else 0


Runner = Callable[[testing.Case, int], list[testing.Row]]


def _runner(backend: str, device: str) -> Runner:
    return lambda case, seed: testing.check(case, backend, device, seed)


def run_backend(backend: str, device: str, cases: Sequence[testing.Case], seed: int, progress: Progress) -> Report:
    """The cases on one backend."""
    return run_cases(backend, _runner(backend, device), cases, seed, progress)


def run_cases(
    name: str, run: Runner, cases: Iterable[testing.Case], seed: int, progress: Progress | None = None
) -> Report:
    """Collect the rows of `run` over the cases. A refusal is noted; any other exception is a failure of its case."""
    report = Report(name)
    for case in cases:
        if progress is not None:
            progress.show(f"{name}: {case.name}")
        try:
            report.rows += run(case, seed)
        except backends.BackendRefusal as refusal:
            report.refused[case.name] = str(refusal)
        except Exception as error:
            report.crashed[case.name] = f"{type(error).__name__}: {error}"
        if progress is not None:
            progress.step(f"{name}: {case.name}")
    return report


def check_float32(case: testing.Case, device: str, seed: int) -> list[testing.Row]:
    """The reference in float32 against itself in float64, on the same bfloat16 values."""
    inputs = testing.make_inputs(case, device, dtype=torch.float32, seed=seed)
    got, want = testing.run(inputs, "reference"), testing.oracle(inputs)
    rows = []
    for tensor in testing.BUDGETS:
        value, truth = getattr(got, tensor), getattr(want, tensor)
        if value is None or truth is None:
            continue
        error = testing.relative_error(value, truth)
        # A sink that came in as bfloat16 gives a gradient of bfloat16: one rounding, 2**-9 at most.
        budget = FLOAT32_BUDGET if value.dtype == torch.float32 else 2.0**-8
        rows.append(testing.Row(case.name, tensor, error, budget, error <= budget))
    return rows


def text(report: Report, *, verbose: bool) -> str:
    """A table of error against budget. Without `verbose`, per tensor only the case nearest its budget, and failures."""
    lines = [f"{report.backend}"]
    shown = report.rows if verbose else _worst(report.rows) + [row for row in report.rows if not row.passed]
    shown = list(dict.fromkeys(shown))
    if shown:
        width = max(len(row.case) for row in shown)
        lines.append(f"  {'case':<{width}}  tensor     error    budget  of budget")
        lines += [_line(row, width) for row in shown]
    if report.rows or report.crashed:
        cases = len({row.case for row in report.rows}) + len(report.crashed)
        lines.append(f"  {cases} cases, {report.failures} failures")
    lines += _by_reason("FAILED", report.crashed) + _by_reason("refused", report.refused)
    return "\n".join(lines) + "\n"


def _by_reason(verb: str, reasons: dict[str, str]) -> list[str]:
    """One line for each reason, with how many cases it met and the first three of them."""
    names: dict[str, list[str]] = {}
    for case, why in reasons.items():
        names.setdefault(why, []).append(case)
    return [
        f"  {verb} {len(cases)} ({', '.join(cases[:3])}{', ...' if len(cases) > 3 else ''}): {why}"
        for why, cases in names.items()
    ]


def _worst(rows: list[testing.Row]) -> list[testing.Row]:
    worst: dict[str, testing.Row] = {}
    for row in rows:
        if row.tensor not in worst or row.error / row.budget > worst[row.tensor].error / worst[row.tensor].budget:
            worst[row.tensor] = row
    return list(worst.values())


def _line(row: testing.Row, width: int) -> str:
    share = row.error / row.budget if row.budget else (0.0 if row.error == 0.0 else math.inf)
    verdict = "" if row.passed else "  FAILED"
    return f"  {row.case:<{width}}  {row.tensor:<6} {row.error:>9.2e} {row.budget:>9.2e}  {share:>8.0%}{verdict}"
