"""The picture of `slattn demo`: the losses, and which keys the queries chose."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib
import torch
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap, LogNorm
from matplotlib.figure import Figure
from torch import Tensor

from slattn.demo.model import Config, Trace

INK, SOFT, UNSEEN, BLUE, RUST = "#22262b", "#8a929b", "#eceef1", "#2563a8", "#c2541b"
LEAST = 1e-3  # the probability at which the colours of the maps begin


def draw(path: Path, config: Config, figures: dict[str, Any], text: str, trace: Trace) -> None:
    """Write the PNG: losses by step on the left; on the right the raw and the pooled keys that one text's queries see.

    Args:
        figures: those of demo.json.
        text: the characters whose choice is shown.
        trace: of each layer, `indices` `[1, S, K]` and probabilities `[1, S, K]` (see `Attention.forward`).
    """
    layer = most_pooled(config, trace)
    raw, pooled = maps(config, *(x[0] for x in trace[layer]))
    with matplotlib.rc_context({"font.size": 10, "axes.edgecolor": SOFT, "text.color": INK, "axes.labelcolor": INK}):
        figure = Figure(figsize=(15, 5.8), layout="constrained")
        losses, left, right = figure.subplots(1, 3, width_ratios=(1.05, 1, 1))
        draw_losses(losses, figures)
        title = f"Raw keys: the last {config.window} characters"
        draw_map(left, raw, "Blues", title, "key position", "probability (mean over heads)")
        title = f"Pooled keys: the best {config.topk} of up to {pooled.shape[1]}"
        note = f"grey: complete, but not chosen\na pooled key is {config.block} characters"
        draw_map(right, pooled, "Oranges", title, "pooled key", "probability (mean over heads)", note)
        left.set_ylabel("query position")
        figure.suptitle(
            f"slattn demo: {figures['parameters']:,} parameters, {figures['steps']} steps, "
            f"backend {figures['backend']} on {figures['device_name']}; the maps show layer {layer + 1} of "
            f"{config.layers}",
            fontsize=11,
        )
        figure.savefig(path, dpi=120, format="png")


def most_pooled(config: Config, trace: Trace) -> int:
    """The layer whose queries give their pooled keys the most probability: the one worth showing."""
    return max(range(len(trace)), key=lambda layer: trace[layer][1][..., config.window :].sum().item())


def maps(config: Config, indices: Tensor, probabilities: Tensor) -> tuple[Tensor, Tensor]:
    """Probability by query and key: of raw keys `[S, S]` and of pooled ones `[S, P]`.

    NaN where the query may not see the key, 0 where it may see the key and did not choose it.
    """
    length = len(indices)
    blocks = length // config.block
    # One more column takes the slots that name nothing.
    shares = torch.zeros(length, length + blocks + 1)
    named = torch.where(indices < 0, length + blocks, indices).long()
    shares.scatter_(1, named, probabilities)
    query = torch.arange(length)[:, None]
    age = query - torch.arange(length)
    raw = shares[:, :length].masked_fill((age < 0) | (age >= config.window), torch.nan)
    complete = torch.arange(blocks) < (query + 1) // config.block
    return raw, shares[:, length:-1].masked_fill(~complete, torch.nan)


def draw_losses(axes: Axes, figures: dict[str, Any]) -> None:
    """Loss of each training step, its running mean, the held-out loss, and the unigram entropy as a line to beat."""
    train, held_out = figures["history"]["train"], figures["history"]["held_out"]
    step = range(1, len(train) + 1)
    axes.plot(step, train, color=BLUE, alpha=0.25, linewidth=0.8)
    axes.plot(step, running_mean(train, max(1, len(train) // 25)), color=BLUE, label="training")
    axes.plot(*zip(*held_out, strict=True), "o-", color=RUST, markersize=4, label="held out")
    axes.axhline(figures["unigram_entropy"], color=SOFT, linestyle="--", linewidth=1)
    axes.annotate(
        f"unigram entropy {figures['unigram_entropy']:.2f}",
        (1, figures["unigram_entropy"]),
        xycoords=("axes fraction", "data"),
        xytext=(-4, 4),
        textcoords="offset points",
        ha="right",
        color=SOFT,
    )
    axes.annotate(
        f"{held_out[-1][1]:.2f}", held_out[-1], xytext=(0, 8), textcoords="offset points", ha="center", color=RUST
    )
    axes.set(xlabel="step", ylabel="nats a character", title="Loss", xlim=(0, None))
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.2)
    axes.legend(frameon=False, loc="upper right")


def draw_map(axes: Axes, shares: Tensor, colours: str, title: str, label: str, scale: str, note: str = "") -> None:
    """One map: white where a key is not to be seen, grey where it was not chosen, colour by probability."""
    options: dict[str, Any] = {"extent": (0, shares.shape[1], len(shares), 0), "interpolation": "nearest"}
    unseen = torch.where(shares.isnan(), torch.nan, 0.0)
    axes.imshow(unseen.tolist(), cmap=ListedColormap([UNSEEN]), aspect="auto", **options)
    chosen = torch.where(shares > 0, shares.clamp_min(LEAST), torch.nan)
    image = axes.imshow(chosen.tolist(), cmap=colours, norm=LogNorm(LEAST, 1), aspect="auto", **options)
    axes.set(title=title, xlabel=label)
    axes.spines[["top", "right"]].set_visible(False)
    axes.text(0.98, 0.97, note, transform=axes.transAxes, ha="right", va="top", color=SOFT)
    axes.figure.colorbar(image, ax=axes, location="bottom", shrink=0.9, aspect=40, pad=0.02, label=scale)


def running_mean(values: list[float], over: int) -> list[float]:
    """At each step the mean of the last `over` values."""
    return [sum(values[max(0, n - over) : n]) / min(n, over) for n in range(1, len(values) + 1)]
