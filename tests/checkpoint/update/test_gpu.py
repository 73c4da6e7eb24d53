"""Updates on a GPU: the bits of the CPU, no wait, and graphs that compute with the new weights."""

import pytest
import torch
from torch import nn

import moefp8
from moefp8 import GroupedExperts
from moefp8.functional.training.weights import codes_stay
from moefp8.layers.moe import SharedExperts
from tests.checkpoint.cases import Tiny, deepseek_tensors, spoiled
from tests.checkpoint.load.test_sharded import PLANS
from tests.checkpoint.update.cases import (
    assert_same_model,
    buckets,
    stacked,
    trainer_tensors,
    update,
)
from tests.gpu import NEEDS_GPU, no_synchronisation

pytestmark = [*NEEDS_GPU, pytest.mark.filterwarnings("error:.*portable PyTorch body")]


def on(device: str, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: x.to(device) for name, x in tensors.items()}


@pytest.mark.parametrize("make", [trainer_tensors, deepseek_tensors])
@pytest.mark.parametrize("form", [dict, stacked])
@pytest.mark.parametrize("source", ["cpu", "cuda"])
def test_bits_are_those_of_the_cpu(make, form, source):
    tensors = form(make(1))
    update(wanted := spoiled(Tiny(1)), tensors)
    update(model := spoiled(Tiny(1), "cuda"), *buckets(on(source, tensors), 3))
    assert_same_model(model, wanted)


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_a_rank_has_the_bits_of_the_cpu(plan):
    for tensors in (trainer_tensors(), deepseek_tensors(1)):
        models = [moefp8.shard(Tiny(1), plan, 1, 3).to(device) for device in ("cpu", "cuda")]
        for model in models:
            update(model, *buckets(on("cuda", tensors), 2))
        assert_same_model(*reversed(models))


def test_nothing_waits_for_the_gpu():
    tensors = on("cuda", trainer_tensors())
    update(model := spoiled(Tiny(1), "cuda"), tensors)
    with no_synchronisation():
        update(model, *buckets(tensors, 4))
        update(model, stacked(tensors))


def captured(run) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = run()
    return graph, result


E, H, I, T = 8, 256, 320, 24


def experts_of(**options) -> GroupedExperts:
    return GroupedExperts(E, H, I, device="cuda", **options)


def weights_of(seed: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    shapes = {"gate_up_proj": (E, 2 * I, H), "down_proj": (E, H, I)}
    return {name: torch.randn(x, device="cuda").bfloat16() / 16 for name, x in shapes.items()}


def one_by_one(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    found = {}
    for expert in range(E):
        gate, up = weights["gate_up_proj"][expert].chunk(2)
        named = {"gate": gate, "up": up, "down": weights["down_proj"][expert]}
        found |= {f"{expert}.{name}_proj.weight": x for name, x in named.items()}
    return found


def call_of(experts: nn.Module, with_gradient: bool):
    """A function that runs experts on fixed tokens, and perhaps gives the gradient in these."""
    torch.manual_seed(5)
    x = torch.randn(T, H, device="cuda").bfloat16().requires_grad_(with_gradient)
    ids = torch.randint(0, E, (T, 2), device="cuda")
    scores = torch.rand(T, 2, device="cuda")

    def run() -> torch.Tensor:
        y = experts(x, ids, scores)
        return torch.autograd.grad(y, x, torch.ones_like(y))[0] if with_gradient else y

    return run


@pytest.mark.parametrize("form", [dict, one_by_one])
@pytest.mark.parametrize("with_gradient", [False, True])
def test_replays_compute_with_the_new_weights(form, with_gradient):
    """With a gradient, the graph reads W^T that was kept before it was captured."""
    experts = experts_of(keep_transposed=True).eval()
    run = call_of(experts, with_gradient)  # which owns the tokens that the graph reads
    graph, result = captured(run)
    for seed in range(3):
        weights = weights_of(seed)
        update(experts, *buckets(form(weights), 2))
        graph.replay()
        fresh = GroupedExperts.from_weights(**weights).eval()
        assert torch.equal(result, call_of(fresh, with_gradient)())
        assert torch.equal(run(), result)


def test_replays_compute_with_new_codes():
    experts, other = (experts_of(keep_transposed=True).eval() for _ in range(2))
    run = call_of(experts, True)
    graph, result = captured(run)
    codes = {}
    for name, x in other.state_dict().items():
        leaf = "weight_scale_inv" if name.endswith("_scale_inv") else "weight"
        stack = name.removesuffix("_scale_inv")
        for expert in range(E):
            pieces = {"down": x[expert]}
            if stack == "gate_up_proj":
                pieces = dict(zip(("gate", "up"), x[expert].chunk(2), strict=True))
            codes |= {f"{expert}.{each}_proj.{leaf}": y for each, y in pieces.items()}
    update(experts, *buckets(codes, 3))
    graph.replay()
    assert torch.equal(result, call_of(other, True)())
    assert torch.equal(result, run())


def test_gate_and_up_that_lie_side_by_side_in_a_kept_transpose_follow():
    shared, other = (SharedExperts(H, I, device="cuda") for _ in range(2))
    shared.down_proj.keep_transposed = other.down_proj.keep_transposed = True
    x = torch.randn(T, H, device="cuda").bfloat16().requires_grad_()

    def gradient(layer: nn.Module) -> torch.Tensor:
        y = layer(x)
        return torch.autograd.grad(y, x, torch.ones_like(y))[0]

    graph, result = captured(lambda: gradient(shared))
    state = {name: y.clone() for name, y in other.state_dict().items()}
    update(shared, {name: y for name, y in state.items() if not name.startswith("gate")})
    update(shared, {name: y for name, y in state.items() if name.startswith("gate")})
    graph.replay()
    assert torch.equal(result, gradient(other))


@pytest.mark.parametrize("stays", [False, True])
def test_graphs_of_master_weights_follow(stays):
    """Also those that quantize nothing, and read codes as they lie."""
    experts = experts_of(trainable=True)
    run = call_of(experts, False)
    if stays:
        run()
        with codes_stay():
            graph, result = captured(run)
    else:
        graph, result = captured(run)
    weights = weights_of(7)
    update(experts, *buckets(one_by_one(weights), 2))
    graph.replay()
    fresh = GroupedExperts.from_weights(**weights)
    assert torch.equal(result, call_of(fresh, False)())


def test_a_capture_is_no_time_for_an_update():
    linear = moefp8.FP8Linear(128, 128, device="cuda")
    weight = torch.ones(128, 128, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with moefp8.updating(linear) as block:
        with torch.cuda.graph(graph):
            weight.mul_(1)
            with pytest.raises(RuntimeError, match="a CUDA graph is being captured"):
                block.add({"weight": weight})
        block.add({"weight": weight})
