"""What lets a benchmark run where there is no GPU, and no DeepGEMM."""

from types import SimpleNamespace

import pytest
import torch

from benchmarks import mega_kernel, session
from moefp8.functional.experts import experts
from moefp8.kernels.common.activation import SWIGLU
from tests.benchmarks.cases import fake_deep_gemm


@pytest.fixture
def no_gpu_needed(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    about = {"date": "2026-11-21", "commit": "abc", "gpu": "none", "driver": "0", "torch": "2"}
    monkeypatch.setattr(session, "circumstances", lambda: about)
    monkeypatch.setattr(session, "copy_gbps", lambda: 4300.0)


@pytest.fixture
def deep_gemm(monkeypatch) -> SimpleNamespace:
    """The mega-kernel computes the layer from what it is given."""

    def pre_dispatch(x, index, weights, buf_x, buf_x_sf, buf_index, buf_weights, num_tokens):
        assert (index.dtype, weights.dtype) == (torch.int32, torch.float32)
        buf_x[:num_tokens], buf_index[:num_tokens], buf_weights[:num_tokens] = x, index, weights

    def get_buffer(group, num_experts, num_tokens, top_k, h, i):
        from torch.distributed import _symmetric_memory as memory

        assert group == "one rank"
        x = memory.empty((num_tokens, h), dtype=torch.bfloat16, device="cpu")
        (pointer,) = memory.rendezvous(x, group=group).buffer_ptrs
        assert pointer == x.data_ptr()
        index = torch.empty(num_tokens, top_k, dtype=torch.int32)
        weights = torch.empty(num_tokens, top_k)
        return SimpleNamespace(x=x, x_sf=None, topk_idx=index, topk_weights=weights)

    def mega(y, gate_up, down, buffer, num_tokens_bound=None):
        assert num_tokens_bound == len(y)
        given = (x[: len(y)] for x in (buffer.x, buffer.topk_idx, buffer.topk_weights))
        y.copy_(experts(*given, *gate_up, *down, SWIGLU, False))

    integration = pytest.importorskip("transformers.integrations.deepgemm")
    monkeypatch.setattr(integration, "_DEEPGEMM", None)  # put back to what transformers found
    monkeypatch.setattr(mega_kernel, "group_of_one_rank", lambda: "one rank")
    monkeypatch.setattr(mega_kernel, "MODULES", ("deep_gemm",))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (10**9, 10**9))
    return fake_deep_gemm(
        monkeypatch,
        get_symm_buffer_for_sm90_mega_moe=get_buffer,
        transform_weights_for_mega_moe_sm90=lambda gate_up, down: (gate_up, down),
        mega_moe_pre_dispatch_sm90=pre_dispatch,
        fp8_mega_moe=mega,
    )
