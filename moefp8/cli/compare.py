"""Tell how far a model is from another on a text: perplexity, KL, and what each layer costs.

A and B are directories that transformers loads as causal language models, in 16 bits or in FP8
blocks, such as a BF16 checkpoint and what `quantize` made of it. Without B, A is compared with
itself, quantized as it is loaded; --skip tries what should stay. Both models are held at once.
"""

import argparse
import json
from collections.abc import Iterator
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from ..checkpoint.errors import printable
from ..checkpoint.files.config import (
    format_problem,
    modelopt_quantization,
    quantization_of,
    read_config,
)
from ..checkpoint.files.safe_read import check_there
from ..testing.compare import compare_models
from ..testing.compare_plot import check_plot, draw
from ..testing.comparison import Comparison

_TOKENIZER_FILES = "tokenizer_config.json", "tokenizer.json", "tokenizer.model"
_NUM_BYTES = 256
_MAX_LINE = 4000


def add_to(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("a", metavar="A", help="the reference, a directory")
    parser.add_argument("b", metavar="B", nargs="?", help="a directory; default: A in FP8")
    parser.add_argument("--text", required=True, metavar="FILE", help="UTF-8; what is predicted")
    parser.add_argument(
        "--tokens", type=int, default=8192, help="of the text, at most (default: %(default)s)"
    )
    parser.add_argument(
        "--length", type=int, default=1024, help="tokens of a row (default: %(default)s)"
    )
    parser.add_argument(
        "--skip",
        action="append",
        default=[],
        metavar="PATTERN",
        help="without B, keep these in 16 bits, as `quantize` does; may be repeated",
    )
    parser.add_argument("--device", help="default: cuda if there is a GPU, else cpu")
    parser.add_argument("--json", metavar="FILE", help="write all figures there")
    parser.add_argument("--plot", metavar="FILE", help="draw the layers, e.g. layers.png")


def run(arguments: argparse.Namespace) -> int:
    _check(arguments)
    device = _device(arguments.device)
    ids, tokens = _ids(arguments)
    b = arguments.b or arguments.a
    a_model = _load(arguments.a, device)
    b_model = _load(b, device, skip=None if arguments.b else arguments.skip)
    sizes = [f"{_weight_bytes(x) / 2**20:,.1f} MiB of weights" for x in (a_model, b_model)]
    how = "" if arguments.b else ", quantized as it was loaded"
    print(printable(f"A: {arguments.a}, {_format(a_model)}, {sizes[0]}", _MAX_LINE))
    print(printable(f"B: {b}{how}, {_format(b_model)}, {sizes[1]}", _MAX_LINE))
    print(
        printable(f"{len(ids)} rows of {ids.shape[1]} {tokens}, on {device}", _MAX_LINE), end="\n\n"
    )
    comparison = compare_models(a_model, b_model, ids.to(device), use_cache=False)
    print("\n".join(lines_of(comparison)), flush=True)
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(comparison.to_dict(), indent=1) + "\n")
    if arguments.plot:
        draw(comparison.to_dict(), arguments.plot, f"{Path(b).name}{how} beside {arguments.a}")
    return 0


def lines_of(comparison: Comparison) -> Iterator[str]:
    """Yield the figures of the whole model, then a table of its layers."""
    c = comparison
    percent, std = 100 * c.change, 100 * c.change_std
    yield f"perplexity       A {c.perplexity_a:.4f}, B {c.perplexity_b:.4f}: {percent:+.2f} % " + (
        f"(standard error {std:.2f})"
    )
    yield f"KL(A || B)       mean {c.kl_mean:.2e}, most {c.kl_max:.2e} nats a token"
    yield f"rounding         KL {c.kl_floor:.2e}, of A whose first layer's output is rounded again"
    yield f"same top-1       {100 * c.same_top_1:.2f} % of {c.num_tokens:,} tokens"
    yield f"error of logits  median {c.logits.median:.1e}, worst row {c.logits.worst:.1e}"
    yield ""
    yield "KL alone: of A with this layer of B in place of its own. Errors of the layer's output"
    yield "are relative, medians of tokens: own on the inputs that it has in A, total in B."
    yield ""
    parts = [*dict.fromkeys(part for layer in c.layers for part in layer.parts)]
    names = [layer.name for layer in c.layers]
    width = max(len("layer"), *map(len, names))
    columns = ["KL alone", "own", "own, worst", "total", *(f"own, {part}" for part in parts)]
    yield f"  {'layer':<{width}}" + "".join(f"{x:>{max(len(x), 8) + 2}}" for x in columns)
    for layer in c.layers:
        errors: list[float | None] = [layer.own.median, layer.own.worst, layer.total.median]
        errors += [layer.parts[x].median if x in layer.parts else None for x in parts]
        cells = [f"{layer.kl:.1e}", *("-" if x is None else f"{x:.1e}" for x in errors)]
        padded = (f"{x:>{max(len(title), 8) + 2}}" for x, title in zip(cells, columns, strict=True))
        mark = ">" if layer is c.costliest else " "
        yield f"{mark} {layer.name:<{width}}" + "".join(padded)
    yield ""
    yield f"> {c.costliest.name} costs most: {c.costliest.kl:.1e} nats a token alone"


