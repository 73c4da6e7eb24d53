"""Turn a BF16 checkpoint into one with FP8 weights, shard by shard; run again to go on.

The linears and experts that `convert` would swap become E4M3, with an FP32 scale for each 128x128
block. Embeddings, output heads, routers, gates, norms and vision towers stay, and so does what
--skip names. What becomes FP8 and what stays, and why, is printed first.
Memory does not grow with the checkpoint. TARGET appears when it is complete; until then its shards
are in .TARGET.partial, and the same command goes on with them.
"""

import argparse
import json
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ..checkpoint import quantize_checkpoint


def add_to(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", help="a directory, or a .safetensors file beside its config.json")
    parser.add_argument("target", help="a directory that does not exist or is empty")
    parser.add_argument(
        "--skip",
        action="append",
        default=[],
        metavar="PATTERN",
        help="keep these too: part of a dotted name, or a pattern of keys; may be repeated",
    )
    parser.add_argument("--device", help="where weights are quantized, e.g. cuda (default: cpu)")
    parser.add_argument(
        "--max-shard-bytes",
        type=int,
        default=5_000_000_000,
        help="of one file (default: %(default)s)",
    )
    parser.add_argument("--json", metavar="FILE", help="write the errors of all weights there")


def run(arguments: argparse.Namespace) -> int:
    if "" in arguments.skip:
        raise ValueError("--skip must be a part of a name, or a pattern, got ''")
    if arguments.json:
        _check_writable(Path(arguments.json), Path(arguments.target))
    with _logged_to_stdout():
        done = quantize_checkpoint(
            arguments.source,
            arguments.target,
            skip=arguments.skip,
            device=arguments.device,
            max_shard_bytes=arguments.max_shard_bytes,
        )
    try:
        if arguments.json:
            Path(arguments.json).write_text(json.dumps(done.to_dict(), indent=1) + "\n")
    finally:
        with suppress(BrokenPipeError):  # lest it hides why the file could not be written
            print(done, flush=True)
    return 0


def _check_writable(path: Path, target: Path) -> None:
    """Raise ValueError for what cannot be written, before hours of work.

    A file in the target is not looked at, since that directory is made when all is done.
    """
    folder = path.parent
    if Path(os.path.realpath(folder)).is_relative_to(os.path.realpath(target)):
        return
    if path.is_dir() or not folder.is_dir():
        raise ValueError(f"--json must name a file in a directory that is there, got {path}")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise ValueError(f"--json must name a file that may be written, got {path}")


class _Stdout(logging.Handler):
    """It prints records. If whoever read has seen enough (`| head`), the work goes on.

    What else cannot be printed ends the command when it prints its report.
    """

    def emit(self, record: logging.LogRecord) -> None:
        with suppress(OSError, ValueError):
            print(self.format(record), flush=True)


@contextmanager
def _logged_to_stdout() -> Iterator[None]:
    """Print what is selected before the work begins."""
    logger, handler = logging.getLogger("moefp8"), _Stdout()
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.setLevel(before)
        logger.removeHandler(handler)
