"""Ranks of one host gather what each tells, or all learn that one comes no more."""

import os
import random
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch.distributed as dist

from moefp8.distributed.expert_parallel import host_words
from moefp8.distributed.expert_parallel.host_words import HostWords
from tests.distributed.expert_parallel.error_cases import told
from tests.distributed.expert_parallel.local_ranks import LocalAgreement
from tests.distributed.ranks import PATIENCE_S, Ranks, ranks

pytestmark = [
    pytest.mark.skipif(not dist.is_gloo_available(), reason="torch without gloo"),
    pytest.mark.skipif(not host_words.FOLDER.is_dir(), reason="only Linux has such a folder"),
]
N = 3  # values of a rank
LONG = 2.0 * PATIENCE_S  # a rank that waits until this timeout has not answered in time


@pytest.fixture(scope="module", params=[1, 2, 3])
def group(request, tmp_path_factory) -> Iterator[Ranks]:
    with ranks(request.param, tmp_path_factory.mktemp("ranks")) as made:
        yield made


@pytest.fixture
def two(tmp_path) -> Iterator[Ranks]:
    with ranks(2, tmp_path) as made:
        yield made


# ---- What one rank does ----


def words(seconds: float = LONG, folder: Path = host_words.FOLDER) -> HostWords | None:
    host_words.FOLDER = folder
    place = dist.get_rank(), dist.get_world_size()
    return HostWords.of(by_gloo, *place, N, timedelta(seconds=seconds))


def by_gloo(values: Sequence[int]) -> list[list[int]]:
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, list(values))
    return everyone


def is_made(folder: Path) -> bool:
    return words(folder=folder) is not None


def gathers(times: int) -> bool:
    """Values of every gathering and rank, where ranks come at any time."""
    made, rank, num_ranks = words(), dist.get_rank(), dist.get_world_size()
    assert made is not None
    draw = random.Random(rank)
    for i in range(times):
        if draw.random() < 0.02:
            time.sleep(draw.choice([1e-4, 2e-3]))
        expected = [[i, 2**32 - 1 - i * r, r == i % num_ranks] for r in range(num_ranks)]
        assert made.gather(expected[rank]) == expected
    return True


def gathers_after_a_child_has_ended() -> bool:
    """As workers of a data loader do. The rank comes when the other has begun to wait."""
    made, rank = words(), dist.get_rank()
    assert made is not None
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    time.sleep(0.2 * rank)
    return made.gather([rank] * N) == [[0] * N, [1] * N]


_made: list[HostWords] = []  # by `makes`, for later calls


def makes(seconds: float) -> None:
    made = words(seconds)
    assert made is not None
    _made[:] = [made]


def gathers_twice() -> list[str]:
    return [told(lambda: _made[0].gather([1] * N)) for _ in range(2)]


def is_interrupted() -> str:
    """While it waits."""

    def interrupt(_: int, frame: FrameType | None) -> None:
        if frame is not None and frame.f_code.co_filename == host_words.__file__:
            raise OSError("interrupted")

    signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.1, 0.1)
    error = told(lambda: _made[0].gather([0] * N))
    signal.setitimer(signal.ITIMER_REAL, 0)
    return error


def gathers_until_one_ends() -> str:
    made, error = words(), None
    assert made is not None
    while not isinstance(error, str):
        error = told(lambda: made.gather([0] * N))
    return error


# ---- What all of them see ----


def test_all_have_what_each_tells(group):
    assert group.run(gathers, [(600,)] * len(group.pipes)) == [True] * len(group.pipes)


def test_no_file_is_left(group, tmp_path):
    each = [(tmp_path,)] * len(group.pipes)
    assert group.run(is_made, each) == [True] * len(each)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("rank", range(2))
def test_all_have_words_or_none_has(two, tmp_path, rank):
    folders = [tmp_path / ("none" if rank == i else "one") for i in range(2)]
    folders[1 - rank].mkdir()
    assert two.run(is_made, [(x,) for x in folders]) == [False, False]
    assert not list(folders[1 - rank].iterdir())
    assert two.run(is_made, [(folders[1 - rank],)] * 2) == [True, True]


def test_ranks_of_one_process_have_none(tmp_path, monkeypatch):
    """The system would not tell them that one has ended."""
    monkeypatch.setattr(host_words, "FOLDER", tmp_path)
    seconds = timedelta(seconds=LONG)
    agreement, found = LocalAgreement(2, seconds), []

    def make(rank: int) -> None:
        agreement.own.rank = rank
        found.append(HostWords.of(agreement.gather, rank, 2, N, seconds))

    threads = [threading.Thread(target=partial(make, rank)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [None, None]


def test_a_child_of_a_rank_may_end(two):
    assert two.run(gathers_after_a_child_has_ended, [()] * 2) == [True, True]


def test_who_comes_after_the_timeout_is_told_so_at_once(two):
    """Who waits until the timeout says that a rank did not come."""
    two.run(makes, [(0.5,)] * 2)
    first, again = two.run_on(0, gathers_twice)
    late, late_again = two.run_on(1, gathers_twice)
    assert first == "RuntimeError: rank 1 of the group did not come"
    assert late == "RuntimeError: rank 0 of the group has ended or given up"
    assert again == late_again == "RuntimeError: as in an earlier call"


def test_who_is_interrupted_comes_no_more(two):
    two.run(makes, [(LONG,)] * 2)
    assert two.run_on(0, is_interrupted) == "OSError: interrupted"
    late, _ = two.run_on(1, gathers_twice)
    assert late == "RuntimeError: rank 0 of the group has ended or given up"


def test_who_is_killed_comes_no_more(two):
    two.run(gathers, [(1,)] * 2)
    for pipe in two.pipes:
        pipe.send((gathers_until_one_ends, ()))
    assert not two.pipes[0].poll(1)
    two.processes[1].kill()
    assert two.take(0) == "RuntimeError: rank 1 of the group has ended or given up"
