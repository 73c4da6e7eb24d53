"""The exchange by kernels that write into other ranks' memory, on one GPU and on several."""

import copy
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from functools import lru_cache

import pytest
import torch
from hypothesis import Phase, given, settings

import moefp8
from moefp8 import GroupedExperts
from moefp8.distributed.expert_parallel.experts import ParallelExperts
from moefp8.distributed.expert_parallel.group import ExpertGroup
from tests.distributed.expert_parallel.cases import (
    Kind,
    Results,
    Tokens,
    adapt,
    assert_same,
    draw,
    expected,
    routings,
    run,
    run_parallel,
    whole,
)
from tests.distributed.expert_parallel.local_ranks import LocalRanks
from tests.distributed.expert_parallel.looping_rank import SECONDS
from tests.distributed.ranks import Ranks, ranks
from tests.gpu import NEEDS_GPU, NEEDS_TWO_GPUS

# Ranks that are threads share a context, where to load a kernel waits for all that run, and these
# may wait for this rank. Kernels of ours are the same on all ranks, so the first rank there loads
# them for all; those of libraries are loaded at once. Streams that share a queue wait likewise.
os.environ.setdefault("CUDA_MODULE_LOADING", "EAGER")
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")

pytestmark = NEEDS_GPU
NUM_RANKS = (1, 2, 3, 8)
KINDS = {
    "frozen": Kind(8, 256, 128),
    "odd": Kind(9, 200, 72),
    "very odd": Kind(9, 201, 71),
    "trained": Kind(8, 256, 128, "trained"),
    "adapted": Kind(8, 264, 136, "adapted"),
    "in codes": Kind(8, 256, 128, saved_dtype=torch.float8_e4m3fn),
    "masked": Kind(8, 256, 128, layout="masked"),
    "like Qwen3": Kind(16, 2048, 768),
}


@lru_cache(maxsize=1)
def local(num_ranks: int) -> LocalRanks:
    return LocalRanks(num_ranks)


@lru_cache(maxsize=32)
def layer(kind: Kind, group: ExpertGroup) -> GroupedExperts:
    """The rank's part, in the group."""
    experts = copy.deepcopy(whole(kind))
    if group.size > 1:
        moefp8.shard(experts, {"": "experts"}, group.rank, group.size)
    adapt(experts, kind)
    experts.parallel = ParallelExperts(group, kind.num_experts)
    return experts.cuda()


def layers(kind: Kind, ranks: LocalRanks) -> list[GroupedExperts]:
    """All parts, made before the ranks begin: nothing is copied to the GPU meanwhile."""
    return [layer(kind, group) for group in ranks.groups]


def compute(kind: Kind, tokens: Sequence[Tokens], with_gradients: bool) -> list[Results]:
    """What the ranks of one GPU give."""
    on_gpu = [Tokens(*(None if x is None else x.cuda() for x in z)) for z in tokens]
    parts = layers(kind, local(len(tokens)))
    torch.cuda.synchronize()

    def one(rank: int, group: ExpertGroup) -> Results:
        # A backward in the engine's thread of the GPU would keep that of the other ranks waiting.
        here = torch.autograd.set_multithreading_enabled(False)
        with here, torch.set_grad_enabled(with_gradients):
            return run(parts[rank], on_gpu[rank], with_gradients=with_gradients)

    came = local(len(tokens)).run(one)
    return [Results(*(x.cpu() for x in z[:3]), [x.cpu() for x in z.of_weights]) for z in came]


