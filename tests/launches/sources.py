"""Digests of the kernels' sources, of which comments are no part."""

from pathlib import Path

import moefp8
from moefp8.kernels.jit.kernel import options_for
from moefp8.kernels.jit.source import files_of, without_comments
from tests.gpu import ARCH
from tests.launches.record import digest

_ROOT = Path(moefp8.__file__).parent


def text_of(source: Path) -> str:
    """A source and all that it includes, by name, without comments."""
    files = sorted(files_of(source).items())
    return "\n".join(f"{name}:\n{without_comments(text)}" for name, text in files)


def digests() -> dict[str, str]:
    """Of each source by its path in the package, and of the compiler's options."""
    sources = {
        path.relative_to(_ROOT).as_posix(): digest(text_of(path)) for path in _ROOT.rglob("*.cu")
    }
    return {"options": digest(" ".join(options_for(ARCH))), **dict(sorted(sources.items()))}
