"""Train a mixture-of-experts language model from scratch, its linears and experts in FP8.

    python examples/train.py                               # 1 M parameters, on a CPU in two minutes
    python examples/train.py --size large                  # 100 M parameters, for a GPU
    python examples/train.py --dtype bf16                  # the same model in plain PyTorch

Parameters are FP32, as the optimizer wants them. `convert` lets linears of attention and experts
compute in FP8, forward and backward; embedding, norms, router, attention and head stay in BF16 and
FP32. The text is Python's own standard library (PSF licence), byte by byte; the large model also
reads the Python files of torch (BSD licence).
"""

import argparse
import math
import os
import sysconfig
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

import moefp8

VOCABULARY = 256  # bytes
BALANCE = 0.01  # the weight of the loss that keeps experts equally busy


@dataclass(frozen=True)
class Size:
    """A model, and what it is trained with. Widths are multiples of 128: no block is cut."""

    hidden: int
    layers: int
    heads: int
    experts: int
    intermediate: int  # of an expert, and of the one that is shared by all tokens
    top_k: int
    rows: int  # of a batch
    length: int  # bytes in a row
    steps: int
    lr: float
    least_text: int  # bytes that there must be
    reads_torch: bool = False


SIZES = {
    "small": Size(128, 2, 2, 8, 128, 2, 4, 128, 120, 4e-3, 5_000_000),
    "large": Size(768, 8, 12, 8, 512, 2, 16, 1024, 4000, 6e-4, 30_000_000, True),
}


# ---- The model ----


class Norm(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x.float(), self.weight.shape, self.weight, 1e-6).bfloat16()


