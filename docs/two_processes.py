"""Draws two_processes.png: the demo's losses in one process and in two, out of their demo.json.

python docs/two_processes.py one/demo.json two/demo.json docs/two_processes.png
"""

import json
import sys
from pathlib import Path

from matplotlib.figure import Figure

one, two = (json.loads(Path(path).read_text()) for path in sys.argv[1:3])
figure = Figure(figsize=(9, 4.6), layout="constrained")
losses, apart = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
for run, name, style in (
    (one, "one process", {"color": "#c2541b", "linewidth": 3.2, "alpha": 0.45}),
    (two, "two processes", {"color": "#2563a8", "linewidth": 0.9}),
):
    for curve, label in (("train", "training, mean of 20 steps"), ("indexer", "indexers, mean of 20 steps")):
        values = run["history"][curve]
        means = [sum(values[max(0, n - 20) : n]) / min(n, 20) for n in range(1, len(values) + 1)]
        losses.plot(range(1, len(values) + 1), means, **style, label=f"{label}: {name}")
    losses.plot(
        *zip(*run["history"]["held_out"], strict=True),
        "o" if run is one else "x",
        color=style["color"],
        markersize=7 if run is one else 5,
        label=f"held out: {name}",
    )
apart.plot(
    range(1, len(one["history"]["train"]) + 1),
    [b - a for a, b in zip(one["history"]["train"], two["history"]["train"], strict=True)],
    color="#22262b",
    linewidth=0.7,
)
losses.set(ylabel="nats a character")
losses.legend(frameon=False, fontsize=8, ncols=2)
apart.set(ylabel="difference,\ntraining", xlabel="step", xlim=(0, len(one["history"]["train"])))
for axes in (losses, apart):
    axes.grid(alpha=0.2)
    axes.spines[["top", "right"]].set_visible(False)
figure.savefig(sys.argv[3], dpi=100)
