"""How fast calls are at their own steady state, and how fast in a short burst.

A GPU at its power limit lowers its clock, so a number depends on what ran in the second before. Hence two figures:

- sustained: contestants take turns in blocks of at least `block` seconds, the first fifth of each block not counted,
  so that each is measured at the clock it settles to, and drift meets all alike; the median over rounds. Training is
  this case.
- burst: ten calls after a tenth of a second of light work, when the chip is cool; the median over rounds.

CUDA events measure on the GPU's own clock, and everything a call does stands between them: its allocations, small
kernels, and any gap in which the GPU waits for the host.
"""

from __future__ import annotations

import functools
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

BURST_CALLS = 10
REST = 0.1  # seconds of light work before a burst


@dataclass
class Contestant:
    """A call and what was measured of it, in milliseconds; `note` says why nothing was."""

    name: str
    kind: str  # "matmul", "backend" or "peer"
    call: Callable[[], object] | None
    note: str | None = None
    sustained: list[float] = field(default_factory=list)
    burst: list[float] = field(default_factory=list)
    estimate: float = 0.0  # of one call, from the last time it ran

    @property
    def ms(self) -> float | None:
        """Median of the rounds, sustained."""
        return statistics.median(self.sustained) if self.sustained else None

    @property
    def burst_ms(self) -> float | None:
        """Median of the rounds, burst."""
        return statistics.median(self.burst) if self.burst else None

    def give_up(self, note: str) -> None:
        """Stop measuring it and let go of the tensors that its call holds."""
        self.call, self.note = None, note
        self.sustained.clear()
        self.burst.clear()


class Clock:
    """Milliseconds on a device: CUDA events there, the process's clock on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.cuda = device.type == "cuda"
        self.light = torch.zeros(2**18, device=device)

    def mark(self) -> torch.cuda.Event | float:
        """A point in the device's stream of work."""
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def between(self, start: torch.cuda.Event | float, end: torch.cuda.Event | float) -> float:
        """Milliseconds from one mark to the other; waits for the later one."""
        if isinstance(start, float) or isinstance(end, float):
            return (float(end) - float(start)) * 1e3  # type: ignore[arg-type]
        end.synchronize()
        return float(start.elapsed_time(end))

    def run(self, call: Callable[[], object], calls: int) -> float:
        """Milliseconds for each of `calls` calls in a row."""
        start = self.mark()
        for _ in range(calls):
            call()
        return self.between(start, self.mark()) / calls

    def rest(self) -> None:
        """Let the chip cool under light work, which keeps its clock from idling."""
        if not self.cuda:
            return
        until = time.perf_counter() + REST
        while time.perf_counter() < until:
            self.light.add_(1.0)
            torch.cuda.synchronize(self.device)


def warm_up(contestants: Sequence[Contestant], clock: Clock, limit: float) -> None:
    """Call each once, for what it compiles, then twice more for an estimate.

    One that raises, or takes more than `limit` seconds a call when warm, gets a note and is left out.
    """
    for contestant in contestants:
        if contestant.call is None:
            continue
        try:
            clock.run(contestant.call, 1)
            contestant.estimate = clock.run(contestant.call, 1)
            if contestant.estimate > limit * 1e3:
                contestant.give_up(f"takes {contestant.estimate / 1e3:.1f} s a call, over the limit of {limit:g} s")
                continue
            contestant.estimate = clock.run(contestant.call, 2)
        except Exception as error:
            contestant.give_up(describe(error))
        if contestant.call is None and clock.cuda:
            torch.cuda.empty_cache()


def measure(
    contestants: Sequence[Contestant],
    clock: Clock,
    *,
    block: float,
    rounds: int,
    report: Callable[[str], None] = lambda what: None,
) -> None:
    """Fill in `sustained` and `burst` of every contestant that has a call, in alternating blocks."""
    for what, take in (("sustained", functools.partial(_block, block=block)), ("burst", _burst)):
        for _ in range(rounds):
            for contestant in contestants:
                if contestant.call is not None:
                    try:
                        getattr(contestant, what).append(take(contestant, contestant.call, clock))
                    except Exception as error:
                        contestant.give_up(describe(error))
                report(f"{contestant.name}, {what}")


def _block(contestant: Contestant, call: Callable[[], object], clock: Clock, *, block: float) -> float:
    """One block: calls for `block` seconds by the last estimate, the first fifth of them before the count begins.

    An estimate that was too high makes the block too short; then it is run again by what it gave.
    """
    for _ in range(3):
        calls = max(5, math.ceil(block * 1e3 / max(contestant.estimate, 1e-3)))
        uncounted = math.ceil(calls / 5)
        settling = clock.run(call, uncounted)
        contestant.estimate = clock.run(call, calls - uncounted)
        if settling * uncounted + contestant.estimate * (calls - uncounted) >= block * 0.95e3:
            break
    return contestant.estimate


def _burst(contestant: Contestant, call: Callable[[], object], clock: Clock) -> float:
    clock.rest()
    return clock.run(call, BURST_CALLS)


def describe(error: BaseException) -> str:
    """An exception in a line."""
    if isinstance(error, torch.OutOfMemoryError):
        return "out of memory"
    first = next(iter(str(error).splitlines()), "")
    return f"{type(error).__name__}: {first}"[:200]
