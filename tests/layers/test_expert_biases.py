"""`GroupedExperts` with biases: forms, state, conversion, adapters and parts of ranks."""

import copy
import pickle

import pytest
import torch
from torch import nn

import moefp8
from moefp8 import Activation, GroupedExperts
from moefp8.adapters import add_lora
from moefp8.layers.conversion.plain import PlainExperts
from moefp8.testing import assert_matches_reference, reference_model
from tests.distributed.shard_cases import assert_sums_up
from tests.fakes.emulator import emulated
from tests.functional.experts.bias_cases import (
    GPT_OSS,
    Call,
    assert_near,
    call_of,
    layer_of,
    results_of,
)

SIZES = 12, 2, 4, 128, 144  # T, k, E, H, I
BIASES = "gate_up_proj_bias", "down_proj_bias"


class InTurns(nn.Module):
    """Experts as gpt-oss stores them: transposed, rows of gate and of up in turns."""

    is_transposed, is_concatenated, has_bias = True, False, True

    def __init__(self, plain: PlainExperts) -> None:
        super().__init__()
        self.alpha, self.limit = 1.702, 7.0
        gate_up, bias = plain.gate_up_proj, plain.gate_up_proj_bias
        gate_up = torch.stack(gate_up.chunk(2, 1), 2).flatten(1, 2)
        self.gate_up_proj = nn.Parameter(gate_up.mT.contiguous())
        self.gate_up_proj_bias = nn.Parameter(torch.stack(bias.chunk(2, 1), 2).flatten(1))
        self.down_proj = nn.Parameter(plain.down_proj.mT.contiguous())
        self.down_proj_bias = plain.down_proj_bias

    def _apply_gate(self, gate_up):
        gate, up = gate_up[..., ::2].clamp(max=self.limit), gate_up[..., 1::2]
        gate = gate * torch.sigmoid(self.alpha * gate)
        return gate * (up.clamp(-self.limit, self.limit) + 1)

    def forward(self, hidden_states, top_k_index, top_k_weights):
        result = torch.zeros_like(hidden_states, dtype=torch.float32)
        for expert in range(len(self.down_proj)):
            token, choice = torch.where(top_k_index == expert)
            rows = hidden_states[token] @ self.gate_up_proj[expert] + self.gate_up_proj_bias[expert]
            rows = self._apply_gate(rows) @ self.down_proj[expert] + self.down_proj_bias[expert]
            result.index_add_(0, token, rows.float() * top_k_weights[token, choice, None].float())
        return result.to(hidden_states.dtype)


def plain_of(dtype: torch.dtype = torch.bfloat16) -> PlainExperts:
    """Weights that FP8 has exactly."""
    return layer_of(*SIZES[2:]).to_plain(dtype)


def with_biases(**options) -> GroupedExperts:
    return layer_of(*SIZES[2:], **options)


def test_a_bias_is_a_parameter_as_in_a_linear():
    frozen = GroupedExperts(*SIZES[2:], bias=True, dtype=torch.float32)
    assert {name: x.dtype for name, x in frozen.biases.items()} == dict.fromkeys(
        BIASES, torch.float32
    )
    assert not any(x.requires_grad for x in frozen.parameters())
    trained = GroupedExperts(*SIZES[2:], bias=True, trainable=True)
    assert all(x.requires_grad for x in trained.parameters())
    assert all(bool(x.any()) for x in trained.biases.values())
    assert "bias=True" in repr(frozen)
    assert "bias" not in repr(GroupedExperts(*SIZES[2:]))
    assert GroupedExperts(*SIZES[2:]).biases == {}


def test_state_survives_copies_pickles_and_dicts():
    layer, call = with_biases(), call_of(SIZES)
    other = GroupedExperts(*SIZES[2:], activation=GPT_OSS, bias=True)
    other.load_state_dict(layer.state_dict())
    expected = layer(*call[:3])
    for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), other):
        assert torch.equal(twin(*call[:3]), expected)


def test_freeze_and_unfreeze_keep_biases():
    layer, call = with_biases(), call_of(SIZES)
    expected, values = layer(*call[:3]), {x: y.clone() for x, y in layer.biases.items()}
    layer.unfreeze(torch.float32)
    assert all(x.dtype == torch.float32 and x.requires_grad for x in layer.biases.values())
    layer.freeze()
    assert torch.equal(layer(*call[:3]), expected)
    assert not any(x.requires_grad for x in layer.parameters())
    assert all(torch.equal(x, values[name].float()) for name, x in layer.biases.items())


def test_converting_and_back():
    plain, call = plain_of(), call_of(SIZES)
    expected = plain(*call[:3])
    model = nn.ModuleDict({"experts": plain})
    moefp8.convert(model)
    assert type(model["experts"]) is GroupedExperts
    assert_matches_reference(model["experts"](*call[:3]), expected, 0.08)
    moefp8.dequantize(model)
    assert type(model["experts"]) is PlainExperts
    assert_matches_reference(model["experts"](*call[:3]), expected, 0.02)


