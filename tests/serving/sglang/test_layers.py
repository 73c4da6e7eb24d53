"""Layers that SGLang makes give what those of moefp8 give, bit for bit; without SGLang, no test."""

import pytest
import torch

import moefp8
from moefp8 import FP8Linear, GroupedExperts
from tests.gpu import on_gpu
from tests.serving.sglang import engine
from tests.serving.sglang.layers import (
    E,
    H,
    I,
    T,
    choices,
    experts_of,
    fused_moe,
    linear,
    log_line,
    run,
    tokens,
)

pytestmark = pytest.mark.usefixtures("sglang")

# ---- Linears ----


def plain_linear(weight: torch.Tensor) -> torch.nn.Linear:
    linear = torch.nn.Linear(*reversed(weight.shape), bias=False, dtype=weight.dtype)
    linear.weight.data = weight
    return linear


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(T, H), (2, 3, H), (0, H)])
def test_linears(bias, shape):
    from sglang.srt.layers.linear import ReplicatedLinear

    reference = FP8Linear(H, 200, bias=bias)
    options = {"quant_config": engine.config(), "params_dtype": torch.bfloat16}
    made = linear(ReplicatedLinear(H, 200, bias=bias, **options), reference)
    x = torch.randn(shape).bfloat16()
    assert torch.equal(made(x)[0], reference(x))


def test_parts_of_a_merged_linear():
    from sglang.srt.layers.linear import MergedColumnParallelLinear

    options = {"quant_config": engine.config(), "params_dtype": torch.bfloat16, "bias": False}
    made = MergedColumnParallelLinear(H, [128, 256], **options)
    parts = [FP8Linear(H, n, bias=False) for n in (128, 256)]
    for shard, part in enumerate(parts):
        for name in ("weight", "weight_scale_inv"):
            parameter = getattr(made, name)
            parameter.weight_loader(parameter, getattr(part, name), shard)
    made.quant_method.process_weights_after_loading(made)
    x = tokens()
    assert torch.equal(made(x)[0], torch.cat([part(x) for part in parts], 1))


