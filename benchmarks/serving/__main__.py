"""Time engines with moefp8 and with their own layers; see the package."""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from benchmarks.circumstances import circumstances, require_gpu
from benchmarks.model.checkpoint import write_checkpoint
from benchmarks.options import some_of
from benchmarks.serving import BATCHES, ENGINES, PREFILLS, RESULTS, USUAL
from benchmarks.serving.engine import Settings
from benchmarks.serving.models import MODELS
from benchmarks.serving.table import tables
from benchmarks.session import Row, finish, measured, write

PATIENCE_S = 900  # for one run of one engine
# vLLM in one process, so that what it prints and how long it takes is that of the engine.
_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_OFFLINE": "1",
}
# Where engines keep kernels and graphs: each has its own, so that its first start compiles all.
_CACHES = (
    "VLLM_CACHE_ROOT",
    "SGLANG_DG_CACHE_DIR",
    "TRITON_CACHE_DIR",
    "TORCHINDUCTOR_CACHE_DIR",
    "MOEFP8_CACHE_DIR",
)


def rows_of(name: str, options: argparse.Namespace) -> Iterator[Row]:
    """The row of a model, again after each run of an engine."""
    model = MODELS[name]
    config = model.make_config(options.layers, options.tiny)
    work = Path(tempfile.mkdtemp(prefix=f"moefp8-{name}-", dir=options.dir))
    checkpoint = work / "checkpoint"
    caches = (options.dir or work) / f"caches-{name}"
    row: Row = {"model": name, "title": model.title_of(config), "engines": {}}
    try:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        write_checkpoint(config, checkpoint, device)
        if device.type == "cuda":
            torch.cuda.empty_cache()
        os.sync()
        for run in range(options.runs):
            for engine in options.engines:
                if "refused" in row["engines"].get(engine, {}):
                    continue
                settings = Settings(
                    engine,
                    str(checkpoint),
                    str(work / f"{engine}-{run}.json"),
                    options.rounds,
                    PREFILLS if not options.tiny else ((2, 100),),
                    BATCHES if not options.tiny else (1, 2),
                    config.vocab_size,
                    shares=run == 0,
                )
                found = row["engines"].setdefault(engine, {"runs": []})
                cache = caches / engine
                is_cold = not cache.exists()
                results, refused = run_engine(settings, cache)
                if results:
                    found["runs"].append({"cold": is_cold, **results})
                if refused:
                    found["refused"] = refused
                print(
                    row["title"],
                    ENGINES[engine].title,
                    f"run {run}:",
                    refused or results,
                    flush=True,
                )
                yield row
    finally:
        shutil.rmtree(work)


def run_engine(settings: Settings, cache: Path) -> tuple[dict[str, Any], str]:
    """(what it measured, how it ended if not well). cache: where it keeps what it compiles."""
    command = [sys.executable, "-m", "benchmarks.serving.engine", json.dumps(asdict(settings))]
    kept = {name: str(cache / name.lower()) for name in _CACHES}
    environment = {**os.environ, **_ENVIRONMENT, **kept, **ENGINES[settings.engine].environment}
    refused = ""
    try:
        ran = subprocess.run(
            command,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=PATIENCE_S,
            cwd=Path(__file__).parents[2],
        )
        print(*re.findall(r"moefp8 (?:runs|leaves) .*", ran.stdout), sep="\n")
        if ran.returncode:
            errors = [x for x in ran.stdout.splitlines() if "Error" in x] or [""]
            refused = f"it ended with {ran.returncode}: {errors[-1].strip()[:200]}"
            print(*ran.stdout.splitlines()[-40:], sep="\n")
    except subprocess.TimeoutExpired:
        refused = f"not done in {PATIENCE_S} s"
    file = Path(settings.result)
    return json.loads(file.read_text()) if file.exists() else {}, refused


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--models", type=some_of(tuple(MODELS)), default=tuple(MODELS), metavar="M,...")
    add("--engines", type=some_of(tuple(ENGINES)), default=USUAL, metavar="E,...")
    add("--runs", type=int, default=3, help="of each engine, in turns")
    add("--rounds", type=int, default=5, help="of each phase, after the first")
    add("--layers", type=int, help="so many at most")
    add("--tiny", action="store_true", help="tiny models, which need no GPU; times mean nothing")
    add(
        "--dir", type=Path, help="where checkpoints are written (31 GB), and where kernels are kept"
    )
    add("--out", "--json", type=Path, help=f"for the results; if all: {RESULTS}")
    options = parser.parse_args()
    if not options.tiny:
        require_gpu("benchmarks.serving")
    started = time.perf_counter()
    results: dict[str, Any] = {
        **circumstances(),
        "transformers": version("transformers"),
        "rounds": options.rounds,
        "rows": [],
    }

    def measure(name: str) -> Row:
        for row in rows_of(name, options):
            if options.out:
                write({**results, "rows": [*results["rows"], row]}, options.out)
        return row

    for row in measured(options.models, measure, lambda name: MODELS[name].title):
        results["rows"].append(row)
    is_all = (options.models, options.engines) == (tuple(MODELS), USUAL)
    is_all = is_all and options.layers is None and not options.tiny
    lines, num_cases = tables(results).splitlines(), len(options.models)
    finish(results, num_cases, lines, options.out, RESULTS, is_all=is_all, started=started)


if __name__ == "__main__":
    main()
