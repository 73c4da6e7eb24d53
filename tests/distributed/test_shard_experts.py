"""`shard` of experts: what a rank makes of the ids of the whole model, and what it launches."""

import copy

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import moefp8
import moefp8.hf
from moefp8 import GroupedExperts
from moefp8.kernels.gemm.sm90.expert_configs import choose_experts_configs
from moefp8.testing import row_errors
from tests.distributed.shard_cases import BF16, E, H, assert_sums_up, choices, make, parts
from tests.functional.cases import tokens_of
from tests.gpu import NUM_SMS
from tests.layers.cases import assert_matches_up_to_codes


@pytest.mark.parametrize("what", ["grouped", "eager", "batched_mm", "grouped_mm"])
@pytest.mark.parametrize("kind", ["experts", "intermediate"])
@pytest.mark.parametrize(("size", "num_ranks"), [(320, 4), (192, 4), (768, 4), (192, 2)])
def test_outputs_of_experts_sum_up(what, kind, size, num_ranks):
    whole = make(what, size, H)
    x = torch.randn(17, H, dtype=BF16)
    index, weights = choices(17)
    if what != "grouped":  # transformers takes ids of nobody only where experts are parallel
        index, weights = index.clamp(max=E - 1), weights.bfloat16()
    outputs = [part(x, index, top_k_weights=weights) for part in parts(whole, kind, num_ranks)]
    assert_sums_up(outputs, whole(x, index, weights), 1e-2 if kind == "experts" else 4e-2)


def test_experts_along_both_axes():
    whole = make("grouped", 320, H)
    x, (index, weights) = torch.randn(9, H, dtype=BF16), choices(9)
    outputs = [
        moefp8.shard(part, {"": "intermediate"}, rank, 2)(x, index, weights)
        for half in parts(whole, "experts", 2)
        for rank, part in enumerate((copy.deepcopy(half), half))
    ]
    assert_sums_up(outputs, whole(x, index, weights), 4e-2)


def test_experts_take_the_ids_of_the_whole():
    whole = make("grouped", 192, H)
    first, second = parts(whole, "experts", 2)
    assert (first.num_experts, first.expert_offset) == (3, 0)
    assert (second.num_experts, second.expert_offset) == (3, 3)
    x, weights = torch.randn(2, H, dtype=BF16), torch.ones(2, 1)
    index = torch.tensor([[4], [6]])
    assert torch.equal(second(x, index, weights), whole(x, index, weights))
    assert not first(x, index, weights).any()
    for wrong in (index + 3, index - 5):
        with pytest.raises(ValueError, match=r"top_k_index must be in \[0, E\] for E = 6"):
            second(x, wrong, weights)


