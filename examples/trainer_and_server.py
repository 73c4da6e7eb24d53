"""Train a small MoE transformer in FP8, serve its weights in FP8, and compare both bit by bit.

    python examples/trainer_and_server.py

The trainer has master weights (`convert(model, trainable=True)`); the server loads the checkpoint
that is saved of them. Both are models of transformers with one attention kernel, so the KL
divergence of their logits is 0; beside it stands that of a server in BF16. Then each layer of the
server is given a few of its rows alone: they have the bits that they had in the whole batch. It
needs transformers (pip install '.[hf]' in a clone) and no GPU; where there is one it runs there.
"""

import argparse
import copy
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from finetune import FIRST_BYTE, Bytes, batches, train, zen_of_python
from generate import load
from small_checkpoint import small_config
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging

import moefp8
from moefp8 import FP8Linear, GroupedExperts

FEW_ROWS = 1, 3, 64


@torch.inference_mode()
def kl(trainer: PreTrainedModel, server: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    """KL(trainer || server) of each next token, in nats."""
    log_p, log_q = (
        model(ids, use_cache=False).logits.double().log_softmax(-1) for model in (trainer, server)
    )
    return (log_p.exp() * (log_p - log_q)).sum(-1)


@torch.inference_mode()
def layers_with_rows(
    model: PreTrainedModel, ids: torch.Tensor
) -> Iterator[tuple[nn.Module, list[torch.Tensor], torch.Tensor]]:
    """Each FP8 layer, the rows that it is given in a call of the model, and what it gives."""
    calls: list[tuple[nn.Module, Any, Any]] = []

    def note(layer: nn.Module, given: Any, output: Any) -> None:
        calls.append((layer, given, output))

    layers = [x for x in model.modules() if isinstance(x, FP8Linear | GroupedExperts)]
    hooks = [layer.register_forward_hook(note) for layer in layers]
    model(ids, use_cache=False)
    for hook in hooks:
        hook.remove()
    for layer, given, output in calls:
        yield layer, [x.flatten(0, -2) for x in given], output.flatten(0, -2)


@torch.inference_mode()
def is_the_same_alone(
    layer: Callable[..., torch.Tensor], rows: list[torch.Tensor], output: torch.Tensor
) -> bool:
    """Whether the last few rows have the same bits without the others."""
    return all(torch.equal(layer(*(x[-n:] for x in rows)), output[-n:]) for n in FEW_ROWS)


def run(directory: Path, arguments: argparse.Namespace) -> None:
    device, text = arguments.device, Bytes().encode(zen_of_python())
    config = small_config("qwen3_moe")
    config.vocab_size = FIRST_BYTE + 256
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).to(device)
    trainer = moefp8.convert(model, trainable=True)
    rows = batches(text, arguments.length, device)
    trainer.train()
    train(trainer, rows, arguments.steps, lr=3e-3)

    moefp8.freeze(copy.deepcopy(trainer)).save_pretrained(directory)
    server = load(directory, device).eval()
    bf16 = moefp8.dequantize(copy.deepcopy(trainer)).eval()  # the master weights themselves
    for x in (trainer, server):
        moefp8.set_batch_invariant(x)
    for name, other in (("FP8", server), ("BF16", bf16)):
        nats = kl(trainer, other, rows[:, :-1])
        print(f"  server in {name}: KL mean {nats.mean():.3g}, largest {nats.abs().max():.3g}")

    found = list(layers_with_rows(server, rows[:, :-1]))
    same = [is_the_same_alone(layer, given, output) for layer, given, output in found]
    given = [len(inputs[0]) for _, inputs, _ in found]
    numbers = ", ".join(map(str, FEW_ROWS))
    print(
        f"  {sum(same)} of {len(same)} layers give {numbers} rows alone the bits that they have "
        f"among {max(given)}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--length", type=int, default=128, help="tokens of a row of the batch")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    with tempfile.TemporaryDirectory() as scratch:
        run(Path(scratch) / "served", arguments)


if __name__ == "__main__":
    main()
