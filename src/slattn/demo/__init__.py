"""`slattn demo`: train a small DeepSeek-V4-style language model on real text, with this library as its attention.

data.py     the text, its held-out part, its batches
model.py    the decoder; how it calls `slattn.sparse_attention` is the part to read
train.py    the loop, checkpoints, figures
parallel.py the same over several processes, each with a part of every text
plot.py     the picture
files.py    how it writes
"""

from __future__ import annotations

import argparse
import importlib.util
from pathlib import Path

from slattn.backends import MODULES
from slattn.commands.edge import UsageError

PACKAGES = ("matplotlib", "tqdm", "numpy")  # the extra [demo]
STEPS = 1000  # a minute and a half on two idle CPU cores; a held-out loss of 1.5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Give `parser` the options of the demo."""
    parser.add_argument("--steps", type=int, default=STEPS, help="training steps (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the weights, the batches and the sample (default: 0)")
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("out/demo"),
        help="folder to write into, over an earlier run (default: %(default)s)",
    )
    parser.add_argument(
        "--backend", choices=("auto", *MODULES), default="auto", help="who computes the attention (default: auto)"
    )
    parser.add_argument("--device", default=None, help="default: cuda if there is one, otherwise cpu")
    parser.add_argument(
        "--context-parallel",
        type=int,
        default=1,
        metavar="N",
        help="under torchrun: each of the N processes has a part of every text's positions (default: 1, no torchrun)",
    )
    parser.add_argument(
        "--resume",
        action="store_true",
        help="go on from the checkpoint in --out; the losses are those of an uninterrupted run (on a CPU bit for bit)",
    )


def main(args: argparse.Namespace) -> int:
    """Run the demo with the options of `add_arguments`.

    Returns:
        The exit status: 0, or 130 when interrupted, after a checkpoint was written.

    Raises:
        UsageError: something is asked that cannot be done, or a package is missing.
    """
    try:
        from slattn.demo.train import run
    except ModuleNotFoundError as error:
        missing = [name for name in PACKAGES if name == error.name or importlib.util.find_spec(name) is None]
        if error.name not in missing:
            raise
        raise UsageError(f"it needs {' and '.join(missing)}: pip install {' '.join(missing)}") from None
    return run(args)
