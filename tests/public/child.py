"""Run cases on a library: `PYTHONPATH=CHECKOUT python child.py OUT --device D --only PATTERN ...`.

`moefp8` is imported from CHECKOUT, `tests` and `examples` from the checkout of this file.
Processes that a case starts by "spawn" read this file again, and import from the same places.
"""

import argparse
import json
import os
import sys
import traceback
from fnmatch import fnmatch
from pathlib import Path
from types import ModuleType

REPOSITORY = Path(__file__).resolve().parents[2]

if __name__ != "tests.public.child":
    sys.path[0] = os.environ["PYTHONPATH"]  # where this file is, names of ours would hide others
    sys.path.append(str(REPOSITORY / "examples"))
    sys.modules["tests"] = ModuleType("tests")
    sys.modules["tests"].__path__ = [str(REPOSITORY / "tests")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--device", required=True)
    parser.add_argument("--only", nargs="+", required=True)
    parser.add_argument("--quick", action="store_true", help="leave long cases out")
    arguments = parser.parse_args()
    import torch

    import moefp8
    from tests.public.cases import ROOMS, cases_in

    library = Path(os.environ["PYTHONPATH"])
    if not Path(moefp8.__file__).is_relative_to(library):
        sys.exit(f"moefp8 must come from {library}, got {moefp8.__file__}")
    torch.set_num_threads(1)
    rooms = [x for x in ROOMS if any(fnmatch(x, y.partition(".")[0]) for y in arguments.only)]
    cases, outcomes, seconds = [], {}, {}
    for room in rooms:
        try:
            cases += cases_in(room)
        except (AttributeError, ImportError) as error:  # an older library may lack a name
            outcomes[f"{room}.import"] = raised(error)
    for x in cases:
        is_meant = any(fnmatch(x.name, y) for y in arguments.only)
        is_meant = is_meant and not (x.is_long and arguments.quick)
        if is_meant and x.needs in (None, arguments.device):
            begin = cpu_seconds()
            outcomes[x.name] = run_case(x, arguments.device, arguments.out / x.name)
            seconds[x.name] = cpu_seconds() - begin
    torch.save(outcomes, arguments.out / "outcomes.pt")
    (arguments.out / "seconds.json").write_text(json.dumps(seconds))


def cpu_seconds() -> float:
    """Return what this process and those that it has waited for have computed."""
    return sum(os.times()[:4])


def run_case(case, device: str, folder: Path) -> dict:
    """Run a case in an empty folder; an error that it does not expect is its outcome."""
    from tests.public.cases import seed
    from tests.public.outcome import leaves

    folder.mkdir()
    os.chdir(folder)
    seed()
    try:
        return dict(leaves("", case.run(device)))
    except Exception as error:
        return raised(error)


def raised(error: Exception) -> dict:
    """Return the outcome of a case that raised what it does not expect, and where that was."""
    from tests.public.outcome import RAISED, steady

    *_, last = traceback.extract_tb(error.__traceback__)
    return {RAISED: steady(f"{type(error).__name__}: {error} ({last.filename}:{last.lineno})")}


if __name__ == "__main__":
    main()
