"""`experts_implementation="moefp8"`: whatever experts module transformers has, against its own."""

import copy
from inspect import signature

import pytest
import torch
import transformers
from small_checkpoint import FAMILIES, small_config
from torch import nn
from transformers import AutoModelForCausalLM, GptOssConfig, NemotronHConfig, PretrainedConfig
from transformers.integrations.finegrained_fp8 import ALL_FP8_EXPERTS_FUNCTIONS, FP8Experts
from transformers.integrations.moe import use_experts_implementation

import moefp8
from moefp8 import GroupedExperts
from moefp8.hf import fp8_experts_forward
from moefp8.quant import quantize_128x128
from moefp8.testing import assert_matches_reference, reference_model, row_errors
from tests import naive
from tests.hf.model_cases import SIZES, prompt

T, H, I, E = 33, 256, 192, 5


def other_config(family: str) -> PretrainedConfig:
    """Biases, interleaved and transposed weights and a gate of its own; or no gate at all."""
    if family == "gpt_oss":
        return GptOssConfig(**SIZES, intermediate_size=192, num_local_experts=4)
    return NemotronHConfig(
        **SIZES,
        layers_block_type=["moe", "attention"],
        n_routed_experts=4,
        moe_intermediate_size=192,
        moe_shared_expert_intermediate_size=128,
        intermediate_size=256,
        n_group=1,
        topk_group=1,
    )


def first_experts(model: nn.Module) -> nn.Module:
    experts = next(m for m in model.modules() if hasattr(m, "is_concatenated"))
    for parameter in experts.parameters():
        nn.init.normal_(parameter, std=0.05)
    return experts


def run(experts: nn.Module, implementation: str, *inputs: torch.Tensor) -> torch.Tensor:
    experts.config._experts_implementation = implementation
    with torch.no_grad():
        return experts(*inputs)


def kept_of(experts: nn.Module) -> nn.Module:
    """What was made of them at the first call."""
    return experts.__dict__["_moefp8_experts"].experts


def inputs_for(experts: nn.Module) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    x = torch.randn(T, 256).bfloat16()
    top_k_index = torch.stack([torch.randperm(experts.num_experts)[:2] for _ in range(T)])
    return x, top_k_index, torch.rand(T, 2).bfloat16()


@pytest.mark.parametrize("family", [*FAMILIES, "gpt_oss", "nemotron_h"])
def test_every_kind_of_experts(family):
    config = small_config(family) if family in FAMILIES else other_config(family)
    experts = first_experts(AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16))
    inputs = inputs_for(experts)
    expected = run(experts, "eager", *inputs)
    before = {*experts.state_dict()}
    ours = run(experts, "moefp8", *inputs)
    assert ours.dtype == torch.bfloat16
    assert_matches_reference(ours, expected, 0.12)
    assert {*experts.state_dict()} == before
    if family in FAMILIES:
        assert type(kept_of(experts)) is GroupedExperts
        assert_matches_reference(ours, reference_model(kept_of(experts))(*inputs), 0.02)


class Plain(nn.Module):
    """Experts with nothing particular, but for what `decorated` says."""

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__()
        self.num_experts, self.act_fn = E, nn.SiLU()
        self.gate_up_proj = nn.Parameter(torch.randn(E, 2 * I, H).bfloat16() * 0.05)
        self.down_proj = nn.Parameter(torch.randn(E, H, I).bfloat16() * 0.05)

    def forward(self, x, top_k_index, top_k_weights):
        result = torch.zeros_like(x, dtype=torch.float32)
        for token in range(x.shape[0]):
            for expert, weight in zip(top_k_index[token], top_k_weights[token], strict=True):
                if expert < E:
                    gate_up = self.gate_up_proj[expert].float() @ x[token].float()
                    y = self.down_proj[expert].float() @ self._apply_gate(gate_up)
                    result[token] += weight * self.post_expert_norm(y)
        return result.to(x.dtype)

    def post_expert_norm(self, y):
        return y * torch.rsqrt(y.float().square().mean(-1, keepdim=True)) if self.norm else y


def decorated(norm: bool = False, cls: type = Plain, **flags: bool) -> nn.Module:
    """A class of its own, since the decorator changes the one that it is given."""
    own = type("Own", (cls,), {"norm": norm})
    if norm:
        flags["has_post_expert_norm"] = True
    if unknown := flags.keys() - signature(use_experts_implementation).parameters.keys():
        pytest.skip(f"transformers {transformers.__version__} has no {', '.join(unknown)}")
    return use_experts_implementation(own, **flags)(PretrainedConfig())


