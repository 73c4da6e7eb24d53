"""A checkpoint that vLLM serves, in this process."""

from typing import Any

import vllm
from vllm import LLM, SamplingParams


class Served:
    """See `benchmarks.serving.engine.Served`."""

    version = vllm.__version__
    is_here = True

    def __init__(self, checkpoint: str, max_length: int, arguments: dict[str, Any]) -> None:
        self.llm = LLM(
            checkpoint,
            skip_tokenizer_init=True,
            enable_prefix_caching=False,
            dtype="bfloat16",
            max_model_len=max_length,
            gpu_memory_utilization=0.85,
            disable_log_stats=True,
            **arguments,
        )

    def generate(self, prompts: list[list[int]], num_new: int) -> list[tuple[int, int]]:
        sampling = SamplingParams(
            max_tokens=num_new, temperature=0, ignore_eos=True, detokenize=False
        )
        inputs = [{"prompt_token_ids": ids} for ids in prompts]
        outputs = self.llm.generate(inputs, sampling, use_tqdm=False)
        return [(len(x.outputs[0].token_ids), x.num_cached_tokens or 0) for x in outputs]
