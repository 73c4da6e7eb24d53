"""SGLang's mega-kernel: all routed experts of a layer in one kernel of sgl-deep-gemm."""

import atexit
import ctypes
from importlib import import_module
from inspect import signature
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from moefp8 import GroupedExperts

MODULES = "deep_gemm_025", "deep_gemm"  # the first that has what is needed counts
REMEDY = (
    "pip install --no-deps sgl-deep-gemm apache-tvm-ffi, the former 0.2.5 or newer and both built "
    "for this torch; beside an older deep_gemm, which other peers may need, name it deep_gemm_025"
)


def module() -> Any:
    """The module whose `fp8_mega_moe` takes `num_tokens_bound`, as that of 0.2.5 does."""
    _load_cuda_libraries()
    reasons = []
    for name in MODULES:
        try:
            found = import_module(name)
            if "num_tokens_bound" in signature(found.fp8_mega_moe).parameters:
                return found
            reasons.append(f"{name} is too old")
        except Exception as error:  # an extension that does not fit this torch raises anything
            reasons.append(str(error).partition("\n")[0])
    raise ImportError("; ".join(reasons))


def _load_cuda_libraries() -> None:
    """Extensions that name CUDA's libraries, but not their folder, then find those of torch."""
    packages = Path(torch.__file__).parents[1] / "nvidia"
    for name in ("libcudart", "libnvrtc", "libcublasLt", "libcublas"):
        for library in sorted(packages.glob(f"*/lib/{name}.so.*")):
            ctypes.CDLL(str(library))


def version() -> str:
    try:
        return f"sgl-deep-gemm {module().__version__}"
    except ImportError:
        return "missing"


class MegaKernel:
    """The experts for so many tokens: x bf16 [T, H], index int32 [T, k], weights fp32 [T, k]."""

    def __init__(self, experts: GroupedExperts, num_tokens: int, top_k: int) -> None:
        self._kernels, self._num_tokens = module(), num_tokens
        num_experts, h, i = experts.num_experts, experts.hidden_size, experts.intermediate_size
        # If there is one rank, memory that others can write is like any other.
        names = {
            "empty": torch.empty,
            "rendezvous": lambda memory, group: SimpleNamespace(buffer_ptrs=[memory.data_ptr()]),
        }
        with mock.patch.multiple("torch.distributed._symmetric_memory", **names):
            self._buffer = self._kernels.get_symm_buffer_for_sm90_mega_moe(
                group_of_one_rank(), num_experts, max(num_tokens, 64), top_k, h, i
            )
        transform = self._kernels.transform_weights_for_mega_moe_sm90
        self._weights = transform(*block_scaled(experts))
        device = experts.down_proj.device
        self._y = torch.full((num_tokens, h), torch.nan, dtype=torch.bfloat16, device=device)

    def __call__(self, x: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        buffer, num_tokens = self._buffer, self._num_tokens
        inputs = buffer.x, buffer.x_sf, buffer.topk_idx, buffer.topk_weights
        self._kernels.mega_moe_pre_dispatch_sm90(x, index, weights, *inputs, num_tokens)
        self._kernels.fp8_mega_moe(self._y, *self._weights, buffer, num_tokens_bound=num_tokens)
        return self._y


def group_of_one_rank() -> Any:
    from torch import distributed

    if not distributed.is_initialized():
        store = distributed.TCPStore("127.0.0.1", 0, world_size=1, is_master=True)
        device = torch.device("cuda", torch.cuda.current_device())
        distributed.init_process_group("nccl", store=store, rank=0, world_size=1, device_id=device)
        atexit.register(distributed.destroy_process_group)
    return distributed.group.WORLD


def block_scaled(experts: GroupedExperts) -> tuple[tuple[torch.Tensor, torch.Tensor], ...]:
    """Gate and up, and down, with their scales: plain tensors."""
    return (
        (experts.gate_up_proj.data, experts.gate_up_proj_scale_inv.data),
        (experts.down_proj.data, experts.down_proj_scale_inv.data),
    )
