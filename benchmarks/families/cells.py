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
from transformers import AutoConfig

import moefp8
from benchmarks.families.judge import (
    BLOCK,
    MOST_OF_BF16,
    Original,
    Wrong,
    judge,
    logits_of,
    original,
)
from benchmarks.families.models import NotBuilt, tiny_model
from benchmarks.families.outcomes import (
    COLUMNS,
    CRASH,
    NOT_THERE,
    PARTLY,
    REFUSED,
    WORKS,
    WRONG,
)
from moefp8 import FP8Linear, GroupedExperts
from moefp8.checkpoint import CheckpointError, inspect_checkpoint, quantize_checkpoint
from moefp8.hf import FP8Config

ODD_SIZES = "on a CPU, transformers dequantizes only weights of sizes that 128 divides"
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
    made, saved = tiny_model(name), folder / "bf16"
    inputs = inputs_of(made)
    try:
        logits_of(made, inputs)
    except Exception as error:
        raise NotBuilt(f"it does not run in BF16: {_first_line(error)}") from error
    try:
        made.save_pretrained(saved)
        base = _load_plainly(made, saved)
        if difference := _lost(made, base):
            raise Wrong(difference)
    except Exception as error:
        first = original(made, inputs)
        lost = Cell(NOT_THERE, f"transformers does not load what it saved: {_first_line(error)}")
        cells = dict.fromkeys(COLUMNS, lost)
        cells["convert"] = _tried(lambda skip: _converted(tiny_model(name), skip, first, inputs))
        return {column: asdict(cell) for column, cell in cells.items()}
    first = original(base, inputs)
    way = _Ways(first, inputs, saved, folder)
    cells = {
        "convert": _tried(lambda skip: _converted(_load_plainly(made, saved), skip, first, inputs)),
        "FP8Config": _tried(way.loaded),
        "quantize, load": _tried(way.quantized),
        "experts_implementation": _tried(way.implemented),
    }
    nothing = Cell(NOT_THERE, "nothing was loaded that could be saved")
    cells["save, load"] = _tried(way.saved) if way.ours else nothing
    is_saved = cells["save, load"].outcome == WORKS
    cells["transformers' load"] = _tried(way.by_transformers) if is_saved else nothing
    return {column: asdict(cells[column]) for column in COLUMNS}


def inputs_of(model: nn.Module) -> dict[str, torch.Tensor]:
    config: Any = model.config
    generator = torch.Generator().manual_seed(1)
    inputs = {"input_ids": torch.randint(10, 500, (2, 24), generator=generator)}
    if config.is_encoder_decoder:
        inputs["decoder_input_ids"] = torch.randint(10, 500, (2, 12), generator=generator)
    return {**inputs, "use_cache": False}


# ---- Columns ----


def _converted(model: nn.Module, skip: Any, first: Original, inputs: dict[str, Any]) -> Cell:
    ours, conversion = moefp8.convert(model, skip=skip, return_conversion=True)
    return _judged(ours, conversion, first, inputs)