def rotations(length: int, dim: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """(cos, sin) [S, D/2] of rotary positions."""
    frequencies = 10_000 ** (-torch.arange(0, dim, 2, device=device) / dim)
    angles = torch.arange(length, device=device)[:, None] * frequencies
    return angles.cos(), angles.sin()


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x: [B, heads, S, D]."""
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


class Attention(nn.Module):
    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv_proj = nn.Linear(hidden, 3 * hidden, bias=False)
        self.o_proj = nn.Linear(hidden, hidden, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv_proj(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(y.transpose(1, 2).flatten(2))


class Router(nn.Module):
    """Chooses top_k of E experts for each token, in FP32."""

    def __init__(self, hidden: int, experts: int, top_k: int) -> None:
        super().__init__()
        self.top_k = top_k
        self.weight = nn.Parameter(torch.empty(experts, hidden))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """x [T, H] -> (experts [T, k], their weights [T, k], the loss of balance: 1 is best)."""
        with torch.autocast(x.device.type, enabled=False):
            scores = F.linear(x.float(), self.weight).softmax(dim=-1)
        weights, chosen = scores.topk(self.top_k, dim=-1)
        experts = torch.arange(len(self.weight), device=x.device)
        busy = (chosen[..., None] == experts).float().mean(dim=(0, 1))
        balance = len(self.weight) * (busy * scores.mean(dim=0)).sum()
        return chosen, weights / weights.sum(dim=-1, keepdim=True), balance


def grouped_mm(rows: torch.Tensor, weights: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """rows [R, K] of expert e, which end at ends[e], times weights[e] [N, K] transposed."""
    if rows.is_cuda and rows.dtype == torch.bfloat16:
        multiply = getattr(F, "grouped_mm", None) or torch._grouped_mm
        return multiply(rows, weights.mT, offs=ends)
    bounds = [0, *ends.tolist()]
    parts = zip(bounds, bounds[1:], weights, strict=False)
    return torch.cat([F.linear(rows[begin:end], weight) for begin, end, weight in parts])


class Experts(nn.Module):
    """E SwiGLU experts in plain PyTorch; `convert` knows weights that are stacked so."""

    def __init__(self, experts: int, hidden: int, intermediate: int) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.empty(experts, 2 * intermediate, hidden))
        self.down_proj = nn.Parameter(torch.empty(experts, hidden, intermediate))

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        x, top_k = hidden_states, top_k_index.shape[1]
        order = top_k_index.flatten().argsort(stable=True)  # rows by expert
        ids = torch.arange(len(self.down_proj), device=x.device)
        ends = (top_k_index.flatten()[:, None] == ids).sum(dim=0).cumsum(dim=0).int()
        rows = x.index_select(0, order // top_k)
        rows = self._apply_gate(grouped_mm(rows, self.gate_up_proj.to(x.dtype), ends))
        rows = grouped_mm(rows, self.down_proj.to(x.dtype), ends)
        y = rows.index_select(0, order.argsort()).unflatten(0, top_k_index.shape)
        return (y * top_k_weights[..., None]).sum(dim=1).to(x.dtype)

    def _apply_gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up


class SharedExpert(nn.Module):
    def __init__(self, hidden: int, intermediate: int) -> None:
        super().__init__()
        self.gate_up_proj = nn.Linear(hidden, 2 * intermediate, bias=False)
        self.down_proj = nn.Linear(intermediate, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(F.silu(gate) * up)


class Layer(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.attention_norm, self.moe_norm = Norm(size.hidden), Norm(size.hidden)
        self.attention = Attention(size.hidden, size.heads)
        self.router = Router(size.hidden, size.experts, size.top_k)
        self.experts = Experts(size.experts, size.hidden, size.intermediate)
        self.shared_expert = SharedExpert(size.hidden, size.intermediate)

    def forward(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """x [B, S, H] -> (the same shape, the loss of balance)."""
        x = x + self.attention(self.attention_norm(x), cos, sin)
        tokens = self.moe_norm(x).flatten(0, 1)
        *choice, balance = self.router(tokens)
        y = self.experts(tokens, *choice) + self.shared_expert(tokens)
        return x + y.view_as(x), balance


class LanguageModel(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.head_dim = size.hidden // size.heads
        self.embedding = nn.Embedding(VOCABULARY, size.hidden)
        self.layers = nn.ModuleList(Layer(size) for _ in range(size.layers))
        self.norm = Norm(size.hidden)
        self.lm_head = nn.Linear(size.hidden, VOCABULARY, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.ndim > 1:
                ends_branch = name.endswith(("o_proj.weight", "down_proj", "down_proj.weight"))
                shrinks = math.sqrt(2 * size.layers) if ends_branch else 1
                nn.init.normal_(parameter, std=0.02 / shrinks)

    def forward(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """ids [B, S] -> (logits [B, S, 256], the mean loss of balance)."""
        positions = rotations(ids.shape[1], self.head_dim, ids.device)
        with torch.autocast(ids.device.type, torch.bfloat16):
            x, balances = self.embedding(ids), []
            for layer in self.layers:
                x, balance = layer(x, *positions)
                balances.append(balance)
            return self.lm_head(self.norm(x)), torch.stack(balances).mean()


def make_model(
    size: Size, dtype: str, device: torch.device | str, seed: int = 0, **options: object
) -> LanguageModel:
    """A model with random weights. options: further ones of `convert`, if dtype is "fp8"."""
    torch.manual_seed(seed)
    model = LanguageModel(size)
    if dtype == "fp8":
        moefp8.convert(model, trainable=True, skip="lm_head", **options)
    return model.to(device)


# ---- The text ----

LEFT_OUT = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}


def python_files(folder: Path) -> list[bytes]:
    """The content of a folder's Python files, without tests, by name."""
    found = []
    for root, folders, files in os.walk(folder):
        folders[:] = [x for x in folders if x not in LEFT_OUT]
        found += [Path(root) / x for x in files if x.endswith(".py")]
    return [x.read_bytes() for x in sorted(found, key=lambda x: x.relative_to(folder).parts)]


def read_text(size: Size) -> tuple[torch.Tensor, torch.Tensor]:
    """(text to train with, text held out): uint8 [bytes] each; every 20th file is held out."""
    files = python_files(Path(sysconfig.get_path("stdlib")))
    if size.reads_torch:
        files += python_files(Path(torch.__file__).parent)
    num_bytes = sum(map(len, files))
    if num_bytes < size.least_text:
        raise RuntimeError(
            f"the text must have {size.least_text:,} bytes, got {num_bytes:,} in {len(files)} "
            f"Python files: is the source of the standard library installed in "
            f"{sysconfig.get_path('stdlib')}?"
        )
    held_out = files[::20]
    del files[::20]
    return tuple(
        torch.frombuffer(bytearray(b"".join(x)), dtype=torch.uint8) for x in (files, held_out)
    )


def batch(text: torch.Tensor, size: Size, step: int) -> torch.Tensor:
    """int64 [rows, length + 1]: random pieces of the text, the same at this step of any run."""
    random = torch.Generator().manual_seed(step)
    starts = torch.randint(len(text) - size.length, (size.rows, 1), generator=random)
    places = starts + torch.arange(size.length + 1)
    return text[places.to(text.device)].long()


# ---- Training ----


def losses(model: LanguageModel, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(cross entropy of the next bytes, loss of balance) of ids [B, S + 1]."""
    logits, balance = model(ids[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten()), balance


class Trainer:
    """AdamW with a warmup, a cosine to a tenth, and clipped gradients."""

    def __init__(self, model: LanguageModel, steps: int, lr: float, accumulate: int = 1) -> None:
        self.model, self.accumulate = model, accumulate
        matrices = [x for x in model.parameters() if x.ndim > 1]
        others = [x for x in model.parameters() if x.ndim <= 1]
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0}]
        is_fused = matrices[0].is_cuda
        self.optimizer = torch.optim.AdamW(groups, lr, betas=(0.9, 0.95), fused=is_fused)
        warmup = max(1, steps // 20)

        def factor(step: int) -> float:
            done = (step - warmup) / max(1, steps - warmup)
            return min((step + 1) / warmup, 0.55 + 0.45 * math.cos(math.pi * max(0.0, done)))

        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, factor)

    def step(self, text: torch.Tensor, size: Size, step: int) -> torch.Tensor:
        """Train with `accumulate` batches; their mean loss, which nobody waits for yet."""
        total = torch.zeros((), device=text.device)
        for number in range(self.accumulate):
            loss, balance = losses(self.model, batch(text, size, step * self.accumulate + number))
            ((loss + BALANCE * balance) / self.accumulate).backward()
            total += loss.detach() / self.accumulate
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.schedule.step()
        return total


@torch.no_grad()
def held_out_loss(model: LanguageModel, text: torch.Tensor, size: Size, batches: int) -> float:
    model.eval()
    found = [losses(model, batch(text, size, number))[0] for number in range(batches)]
    model.train()
    return torch.stack(found).mean().item()


@torch.no_grad()
def continue_text(model: LanguageModel, prompt: str, num_bytes: int, size: Size) -> str:
    """The prompt and bytes that the model draws behind it."""
    device = next(model.parameters()).device
    ids, random = list(prompt.encode()), torch.Generator().manual_seed(0)
    for _ in range(num_bytes):
        logits, _ = model(torch.tensor([ids[-size.length :]], device=device))
        likely = (logits[0, -1].float().cpu() / 0.7).softmax(dim=-1)
        ids.append(int(torch.multinomial(likely, 1, generator=random)))
    return bytes(ids).decode(errors="replace")


def save(model: LanguageModel, directory: Path, dtype: str) -> None:
    """Write the master weights, to train on, and FP8, to serve; the model is FP8 afterwards."""
    moefp8.save_checkpoint(model, directory / "master")
    if dtype == "fp8":
        moefp8.freeze(model)  # codes and scales take the place of parameters
    else:
        moefp8.convert(model, skip="lm_head")
    moefp8.save_checkpoint(model, directory / "fp8")


def at_least_one(text: str) -> int:
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {text}")
    return int(text)


def check_out(directory: Path, parser: argparse.ArgumentParser) -> None:
    """Nothing is overwritten, which is told before anything is trained."""
    for name in ("master", "fp8"):
        if (directory / name).exists() and any((directory / name).iterdir()):
            parser.error(f"--out: {directory / name} must be empty, or not be there yet")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtype", choices=("fp8", "bf16"), default="fp8")
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--steps", type=at_least_one, help="default: by size")
    parser.add_argument("--accumulate", type=at_least_one, default=1, help="batches for each step")
    parser.add_argument("--lr", type=float, help="default: by size")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sample", type=int, default=80, help="bytes to write in the end")
    parser.add_argument("--out", type=Path, help="where to save master/ and fp8/; default: nowhere")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args()
    if arguments.out:
        check_out(arguments.out, parser)
    size, device = SIZES[arguments.size], arguments.device
    steps = arguments.steps or size.steps
    lr = size.lr if arguments.lr is None else arguments.lr

    text, held_out = (x.to(device) for x in read_text(size))
    model = make_model(size, arguments.dtype, device, arguments.seed)
    num_parameters = sum(x.numel() for x in model.parameters())
    print(f"{num_parameters:,} parameters, {len(text):,} bytes of text, {arguments.dtype}")
    trainer = Trainer(model, steps, lr, arguments.accumulate)
    start = time.perf_counter()
    for step in range(steps):
        loss = trainer.step(text, size, step)
        if step == 0 or (step + 1) % max(1, steps // 15) == 0:
            seconds = time.perf_counter() - start
            print(f"  step {step + 1:5}   loss {loss.item():.3f}   {seconds:6.1f} s", flush=True)
    print(f"  held-out loss {held_out_loss(model, held_out, size, 4):.3f}")

    with tempfile.TemporaryDirectory() as scratch:
        directory = arguments.out or Path(scratch)
        directory.mkdir(parents=True, exist_ok=True)
        save(model, directory, arguments.dtype)
        for name in ("master", "fp8"):
            num_bytes = sum(x.stat().st_size for x in (directory / name).iterdir())
            print(f"  saved {name}: {num_bytes / 2**20:.1f} MiB")
        served = moefp8.convert(LanguageModel(size), skip="lm_head").to(device)
        moefp8.load_checkpoint(served, directory / "fp8")
    print(continue_text(served.eval(), "def __init__(self", arguments.sample, size))


if __name__ == "__main__":
    main()
