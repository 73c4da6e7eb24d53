"""One model that vLLM makes: which layers run on moefp8, and their kernels, compiled ahead."""

import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import torch
from torch import nn
from vllm.config import VllmConfig, get_current_vllm_config
from vllm.logger import init_logger
from vllm.platforms import current_platform

from ...layers import FP8Linear, GroupedExperts
from ...precompile import precompile
from ...system.progress import Progress

logger = init_logger("vllm.moefp8")  # vLLM shows what is below its own name


class ServedModel:
    """Layers tell when they are made and when they are loaded; after the last one it logs a line.

    Kernels are compiled by a thread while vLLM loads weights, a job for each shape of a layer.
    """

    _models: ClassVar["WeakKeyDictionary[Any, ServedModel]"] = WeakKeyDictionary()

    def __init__(self, name: str, max_tokens: int, dtype: torch.dtype, compiles: bool) -> None:
        """max_tokens: of one call of a layer. compiles: whether there is a GPU to compile for."""
        self.name, self.max_tokens, self.dtype, self.compiles = name, max_tokens, dtype, compiles
        self.waiting: set[Any] = set()  # what is made and not loaded
        self.ours: Counter[str] = Counter()
        self.left: Counter[tuple[str, str]] = Counter()
        self.jobs: dict[Any, Future[int]] = {}
        self.thread = ThreadPoolExecutor(1, "moefp8-precompile")

    @classmethod
    def current(cls) -> "ServedModel":
        """That of the model that vLLM makes now; models differ in their quantization config."""
        config = get_current_vllm_config()
        served = cls._models.get(config.quant_config)
        if served is None:
            served = cls._models[config.quant_config] = cls._of(config)
        return served

    @classmethod
    def _of(cls, config: VllmConfig) -> "ServedModel":
        model, parallel = config.model_config, config.parallel_config
        # Without an all2all of its own, a rank gets the tokens of all data parallel ranks.
        max_tokens = config.scheduler_config.max_num_batched_tokens * parallel.data_parallel_size
        name = ", ".join(getattr(model, "architectures", None) or ["a model"])
        served = cls(name, max_tokens, model.dtype, current_platform.is_cuda())
        backend = getattr(config.kernel_config, "linear_backend", "auto")
        if backend != "auto":
            served.leave("linears", f"linear_backend is {backend}")
        return served

    # ---- What layers tell ----

    def add(self, method: Any, kind: str) -> None:
        """A layer is made that runs on moefp8. kind: what it is, in the plural."""
        self.waiting.add(method)
        self.ours[kind] += 1

    def leave(self, kind: str, reason: str) -> None:
        """A layer is made that stays with vLLM."""
        if not self.left[kind, reason]:
            logger.info_once("moefp8 leaves %s of %s to vLLM: %s", kind, self.name, reason)
        self.left[kind, reason] += 1

    def loaded(self, method: Any) -> None:
        """The weights of a layer are there; after the last one all kernels are, too."""
        was_waiting = method in self.waiting
        self.waiting.discard(method)
        if was_waiting and not self.waiting:
            started = time.perf_counter()
            num_kernels = self._wait()
            logger.info_once(self.line(num_kernels, time.perf_counter() - started))

    def line(self, num_kernels: int, seconds: float) -> str:
        """What runs where, and why."""
        ours = ", ".join(f"{n} {kind}" for kind, n in self.ours.items())
        parts = [f"moefp8 runs {ours} of {self.name}"]
        if self.left:
            left = (f"{n} {kind} ({reason})" for (kind, reason), n in self.left.items())
            parts.append(f"vLLM runs {', '.join(left)}")
        if self.compiles:
            parts.append(
                f"{num_kernels} kernels for up to {self.max_tokens} tokens are compiled, "
                f"{seconds:.1f} s were left of it when weights were loaded"
            )
        return "; ".join(parts)

    # ---- Kernels ----

    def compile_linear(self, n: int, k: int, bias: torch.dtype | None) -> None:
        """Begin to compile what a linear needs. bias: the dtype of its bias, or None."""

        def make() -> nn.Module:
            dtype = bias or torch.bfloat16
            return FP8Linear(k, n, bias is not None, device="meta", dtype=dtype)

        self._compile((n, k, bias), make)

    def compile_experts(
        self,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        *,
        top_k: int,
        num_global_experts: int,
    ) -> None:
        """Begin to compile what a layer of experts needs."""
        sizes = num_experts, hidden_size, intermediate_size

        def make() -> nn.Module:
            experts = GroupedExperts(*sizes, device="meta")
            experts.num_global_experts = num_global_experts
            return experts

        self._compile((*sizes, top_k, num_global_experts), make, top_k)

    def _compile(self, key: Any, make: Callable[[], nn.Module], top_k: int | None = None) -> None:
        if not self.compiles or key in self.jobs:
            return

        def compile() -> int:
            compiled = precompile(
                make(), self.max_tokens, dtype=self.dtype, top_k=top_k, progress=False
            )
            return compiled.num_kernels

        self.jobs[key] = self.thread.submit(compile)

    def _wait(self) -> int:
        num_kernels = 0
        with Progress("compiling kernels", len(self.jobs), "layer shapes") as bar:
            for job in self.jobs.values():
                num_kernels += job.result()
                bar.advance()
        return num_kernels
