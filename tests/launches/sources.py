"""Digests of the kernels' sources, of which comments are no part."""

import re
from pathlib import Path

import moefp8
from moefp8.kernels.jit.kernel import DEVICE_FOLDER, OPTIONS
from tests.launches.record import digest

_ROOT = Path(moefp8.__file__).parent
_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*"([^"]+)"', re.MULTILINE)
# A string or a character is matched first, so that no comment begins within it.
_PIECE = re.compile(r""""(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])'|//[^\n]*|/\*.*?\*/""", re.DOTALL)


def without_comments(text: str) -> str:
    """C++ with a blank in place of each comment; without blank lines, or blanks that end a line."""
    text = _PIECE.sub(lambda match: " " if match[0][0] == "/" else match[0], text)
    return "\n".join(line.rstrip() for line in text.splitlines() if line.strip())


def text_of(source: Path) -> str:
    """A source and all that it includes, by name, without comments."""
    files: dict[str, str] = {}
    missing = [source.name]
    while missing:
        name = missing.pop()
        if name in files:
            continue
        path = source.parent / name
        path = path if path.is_file() else DEVICE_FOLDER / name
        files[name] = without_comments(path.read_text(encoding="utf-8"))
        missing += _INCLUDE.findall(files[name])
    return "\n".join(f"{name}:\n{text}" for name, text in sorted(files.items()))


def digests() -> dict[str, str]:
    """Of each source by its path in the package, and of the compiler's options."""
    sources = {
        path.relative_to(_ROOT).as_posix(): digest(text_of(path)) for path in _ROOT.rglob("*.cu")
    }
    return {"options": digest(" ".join(OPTIONS)), **dict(sorted(sources.items()))}
