"""Record what is launched, compare with it, or show it: `python -m tests.launches --help`."""

import argparse
import sys
import time
from collections import Counter
from collections.abc import Sequence

from tests.launches import golden
from tests.launches.layouts import Layout, all_layouts


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m tests.launches", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    check = commands.add_parser("check", help="list the layouts that differ from the file")
    check.add_argument("--only", default="", metavar="OP", help="ops whose names begin so")
    show = commands.add_parser("show", help="print all that is recorded of a layout")
    show.add_argument("id", help="an op and a number: experts/17")
    commands.add_parser("record", help="write the file")
    arguments = parser.parse_args(argv)
    if arguments.command == "check":
        return _check(arguments.only)
    if arguments.command == "show":
        return _show(arguments.id)
    return _record()


def _check(only: str) -> int:
    begin, before = time.perf_counter(), golden.Golden.read()
    for x in golden.differences_of_sources(before):
        print(f"{x.id}: {x.how}")
    layouts, counts = list(all_layouts(only)), Counter[str]()
    for x in golden.compare(layouts, before):
        print(f"{x.id}: {x.how}")
        counts[x.id.partition("/")[0]] += 1
    for op, count in counts.items():
        print(f"{op}: {count} differ")
    seconds = time.perf_counter() - begin
    print(f"{counts.total()} of {len(layouts)} layouts differ, {seconds:.1f} s")
    changed = any(golden.differences_of_sources(before))
    return int(changed or bool(counts) or not layouts)


def _show(name: str) -> int:
    op, _, number = name.rpartition("/")
    description, record = Layout(op, int(number)).record()
    print(f"{name}: {description}")
    print(f"bytes: workspaces {record.workspace_bytes}, tensors {record.tensor_bytes}")
    print(record.exact, end="")
    return 0


def _record() -> int:
    begin, made = time.perf_counter(), golden.write()
    print(f"{'op':<24}{'layouts':>8}{'launches':>10}")
    for op, entries in made.ops.items():
        print(f"{op:<24}{len(entries):>8}{sum(x.num_launches for x in entries):>10}")
    everything = [x for entries in made.ops.values() for x in entries]
    launches, size = sum(x.num_launches for x in everything), golden.PATH.stat().st_size
    seconds = time.perf_counter() - begin
    print(f"{len(everything)} layouts, {launches} launches, {size:,} bytes, {seconds:.1f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
