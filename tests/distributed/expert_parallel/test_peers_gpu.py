"""The exchange by kernels that write into other ranks' memory.

Each rank is a process. Where GPUs are fewer, several have one, and take turns at it.
"""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from hypothesis import Phase, given, settings

from moefp8.distributed import ExpertParallel
from tests.distributed.expert_parallel.cases import (
    Kind,
    Tokens,
    assert_same,
    draw,
    expected,
    moved,
    parallel,
    routings,
    run_parallel,
    whole,
)
from tests.distributed.expert_parallel.looping_rank import SECONDS
from tests.distributed.ranks import Ranks, ranks
from tests.gpu import NEEDS_GPU, NEEDS_TWO_GPUS, slow

pytestmark = NEEDS_GPU
MAY_SHARE = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"
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
QUICK = "frozen", "trained"


@pytest.fixture(scope="module")
def group(request, tmp_path_factory) -> Iterator[Ranks]:
    """As many ranks as the test's parameter says."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(MAY_SHARE, "1")
        with ranks(request.param, tmp_path_factory.mktemp("ranks"), "nccl") as made:
            yield made


def with_ranks(*num_ranks: object) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("group", num_ranks, indirect=True)


# ---- What a rank does ----


def calls(kind: Kind, tokens: list[Tokens]) -> list[torch.Tensor]:
    """Results of calls that follow one another without a wait; ranks are late in turns."""
    experts, found = parallel(kind).to("cuda"), []
    given = [moved(z, "cuda") for z in tokens]
    with torch.no_grad():
        for number, z in enumerate(given):
            if number % dist.get_world_size() == dist.get_rank():
                torch.cuda._sleep(1_000_000)
            found.append(experts(*z[:3]))
    return [y.cpu() for y in found]


def captured(
    experts: ExpertParallel, given: Sequence[torch.Tensor]
) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    """A graph of a call, and its result."""
    with torch.no_grad():
        experts(*given)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = experts(*given)
    return graph, y


def replays(kind: Kind, tokens: list[Tokens]) -> list[torch.Tensor]:
    """Results of one graph."""
    given, found = [moved(z, "cuda")[:3] for z in tokens], []
    static = [x.clone() for x in given[0]]
    graph, y = captured(parallel(kind).to("cuda"), static)
    for z in given:
        for x, new in zip(static, z, strict=True):
            x.copy_(new)
        graph.replay()
        found.append(y.clone())
    return [y.cpu() for y in found]


def replays_the_graph_of(which: int | None, kind: Kind, tokens: Tokens) -> None:
    """One of two layers, or of none."""
    group = dist.new_group(list(range(dist.get_world_size())))
    layers = [
        ExpertParallel(
            whole(kind).cuda(), group, timeout=timedelta(seconds=SECONDS), transport="peers"
        )
        for _ in range(2)
    ]
    graphs = [captured(x, moved(tokens, "cuda")[:3])[0] for x in layers]
    if which is not None:
        graphs[which].replay()
    torch.cuda.synchronize()


def insists_on_peers(may_share: bool, kind: Kind, tokens: Tokens) -> None:
    if may_share:
        os.environ[MAY_SHARE] = "1"
    experts = ExpertParallel(whole(kind).cuda(), dist.group.WORLD, transport="peers")
    experts(*moved(tokens, "cuda")[:3])


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


@with_ranks(1, 2, *slow(3, 8))
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


@with_ranks(2, *slow(4))
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
    tokens, said = draw(kind, [3, 5], 2, 0), ""
    with ranks(2, tmp_path, "nccl") as group:
        group.run(run_parallel, [(kind, z, False, "cuda") for z in tokens])  # kernels are loaded
        each = zip((0, other), (kind, kind), tokens, strict=True)
        first, _ = group.run(replays_the_graph_of, list(each))
        assert "AcceleratorError" in first
        end = time.monotonic() + 5
        while says not in said and time.monotonic() < end:
            time.sleep(0.1)
            said += capfd.readouterr().err
    assert says in said


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