@pytest.mark.parametrize("flags", [{}, {"norm": True}])
def test_experts_held_elsewhere_count_nothing(flags):
    experts = decorated(**flags)
    x, top_k_index, weights = inputs_for(experts)
    top_k_index[::3, 0] = E
    top_k_index[1] = E
    expected = run(experts, "eager", x, top_k_index, weights)
    ours = run(experts, "moefp8", x, top_k_index, weights)
    assert_matches_reference(ours, expected, 0.12)
    assert ours[1].abs().max() == 0


@pytest.mark.parametrize("flags", [{}, {"norm": True}])
def test_a_rank_takes_the_ids_of_the_whole_model(flags):
    whole = decorated(**flags)
    x, index, weights = inputs_for(whole)
    index[::7, 1] = E
    for rank in range(2):
        first, end = (0, 2) if rank == 0 else (2, E)
        part = moefp8.shard(copy.deepcopy(whole), {"": "experts"}, rank, 2)
        by_hand = index.masked_fill((index < first) | (index >= end), E)
        expected = run(whole, "moefp8", x, by_hand, weights)
        assert_matches_reference(run(part, "moefp8", x, index, weights), expected, 0.02)
        with pytest.raises(ValueError, match=r"top_k_index must be in \[0, E\] for E = 5"):
            run(part, "moefp8", x, index + 1, weights)


def test_an_interleaved_swiglu_runs_fast():
    plain = decorated()
    experts = decorated(is_concatenated=False)
    experts._apply_gate = lambda x: nn.functional.silu(x[..., ::2]) * x[..., 1::2]
    halves = plain.gate_up_proj.data.unflatten(1, (2, I))
    experts.gate_up_proj.data = halves.transpose(1, 2).flatten(1, 2).contiguous()
    experts.down_proj.data = plain.down_proj.data
    inputs = inputs_for(plain)
    assert torch.equal(run(experts, "moefp8", *inputs), run(plain, "moefp8", *inputs))
    assert type(kept_of(experts)) is GroupedExperts


def multiply(experts: nn.Module) -> None:
    experts.down_proj.mul_(2)


def load(experts: nn.Module) -> None:
    state = experts.state_dict()
    experts.load_state_dict(state | {"down_proj": 2 * state["down_proj"]})


def put_another_in_its_place(experts: nn.Module) -> None:
    """The allocator gives a freed block to the next parameter of its size, at the same address."""
    address = experts.down_proj.data_ptr()
    changed = experts.down_proj * 2
    values = torch.frombuffer(bytearray(changed.nbytes), dtype=changed.dtype)
    del experts.down_proj, values
    experts.down_proj = nn.Parameter(changed, requires_grad=False)
    for _ in range(50):  # until it lies there
        if experts.down_proj.data_ptr() == address:
            break
        experts.down_proj = nn.Parameter(experts.down_proj.clone(), requires_grad=False)


@pytest.mark.parametrize("of_copy", [False, True])
@pytest.mark.parametrize("double", [multiply, load, put_another_in_its_place])
def test_changed_weights_are_quantized_again(double, of_copy):
    experts = decorated()
    inputs = inputs_for(experts)
    first = run(experts, "moefp8", *inputs)
    kept = kept_of(experts)
    changed = copy.deepcopy(experts) if of_copy else experts
    assert torch.equal(run(experts, "moefp8", *inputs), first)
    assert kept_of(experts) is kept
    with torch.no_grad():
        double(changed)
    assert_matches_reference(run(changed, "moefp8", *inputs), 2 * first.float(), 0.01)
    assert torch.equal(run(experts, "moefp8", *inputs), first) == of_copy