def test_experts_of_gpt_oss_are_converted():
    plain, call = plain_of(), call_of(SIZES)
    model = nn.ModuleDict({"experts": InTurns(plain)})
    assert_matches_reference(model["experts"](*call[:3]), plain(*call[:3]), 2e-2)
    wanted = moefp8.convert(nn.ModuleDict({"experts": plain}))["experts"]
    moefp8.convert(model)
    found = model["experts"]
    assert found.activation == Activation("gpt_oss", 7.0, 1.702)
    for name, x in wanted.state_dict().items():
        assert torch.equal(found.state_dict()[name].float(), x.float())
    with pytest.raises(ValueError, match=r"holds its weights as \[E, in, out\]"):
        moefp8.convert(nn.ModuleDict({"experts": InTurns(plain)}), trainable=True)


def test_trainable_conversion_shares_biases():
    model = nn.ModuleDict({"experts": plain_of()})
    held = dict(model["experts"].named_parameters())
    moefp8.convert(model, trainable=True)
    assert {name: id(x) for name, x in model["experts"].named_parameters()} == {
        name: id(x) for name, x in held.items()
    }


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("gate_up_proj_bias", (4, 144), r"gate_up_proj_bias must be \[E, N\] = \[4, 288\]"),
        ("down_proj_bias", (128,), "down_proj_bias must have 2 dimensions"),
    ],
)
def test_wrong_biases_are_refused(name, shape, message):
    weights = torch.randn(4, 288, 128), torch.randn(4, 128, 144)
    with pytest.raises(ValueError, match=message):
        GroupedExperts.from_weights(*weights, **{name: torch.zeros(shape)})


def test_biases_of_any_strides_are_taken():
    layer, call = with_biases(), call_of(SIZES)
    plain = layer.to_plain(torch.float32)
    weights = plain.gate_up_proj, plain.down_proj
    biases = {name: x.detach() for name, x in layer.biases.items()}
    options = {"activation": GPT_OSS}
    wanted = GroupedExperts.from_weights(*weights, **biases, **options)(*call[:3])
    lying = {name: x.mT.contiguous().mT for name, x in biases.items()}
    found = GroupedExperts.from_weights(*weights, **lying, **options)(*call[:3])
    assert torch.equal(found, wanted)


def test_layers_without_hidden_features_save_their_biases():
    """Gate and up are the biases then; memory that nothing wrote would make gradients NaN."""
    experts = GroupedExperts(3, 0, 64, bias=True)
    for bias in experts.biases.values():
        bias.requires_grad_()
    x, scores = torch.randn(4, 0).bfloat16().requires_grad_(), torch.rand(4, 2).requires_grad_()
    ids = torch.tensor([[0, 1], [1, 2], [0, 2], [2, 1]])
    for _ in range(4):
        poison = [torch.full((1024,), torch.nan) for _ in range(64)]
        del poison
        with emulated():
            experts(x, ids, scores).sum().backward()
    assert not scores.grad.any()
    assert not experts.gate_up_proj_bias.grad.any()


@pytest.mark.parametrize("kind", ["experts", "intermediate"])
@pytest.mark.parametrize("make", [with_biases, plain_of])
def test_outputs_of_ranks_sum_up(kind, make):
    whole, call = make().requires_grad_(False), call_of(SIZES)
    ranks = [moefp8.shard(copy.deepcopy(whole), {"": kind}, rank, 2) for rank in range(2)]
    outputs = [part(*call[:3]) for part in ranks]
    assert_sums_up(outputs, whole(*call[:3]), 1e-2 if kind == "experts" else 5e-2)
    assert (ranks[1].down_proj_bias is None) == (kind == "intermediate")


def test_adapters_beside_biases():
    layer, call = with_biases(), call_of(SIZES)
    without = results_of(layer, call)
    model = nn.ModuleDict({"experts": layer})
    add_lora(model, rank=8)
    for name, x in model.named_parameters():
        if "lora" in name:
            nn.init.normal_(x, std=0.02)
        x.requires_grad_("bias" in name or "lora" in name)
    twin = layer.to_plain(torch.float32)
    for name in ("gate_up_proj", "down_proj"):
        lora = getattr(layer, f"lora_{name}")
        twin.get_parameter(name).data += lora.scaling * (lora.B.float() @ lora.A.float())
    right = results_of(twin, Call(call.x.float(), call.ids, call.scores, call.grad.float()))
    found = results_of(layer, call)
    assert_near(found, right, call, 0.1)
    assert not torch.equal(found["y"], without["y"])


@pytest.mark.parametrize("form", [{}, {"trainable": True}])
def test_the_reference_has_biases(form):
    layer, call = with_biases(**form), call_of(SIZES)
    found, right = results_of(layer, call), results_of(reference_model(layer), call)
    assert_near(found, right, call, 0.04)  # gradients of biases are sums of codes here


def test_updating_refuses_what_may_have_another_order():
    """Rows in turns and gate first have one shape, and so has a square matrix turned."""
    model = nn.ModuleDict({"experts": InTurns(plain_of())})
    sent = {
        f"experts.{name}": x.detach().clone() for name, x in model["experts"].named_parameters()
    }
    moefp8.convert(model)
    before = {name: x.clone() for name, x in model.state_dict().items()}
    for name, x in sent.items():
        refused = pytest.raises(ValueError, match="nothing says which order came")
        with refused, moefp8.updating(model) as update:
            update.add({name: x})
    codes = moefp8.convert(nn.ModuleDict({"experts": plain_of()})).state_dict()
    with moefp8.updating(model) as update:
        update.add({name: x for name, x in codes.items() if not name.endswith("bias")})
    for name, x in model.state_dict().items():
        wanted = before[name] if name.endswith("bias") else codes[name]
        assert torch.equal(x.float(), wanted.float())
