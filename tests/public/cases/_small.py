"""Small checkpoints with the keys of published ones, in the current folder."""

import shutil
import tempfile
from functools import cache
from pathlib import Path

from . import seed


def write_checkpoint(family: str) -> None:
    """Write CHECKPOINT in FP8 and ORIGINAL in BF16."""
    made = _made(family)
    shutil.copytree(made / "fp8", "CHECKPOINT")
    shutil.copytree(made / "fp8-bf16", "ORIGINAL")
    seed()


@cache
def _made(family: str) -> Path:
    from small_checkpoint import write_small_checkpoint

    folder = Path(tempfile.mkdtemp(dir=Path.cwd().parent))
    write_small_checkpoint(folder / "fp8", family)
    return folder