@pytest.mark.parametrize("name", ["AdamW", "Adam", "SGD", "Adagrad"])
def test_weights_that_a_fused_optimizer_changed_are_quantized_again(name):
    """It bumps no version. Weights are FP32, since torch 2.13's SGD leaves BF16 be on the CPU."""
    experts, other = decorated().float(), decorated()
    inputs = inputs_for(experts)
    first, beside = run(experts, "moefp8", *inputs), run(other, "moefp8", *inputs)
    kept = kept_of(other)
    optimizer = getattr(torch.optim, name)(experts.parameters(), lr=1.0, fused=True)
    optimizer.step()  # without gradients
    kept_then = kept_of(experts)
    assert torch.equal(run(experts, "moefp8", *inputs), first)
    assert kept_of(experts) is kept_then
    experts.down_proj.grad = torch.randn_like(experts.down_proj)
    optimizer.step()
    experts.requires_grad_(False)
    changed = run(experts, "moefp8", *inputs)
    assert float(row_errors(changed, first).min()) > 0.5
    assert_matches_reference(changed, run(experts, "eager", *inputs), 0.12)
    kept_now = kept_of(experts)
    assert torch.equal(run(experts, "moefp8", *inputs), changed)
    assert kept_of(experts) is kept_now
    assert torch.equal(run(other, "moefp8", *inputs), beside)
    assert kept_of(other) is kept


def test_made_in_inference_mode_and_used_outside():
    experts = decorated()
    inputs = inputs_for(experts)
    with torch.inference_mode():
        first = run(experts, "moefp8", *inputs)
    assert torch.equal(run(experts, "moefp8", *inputs), first)
    experts.config._experts_implementation = "moefp8"
    x = inputs[0].clone().requires_grad_()
    experts.requires_grad_(False)
    experts(x, *inputs[1:]).sum().backward()
    assert x.grad.any()


def fp8_experts(sizes: tuple[int, int, int] = (E, H, I), **arguments) -> nn.Module:
    """transformers' own FP8 module, filled by hand."""
    num_experts, hidden_size, intermediate_size = sizes
    config = PretrainedConfig()
    config.num_experts, config.hidden_size = num_experts, hidden_size
    config.moe_intermediate_size, config.hidden_act = intermediate_size, "silu"
    own = type("OwnFP8", (FP8Experts,), {})
    cls = use_experts_implementation(own, experts_interface=ALL_FP8_EXPERTS_FUNCTIONS)
    experts = cls(config, **{"block_size": (128, 128), **arguments})
    rows = experts.gate_up_proj_scale_inv.shape[1]
    halves = rows == 2 * -(-intermediate_size // 128)
    weights = torch.randn(num_experts, 2 * intermediate_size, hidden_size) * 0.05
    parts = weights.unflatten(1, (2, -1)) if halves else weights.unsqueeze(1)
    q = quantize_128x128(parts)
    experts.gate_up_proj.data = q.data.flatten(1, 2)
    experts.gate_up_proj_scale_inv.data = q.scale_inv.flatten(1, 2)
    q = quantize_128x128(torch.randn(num_experts, hidden_size, intermediate_size) * 0.05)
    experts.down_proj.data, experts.down_proj_scale_inv.data = q
    return experts


def test_fp8_modules_are_used_as_they_are():
    experts = fp8_experts((E, H, 256))
    inputs = inputs_for(experts)
    ours = run(experts, "moefp8", *inputs)
    quantized = kept_of(experts)
    assert quantized.gate_up_proj.data_ptr() == experts.gate_up_proj.data_ptr()
    assert quantized.down_proj_scale_inv.data_ptr() == experts.down_proj_scale_inv.data_ptr()
    assert_matches_reference(ours, reference_model(quantized)(*inputs), 0.02)


def test_fp8_modules_with_e8m0_scales():
    experts = fp8_experts((E, H, 256))
    scales = experts.gate_up_proj_scale_inv, experts.down_proj_scale_inv
    for scale in scales:
        scale.data = scale.data.log2().round().exp2()
    inputs = inputs_for(experts)
    expected = run(experts, "moefp8", *inputs)
    for scale in scales:
        scale.data = scale.data.to(torch.float8_e8m0fnu)
    assert torch.equal(run(experts, "moefp8", *inputs), expected)


def test_fp8_modules_with_a_gate_of_their_own():
    experts = fp8_experts((E, H, 256))
    experts.swiglu_alpha, experts.swiglu_limit = 1.702, 7.0
    inputs = inputs_for(experts)
    bf16 = decorated()
    for name in ("gate_up_proj", "down_proj"):
        stack = zip(getattr(experts, name), getattr(experts, f"{name}_scale_inv"), strict=True)
        weights = torch.stack([naive.values(*each, 128) for each in stack])
        getattr(bf16, name).data = weights.float()
    bf16._apply_gate = experts._apply_gate
    assert_matches_reference(run(experts, "moefp8", *inputs), run(bf16, "eager", *inputs), 0.12)


@pytest.mark.parametrize(
    ("intermediate_size", "attributes", "rule"),
    [
        (256, {"block_size": (64, 64)}, r"block_size must be \(128, 128\), got \(64, 64\)"),
        (256, {"block_size": None}, "got None"),
        (256, {"activation_scheme": "static"}, "must be 'dynamic'"),
        # Block 1 holds rows of both gate and up.
        (192, {}, r"must be \[E, 4, 2\] for 2 parts of 192 rows"),
        # [E, 2, 2] may be one block each of gate and up, or those of 192 rows.
        (
            96,
            {"has_post_expert_norm": True, "post_expert_norm": nn.Identity()},
            "must not be 96",
        ),
    ],
)
def test_fp8_modules_of_another_make_are_refused(intermediate_size, attributes, rule):
    experts = fp8_experts((E, H, intermediate_size))
    for name, value in attributes.items():
        setattr(experts, name, value)
    with pytest.raises(ValueError, match=rule):
        run(experts, "moefp8", *inputs_for(experts))


def test_swiglu_takes_scales_of_two_meanings_for_those_of_gate_and_up():
    experts = fp8_experts((E, H, 96))
    inputs = inputs_for(experts)
    ours = run(experts, "moefp8", *inputs)
    assert_matches_reference(ours, reference_model(kept_of(experts))(*inputs), 0.02)


@torch.inference_mode()
def test_a_whole_model_and_torch_compile():
    config = small_config("qwen3_moe")
    model = AutoModelForCausalLM.from_config(
        config, dtype=torch.bfloat16, experts_implementation="moefp8"
    ).eval()
    ids = prompt()[:, :9]
    ours = model(ids, use_cache=False).logits
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert float(row_errors(compiled(ids, use_cache=False).logits, ours).median()) < 0.02
    model.set_experts_implementation("eager")
    eager = model(ids, use_cache=False).logits
    assert 0 < float(row_errors(ours, eager).median()) < 0.15


@torch.inference_mode()
def test_compiled_before_the_first_call():
    """The graph breaks once, where weights are quantized, and is whole from then on."""
    torch._dynamo.reset()
    experts = decorated()
    inputs = inputs_for(experts)
    expected = run(copy.deepcopy(experts), "moefp8", *inputs)
    experts.config._experts_implementation = "moefp8"
    compiled = torch.compile(experts, backend="aot_eager")
    for _ in range(2):
        assert_matches_reference(compiled(*inputs), expected, 0.02)
    assert "_moefp8_experts" in experts.__dict__


def test_the_name_is_known_to_both_interfaces():
    assert ALL_FP8_EXPERTS_FUNCTIONS["moefp8"] is fp8_experts_forward
    with pytest.raises(KeyError, match="not a valid experts implementation"):
        run(fp8_experts((E, H, 256)), "moefp9", *inputs_for(fp8_experts((E, H, 256))))


OTHERS = {"GroupedExperts": "qwen3_moe", "grouped linears": "gpt_oss"}


def frozen_experts(family: str) -> nn.Module:
    config = other_config(OTHERS[family])
    experts = first_experts(AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16))
    return experts.requires_grad_(False)


