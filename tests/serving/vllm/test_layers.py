"""Layers of vLLM have the bits of ours, on a CPU and, by hand, on a GPU."""

from types import SimpleNamespace

import pytest
import torch

from moefp8 import FP8Linear, GroupedExperts
from moefp8.quant import quantize_128x128

E, H, I, K = 8, 256, 128, 2
BLOCKS = {"is_checkpoint_fp8_serialized": True, "weight_block_size": [128, 128]}


@pytest.fixture
def device():
    from vllm.platforms import current_platform

    return torch.device(current_platform.device_type)


@pytest.fixture
def config(worker):
    from moefp8.serving.vllm.config import MoEFP8Config

    worker.quant_config = MoEFP8Config(**BLOCKS)
    worker.model_config = SimpleNamespace(architectures=["Made"], dtype=torch.bfloat16)
    yield worker.quant_config
    worker.quant_config = worker.model_config = None


def made(config, device, num_experts=E, **options):
    """vLLM's layer of experts, which asks the config for its method."""
    from vllm.model_executor.layers.fused_moe import layer

    make = getattr(layer, "FusedMoEFactory", None) or layer.FusedMoE
    sizes = {"num_experts": num_experts, "top_k": K, "hidden_size": H, "intermediate_size": I}
    with device:
        runner = make(
            **sizes,
            params_dtype=torch.bfloat16,
            quant_config=config,
            prefix=f"layers.{made.count}.mlp.experts",
            **options,
        )
    made.count += 1
    return runner.routed_experts


made.count = 0


def load(routed, ours: GroupedExperts) -> None:
    routed.w13_weight.data = ours.gate_up_proj.data.clone()
    routed.w13_weight_scale_inv.data = ours.gate_up_proj_scale_inv.data.clone()
    routed.w2_weight.data = ours.down_proj.data.clone()
    routed.w2_weight_scale_inv.data = ours.down_proj_scale_inv.data.clone()
    routed.quant_method.process_weights_after_loading(routed)


def drawn(device, num_tokens=40):
    generator = torch.Generator().manual_seed(num_tokens)
    x = torch.randn(num_tokens, H, generator=generator).bfloat16()
    scores, ids = torch.rand(num_tokens, E, generator=generator).topk(K)
    return x.to(device), scores.to(device), ids.int().to(device)


def apply(routed, x, scores, ids):
    return routed.quant_method.apply(routed, x, scores, ids, None, None)


@pytest.mark.parametrize("limit", [None, 0.5])
def test_experts_have_the_bits_of_grouped_experts(config, device, limit):
    ours = GroupedExperts(E, H, I, swiglu_limit=limit, device=device)
    routed = made(config, device, swiglu_limit=limit)
    assert type(routed.quant_method).__name__ == "MoEFP8ExpertsMethod"
    load(routed, ours)
    x, scores, ids = drawn(device)
    assert torch.equal(apply(routed, x, scores, ids), ours(x, ids, scores))


MAPS = {
    "the second half": [-1, -1, -1, -1, 0, 1, 2, 3],
    "one of two": [0, -1, 1, -1, 2, -1, 3, -1],
    "a range in another order": [-1, 3, 2, 1, 0, -1, -1, -1],
    "none": [-1] * 8,
}


@pytest.mark.parametrize("name", MAPS)
@pytest.mark.parametrize("changes", [False, True])
def test_experts_of_a_rank(config, device, name, changes):
    """changes: whether vLLM puts another map there after it has loaded weights."""
    ours, expert_map = GroupedExperts(4, H, I, device=device), torch.tensor(MAPS[name])
    routed = made(config, device)
    routed._expert_map = (expert_map.flip(0) if changes else expert_map).to(device)
    load(routed, ours)
    routed._expert_map = expert_map.to(device) if changes else routed._expert_map
    x, scores, ids = drawn(device)
    local = expert_map.to(device)[ids.long()]
    elsewhere = local < 0
    expected = ours(x, local.masked_fill(elsewhere, 4), scores.masked_fill(elsewhere, 0))
    assert torch.equal(apply(routed, x, scores, ids), expected)


