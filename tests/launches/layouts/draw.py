"""How a layout is drawn: sizes, dtypes and places of tensors, the same on every machine.

T tokens, k choices each, E experts, H hidden, I intermediate.

A value that is added to a list here draws other layouts. Record them on the library as it was, in
a commit of its own: else nobody sees whether the library launches something else.
"""

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar
from unittest import mock

import torch
from torch import nn

from moefp8.kernels import E4M3, num_blocks, round_up, set_num_sms
from moefp8.kernels.common.activation import Activation
from moefp8.kernels.jit import Kernel
from tests.launches.gpu import NUM_SMS, Library, recording
from tests.launches.record import Record, record_of

T = TypeVar("T")
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
INT32, INT64 = torch.int32, torch.int64
DTYPES = BF16, BF16, BF16, FP16, FP32
TOKENS = (
    *(1, 1, 2, 3, 4, 7, 8, 15, 16, 17, 31, 32, 33, 48, 63, 64, 65, 96, 100, 127, 128, 129, 200),
    *(255, 256, 257, 384, 500, 512, 513, 777, 1000, 1024, 1025, 1536, 2000, 2048, 2049, 3000),
    *(4096, 4100, 5000, 8192, 10000, 12345, 16384),
)
WGRADS = "128x1", "128x1", "128x128", "bf16"
LIMITS = None, None, None, 0.0, 7.0, 10.0
ACTIVATIONS = "swiglu", "swiglu", "swiglu", "geglu", "geglu_tanh", "gpt_oss"
SMS = (NUM_SMS,) * 10 + (114, 78)  # of an H200, an H100 PCIe and an H20
Result = torch.Tensor | Mapping[str, Any] | Sequence[Any] | None


class Model(NamedTuple):
    """Routed experts of a layer: H, I, E, k."""

    hidden_size: int
    intermediate_size: int
    num_experts: int
    top_k: int


MODELS = {
    "qwen3-30b": Model(2048, 768, 128, 8),
    "qwen3-235b": Model(4096, 1536, 128, 8),
    "qwen1.5-moe": Model(2048, 1408, 60, 4),
    "deepseek-v3": Model(7168, 2048, 256, 8),
    "deepseek-v2-lite": Model(2048, 1408, 64, 6),
    "kimi-k2": Model(7168, 2048, 384, 8),
    "glm-4.5": Model(5120, 1536, 160, 8),
    "glm-4.5-air": Model(4096, 1408, 128, 8),
    "mixtral": Model(4096, 14336, 8, 2),
    "gpt-oss": Model(2880, 2880, 32, 4),
    "small": Model(256, 128, 8, 2),
    "small-many": Model(512, 256, 512, 10),
    "tiny": Model(64, 32, 4, 1),
    "of-8": Model(264, 72, 5, 2),
    "of-16": Model(400, 176, 6, 3),
    "one-expert": Model(1024, 512, 1, 1),
    "odd": Model(201, 133, 7, 3),
    "odd-hidden": Model(1001, 384, 9, 4),
    "odd-inner": Model(640, 331, 4, 4),
    "long": Model(8192, 3072, 16, 2),
}
# Sizes of linears: N weights, K.
LINEARS = (
    *((2048, 2048), (4096, 2048), (768, 2048), (2048, 768), (5120, 2048), (151936, 2048)),
    *((7168, 2048), (2112, 7168), (24576, 1536), (32768, 512), (7168, 16384), (4096, 4096)),
    *((14336, 4096), (4096, 14336), (2880, 2880), (128, 128), (256, 512), (64, 64), (8, 16)),
    *((136, 272), (200, 400), (520, 1040), (1000, 1008), (201, 133), (1, 1), (333, 1000)),
    *((1001, 384), (3, 4096), (4095, 128), (129, 129), (1408, 2048), (12, 640)),
)


