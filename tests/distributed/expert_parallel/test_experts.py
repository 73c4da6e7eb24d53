"""Experts on several ranks give what one process gives that has all of them, to the bit."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from moefp8.testing import row_errors
from tests.distributed.expert_parallel.cases import (
    Kind,
    Tokens,
    assert_same,
    draw,
    expected,
    routings,
    run,
    run_parallel,
    whole,
)
from tests.distributed.ranks import Ranks, ranks

pytestmark = pytest.mark.skipif(not dist.is_gloo_available(), reason="torch without gloo")
FROZEN, TRAINED, ADAPTED = Kind(), Kind(what="trained"), Kind(what="adapted")
IN_CODES = Kind(saved_dtype=torch.float8_e4m3fn)


@pytest.fixture(scope="module", params=[2, 4])
def group(request, tmp_path_factory) -> Iterator[Ranks]:
    with ranks(request.param, tmp_path_factory.mktemp("ranks")) as made:
        yield made


def assert_right(group: Ranks, kind: Kind, tokens: list[Tokens], with_gradients: bool) -> None:
    came = group.run(run_parallel, [(kind, z, with_gradients) for z in tokens])
    assert_same(came, expected(kind, tokens, with_gradients=with_gradients))


@given(data=st.data())
@settings(max_examples=15, phases=[Phase.generate])  # ranks that failed answer no more
def test_any_routing_gives_what_one_process_gives(group, data):
    kinds = FROZEN, TRAINED, ADAPTED, IN_CODES
    cases = routings(len(group.pipes), kinds, max_tokens=9, max_top_k=4)
    kind, arguments, with_gradients = data.draw(cases)
    assert_right(group, kind, draw(kind, **arguments), with_gradients)


@pytest.mark.parametrize("kind", [FROZEN, TRAINED, ADAPTED], ids=lambda kind: kind.what)
@pytest.mark.parametrize(
    "ids",
    [(0, 1), (5, 6), (6, 7)],
    ids=["all on the first expert", "all on the last", "of no one"],
)
def test_skewed_routings(group, kind, ids):
    sizes = [3 * rank for rank in range(len(group.pipes))]
    tokens = draw(kind, sizes, 2, 0, first=ids[0], last=ids[1])
    assert_right(group, kind, tokens, True)


@pytest.mark.parametrize("kind", [FROZEN, TRAINED, ADAPTED], ids=lambda kind: kind.what)
def test_parts_too_small_for_float16(group, kind):
    """A rank's part of an output or a gradient keeps its eight bits till all are summed."""
    sizes = [9] * len(group.pipes)
    tokens = [
        z._replace(scores=z.scores * 2**-8, grad=z.grad * 2**-8)
        for z in draw(kind, sizes, 3, 0, dtype=torch.float16, last=kind.num_experts)
    ]
    assert_right(group, kind, tokens, True)


@pytest.mark.parametrize("kind", [FROZEN, TRAINED, ADAPTED], ids=lambda kind: kind.what)
def test_nobody_has_tokens(group, kind):
    assert_right(group, kind, draw(kind, [0] * len(group.pipes), 2, 0), True)


def test_masked_layout_and_sizes_of_whole_blocks(group):
    for kind in (Kind(layout="masked"), Kind(9, 256, 128), Kind(4, 8, 8)):
        tokens = draw(kind, range(2, 2 + len(group.pipes)), 3, 1)
        assert_right(group, kind, tokens, False)


def test_it_is_near_one_process_with_all_experts(group):
    """Each rank's part is rounded once more, to 2**-9 of itself; equal where one has all."""
    sizes = [20] * len(group.pipes)
    tokens = draw(FROZEN, sizes, 3, 5)
    came = group.run(run_parallel, [(FROZEN, z, False) for z in tokens])
    for ours, z in zip(came, tokens, strict=True):
        with torch.no_grad():
            wanted = run(whole(FROZEN), z, with_gradients=False).y
        assert row_errors(ours.y, wanted).max() < 2**-8
        assert ours.y.abs().max() > 0.05
    tokens = draw(FROZEN, sizes, 1, 5)
    came = group.run(run_parallel, [(FROZEN, z, False) for z in tokens])
    for ours, z in zip(came, tokens, strict=True):
        assert torch.equal(ours.y, run(whole(FROZEN), z, with_gradients=False).y)
