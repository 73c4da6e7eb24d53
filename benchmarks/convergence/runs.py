"""One run: a variant and a seed, trained step by step, in parts if time is limited."""

import hashlib
import json
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.circumstances import circumstances
from benchmarks.convergence import BF16, EVERY, FP8, HELD_OUT_BATCHES
from benchmarks.convergence.example import train
from benchmarks.convergence.probes import probe

Record = dict[str, Any]


class Text(NamedTuple):
    """On the device: what is trained with, and what is held out."""

    train: torch.Tensor
    held_out: torch.Tensor

    @classmethod
    def read(cls, size: Any, device: torch.device) -> "Text":
        return cls(*(x.to(device) for x in train.read_text(size)))


class Plan(NamedTuple):
    """What all runs of a file have in common, and how often is looked inside.

    shares_gpu: other runs have the GPU, too, so that nobody's speed is told.
    """

    size: Any
    steps: int
    lr: float
    num_probes: int
    held_out_batches: int = HELD_OUT_BATCHES
    shares_gpu: bool = False

    def settings(self, text: Text) -> Record:
        """What must be equal for curves to be compared; `text` stands for its bytes."""
        of_text = hashlib.sha256(text.train.cpu().numpy().tobytes()).hexdigest()[:16]
        return {
            "steps": self.steps,
            "lr": self.lr,
            "held_out_batches": self.held_out_batches,
            "size": {k: v for k, v in vars(self.size).items() if k not in ("steps", "lr")},
            "text": {"bytes": len(text.train), "sha256": of_text},
        }

    def probed(self) -> set[int]:
        """The steps before which gradients are compared: evenly, from 1 % of the run to its end."""
        first, last, n = self.steps // 100, self.steps - 1, self.num_probes
        return {first + (last - first) * i // max(1, n - 1) for i in range(n)}


class Run:
    """A model that is trained by `plan`; `record` is what becomes of it."""

    def __init__(
        self, plan: Plan, text: Text, variant: str, seed: int, options: Record | None
    ) -> None:
        """options: those of `convert`; None: BF16."""
        self.plan, self.text, self.is_fp8 = plan, text, options is not None
        device = text.train.device
        dtype = FP8 if self.is_fp8 else BF16
        self.model = train.make_model(plan.size, dtype, device, seed, **(options or {}))
        self.plain = None
        if self.is_fp8 and plan.num_probes:
            self.plain = train.make_model(plan.size, BF16, device)
        self.trainer = train.Trainer(self.model, plan.steps, plan.lr)
        self.step = 0
        self.record: Record = {
            "variant": variant,
            "seed": seed,
            "options": options,
            **circumstances(),
            "python": platform.python_version(),
            "parameters": sum(x.numel() for x in self.model.parameters()),
            "loss": [],
            "held_out": [],
            "seconds": [],
            "probes": [],
        }

    def go_on(self, until_s: float = float("inf"), told: Callable[[str], None] = print) -> bool:
        """Train until all steps are done, which is True, or the clock `perf_counter` says so."""
        plan, probed = self.plan, self.plan.probed()
        held_out_every = max(EVERY, plan.steps // 10 // EVERY * EVERY)
        while self.step < plan.steps:
            if time.perf_counter() > until_s:
                return False
            self._train(min(EVERY, plan.steps - self.step), probed)
            if self.step % held_out_every == 0 or self.step == plan.steps:
                loss = train.held_out_loss(
                    self.model, self.text.held_out, plan.size, plan.held_out_batches
                )
                self.record["held_out"].append([self.step, round(loss, 5)])
                told(
                    f"{self.record['variant']}:{self.record['seed']}   step {self.step:5}   "
                    f"loss {self.record['loss'][-1]:.4f}   held out {loss:.4f}"
                )
        return True

    def _train(self, num_steps: int, probed: set[int]) -> None:
        """Some steps, and their mean loss; the GPU is waited for once. Probes are not timed."""
        found, start, paused_s = [], time.perf_counter(), 0.0
        for _ in range(num_steps):
            if self.plain is not None and self.step in probed:
                pause = time.perf_counter()
                ids = train.batch(self.text.train, self.plan.size, self.step)
                shares = probe(self.model, self.plain, ids)
                self.record["probes"].append({"step": self.step, **shares})
                paused_s += time.perf_counter() - pause
            found.append(self.trainer.step(self.text.train, self.plan.size, self.step))
            self.step += 1
        self.record["loss"].append(round(torch.stack(found).mean().item(), 5))
        self.record["seconds"].append(round(time.perf_counter() - start - paused_s, 4))

    def save(self, path: Path) -> None:
        """All that `restore` needs to go on to the bit."""
        state = {
            "settings": self.plan.settings(self.text),
            "record": json.dumps(self.record),
            "step": self.step,
            "model": self.model.state_dict(),
            "optimizer": self.trainer.optimizer.state_dict(),
            "schedule": self.trainer.schedule.state_dict(),
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        torch.save(state, partial)
        partial.rename(path)

    def restore(self, path: Path) -> None:
        """Go on from what `save` wrote. Raises ValueError if that is of another run."""
        state = torch.load(path, map_location=self.text.train.device, weights_only=True)
        record, names = json.loads(state["record"]), ("variant", "seed", "options")
        ours, found = (
            settings | {name: each[name] for name in names}
            for settings, each in (
                (self.plan.settings(self.text), self.record),
                (state["settings"], record),
            )
        )
        if ours != found:
            raise ValueError(
                f"{path}: must be of a run with {ours}, got {found}; with another --state, or "
                "without that file, the run begins anew"
            )
        self.model.load_state_dict(state["model"])
        self.trainer.optimizer.load_state_dict(state["optimizer"])
        self.trainer.schedule.load_state_dict(state["schedule"])
        self.record, self.step = record, state["step"]

    def result(self) -> Record:
        """The record; with tokens/s, of the median of the times of `EVERY` steps, if that tells."""
        found = {k: v for k, v in self.record.items() if k != "seconds"}
        if self.plan.shares_gpu:
            return found
        seconds = sorted(self.record["seconds"])
        num_tokens = self.plan.size.rows * self.plan.size.length * EVERY
        return found | {"tokens_per_s": round(num_tokens / seconds[len(seconds) // 2])}
