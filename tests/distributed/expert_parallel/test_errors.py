"""Ranks that do not do the same: each is told, none waits for ever, and the next call is right."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.distributed.expert_parallel import error_cases as cases
from tests.distributed.expert_parallel.cases import (
    BF16,
    LONG,
    Kind,
    Tokens,
    draw,
    expected,
    run_parallel,
)
from tests.distributed.ranks import Ranks, ranks

pytestmark = pytest.mark.skipif(not dist.is_gloo_available(), reason="torch without gloo")
FROZEN, TRAINED = Kind(), Kind(what="trained")
E, H = FROZEN.num_experts, FROZEN.hidden_size


@pytest.fixture(scope="module", params=["by words", "by gloo"])
def how(request) -> str:
    """How hosts agree."""
    return request.param


def begin(group: Ranks, how: str) -> None:
    if how == "by gloo":
        group.run(cases.share_no_words, [()] * 2)


@pytest.fixture(scope="module")
def group(how, tmp_path_factory) -> Iterator[Ranks]:
    with ranks(2, tmp_path_factory.mktemp("ranks")) as made:
        begin(made, how)
        assert_works(made)  # whichever test is first, errors name this layer: layer 0
        yield made


def tokens_of(kind: Kind = FROZEN, top_k: int = 2, seed: int = 0) -> list[Tokens]:
    return draw(kind, [5, 4], top_k, seed)


def assert_works(group: Ranks, kind: Kind = FROZEN) -> None:
    tokens = tokens_of(kind, seed=1)
    came = group.run(run_parallel, [(kind, x) for x in tokens])
    for ours, theirs in zip(came, expected(kind, tokens), strict=True):
        assert not isinstance(ours, str), ours
        assert torch.equal(ours.y, theirs.y)
        assert torch.equal(ours.dx, theirs.dx)


X, IDS, SCORES = torch.zeros(4, H, dtype=BF16), torch.zeros(4, 2).long(), torch.zeros(4, 2)
CALL = Tokens(X, IDS, SCORES, None, X)
WRONG = {
    "TypeError: ExpertParallel: hidden_states must be": {"x": torch.zeros(4, H, dtype=torch.int)},
    "TypeError: ExpertParallel: top_k_index must be": {"ids": torch.zeros(4, 2)},
    "TypeError: ExpertParallel: top_k_weights must be": {"scores": torch.zeros(4, 2).int()},
    "TypeError: ExpertParallel: addend must be bfloat16": {"addend": torch.zeros(4, H)},
    "ValueError: ExpertParallel: hidden_states must be [T, H]": {"x": torch.zeros(4, H - 8)},
    "ValueError: ExpertParallel: top_k_index must be [T, k]": {"ids": torch.zeros(3, 2).long()},
    "ValueError: ExpertParallel: top_k_index must have 2": {"ids": torch.zeros(4).long()},
    "ValueError: ExpertParallel: top_k_weights must be [T, k]": {"scores": torch.zeros(4, 3)},
    "ValueError: ExpertParallel: top_k_index must be in [0, E]": {"ids": torch.full((4, 2), E + 1)},
    "TypeError: ExpertParallel: top_k_index must be a tensor, got NoneType": {"ids": None},
}


@pytest.mark.parametrize("error", WRONG)
@pytest.mark.parametrize("rank", range(2))
def test_wrong_arguments_of_one_rank_are_errors_of_both(group, error, rank):
    given = [CALL._replace(**WRONG[error]) if rank == i else CALL for i in range(2)]
    came = group.run(run_parallel, [(FROZEN, x, False) for x in given])
    assert came[rank].startswith(error)
    assert came[1 - rank].startswith(
        f"RuntimeError: ExpertParallel: forward of layer 0 cannot go on, since rank {rank} of"
    )
    assert_works(group)


def test_wrong_arguments_of_both_ranks_are_told_by_each(group):
    given = CALL._replace(ids=torch.full((4, 2), -1)), CALL._replace(ids=torch.zeros(4, 2))
    first, second = group.run(run_parallel, [(FROZEN, x, False) for x in given])
    assert first.startswith("ValueError: ExpertParallel: top_k_index must be in [0, E] for E = 6")
    assert second.startswith("TypeError: ExpertParallel: top_k_index must be int32 or int64")
    assert_works(group)


def assert_all(came: list[Any], error: str) -> None:
    for each in came:
        assert isinstance(each, str)
        assert each.startswith(error), each


def test_as_many_choices_on_each_rank(group):
    given = tokens_of(top_k=2)[0], tokens_of(top_k=3)[1]
    came = group.run(run_parallel, [(FROZEN, x, False) for x in given])
    assert_all(came, "ValueError: ExpertParallel: all ranks must make the same calls in the same ")
    assert "top_k is 2 on rank 0, 3 on rank 1" in came[0]
    assert_works(group)


NOT_A_TENSOR = {"hidden_states": ([0.0], IDS, SCORES), "top_k_weights": (X, IDS, None)}


@pytest.mark.parametrize("name", NOT_A_TENSOR)
def test_what_is_no_tensor_on_one_rank_is_an_error_of_both(group, name):
    given = NOT_A_TENSOR[name], (X, IDS, SCORES)
    first, second = group.run(cases.calls_with, [(FROZEN, *x) for x in given])
    assert first.startswith(f"TypeError: ExpertParallel: {name} must be a tensor, got ")
    assert second.startswith("RuntimeError: ExpertParallel: forward of layer 0 cannot go on, since")
    assert_works(group)


# What ranks come with, and what they are told.
NOT_ALIKE = {
    "dtype is bfloat16 on rank 0, float32 on rank 1": ((X, IDS, SCORES), (X.float(), IDS, SCORES)),
    "dtype is float16 on rank 0, bfloat16 on rank 1": ((X.half(), IDS, SCORES), (X, IDS, SCORES)),
    "the device of hidden_states is cpu on rank 0, meta on rank 1": (
        (X, IDS, SCORES),
        (X.to("meta"), IDS.to("meta"), SCORES.to("meta")),
    ),
    "the device of top_k_index is meta on rank 0, cpu on rank 1": (
        (X, IDS.to("meta"), SCORES),
        (X, IDS, SCORES),
    ),
    "the device of top_k_weights is cpu on rank 0, meta on rank 1": (
        (X, IDS, SCORES),
        (X, IDS, SCORES.to("meta")),
    ),
}


@pytest.mark.parametrize("says", NOT_ALIKE)
@pytest.mark.parametrize("kind", [FROZEN, TRAINED], ids=lambda kind: kind.what)
def test_tokens_of_one_dtype_and_kind_of_device_on_each_rank(group, kind, says):
    came = group.run(cases.calls_with, [(kind, *x) for x in NOT_ALIKE[says]])
    assert_all(came, "ValueError: ExpertParallel: all ranks must make the same calls in the same ")
    assert says in came[0]
    assert_works(group, kind)


def test_tensors_of_two_devices_on_all_ranks(group):
    came = group.run(cases.calls_with, [(FROZEN, X, IDS.to("meta"), SCORES)] * 2)
    assert_all(came, "ValueError: ExpertParallel: all tensors must be on one device, got hidden_st")
    assert_works(group)


def test_an_addend_on_another_device(group):
    given = (FROZEN, X, IDS, SCORES, X.to("meta")), (FROZEN, X, IDS, SCORES)
    first, second = group.run(cases.calls_with, given)
    assert first.startswith("ValueError: ExpertParallel: all tensors must be on one device, got ")
    assert second.startswith("RuntimeError: ExpertParallel: forward of layer 0 cannot go on, since")
    assert_works(group)


def test_all_ranks_ask_for_gradients_of_tokens_or_none_does(group):
    given = [(what, TRAINED, x) for what, x in zip(("all", "weights"), tokens_of(), strict=True)]
    first, second = group.run(cases.backward_of, given)
    says = "phase is gradients of tokens on rank 0, forward on rank 1"
    assert_all([first, second], "ValueError: ExpertParallel: all ranks must make the same calls")
    assert says in first
    assert says in second
    assert_works(group, TRAINED)


def test_layers_come_in_one_order(group):
    kinds, tokens = (FROZEN, TRAINED), tokens_of()
    assert_works(group, TRAINED)  # so that it is made behind the other one
    given = (kinds, tokens[0]), (kinds[::-1], tokens[1])
    for calls in zip(*group.run(cases.in_order, given), strict=True):
        assert_all(list(calls), "ValueError: ExpertParallel: all ranks must make the same calls")
        assert "layer is " in calls[0]
    assert_works(group)


@pytest.mark.parametrize("kind", [FROZEN, TRAINED], ids=lambda kind: kind.what)
def test_a_forward_does_not_meet_a_backward(group, kind):
    ways = zip(("forward", "backward"), tokens_of(), strict=True)
    came = group.run(cases.forward_and, [(way, kind, x) for way, x in ways])
    assert_all(came, "ValueError: ExpertParallel: all ranks must make the same calls")
    assert "phase is forward on rank 0, backward on rank 1" in came[0]
    assert_works(group, kind)


@pytest.mark.parametrize("kind", [FROZEN, TRAINED], ids=lambda kind: kind.what)
def test_gradients_are_off_on_all_ranks_or_on_none(group, kind):
    came = group.run(run_parallel, [(kind, x, rank > 0) for rank, x in enumerate(tokens_of())])
    assert_all(came, "ValueError: ExpertParallel: all ranks must run forward of layer")
    assert "torch.no_grad() holds on rank 0 alone, not on rank 1" in came[0]
    assert_works(group, kind)


def test_a_backward_that_fails_on_one_rank_fails_on_both(group):
    given = [(FROZEN, x, rank > 0) for rank, x in enumerate(tokens_of())]
    first, second = group.run(cases.asks_for_weights, given)
    assert second.startswith("NotImplementedError: ExpertParallel: FP8 weights and their scales")
    assert first.startswith("RuntimeError: ExpertParallel: backward of layer 0 cannot go on, since")
    assert_works(group)


def test_a_rank_that_does_not_call_is_waited_for_until_the_timeout(group):
    """Then the group is done for: the later rank is told so at once."""
    assert group.run(cases.short_layer, [()] * 2) == [True, True]
    (first, waited), (again, _) = group.run_on(0, cases.calls_short_layer)
    (late, _), (late_again, _) = group.run_on(1, cases.calls_short_layer)
    message = r"RuntimeError: ExpertParallel: in forward of layer 0, a rank of the group [0, 1] has"
    for error in (first, again, late, late_again):
        assert error.startswith(message)
        assert "did not come within 2 s" in error
        assert has_waited(error) == (error is first), error
    assert waited > cases.SECONDS - 0.1
    assert_works(group)  # of another group


def has_waited(error: str) -> bool:
    """Whether the error is of a rank that waited until the timeout, by words or gloo's."""
    return "of the group did not come)" in error or "Timed out waiting" in error


