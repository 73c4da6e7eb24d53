"""What plug-ins share, without an engine."""

import torch

from moefp8 import FP8Linear, GroupedExperts, precompile
from moefp8.serving.common import CompileAhead, line, local_choices, why_not_on


def test_layers_run_on_cpus_and_hopper_gpus():
    assert why_not_on(torch.device("cpu")) is None
    assert why_not_on(torch.device("xpu")) == "xpu is no CUDA device"


def test_choices_elsewhere_are_those_of_an_expert_behind_the_last():
    ids = torch.tensor([[0, -1], [3, 2]], dtype=torch.int32)
    expected = torch.tensor([[0, 4], [3, 2]], dtype=torch.int32)
    assert torch.equal(local_choices(ids, 4), expected)
    assert local_choices(ids, 4).dtype == torch.int32
    assert ids[0, 1] == -1


def test_a_line_counts_what_runs_where():
    decisions = [("linears", None), ("experts", "no GPU"), ("linears", None), ("linears", "a bias")]
    assert line("Model", "SGLang", decisions) == (
        "moefp8 runs 2 linears of Model; SGLang runs 1 experts (no GPU), 1 linears (a bias)"
    )
    assert line("Model", "SGLang", []) == "moefp8 runs no layer of Model"


def test_what_is_compiled_ahead_is_what_the_layers_need():
    ahead = CompileAhead(4, torch.float16)
    for _ in range(2):  # the second has the same shapes
        ahead.linear(8, 16, torch.float16)
        ahead.experts(2, 128, 128, top_k=2, num_global_experts=4)
    experts = GroupedExperts(2, 128, 128, device="meta")
    experts.num_global_experts = 4
    layers = FP8Linear(16, 8, dtype=torch.float16, device="meta"), experts
    needed = [precompile(x, 4, dtype=torch.float16, top_k=2).num_kernels for x in layers]
    assert ahead.wait() == sum(needed)
