"""A whole layer whose tokens travel by kernels, on a CPU: a group of one rank.

Push and give back are the kernels' own text; a stand-in does what all others would. The cases are
those that the sanitizer runs on a GPU.
"""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from moefp8.distributed.expert_parallel.agreement import Call
from moefp8.distributed.expert_parallel.experts import ParallelExperts
from moefp8.distributed.expert_parallel.group import ExpertGroup
from moefp8.distributed.expert_parallel.local import LocalExperts
from moefp8.kernels import jit
from moefp8.kernels.targets import ANY_TARGET
from moefp8.precompile.variants import Demand, Exchange
from moefp8.routing.plan import plan_kernel_of
from tests.distributed.expert_parallel.local_ranks import group_of_one
from tests.distributed.expert_parallel.peers_cases import GIVE_BACK, PUSH, HostPeers, build
from tests.fakes import cuda_on_cpu
from tests.fakes.emulator import FakeDriver
from tests.kernels.sanitizer import ranks

NEEDS_GROUPED_MM_ON_A_CPU = pytest.mark.skipif(
    not hasattr(nn.functional, "grouped_mm"), reason="torch's grouped_mm runs on a CPU from 2.10 on"
)


class WithExchange(cuda_on_cpu.OnCpu):
    """Kernels of the exchange and of a plan run; others are emulated."""

    def compute(self, made, parameters):
        if made.kernel.name in self.functions:
            super().compute(made, parameters)
        else:
            super(cuda_on_cpu.OnCpu, self).compute(made, parameters)


@pytest.fixture(scope="module")
def functions(tmp_path_factory):
    plans = [plan_kernel_of(ahead) for ahead in (1, 4)]
    return build([*PUSH, *GIVE_BACK, *plans], tmp_path_factory)


@pytest.fixture
def gpu(functions, monkeypatch) -> Iterator[FakeDriver]:
    """A GPU whose memory is that of the CPU."""
    monkeypatch.setattr(torch.Tensor, "cuda", lambda x: x)
    monkeypatch.setattr(nn.Module, "cuda", lambda x: x)
    monkeypatch.setattr("tests.distributed.expert_parallel.local_ranks.Alone", HostPeers)
    with jit.using(FakeDriver(library=WithExchange(functions))) as driver:
        yield driver


LAUNCHES = list(ranks.launches())


def id_of(launch: ranks.Launch) -> str:
    return ", ".join(map(str, (*launch.args, *launch.keywords.values())))


@NEEDS_GROUPED_MM_ON_A_CPU
@pytest.mark.parametrize("launch", LAUNCHES, ids=id_of)
def test_a_rank_of_one_gives_the_bits_of_no_group(gpu, launch):
    launch()
    launched = {made.kernel.name.partition("<")[0] for made in gpu.launched}
    name, *_ = launch.args
    pushes = "push_codes_kernel" if "frozen" in name else "push_rows_kernel"
    assert pushes in launched
    whole = "frozen" in name and "odd" not in name
    assert ("combine_and_give_back_kernel" in launched) == whole
    assert ("give_back_kernel" in launched) != whole


# ---- Turns that autograd leaves open ----

E, H, K, T = 4, 64, 2, 9
Parts = tuple[ParallelExperts | None, nn.Parameter, torch.Tensor, torch.Tensor]


def scaled(
    scale: torch.Tensor, x: torch.Tensor, ids: torch.Tensor, scores: torch.Tensor
) -> torch.Tensor:
    """Experts that multiply by a vector of their own; E is nobody's."""
    of_choices = nn.functional.pad(scale, (0, 0, 0, 1))[ids.long()] * scores[..., None]
    return (x[:, None].float() * of_choices).sum(1).to(x.dtype)


