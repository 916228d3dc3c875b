"""The picture of `slattn scale`: a column for each model, the wire's share above and the memory below."""

from __future__ import annotations

from collections.abc import Sequence

from slattn.commands.scale import GIB, Model, costs

_COLOURS = ("#9fd0ec", "#4fa3d1", "#1b6ca8", "#0b3c5d")


def plot(models: Sequence[Model], tokens: Sequence[int], gpus: Sequence[int], path: str) -> None:
    """Write it; the name's ending says of which kind."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(3.2 * len(models) + 0.6, 5.6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(2, len(models), sharex=True, sharey="row", squeeze=False)
    for column, model in enumerate(models):
        for length, colour in zip(tokens, _COLOURS * len(tokens), strict=False):
            cells = [costs(model, length, count) for count in gpus]
            shares = [100 * cell.wire / cell.step for cell in cells]
            axes[0][column].plot(gpus, shares, "o-", color=colour, label=f"{length // 1024}k", markersize=3)
            axes[1][column].plot(gpus, [cell.peak_bytes / GIB for cell in cells], "o-", color=colour, markersize=3)
        axes[0][column].set_title(model.name, fontsize=10)
        axes[1][column].set(xlabel="GPUs that share a text", xscale="log", yscale="log")
        axes[1][column].set_xticks(gpus, [str(count) for count in gpus], fontsize=8)
        axes[1][column].minorticks_off()
    axes[0][0].set(ylabel="wire's share of the step, %", ylim=(0, 100))
    axes[1][0].set(ylabel="peak of a layer, GiB a GPU")
    for panel in axes.flat:
        panel.grid(alpha=0.25)
        panel.spines[["top", "right"]].set_visible(False)
    axes[0][0].legend(title="tokens", fontsize=8, title_fontsize=8, frameon=False)
    figure.suptitle("slattn scale: a model; its link rates are assumed", fontsize=9, color="#555555")
    figure.savefig(path, dpi=110)
