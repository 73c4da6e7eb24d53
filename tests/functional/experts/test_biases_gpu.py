"""Experts with biases on a GPU: against the body in PyTorch, and bit for bit."""

import pytest
import torch

from moefp8 import Activation, GroupedExperts
from moefp8.adapters import add_lora
from moefp8.functional import parts as parts_room
from tests.functional.cases import (
    EXPERTS_FAMILIES,
    GATE_UP_FAMILIES,
    LOADS_AT_EDGES,
    ids_of_loads,
)
from tests.functional.experts.bias_cases import (
    FORMS,
    GPT_OSS,
    Call,
    assert_near,
    call_of,
    layer_of,
    reference_of,
    results_of,
    with_gaps,
)
from tests.functional.gpu_cases import poison
from tests.gpu import NEEDS_GPU, no_synchronisation, slow
from tests.kernels.gemm.cases import choosing

pytestmark = [
    *NEEDS_GPU,
    pytest.mark.usefixtures("poisoned"),
    pytest.mark.filterwarnings("error:.*portable PyTorch body"),
]
SWIGLU = Activation()
SHAPES = {  # T, k, E, H, I
    "one token": (1, 4, 16, 512, 384),
    "few": (9, 4, 16, 2880, 2880),
    "some": (70, 4, 8, 512, 144),
    "many": (700, 4, 8, 512, 400),
    "most": (3000, 2, 3, 384, 640),
    "odd": (37, 3, 5, 129, 257),
    "small": (6, 2, 3, 40, 20),
    "no intermediate": (4, 2, 3, 64, 0),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shape", SHAPES)
def test_results_and_gradients_are_right(shape, form):
    sizes = SHAPES[shape]
    dtype = {"one token": torch.float32, "some": torch.float16}.get(shape, torch.bfloat16)
    activation = GPT_OSS if shape != "many" else SWIGLU
    layer = layer_of(*sizes[2:], activation, dtype, "cuda", **FORMS[form])
    call = call_of(sizes, device="cuda")
    poison()
    assert_near(results_of(layer, call), reference_of(layer, call), call, 0.1)


@pytest.mark.parametrize("kind", ["repeated", "out of range", "one expert"])
@pytest.mark.parametrize("form", FORMS)
def test_any_routing(form, kind):
    sizes = SHAPES["some"]
    layer = layer_of(*sizes[2:], GPT_OSS, device="cuda", **FORMS[form])
    call = call_of(sizes, kind, "cuda")
    found = results_of(layer, call)
    is_here = (call.ids >= 0) & (call.ids < sizes[2])
    here = Call(call.x, call.ids.where(is_here, sizes[2]), call.scores, call.grad)
    right = reference_of(layer, here)
    right["scores"] = right["scores"].where(is_here.cpu(), 0)
    assert_near(found, right, call, 0.1)


@pytest.mark.parametrize("layout", ["contiguous", "masked"])
@pytest.mark.parametrize("family", EXPERTS_FAMILIES)
def test_every_family_adds_the_same(family, layout):
    """Biases of a whole group: each tile, tail and skipped half has those of its weights."""
    h, i, loads = 512, 640, LOADS_AT_EDGES
    layer = layer_of(len(loads), h, i, SWIGLU, device="cuda")
    layer.layout = layout
    ids = ids_of_loads(loads).cuda()
    x = torch.randn(len(ids), h, device="cuda").bfloat16()
    scores = torch.rand(ids.shape, device="cuda")
    with torch.no_grad():
        expected = layer(x, ids, scores)
        poison()
        with choosing(*reversed(EXPERTS_FAMILIES[family])):
            found = layer(x, ids, scores)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("family", GATE_UP_FAMILIES)
def test_every_family_saves_the_sums_with_biases(family):
    loads = LOADS_AT_EDGES
    layer = layer_of(len(loads), 512, 640, GPT_OSS, device="cuda")
    ids = ids_of_loads(loads).cuda()
    x, grad = (torch.randn(len(ids), 512, device="cuda").bfloat16() for _ in range(2))
    call = Call(x, ids, torch.rand(ids.shape, device="cuda"), grad)
    right = results_of(layer, call)
    poison()
    with choosing(None, GATE_UP_FAMILIES[family]):
        found = results_of(layer, call)
    assert all(torch.equal(found[name], x) for name, x in right.items())


@pytest.mark.parametrize("num_tokens", [1, 5, 64, 300])
def test_a_token_depends_on_no_other(num_tokens):
    layer = layer_of(8, 512, 400, GPT_OSS, device="cuda").requires_grad_(False)
    call = call_of((num_tokens, 4, 8, 512, 400), device="cuda")
    whole = layer(*call[:3])
    with no_synchronisation():
        first = layer(call.x[:1], call.ids[:1], call.scores[:1])
    assert torch.equal(first, whole[:1])


@pytest.mark.parametrize("form", ["frozen", "trained"])
def test_graphs_and_parts(form, monkeypatch, new_driver):
    sizes = 400, 4, 8, 512, 400
    layer = layer_of(*sizes[2:], GPT_OSS, device="cuda", **FORMS[form])
    call = call_of(sizes, device="cuda")
    for _ in range(3):
        right = results_of(layer, call)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = results_of(layer, call)
    graph.replay()
    assert all(torch.equal(captured[name], x) for name, x in right.items())
    monkeypatch.setattr(parts_room, "MAX_WORKSPACE_BYTES", 1 << 21)
    new_driver.prepared().clear()
    assert_near(results_of(layer, call), right, call, 0.02)


@slow
@pytest.mark.parametrize("size", [128, 144])
def test_adapters_beside_biases(size):
    sizes = 60, 2, 4, 256, size
    layer, call = layer_of(*sizes[2:], GPT_OSS, device="cuda"), call_of(sizes, device="cuda")
    model = torch.nn.ModuleDict({"experts": layer})
    add_lora(model, rank=8)
    for name, x in model.named_parameters():
        if "lora" in name:
            torch.nn.init.normal_(x, std=0.02)
        x.requires_grad_("bias" in name or "lora" in name)
    found = results_of(layer, call)
    twin = layer.to_plain(torch.float32)
    for name in ("gate_up_proj", "down_proj"):
        lora = getattr(layer, f"lora_{name}")
        twin.get_parameter(name).data += lora.scaling * (lora.B.float() @ lora.A.float())
    right = results_of(
        twin.cpu(), Call(*(x.cpu().float() if x.is_floating_point() else x.cpu() for x in call))
    )
    assert_near(found, right, call, 0.1)


@pytest.mark.parametrize("form", FORMS)
def test_strides_do_not_matter(form):
    sizes = SHAPES["some"]
    layer = layer_of(*sizes[2:], GPT_OSS, device="cuda", **FORMS[form])
    call = call_of(sizes, device="cuda")
    right = results_of(layer, call)
    poison()
    found = results_of(with_gaps(layer), call)
    assert_near(found, right, call, 1e-5)


def test_zeros_change_no_bit():
    sizes = SHAPES["many"]
    layer, call = layer_of(*sizes[2:], device="cuda"), call_of(sizes, device="cuda")
    without = GroupedExperts(*sizes[2:], activation=GPT_OSS).cuda()
    for name, x in without.named_parameters():
        x.data = layer.get_parameter(name).data
    for bias in layer.biases.values():
        bias.data.zero_()
    found, right = results_of(layer, call), results_of(without, call)
    assert all(torch.equal(found[name], x) for name, x in right.items())
