"""`add_lora`: what is adapted and trains, what a model with adapters gives, what is refused."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import moefp8
from moefp8.adapters import LoRA, add_lora, remove_lora
from tests.adapters.cases import E, H, I, K, Net, error, merged, tokens, trained

EXPERTS = ["moe.experts.gate_up_proj", "moe.experts.down_proj"]
SHARED = [f"moe.shared_experts.{name}_proj" for name in ("gate", "up", "down")]


def adapted(**options) -> nn.Module:
    model = Net()
    add_lora(model, 4, 8, **options)
    return trained(model)


@pytest.mark.parametrize(
    ("targets", "names"),
    [
        (None, ["first", *EXPERTS, *SHARED]),
        (["head"], ["head"]),
        (["experts"], EXPERTS),
        (["experts.down_proj"], EXPERTS[1:]),
        (["moe.experts.gate_up_proj", "first"], ["first", EXPERTS[0]]),
        (["gate_proj", "up_proj", "down_proj"], [EXPERTS[1], *SHARED]),
        (r".*\.(gate|up)_proj", SHARED[:2]),
    ],
)
def test_targets_are_matched_as_peft_does(targets, names):
    model = Net()
    assert add_lora(model, targets=targets) == names
    trains = {name for name, x in model.named_parameters() if x.requires_grad}
    assert len(trains) == 2 * len(names)
    assert all(".lora_" in name for name in trains)


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        (["nothing"], "'nothing' does not"),
        (["first", "irst"], "'irst' does not"),
        (["gate"], "moe.gate is a TopKRouter"),
        ([""], "the model is a Net"),
        ("*proj", r"'\*proj' is no regular expression.*a list"),
        ("gate_proj", r"'gate_proj' does not.*a list"),
        (r".*moe", "moe is a MoE"),
    ],
)
def test_targets_that_cannot_be(targets, message):
    model = Net()
    before = dict(model.named_modules())
    with pytest.raises(ValueError, match=message):
        add_lora(model, targets=targets)
    assert dict(model.named_modules()) == before
    assert model.head.weight.requires_grad


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"rank": 0}, ValueError, "rank must be"),
        ({"alpha": 0}, ValueError, "alpha must be"),
        ({"dtype": torch.float8_e4m3fn}, TypeError, "dtype must be"),
        ({"targets": []}, TypeError, "targets must be"),
        ({"targets": [3]}, TypeError, "targets must be"),
    ],
)
def test_wrong_arguments(options, kind, message):
    with pytest.raises(kind, match=message):
        add_lora(Net(), **options)


def other_forward(model):
    model.first.forward = model.first.forward


def to_meta(model):
    model.to("meta")


def cut(model):
    moefp8.shard(model, {"first": "rows"}, 0, 2)


def subclass(model):
    class Other(nn.Linear):
        pass

    model.first = Other(H, H)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (other_forward, "no forward of its own"),
        (to_meta, "meta device"),
        (cut, "must not be cut"),
        (subclass, "of the very class"),
    ],
)
def test_modules_that_adapters_would_not_reach(change, message):
    model = Net()
    change(model)
    with pytest.raises(ValueError, match=message):
        add_lora(model, targets=["first"])
    assert not any(isinstance(x, LoRA) for x in model.modules())


def test_a_layer_that_reads_weights_past_their_modules_is_refused():
    """In eval it computes with the weights of its linears, without a call of theirs."""
    layer = nn.TransformerEncoderLayer(64, 2, 96, batch_first=True).eval()
    for model in (layer, nn.Sequential(layer)):
        with pytest.raises(ValueError, match=r"linear1.*nn\.TransformerEncoderLayer reads"):
            add_lora(model, targets=["linear1"])
        assert type(layer.linear1) is nn.Linear


def test_a_model_without_fp8_must_name_its_linears():
    with pytest.raises(ValueError, match=r"no FP8Linear and no GroupedExperts"):
        add_lora(nn.Sequential(nn.Linear(8, 8)))


def test_adding_twice_is_refused_and_what_was_removed_can_be_added():
    model = adapted()
    with pytest.raises(ValueError, match="no adapters yet, but has 6"):
        add_lora(model, targets=["head"])
    kinds = [type(x) for x in Net().modules()]
    assert [type(x) for x in remove_lora(model).modules()] == kinds
    assert add_lora(model, targets=["head"]) == ["head"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("x", [tokens(5), tokens(6).view(2, 3, H), tokens(0), tokens(3).float()])
@pytest.mark.parametrize("make", [moefp8.FP8Linear, nn.Linear])
def test_an_untrained_adapter_changes_no_bit_of_a_linear(make, x, dtype):
    linear = make(H, 24)
    x = x.to(linear.weight.dtype) if isinstance(linear, nn.Linear) else x
    before = linear(x)
    add_lora(linear, targets=".*", dtype=dtype)
    after = linear(x)
    assert torch.equal(before, after)
    assert after.dtype == before.dtype
    assert after.requires_grad


def test_an_untrained_adapter_changes_experts_by_a_rounding():
    model, x = Net(), tokens()
    before = model(x)
    add_lora(model)
    assert 0 < error(model(x), before) < 0.02


@pytest.mark.parametrize("rank", [1, 8])
@pytest.mark.parametrize("use_rslora", [False, True])
def test_an_adapter_adds_its_product(rank, use_rslora):
    linear, x = moefp8.FP8Linear(H, 24), tokens(5)
    before = linear(x).double()
    add_lora(linear, rank, 6, use_rslora=use_rslora)
    lora = trained(linear).lora_weight
    scaling = 6 / (rank**0.5 if use_rslora else rank)
    added = scaling * x.double() @ lora.A.double().t() @ lora.B.double().t()
    assert error(linear(x), before + added) < 4e-3
    assert error(before, before + added) > 0.05


def test_a_model_with_adapters_is_one_with_merged_weights():
    model, x = adapted(), tokens(64)
    trained(model, 0.2)
    exact = merged(model)(x.float())
    assert error(model(x), exact) < 0.12
    assert error(merged(remove_lora(model))(x.float()), exact) > 0.4


@pytest.mark.parametrize("target", ["gate_up_proj", "down_proj"])
def test_each_weight_of_experts_can_have_an_adapter(target):
    experts = moefp8.GroupedExperts(E, H, I)
    assert add_lora(experts, 4, 8, [target]) == [target]
    trained(experts, 0.3)
    x, choice = tokens(32), (torch.randint(0, E, (32, K)), torch.rand(32, K))
    exact = merged(nn.Sequential(experts))[0](x.float(), *choice)
    assert error(experts(x, *choice), exact) < 0.06
    lora = experts.get_submodule(f"lora_{target}")
    lora.B.data = lora.B.roll(1, 0)
    assert error(experts(x, *choice), exact) > 0.4


def test_experts_clamp_after_their_adapter():
    experts = moefp8.GroupedExperts(E, H, I, swiglu_limit=0.5)
    add_lora(experts, targets=".*gate_up_proj", alpha=64)
    trained(experts, 0.5)
    index = torch.randint(0, E, (32, K))
    choice = index, torch.rand(32, K)
    x = tokens(32)
    exact = merged(nn.Sequential(experts))[0](x.float(), *choice)
    assert error(experts(x, *choice), exact) < 0.06


def test_experts_take_any_shape_dtype_and_addend():
    experts = moefp8.GroupedExperts(E, H, I)
    add_lora(experts)
    x, choice = tokens(6), (torch.randint(0, E, (6, K)), torch.rand(6, K))
    y, addend = experts(x, *choice), tokens(6)
    assert torch.equal(experts(x.view(2, 3, H), *choice).flatten(0, 1), y)
    assert torch.equal(experts(x, *choice, addend=addend), y + addend)
    assert experts(x.float(), *choice).dtype == torch.float32
    assert experts(x[:0], choice[0][:0], choice[1][:0]).shape == (0, H)
    with pytest.raises(TypeError, match="hidden_states must be"):
        experts(x.long(), *choice)


def test_ranks_of_expert_parallelism_sum_up():
    model = Net().moe.experts
    x, choice = tokens(16), (torch.randint(0, E, (16, K)), torch.rand(16, K))
    parts = [moefp8.shard(copy.deepcopy(model), {"": "experts"}, rank, 2) for rank in range(2)]
    for module in (model, *parts):
        add_lora(module)
    trained(model)
    for rank, part in enumerate(parts):
        for name in ("lora_gate_up_proj", "lora_down_proj"):
            for x_here, x_all in zip(
                getattr(part, name).parameters(), getattr(model, name).parameters(), strict=True
            ):
                x_here.data.copy_(x_all[2 * rank : 2 * rank + 2])
    assert error(sum(part(x, *choice) for part in parts), model(x, *choice)) < 5e-3


def test_nan_stays_in_its_own_token():
    experts = moefp8.GroupedExperts(E, H, I)
    add_lora(experts)
    trained(experts)
    x, choice = tokens(6), (torch.randint(0, E, (6, K)), torch.rand(6, K))
    broken = x.clone()
    broken[2] = torch.nan
    y, with_nan = experts(x, *choice), experts(broken, *choice)
    others = torch.arange(6) != 2
    assert with_nan[2].isnan().all()
    assert torch.equal(y[others], with_nan[others])


def test_copies_casts_and_state_dicts():
    model, x = adapted(), tokens()
    y = model(x)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(twin(x), y)
    other = Net()
    add_lora(other, 4, 8)
    other.load_state_dict(model.state_dict())
    assert torch.equal(other(x), y)
    assert model.float().moe.experts.lora_down_proj.A.dtype == torch.float32
    assert model.moe.experts.down_proj.dtype == torch.float8_e4m3fn
    assert error(model(x.float()), y) < 0.02


def test_base_keys_stay():
    before = Net().state_dict().keys()
    assert before < adapted(targets=["first", "experts", "head"]).state_dict().keys()


def gradients(model, run):
    model.zero_grad()
    run().float().square().sum().backward()
    return [x.grad.clone() for x in model.parameters() if x.requires_grad]


@pytest.mark.parametrize("dynamic", [None, True])
def test_gradient_checkpointing_and_compile_give_the_same(dynamic):
    model, x = moefp8.GroupedExperts(E, H, I), tokens()
    add_lora(model)
    trained(model)
    inputs = x, torch.randint(0, E, (12, K)), torch.rand(12, K)
    exact = gradients(model, lambda: model(*inputs))
    again = gradients(model, lambda: checkpoint(model, *inputs, use_reentrant=False))
    assert all(map(torch.equal, exact, again))
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for ours, theirs in zip(gradients(model, lambda: compiled(*inputs)), exact, strict=True):
        assert error(ours, theirs) < 1e-2


def test_autocast_keeps_dtypes():
    linear, x = moefp8.FP8Linear(H, 24), tokens(5)
    add_lora(linear)
    trained(linear)
    with torch.autocast("cpu", torch.float16):
        assert linear(x).dtype == torch.bfloat16
        assert linear(x.float()).dtype == torch.float32


def test_an_adapter_does_not_let_autocast_cut_what_the_weight_gave():
    """FP16 holds neither what is large in BF16 nor what is small."""
    linear, x = moefp8.FP8Linear(H, 24, bias=False), tokens(5)
    for size in (2.0**40, 2.0**-40):
        scaled = x * size
        before = linear(scaled)
        with torch.autocast("cpu", torch.float16):
            assert torch.equal(adapted_linear(linear)(scaled), before)


def adapted_linear(linear):
    twin = copy.deepcopy(linear)
    add_lora(twin)
    return twin


def test_repr_tells_rank_and_alpha():
    assert "LoRA((4, 128, 72), rank=4, alpha=8, use_rslora=False)" in repr(adapted())
