"""Load an FP8 MoE checkpoint into transformers' own model, generate, and show how close it is.

    python examples/generate.py                    # writes two small checkpoints and runs them
    python examples/generate.py --checkpoint DIR   # any that transformers knows, in FP8 blocks

It needs transformers (pip install '.[hf]' in a clone) and no GPU. Where there is one it runs there,
with each decoding step one CUDA graph; `--device cpu` stays on the CPU. `--batch` decodes several
copies of the prompt at once, and `--compile` fuses what stands between the kernels.
"""

import argparse
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.utils import logging

from moefp8.hf import DecodingGraphs, FP8Config
from moefp8.testing import reference_model, row_errors, teacher_forced

DEMO = "deepseek_v3", "qwen3_moe"


def load(directory: Path, device: str) -> PreTrainedModel:
    """transformers' model with our modules where the checkpoint holds FP8 weights."""
    place = {} if device == "cpu" else {"device_map": device}
    return AutoModelForCausalLM.from_pretrained(
        directory, quantization_config=FP8Config(), dtype=torch.bfloat16, **place
    )


def weight_bytes(model: PreTrainedModel) -> tuple[int, int]:
    """(bytes as loaded, bytes if all weights were BF16)."""
    tensors = model.state_dict().items()
    as_loaded = sum(x.numel() * x.element_size() for _, x in tensors)
    as_bf16 = sum(x.numel() * 2 for name, x in tensors if not name.endswith("scale_inv"))
    return as_loaded, as_bf16


class Generated(NamedTuple):
    """New tokens of the first prompt, and the seconds that the prompts and each later step took."""

    tokens: list[int]
    prefill_s: float
    token_s: float


@torch.inference_mode()
def generate(
    model: PreTrainedModel | DecodingGraphs, ids: torch.Tensor, num_tokens: int
) -> Generated:
    """Greedy decoding, once all is warm. The prefill is what the first token takes."""
    options = {"attention_mask": torch.ones_like(ids), "do_sample": False}

    def run(num_new: int) -> tuple[list[int], float]:
        start = time.perf_counter()
        output = model.generate(ids, max_new_tokens=num_new, **options)
        new = output[0, ids.shape[1] :].tolist()  # a GPU is done when they are here
        return new, time.perf_counter() - start

    run(num_tokens)  # at every length of the cache something may be compiled at first use
    _, prefill_s = run(1)
    new, seconds = run(num_tokens)
    num_later = len(new) - 1
    token_s = max(seconds - prefill_s, 1e-9) / num_later if num_later else seconds
    return Generated(new, prefill_s, token_s)


def show(what: str, logits: torch.Tensor, expected: torch.Tensor) -> None:
    """Print how far logits are from others, by position: the worst and the median."""
    errors = row_errors(logits, expected)
    same = (logits.argmax(-1) == expected.argmax(-1)).double().mean()
    print(
        f"  logits against {what:<46} worst {errors.max():.1e}   median {errors.median():.1e}   "
        f"same token {same:4.0%}"
    )


def run(directory: Path, bf16_directory: Path | None, arguments: argparse.Namespace) -> None:
    start = time.perf_counter()
    model = load(directory, arguments.device)
    seconds = time.perf_counter() - start
    as_loaded, as_bf16 = weight_bytes(model)
    origin = directory if bf16_directory is None else "a small random checkpoint"
    print(f"\n{model.config.model_type} from {origin}")
    print(
        f"  loaded {as_loaded / 2**20:,.1f} MiB in {seconds:.2f} s, {as_loaded / as_bf16:.0%} of "
        f"the {as_bf16 / 2**20:,.1f} MiB of BF16"
    )
    if (directory / "tokenizer_config.json").exists():
        tokenizer = AutoTokenizer.from_pretrained(directory)
        ids = tokenizer(arguments.prompt, return_tensors="pt").input_ids.to(arguments.device)
    else:
        tokenizer = None
        vocab_size = model.get_input_embeddings().num_embeddings
        ids = torch.randint(2, vocab_size, (1, 64), device=arguments.device)
    ids, num_tokens = ids.expand(arguments.batch, -1), arguments.max_new_tokens
    graphs = DecodingGraphs(model, compile=arguments.compile)
    try:
        tokens, prefill_s, step_s = generate(graphs, ids, num_tokens)
    except ValueError as error:  # not every model has steps that are all alike
        print(f"  decodes as it is called: {error}")
        tokens, prefill_s, step_s = generate(model, ids, num_tokens)
    text = tokenizer.decode(tokens) if tokenizer else " ".join(map(str, tokens))
    print(
        f"  generated {len(tokens)} tokens at {len(ids) / step_s:,.1f} tokens/s, after a prefill "
        f"of {ids.shape[1]} at {ids.numel() / prefill_s:,.1f}: {text}"
    )
    if arguments.device != "cpu":
        as_called = generate(model, ids, num_tokens).token_s
        print(f"  without CUDA graphs {len(ids) / as_called:,.1f} tokens/s")
    if arguments.device != "cpu":
        print(f"  took {torch.cuda.max_memory_allocated() / 2**20:,.1f} MiB of the GPU at most")

    with torch.inference_mode():
        ids = ids[:1]
        output, reference = teacher_forced(model, ids)
        show("FP32 sums of the same FP8 operands", output.logits, reference.logits)
        dequantized = reference_model(model, quantize_activations=False)
        show("dequantized weights, BF16 activations", output.logits, dequantized(ids).logits)
        if bf16_directory is not None:
            original = AutoModelForCausalLM.from_pretrained(bf16_directory, dtype=torch.bfloat16)
            show(
                "the BF16 model it comes from",
                output.logits,
                original(ids.cpu()).logits.to(ids.device),
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--checkpoint", type=Path, help="an FP8 checkpoint; default: small ones")
    parser.add_argument("--prompt", default="The key idea of mixture-of-experts models is")
    parser.add_argument("--max-new-tokens", type=int, default=16)
    parser.add_argument("--batch", type=int, default=1, help="copies of the prompt")
    parser.add_argument("--compile", action="store_true", help="fuse what is between the kernels")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    if arguments.checkpoint:
        if not arguments.checkpoint.is_dir():
            parser.error(f"--checkpoint must be a directory, got {arguments.checkpoint}")
        run(arguments.checkpoint, None, arguments)
        return
    from small_checkpoint import write_small_checkpoint

    logging.disable_progress_bar()
    logging.set_verbosity_error()  # it warns of the MTP layer, which transformers' model lacks
    with tempfile.TemporaryDirectory() as directory:
        for family in DEMO:
            original = write_small_checkpoint(Path(directory) / family, family)
            run(Path(directory) / family, original, arguments)


if __name__ == "__main__":
    main()
