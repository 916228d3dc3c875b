"""The command line: `slattn doctor | check | bench | scale | warmup | demo`, or `python -m slattn ...`.

    slattn doctor                   what is installed, which backends run here, and what mends those that do not
    slattn check                    every willing backend against the float64 reference; exit status 1 on a failure
    slattn bench --json bench.json  speed beside the peers that are installed, as a share of a matmul in the same run
    slattn scale                    what a layer costs on 8 to 1024 GPUs: a model, see docs/scale.md
    slattn warmup                   compiles kernels before the first call needs them
    slattn demo                     trains a small language model whose attention this is

A command is a module with add_arguments(parser) and main(args) -> exit status; only the one that runs is imported.
One that raises UsageError ends with that sentence and exit status 2.
"""

from __future__ import annotations

import argparse
import errno
import importlib
import os
import sys
from collections.abc import Sequence

import slattn

# Name -> (module, what it does in a line).
COMMANDS = {
    "doctor": ("slattn.commands.doctor", "what is installed, which backends run here, and what mends the others"),
    "check": ("slattn.commands.check", "compare every willing backend with the float64 reference"),
    "bench": ("slattn.commands.bench", "measure speed beside the peers that are installed"),
    "scale": ("slattn.commands.scale", "predict what a layer costs when many GPUs share a text"),
    "warmup": ("slattn.commands.warmup", "compile kernels before the first call needs them"),
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
    from slattn.commands.edge import UsageError

    try:
        status = int(args.run(args))
        if sys.stdout is not None:
            sys.stdout.flush()  # here, where a failure can be told
        return status
    except UsageError as error:
        print(f"slattn {args.command}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # whoever read the output has seen enough
        _drop_output()
        return 141  # what the shell says of one that SIGPIPE ended
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        _drop_output()
        print(f"slattn {args.command}: what it has to say cannot be written: {error.strerror}", file=sys.stderr)
        return 1


def _drop_output() -> None:
    """Send what is still buffered for stdout nowhere: the interpreter would try to write it as it ends."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
