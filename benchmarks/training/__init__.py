"""One training step of linears, grouped linears and expert layers: `python -m benchmarks.training`.

    python -m benchmarks.training                                 # all of it, some minutes
    python -m benchmarks.training --parts linears --only 8192x4096 --rounds 0

Reading order: `cases` (what a step is, and its sizes), `peers` (who makes it), `kernels` (those of
a step that are new, alone), `parts`, `goals`, `table`.
"""

from pathlib import Path

RESULTS = Path(__file__).parents[1] / "results" / "training.json"
