"""Layers that SGLang makes give what those of moefp8 give, bit for bit; without SGLang, no test.

T tokens, k choices each, E experts, H hidden, I intermediate.
"""

import logging
import re
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, call

import pytest
import torch
from torch import nn

import moefp8
from moefp8 import FP8Linear, GroupedExperts
from tests.gpu import on_gpu
from tests.serving.sglang import engine

pytestmark = pytest.mark.skipif(not engine.is_here(), reason="SGLang is not installed")
T, TOP_K, E, H, I = 7, 2, 4, 256, 384


@pytest.fixture(scope="module", autouse=True)
def sglang(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        folder = tmp_path_factory.mktemp("sglang")
        with engine.started(folder, monkeypatch), engine.rank():
            torch.manual_seed(0)
            yield


def experts_of(made: Any, reference: GroupedExperts) -> Any:
    """Load the experts of `reference` into a FusedMoE, by its own loaders, as checkpoints are."""
    i, blocks = reference.intermediate_size, reference.gate_up_proj_scale_inv.shape[1] // 2
    for expert in range(reference.num_experts):
        for name, stack, half in (
            ("weight", reference.gate_up_proj, i),
            ("weight_scale_inv", reference.gate_up_proj_scale_inv, blocks),
        ):
            w13, w2 = getattr(made, f"w13_{name}"), getattr(made, f"w2_{name}")
            down = reference.down_proj if half == i else reference.down_proj_scale_inv
            w13.weight_loader(w13, stack[expert, :half], f"w13_{name}", "w1", expert)
            w13.weight_loader(w13, stack[expert, half:], f"w13_{name}", "w3", expert)
            w2.weight_loader(w2, down[expert], f"w2_{name}", "w2", expert)
    made.quant_method.process_weights_after_loading(made)
    return made


def fused_moe(reference: GroupedExperts, **options: Any) -> Any:
    from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE

    sizes = reference.num_experts, reference.hidden_size, reference.intermediate_size
    blocks = {"quant_config": engine.config(), "prefix": "experts"}
    made = FusedMoE(*sizes, 0, TOP_K, params_dtype=torch.bfloat16, **(blocks | options))
    return experts_of(made, reference)


def linear(made: Any, reference: FP8Linear) -> Any:
    """Load a linear as checkpoints are."""
    for name in ("weight", "weight_scale_inv", "bias"):
        parameter, value = getattr(made, name), getattr(reference, name)
        if value is not None:
            parameter.weight_loader(parameter, value)
    made.quant_method.process_weights_after_loading(made)
    return made


def tokens() -> torch.Tensor:
    return torch.randn(T, H).bfloat16()


def choices() -> tuple[torch.Tensor, torch.Tensor]:
    """Ids int32 [T, k] and scores fp32 [T, k]."""
    scores, ids = torch.rand(T, E).softmax(1).topk(TOP_K)
    return ids.int(), scores


def run(made: Any, x: torch.Tensor, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    from sglang.srt.layers.moe.topk import StandardTopKOutput

    y: torch.Tensor = made(x, StandardTopKOutput(scores, ids, torch.zeros(T, E)))
    return y


# ---- Linears ----


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


# ---- What stays with SGLang ----


def log_line(caplog: pytest.LogCaptureFixture, *layers: Any) -> str:
    """What is logged when a model of these layers is loaded."""
    from sglang.srt.model_executor.model_runner import ModelRunner

    caplog.clear()
    with caplog.at_level(logging.INFO, "moefp8"):
        ModelRunner.load_model(SimpleNamespace(model=nn.ModuleList(layers)))
    (record,) = [x for x in caplog.records if x.name.startswith("moefp8")]
    return re.sub(r"; \d+ kernels for .*", "", record.getMessage())  # which a GPU needs


def make_linear(**options: Any) -> Any:
    from sglang.srt.layers.linear import ReplicatedLinear

    blocks = {"quant_config": engine.config(), "params_dtype": torch.bfloat16, "bias": False}
    return ReplicatedLinear(H, 128, **(blocks | options))


def make_experts(**options: Any) -> Any:
    from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE

    blocks = {"quant_config": engine.config(), "params_dtype": torch.bfloat16}
    return FusedMoE(E, H, I, 0, TOP_K, **(blocks | options))


def test_what_runs_on_moefp8_is_logged(caplog):
    layers = make_linear(), make_linear(), make_experts(), nn.Linear(2, 2)
    assert log_line(caplog, *layers) == "moefp8 runs 2 linears, 1 MoE layers of ModuleList"
    assert log_line(caplog, nn.Linear(2, 2)) == "moefp8 runs no layer of ModuleList"


def test_kernels_of_what_runs_on_moefp8_are_asked_for():
    from moefp8.serving.sglang.model import ask

    compiler = Mock()
    layers = make_linear(), make_linear(bias=True), make_experts(), make_experts(activation="gelu")
    ask(compiler, nn.ModuleList(layers))
    assert compiler.linear.mock_calls == [call(128, H, None), call(128, H, torch.bfloat16)]
    assert compiler.experts.mock_calls == [call(E, H, I, top_k=TOP_K, num_global_experts=E)]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"chunked_prefill_size": 4096}, 4096),
        ({"chunked_prefill_size": -1, "max_prefill_tokens": 5000}, 5000),
        ({"chunked_prefill_size": -1, "max_prefill_tokens": 5000, "context_length": 9000}, 9000),
    ],
)
def test_kernels_are_for_calls_of_as_many_tokens_as_the_server_makes(options, expected):
    from sglang.srt.runtime_context import get_context

    from moefp8.serving.sglang.model import max_tokens

    with get_context().override_server_args(device=engine.DEVICE, **options), engine.rank():
        assert max_tokens() == expected


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"activation": "gelu"}, "its activation is gelu with a gate"),
        ({"activation": "relu2", "is_gated": False}, "its activation is relu2"),
        ({"gemm1_alpha": 1.5, "gemm1_clamp_limit": 7.0}, "silu with a gate and alpha 1.5"),
        ({"with_bias": True}, "its experts have a bias"),
        ({"apply_router_weight_on_input": True}, "its router weighs inputs"),
        ({"inplace": False, "no_combine": True}, "its outputs are not summed"),
    ],
)
def test_experts_that_do_not_fit_stay(options, reason, caplog):
    text = log_line(caplog, make_linear(), make_experts(**options))
    assert text.startswith("moefp8 runs 1 linears of ModuleList; SGLang runs 1 MoE layers (")
    assert reason in text