class _Ways:
    """Cells of files. ours: what the first loaded, with what a refusal told to skip."""

    def __init__(self, first: Original, inputs: dict[str, Any], saved: Path, folder: Path) -> None:
        self.first, self.inputs, self.source, self.folder = first, inputs, saved, folder
        self.ours: Any = None

    def loaded(self, skip: Any) -> Cell:
        self.ours = _load(self.first.model, self.source, FP8Config(skip=skip))
        return _judged(self.ours, self.ours.hf_quantizer.conversion, self.first, self.inputs)

    def quantized(self, skip: Any) -> Cell:
        target = self.folder / f"fp8-{len(list(self.folder.iterdir()))}"
        conversion = quantize_checkpoint(self.source, target, skip=skip, progress=False).conversion
        _inspect(target)
        again = _load(self.first.model, target, FP8Config())
        cell = _judged(again, conversion, self.first, self.inputs)
        other = self.ours.hf_quantizer.conversion if self.ours else None
        if other is not None and set(conversion.swapped) == set(other.swapped):
            if difference := _difference(again, self.ours):
                raise Wrong(f"not what FP8Config makes: {difference}")
        elif other is not None:
            left = set(other.swapped) - set(conversion.swapped)
            if set(conversion.swapped) - set(other.swapped) or left - set(conversion.kept):
                raise Wrong("swaps others than FP8Config does, and does not tell")
            why = f"{len(left)} more stay: {conversion.kept[min(left)]}"
            return Cell(PARTLY, conversion.warning() or why, errors=cell.errors)
        return cell

    def saved(self, _: Any) -> Cell:
        self.ours.save_pretrained(self.folder / "saved")
        _inspect(self.folder / "saved")
        again = _load(self.first.model, self.folder / "saved", FP8Config())
        if difference := _difference(again, self.ours):
            raise Wrong(difference)
        if not torch.equal(logits_of(again, self.inputs), logits_of(self.ours, self.inputs)):
            raise Wrong("the same tensors give other logits")
        return Cell(WORKS)

    def by_transformers(self, _: Any) -> Cell:
        """Its own quantizer on what we saved: on a CPU it dequantizes."""
        linears = [m for m in self.ours.modules() if isinstance(m, FP8Linear)]
        odd = any(_is_odd(linear.weight) for linear in linears)
        try:
            theirs = _load_plainly(self.first.model, self.folder / "saved")
        except Exception as error:  # any may come: it is not ours
            why = f"transformers raises {type(error).__name__}: {_first_line(error)}"
            return Cell(NOT_THERE, ODD_SIZES if odd else why)
        found = dict(theirs.named_parameters())
        stacks = {n for n, m in self.ours.named_modules() if isinstance(m, GroupedExperts)}
        others, unread = [], []
        for name, x in moefp8.dequantize(self.ours).named_parameters():
            is_stack = name.rpartition(".")[0] in stacks
            if name not in found or found[name].shape != x.shape:
                unread.append((is_stack, name))
            elif not torch.allclose(found[name].float(), x.float(), rtol=0.01, atol=1e-6):
                others.append((is_stack, name))
        if wrong := [name for is_stack, name in others + unread if not is_stack]:
            if odd and all(_is_odd(found[name]) for name in wrong):
                return Cell(PARTLY, ODD_SIZES)
            raise Wrong(f"{wrong[0]} is another")
        if unread:
            return Cell(PARTLY, "transformers has no FP8 experts of this family")
        why = "on a CPU, transformers dequantizes, and leaves out the scales of stacked experts"
        return Cell(PARTLY, why) if others else Cell(WORKS)

    def implemented(self, _: Any) -> Cell:
        try:
            ours = _load_plainly(self.first.model, self.source, experts_implementation="moefp8")
        except (TypeError, ValueError) as error:
            return Cell(NOT_THERE, _first_line(error))
        used = {n: m for n, m in ours.named_modules() if hasattr(m, "has_gate")}
        logits = logits_of(ours, self.inputs)
        if not any("_moefp8_experts" in vars(module) for module in used.values()):
            return Cell(NOT_THERE, "transformers' experts of this family ask for no implementation")
        worst = 0.0
        for name, module in used.items():
            if name not in self.first.calls:
                continue
            args, kwargs = self.first.calls[name]
            with torch.no_grad():
                wanted = self.first.model.get_submodule(name)(*args, **kwargs)
                got = module(*args, **kwargs)
            worst = max(worst, float((got - wanted).norm() / wanted.norm()))
        if not worst < MOST_OF_BF16 or not logits.isfinite().all():
            raise Wrong(f"experts are {worst:.2f} off")
        return Cell(WORKS, errors={"modules": worst})


def _is_odd(weight: torch.Tensor) -> bool:
    return any(size > BLOCK and size % BLOCK for size in weight.shape)


def _inspect(path: Path) -> None:
    errors = [x for x in inspect_checkpoint(path).anomalies if x.severity == "error"]
    if errors:
        raise Wrong(f"inspect: {errors[0]}")


# ---- What they share ----


def _load(model: nn.Module, path: Path, config: FP8Config) -> nn.Module:
    return _load_plainly(model, path, quantization_config=config)


def _load_plainly(model: nn.Module, path: Path, **options: Any) -> nn.Module:
    """Use the config that the directory names: several families may share a class."""
    options = {"config": AutoConfig.from_pretrained(path), "dtype": torch.bfloat16, **options}
    loaded: nn.Module = type(model).from_pretrained(path, **options)
    return loaded.eval()


def _lost(made: nn.Module, loaded: nn.Module) -> str:
    """What transformers itself does not bring back, up to what it keeps in FP32."""
    found = loaded.state_dict()
    for name, x in made.state_dict().items():
        if name not in found or not torch.equal(found[name], x.to(found[name].dtype)):
            return f"{name} is another"
    return ""


def _judged(ours: nn.Module, conversion: Any, first: Original, inputs: dict[str, Any]) -> Cell:
    errors = judge(ours, first, inputs)
    if not any(isinstance(m, FP8Linear | GroupedExperts) for m in ours.modules()):
        raise Wrong("nothing is FP8")
    warning = conversion.warning()
    return Cell(PARTLY if warning else WORKS, warning or "", errors=errors)


def _difference(first: nn.Module, second: nn.Module) -> str:
    a, b = first.state_dict(), second.state_dict()
    if a.keys() != b.keys():
        return f"other tensors: {sorted(a.keys() ^ b.keys())[:3]}"
    for name, x in a.items():
        y = b[name]
        floats = (torch.bfloat16, torch.float32)  # some cast a router to FP32 as they run
        if x.shape == y.shape and {x.dtype, y.dtype} == {*floats} and torch.equal(x, y.to(x.dtype)):
            continue
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
        return Cell(WRONG, _first_line(error))
    except Exception as error:
        if not _is_refusal(error):
            last = traceback.extract_tb(error.__traceback__)[-1]
            return Cell(CRASH, f"{type(error).__name__}: {_first_line(error)} ({last.name})")
        first, told = _first_line(error), str(error)  # the error keeps all that failed
    return Cell(REFUSED, first, _way_out(attempt, told))


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
    text = re.sub(r"(?<!\S)/\S+/", "", str(error))  # folders
    lines = [line.strip(" -") for line in text.splitlines() if line.strip()]
    return " ".join(lines[:2])[:300] if lines else type(error).__name__