def test_a_rank_that_makes_no_layer_is_waited_for_until_the_timeout(group):
    (error, waited), _ = group.run(cases.never_made, [(True,), (False,)])
    assert error.startswith("RuntimeError: ExpertParallel: in the first layer of a group, a rank")
    assert waited > cases.SECONDS - 0.1
    assert_works(group)


def test_layers_that_cannot_be(group):
    assert_works(group)
    for rank, came in enumerate(group.run(cases.wrong_layers, [(0,), (1,)])):
        held = f"got [{2 * (1 - rank)}, {2 * (1 - rank) + 2})"
        assert came["this rank's part"] is came["one of two"] is True
        assert came["another rank's part"].startswith("ValueError: ExpertParallel: rank ")
        assert held in came["another rank's part"]
        assert "are those of a group already" in came["twice"]
        for name in ("fewer experts", "MoE of fewer experts"):
            assert "must hold an expert, got 1 experts for 2 ranks" in came[name]
        assert f"got 0:00:09, and {LONG} before" in came["another timeout"]
        assert came["no experts"].startswith("TypeError: ExpertParallel: experts must be a Group")
        assert "the model has no GroupedExperts" in came["no experts in a model"]
        for name in ("two dimensions", "no mesh"):
            assert "mesh must be a DeviceMesh of one dimension" in came[name]
        assert came["adapters"].startswith("ValueError: shard: the model must have no adapters")
    assert_works(group)


