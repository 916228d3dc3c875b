"""The command line: `slattn doctor | check | bench | demo`, or `python -m slattn ...`.

    slattn doctor                   what is installed, which backends run here, and what mends those that do not
    slattn check                    every willing backend against the float64 reference; exit status 1 on a failure
    slattn bench --json bench.json  speed beside the peers that are installed, as a share of a matmul in the same run
    slattn demo                     trains a small language model whose attention this is

A command is a module with add_arguments(parser) and main(args) -> exit status; only the one that runs is imported.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

import slattn

# Name -> (module, what it does in a line).
COMMANDS = {
    "doctor": ("slattn.commands.doctor", "what is installed, which backends run here, and what mends the others"),
    "check": ("slattn.commands.check", "compare every willing backend with the float64 reference"),
    "bench": ("slattn.commands.bench", "measure speed beside the peers that are installed"),
    "demo": ("slattn.demo", "train a small language model that attends through this library"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status. `argv` defaults to the process's own arguments."""
    argv = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(prog="slattn", description="Trainable sparse latent attention for PyTorch.")
    parser.add_argument("--version", action="version", version=f"slattn {slattn.__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND")
    for name, (module_name, help_line) in COMMANDS.items():
        subparser = subparsers.add_parser(name, help=help_line, description=f"{help_line[0].upper()}{help_line[1:]}.")
        if argv[:1] == [name]:
            module = importlib.import_module(module_name)
            module.add_arguments(subparser)
            subparser.set_defaults(run=module.main)
    args = parser.parse_args(argv)
    if args.command is None:
        parser.error(f"which command? One of {', '.join(COMMANDS)}")
    try:
        return int(args.run(args))
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
