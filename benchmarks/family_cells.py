"""One family in all the ways a user may bring it to FP8: a row of `benchmarks.families`."""

import re
import traceback
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

import moefp8
from benchmarks.family_judge import Original, Wrong, judge, logits_of, original
from benchmarks.tiny_models import tiny_model
from moefp8 import FP8Linear, GroupedExperts
from moefp8.checkpoint import CheckpointError, inspect_checkpoint, quantize_checkpoint
from moefp8.hf import FP8Config

WORKS, PARTLY, REFUSED, WRONG, CRASH = "works", "partly", "refused", "wrong", "crash"
NOT_THERE = "not there"  # transformers cannot do it in BF16 either
_SKIP = re.compile(r"skip=('[^']*'|\[[^\]]*\])")
_OURS = re.compile(r"moefp8|^convert:|experts_implementation=|FP8|cannot be quantized")


@dataclass
class Cell:
    """why: a refusal's or a failure's first line. way_out: that was tried, and works."""

    outcome: str
    why: str = ""
    way_out: str = ""
    errors: dict[str, float] = field(default_factory=dict)


def row_of(name: str, folder: Path) -> dict[str, Any]:
    """column -> Cell, as dictionaries. Raises `NotBuilt`."""
    model = tiny_model(name)
    inputs = inputs_of(model)
    first = original(model, inputs)
    cells = {"convert": _tried(lambda skip: _converted(name, skip, first, inputs))}
    saved = folder / "bf16"
    try:
        model.save_pretrained(saved)
        again = type(model).from_pretrained(saved, dtype=torch.bfloat16)
        if difference := _difference(again, model):
            raise Wrong(difference)
    except Exception as error:
        lost = Cell(NOT_THERE, f"transformers does not load what it saved: {_first_line(error)}")
        columns = ("FP8Config", "quantize, load", "save, load", "theirs", "experts_implementation")
        return {column: asdict(cell) for column, cell in {**cells, **dict.fromkeys(columns, lost)}.items()}
    kept: dict[str, nn.Module] = {}
    cells["FP8Config"] = _tried(lambda skip: _loaded(saved, skip, first, inputs, kept))
    ours = kept.get("FP8Config")
    cells["quantize, load"] = _tried(
        lambda skip: _quantized(saved, folder, skip, first, inputs, kept)
    )
    lost = Cell(REFUSED, "nothing was loaded that could be saved")
    cells["save, load"] = lost if ours is None else _tried(lambda _: _saved(ours, folder, inputs))
    is_saved = cells["save, load"].outcome == WORKS
    cells["theirs"] = _tried(lambda _: _by_transformers(ours, folder)) if is_saved else lost
    cells["experts_implementation"] = _tried(lambda _: _implemented(saved, first, inputs))
    return {column: asdict(cell) for column, cell in cells.items()}


def inputs_of(model: nn.Module) -> dict[str, torch.Tensor]:
    config: Any = model.config
    generator = torch.Generator().manual_seed(1)
    inputs = {"input_ids": torch.randint(10, 500, (2, 24), generator=generator)}
    if config.is_encoder_decoder:
        inputs["decoder_input_ids"] = torch.randint(10, 500, (2, 12), generator=generator)
    return {**inputs, "use_cache": False}


# ---- Columns ----


def _converted(name: str, skip: Any, first: Original, inputs: dict[str, Any]) -> Cell:
    ours, conversion = moefp8.convert(tiny_model(name), skip=skip, return_conversion=True)
    return _judged(ours, conversion, first, inputs)


def _loaded(
    saved: Path, skip: Any, first: Original, inputs: dict[str, Any], kept: dict[str, nn.Module]
) -> Cell:
    ours = _load(first.model, saved, FP8Config(skip=skip))
    kept["FP8Config"] = ours
    return _judged(ours, ours.hf_quantizer.conversion, first, inputs)


def _quantized(
    saved: Path,
    folder: Path,
    skip: Any,
    first: Original,
    inputs: dict[str, Any],
    kept: dict[str, nn.Module],
) -> Cell:
    target = folder / f"fp8-{len(list(folder.iterdir()))}"
    conversion = quantize_checkpoint(saved, target, skip=skip, progress=False).conversion
    if errors := [x for x in inspect_checkpoint(target).anomalies if x.severity == "error"]:
        raise Wrong(f"inspect: {errors[0]}")
    ours = _load(first.model, target, FP8Config())
    cell = _judged(ours, conversion, first, inputs)
    other: Any = kept.get("FP8Config")
    same = other is not None and _names_of(conversion) == _names_of(other.hf_quantizer.conversion)
    if not skip and same and (difference := _difference(ours, other)):
        raise Wrong(f"not what FP8Config makes: {difference}")
    if not skip and other is not None and not same and not conversion.warning():
        raise Wrong("swaps others than FP8Config, without a warning")
    return cell


def _saved(ours: nn.Module, folder: Path, inputs: dict[str, Any]) -> Cell:
    ours.save_pretrained(folder / "saved")
    errors = [x for x in inspect_checkpoint(folder / "saved").anomalies if x.severity == "error"]
    if errors:
        raise Wrong(f"inspect: {errors[0]}")
    again = _load(ours, folder / "saved", FP8Config())
    if difference := _difference(again, ours):
        raise Wrong(difference)
    if not torch.equal(logits_of(again, inputs), logits_of(ours, inputs)):
        raise Wrong("the same tensors give other logits")
    return Cell(WORKS)


