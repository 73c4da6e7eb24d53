"""Whole models of transformers on one GPU: `python -m benchmarks.model`.

It writes a checkpoint of random weights for each model, with its real config, and loads it by
`from_pretrained` with moefp8, with transformers' own FP8 and dequantized to BF16, each in a process
of its own, which take turns. Of each it tells load time, prefill, decoding as it is called, in
CUDA graphs and compiled, peak memory, and where the time goes.
"""

import argparse
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from benchmarks.circumstances import circumstances, require_gpu
from benchmarks.model import HF_BF16, HF_FP8, MODES, RESULTS, TITLES
from benchmarks.model.checkpoint import MODELS, write_checkpoint
from benchmarks.model.providers import PROVIDERS, compile_ahead
from benchmarks.model.table import tables
from benchmarks.model.worker import LOGITS, Found, Settings, run_in_a_process
from benchmarks.moe_peers import PEERS
from benchmarks.options import numbers, some_of
from benchmarks.peers import deep_gemm_version
from benchmarks.session import Row, finish, measured, write
from moefp8.testing import row_errors

BATCHES, PROMPT, CONTEXT = (1, 16, 128), 4096, 256
PATIENCE_S = 900  # for all providers, which take turns


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Measure model after model; what is there already is written to `options.out` if given."""
    has_deep_gemm = PEERS[HF_FP8].why_missing() is None
    about: dict[str, Any] = {
        **circumstances(),
        "deep_gemm": deep_gemm_version() if has_deep_gemm else "missing",
        "transformers": version("transformers"),
        "prompt": options.prompt,
        "context": options.context,
    }
    results: dict[str, Any] = {**about, "rows": []}

    def measure(name: str) -> Row:
        for row in rows_of(name, options):
            if options.out:
                write({**results, "rows": [*results["rows"], row]}, options.out)
        return row

    for row in measured(options.models, measure, lambda name: MODELS[name].title):
        results["rows"].append(row)
    return results


def rows_of(name: str, options: argparse.Namespace) -> Iterator[Row]:
    """The row of a model, again with each provider that was measured."""
    model = MODELS[name]
    config = model.make_config(options.layers, options.tiny)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if options.dir is not None:
        options.dir.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f"moefp8-{name}-", dir=options.dir))
    checkpoint, started = work / "checkpoint", time.perf_counter()
    title = model.title_of(config)
    row: Row = {"model": name, "title": title, "layers": config.num_hidden_layers}
    try:
        with ThreadPoolExecutor(1) as pool:
            prompts = (batch * (options.context // 2) for batch in options.batches)
            tokens = options.prompt, *options.batches, *prompts
            cached = options.prompt, *(batch * options.context for batch in options.batches)
            is_gpu = device.type == "cuda"
            compiled = pool.submit(compile_ahead, config, tokens, cached) if is_gpu else None
            row["checkpoint_gib"] = round(write_checkpoint(config, checkpoint, device) / 2**30, 2)
            row["write_s"] = round(time.perf_counter() - started, 1)
            os.sync()  # else the system writes it to disk while the first provider is timed
            if compiled:
                torch.cuda.empty_cache()  # the providers need it
                compiled.result()
        row["ready_s"] = round(time.perf_counter() - started, 1)
        print(f"\n{title}: {row['checkpoint_gib']} GiB in {row['write_s']} s", flush=True)
        row["peers"] = {}
        for each in options.providers:
            (work / each).mkdir()
        with ThreadPoolExecutor(len(options.providers)) as pool:
            runs = {
                pool.submit(found_by, each, work, options, device): each
                for each in options.providers
            }
            for run in as_completed(runs):
                row["peers"][runs[run]] = run.result()
                add_errors(row["peers"], work)
                print(*lines_of_provider(runs[run], run.result()), sep="\n", flush=True)
                yield row
    finally:
        if options.keep:
            print(f"kept: {checkpoint}")
        else:
            shutil.rmtree(work)


def found_by(provider: str, work: Path, options: argparse.Namespace, device: torch.device) -> Found:
    settings = Settings(
        provider,
        str(work / "checkpoint"),
        str(work / provider),
        str(device),
        options.prompt,
        options.batches,
        options.context,
        others=tuple(str(work / name) for name in options.providers if name != provider),
    )
    started = time.perf_counter()
    found = run_in_a_process(settings, PATIENCE_S)
    return {**found, "all_s": round(time.perf_counter() - started, 1)}


def add_errors(peers: dict[str, Found], work: Path) -> None:
    """How far logits are from BF16's: the median of the prompt's last tokens.

    They say that all run one model. Some tokens are far off, since they get another expert.
    """
    logits = {name: work / name / LOGITS for name in peers}
    if HF_BF16 not in peers or not logits[HF_BF16].exists():
        return
    exact = torch.load(logits[HF_BF16])
    for name, file in logits.items():
        if name != HF_BF16 and file.exists():
            error = row_errors(torch.load(file), exact).median()
            peers[name]["logits_error"] = float(f"{error:.2e}")


def lines_of_provider(provider: str, found: Found) -> Iterator[str]:
    """Figures of a provider, each in a line."""
    if "refused" in found:
        yield f"{TITLES[provider]}: refused ({found['refused']})"
        return
    memory = f", {found['weights_gib']} GiB" if "weights_gib" in found else ""
    yield f"{TITLES[provider]}: loaded in {found['load_s']} s{memory}; {found['all_s']} s in all"
    for name, figures in found["phases"].items():
        eager, graph, compiled = (
            figures.get(f"{mode}_ms") or figures.get(f"{mode}_refused", "-") for mode in MODES
        )
        moe = f"MoE {figures['moe_ms']} ms, alone {figures['moe_alone_ms']}"
        times = f"graph {graph} ms   compiled {compiled} ms   {figures.get('experts', '')}"
        yield f"  {name:12} eager {eager:>9} ms   {times}   {moe}"
    if "ended" in found:
        yield f"  then it ended: {found['ended']}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    some_models, some_providers = (some_of(tuple(table)) for table in (MODELS, PROVIDERS))
    add = parser.add_argument
    add("--models", type=some_models, default=tuple(MODELS), metavar="M,...")
    add("--providers", type=some_providers, default=tuple(PROVIDERS), metavar="P,...")
    add("--batches", type=numbers, default=BATCHES, help="of decoding, such as 1,16")
    add("--layers", type=int, help="so many at most; default: 48 and 4")
    add("--prompt", type=int, default=PROMPT, help="tokens of the prefill")
    add(
        "--context", type=int, default=CONTEXT, help="tokens that a cache for decoding has room for"
    )
    add("--tiny", action="store_true", help="tiny models, which need no GPU; times mean nothing")
    add("--dir", type=Path, help="where checkpoints are written (31 GB)")
    add("--keep", action="store_true", help="leave the checkpoints there")
    add("--out", "--json", type=Path, help=f"for the results; if all: {RESULTS}")
    options = parser.parse_args()
    if options.context < 16:
        parser.error(f"--context must be at least 16, got {options.context}")
    if not options.tiny:
        require_gpu("benchmarks.model")
    started = time.perf_counter()
    results = run(options)
    chosen = options.models, options.providers, options.batches, options.prompt, options.context
    is_all = chosen == (tuple(MODELS), tuple(PROVIDERS), BATCHES, PROMPT, CONTEXT)
    is_all = is_all and options.layers is None and not options.tiny
    lines = tables(results).splitlines()
    num_cases = len(options.models)
    finish(results, num_cases, lines, options.out, RESULTS, is_all=is_all, started=started)


if __name__ == "__main__":
    main()
