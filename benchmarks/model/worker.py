"""One provider and one checkpoint in a process: `python -m benchmarks.model.worker SETTINGS`.

What is found is written into a file after each phase, so that it outlives a process that dies.
"""

import fcntl
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.peers import first_line

Found = dict[str, Any]  # "refused", or "load_s", "weights_gib" and "phases"
LOGITS, _LOCK = "logits.pt", "turn"
_TIMED, _COMPILED = "timed", "compiled"  # what providers note, and wait for


@dataclass(frozen=True)
class Settings:
    """checkpoint, result: a directory to read, and one to write into.

    prompt, batches, context: as `phases.phases` takes them.
    others: the `result` of each provider that runs beside this one.
    """

    provider: str
    checkpoint: str
    result: str
    device: str
    prompt: int
    batches: tuple[int, ...]
    context: int
    others: tuple[str, ...] = ()

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Of all providers, one loads or is timed at a time."""
        with (Path(self.checkpoint).parent / _LOCK).open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def note(self, what: str) -> None:
        (Path(self.result) / what).touch()

    def wait_for_others(self, what: str) -> None:
        """Until each has noted the same, or ended."""
        while not all((Path(other) / what).exists() for other in self.others):
            time.sleep(0.2)


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
    finally:
        settings.note(_TIMED)
        settings.note(_COMPILED)
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
    from benchmarks.model.phases import (
        compile_steps,
        decoding_by,
        measure,
        measure_compiled,
        phases,
    )

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    path, device = Path(settings.checkpoint), torch.device(settings.device)
    torch.empty(1, device=device)
    on_meta(AutoConfig.from_pretrained(path))  # neither a CUDA context nor imports are a load
    with torch.inference_mode():
        with settings.turn():
            found, model = _load(settings, path, device)
            yield found
            if model is None:
                return
            logits, prompts = Path(settings.result) / LOGITS, {}
            try:
                for phase in phases(model, settings.prompt, settings.batches, settings.context):
                    found["phases"][phase.name] = measure(model, phase)
                    if phase.prompts is not None:
                        prompts[phase.name] = phase.prompts
                    if not logits.exists():
                        torch.save(phase.call().float().cpu(), logits)
                    yield found
            except Exception as error:  # after an error of a GPU no other phase would work
                yield {**found, "ended": first_line(error)}
                return
        settings.note(_TIMED)
        if device.type == "cpu":
            return
        settings.wait_for_others(_TIMED)  # compiling takes all cores
        compiled = {}
        for name, ids in prompts.items():
            figures = found["phases"][name]
            with decoding_by(model, figures.get("experts")):
                compiled[name], outcome = compile_steps(model, ids)
            figures |= outcome
        settings.note(_COMPILED)
        settings.wait_for_others(_COMPILED)
        with settings.turn():
            for name, graphs in compiled.items():
                if "compile_s" in (figures := found["phases"][name]):
                    figures |= measure_compiled(graphs, prompts[name])
                yield found


def _load(settings: Settings, path: Path, device: torch.device) -> tuple[Found, Any]:
    """What is found of the load, and the model, or None if it is refused."""
    from benchmarks.model.providers import PROVIDERS

    provider = PROVIDERS[settings.provider]
    if why := provider.refuses(path, device):
        return {"refused": why}, None
    started = time.perf_counter()
    try:
        model = provider.load(path, device)
    except Exception as error:
        return {"refused": first_line(error)}, None
    found: Found = {"phases": {}}
    if device.type == "cuda":
        torch.cuda.synchronize()
        found["weights_gib"] = round(torch.cuda.memory_allocated() / 2**30, 2)
        found["load_peak_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 2)
    found["load_s"] = round(time.perf_counter() - started, 2)
    return found, model.eval()


if __name__ == "__main__":
    main()
