"""Ranks that share experts come to what one process comes to that takes all their batches."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from moefp8.testing import relative_error
from tests.distributed.expert_parallel.train_cases import (
    RANKS_OF_EXPERTS,
    Together,
    clipped,
    is_of_experts,
    loss_of,
    of_ranks,
    tokens_of,
)
from tests.distributed.ranks import Ranks, ranks
from tests.distributed.trained_cases import Trained

pytestmark = pytest.mark.skipif(not dist.is_gloo_available(), reason="torch without gloo")


@pytest.fixture(scope="module")
def two(tmp_path_factory) -> Iterator[Ranks]:
    with ranks(2, tmp_path_factory.mktemp("two")) as made:
        yield made


@pytest.fixture(scope="module")
def four(tmp_path_factory) -> Iterator[Ranks]:
    with ranks(4, tmp_path_factory.mktemp("four")) as made:
        yield made


def run(group: Ranks, *arguments: Any) -> list[dict[str, torch.Tensor]]:
    came = group.run(of_ranks, [arguments] * len(group.pipes))
    for each in came:
        assert not isinstance(each, str), each
    return came


def assert_right(came: list[Any], wanted: dict[str, torch.Tensor], rtol: dict[bool, float]) -> None:
    """rtol: of the largest value, by whether a parameter is of experts."""
    for rank, found in enumerate(came):
        assert found.keys() == wanted.keys()
        part = rank % RANKS_OF_EXPERTS
        for name, x in found.items():
            whole = wanted[name]
            own = whole.chunk(RANKS_OF_EXPERTS)[part] if is_of_experts(name) else whole
            atol = rtol[is_of_experts(name)] * float(own.abs().max())
            torch.testing.assert_close(x, own, rtol=0, atol=atol, msg=lambda m, n=name: f"{n}: {m}")


EXACT = {True: 0.0, False: 0.0}


@pytest.mark.parametrize("wrap", ["plain", "fsdp of others"])
@pytest.mark.parametrize("steps", [False, True], ids=["gradients", "steps"])
def test_two_ranks_train_as_one_process(two, wrap, steps):
    together = Together()
    wanted = together.steps(2) if steps else together.gradients(2)
    assert_right(run(two, wrap, (2,), steps), wanted, EXACT)


@pytest.mark.parametrize("wrap", ["fsdp", "fsdp, codes"])
def test_experts_are_sharded_over_the_other_ranks(four, wrap):
    """What two ranks add is exact, what four add depends on their order."""
    came = run(four, wrap, (2, 2), False)
    assert_right(came, Together().gradients(4), {True: 0.0, False: 1e-6})
    came = run(four, wrap, (2, 2), True)
    assert_right(came, Together().steps(4), {True: 1e-4, False: 1e-4})


def test_gradients_are_clipped_by_the_norm_of_all(four):
    wanted = Together().gradients(4)
    norm = torch.stack([x.norm() for x in wanted.values()]).norm()
    came = four.run(clipped, [(0.1,)] * 4)
    for _, total in came:
        torch.testing.assert_close(total, norm, rtol=1e-5, atol=0)
    assert norm > 0.2
    scaled = {name: x * 0.1 / norm for name, x in wanted.items()}
    assert_right([found for found, _ in came], scaled, {True: 1e-5, False: 1e-5})


def test_the_one_process_is_near_any_other():
    """It differs in roundings alone, which FP8 amplifies."""
    together, model = Together().gradients(2), Trained()
    losses = [loss_of(model(tokens_of(rank, 0))) for rank in range(2)]
    (torch.stack(losses).sum() / 2).backward()
    for name, x in model.named_parameters():
        assert relative_error(together[name].flatten()[None], x.grad.flatten()[None]) < 0.1, name