class Watching(TorchDispatchMode):
    """It notes all operations that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(str(func))
        return func(*args, **kwargs or {})


class OwnExperts(nn.Module):
    """Experts whose forward is always their own, whatever the config of their model says."""

    def __init__(self, experts: nn.Module):
        super().__init__()
        self.config, self.act_fn, self.num_experts = experts.config, nn.functional.silu, E
        self.gate_up_proj, self.down_proj = experts.gate_up_proj, experts.down_proj

    def forward(self, x, index, weights):
        y = torch.zeros_like(x)
        for expert, (gate_up, down) in enumerate(
            zip(self.gate_up_proj, self.down_proj, strict=True)
        ):
            gate, up = (x @ gate_up.T).chunk(2, 1)
            weight = weights.where(index == expert, 0).sum(1, keepdim=True)
            y += (weight * (self.act_fn(gate) * up @ down.T)).to(y.dtype)
        return y


def test_experts_that_no_config_chooses_get_their_own_ids():
    whole = OwnExperts(make("moefp8", 192, H))
    x, (index, weights) = tokens_of(40, H), choices(40)
    summed = sum(part(x, index, weights).double() for part in parts(whole, "experts", 2))
    assert row_errors(summed, whole(x, index, weights).double()).max() < 0.02


class NotingExperts(OwnExperts):
    def forward(self, x, index, weights):
        return index, weights


def test_choices_held_elsewhere_are_of_no_expert_and_have_score_0():
    whole = NotingExperts(make("moefp8", 192, H))
    x, index, weights = tokens_of(4, H), torch.arange(E).expand(4, E), torch.rand(4, E)
    for rank, part in enumerate(parts(whole, "experts", 2)):
        first, end = rank * E // 2, (rank + 1) * E // 2
        is_here = (index >= first) & (index < end)
        found, scores = part(x, index, weights)
        assert torch.equal(found, (index - first).where(is_here, end - first))
        assert torch.equal(scores, weights.where(is_here, 0))


@pytest.mark.parametrize("layout", ["contiguous", "masked"])
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_rank_launches_the_kernels_of_its_layer_and_no_others(gpu, layout, rank):
    """Neither ids nor weights are mapped before."""
    whole = GroupedExperts(E, H, 192, layout=layout)
    part = moefp8.shard(copy.deepcopy(whole), {"": "experts"}, rank, 3)
    x, (index, weights) = tokens_of(40, H), choices(40)
    gpu.launched.clear()  # weights were quantized
    with torch.inference_mode(), Watching() as watching:
        expected = part(x, index, weights)  # while a mode watches, the CPU computes
    assert watching.seen == ["moefp8.experts.default"]
    assert gpu.launched == []
    with torch.inference_mode():
        assert_matches_up_to_codes(part(x, index, weights), expected)
    names = [made.kernel.name.split("_")[0] for made in gpu.launched]
    assert names == ["dispatch", "gemm", "gemm", "combine"]
    is_here = (index >= 2 * rank) & (index < 2 * rank + 2)
    masked_by_hand = index.masked_fill(~is_here, E), weights.masked_fill(~is_here, 0)
    with torch.inference_mode(), Watching():
        assert_matches_up_to_codes(whole(x, *masked_by_hand), expected)


def test_experts_of_transformers_that_we_run_map_no_ids_either():
    whole = make("moefp8", 192, H)
    parts_of_whole = parts(whole, "experts", 2)
    x, (index, weights) = tokens_of(40, H), choices(40)
    for rank, part in enumerate(parts_of_whole):
        with torch.inference_mode():
            part(x, index, weights)  # it quantizes
            with Watching() as watching:
                y = part(x, index, weights)
            assert watching.seen == ["moefp8.experts.default"]
            elsewhere = index // 3 != rank
            assert_matches_up_to_codes(y, whole(x, index.masked_fill(elsewhere, E), weights))
            part.config._experts_implementation = "eager"  # the config is that of all three
            assert row_errors(part(x, index, weights).double(), y.double()).max() < 0.12
            part.config._experts_implementation = "moefp8"


@pytest.mark.parametrize("layout", ["contiguous", "masked"])
@pytest.mark.parametrize(
    ("num_tokens", "load", "guess"),
    [(1, 1, 0), (2, 1, 1), (16, 1, 1), (64, 4, 1), (512, 32, 1)],
)
def test_a_rank_chooses_by_the_experts_of_the_whole_model(gpu, layout, num_tokens, load, guess):
    """It gets the choices of all experts, of which an eighth are of its own.

    One token chooses 4 of 64 experts, too few for a guess; two choose an eighth of them.
    """
    whole = GroupedExperts(64, 128, 128, layout=layout)
    part = moefp8.shard(whole, {"": "experts"}, 3, 8)
    with torch.inference_mode():
        part(tokens_of(num_tokens, 128), *choices(num_tokens, 64, 4))
    *_, gate_up, down, _ = gpu.launched
    chosen = choose_experts_configs(load, min(4 * num_tokens, 8), 128, 128, NUM_SMS)
    assert (gate_up.config, down.config) == chosen
    assert gate_up.arguments.groups.expected_tiles == guess
