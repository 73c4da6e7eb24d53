"""What runs on moefp8 and what stays with SGLang, and why; without SGLang, no test."""

from unittest.mock import Mock, call

import pytest
import torch
from torch import nn

from tests.serving.sglang import engine
from tests.serving.sglang.layers import TOP_K, E, H, I, log_line, make_experts, make_linear

pytestmark = pytest.mark.usefixtures("sglang")


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
