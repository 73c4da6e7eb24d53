"""A transport of one's own, given from outside: it writes `dispatch` and `combine`."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from moefp8.distributed import ExpertParallel, Transport
from tests.distributed.expert_parallel import transport_cases as cases
from tests.distributed.expert_parallel.cases import (
    BF16,
    Kind,
    adapt,
    assert_same,
    draw,
    expected,
    run,
    whole,
)
from tests.distributed.expert_parallel.transport_cases import Everywhere, Incomplete, LoopBack
from tests.distributed.ranks import Ranks, ranks

pytestmark = pytest.mark.skipif(not dist.is_gloo_available(), reason="torch without gloo")
KINDS = {
    "frozen": Kind(),
    "trained": Kind(what="trained"),
    "adapted": Kind(what="adapted"),
    "frozen, in codes": Kind(saved_dtype=torch.float8_e4m3fn),
    "frozen, biases": Kind(bias=True),
    "trained, biases": Kind(what="trained", bias=True),
}
of_every_kind = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)


@pytest.fixture
def alone() -> Iterator[None]:
    """This process is a group of one."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> Iterator[Ranks]:
    with ranks(2, tmp_path_factory.mktemp("ranks")) as both:
        yield both


@of_every_kind
@pytest.mark.parametrize("dtype", [BF16, torch.float32])
@pytest.mark.parametrize("with_gradients", [False, True])
def test_a_process_that_plays_the_group_gives_the_bits_of_no_group(
    alone, kind, dtype, with_gradients
):
    for num_tokens in (7, 0):
        (tokens,) = draw(kind, [num_tokens], 3, 1, dtype=dtype, has_addend=True)
        experts = whole(kind)
        adapt(experts, kind)
        came = cases.run_over(LoopBack, kind, tokens, with_gradients)
        with torch.set_grad_enabled(with_gradients):
            assert_same([came], [run(experts, tokens, with_gradients=with_gradients)])


@of_every_kind
@pytest.mark.parametrize("with_gradients", [False, True])
@pytest.mark.parametrize("sizes", [(5, 3), (0, 4)], ids=["few", "none and few"])
def test_ranks_may_receive_tokens_without_an_expert_there(pair, kind, with_gradients, sizes):
    tokens = draw(kind, sizes, 2, 3)
    came = pair.run(cases.run_over, [(Everywhere, kind, z, with_gradients) for z in tokens])
    assert_same(came, expected(kind, tokens, with_gradients=with_gradients))


def test_a_transport_writes_dispatch_and_combine(alone):
    (tokens,) = draw(Kind(), [2], 2, 0)
    with pytest.raises(TypeError, match=r"Incomplete.*combine"):
        cases.run_over(Incomplete, Kind(), tokens, False)
    assert Transport.__abstractmethods__ == {"dispatch", "combine"}


@pytest.mark.parametrize("transport", [int, "letters", 3, lambda group, calls, ids: None])
def test_what_is_no_transport_is_refused(alone, transport):
    rule = r"transport must be one of .*'collective'.*, or a class derived from moefp8.distributed"
    with pytest.raises(ValueError, match=rule):
        ExpertParallel(whole(Kind()), dist.group.WORLD, transport=transport)


def test_ranks_and_layers_of_a_group_have_one_transport(pair):
    for one, other in ((LoopBack, Everywhere), (LoopBack, "collective")):
        for came in pair.run(cases.made_over, [(one,), (other,)]):
            (said,) = came
            assert "all ranks must make their layers with one transport" in said
    for first, second, same in pair.run(cases.made_over, [(LoopBack, "auto", LoopBack)] * 2):
        assert first is same is True
        assert "transport must be one for all layers of a group, got auto" in second
