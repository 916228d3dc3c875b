"""A progress bar on stderr that needs nothing installed and stays out of logs."""

from __future__ import annotations

import shutil
import sys
import time
from types import TracebackType

_WIDTH = 24
_LOG_EVERY = 10.0  # seconds between lines where stderr is no terminal


class Progress:
    """`with Progress(total) as progress: progress.step("what was done")`; one line, redrawn; erased at the end.

    Where stderr is no terminal it writes a line at most every ten seconds, so that a long run shows that it lives.
    """

    def __init__(self, total: int) -> None:
        self.total = max(total, 1)
        self.done = 0
        self.start = self.last = time.monotonic()
        self.terminal = sys.stderr is not None and sys.stderr.isatty()

    def step(self, what: str) -> None:
        """One more of the total is done; `what` stands beside the bar."""
        self.done += 1
        self.show(what)

    def show(self, what: str) -> None:
        """Redraw with `what` beside the bar."""
        now = time.monotonic()
        elapsed = now - self.start
        filled = min(_WIDTH, _WIDTH * self.done // self.total)
        left = elapsed / self.done * (self.total - self.done) if self.done else 0.0
        line = f"[{'#' * filled}{'.' * (_WIDTH - filled)}] {self.done}/{self.total}, {elapsed:.0f} s"
        line += f", {left:.0f} s left" if left >= 1 else ""
        if self.terminal:
            room = shutil.get_terminal_size().columns - 1
            sys.stderr.write("\r\033[K" + f"{line}  {what}"[:room])
            sys.stderr.flush()
        elif sys.stderr is not None and now - self.last >= _LOG_EVERY:
            self.last = now
            print(f"{line}  {what}", file=sys.stderr, flush=True)

    def clear(self) -> None:
        """Erase the bar, before something else is printed."""
        if self.terminal:
            sys.stderr.write("\r\033[K")
            sys.stderr.flush()

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.clear()
