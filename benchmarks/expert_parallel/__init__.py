"""Experts that GPUs of a host share, beside others: `python -m benchmarks.expert_parallel`.

    python -m benchmarks.expert_parallel                                # all of it, some minutes
    python -m benchmarks.expert_parallel --only Qwen3 --tokens 16,4096

It starts a process for each GPU. Reading order: `cases` (layers and tokens), `providers` (who
computes a layer), `worker` (what each process times), `table`.
"""

from pathlib import Path

RESULTS = Path(__file__).parents[1] / "results" / "expert_parallel.json"