def _by_transformers(ours: nn.Module, folder: Path) -> Cell:
    """Its own quantizer on what we saved: on a CPU it dequantizes."""
    theirs = type(ours).from_pretrained(folder / "saved", dtype=torch.bfloat16)
    plain = moefp8.dequantize(ours)
    names = dict(theirs.named_parameters())
    experts = []
    for name, x in plain.named_parameters():
        if name not in names or names[name].shape != x.shape:
            raise Wrong(f"{name} is missing, or of another shape")
        if not torch.allclose(names[name].float(), x.float(), rtol=0.01, atol=1e-6):
            experts.append(name)
    stacks = ("gate_up_proj", "down_proj", "w1", "v1", "w2", "up_proj")
    if any(not name.endswith(stacks) for name in experts):
        raise Wrong(f"{experts[0]} is another")
    why = "on a CPU it leaves out the scales of stacked experts when it dequantizes"
    return Cell(PARTLY, why) if experts else Cell(WORKS)


def _implemented(saved: Path, first: Original, inputs: dict[str, Any]) -> Cell:
    try:
        ours = type(first.model).from_pretrained(
            saved, dtype=torch.bfloat16, experts_implementation="moefp8"
        )
    except (TypeError, ValueError) as error:
        return Cell(NOT_THERE, _first_line(error))
    used = {n: m for n, m in ours.named_modules() if getattr(m, "has_gate", None) is not None}
    logits = logits_of(ours, inputs)
    if not any("_moefp8_experts" in vars(module) for module in used.values()):
        return Cell(NOT_THERE, "its experts ask for no implementation")
    worst = 0.0
    for name, module in used.items():
        if name in first.calls:
            args, kwargs = first.calls[name]
            with torch.no_grad():
                got, wanted = module(*args, **kwargs), first.model.get_submodule(name)(*args, **kwargs)
            worst = max(worst, float((got - wanted).norm() / wanted.norm()))
    if not worst < 0.15 or not logits.isfinite().all():
        raise Wrong(f"experts are {worst:.2f} off")
    return Cell(WORKS, errors={"modules": worst})


# ---- What they share ----


def _load(model: nn.Module, path: Path, config: FP8Config) -> nn.Module:
    loaded: nn.Module = type(model).from_pretrained(
        path, dtype=torch.bfloat16, quantization_config=config
    )
    return loaded.eval()


def _judged(ours: nn.Module, conversion: Any, first: Original, inputs: dict[str, Any]) -> Cell:
    errors = judge(ours, first, inputs)
    has = {kind: any(isinstance(m, kind) for m in ours.modules()) for kind in (FP8Linear, GroupedExperts)}
    if has[FP8Linear] and has[GroupedExperts]:
        return Cell(WORKS, errors=errors)
    return Cell(PARTLY, conversion.warning() or "it has no experts", errors=errors)


def _names_of(conversion: Any) -> set[str]:
    return set(conversion.swapped)


def _difference(first: nn.Module, second: nn.Module) -> str:
    a, b = first.state_dict(), second.state_dict()
    if a.keys() != b.keys():
        return f"other tensors: {sorted(a.keys() ^ b.keys())[:3]}"
    for name, x in a.items():
        y = b[name]
        if x.dtype != y.dtype or x.shape != y.shape:
            return f"{name}: {x.dtype} {list(x.shape)}, not {y.dtype} {list(y.shape)}"
        if not torch.equal(x.contiguous().view(torch.uint8), y.contiguous().view(torch.uint8)):
            return f"{name} has other values"
    return ""


def _tried(attempt: Callable[[Any], Cell]) -> Cell:
    """The cell of attempt(skip); of a refusal, its way out is tried."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return attempt(())
    except Wrong as error:
        return Cell(WRONG, str(error))
    except Exception as error:
        if not _is_refusal(error):
            last = traceback.extract_tb(error.__traceback__)[-1]
            return Cell(CRASH, f"{type(error).__name__}: {_first_line(error)} ({last.name})")
        refusal = error
    return Cell(REFUSED, _first_line(refusal), _way_out(attempt, str(refusal)))


def _way_out(attempt: Callable[[Any], Cell], told: str) -> str:
    """What a refusal names, if it works."""
    skip = [part.strip("'") for part in _SKIP.findall(told)]
    if not skip:
        return ""
    cell = _tried_once(attempt, skip)
    return f"skip={skip[0] if len(skip) == 1 else skip!r}" if cell else ""


def _tried_once(attempt: Callable[[Any], Cell], skip: Any) -> bool:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return attempt(skip).outcome in (WORKS, PARTLY)
    except Exception:
        return False


def _is_refusal(error: Exception) -> bool:
    if isinstance(error, CheckpointError):
        return True
    kinds = (ValueError, TypeError, NotImplementedError)
    return isinstance(error, kinds) and bool(_OURS.search(str(error)))


def _first_line(error: Exception) -> str:
    lines = [line.strip(" -") for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:2])[:300] if lines else type(error).__name__
