"""The exchange by kernels that write into other ranks' memory.

Each rank is a process. Where GPUs are fewer, several have one, and take turns at it.
"""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
from hypothesis import Phase, given, settings

from tests.distributed.expert_parallel.cases import (
    Kind,
    Tokens,
    assert_same,
    draw,
    expected,
    routings,
    run_parallel,
)
from tests.distributed.expert_parallel.gpu_ranks import (
    MAY_SHARE,
    calls,
    insists_on_peers,
    late_gradients,
    on_two_streams,
    replayed_gradients,
    replays,
    replays_after_growth,
    replays_on_two_streams,
    replays_the_graph_of,
)
from tests.distributed.expert_parallel.looping_rank import SECONDS
from tests.distributed.ranks import Ranks, ranks
from tests.gpu import NEEDS_GPU, NEEDS_TWO_GPUS, bytes_of_processes, slow

pytestmark = NEEDS_GPU
KINDS = {
    "frozen": Kind(8, 256, 128),
    "odd": Kind(9, 200, 72),
    "very odd": Kind(9, 201, 71),
    "trained": Kind(8, 256, 128, "trained"),
    "adapted": Kind(8, 264, 136, "adapted"),
    "in codes": Kind(8, 256, 128, saved_dtype=torch.float8_e4m3fn),
    "masked": Kind(8, 256, 128, layout="masked"),
    "biases": Kind(8, 264, 136, bias=True),
    "trained, biases": Kind(8, 256, 128, "trained", bias=True),
    "like Qwen3": Kind(16, 2048, 768),
}
QUICK = "frozen", "trained"


