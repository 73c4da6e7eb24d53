"""Every family of transformers with experts, brought to FP8 in every way a user may choose.

Reading order: `models` (a tiny one of each family), `judge` (whether an FP8 model is what it was
made of), `cells` (the ways, one by one), `__main__` (the command), `table` (what docs show).
"""

from pathlib import Path

RESULTS = Path(__file__).parents[1] / "results" / "families.json"