@pytest.mark.parametrize("blocks", [[64, 128], [128, 64]])
def test_other_blocks_stay(blocks, caplog):
    options = {"quant_config": engine.config(weight_block_size=blocks)}
    text = log_line(caplog, make_linear(**options), make_experts(**options))
    reason = f"(weight_block_size is {blocks})"
    assert text == (
        f"moefp8 runs no layer of ModuleList; SGLang runs 1 linears {reason}, 1 MoE layers {reason}"
    )


def test_one_scale_for_a_tensor_stays(caplog):
    options = {"quant_config": engine.config(weight_block_size=None)}
    text = log_line(caplog, make_linear(**options), make_experts(**options))
    assert text.count("(weight_block_size is None)") == 2


def test_weights_in_16_bits_stay(caplog):
    from sglang.srt.layers.quantization.fp8 import Fp8Config

    options = {"quant_config": Fp8Config()}
    text = log_line(caplog, make_linear(**options), make_experts(**options))
    assert text.count("(its checkpoint is not FP8)") == 2


@pytest.mark.parametrize(
    ("options", "linears", "experts"),
    [
        ({"enable_lora": True}, None, "LoRA is on"),
        ({"fp8_gemm_runner_backend": "triton"}, "--fp8-gemm-backend is triton", None),
        (
            {"enable_deterministic_inference": True},
            "--enable-deterministic-inference is on",
            None,
        ),
    ],
    ids=lambda x: "",
)
def test_options_of_the_server_that_leave_layers_to_sglang(options, linears, experts, caplog):
    from sglang.srt.runtime_context import get_context

    with get_context().override_server_args(device=engine.DEVICE, **options), engine.rank():
        text = log_line(caplog, make_linear(), make_experts())
    ours = [x for x, why in (("1 linears", linears), ("1 MoE layers", experts)) if why is None]
    assert text.startswith(f"moefp8 runs {', '.join(ours)} of ModuleList; SGLang runs 1 ")
    assert f"({linears or experts})" in text


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ({"a2a_backend": "megamoe"}, "--moe-a2a-backend is megamoe"),
        ({"runner_backend": "deep_gemm"}, "--moe-runner-backend is deep_gemm"),
    ],
    ids=["a2a", "runner"],
)
def test_another_backend_of_experts_stays(flags, reason, caplog):
    from sglang.srt.layers.moe.utils import MoeA2ABackend, MoeRunnerBackend
    from sglang.srt.runtime_context import get_flags

    kinds = {"a2a_backend": MoeA2ABackend, "runner_backend": MoeRunnerBackend}
    with get_flags().moe.override(**{name: kinds[name](x) for name, x in flags.items()}):
        text = log_line(caplog, make_experts())
    assert text == f"moefp8 runs no layer of ModuleList; SGLang runs 1 MoE layers ({reason})"


def test_a_version_that_lacks_a_name_is_refused(monkeypatch):
    import sglang
    from sglang.srt.model_loader import loader

    from moefp8.serving.sglang import register

    monkeypatch.delattr(loader, "_initialize_model")
    with pytest.raises(SystemExit, match=r"fits SGLang .* got .*_initialize_model.*unset MOEFP8_"):
        register()
    assert sglang.__version__
