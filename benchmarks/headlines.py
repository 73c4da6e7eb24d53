"""The few numbers that the README tells, of all that is measured."""

from collections.abc import Iterator
from typing import Any

from benchmarks.figures import PAUSES, WITHOUT_REST, Row, geomean, ratio, told_mode, told_ratio
from benchmarks.gemm_cases import LARGE_MS
from benchmarks.gemm_goals import AGAINST, compare
from benchmarks.gradient_parts import EXPERTS, PARTS, comparisons
from benchmarks.markdown import number, table
from benchmarks.model import HF_BF16, PREFILL
from benchmarks.model.table import fastest_ms, figures_of, phases_of, speedup
from benchmarks.moe_cases import MODELS
from benchmarks.moe_peers import PEERS
from benchmarks.peers import BF16, OURS
from benchmarks.serving import DEFAULT
from benchmarks.serving.table import phases_of as engine_phases
from benchmarks.serving.table import speedup as engine_speedup
from benchmarks.serving.table import versions_of
from benchmarks.training.parts import GROUPED, LAYERS, LINEARS
from benchmarks.training.parts import PARTS as STEPS
from benchmarks.training.peers import EVERY

# `headlines` takes these results, in this order, and the others by name once they were measured.
SOURCES = "moe", "gemm", "accuracy", "load", "cpu"
MORE_SOURCES = "gemm_large", "gradients", "training", "model", "serving"
TOKENS = 1, 128, 4096
OF_LAYERS = "sgl_megamoe", "hf_bf16"
OF_THE_GEMM = "deep_gemm", "bf16"


def headlines(
    moe: dict[str, Any],
    gemm: dict[str, Any],
    accuracy: dict[str, Any],
    load: dict[str, Any],
    cpu: dict[str, Any],
    gemm_large: dict[str, Any] | None = None,
    gradients: dict[str, Any] | None = None,
    training: dict[str, Any] | None = None,
    model: dict[str, Any] | None = None,
    serving: dict[str, Any] | None = None,
) -> str:
    """A table of speed, and what else a newcomer asks first.

    What takes 100 us or more is told without rest, where it was timed so.
    """
    has_large = gemm_large is not None and gemm_large["gpu"] == gemm["gpu"]
    without_rest = gemm_large if has_large else gemm
    of_layers, of_gemm = _where(moe), _where(without_rest)
    head = [of_layers if of_layers == of_gemm else "", "times as fast as", *map(_tokens, TOKENS)]
    parts = [] if model is None else [*_decoding(model), ""]
    parts += [table(head, [*_layers(moe["rows"]), *_gemm(gemm["rows"], without_rest["rows"])]), ""]
    if of_layers != of_gemm:
        parts.append(f"- Experts: {of_layers}. GEMM: {of_gemm}.")
    if serving is not None:
        parts.append(_engine(serving))
    if gradients is not None:
        parts.append(_gradients(gradients))
    if training is not None:
        parts.append(_training(training))
    return "\n".join([*parts, _accuracy(accuracy), _load(load), _cpu(cpu)])


# How a model decodes, as its user writes it.
_DECODES = {
    "eager": "`model.generate`",
    "graph": "`DecodingGraphs(model).generate`",
    "compiled": "the same with `compile=True`",
}


def _decoding(results: dict[str, Any]) -> Iterator[str]:
    """A table of tokens a second of the first model, as it is called and in graphs."""
    row = results["rows"][0]
    phases = [phase for phase in phases_of(row) if phase != PREFILL]
    lines = []
    for mode, how in _DECODES.items():
        cells = []
        for phase in phases:
            figures = figures_of(row, OURS, phase)
            ms, ratio = figures.get(f"{mode}_ms"), speedup(row, HF_BF16, phase, mode)
            rate = number(ms and 1e3 * figures["tokens"] / ms, 0)
            cells.append(f"{rate} ({number(ratio, 2)})")
        lines.append([how, *cells])
    yield (
        "Tokens a second, and in brackets how many times as fast as transformers in BF16 by the "
        f"same call. {_over_as_called(row, phases[0])}".rstrip()
    )
    yield ""
    batches = (phase.replace("decode ", "batch ") for phase in phases)
    yield table([f"{row['title']} decodes, on one {results['gpu']}", *batches], lines)


def _over_as_called(row: Row, phase: str) -> str:
    """The fastest mode beside BF16 as it is called."""
    ms, as_called = fastest_ms(row, OURS, phase), figures_of(row, HF_BF16, phase).get("eager_ms")
    if not (ms and as_called):
        return ""
    return (
        f"The fastest call is {as_called / ms:.1f} times as fast as BF16's `model.generate` at "
        f"{phase.replace('decode', 'batch')}."
    )


def _where(results: dict[str, Any]) -> str:
    is_long = any(told_mode(row) != PAUSES for row in results["rows"])
    return f"on one {results['gpu']}" + (", without rest from 100 us on" if is_long else "")


def _tokens(n: int) -> str:
    return f"{n} token" if n == 1 else f"{n} tokens"


