"""The language model of `examples/train.py`, trained here in BF16: dense, and of experts."""

import time
from dataclasses import replace
from typing import Any

from benchmarks.convergence.example import train
from benchmarks.quality import Subject, rows_of

_SMALL = train.Size(256, 4, 4, 8, 256, 2, 8, 256, 1000, 2e-3, 5_000_000)
_LARGE = replace(train.SIZES["large"], steps=2500)
# A dense model has one expert, which every token takes, and twice its width.
SIZES = {
    "small": {"moe": _SMALL, "dense": replace(_SMALL, experts=1, top_k=1, intermediate=512)},
    "large": {"moe": _LARGE, "dense": replace(_LARGE, experts=1, top_k=1, intermediate=1024)},
}
ROWS = {"small": 64, "large": 128}  # of held-out text
TITLES = {
    "moe": "language model of `examples/train.py`, {experts} experts, {top_k} a token",
    "dense": "the same, dense",
}


def trained(name: str, size_name: str, device: str, steps: int | None) -> Subject:
    """Train a model, "dense" or "moe", for some minutes. Seeds are fixed."""
    size = SIZES[size_name][name]
    steps = steps or size.steps
    text, held_out = (x.to(device) for x in train.read_text(size))
    model = train.make_model(size, "bf16", device)
    trainer = train.Trainer(model, steps, size.lr)
    start = time.perf_counter()
    for step in range(steps):
        loss = trainer.step(text, size, step)
        if (step + 1) % max(1, steps // 10) == 0:
            seconds = time.perf_counter() - start
            print(f"  {name}, step {step + 1}: loss {loss.item():.3f}, {seconds:.0f} s", flush=True)
    seconds = time.perf_counter() - start
    num_parameters = sum(x.numel() for x in model.parameters())
    about: dict[str, Any] = {
        "size": {key: x for key, x in vars(size).items() if key not in ("steps", "least_text")},
        "steps": steps,
        "trained_bytes": steps * size.rows * size.length,
        "training_seconds": round(seconds, 1),
    }
    return Subject(
        title=TITLES[name].format(**vars(size)),
        text="Python files that were held out",
        unit="byte",
        model=model.eval(),
        ids=rows_of(held_out.cpu(), ROWS[size_name], size.length).to(device),
        logits=lambda output: output[0],
        skip=("lm_head",),
        about={**about, "parameters": num_parameters},
    )
