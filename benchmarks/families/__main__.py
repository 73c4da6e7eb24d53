"""Every family of transformers with experts, brought to FP8 in every way: `docs/families.md`.

    python -m benchmarks.families            # all, seven minutes on two idle cores; writes the JSON
    python -m benchmarks.families dbrx       # these alone, and prints them
    python -m benchmarks.report              # writes docs/families.md of the JSON

A tiny model with random weights is made of each, in a process of its own.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.circumstances import circumstances
from benchmarks.families import RESULTS

PATIENCE_S = 240
_ONE = "--one"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", help="families; none: all")
    parser.add_argument(_ONE, action="store_true", help="here, and not in processes of their own")
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(_here(arguments.names[0])))
        return
    from benchmarks.families.models import families

    names = arguments.names or families()
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        rows = dict(zip(names, pool.map(_told, names), strict=True))
    if arguments.names:
        print(json.dumps(rows, indent=1))
        return
    import transformers

    found = {**circumstances(), "transformers": transformers.__version__, "families": rows}
    RESULTS.write_text(json.dumps(found, indent=1) + "\n")


def _told(name: str) -> dict[str, Any]:
    row = row_in_a_process(name)
    outcomes = {column: cell["outcome"] for column, cell in row.get("cells", {}).items()}
    print(name, outcomes or row, file=sys.stderr, flush=True)
    return row


def row_in_a_process(name: str) -> dict[str, Any]:
    """{"cells": ...} or {"not_built": why}."""
    command = [sys.executable, "-m", "benchmarks.families", _ONE, name]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    try:
        ran = subprocess.run(
            command, capture_output=True, text=True, timeout=PATIENCE_S, env=environment
        )
    except subprocess.TimeoutExpired:
        return {"not_built": f"not done in {PATIENCE_S} s"}
    if ran.returncode:
        last = (ran.stderr.splitlines() or [""])[-1]
        return {"not_built": f"the process ended with {ran.returncode}: {last}"}
    row: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return row


def _here(name: str) -> dict[str, Any]:
    import transformers

    from benchmarks.families.cells import row_of
    from benchmarks.families.models import NotBuilt

    transformers.logging.set_verbosity_error()
    with tempfile.TemporaryDirectory() as folder:
        try:
            return {"cells": row_of(name, Path(folder))}
        except NotBuilt as error:
            return {"not_built": str(error)}


if __name__ == "__main__":
    main()