def _check(arguments: argparse.Namespace) -> None:
    """Refuse what cannot work before models are loaded."""
    for directory in filter(None, (arguments.a, arguments.b)):
        check_there(Path(directory))
        if not Path(directory).is_dir():
            raise ValueError(f"A and B must be directories with a config.json, got {directory}")
        if problem := format_problem({"quantization_config": _quantization(directory)}):
            raise ValueError(f"{directory}: {problem}")
    if arguments.skip and arguments.b:
        raise ValueError("--skip is for A that is quantized as it is loaded; leave B out, or it")
    if arguments.b is None and _quantization(arguments.a) is not None:
        raise ValueError(
            f"{arguments.a}: is FP8 already; give what it comes from as A and this as B"
        )
    if min(arguments.tokens, arguments.length) < 2:
        raise ValueError(
            f"--tokens and --length must be at least 2, got {arguments.tokens} and "
            f"{arguments.length}"
        )
    if arguments.tokens < arguments.length:
        raise ValueError(
            f"--tokens must be at least --length, which is a row of them, got {arguments.tokens} "
            f"and {arguments.length}; give a larger --tokens or a smaller --length"
        )
    for name, file in (("--json", arguments.json), ("--plot", arguments.plot)):
        if file and (Path(file).is_dir() or not Path(file).absolute().parent.is_dir()):
            raise ValueError(f"{name} must name a file in a directory that is there, got {file}")
    if arguments.plot:
        check_plot(arguments.plot)
    for directory in filter(None, (arguments.a, arguments.b)):
        config = read_config(directory)
        names = config.get("architectures") or []
        if any(str(name).endswith("ForMaskedLM") for name in names):
            raise ValueError(
                f"{directory}: must be a causal language model, got {names[0]}; "
                "moefp8.testing.compare_models takes labels for others"
            )


def _device(name: str | None) -> str:
    if name is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(
            f"--device must be one of torch's, such as cpu or cuda, got {name}"
        ) from error
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(
            f"--device {name} must be a GPU that torch can use, which are "
            f"{torch.cuda.device_count()}"
        )
    return name


def _quantization(directory: str) -> Any:
    """What the directory's files say of quantization, or None."""
    stated = quantization_of(read_config(directory))
    return modelopt_quantization(directory) if stated is None else stated


def _ids(arguments: argparse.Namespace) -> tuple[torch.Tensor, str]:
    """([R, S] of the text, what they are)."""
    text = Path(arguments.text).read_text(encoding="utf-8")
    directories = [x for x in (arguments.a, arguments.b) if x and _has_tokenizer(x)]
    encodings = [_encode(x, text) for x in directories] or [([*text.encode()], [])]
    if encodings[0] != encodings[-1]:
        raise ValueError(
            "A and B must have one vocabulary, but their tokenizers give other ids for "
            f"{arguments.text}"
        )
    ids, start = encodings[0]
    what = "tokens" if directories else "bytes (there is no tokenizer)"
    vocabulary = _vocabulary(arguments.a)
    if max(ids, default=0) >= vocabulary:
        raise ValueError(
            f"{arguments.a}: must have a tokenizer for its {vocabulary} words, got an id of "
            f"{max(ids)} ({what}); put the tokenizer's files beside config.json"
        )
    length, num_text = arguments.length, arguments.length - len(start)
    num_rows = min(arguments.tokens // length, len(ids) // max(1, num_text))
    if num_rows < 1:
        raise ValueError(
            f"{arguments.text}: must have a row of --length {length}, got {len(ids)} {what}; give "
            "a longer text or a smaller --length"
        )
    rows = torch.tensor(ids[: num_rows * num_text]).view(num_rows, num_text)
    starts = torch.tensor(start, dtype=torch.int64).expand(num_rows, -1)
    return torch.cat((starts, rows), dim=1), what


def _has_tokenizer(directory: str) -> bool:
    return any((Path(directory) / name).exists() for name in _TOKENIZER_FILES)


def _encode(directory: str, text: str) -> tuple[list[int], list[int]]:
    """(ids of the text, those that every row begins with)."""
    tokenizer = _transformers().AutoTokenizer.from_pretrained(directory)
    starts = tokenizer("a").input_ids[:1] == [tokenizer.bos_token_id]
    ids = tokenizer(text, add_special_tokens=False, verbose=False).input_ids
    return ids, [tokenizer.bos_token_id] if starts else []


def _vocabulary(directory: str) -> int:
    config = _transformers().AutoConfig.from_pretrained(directory)
    return int(config.get_text_config().vocab_size)


def _load(directory: str, device: str, skip: list[str] | None = None) -> Any:
    """skip: quantize all but these; None: load as it is stored."""
    transformers = _transformers()
    from ..hf import FP8Config, pretrained_config

    options: dict[str, Any] = {}
    if skip is not None:
        options = {"quantization_config": FP8Config(skip)}
    elif _quantization(directory) is not None:
        options = {"config": pretrained_config(directory)}
    if torch.device(device).type != "cpu":
        options["device_map"] = device
    load = partial(transformers.AutoModelForCausalLM.from_pretrained, dtype=torch.bfloat16)
    try:
        return load(directory, **options).eval()
    except ImportError as error:  # device_map needs accelerate
        raise ValueError(f"{directory}: transformers cannot load it ({error})") from error


def _transformers() -> Any:
    try:
        import transformers

        from .. import hf as hf  # it refuses a release that is too old
    except ImportError as error:
        raise ValueError(
            f"transformers loads the models ({error}): pip install '.[hf]' in a clone"
        ) from error
    return transformers


def _format(model: Any) -> str:
    from ..layers import FP8Linear, GroupedExperts

    is_fp8 = any(isinstance(x, FP8Linear | GroupedExperts) for x in model.modules())
    return f"{model.config.model_type} in {'FP8' if is_fp8 else 'BF16'}"


def _weight_bytes(model: Any) -> int:
    """Of all tensors, each once."""
    return sum(x.numel() * x.element_size() for x in chain(model.parameters(), model.buffers()))
