"""What nvdisasm reads in the machine code of cubins: of all in one run, since it starts slowly."""

import json
import subprocess
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

import cuda.pathfinder

from moefp8.kernels.jit.elf import code_ranges

Instruction = tuple[str, list[str]]  # opcode and operands
_INSTRUCTION_BYTES = 16


def is_installed() -> bool:
    return cuda.pathfinder.find_nvidia_binary_utility("nvdisasm") is not None


def texts_of(images: Sequence[bytes], folder: Path) -> list[str]:
    """Each cubin's instructions, and below each the half of its code that says what it waits for.

    `folder` is for files of this call. A place to jump to is an address here, and no label.
    """
    lines = (x for x in _run(images, folder, "-hex").splitlines() if "/* 0x" in x)
    texts = ["\n".join(islice(lines, 2 * _num_instructions(image))) for image in images]
    assert next(lines, None) is None
    return texts


def instructions_of(images: Sequence[bytes], folder: Path) -> list[list[Instruction]]:
    """Each cubin's instructions, in the order of the file."""
    (function,) = json.loads(_run(images, folder, "-json"))[1]
    found = ((x["opcode"], x.get("operands", "").split(",")) for x in function["sass-instructions"])
    instructions = [list(islice(found, _num_instructions(image))) for image in images]
    assert next(found, None) is None
    return instructions


def _code_of(image: bytes) -> bytes:
    """The machine code of a cubin's only kernel."""
    ((begin, end),) = code_ranges(image)
    return image[begin:end]


def _num_instructions(image: bytes) -> int:
    return len(_code_of(image)) // _INSTRUCTION_BYTES


def _run(images: Sequence[bytes], folder: Path, form: str) -> str:
    """One code behind the other is read as a single one."""
    tool = cuda.pathfinder.find_nvidia_binary_utility("nvdisasm")
    assert tool, "make test installs nvidia-cuda-nvdisasm"
    path = folder / "codes"
    path.write_bytes(b"".join(map(_code_of, images)))
    command = [tool, "--binary", "SM90a", form, str(path)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout
