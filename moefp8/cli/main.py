"""`python -m moefp8 {info, inspect, precompile, quantize, bench}`.

A command is a function of its arguments that returns the exit status; `add_to` declares those. What
a user can get wrong ends in one sentence and status 1, not in a traceback.
"""

import argparse
import sys
from collections.abc import Sequence

from ..checkpoint import CheckpointError
from ..kernels.jit import JitError
from . import bench, info, inspect, precompile, quantize

_COMMANDS = {
    "info": info,
    "inspect": inspect,
    "precompile": precompile,
    "quantize": quantize,
    "bench": bench,
}


def main(argv: Sequence[str] | None = None) -> int:
    """argv: without the program's name; None: `sys.argv`."""
    parser = argparse.ArgumentParser(
        prog="python -m moefp8", description="FP8 mixture-of-experts layers for PyTorch."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, module in _COMMANDS.items():
        summary = (module.__doc__ or "").partition("\n")[0]
        module.add_to(commands.add_parser(name, help=summary, description=module.__doc__))
    arguments = parser.parse_args(argv)
    try:
        return _COMMANDS[arguments.command].run(arguments)
    except (CheckpointError, JitError, OSError, ValueError) as error:
        print(f"moefp8 {arguments.command}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
