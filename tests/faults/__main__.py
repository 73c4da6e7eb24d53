"""Put each fault of the catalogue into a copy of the checkout and run the test that must see it."""

import argparse
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from tempfile import TemporaryDirectory

from .catalogue import FAULTS
from .fault import Copy


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument(
        "--only", metavar="NAME", default="", help="a room, or a fault such as gemms-3"
    )
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    options = parser.parse_args()
    chosen = {
        name: fault
        for name, fault in FAULTS.items()
        if options.only in ("", name, name.rpartition("-")[0])
    }
    if not chosen:
        parser.error(f"--only: no fault and no room is named {options.only!r}")
    begin = time.monotonic()
    with TemporaryDirectory() as folder:
        copies = SimpleQueue[Copy]()
        for i in range(options.jobs):
            copies.put(Copy(Path(folder, str(i))))

        def verdict_of(name: str) -> str:
            copy = copies.get()
            try:
                return copy.verdict(chosen[name])
            finally:
                copies.put(copy)

        copy = copies.get()
        problems = copy.problems_without_faults([*chosen.values()], options.jobs)
        copies.put(copy)
        if problems:
            print(f"{problems}\nThese tests must pass without a fault.")
            return 1
        num_caught = 0
        with ThreadPoolExecutor(options.jobs) as pool:
            for name, verdict in zip(chosen, pool.map(verdict_of, chosen), strict=True):
                num_caught += verdict == "caught"
                print(f"{name:16} {chosen[name].why}: {verdict}", flush=True)
    print(f"{num_caught} of {len(chosen)} caught, {time.monotonic() - begin:.0f} s")
    return 0 if num_caught == len(chosen) else 1


if __name__ == "__main__":
    sys.exit(main())