def few_and_many(kind: Kind, num_ranks: int) -> Iterator[list[Tokens]]:
    """Tokens of each rank, of which one has none."""
    for seed, most in ((0, 40), (1, 3), (2, 300)):
        sizes = [(most * (rank + 1 + seed)) // (num_ranks + 1) for rank in range(num_ranks)]
        sizes[seed % num_ranks] = 0 if seed == 1 else sizes[seed % num_ranks]
        yield draw(kind, sizes, 1 + seed * 3, seed, has_addend=seed == 1)


def assert_right(came: Sequence[Results], kind: Kind, tokens: list[Tokens], grads: bool) -> None:
    assert_same(came, expected(kind, tokens, with_gradients=grads, device="cuda"))


@pytest.mark.parametrize("with_gradients", [False, True])
@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("num_ranks", NUM_RANKS)
def test_ranks_give_what_one_process_gives(num_ranks, name, with_gradients):
    kind = KINDS[name]
    if name == "like Qwen3" and num_ranks > 3:
        pytest.skip("so many ranks of large layers do not fit on one GPU beside each other")
    for tokens in few_and_many(kind, num_ranks):
        assert_right(compute(kind, tokens, with_gradients), kind, tokens, with_gradients)


DRAWN = [KINDS[name] for name in ("frozen", "odd", "trained", "adapted")]


@given(case=routings(4, DRAWN, max_tokens=30, max_top_k=8))
@settings(max_examples=60, phases=[Phase.generate])
def test_any_routing(case):
    kind, arguments, with_gradients = case
    tokens = draw(kind, **arguments)
    assert_right(compute(kind, tokens, with_gradients), kind, tokens, with_gradients)


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_timing_changes_no_bit(num_ranks):
    """Ranks are slowed in turns, and calls follow one another without a wait.

    Layouts differ from call to call, and some rank has nothing: then it is ahead of the others.
    """
    kind, rounds = KINDS["frozen"], 30
    tokens = []
    for i in range(rounds):
        sizes = [17 + rank + i % 3 * 400 for rank in range(num_ranks)]
        sizes[(i + 1) % num_ranks] *= i % 4 > 0
        tokens.append(draw(kind, sizes, 3, i))
    wanted = [expected(kind, z, with_gradients=False, device="cuda") for z in tokens]
    on_gpu = [[Tokens(*(None if x is None else x.cuda() for x in z)) for z in y] for y in tokens]
    parts = layers(kind, local(num_ranks))
    torch.cuda.synchronize()

    def loop(rank: int, group: ExpertGroup) -> list[torch.Tensor]:
        experts, found = parts[rank], []
        with torch.no_grad():
            for i in range(rounds):
                if i % num_ranks == rank:
                    torch.cuda._sleep(200_000)
                x, ids, scores, *_ = on_gpu[i][rank]
                found.append(experts(x, ids, scores))
        return found

    came = local(num_ranks).run(loop)
    for i in range(rounds):
        for rank in range(num_ranks):
            assert torch.equal(came[rank][i].cpu(), wanted[i][rank].y), (i, rank)


def test_one_graph_serves_every_routing():
    num_ranks, kind, sizes = 2, KINDS["frozen"], (12, 7)
    tokens = [draw(kind, sizes, 3, i, first=i % 8) for i in range(6)]
    wanted = [expected(kind, z, with_gradients=False, device="cuda") for z in tokens]
    on_gpu = [[Tokens(*(None if x is None else x.cuda() for x in z)) for z in y] for y in tokens]
    parts = layers(kind, local(num_ranks))
    torch.cuda.synchronize()

    def replay(rank: int, group: ExpertGroup) -> list[torch.Tensor]:
        experts, static = parts[rank], [x.clone() for x in on_gpu[0][rank][:3]]
        graph = torch.cuda.CUDAGraph()
        with torch.no_grad():
            experts(*static)
            group.agreement.gather(None)
            torch.cuda.current_stream().synchronize()
            group.agreement.gather(None)
            with torch.cuda.graph(
                graph, stream=torch.cuda.current_stream(), capture_error_mode="thread_local"
            ):
                y = experts(*static)
        found = []
        for z in on_gpu:
            for x, new in zip(static, z[rank], strict=False):
                x.copy_(new)
            graph.replay()
            found.append(y.clone())
        return found

    came = local(num_ranks).run(replay)
    for i, each in enumerate(wanted):
        for rank in range(num_ranks):
            assert torch.equal(came[rank][i].cpu(), each[rank].y), (i, rank)


ALONE = """
import time
import torch
from tests.distributed.expert_parallel.local_ranks import LocalRanks
from tests.distributed.expert_parallel.test_peers_gpu import KINDS, layers, draw
made = LocalRanks(2, seconds={seconds})
kind = KINDS["frozen"]
z = [x.cuda() if x is not None else x for x in draw(kind, [3], 2, 0)[0]]
parts = layers(kind, made)
def good(rank, group):
    with torch.no_grad():
        parts[rank](*z[:3])
made.run(good)
def call(rank, group):
    real = group.exchange
    if rank == 1 and {skips}:
        def stop(calls, ids):
            time.sleep(5)  # the other has pushed, and has waited for as long as it may
            raise RuntimeError("this rank stops")
        group.exchange = stop
    elif rank == 1:
        group.exchange = lambda calls, ids: real([calls[0]._replace(layer=5), *calls[1:]], ids)
    with torch.no_grad():
        parts[rank](*z[:3])
made.run(call)
"""


@pytest.mark.parametrize(
    ("skips", "says"), [(True, "did not come within 1 s"), (False, "is at another layer")]
)
def test_a_rank_that_does_not_come_is_an_error(skips, says):
    """In a process of its own, since all work on the GPU is ended."""
    code = ALONE.format(seconds=1, skips=skips)
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode != 0
    assert says in done.stderr, done.stderr[-2000:]


# ---- Several GPUs ----


@pytest.fixture(scope="module")
def group(tmp_path_factory) -> Iterator[Ranks]:
    with ranks(torch.cuda.device_count(), tmp_path_factory.mktemp("ranks"), "nccl") as made:
        yield made


@NEEDS_TWO_GPUS
@pytest.mark.parametrize("with_gradients", [False, True])
@pytest.mark.parametrize("name", KINDS)
def test_gpus_give_what_one_gives(group, name, with_gradients):
    kind, num_ranks = KINDS[name], len(group.pipes)
    for tokens in few_and_many(kind, num_ranks):
        came = group.run(run_parallel, [(kind, z, with_gradients, "cuda") for z in tokens])
        assert_right(came, kind, tokens, with_gradients)


@NEEDS_TWO_GPUS
@pytest.mark.parametrize("way", ["graph", "eager"])
def test_a_process_that_is_killed_ends_the_others_in_time(way, tmp_path):
    """They say why, and leave their GPUs as free as these were."""
    num_ranks = torch.cuda.device_count()
    torch.cuda.synchronize()
    free = [torch.cuda.mem_get_info(i)[0] for i in range(num_ranks)]
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
    for rank, before in enumerate(free):
        assert torch.cuda.mem_get_info(rank)[0] >= before - (64 << 20)
