"""transformers' own server, `transformers serve`, over an FP8 checkpoint in moefp8's modules.

The server is transformers' alone: it is called by its command line. For a checkpoint that says
`fp8` it would take transformers' own quantizer, and it has no option for another. So this process
enters ours into transformers' table of quantizers, under that name, before it starts the server.
"""

import os
from collections.abc import Sequence
from functools import wraps
from typing import Any

from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING
from transformers.utils.import_utils import is_serve_available

from ..checkpoint.files.config import format_name, format_problem, quantization_of, read_config
from ..layers import set_batch_invariant
from .decoding import DecodingGraphs
from .quantizer import FP8Quantizer

_STORED_METHOD = "fp8"  # what config.json says


def serve(
    directory: str,
    options: Sequence[str] = (),
    *,
    graphs: bool = True,
    compile: bool = False,
    batch_invariant: bool = False,
) -> None:
    """Run `transformers serve directory *options` in this process until it is stopped.

    Args:
        directory: an FP8 checkpoint whose config.json says `fp8`, with its tokenizer.
        options: further ones of `transformers serve`, such as ["--port", "8000"].
        graphs, compile, batch_invariant: as in `load_fp8_checkpoints`. Continuous batching, an
            option of transformers, generates by itself.

    Raises ValueError for another directory, and for packages of the server that are missing. It
    ends with SystemExit, as transformers' command does.
    """
    _check(directory)
    if not is_serve_available():
        raise ValueError(
            "serve: transformers' server needs further packages; pip install "
            "'transformers[serving]'"
        )
    load_fp8_checkpoints(graphs=graphs, compile=compile, batch_invariant=batch_invariant)
    from transformers.cli.transformers import app  # it needs packages of the server

    app(["serve", directory, *options], prog_name="transformers")


def load_fp8_checkpoints(*, graphs: bool, compile: bool, batch_invariant: bool) -> None:
    """Let `from_pretrained` load checkpoints that say `fp8` into moefp8's modules, in this process.

    Args:
        graphs, compile: whether `model.generate` is that of `DecodingGraphs`, and whether its steps
            are fused.
        batch_invariant: see `set_batch_invariant`.
    """

    class Quantizer(FP8Quantizer):
        def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
            model = super()._process_model_after_weight_loading(model, **kwargs)
            if batch_invariant:
                set_batch_invariant(model)
            if graphs:
                _generate_by_graphs(model, compile)
            return model

    AUTO_QUANTIZER_MAPPING[_STORED_METHOD] = Quantizer


def _check(directory: str) -> None:
    if not os.path.isdir(directory):
        raise ValueError(f"serve: there is no directory {directory}")
    config = read_config(directory)
    stored = quantization_of(config)
    if stored is None:
        raise ValueError(
            f"serve: {directory} must be an FP8 checkpoint, but its config.json has no "
            "quantization_config; python -m moefp8 quantize makes one of a checkpoint in 16 bits"
        )
    if problem := format_problem(config):
        raise ValueError(f"serve: {directory}: {problem}")
    if (method := stored.get("quant_method")) != _STORED_METHOD:
        raise ValueError(
            f"serve: {directory}: quant_method in config.json must be {_STORED_METHOD!r}, got "
            f"{method!r} ({format_name(config)}); load it with moefp8.hf.pretrained_config, and "
            "save_pretrained"
        )


def _generate_by_graphs(model: Any, compile: bool) -> None:
    """Let `model.generate` be that of `DecodingGraphs`, which comes back here to prepare.

    Requests with `stop` run as transformers generates, since it has no tokenizer for strings to
    stop at where a decoding loop is not its own.
    """
    as_it_was = model.generate
    graphs = DecodingGraphs(model, compile=compile)

    @wraps(as_it_was)
    def generate(*args: Any, **kwargs: Any) -> Any:
        has_stops = getattr(kwargs.get("generation_config"), "stop_strings", None) is not None
        if has_stops or kwargs.get("custom_generate") is not None:
            return as_it_was(*args, **kwargs)
        try:
            return graphs.generate(*args, **kwargs)
        except ValueError as error:
            raise ValueError(f"{error}; or serve with --no-graphs") from error

    model.generate = generate