def test_linears_of_a_rank():
    from sglang.srt.layers.linear import ColumnParallelLinear, RowParallelLinear

    options = {"quant_config": engine.config(), "params_dtype": torch.bfloat16, "bias": False}
    whole, x = FP8Linear(H, 256, bias=False), tokens()
    with engine.rank(1, of=2):
        columns = linear(ColumnParallelLinear(H, 256, **options), whole)
        rows = linear(RowParallelLinear(H, 256, **options, reduce_results=False), whole)
        assert torch.equal(columns(x)[0], whole(x)[:, 128:])
        part = FP8Linear(128, 256, bias=False)
        part.weight.copy_(whole.weight[:, 128:])
        part.weight_scale_inv.copy_(whole.weight_scale_inv[:, 1:])
        assert torch.equal(rows(x[:, 128:])[0], part(x[:, 128:]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_trainer_s_weights_of_linears_are_quantized(dtype):
    """Before the first processing and after it, also on a rank."""
    from sglang.srt.layers.linear import MergedColumnParallelLinear

    options = {"quant_config": engine.config(), "params_dtype": torch.bfloat16, "bias": False}
    with engine.rank(1, of=2):
        made = MergedColumnParallelLinear(H, [256, 512], **options)
        for _ in range(2):
            pieces = [torch.randn(n, H).to(dtype) for n in (256, 512)]
            for shard, piece in enumerate(pieces):
                made.weight.weight_loader(made.weight, piece, shard)
            made.quant_method.process_weights_after_loading(made)
            x, ours = tokens(), []
            for piece in pieces:
                ours.append(FP8Linear.from_linear(plain_linear(piece[len(piece) // 2 :])))
            assert torch.equal(made(x)[0], torch.cat([part(x) for part in ours], 1))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_trainer_s_weights_of_experts_are_quantized(dtype):
    made = fused_moe(GroupedExperts(E, H, I))
    shapes = {"w1": (I, H), "w3": (I, H), "w2": (H, I)}
    weights = {name: torch.randn(E, *shape).to(dtype) for name, shape in shapes.items()}
    for name, w in weights.items():
        stack = "w2_weight" if name == "w2" else "w13_weight"
        parameter = getattr(made, stack)
        for expert in range(E):
            told = f"model.layers.0.mlp.experts.{stack}"
            parameter.weight_loader(parameter, w[expert], told, shard_id=name, expert_id=expert)
    gate_up = torch.cat([weights["w1"], weights["w3"]], 1)
    x, (ids, scores) = tokens(), choices()
    expected = GroupedExperts.from_weights(gate_up, weights["w2"])(x, ids, scores)
    assert torch.equal(run(made, x, ids, scores), expected)


def test_fp16_in_gives_fp16():
    from sglang.srt.layers.linear import ReplicatedLinear

    reference = FP8Linear(H, 128, bias=False)
    options = {"quant_config": engine.config(), "params_dtype": torch.float16, "bias": False}
    made = linear(ReplicatedLinear(H, 128, **options), reference)
    x = torch.randn(T, H).half()
    assert made(x)[0].dtype == torch.float16
    assert torch.equal(made(x)[0], reference(x))


# ---- Experts ----


@pytest.mark.parametrize(
    ("options", "limit", "factor"),
    [({}, None, 1), ({"routed_scaling_factor": 2.5}, None, 2.5), ({"swiglu_limit": 0.1}, 0.1, 1)],
    ids=["plain", "factor", "limit"],
)
def test_experts(options, limit, factor):
    reference = GroupedExperts(E, H, I, swiglu_limit=limit)
    made = fused_moe(reference, **options)
    x, (ids, scores) = tokens(), choices()
    y = run(made, x, ids, scores)
    assert torch.equal(y, reference(x, ids, scores * factor))
    assert y.data_ptr() != x.data_ptr()


def test_no_tokens():
    made, (ids, scores) = fused_moe(GroupedExperts(E, H, I)), choices()
    assert run(made, tokens()[:0], ids[:0], scores[:0]).shape == (0, H)


def test_rows_of_padding_have_no_experts():
    reference = GroupedExperts(E, H, I)
    made = fused_moe(reference)
    x, (ids, scores) = tokens(), choices()
    expected = reference(x, ids, scores)
    ids[3:] = -1  # as SGLang marks them
    y = run(made, x, ids, scores)
    assert torch.equal(y[:3], expected[:3])
    assert not y[3:].any()


@pytest.mark.parametrize("place", [0, 1])
def test_experts_of_a_rank(place, monkeypatch):
    from sglang.srt.layers.moe.token_dispatcher import standard

    monkeypatch.setattr(standard, "get_device", lambda: engine.DEVICE)
    whole, part = GroupedExperts(E, H, I), GroupedExperts(E // 2, H, I)
    part.expert_offset, part.num_global_experts = place * E // 2, E
    for name, parameter in part.named_parameters():
        parameter.data.copy_(whole.get_parameter(name).chunk(2)[place])
    x, (ids, scores) = tokens(), choices()
    with engine.rank(place, of=2, experts="ep"):
        made = fused_moe(whole)
        assert made.w13_weight.shape[0] == E // 2
        y = run(made, x, ids, scores)
    assert torch.equal(y, part(x, ids, scores))
    assert y.any()


def test_shared_experts_among_those_of_a_rank(monkeypatch):
    """SGLang may make a shared expert one of the routed ones, which every rank holds."""
    from sglang.srt.layers.moe.token_dispatcher import standard

    monkeypatch.setattr(standard, "get_device", lambda: engine.DEVICE)
    whole, part = GroupedExperts(E + 1, H, I), GroupedExperts(3, H, I)
    for name, parameter in part.named_parameters():
        parameter.data.copy_(whole.get_parameter(name)[[2, 3, 4]])
    x, (ids, scores) = tokens(), choices()
    ids[:, -1] = E  # the shared one
    with engine.rank(1, of=2, experts="ep"):
        y = run(fused_moe(whole, num_fused_shared_experts=1), x, ids, scores)
    local = torch.where(ids < 2, 3, ids - 2)  # 3: elsewhere
    assert torch.equal(y, part(x, local, scores))


def test_a_part_of_every_expert():
    whole, part = GroupedExperts(E, H, 256), GroupedExperts(E, H, 128)
    part.gate_up_proj.copy_(whole.gate_up_proj.unflatten(1, (2, 256))[:, :, 128:].flatten(1, 2))
    part.gate_up_proj_scale_inv.copy_(whole.gate_up_proj_scale_inv[:, 1::2])
    part.down_proj.copy_(whole.down_proj[:, :, 128:])
    part.down_proj_scale_inv.copy_(whole.down_proj_scale_inv[:, :, 1:])
    x, (ids, scores) = tokens(), choices()
    with engine.rank(1, of=2, experts="tp"):
        y = run(fused_moe(whole), x, ids, scores)
    assert torch.equal(y, part(x, ids, scores))


def test_experts_that_move_are_followed():
    """Balancing (EPLB) writes experts into other places, and then gives other ids."""
    made = fused_moe(GroupedExperts(E, H, I))
    x, (ids, scores) = tokens(), choices()
    before = run(made, x, ids, scores)
    for parameter in made.parameters():
        parameter.data.copy_(parameter.data.flip(0))
    assert torch.equal(run(made, x, E - 1 - ids, scores), before)


def test_weights_that_load_again_are_taken():
    made, reference = fused_moe(GroupedExperts(E, H, I)), GroupedExperts(E, H, I)
    experts_of(made, reference)
    x, (ids, scores) = tokens(), choices()
    assert torch.equal(run(made, x, ids, scores), reference(x, ids, scores))


def test_compiled_layers_have_no_breaks_and_the_same_bits():
    from sglang.srt.layers.linear import ReplicatedLinear

    options = {"quant_config": engine.config(), "params_dtype": torch.bfloat16, "bias": False}
    made = linear(ReplicatedLinear(H, 128, **options), FP8Linear(H, 128, bias=False))
    compiled = torch.compile(lambda x: made(x)[0], fullgraph=True, backend="aot_eager")
    x = tokens()
    with torch.inference_mode():
        assert torch.equal(compiled(x), made(x)[0])


@on_gpu
def test_layers_in_a_cuda_graph():
    made = fused_moe(GroupedExperts(E, H, I))
    x, (ids, scores) = tokens(), choices()
    with torch.inference_mode():
        run(made, x, ids, scores)  # loads the kernels
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = run(made, x, ids, scores)
        x.copy_(tokens())
        ids.copy_(ids.flip(0))
        graph.replay()
        assert torch.equal(y, run(made, x, ids, scores))


def test_a_checkpoint_that_sglang_loads(tmp_path, caplog):
    from sglang.srt.configs.device_config import DeviceConfig
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.model_loader import get_model
    from small_checkpoint import small_config
    from transformers import AutoModelForCausalLM

    config = small_config("qwen3_moe")
    config.moe_intermediate_size, config.architectures = 256, ["Qwen3MoeForCausalLM"]
    original = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    original.save_pretrained(tmp_path / "bf16")
    moefp8.checkpoint.quantize_checkpoint(tmp_path / "bf16", tmp_path / "fp8")

    served = get_model(
        model_config=ModelConfig(str(tmp_path / "fp8")),
        load_config=LoadConfig(),
        device_config=DeviceConfig(engine.DEVICE),
    )
    assert log_line(caplog, served) == "moefp8 runs 6 linears, 3 MoE layers of ModuleList"

    moefp8.convert(original)  # to the same codes
    x, (ids, scores) = tokens(), choices()
    for ours, theirs in zip(original.model.layers, served.model.layers, strict=True):
        attention, made = ours.self_attn, theirs.self_attn
        qkv = [
            projection(x) for projection in (attention.q_proj, attention.k_proj, attention.v_proj)
        ]
        assert torch.equal(made.qkv_proj(x)[0], torch.cat(qkv, 1))
        assert torch.equal(made.o_proj(x)[0], attention.o_proj(x))
        y = run(theirs.mlp.experts, x, ids, scores)
        assert torch.equal(y, ours.mlp.experts(x, ids, scores))