def test_the_modular_kernel_s_experts_have_the_same_bits(config, device):
    """They run where tokens travel between ranks; -1 marks a choice that is none."""
    ours, routed = GroupedExperts(4, H, I, device=device), made(config, device)
    expert_map = torch.tensor(MAPS["one of two"], device=device)
    load(routed, ours)
    x, scores, ids = drawn(device)
    ids[0, 0] = -1
    output = torch.full_like(x, torch.nan)
    kernel = routed.quant_method.moe_kernel.impl.fused_experts
    kernel.apply(
        output=output,
        hidden_states=x,
        w1=routed.w13_weight,
        w2=routed.w2_weight,
        topk_weights=scores,
        topk_ids=ids,
        activation=routed.activation,
        global_num_experts=E,
        expert_map=expert_map,
        a1q_scale=None,
        a2_scale=None,
        workspace13=None,
        workspace2=None,
        expert_tokens_meta=None,
        apply_router_weight_on_input=False,
    )
    local = torch.where(ids < 0, -1, expert_map[ids.long()])
    elsewhere = local < 0
    expected = ours(x, local.masked_fill(elsewhere, 4), scores.masked_fill(elsewhere, 0))
    assert torch.equal(output, expected)


@pytest.mark.parametrize("bias", [False, True])
def test_linears_have_the_bits_of_ours(config, device, bias):
    from vllm.model_executor.layers.linear import ReplicatedLinear

    ours = FP8Linear(H, 384, bias=bias, device=device)
    with device:
        theirs = ReplicatedLinear(
            H, 384, bias=bias, params_dtype=torch.bfloat16, quant_config=config, prefix="a"
        )
    assert type(theirs.quant_method.fp8_linear).__name__ == "MoEFP8LinearKernel"
    theirs.weight.data.copy_(ours.weight.data)
    theirs.weight_scale_inv.data.copy_(ours.weight_scale_inv.data)
    if bias:
        theirs.bias.data.copy_(ours.bias.data.normal_())
    theirs.quant_method.process_weights_after_loading(theirs)
    x = torch.randn(2, 5, H, device=device).bfloat16()
    assert torch.equal(theirs(x)[0], ours(x))


def test_scales_that_are_powers_of_two_in_8_bits(config, device):
    """As DeepSeek's newest checkpoints store them."""
    from vllm.model_executor.layers.linear import ReplicatedLinear

    config.is_scale_e8m0 = True
    with device:
        theirs = ReplicatedLinear(
            H, 384, bias=False, params_dtype=torch.bfloat16, quant_config=config, prefix="b"
        )
    codes, scales = quantize_128x128(torch.randn(384, H, device=device))
    exponents = torch.randint(120, 132, scales.shape, dtype=torch.uint8, device=device)
    scales = exponents.view(torch.float8_e8m0fnu)
    theirs.weight.data.copy_(codes)
    theirs.weight_scale_inv.data.copy_(scales)
    theirs.quant_method.process_weights_after_loading(theirs)
    ours = FP8Linear(H, 384, bias=False, device=device)
    ours.weight.data.copy_(codes)
    ours.weight_scale_inv.data.copy_(scales.float())
    x = torch.randn(5, H, device=device).bfloat16()
    assert torch.equal(theirs(x)[0], ours(x))
    new = torch.randint(120, 132, scales.shape, dtype=torch.uint8).view(torch.float8_e8m0fnu)
    theirs.weight_scale_inv.weight_loader(theirs.weight_scale_inv, new)
    ours.weight_scale_inv.data.copy_(new.float())
    assert torch.equal(theirs(x)[0], ours(x))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_experts_are_loaded_from_weights_in_16_and_32_bits(config, device, dtype):
    """Before they are processed and after it."""
    routed = made(config, device)
    shapes = {"w1": (I, H), "w3": (I, H), "w2": (H, I)}
    for seed in (0, 1):
        torch.manual_seed(seed)
        weights = {name: torch.randn(E, *shape).to(dtype) for name, shape in shapes.items()}
        for name, w in weights.items():
            stack = "w2_weight" if name == "w2" else "w13_weight"
            parameter, told = getattr(routed, stack), f"layers.0.mlp.experts.{stack}"
            for expert in range(E):
                how = {"shard_id": name, "expert_id": expert, "return_success": True}
                assert parameter.weight_loader(parameter, w[expert], told, **how)
        routed.quant_method.process_weights_after_loading(routed)
        gate_up = torch.cat([weights["w1"], weights["w3"]], dim=1)
        ours = GroupedExperts.from_weights(gate_up.to(device), weights["w2"].to(device))
        x, scores, ids = drawn(device)
        assert torch.equal(apply(routed, x, scores, ids), ours(x, ids, scores))


