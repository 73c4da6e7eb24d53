"""Serve a model whose experts lie on several ranks: each loads its own, and has its own prompts.

    torchrun --nproc-per-node 2 examples/serve_parallel.py      # writes a small checkpoint, runs it
    torchrun --nproc-per-node 8 examples/serve_parallel.py DIR  # in FP8, of a model of transformers

`python -m moefp8 quantize` makes an FP8 checkpoint of one in 16 bits.

All but the experts lies on every rank. In each layer of experts, tokens travel to the ranks that
hold theirs, and back. So all ranks call the model equally often: those whose prompts have ended go
on until all have. Processes are on GPUs, with NCCL, if each finds its own; else, or with
`--device cpu`, on CPUs, with gloo. It needs transformers (pip install '.[hf]' in a clone).
"""

import argparse
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.utils import logging

import moefp8
from moefp8.checkpoint import CheckpointError, LoadReport, fp8_layers, fp8_modules
from moefp8.distributed import expert_parallel


def check(directory: Path) -> None:
    """Raise CheckpointError, which tells the way out, unless there are experts in FP8."""
    if not any(isinstance(x, moefp8.GroupedExperts) for x in fp8_layers(directory)):
        raise CheckpointError(
            f"{directory}: must have experts in FP8, got other layers alone; give a checkpoint of "
            "experts that `python -m moefp8 quantize` has made"
        )


def load(directory: Path, mesh: DeviceMesh, device: str) -> tuple[PreTrainedModel, LoadReport]:
    """A model that holds this rank's experts and no others, and reads no others."""
    config = AutoConfig.from_pretrained(directory)
    with torch.device("meta"):  # nothing is allocated
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    moefp8.convert(model, only=fp8_modules(directory, model=model))
    expert_parallel(model, mesh)
    rotary = type(model.model.rotary_emb)  # it computes its table, which no checkpoint has
    model.model.rotary_emb = rotary(config=config).to(device)
    report = moefp8.load_checkpoint(model, directory, device=device, progress=False)
    return model.eval(), report


def has_tokenizer(directory: Path) -> bool:
    return (directory / "tokenizer_config.json").exists()


def prompts_of(
    rank: int, directory: Path, texts: list[str], vocab_size: int
) -> dict[str, torch.Tensor]:
    """Every so many of the texts; random tokens where no tokenizer would read a text.

    A rank that gets no text has a prompt of one token, so that it takes part.
    """
    if not has_tokenizer(directory):
        shape = 1 + rank, 16 + 8 * rank
        random = torch.Generator().manual_seed(rank)
        ids = torch.randint(vocab_size, shape, generator=random)
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    own = texts[rank :: dist.get_world_size()]
    tokenizer = AutoTokenizer.from_pretrained(directory, padding_side="left")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    given = tokenizer(own or ["."], padding=True, return_tensors="pt")
    return {name: given[name] for name in ("input_ids", "attention_mask")}


@torch.inference_mode()
def generate(model: PreTrainedModel, prompts: dict[str, Any], num_tokens: int) -> torch.Tensor:
    """Greedy decoding of at most `num_tokens` for each prompt: [prompts, tokens].

    `synced_gpus` lets a rank whose prompts have ended go on until those of all have.
    """
    options: dict[str, Any] = {"do_sample": False, "max_new_tokens": num_tokens}
    output = model.generate(**prompts, **options, synced_gpus=True)
    return output[:, prompts["input_ids"].shape[1] :]


def run(directory: Path, device: str, arguments: argparse.Namespace) -> None:
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh(device.partition(":")[0], (num_ranks,), mesh_dim_names=("experts",))
    model, report = load(directory, mesh, device)
    vocab_size = model.get_input_embeddings().num_embeddings
    prompts = prompts_of(rank, directory, arguments.prompt, vocab_size)
    prompts = {name: x.to(device) for name, x in prompts.items()}
    generate(model, prompts, 2)  # kernels are compiled, buffers are made
    dist.barrier()
    start = time.perf_counter()
    tokens = generate(model, prompts, arguments.max_new_tokens).cpu()
    seconds = time.perf_counter() - start

    experts = next(x for x in model.modules() if isinstance(x, moefp8.GroupedExperts))
    first, last = experts.expert_offset, experts.expert_offset + experts.num_experts - 1
    speed = f"{tokens.numel() / seconds:,.1f} tokens/s"
    told = (
        f"rank {rank} of {num_ranks} on {device}: read {report.num_bytes / 2**20:,.1f} MiB in "
        f"{report.seconds:.2f} s, experts {first} to {last} of each layer; "
        f"{tokens.numel()} tokens, {len(tokens)} at a time, at {speed}: "
        f"{' '.join(map(str, tokens[0].tolist()))}"
    )
    everyone: list[Any] = [None] * num_ranks
    dist.all_gather_object(everyone, told)
    if rank == 0:
        print("\n".join(everyone))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint", type=Path, nargs="?", help="in FP8; default: a small one")
    parser.add_argument(
        "--prompt",
        action="append",
        help="may be repeated; they are dealt to the ranks; needs the checkpoint's tokenizer",
    )
    parser.add_argument("--max-new-tokens", type=int, default=16)
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: GPUs if there are any")
    arguments = parser.parse_args()
    directory = arguments.checkpoint
    if directory and not directory.is_dir():
        parser.error(f"checkpoint must be a directory, got {directory}")
    if arguments.prompt and not (directory and has_tokenizer(directory)):
        parser.error(
            "--prompt needs a tokenizer, and there is no tokenizer_config.json in "
            f"{directory or 'the small checkpoint'}; without --prompt, prompts are random tokens"
        )
    arguments.prompt = arguments.prompt or ["The key idea of mixture-of-experts models is"]
    try:
        if directory:
            check(directory)
    except CheckpointError as error:
        parser.error(str(error))
    if "LOCAL_RANK" not in os.environ:
        parser.error("start it with torchrun --nproc-per-node N examples/serve_parallel.py")
    number, of_host = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    has_gpus = torch.cuda.device_count() >= of_host
    device = f"cuda:{number}" if has_gpus and arguments.device != "cpu" else "cpu"
    if arguments.device == "cuda" and device == "cpu":
        parser.error(f"--device cuda needs {of_host} GPUs, got {torch.cuda.device_count()}")
    if device != "cpu":
        torch.cuda.set_device(device)
    dist.init_process_group("gloo" if device == "cpu" else "nccl")
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as scratch:
        run(directory or small_checkpoint(Path(scratch)), device, arguments)
        dist.barrier()  # rank 0 keeps what others may be reading
    dist.destroy_process_group()


def small_checkpoint(scratch: Path) -> Path:
    """One that rank 0 writes, where all ranks find it."""
    from small_checkpoint import write_small_checkpoint

    where = [scratch / "qwen3_moe"]
    if dist.get_rank() == 0:
        write_small_checkpoint(where[0], "qwen3_moe")
    dist.broadcast_object_list(where, src=0)
    return where[0]


if __name__ == "__main__":
    main()