@pytest.mark.parametrize("family", OTHERS)
def test_gradients_are_those_of_the_weights_that_were_quantized(family):
    experts = frozen_experts(family)
    x, ids, top_k_weights = inputs_for(experts)
    found, grad = [], torch.randn_like(x)
    for implementation in ("moefp8", "eager"):
        experts.config._experts_implementation = implementation
        leaves = [y.clone().requires_grad_() for y in (x, top_k_weights)]
        experts(leaves[0], ids, leaves[1]).backward(grad)
        found.append([leaves[0].grad, leaves[1].grad.flatten()])
    for ours, theirs in zip(*found, strict=True):
        assert_matches_reference(ours, theirs, 0.15)


@pytest.mark.parametrize("family", OTHERS)
def test_no_gradient_passes_by_experts_without_a_word(family):
    """Those of weights, which were quantized, are an error."""
    experts = frozen_experts(family)
    x, *choice = inputs_for(experts)
    experts.config._experts_implementation = "moefp8"
    expected = experts(x, *choice)
    for name, weight in experts.named_parameters():
        weight.requires_grad_()
        y = experts(x, *choice)
        assert torch.equal(y, expected)
        y += 1  # as blocks may add their shared experts
        if "proj" in name and "bias" not in name:
            with pytest.raises(NotImplementedError, match=r"moefp8\.adapters\.add_lora"):
                y.sum().backward()
        weight.requires_grad_(False)
