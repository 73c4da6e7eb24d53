"""`python -m tests.kernels.compiled FOLDER`: the names of all kernels in a cache folder.

Run the GPU tests of two commits with a `MOEFP8_CACHE_DIR` each, and compare what this prints: a
kernel that is missing from one list was never launched there.
"""

import shutil
import subprocess
import sys
from pathlib import Path

from moefp8.kernels.jit.cubin import Cubin


def names(folder: Path) -> list[str]:
    """Sorted, and in C++ where there is a c++filt."""
    read = (Cubin.from_bytes(x.stem, x.read_bytes()) for x in folder.glob("*.cubin"))
    symbols = "\n".join(sorted(cubin.symbol for cubin in read if cubin))
    if shutil.which("c++filt"):
        done = subprocess.run(
            ["c++filt", "-p"], input=symbols, capture_output=True, text=True, check=True
        )
        symbols = done.stdout
    return symbols.splitlines()


if __name__ == "__main__":
    print(*names(Path(sys.argv[1])), sep="\n")