def _layers(rows: list[Row]) -> Iterator[list[str]]:
    for model in dict.fromkeys(row["model"] for row in rows):
        by_tokens = {row["tokens"]: row for row in rows if row["model"] == model}
        for name in OF_LAYERS:
            values = [told_ratio(by_tokens[n], (name,)) if n in by_tokens else None for n in TOKENS]
            if any(values):
                title = f"experts of {MODELS[model].title}"
                yield [title, PEERS[name].title, *(number(x, 2) for x in values)]


def _gemm(rows: list[Row], rows_without_rest: list[Row]) -> Iterator[list[str]]:
    """Large M without rest. A peer that was timed with pauses alone is marked."""
    nums = {sum(row["m"] == n for row in rows) for n in TOKENS}
    what = f"`fp8_gemm_nt`, mean of {' to '.join(map(str, sorted(nums)))} shapes"

    def cell(m: int, against: str) -> str:
        rows_of_m = rows_without_rest if m in LARGE_MS else []
        settled = {x: compare(rows_of_m, (m,), x, WITHOUT_REST) for x in OF_THE_GEMM}
        found = settled[against] or compare(rows, (m,), against)
        is_marked = found and not settled[against] and any(settled.values())
        return number(found and found.geomean, 2) + (f" {PAUSES}" if is_marked else "")

    for against in OF_THE_GEMM:
        if compare(rows, TOKENS, against):
            yield [what, AGAINST[against][0], *(cell(n, against) for n in TOKENS)]


def _engine(results: dict[str, Any]) -> str:
    """Times as fast as vLLM's default, by model and phase."""
    of_models = []
    for row in results["rows"]:
        ratios = {x: engine_speedup(row, DEFAULT, x) for x in engine_phases(row)}
        told = (f"{ratio:.2f} ({phase})" for phase, ratio in ratios.items() if ratio)
        of_models.append(f"{row['title']} {', '.join(told)}")
    version = f"vLLM {', '.join(versions_of(results['rows']))}"
    return (
        f"- {version} on one {results['gpu']} ({results['date'][:10]}), times as fast as with its "
        f"own layers: {'; '.join(of_models)}."
    )


def _gradients(results: dict[str, Any]) -> str:
    """Geometric means over all models and numbers of tokens, and the least and most."""
    told = [
        f"{geomean(ratios):.2f} times as fast as {each.title} ({min(ratios):.2f} to "
        f"{max(ratios):.2f})"
        for each in comparisons(results["rows"])
        if each.part is PARTS[EXPERTS] and (ratios := each.ratios.values())
    ]
    what = f"Forward and backward of frozen experts, on one {results['gpu']}"
    return f"- {what}: {'; '.join(told) or 'not measured'}."


def _training(results: dict[str, Any]) -> str:
    """The least and most of each part."""

    def range_of(part: str, ours: str) -> str:
        of_part = (row for row in results["rows"] if row["part"] == part)
        ratios = [ratio(row, (BF16,), WITHOUT_REST, ours) for row in of_part]
        known = [x for x in ratios if x is not None]
        return f"{min(known):.2f} to {max(known):.2f}" if known else ""

    told = []
    for part in (LINEARS, GROUPED, LAYERS):
        once, every = range_of(part, OURS), range_of(part, EVERY)
        if once:
            told.append(f"{STEPS[part].title} {once}{f' ({every})' if every else ''}")
    what = f"Steps of training beside BF16, on one {results['gpu']}, without rest, times as fast"
    how = "with weights that are quantized once (in every step)"
    return f"- {what}, {how}: {', '.join(told) or 'not measured'}."


def _accuracy(results: dict[str, Any]) -> str:
    linear_exact, linear, experts_exact, experts = (
        100 * error["worst"] for error in results["relative_error_of_rows"].values()
    )
    return (
        f"- Off BF16 in the worst row: `FP8Linear` {linear:.1f} %, `GroupedExperts` {experts:.1f} "
        f"%. Off FP64 and FP32 sums of the same FP8 operands: {linear_exact:.2f} % and "
        f"{experts_exact:.2f} %, which is BF16's rounding."
    )


def _load(results: dict[str, Any]) -> str:
    ours, theirs = results["moefp8"], results["safetensors"]
    return (
        f"- `load_checkpoint` takes {ours['extra_percent']:.1f} % of memory beside the model, at "
        f"{ours['gib_per_s']:.1f} GiB/s from a warm page cache; to stack what safetensors' "
        f"`load_file` gives, {theirs['extra_percent']:.1f} % at {theirs['gib_per_s']:.1f} GiB/s "
        f"({results['cpu']})."
    )


def _cpu(results: dict[str, Any]) -> str:
    ratios = [row["fp8"] / row["bf16"] for row in results["ms"]]
    return (
        f"- On a CPU, `FP8Linear` takes {min(ratios):.0f} to {max(ratios):.0f} times as long as "
        f"BF16 ({results['cpu']}): it is there for development and tests."
    )