@pytest.fixture(scope="module")
def group(request, tmp_path_factory) -> Iterator[Ranks]:
    """As many ranks as the test's parameter says."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(MAY_SHARE, "1")
        with ranks(request.param, tmp_path_factory.mktemp("ranks"), "nccl") as made:
            yield made


def with_ranks(*quick: int, others: Sequence[int] = ()) -> pytest.MarkDecorator:
    """A worker runs all tests of a number of ranks, so that few processes share the GPU.

    others: numbers that `make test-gpu-quick` leaves out.
    """
    cases = []
    for number in (*quick, *others):
        marks = [pytest.mark.xdist_group(f"{number} ranks")]
        marks += [] if number in quick else [pytest.mark.slow]
        cases.append(pytest.param(number, marks=marks))
    return pytest.mark.parametrize("group", cases, indirect=True)


# ---- What all of them give ----


def few_and_many(kind: Kind, num_ranks: int) -> Iterator[list[Tokens]]:
    """Tokens of each rank, of which one has none."""
    for seed, most in ((0, 40), (1, 3), (2, 300)):
        sizes = [(most * (rank + 1 + seed)) // (num_ranks + 1) for rank in range(num_ranks)]
        sizes[seed % num_ranks] = 0 if seed == 1 else sizes[seed % num_ranks]
        yield draw(kind, sizes, 1 + seed * 3, seed, has_addend=seed == 1)


def assert_right(group: Ranks, kind: Kind, tokens: list[Tokens], with_gradients: bool) -> None:
    came = group.run(run_parallel, [(kind, z, with_gradients, "cuda") for z in tokens])
    wanted = expected(kind, tokens, with_gradients=with_gradients, device="cuda")
    assert_same(came, wanted)


@with_ranks(2, others=(1, 3, 8))
@pytest.mark.parametrize("with_gradients", [False, True])
@pytest.mark.parametrize("name", [*QUICK, *slow(*(name for name in KINDS if name not in QUICK))])
def test_ranks_give_what_one_process_gives(group, name, with_gradients):
    for tokens in few_and_many(KINDS[name], len(group.pipes)):
        assert_right(group, KINDS[name], tokens, with_gradients)


DRAWN = [KINDS[name] for name in ("frozen", "odd", "trained", "adapted")]


@pytest.mark.slow
@with_ranks(4)
@given(case=routings(4, DRAWN, max_tokens=30, max_top_k=8))
@settings(max_examples=60, phases=[Phase.generate])
def test_any_routing(group, case):
    kind, arguments, with_gradients = case
    assert_right(group, kind, draw(kind, **arguments), with_gradients)


@with_ranks(2, others=(4,))
def test_timing_changes_no_bit(group):
    """Layouts differ from call to call, and some rank has nothing: then it is ahead of others."""
    kind, rounds, num_ranks = KINDS["frozen"], 30, len(group.pipes)
    tokens = []
    for i in range(rounds):
        sizes = [17 + rank + i % 3 * 400 for rank in range(num_ranks)]
        sizes[(i + 1) % num_ranks] *= i % 4 > 0
        tokens.append(draw(kind, sizes, 3, i))
    assert_results(group, calls, kind, tokens)


@with_ranks(2)
def test_one_graph_serves_every_routing(group):
    kind = KINDS["frozen"]
    tokens = [draw(kind, (12, 7), 3, i, first=i % 8) for i in range(6)]
    assert_results(group, replays, kind, tokens)


@with_ranks(2)
@pytest.mark.parametrize("way", ["all", "weights", "checkpoint"])
@pytest.mark.parametrize("rank", [0, 1])
def test_what_a_late_rank_was_sent_is_there_until_it_is_read(group, way, rank):
    """Forward and backward; autograd may leave the turn of a push open."""
    kind = KINDS["trained"]
    each = [(way, i == rank, kind, z) for i, z in enumerate(draw(kind, (200, 150), 3, 0))]
    for same in group.run(late_gradients, each):
        assert all(same), same


@with_ranks(2)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_graph_may_leave_a_turn_open(group, rank):
    kind = KINDS["trained"]
    tokens = [draw(kind, (200, 150), 3, i) for i in range(3)]
    each = zip(
        (rank == 0, rank == 1), (kind, kind), map(list, zip(*tokens, strict=True)), strict=True
    )
    for same in group.run(replayed_gradients, list(each)):
        assert all(same), same


@with_ranks(2, others=(1,))
@pytest.mark.parametrize("is_captured", [False, True], ids=["eager", "one graph"])
def test_layers_on_two_streams_follow_one_another(group, is_captured):
    kinds = [KINDS["frozen"], KINDS["in codes"]]
    num_ranks = len(group.pipes)
    tokens = [draw(kind, [900 + 10 * i] * num_ranks, 3, i) for i, kind in enumerate(kinds)]
    each = [(kinds, list(of_rank), is_captured) for of_rank in zip(*tokens, strict=True)]
    for same in group.run(on_two_streams, each):
        assert all(same), same


@with_ranks(2)
def test_a_graph_keeps_the_memory_that_it_was_captured_with(group):
    kind = KINDS["frozen"]
    each = zip([kind] * 2, draw(kind, (5, 3), 3, 0), draw(kind, (9000, 9), 3, 1), strict=True)
    for same in group.run(replays_after_growth, list(each)):
        assert all(same), same


def assert_results(
    group: Ranks, function: Callable[..., object], kind: Kind, tokens: list[list[Tokens]]
) -> None:
    came = group.run(function, [(kind, list(of_rank)) for of_rank in zip(*tokens, strict=True)])
    for i, z in enumerate(tokens):
        wanted = expected(kind, z, with_gradients=False, device="cuda")
        for rank, of_rank in enumerate(wanted):
            assert not isinstance(came[rank], str), came[rank]
            assert torch.equal(came[rank][i], of_rank.y), (i, rank)


# ---- What goes wrong ----


def assert_said(text: str, capfd: pytest.CaptureFixture[str]) -> None:
    """A rank writes this to stderr soon."""
    said, end = "", time.monotonic() + 60
    while text not in said and time.monotonic() < end:
        time.sleep(0.1)
        said += capfd.readouterr().err
    assert text in said


# When both trap, on one GPU, the driver tells one, and the other synchronizes for good.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("other", "says"),
    [
        pytest.param(None, f"rank 1 did not come within {SECONDS} s", id="none"),
        pytest.param(1, "is at another layer", id="another layer", marks=NEEDS_TWO_GPUS),
    ],
)
def test_a_rank_that_does_not_come_is_an_error(other, says, tmp_path, monkeypatch, capfd):
    """In processes of their own, since all work on the GPU is ended."""
    monkeypatch.setenv(MAY_SHARE, "1")
    kind = KINDS["frozen"]
    tokens = draw(kind, [3, 5], 2, 0)
    with ranks(2, tmp_path, "nccl") as group:
        group.run(run_parallel, [(kind, z, False, "cuda") for z in tokens])  # kernels are loaded
        each = zip((0, other), (kind, kind), tokens, strict=True)
        first, _ = group.run(replays_the_graph_of, list(each))
        assert "AcceleratorError" in first
        assert_said(says, capfd)


@pytest.mark.slow
def test_replays_that_overlap_are_an_error(tmp_path, capfd):
    """In a process of its own, since all work on the GPU is ended."""
    kind = KINDS["trained"]
    with ranks(1, tmp_path, "nccl") as group:
        (came,) = group.run(replays_on_two_streams, [(kind, *draw(kind, [64], 2, 0))])
        assert "AcceleratorError" in came
        assert_said("rank 0 runs two exchanges of a group at once", capfd)


@pytest.mark.slow
@pytest.mark.parametrize("aware", [[], [0]])
def test_ranks_share_no_gpu_unless_all_say_so(aware, tmp_path, monkeypatch):
    monkeypatch.delenv(MAY_SHARE, raising=False)
    first, *_ = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", first)
    kind = KINDS["frozen"]
    with ranks(2, tmp_path, "nccl") as group:
        tokens = draw(kind, [3, 5], 2, 0)
        each = [(rank in aware, kind, z) for rank, z in enumerate(tokens)]
        for came in group.run(insists_on_peers, each):
            assert came.startswith("RuntimeError: ")
            assert f"several ranks have one GPU (for tests, {MAY_SHARE}=1" in came


@NEEDS_TWO_GPUS
@pytest.mark.slow
@pytest.mark.parametrize("way", ["graph", "eager"])
def test_a_process_that_is_killed_ends_the_others_in_time(way, tmp_path):
    """They say why, and keep nothing of their GPUs."""
    num_ranks = torch.cuda.device_count()
    module = "tests.distributed.expert_parallel.looping_rank"
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", module, str(rank), str(num_ranks), str(tmp_path), way],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(num_ranks)
    ]
    try:
        for process in processes:
            assert process.stdout.readline() == "loops\n", process.stderr.read()[-2000:]
        used = bytes_of_processes()
        processes[1].kill()
        killed = time.monotonic()
        processes[1].wait()
        for process in processes[:1] + processes[2:]:
            _, said = process.communicate(timeout=SECONDS + 20)
            assert process.returncode != 0
            if way == "graph":  # an eager call may be told so by its host before
                assert f"rank 1 did not come within {SECONDS} s" in said, said[-2000:]
            assert "ExpertParallel" in said, said[-2000:]
        print(f"{way}: the others ended {time.monotonic() - killed:.1f} s after the kill")
    finally:
        for process in processes:
            process.kill()
            process.wait()
    pids = {process.pid for process in processes}
    if not pids <= used.keys():
        pytest.skip(f"nvidia-smi does not tell what {pids} use: {used}")
    assert not pids & bytes_of_processes().keys()