def test_ranks_make_a_layer_with_one_timeout_and_transport(group):
    came = group.run(cases.made_alike_or_not, [(0,), (1,)])
    for rank, (transport, same, timeout) in enumerate(came):
        message = "ValueError: ExpertParallel: all ranks must make their layers with one "
        other = "but rank 1 has another than rank 0, and this rank has "
        mine = ("'peers'", "'collective'")[rank]
        assert transport == f"{message}transport, {other}{mine}"
        assert same is True
        assert timeout == f"{message}timeout, {other}0:00:1{rank}"
    assert_works(group)


def test_a_child_of_a_rank_is_told_that_it_is_no_rank(group):
    """It writes nothing: the ranks go on as if there were none."""
    tokens = tokens_of()
    each = [(FROZEN, x, rank == 0) for rank, x in enumerate(tokens)]
    came = group.run(cases.forks, each)
    wanted = expected(FROZEN, tokens, with_gradients=False)
    for (said, y), theirs, has_child in zip(came, wanted, (True, False), strict=True):
        assert said.startswith("RuntimeError: ExpertParallel: forward of layer 0 was ") == has_child
        assert ("in a process that a rank has forked" in said) == has_child
        assert torch.equal(y, theirs.y)


def test_a_copy_is_a_layer_of_its_own(group):
    tokens = tokens_of()
    came = group.run(cases.copied, [(FROZEN, x) for x in tokens])
    for ours, theirs in zip(came, expected(FROZEN, tokens), strict=True):
        assert not isinstance(ours, str), ours
        assert torch.equal(ours.y, theirs.y)
    assert_works(group)


