"""What a bench measured, as rows, and the rows as text: for a terminal, and as the README's table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

PASSES = {"fwd": "forward", "bwd": "backward"}


@dataclass(frozen=True)
class Row:
    """One line of the table, and one object of the JSON file. Figures are None where `note` says why."""

    shape: str
    direction: str  # "fwd" or "bwd"
    name: str
    kind: str  # "matmul", "backend" or "peer"
    ms: float | None
    burst_ms: float | None
    tflops: float | None
    burst_tflops: float | None
    of_matmul: float | None  # share of the matmul's TFLOPS in the same blocks
    of_best_peer: float | None  # TFLOPS over the best peer's
    note: str | None

    def __post_init__(self) -> None:
        """Raises TypeError or ValueError where it is no row, but what somebody wrote into a file."""
        figures = (self.ms, self.burst_ms, self.tflops, self.burst_tflops, self.of_matmul, self.of_best_peer)
        if not all(x is None or isinstance(x, (int, float)) for x in figures):
            raise TypeError(f"figures must be numbers or None; got {figures}")
        if self.kind not in ("matmul", "backend", "peer") or self.direction not in PASSES:
            raise ValueError(f"no such kind or direction: {self.kind!r}, {self.direction!r}")


def table(rows: Sequence[Row]) -> str:
    """The rows for people: sustained figures first, burst beside them."""
    width = max([len("contestant"), *(len(row.name) for row in rows)])
    lines = []
    group = None
    for row in rows:
        if group != (row.shape, row.direction):
            group = (row.shape, row.direction)
            lines += [
                "",
                f"{row.shape}, {PASSES[row.direction]}",
                f"  {'contestant':<{width}}  {'ms':>9} {'TFLOPS':>7}  {'of matmul':>9}  {'of best peer':>12}"
                f"  {'burst ms':>9} {'TFLOPS':>7}",
            ]
        if row.ms is None:
            lines.append(f"  {row.name:<{width}}  {row.note}")
            continue
        lines.append(
            f"  {row.name:<{width}}  {row.ms:>9.3f} {_number(row.tflops)}  {_share(row.of_matmul, 9, '.0%')}"
            f"  {_share(row.of_best_peer, 12, '.2f')}  {_share(row.burst_ms, 9, '.3f')} {_number(row.burst_tflops)}"
        )
    return "\n".join(lines[1:]) + "\n"


def _number(rate: float | None) -> str:
    """TFLOPS in seven columns; a CPU's are small."""
    return f"{'':>7}" if rate is None else f"{rate:>7.0f}" if rate >= 10 else f"{rate:>7.2g}"


def _share(value: float | None, width: int, form: str) -> str:
    return f"{'':>{width}}" if value is None else f"{value:>{width}{form}}"


def markdown(rows: Sequence[Row]) -> str:
    """A Markdown table with a line for each shape and pass: milliseconds and TFLOPS, sustained, best in bold."""
    names = list(dict.fromkeys(row.name for row in rows if row.kind != "matmul"))
    lines = [f"| | {' | '.join(names)} | matmul |", f"|---{'|---' * len(names)}|---|"]
    for shape, pass_ in dict.fromkeys((row.shape, row.direction) for row in rows):
        here = {row.name: row for row in rows if (row.shape, row.direction) == (shape, pass_)}
        best = min((row.ms for row in here.values() if row.ms is not None and row.kind != "matmul"), default=None)
        cells = [_cell(here.get(name), best) for name in names]
        matmul = next((row.tflops for row in here.values() if row.kind == "matmul"), None)
        lines.append(f"| {shape}, {PASSES[pass_]} | {' | '.join(cells)} | {_number(matmul).strip()} |")
    return "\n".join(lines)


def _cell(row: Row | None, best: float | None) -> str:
    if row is None or row.ms is None:
        return ""
    rate = _number(row.tflops).strip()
    return f"{row.ms:.3f} ms, {f'**{rate}**' if row.ms == best else rate}"
