"""One provider and one checkpoint in a process: `python -m benchmarks.model.worker SETTINGS`.

What is found is written into a file after each phase, so that it outlives a process that dies.
"""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.peers import first_line

Found = dict[str, Any]  # "refused", or "load_s", "weights_gib" and "phases"
LOGITS = "logits.pt"


@dataclass(frozen=True)
class Settings:
    """checkpoint, result: a directory to read, and one to write into.

    prompt, batches, context: as `phases.phases` takes them.
    """

    provider: str
    checkpoint: str
    result: str
    device: str
    prompt: int
    batches: tuple[int, ...]
    context: int


def run_in_a_process(settings: Settings, patience_s: float) -> Found:
    """What a process found, and how it ended if not well."""
    command = [sys.executable, "-m", "benchmarks.model.worker", json.dumps(asdict(settings))]
    root, how = Path(__file__).parents[2], ""
    try:
        ran = subprocess.run(
            command,
            stdout=sys.stderr,
            stderr=subprocess.PIPE,
            text=True,
            timeout=patience_s,
            cwd=root,
        )
        if ran.returncode:
            last = (ran.stderr.strip().splitlines() or [""])[-1]
            how = f"the process ended with {ran.returncode}: {last[:200]}"
    except subprocess.TimeoutExpired:
        how = f"not done in {patience_s:.0f} s"
    file = Path(settings.result) / "found.json"
    found: Found = json.loads(file.read_text()) if file.exists() else {}
    if how:
        found["ended" if found.get("phases") else "refused"] = how
    return found


def main() -> None:
    settings = Settings(**json.loads(sys.argv[1]))
    for found in find(settings):
        file = Path(settings.result) / "found.json"
        file.write_text(json.dumps(found))


def find(settings: Settings) -> Iterator[Found]:
    """What is found so far: after the load, and after each phase."""
    from transformers import AutoConfig
    from transformers.utils import logging

    from benchmarks.model.checkpoint import on_meta
    from benchmarks.model.providers import PROVIDERS

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    provider, path = PROVIDERS[settings.provider], Path(settings.checkpoint)
    device = torch.device(settings.device)
    if why := provider.refuses(path, device):
        yield {"refused": why}
        return
    torch.empty(1, device=device)
    on_meta(AutoConfig.from_pretrained(path))  # neither a CUDA context nor imports are a load
    started = time.perf_counter()
    try:
        model = provider.load(path, device)
    except Exception as error:
        yield {"refused": first_line(error)}
        return
    found: Found = {"phases": {}}
    if device.type == "cuda":
        torch.cuda.synchronize()
        found["weights_gib"] = round(torch.cuda.memory_allocated() / 2**30, 2)
        found["load_peak_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 2)
    found["load_s"] = round(time.perf_counter() - started, 2)
    yield found
    yield from _find_phases(model.eval(), settings, found)


@torch.inference_mode()
def _find_phases(model: Any, settings: Settings, found: Found) -> Iterator[Found]:
    """A phase that fails ends them: after an error of a GPU no other one would work."""
    from benchmarks.model.phases import measure, phases

    logits = Path(settings.result) / LOGITS
    try:
        for phase in phases(model, settings.prompt, settings.batches, settings.context):
            found["phases"][phase.name] = measure(model, phase)
            if not logits.exists():
                torch.save(phase.call().float().cpu(), logits)
            yield found
    except Exception as error:
        yield {**found, "ended": first_line(error)}


if __name__ == "__main__":
    main()