def merged(config, device, *sizes):
    from vllm.model_executor.layers.linear import MergedColumnParallelLinear

    merged.count += 1
    prefix, options = f"merged.{merged.count}", {"bias": False, "params_dtype": torch.bfloat16}
    with device:
        return MergedColumnParallelLinear(
            H, list(sizes), quant_config=config, prefix=prefix, **options
        )


merged.count = 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("e8m0", [False, True])
def test_linears_are_loaded_from_weights_in_16_and_32_bits(config, device, dtype, e8m0):
    """Scales are powers of two where those of the checkpoint are."""
    config.is_scale_e8m0 = e8m0
    theirs = merged(config, device, 384, 100)
    for seed in (0, 1):
        torch.manual_seed(seed)
        pieces = [torch.randn(n, H).to(dtype) for n in (384, 100)]
        for number, piece in enumerate(pieces):
            theirs.weight.weight_loader(theirs.weight, piece, number)
        theirs.quant_method.process_weights_after_loading(theirs)
        codes, scale_inv = quantize_128x128(torch.cat(pieces).to(device), ue8m0=e8m0)
        ours = FP8Linear(H, 484, bias=False, device=device)
        ours.weight.data.copy_(codes)
        ours.weight_scale_inv.data.copy_(scale_inv)
        x = torch.randn(5, H, device=device).bfloat16()
        assert torch.equal(theirs(x)[0], ours(x))


@pytest.mark.parametrize("sizes", [(192, 128), (64, 64)])
def test_floats_whose_blocks_go_across_cuts_are_refused(config, device, sizes):
    theirs = merged(config, device, *sizes)
    with pytest.raises(ValueError, match="blocks of 128x128 go across the cuts of a linear"):
        theirs.weight.weight_loader(theirs.weight, torch.randn(sizes[0], H).bfloat16(), 0)


def test_a_weight_that_does_not_fit_changes_nothing(config, device):
    theirs = merged(config, device, 384, 128)
    before = [x.detach().clone() for x in (theirs.weight, theirs.weight_scale_inv)]
    with pytest.raises((AssertionError, RuntimeError)):
        theirs.weight.weight_loader(theirs.weight, torch.randn(383, H).bfloat16(), 0)
    for old, new in zip(before, (theirs.weight, theirs.weight_scale_inv), strict=True):
        assert torch.equal(old.view(torch.uint8), new.view(torch.uint8))


def test_a_layer_is_complete_when_its_last_weight_has_come(config, device):
    """In a reload, vLLM counts elements, and loads a layer that has all."""
    from vllm.model_executor.layers.linear import ReplicatedLinear
    from vllm.model_executor.model_loader import reload

    with device:
        one = ReplicatedLinear(
            H, 384, bias=False, params_dtype=torch.bfloat16, quant_config=config, prefix="d"
        )
    experts, two = made(config, device), merged(config, device, 384, 128)
    model = torch.nn.ModuleDict({"one": one, "two": two, "experts": experts})
    shapes = {"w1": (I, H), "w3": (I, H), "w2": (H, I)}
    weights = {name: torch.randn(E, *shape).bfloat16() for name, shape in shapes.items()}
    with device:
        reload.record_metadata_for_reloading(model)

    def load_all() -> None:
        for layer, pieces in ((one, (384,)), (two, (384, 128))):
            sent = [torch.randn(rows, H).bfloat16() for rows in pieces]
            for number, w in enumerate(sent):
                shard = (number,) if len(pieces) > 1 else ()
                assert layer.weight.is_meta == is_reload
                layer.weight.weight_loader(layer.weight, w, *shard)
            assert not layer.weight.is_meta
            for w in sent:  # a sender may use its memory again
                w.zero_()
        for name, w in weights.items():
            stack = "w2_weight" if name == "w2" else "w13_weight"
            parameter = getattr(experts, stack)
            for expert in range(E):
                told = f"layers.0.mlp.experts.{stack}"
                parameter.weight_loader(parameter, w[expert], told, name, expert)
        assert not experts.w2_weight.is_meta

    is_reload = False
    load_all()
    for layer in (one, two, experts):
        layer.quant_method.process_weights_after_loading(layer)
    torch.manual_seed(3)
    reload.initialize_layerwise_reload(model)
    is_reload = True
    load_all()
    torch.manual_seed(3)
    for layer, pieces in ((one, (384,)), (two, (384, 128))):
        codes, scale_inv = quantize_128x128(
            torch.cat([torch.randn(n, H).bfloat16() for n in pieces]).to(device)
        )
        assert torch.equal(layer.weight.view(torch.uint8), codes.view(torch.uint8))
        assert torch.equal(layer.weight_scale_inv, scale_inv)


