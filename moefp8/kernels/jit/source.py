"""The text of a kernel's source with all that it includes.

`#include "x.cuh"`, in headers too, means the file beside the .cu, else the one in
`moefp8/kernels/device`.
"""

import hashlib
import json
import re
from pathlib import Path

from .cubin import JitError

DEVICE_FOLDER = Path(__file__).parent.parent / "device"
_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*"([^"]+)"', re.MULTILINE)
# A string or a character is matched first, so that no comment begins within it.
_PIECE = re.compile(r""""(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])'|//[^\n]*|/\*.*?\*/""", re.DOTALL)


def files_of(source: Path) -> dict[str, str]:
    """The .cu and all that it includes: name -> text. Raises JitError for a missing file."""
    folders = (source.parent, DEVICE_FOLDER)
    files = {source.name: _read(source)}
    missing = _INCLUDE.findall(files[source.name])
    while missing:
        name = missing.pop()
        if name in files:
            continue
        path = next((folder / name for folder in folders if (folder / name).is_file()), None)
        if path is None or ".." in Path(name).parts:
            raise JitError(
                f'{source.name}: includes "{name}", not found in {folders[0]}, {folders[1]}'
            )
        files[name] = _read(path)
        missing += _INCLUDE.findall(files[name])
    return files


def without_comments(text: str) -> str:
    """C++ with a blank in place of each comment; without blank lines, or blanks that end a line."""
    text = _PIECE.sub(lambda match: " " if match[0][0] == "/" else match[0], text)
    return "\n".join(line.rstrip() for line in text.splitlines() if line.strip())


def source_digest(source: Path) -> str:
    """A digest of the .cu and all that it includes, which no comment or blank space changes."""
    files = {name: "".join(without_comments(x).split()) for name, x in files_of(source).items()}
    return hashlib.sha256(json.dumps(sorted(files.items())).encode()).hexdigest()


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise JitError(f"{path} cannot be read ({error.strerror}); reinstall moefp8") from error
