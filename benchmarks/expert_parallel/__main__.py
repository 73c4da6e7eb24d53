"""`python -m benchmarks.expert_parallel`"""

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks import mega_kernel
from benchmarks.circumstances import circumstances, require_gpu
from benchmarks.expert_parallel import RESULTS
from benchmarks.expert_parallel.cases import LAYERS, TOKENS
from benchmarks.expert_parallel.providers import OURS
from benchmarks.expert_parallel.worker import work


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="a part of a layer's name")
    parser.add_argument("--tokens", default=",".join(map(str, TOKENS)), help="of each rank")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each provider")
    parser.add_argument("--seconds", type=float, default=0.3, help="of a turn")
    parser.add_argument("--out", type=Path, default=RESULTS, help="for the results, in JSON")
    options = parser.parse_args()
    require_gpu("benchmarks.expert_parallel")
    num_ranks = torch.cuda.device_count()
    layers = [layer for layer in LAYERS if options.only in layer.name]
    tokens = [int(x) for x in options.tokens.split(",")]
    rows: list[dict[str, Any]] = []
    context = torch.multiprocessing.get_context("spawn")
    queue = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        given = f"{folder}/store", layers, tokens, options.rounds, options.seconds, queue
        processes = [
            context.Process(target=work, args=(rank, num_ranks, *given))
            for rank in range(num_ranks)
        ]
        for process in processes:
            process.start()
        while (row := _next(queue, processes)) is not None:
            rows.append(row)
            print(line_of(row), flush=True)
            results = {
                **circumstances(),
                "sgl_deep_gemm": mega_kernel.version(),
                "turns": {"rounds": options.rounds, "seconds": options.seconds},
                "rows": rows,
            }
            options.out.write_text(json.dumps(results, indent=1) + "\n")
        for process in processes:
            process.join()


def _next(queue: Any, processes: list[Any]) -> Any:
    """The next row; None behind the last one, or if a process has failed."""
    while True:
        try:
            return queue.get(timeout=2)
        except Exception:  # none yet
            if any(process.exitcode for process in processes):
                for process in processes:
                    process.terminate()
                return None


def line_of(row: dict[str, Any]) -> str:
    cells = [
        f"{name} {found['us']:.1f}" + (f" x{found['ratio']:.2f}" if name != OURS else "")
        if "us" in found
        else f"{name}: {found.get('refused')}"
        for name, found in row["peers"].items()
    ]
    moves = [
        f"{name} {x['us']} us, {x['share']:.2f} of a copy"
        for name, x in row["moves"].items()
        if isinstance(x, dict)
    ]
    return f"{row['layer']} {row['tokens']}: {'; '.join(cells + moves)}"


if __name__ == "__main__":
    main()
