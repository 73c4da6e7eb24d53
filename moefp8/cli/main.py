"""`moefp8 COMMAND`, and the same of `python -m moefp8`: a file of this folder for each command.

A command is a function of its arguments that returns the exit status; `add_to` declares those. What
a user can get wrong ends in one sentence and status 1, not in a traceback.
"""

import argparse
import os
import sys
from collections.abc import Sequence

from .. import __version__
from ..checkpoint import CheckpointError
from ..kernels.jit import JitError
from . import bench, compare, info, inspect, precompile, quantize, serve
from .options import options_of, with_options


def script() -> int:
    """Run as the console script `moefp8`."""
    return main(prog="moefp8")


def main(argv: Sequence[str] | None = None, prog: str = "python -m moefp8") -> int:
    """Run a command. argv: without the program name; None: `sys.argv`. prog: how it was called."""
    parser = argparse.ArgumentParser(
        prog=prog,
        description="FP8 mixture-of-experts layers for PyTorch.",
        epilog=f"{prog} COMMAND --help tells of each.",
    )
    parser.add_argument("--version", action="version", version=f"moefp8 {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands")
    for module in (info, inspect, precompile, quantize, compare, serve, bench):
        name = module.__name__.rpartition(".")[2]
        summary = (module.__doc__ or "").partition("\n")[0]
        command = commands.add_parser(name, help=summary, description=module.__doc__)
        command.set_defaults(run=module.run)
        module.add_to(command)
        command.set_defaults(options=options_of(command))
    arguments = parser.parse_args(argv)
    if arguments.command is None:
        parser.print_help(sys.stderr)
        return 2
    try:
        status = arguments.run(arguments)
        if sys.stdout is not None:  # it is None where it was closed before (`>&-`)
            sys.stdout.flush()
        return status
    except BrokenPipeError:  # `| head` has seen enough; Python would flush, and fail, once more
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (CheckpointError, JitError, OSError, ValueError) as error:
        if sys.stderr is not None:  # else print would take stdout
            text = with_options(str(error), arguments.options)
            for caller in (arguments.command, f"{arguments.command}_checkpoint"):
                text = text.removeprefix(f"{caller}: ")
            print(f"moefp8 {arguments.command}: {text}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
