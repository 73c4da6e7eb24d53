"""What the benchmarks beside peers share: first calls, cases that fail, results that are kept."""

import json
import sys
import time
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch

from benchmarks.circumstances import circumstances
from benchmarks.peers import DEEP_GEMM, OURS, Call, Peer, deep_gemm_version, first_line
from benchmarks.timing import copy_gbps

Row = dict[str, Any]  # the case, and "peers": {name: {"us", ...} or {"refused": why}}
AnyCase = TypeVar("AnyCase")


def about_this_run(names: Iterable[str]) -> dict[str, Any]:
    """`circumstances()`, which DeepGEMM it is, and how fast this GPU copies."""
    return circumstances() | {
        "deep_gemm": deep_gemm_version() if DEEP_GEMM in names else "missing",
        "copy_gbps": round(copy_gbps(), 1),
    }


def first_calls(
    peers: Mapping[str, Peer],
    names: Iterable[str],
    case: object,
    operands: object,
    needed: Collection[str] = (OURS,),
) -> tuple[dict[str, Any], dict[str, torch.Tensor], dict[str, Row]]:
    """The calls that `operands` can be given to, copies of their results, and "refused", by name.

    A peer that fails is left out, as one that refuses; a `needed` one raises.
    """
    calls: dict[str, Call] = {}
    first: dict[str, torch.Tensor] = {}
    found: dict[str, Row] = {}
    for name in names:
        why = peers[name].refuses(case)
        try:
            if why is None:
                call = peers[name].prepare(operands)
                first[name] = call().clone()
                calls[name] = call
        except Exception as error:
            if name in needed:
                raise
            why = first_line(error)
        found[name] = {} if why is None else {"refused": why}
    return calls, first, found


def measured(
    cases: Iterable[AnyCase], measure: Callable[[AnyCase], Row], name_of: Callable[..., str] = str
) -> Iterator[Row]:
    """The rows of `cases`; a case that fails has none, which is printed with the reason."""
    for case in cases:
        try:
            row = measure(case)
        except Exception:
            traceback.print_exc()
            print(f"no row for {name_of(case)}")
        else:
            yield row


def titles_of(peers: Mapping[str, Peer], rows: Iterable[Row]) -> dict[str, str]:
    """The peers that ran anywhere in `rows`."""
    ran = {name for row in rows for name, found in row["peers"].items() if "us" in found}
    return {name: peer.title for name, peer in peers.items() if name in ran}


def finish(
    results: dict[str, Any],
    num_cases: int,
    lines: Iterable[str],
    out: Path | None,
    usual: Path,
    *,
    is_all: bool,
    started: float,
) -> None:
    """Keep the results, print `lines` if there are any, and exit with 1 if a case has no row.

    The results go to `out`, or without it to `usual` if those are all cases that there are.
    """
    num_rows = len(results["rows"])
    if out or (is_all and num_rows == num_cases):
        write(results, out or usual)
    else:
        print(f"not kept: these are not all cases of {usual.name}; --out FILE keeps them")
    if num_rows:
        print("", *lines, sep="\n")
    print(f"{num_rows} of {num_cases} cases in {time.perf_counter() - started:.0f} s")
    if num_rows < num_cases:
        sys.exit(1)


def write(results: dict[str, Any], path: Path) -> None:
    path.write_text(json.dumps(results, indent=1) + "\n")
