"""A checkpoint that SGLang serves, in processes of its own."""

from typing import Any

import sglang
import torch

from benchmarks.serving import BATCHES

_ON_GPU = {"attention_backend": "triton", "cuda_graph_max_bs_decode": max(BATCHES)}
_ON_CPU = {
    "device": "cpu",
    "attention_backend": "torch_native",
    "disable_cuda_graph": True,
    "disable_overlap_schedule": True,
    "max_total_tokens": 4096,
}


class Served:
    """See `benchmarks.serving.engine.Served`."""

    version = sglang.__version__
    is_here = False

    def __init__(self, checkpoint: str, max_length: int, arguments: dict[str, Any]) -> None:
        """max_length: not needed, SGLang makes its cache as large as memory is."""
        self.engine = sglang.Engine(
            model_path=checkpoint,
            skip_tokenizer_init=True,
            disable_radix_cache=True,
            sampling_backend="pytorch",
            grammar_backend="none",
            random_seed=0,
            log_level="info",  # what runs on moefp8
            **(_ON_GPU if torch.cuda.is_available() else _ON_CPU),
            **arguments,
        )

    def generate(self, prompts: list[list[int]], num_new: int) -> list[tuple[int, int]]:
        sampling = {"max_new_tokens": num_new, "temperature": 0, "ignore_eos": True}
        outputs = self.engine.generate(input_ids=prompts, sampling_params=sampling)
        about = (x["meta_info"] for x in outputs)
        return [(x["completion_tokens"], x.get("cached_tokens", 0)) for x in about]