class Block(nn.Module):
    """A residual block, whose experts are those of `parallel`, or are here if that is None."""

    def __init__(self, parallel: ParallelExperts | None, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.norm = nn.RMSNorm(H)
        self.scale = nn.Parameter(torch.randn(E, H, generator=generator))
        self.ids = torch.randint(0, E + 1, (T, K), generator=generator)
        self.scores = torch.rand(T, K, generator=generator)
        self.parallel = parallel

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        given = self.norm(x).bfloat16(), self.ids, self.scores
        if self.parallel is None:
            return x + scaled(self.scale, *given)
        layer = LocalExperts(H, 0, E, lambda *z: scaled(self.scale, *z), [self.scale])
        return x + self.parallel(layer, *given, None)


def plain(blocks: list[Block], x: torch.Tensor) -> torch.Tensor:
    return blocks[1](blocks[0](x))


def checkpointed(blocks: list[Block], x: torch.Tensor) -> torch.Tensor:
    for block in blocks:
        x = checkpoint(block, x, use_reentrant=False)
    return x


def with_another(blocks: list[Block], x: torch.Tensor) -> torch.Tensor:
    """Of what is computed again, the last exchange is that of a layer without a gradient."""

    def both(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return blocks[0](x), blocks[1](x.detach())

    return checkpoint(both, x, use_reentrant=False)[0]


WAYS = {"plain": plain, "checkpointed": checkpointed, "with another": with_another}
ASKS: dict[str, Callable[[torch.Tensor, list[Block]], list[torch.Tensor]]] = {
    "all": lambda x, blocks: [x, *(block.scale for block in blocks)],
    "weights": lambda x, blocks: [blocks[0].scale],
    "tokens": lambda x, blocks: [x],
}


@pytest.mark.parametrize("asks", ASKS)
@pytest.mark.parametrize("way", WAYS)
def test_gradients_are_right_whatever_autograd_leaves_out(gpu, way, asks):
    """Again and again, so that each begins where the one before has stopped."""
    group = group_of_one()
    blocks = [Block(ParallelExperts(group, E), seed) for seed in range(2)]
    alone = [Block(None, seed) for seed in range(2)]
    for _ in range(2):
        found = [gradients(WAYS[way], ASKS[asks], z) for z in (blocks, alone)]
        for ours, theirs in zip(*found, strict=True):
            assert (ours - theirs).norm() <= 2**-7 * theirs.norm()
    assert group.peers.memory.error.tolist() == [0] * 4
    with torch.no_grad():
        x = torch.randn(T, H)
        assert (plain(blocks, x) - plain(alone, x)).norm() <= 2**-7 * plain(alone, x).norm()
    pushed, given_back, *_ = group.peers.memory.state.tolist()
    assert pushed == given_back


def gradients(
    way: Callable[[list[Block], torch.Tensor], torch.Tensor],
    asks: Callable[[torch.Tensor, list[Block]], list[torch.Tensor]],
    blocks: list[Block],
) -> list[torch.Tensor]:
    torch.manual_seed(5)
    x, grad = torch.randn(T, H, requires_grad=True), torch.randn(T, H)
    inputs = asks(x, blocks)
    found = torch.autograd.grad(way(blocks, x), inputs, grad, allow_unused=True)
    return [torch.zeros_like(z) if g is None else g for g, z in zip(found, inputs, strict=True)]


def test_turns_that_graphs_hold_are_told_apart(gpu):
    """Also those of one layer; eager ones are ordered by their hosts."""
    group, x, turns = group_of_one(), torch.randn(T, H), []
    block = Block(ParallelExperts(group, E), 0)
    for gpu.capture in (None, None, 1, 1, 2):
        block(x)
        turns.append(group.peers.memory.state[2].item())
    assert turns[0] == turns[1]
    assert len(set(turns)) == 4
    assert len({turn % 2**32 for turn in turns}) == 1  # all ranks are at one layer


def test_a_backward_meets_no_forward(gpu):
    group, x = group_of_one(), torch.randn(T, H, requires_grad=True)
    y = Block(ParallelExperts(group, E), 0)(x)
    forward = group.peers.memory.turn.item()
    y.sum().backward()
    assert group.peers.memory.turn.item() != forward


class AnotherBegins(TorchDispatchMode):
    """Before each copy of a dtype, a graph on another stream begins a turn of the group."""

    def __init__(self, group: ExpertGroup, dtype: torch.dtype) -> None:
        super().__init__()
        self.group, self.dtype = group, dtype

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.clone.default and args[0].dtype == self.dtype:
            self.group.peers.memory.turn.add_(1)
        return func(*args, **kwargs or {})


@pytest.mark.parametrize(
    ("way", "dtype"), [("plain", torch.bfloat16), ("checkpointed", torch.int32)]
)
def test_a_turn_that_is_overwritten_before_it_is_read_is_an_error(gpu, way, dtype):
    """No results answer gradients of weights alone, nor what is computed again for them.

    dtype: of gradients that came, of choices. The error names the rank as all ranks do.
    """
    group = group_of_one()
    group.agreement.ranks = [4]
    blocks, gpu.capture = [Block(ParallelExperts(group, E), seed) for seed in range(2)], 1
    y = WAYS[way](blocks, torch.randn(T, H))
    says = pytest.raises(RuntimeError, match="rank 4 runs two exchanges")
    with AnotherBegins(group, dtype), says:
        torch.autograd.grad(y, [blocks[0].scale], torch.randn(T, H))


@pytest.mark.parametrize("num_tokens", [0, 1, 2])
def test_what_is_pushed_again_runs_kernels_that_are_precompiled(gpu, num_tokens):
    """Tokens of no columns, of a size that 8 does not divide."""
    size, group = 65, group_of_one()
    scale = nn.Parameter(torch.randn(E, size))
    layer = LocalExperts(size, 0, E, lambda *z: scaled(scale, *z), [scale])
    ids, scores = torch.zeros(num_tokens, K, dtype=torch.int64), torch.rand(num_tokens, K)
    x = torch.randn(num_tokens, size, dtype=torch.bfloat16, requires_grad=True)
    one, other = (ParallelExperts(group, E) for _ in range(2))
    demand = Demand(2, frozenset([torch.bfloat16]), ANY_TARGET, backward=True)
    needed = Exchange.of(one).kernels(demand, size, are_codes=False)
    transport = group.transport_for([Call(0, 0, E, size, K, num_tokens=num_tokens)], ids)
    transport.dispatch_tokens(x.detach(), scores)
    other(layer, x, ids, scores, None)
    transport.combine(torch.zeros(num_tokens, size, dtype=torch.bfloat16))
    launched = {made.kernel for made in gpu.launched if made.kernel.source == PUSH[0].source}
    assert launched <= {*needed}


def test_an_exchange_that_an_exception_ends(gpu):
    group = group_of_one()
    block, alone = Block(ParallelExperts(group, E), 0), Block(None, 0)
    x = torch.randn(T, H)

    def fails(*_: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError("no memory")

    for _ in range(2):
        with pytest.raises(torch.OutOfMemoryError):
            block.parallel(LocalExperts(H, 0, E, fails), x, block.ids, block.scores, None)
        assert (block(x) - alone(x)).norm() <= 2**-7 * alone(x).norm()
    assert group.peers.memory.error.tolist() == [0] * 4
