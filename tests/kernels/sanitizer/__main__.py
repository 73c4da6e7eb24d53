"""Make all launches, or with `--share 2/4` every fourth from the second on, beside other shares."""

import argparse
from collections.abc import Iterator
from itertools import chain, islice

import torch

from tests.kernels.sanitizer import experts, gemms, quant, ranks, routing
from tests.kernels.sanitizer.judge import Launch


def launches() -> Iterator[Launch]:
    rooms = gemms, experts, quant, routing, ranks
    return chain.from_iterable(room.launches() for room in rooms)


def launches_of(which: int, num_shares: int) -> Iterator[Launch]:
    return islice(launches(), which - 1, None, num_shares)


def share(text: str) -> tuple[int, int]:
    which, num_shares = map(int, text.split("/"))
    if not 1 <= which <= num_shares:
        raise ValueError
    return which, num_shares


def main() -> None:
    parser = argparse.ArgumentParser(prog="tests.kernels.sanitizer", description=__doc__)
    parser.add_argument("--share", type=share, default=(1, 1), metavar="WHICH/OF")
    num_made = 0
    # What is yielded is made before the next: the configuration that it wants is chosen until then.
    for launch in launches_of(*parser.parse_args().share):
        torch.manual_seed(0)  # whichever share it is in
        launch()
        num_made += 1
    torch.cuda.synchronize()
    print(f"{num_made} launches", flush=True)


if __name__ == "__main__":
    main()
