"""The rows of a bench as bars: a panel for forward and one for backward, a group of bars for each shape."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slattn.commands.tables import Row

_TITLES = {"fwd": "Forward", "bwd": "Backward"}
# This library's backends in one family of colours, the peers in greys: who is who is seen before it is read.
_OURS = ("#1b6ca8", "#4fa3d1", "#9fd0ec")
_PEERS = ("#555555", "#8c8c8c", "#bdbdbd")


def plot(rows: Sequence[Row], path: str, *, title: str) -> None:
    """Write a PNG of sustained TFLOPS; the matmul of the same blocks is the line over each group."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    passes = [pass_ for pass_ in _TITLES if any(row.direction == pass_ for row in rows)]
    shapes = list(dict.fromkeys(row.shape for row in rows))
    contestants = list(dict.fromkeys((row.kind, row.name) for row in rows if row.kind != "matmul"))
    colours = _colours(contestants)
    figure = Figure(figsize=(max(5.0, 1.6 * len(shapes) + 1.5), 3.4 * len(passes) + 0.6), layout="constrained")
    FigureCanvasAgg(figure)
    for place, pass_ in enumerate(passes):
        axes = figure.add_subplot(len(passes), 1, place + 1)
        _panel(axes, [row for row in rows if row.direction == pass_], shapes, contestants, colours)
        axes.set_title(_TITLES[pass_], loc="left", fontsize=11)
        axes.set_ylabel("TFLOPS, sustained")
    handles, labels = figure.axes[0].get_legend_handles_labels()
    for axes in figure.axes[1:]:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            if label not in labels:
                handles.append(handle)
                labels.append(label)
    figure.legend(handles, labels, loc="outside lower center", ncols=min(3, max(1, len(labels))), frameon=False)
    figure.suptitle(title, fontsize=9, color="#555555")
    figure.savefig(path, dpi=150)


def _colours(contestants: Sequence[tuple[str, str]]) -> dict[tuple[str, str], str]:
    counts = {"backend": 0, "peer": 0}
    colours = {}
    for kind, name in contestants:
        family = _OURS if kind == "backend" else _PEERS
        colours[kind, name] = family[counts[kind] % len(family)]
        counts[kind] += 1
    return colours


def _panel(
    axes: Any,
    rows: Sequence[Row],
    shapes: Sequence[str],
    contestants: Sequence[tuple[str, str]],
    colours: dict[tuple[str, str], str],
) -> None:
    """The bars of one pass, packed in each group: a contestant that was not measured leaves no hole."""
    labelled: set[tuple[str, str]] = set()
    for group, shape in enumerate(shapes):
        here = {(row.kind, row.name): row for row in rows if row.shape == shape and row.tflops is not None}
        present = [contestant for contestant in contestants if contestant in here]
        width = 0.8 / max(len(present), 3)
        for position, contestant in enumerate(present):
            rate = here[contestant].tflops or 0.0
            x = group + (position - (len(present) - 1) / 2) * width
            label = None if contestant in labelled else contestant[1]
            labelled.add(contestant)
            axes.bar(x, rate, width * 0.94, color=colours[contestant], label=label)
            axes.annotate(
                f"{rate:.0f}" if rate >= 10 else f"{rate:.2g}", (x, rate), ha="center", va="bottom", fontsize=7
            )
        matmul = next((row.tflops for (kind, _), row in here.items() if kind == "matmul"), None)
        if matmul is not None:
            label = None if ("matmul", "") in labelled else "matmul in the same blocks"
            labelled.add(("matmul", ""))
            axes.hlines(
                matmul, group - 0.42, group + 0.42, color="#c44e52", linestyles="dashed", linewidth=1.2, label=label
            )
    axes.set_xticks(range(len(shapes)), shapes)
    axes.set_xlim(-0.6, len(shapes) - 0.4)
    axes.margins(y=0.12)
    axes.spines[["top", "right"]].set_visible(False)
