"""Fine-tune a frozen FP8 MoE checkpoint with LoRA: train, save the adapters, load them, generate.

    python examples/finetune.py                    # writes a small checkpoint and trains beside it
    python examples/finetune.py --checkpoint DIR   # any that transformers knows, in FP8 blocks

The text is the Zen of Python. The small checkpoint is random and reads bytes, so what it learns, it
learns from these lines; another checkpoint takes its own tokenizer. It needs transformers
(pip install '.[hf]' in a clone) and no GPU. Where there is one it runs there; `--device cpu` stays
on the CPU.
"""

import argparse
import codecs
import contextlib
import io
import tempfile
import time
from pathlib import Path

import torch
from generate import load
from torch.nn import functional as F
from transformers import AutoTokenizer, PreTrainedModel
from transformers.utils import logging

from moefp8.adapters import add_lora, load_lora, save_lora

FIRST_BYTE = 2  # ids below are those of the begin and the end of a text


class Bytes:
    """A tokenizer for the small checkpoint: each byte is a token."""

    def encode(self, text: str) -> list[int]:
        return [FIRST_BYTE + byte for byte in text.encode()]

    def decode(self, ids: list[int]) -> str:
        return bytes(max(0, i - FIRST_BYTE) % 256 for i in ids).decode(errors="replace")


def zen_of_python() -> str:
    """The text that `import this` prints, of which the module keeps a ROT13."""
    with contextlib.redirect_stdout(io.StringIO()):
        import this
    return codecs.decode(this.s, "rot13")


def batches(ids: list[int], length: int, device: str) -> torch.Tensor:
    """[rows, length + 1]: the text in overlapping rows, each with the token that follows it."""
    starts = range(0, max(1, len(ids) - length), length // 2)
    rows = [ids[start : start + length + 1] for start in starts]
    return torch.tensor([row for row in rows if len(row) == length + 1], device=device)


def train(model: PreTrainedModel, text: torch.Tensor, steps: int, lr: float) -> None:
    """Predict each next token; only what asks for a gradient, the adapters, is trained."""
    trained = [x for x in model.parameters() if x.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=lr, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps, eta_min=lr / 10)
    start = time.perf_counter()
    for step in range(1, steps + 1):
        logits = model(text[:, :-1], use_cache=False).logits
        loss = F.cross_entropy(logits.flatten(0, 1).float(), text[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if step == 1 or step % max(1, steps // 8) == 0:
            seconds = time.perf_counter() - start
            print(f"  step {step:3}   loss {loss.item():.3f}   {seconds:5.1f} s")


@torch.inference_mode()
def continue_text(model: PreTrainedModel, prompt: list[int], num_tokens: int) -> list[int]:
    ids = torch.tensor([prompt], device=model.device)
    output = model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=num_tokens
    )
    return output[0, len(prompt) :].tolist()


def run(directory: Path, adapters: Path, arguments: argparse.Namespace) -> None:
    has_tokenizer = (directory / "tokenizer_config.json").exists()
    tokenizer = AutoTokenizer.from_pretrained(directory) if has_tokenizer else Bytes()
    text = zen_of_python()
    ids, prompt = tokenizer.encode(text), tokenizer.encode(text[: len(text) // 2])

    model = load(directory, arguments.device)
    vocab_size = model.get_input_embeddings().num_embeddings
    if max(ids) >= vocab_size:
        raise SystemExit(
            f"finetune.py: a checkpoint without a tokenizer needs a vocabulary of {max(ids) + 1} "
            f"or more tokens, one for each byte of the text, got {vocab_size}"
        )
    add_lora(model, arguments.rank, alpha=2 * arguments.rank)
    trained = sum(x.numel() for x in model.parameters() if x.requires_grad)
    frozen = sum(x.numel() for x in model.parameters() if not x.requires_grad)
    print(f"{model.config.model_type}: {trained:,} parameters train, {frozen:,} are frozen")
    model.train()
    train(model, batches(ids, arguments.length, arguments.device), arguments.steps, arguments.lr)
    model.eval()
    expected = continue_text(model, prompt, arguments.max_new_tokens)

    save_lora(model, adapters)
    size = sum(file.stat().st_size for file in adapters.iterdir())
    print(f"  saved {size / 2**20:.1f} MiB of adapters")
    model = load(directory, arguments.device)
    load_lora(model, adapters)
    found = continue_text(model, prompt, arguments.max_new_tokens)
    assert found == expected, "what was loaded is what was saved"
    print(
        f"  loaded them; ...{tokenizer.decode(prompt[-40:])!r} goes on: {tokenizer.decode(found)!r}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--checkpoint", type=Path, help="an FP8 checkpoint; default: a small one")
    parser.add_argument("--adapters", type=Path, help="where to save them; default: nowhere")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--lr", type=float, default=5e-3)
    parser.add_argument("--length", type=int, default=128, help="tokens of a row of the batch")
    parser.add_argument("--max-new-tokens", type=int, default=32)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args()
    if arguments.checkpoint and not arguments.checkpoint.is_dir():
        parser.error(f"--checkpoint must be a directory, got {arguments.checkpoint}")
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as scratch:
        directory, adapters = arguments.checkpoint, arguments.adapters or Path(scratch) / "adapters"
        if directory is None:
            from small_checkpoint import write_small_checkpoint

            logging.disable_progress_bar()
            logging.set_verbosity_error()
            directory = Path(scratch) / "qwen3_moe"
            write_small_checkpoint(directory, "qwen3_moe")
        run(directory, adapters, arguments)


if __name__ == "__main__":
    main()
