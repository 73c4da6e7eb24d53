"""One model that vLLM makes: which layers run on moefp8, and their kernels, compiled ahead."""

import time
from typing import Any, ClassVar
from weakref import WeakSet

import torch
from vllm import envs
from vllm.config import VllmConfig, get_current_vllm_config
from vllm.logger import init_logger
from vllm.platforms import current_platform

from ..common import LINEARS, CompileAhead, line, why_not_on

logger = init_logger("vllm.moefp8")  # vLLM shows what is below its own name


class ServedModel:
    """Layers report when they are made and when they are loaded; after the last it logs a line.

    Kernels are compiled by a thread while vLLM loads weights.
    """

    _models: ClassVar[dict[int, tuple[Any, "ServedModel"]]] = {}

    def __init__(self, name: str, ahead: CompileAhead | None) -> None:
        """ahead: None where there is no GPU to compile for."""
        self.name, self.ahead = name, ahead
        self.decisions: list[tuple[str, str | None]] = []
        self._waiting: WeakSet[Any] = WeakSet()  # what is made and not loaded

    @classmethod
    def current(cls) -> "ServedModel":
        """That of the model that vLLM makes now, by its quantization config.

        A draft in FP8 beside a model that is not has none in vLLM's config.
        """
        config = get_current_vllm_config()
        owner = config if config.quant_config is None else config.quant_config
        if id(owner) not in cls._models:
            cls._models[id(owner)] = owner, cls._of(config)  # the owner stays, and so does its id
        return cls._models[id(owner)][1]

    @classmethod
    def _of(cls, config: VllmConfig) -> "ServedModel":
        model, parallel = config.model_config, config.parallel_config
        # Without an all2all of its own, a rank gets the tokens of all data parallel ranks.
        max_tokens = config.scheduler_config.max_num_batched_tokens * parallel.data_parallel_size
        name = ", ".join(getattr(model, "architectures", None) or ["a model"])
        ahead = None
        if current_platform.is_cuda():
            ahead = CompileAhead(max_tokens, model.dtype, batch_invariant=envs.VLLM_BATCH_INVARIANT)
        served = cls(name, ahead)
        backend = getattr(config.kernel_config, "linear_backend", "auto")
        if backend != "auto":
            served.leave(LINEARS, f"linear_backend is {backend}")
        return served

    def add(self, method: Any, kind: str) -> None:
        """A layer is made that runs on moefp8. kind: what it is, in the plural."""
        self._waiting.add(method)
        self.decisions.append((kind, None))

    def leave(self, kind: str, reason: str) -> None:
        """A layer is made that stays with vLLM."""
        logger.info_once("moefp8 leaves %s of %s to vLLM: %s", kind, self.name, reason)
        self.decisions.append((kind, reason))

    def loaded(self, method: Any) -> None:
        """The weights of a layer are there; after the last one all kernels are, too."""
        was_waiting = method in self._waiting
        self._waiting.discard(method)
        if was_waiting and not self._waiting:
            text = line(self.name, "vLLM", self.decisions)
            if self.ahead is not None:
                started = time.perf_counter()
                num_kernels = self.ahead.wait()
                seconds = time.perf_counter() - started
                text += f"; {num_kernels} kernels are compiled, it waited {seconds:.1f} s for them"
            logger.info_once(text)
            self.decisions.clear()  # layers of a draft come later, and have a line of their own


def why_not_here() -> str | None:
    """Why no layer runs on moefp8 on this machine, or None: on a Hopper GPU and on a CPU."""
    return why_not_on(torch.device(current_platform.device_type))
