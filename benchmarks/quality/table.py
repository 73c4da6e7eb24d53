"""Tables of what FP8 costs trained models: one for the README, and all layers."""

from collections.abc import Iterator
from typing import Any

from benchmarks.markdown import table
from benchmarks.pages import Results

_HEAD = (
    "in BF16",
    "perplexity BF16",
    "FP8",
    "change",
    "KL, nats",
    "by rounding",
    "same top-1",
    "KL of one layer alone, and the costliest",
)


def short(results: Results) -> str:
    """A row for each model."""
    return table(_HEAD, map(_cells, results["rows"]))


def tables(results: Results) -> str:
    """What was predicted and where, and the layers of each model, folded away."""
    parts = [short(results), "![What FP8 costs, layer by layer](results/quality.png)"]
    parts += ["\n\n".join(_folded(row)) for row in results["rows"]]
    return "\n\n".join(parts)


def name_of(row: Results) -> str:
    return f"{row['title']}, {row['parameters'] / 1e6:.1f} M parameters"


def _cells(row: Results) -> Iterator[str]:
    c = row["comparison"]
    yield name_of(row)
    yield f"{c['perplexity_a']:.4f} a {row['unit']}"
    yield f"{c['perplexity_b']:.4f}"
    yield f"{100 * c['change']:+.2f} % (± {100 * c['change_std']:.2f})"
    yield f"{c['kl_mean']:.1e}"
    yield f"{c['kl_floor']:.0e}"
    yield f"{100 * c['same_top_1']:.1f} %"
    costs = {layer["name"]: layer["kl"] for layer in c["layers"]}
    costliest = ".".join(max(costs, key=lambda name: costs[name]).split(".")[-2:])
    least, most = min(costs.values()), max(costs.values())
    yield f"{least:.1e} to {most:.1e} (`{costliest}` of {len(costs)})"


def _folded(row: Results) -> Iterator[str]:
    layers = row["comparison"]["layers"]
    yield f"<details><summary>Layers: {name_of(row)}</summary>"
    yield _about(row)
    parts = [*dict.fromkeys(part for layer in layers for part in layer["parts"])]
    head = "layer", "KL alone", "own", "own, worst", "total", *(f"own, {x}" for x in parts)
    yield table(head, (_layer_cells(layer, parts) for layer in layers))
    yield "</details>"


def _about(row: Results) -> str:
    c = row["comparison"]
    trained = ""
    if "steps" in row:
        size = row["size"]
        trained = (
            f"trained in BF16 with {row['trained_bytes'] / 1e6:.1f} MB, {row['steps']} steps of "
            f"{size['rows']} x {size['length']} bytes; hidden size {size['hidden']}, "
            f"{size['layers']} layers, {size['experts']} experts of {size['intermediate']}; "
        )
    return (
        f"{trained}{c['num_tokens']:,} predictions: {row['text']}. Error of logits: median "
        f"{c['logits']['median']:.1e}, worst {c['logits']['worst']:.1e}; KL at most "
        f"{c['kl_max']:.1e}. {row.get('gpu', row['cpu'])}, torch {row['torch']}; "
        f"{row['date'][:10]}, commit {row['commit']}."
    )


def _layer_cells(layer: dict[str, Any], parts: list[str]) -> Iterator[str]:
    yield f"`{layer['name']}`"
    yield f"{layer['kl']:.1e}"
    yield f"{layer['own']['median']:.1e}"
    yield f"{layer['own']['worst']:.1e}"
    yield f"{layer['total']['median']:.1e}"
    for part in parts:
        errors = layer["parts"].get(part)
        yield f"{errors['median']:.1e}" if errors else "-"