def test_a_layer_is_not_pickled(group):
    assert_all(
        group.run(cases.pickled, [(FROZEN,)] * 2),
        "TypeError: ExpertParallel: a layer of a group of processes cannot be pickled; save the ",
    )


@pytest.mark.parametrize("kind", [FROZEN, TRAINED], ids=lambda kind: kind.what)
def test_compiled_and_checkpointed_models_give_the_same_bits(group, kind):
    names = "plain", "compiled", "checkpointed"
    for came in group.run(cases.ways, [(kind, x, names) for x in tokens_of(kind)]):
        assert not isinstance(came, str), came
        plain, *others = came
        for other in others:
            for x, y in zip(plain[:3], other[:3], strict=True):
                assert torch.equal(x, y)
            for x, y in zip(plain.of_weights, other.of_weights, strict=True):
                assert torch.equal(x, y)


def test_checkpointed_where_one_rank_gets_nothing(group):
    tokens = draw(TRAINED, [6, 0], 1, 0, last=1)
    for came in group.run(cases.ways, [(TRAINED, x, ("plain", "checkpointed")) for x in tokens]):
        assert not isinstance(came, str), came
        plain, other = came
        assert torch.equal(plain.y, other.y)
        assert torch.equal(plain.dx, other.dx)


def test_a_layer_breaks_graphs(group):
    for error in group.run(cases.fullgraph, [(FROZEN, x) for x in tokens_of()]):
        assert error.startswith("Unsupported: ")
        assert "the ranks' hosts agree on each call" in error
    assert_works(group)


def test_a_rank_that_is_killed_ends_the_others_at_once(how, tmp_path):
    with ranks(2, tmp_path) as group:
        begin(group, how)
        assert_works(group)
        for rank, x in enumerate(tokens_of()):
            group.pipes[rank].send((cases.loops, (FROZEN, x)))
        assert not group.pipes[0].poll(1)
        group.processes[1].kill()
        error = group.take(0)
    assert error.startswith("RuntimeError: ExpertParallel: in ")
    assert "has ended or did not come" in error


@pytest.mark.slow
def test_nothing_is_left_of_groups_that_are_destroyed(tmp_path):
    """Layers of new groups work."""
    tokens = tokens_of()
    with ranks(2, tmp_path) as group:
        came = group.run(cases.destroyed, [(f"{tmp_path}/store", FROZEN, x) for x in tokens])
    for each, theirs in zip(came, expected(FROZEN, tokens), strict=True):
        assert not isinstance(each, str), each
        are_left, found, said = each
        assert are_left == [False] * 4
        assert all(torch.equal(x.dx, theirs.dx) for x in found)
        assert said.startswith("RuntimeError: ExpertParallel: the layer's process group has been ")