class Draw:
    """What is drawn of a layout, by a seed of its own: other layouts change nothing of it."""

    def __init__(self, seed: str) -> None:
        self._random = random.Random(seed)
        self._activations = random.Random(f"{seed} activation")
        self._biases = random.Random(f"{seed} biases")
        self._notes: list[str] = []
        self.num_sms = NUM_SMS
        self.inputs: dict[str, torch.Tensor] = {}

    def note(self, words: str) -> None:
        """Add to the layout's description."""
        self._notes.append(words)

    @property
    def description(self) -> str:
        return " ".join(self._notes)

    def among(self, choices: Iterable[T], name: str = "") -> T:
        """One of them; its name goes into the layout's description."""
        choices = tuple(choices)
        # Of the methods of Random, this one gives the same in every version of Python.
        chosen = choices[int(self._random.random() * len(choices))]
        if name:
            text = str(chosen).removeprefix("torch.").replace(" ", "")
            self.note(f"{name}={text}")
        return chosen

    def activation(self) -> Activation:
        """Its kind has a seed of its own, which changes nothing else of the layout."""
        limit = self.among(LIMITS, "limit")
        kind = ACTIVATIONS[int(self._activations.random() * len(ACTIVATIONS))]
        self.note(f"activation={kind}")
        return Activation(kind, limit)

    def biased(self) -> bool:
        """Whether experts have biases: once in five layouts, by a seed of its own."""
        has_biases = self._biases.random() < 0.2
        if has_biases:
            self.note("biases")
        return has_biases

    def flag(self, name: str, of: int = 2) -> bool:
        """Whether it is so: once in `of` layouts."""
        return self.among((True,) + (False,) * (of - 1), name)

    def up_to(self, most: int) -> int:
        return int(self._random.random() * (most + 1))

    def model(self) -> Model:
        return MODELS[self.among(MODELS, "model")]

    def tokens(self, most: int = TOKENS[-1]) -> int:
        return self.among([x for x in TOKENS if x <= most], "T")

    # ---- Tensors ----

    def tensor(
        self, name: str, shape: Sequence[int], dtype: torch.dtype, places: Sequence[str] = ("own",)
    ) -> torch.Tensor:
        """A tensor without values, which the record calls by its name, in one of the places."""
        place = self.among(places)
        if place != "own":
            self.note(f"{name}:{place}")
        made = PLACES[place](tuple(shape), dtype)
        self.inputs[name] = made
        return made

    def scales(
        self, name: str, shape: Sequence[int], places: Sequence[str] = ("own",)
    ) -> torch.Tensor:
        return self.tensor(name, shape, FP32, places)

    def weight(
        self, name: str, *shape: int, parts: int = 1, places: Sequence[str] = ("own",)
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Codes [..., N, K] and their scales, those of each part apart."""
        *batch, n, k = shape
        blocks = [*batch, parts * num_blocks(n // parts), num_blocks(k)]
        return self.tensor(name, shape, E4M3, places), self.scales(f"{name}_scale_inv", blocks)

    def choices(self, num_tokens: int, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Ids of experts and their scores, [T, k]."""
        ids = self.tensor("ids", (num_tokens, top_k), self.among((INT64, INT64, INT32), "ids"))
        scores = self.tensor("scores", (num_tokens, top_k), self.among(SCORES, "scores"), TURNED)
        return ids, scores

    def module(self, module: nn.Module) -> Any:
        """A layer, whose parameters the record calls by their names."""
        for name, x in (*module.named_parameters(), *module.named_buffers()):
            self.inputs[name] = x
        return module


SCORES = FP32, FP32, FP32, BF16, FP16


# ---- Places ----


def _empty(size: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(size, dtype=dtype, device="meta")


def _strided(
    shape: tuple[int, ...], dtype: torch.dtype, pitch: int, offset: int = 0
) -> torch.Tensor:
    """Matrices one after the other, whose rows are `pitch` elements apart."""
    *batch, rows, columns = (1, *shape) if len(shape) == 1 else shape
    strides, step = [pitch, 1], rows * pitch
    for size in reversed(batch):
        strides.insert(0, step)
        step *= size
    made = _empty(offset + step + columns, dtype)
    return made.as_strided(shape, strides[-len(shape) :], offset)


def _turned(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty((*shape[:-2], shape[-1], shape[-2]), dtype=dtype, device="meta").mT


def _tma_aligned(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Rows innermost, as scales of activations are that our quantization makes."""
    *batch, rows, columns = shape
    return _strided((*batch, columns, rows), dtype, round_up(rows, 4)).mT


PLACES: dict[str, Callable[[tuple[int, ...], torch.dtype], torch.Tensor]] = {
    "own": lambda shape, dtype: torch.empty(shape, dtype=dtype, device="meta"),
    "later": lambda shape, dtype: _strided(shape, dtype, shape[-1], 64),
    "wide": lambda shape, dtype: _strided(shape, dtype, round_up(shape[-1] + 1, 16) + 16),
    "odd pitch": lambda shape, dtype: _strided(shape, dtype, shape[-1] + 3),
    "odd address": lambda shape, dtype: _strided(shape, dtype, round_up(shape[-1], 16), 1),
    "8 bytes on": lambda shape, dtype: _strided(
        shape, dtype, round_up(shape[-1], 16), 8 // dtype.itemsize
    ),
    "turned": _turned,
    "rows innermost": _tma_aligned,
    "one row": lambda shape, dtype: torch.empty(shape[-1], dtype=dtype, device="meta").expand(
        shape
    ),
}
MOSTLY = "own", "own", "own", "own"
ROWS = *MOSTLY, "later", "wide", "odd pitch", "odd address", "8 bytes on"  # columns are contiguous
ANY = *ROWS, "turned", "one row"
ALIGNED = *MOSTLY, "later", "wide"
TURNED = *MOSTLY, *MOSTLY, "turned"
ACTIVATION_SCALES = "rows innermost", "rows innermost", "own", "odd pitch"


# ---- Layouts ----


class Listed(tuple[Kernel, ...]):
    """The kernels that a layer is said to need, in place of the results of a call."""


class Drawing(NamedTuple):
    """draw: draws a layout and returns its call. count: how many there are."""

    draw: Callable[[Draw], Callable[[], Result]]
    count: int


OPS: dict[str, Drawing] = {}


def layouts(op: str, count: int) -> Callable[[Any], Any]:
    """Registers a function that draws a layout of an op."""

    def register(draw: Callable[[Draw], Callable[[], Result]]) -> Any:
        OPS[op] = Drawing(draw, count)
        return draw

    return register


@dataclass(frozen=True)
class Layout:
    """One call of an op, by its number."""

    op: str
    number: int

    @property
    def id(self) -> str:
        return f"{self.op}/{self.number}"

    def record(self, library: Library | None = None) -> tuple[str, Record]:
        """What is drawn, in words, and what the call launches on a GPU of its own."""
        draw = Draw(self.id)
        call = OPS[self.op].draw(draw)
        draw.num_sms = draw.among(SMS, "sms")
        with recording(library, draw.num_sms) as driver, _not_pinned():
            if draw.flag("limited", 12):
                set_num_sms(100)
            result = call()
            listed = result if isinstance(result, Listed) else ()
            record = record_of(driver, draw.inputs, dict(_named(result, "y")), listed)
        return draw.description, record


def _named(result: Result, name: str) -> Iterable[tuple[str, torch.Tensor]]:
    """The tensors of a result, which may be nested, by names."""
    if isinstance(result, torch.Tensor):
        yield name, result
    elif isinstance(result, Mapping):
        for key, value in result.items():
            yield from _named(value, str(key))
    elif isinstance(result, Sequence):
        for i, value in enumerate(result):
            yield from _named(value, f"{name}{i}")


def _not_pinned() -> Any:
    """Only where there is a GPU can memory be pinned."""
    return mock.patch.object(torch.Tensor, "pin_memory", lambda x: x)


def step(y: torch.Tensor, grad: torch.Tensor, **inputs: torch.Tensor) -> dict[str, Any]:
    """The result of a forward, and the gradients that its backward gives."""
    if y.requires_grad:
        y.backward(grad)
    grads = {f"grad_of_{name}": x.grad for name, x in inputs.items() if x.grad is not None}
    return {"y": y, **grads}
