"""What the benchmarks beside peers share: options, first calls, times without rest, results."""

import argparse
import json
import sys
import time
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch

from benchmarks.circumstances import circumstances
from benchmarks.figures import Row
from benchmarks.peers import DEEP_GEMM, OURS, Call, Peer, deep_gemm_version, first_line
from benchmarks.timing import copy_gbps
from benchmarks.without_rest import (
    LEAST_US,
    ROUNDS,
    SECONDS,
    SETTLING_SECONDS,
    Loop,
    without_rest,
)

AnyCase = TypeVar("AnyCase")


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


def leave_out_wrong(
    calls: dict[str, Call],
    found: Mapping[str, Row],
    most_error: float,
    ours: Collection[str] = (OURS,),
) -> None:
    """Nobody is timed on garbage: keys of `found` that begin with "error" tell who gives it.

    Who does loses its call, and is "refused". Raises RuntimeError if it is one of `ours`.
    """
    for name in list(calls):
        told = {key: error for key, error in found[name].items() if key.startswith("error")}
        errors = {key: error for key, error in told.items() if not error <= most_error}
        if errors and name in ours:
            raise RuntimeError(f"{name} is wrong: {errors}")
        if errors:
            del calls[name]
            found[name]["refused"] = f"it is wrong: {errors}"


def about_this_run(names: Iterable[str], rest: "Rest | None" = None) -> dict[str, Any]:
    """`circumstances()`, which DeepGEMM it is, how fast this GPU copies, and the turns without
    rest."""
    about = circumstances() | {
        "deep_gemm": deep_gemm_version() if DEEP_GEMM in names else "missing",
        "copy_gbps": round(copy_gbps(), 1),
    }
    if rest is not None and rest.rounds:
        about["turns"] = rest._asdict() | {"settling_seconds": SETTLING_SECONDS}
    return about


class Rest(NamedTuple):
    """How calls are timed without rest: in so many rounds, and so long in each; 0 rounds: not."""

    rounds: int = ROUNDS
    seconds: float = SECONDS

    @classmethod
    def add_options(cls, parser: argparse.ArgumentParser, seconds: float = SECONDS) -> None:
        parser.add_argument(
            "--rounds",
            type=int,
            default=ROUNDS,
            help=f"without rest, of calls of {LEAST_US:g} us and more (%(default)s; 0: none)",
        )
        parser.add_argument(
            "--seconds", type=float, default=seconds, help="of each turn of these (%(default)s)"
        )

    @classmethod
    def of(cls, options: argparse.Namespace) -> "Rest":
        return cls(options.rounds, options.seconds)

    def wants(self, found: Mapping[str, Row]) -> bool:
        """Whether calls with these times, with pauses, are timed without rest."""
        return self.rounds > 0 and found[OURS]["us"] >= LEAST_US

    def add_times(
        self,
        found: Mapping[str, Row],
        peers: Mapping[str, Peer],
        calls: Mapping[str, Call],
        copies: Sequence[object] = (),
        captures: Collection[str] | None = None,
    ) -> None:
        """Add "without_rest" to each of `found` whose call is given; what fails is told.

        What no CUDA graph could be made of, or may be, has "eager" in it: the host counts as well.

        copies: operands beside those of `calls`.
        captures: which of them may be captured as CUDA graphs; None: all.
        """
        torch.cuda.empty_cache()
        loops: dict[str, Loop] = {}
        for name, call in calls.items():
            try:
                others = [peers[name].prepare(operands) for operands in copies]
                may = captures is None or name in captures
                loops[name] = Loop.over([call, *others], found[name]["us"], captures=may)
            except Exception as error:
                print(f"{peers[name].title} is not timed without rest: {first_line(error)}")
        for name, figures in without_rest(loops, OURS, self.rounds, self.seconds).items():
            eager = {} if loops[name].is_captured else {"eager": True}
            found[name]["without_rest"] = figures | eager


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