def test_each_reason_to_leave_experts_to_vllm_is_told(config, device):
    from vllm.model_executor.layers.quantization.fp8 import Fp8MoEMethod

    from moefp8.serving.vllm.experts import MoEFP8ExpertsMethod

    routed = made(config, device)
    why_not = MoEFP8ExpertsMethod.why_not
    method = Fp8MoEMethod(config, routed)
    assert why_not(method, routed) is None
    for attributes, layer, reason in (
        ({"moe_backend": "triton"}, {}, "moe_backend is triton"),
        ({"has_bias": True}, {}, "experts have biases"),
        ({"is_lora_enabled": True}, {}, "LoRA"),
        ({}, {"swiglu_alpha": 1.7}, "swiglu_alpha is 1.7"),
        ({}, {"swiglu_beta": 1.0}, "swiglu_beta is 1.0"),
    ):
        method = Fp8MoEMethod(config, routed)
        before = {**vars(method.moe)}
        vars(method.moe).update(attributes)
        vars(routed).update(layer)
        assert reason in why_not(method, routed)
        vars(method.moe).update(before)
        vars(routed).update(dict.fromkeys(layer))


def test_linears_with_other_blocks_stay(config, device, caplog):
    from vllm.model_executor.layers.quantization.utils.quant_utils import (
        GroupShape,
        create_fp8_quant_key,
    )

    from moefp8.serving.vllm.linear import MoEFP8LinearKernel

    def can(weights, activations):
        keys = {
            "weight_quant_key": create_fp8_quant_key(True, GroupShape(*weights)),
            "activation_quant_key": create_fp8_quant_key(False, GroupShape(*activations)),
        }
        return MoEFP8LinearKernel.can_implement(SimpleNamespace(**keys))

    assert can((128, 128), (1, 128)) == (True, None)
    assert can((64, 64), (1, 64)) == (
        False,
        "blocks are (64, 64) of weights and (1, 64) of activations",
    )


def test_linears_are_batch_invariant_if_vllm_is_to_be(config, device, monkeypatch):
    """Sums cancel, so that another order of them shows."""
    from vllm.model_executor.layers.linear import ReplicatedLinear

    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    ours = FP8Linear(4096, 128, bias=False, device=device, batch_invariant=True)
    with device:
        theirs = ReplicatedLinear(
            4096, 128, bias=False, params_dtype=torch.bfloat16, quant_config=config, prefix="c"
        )
    half = torch.randn(128, 2048, device=device)
    codes, scales = quantize_128x128(torch.cat([half, -half], dim=1))
    for linear in ours, theirs:
        linear.weight.data.copy_(codes)
        linear.weight_scale_inv.data.copy_(scales)
    theirs.quant_method.process_weights_after_loading(theirs)
    x = torch.randn(9, 2048, device=device).bfloat16().repeat(1, 2)
    expected = ours(x)
    assert torch.equal(theirs(x)[0], expected)
    for i in range(len(x)):
        assert torch.equal(theirs(x[i : i + 1])[0], expected[i : i + 1])


def test_graphs_that_vllm_keeps_on_disk_are_of_the_plug_in_alone(config):
    """A graph of vLLM's own linears would be found by the same key, and run on our weights."""
    from vllm import envs

    assert "MOEFP8_VLLM" in envs.compile_factors()


def test_a_draft_in_fp8_beside_a_model_that_is_not(worker, config):
    """vLLM's config then has no quantization config."""
    from moefp8.serving.vllm.model import ServedModel

    worker.quant_config = None
    served = ServedModel.current()
    assert ServedModel.current() is served
    worker.quant_config = config
    assert ServedModel.current() is not served
