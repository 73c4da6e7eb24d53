"""Faults that the kit's page claims to notice, put into modules: the page's own blocks fail."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from types import CodeType
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import Phase, settings
from torch import nn

from moefp8 import FP8Linear, GroupedExperts
from moefp8.testing import reference_model
from tests.test_docs import PYTHON, README, REPOSITORY, blocks_of

PAGE = REPOSITORY / "docs" / "testing.md"


def code_of(page: Path, *texts: str) -> list[CodeType]:
    """The blocks of the page that have these texts, one for each."""
    codes = []
    for text in texts:
        (block,) = (x for x in blocks_of(page) if x.kind == PYTHON and text in x.text)
        codes.append(compile("\n" * block.line + block.text, str(page), "exec"))
    return codes


# In the page's order, since each uses names of those before it.
BLOCKS = {
    "linear": code_of(PAGE, "FP8Linear.from_linear("),
    "experts": code_of(PAGE, "moe = MoE("),
    "drawn": code_of(PAGE, "@given("),
    "modules": code_of(PAGE, "module_errors(model"),
    "model": code_of(PAGE, "teacher_forced(model"),
    "gradients": code_of(PAGE, "import gradients", 'ours["gate.weight"]'),
}
README_BLOCK = code_of(README, "@given(")


@contextmanager
def drawing_alike() -> Iterator[None]:
    """Tests draw the same each time, and nothing simpler once they have failed."""
    options: dict[str, Any] = {"derandomize": True, "database": None}
    options |= {"phases": [Phase.generate], "report_multiple_bugs": False}
    before = settings.get_current_profile_name()
    settings.register_profile("alike", **options)
    settings.load_profile("alike")
    try:
        yield
    finally:
        settings.load_profile(before)


def run(codes: list[CodeType], namespace: dict[str, Any]) -> None:
    torch.manual_seed(0)
    with drawing_alike():
        for code in codes:
            exec(code, namespace)


@pytest.fixture(scope="module")
def namespaces() -> dict[str, dict[str, Any]]:
    """The names that each block starts with; right modules pass, as all blocks do in test_docs."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    names = {}
    for block, codes in BLOCKS.items():
        names[block] = dict(namespace)
        if block != "drawn":  # a hundred draws, and no names that others use
            run(codes, namespace)
    return names


# ---- Faults: functions of the right method that return a wrong one ----

Method = Callable[..., Any]
Change = Callable[[torch.Tensor], torch.Tensor]


def wrong_result(change: Callable[[Any], Any]) -> Callable[[Method], Method]:
    return lambda right: lambda *args: change(right(*args))


def wrong_inputs(change: Callable[..., tuple[torch.Tensor, ...]]) -> Callable[[Method], Method]:
    """change: of x, or of hidden states, ids and scores."""
    return lambda right: lambda module, *inputs: right(module, *change(*inputs))


def wrong_module(change: Callable[[nn.Module], nn.Module]) -> Callable[[Method], Method]:
    """change: of a copy of the module."""
    return lambda right: lambda module, *inputs: right(change(copy.deepcopy(module)), *inputs)


def changed_values(change: Change, *names: str) -> Callable[[nn.Module], nn.Module]:
    """change: of parameters whose names end so."""

    def changed(module: nn.Module) -> nn.Module:
        for name, parameter in module.named_parameters():
            if name.endswith(names):
                parameter.data = change(parameter.data)
        return module

    return changed


def changed_attribute(name: str, value: Any) -> Callable[[nn.Module], nn.Module]:
    def changed(module: nn.Module) -> nn.Module:
        setattr(module, name, value)
        return module

    return changed


def wrong_backward(fault: Callable[[Method], Method]) -> Callable[[Method], Method]:
    """The outputs are right; the gradients are those of the faulty method."""

    def both(right: Method) -> Method:
        def forward(*args: Any) -> torch.Tensor:
            wrong = fault(right)(*args)
            return right(*args).detach() + (wrong - wrong.detach())

        return forward

    return both


def wrong_gradient(change: Change) -> Callable[[Method], Method]:
    """change: of the gradient of hidden states."""

    def hooked(x: torch.Tensor, *routing: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x = x.view_as(x)
        if x.requires_grad:
            x.register_hook(change)
        return x, *routing

    return wrong_inputs(hooked)


def in_third_call(fault: Callable[[Method], Method]) -> Callable[[Method], Method]:
    def once(right: Method) -> Method:
        calls = count(1)
        return lambda *args: (fault(right) if next(calls) == 3 else right)(*args)

    return once


def unquantized(right: Method) -> Method:
    return lambda module, *inputs: reference_model(module, quantize_activations=False)(*inputs)


def filled(x: torch.Tensor, value: float, rows: slice, columns: slice) -> torch.Tensor:
    mask = torch.zeros(x.shape, dtype=torch.bool)
    mask[rows, columns] = True
    return x.masked_fill(mask, value)


FIRST, ALL = slice(1), slice(None)


def first_row(value: float, columns: slice = ALL) -> Change:
    return lambda x: filled(x, value, FIRST, columns)


def rows_swapped(x: torch.Tensor) -> torch.Tensor:
    return torch.cat([x[1:2], x[:1], x[2:]])


def halves_swapped(x: torch.Tensor) -> torch.Tensor:
    """x: [E, 2I, H], or its scales."""
    return torch.cat(x.chunk(2, dim=1)[::-1], dim=1)


def first_scale_wrong(scale_inv: torch.Tensor) -> torch.Tensor:
    scale_inv = scale_inv.clone()
    scale_inv[..., 0, 0] *= 1.5
    return scale_inv


def next_scales(scale_inv: torch.Tensor) -> torch.Tensor:
    return scale_inv.roll(1, -1)


def transposed(scale_inv: torch.Tensor) -> torch.Tensor:
    return scale_inv.mT.reshape(scale_inv.shape)


def last_block_lost(x, *routing):
    return filled(x, 0, ALL, slice(-128, None)), *routing


def one_scale_twice(x, *routing):
    return torch.where(filled(torch.zeros(x.shape), 1, FIRST, slice(128)) == 1, 2 * x, x), *routing


def two_experts_swapped(x, ids, scores):
    return x, torch.where(ids < 2, 1 - ids, ids), scores


def all_held_here(x, ids, scores):
    return x, ids % 4, scores


def choices_swapped(x, ids, scores):
    return x, ids, scores.flip(-1)


def one_choice_lost(x, ids, scores):
    return x, ids, filled(scores, 0, FIRST, FIRST)


def scores_detached(x, ids, scores):
    return x, ids, scores.detach()


class Fault(NamedTuple):
    """blocks: those that notice it. methods: those that have it."""

    blocks: str
    wrong: Callable[[Method], Method]
    methods: tuple[tuple[type[nn.Module], str], ...]


LINEAR_FORWARD, EXPERTS_FORWARD = (FP8Linear, "forward"), (GroupedExperts, "forward")
STORED_LINEAR, STORED_EXPERTS = (FP8Linear, "from_linear"), (GroupedExperts, "from_weights")
SCALES, GATE_UP, GATE_UP_SCALES = "scale_inv", "gate_up_proj", "gate_up_proj_scale_inv"


def in_both(blocks: str, wrong: Callable[[Method], Method]) -> Fault:
    return Fault(blocks, wrong, (LINEAR_FORWARD, EXPERTS_FORWARD))


def in_experts(blocks: str, wrong: Callable[[Method], Method]) -> Fault:
    return Fault(blocks, wrong, (EXPERTS_FORWARD,))


FORWARD, TIGHT = "linear, experts, drawn, modules, model", "linear, experts, modules, model"
ROUTED = "experts, drawn"
FAULTS = {
    "all is zero": in_both(FORWARD, wrong_result(torch.zeros_like)),
    "one row is lost": in_both(FORWARD, wrong_result(first_row(0))),
    "one row is lost in one layer": in_both("modules", in_third_call(wrong_result(first_row(0)))),
    "two tokens get each other's rows": in_both(FORWARD, wrong_result(rows_swapped)),
    "one element is NaN": in_both(FORWARD, wrong_result(first_row(torch.nan, FIRST))),
    "all is one percent too large": in_both(TIGHT, wrong_result(lambda y: y * 1.01)),
    "activations are not quantized": in_both(TIGHT, unquantized),
    "one scale of activations is wrong": in_both(FORWARD, wrong_inputs(one_scale_twice)),
    "the last 128 columns are lost": in_both(FORWARD, wrong_inputs(last_block_lost)),
    "one scale of weights is wrong": in_both(
        FORWARD, wrong_module(changed_values(first_scale_wrong, SCALES))
    ),
    "a weight's scales are those of the next block": in_both(
        FORWARD, wrong_module(changed_values(next_scales, SCALES))
    ),
    "a weight's scales are transposed": in_both(
        FORWARD, wrong_module(changed_values(transposed, SCALES))
    ),
    "a weight is stored with the scales of the next block": Fault(
        "linear, drawn",
        wrong_result(changed_values(next_scales, SCALES)),
        (STORED_LINEAR, STORED_EXPERTS),
    ),
    "the bias is left out": Fault(
        "linear, modules, model", wrong_module(changed_attribute("bias", None)), (LINEAR_FORWARD,)
    ),
    "gate and up are swapped": in_experts(
        ROUTED, wrong_module(changed_values(halves_swapped, GATE_UP, GATE_UP_SCALES))
    ),
    "gate and up have each other's scales": in_experts(
        ROUTED, wrong_module(changed_values(halves_swapped, GATE_UP_SCALES))
    ),
    "gate and up are stored in each other's place": Fault(
        "drawn",
        wrong_result(changed_values(halves_swapped, GATE_UP, GATE_UP_SCALES)),
        (STORED_EXPERTS,),
    ),
    "gate and up are clamped": in_experts(
        ROUTED, wrong_module(changed_attribute("swiglu_limit", 1.0))
    ),
    "two experts are swapped": in_experts(ROUTED, wrong_inputs(two_experts_swapped)),
    "a token's choices get each other's weights": in_experts(ROUTED, wrong_inputs(choices_swapped)),
    "one choice of a token is lost": in_experts(ROUTED, wrong_inputs(one_choice_lost)),
    "a choice that is held elsewhere counts": in_experts("drawn", wrong_inputs(all_held_here)),
    "a layer passes no gradient": in_both("gradients", wrong_result(torch.Tensor.detach)),
    "two tokens get each other's gradients": in_both("gradients", wrong_gradient(rows_swapped)),
    "gradients are twice as large": in_both("gradients", wrong_gradient(lambda grad: 2 * grad)),
    "gradients are made with the scales of the next block": in_both(
        "gradients", wrong_backward(wrong_module(changed_values(next_scales, SCALES)))
    ),
    "weights of choices get no gradient": in_experts("gradients", wrong_inputs(scores_detached)),
}


def put_in(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _, wrong, methods = FAULTS[fault]
    for owner, name in methods:
        method = wrong(getattr(owner, name))
        monkeypatch.setattr(owner, name, method if name == "forward" else staticmethod(method))


@pytest.mark.parametrize(
    ("fault", "block"), [(x, y) for x in FAULTS for y in FAULTS[x].blocks.split(", ")]
)
def test_the_page_notices(fault, block, namespaces, monkeypatch):
    put_in(fault, monkeypatch)
    with pytest.raises(AssertionError):
        run(BLOCKS[block], dict(namespaces[block]))


@pytest.mark.parametrize(
    "fault", [x for x, y in FAULTS.items() if "drawn" in y.blocks and EXPERTS_FORWARD in y.methods]
)
def test_the_readme_notices(fault, monkeypatch):
    put_in(fault, monkeypatch)
    with pytest.raises(AssertionError):
        run(README_BLOCK, {"__name__": "__main__"})


def test_the_page_lists_these_faults():
    _, _, section = PAGE.read_text().partition("| fault | noticed by |\n|---|---|\n")
    rows = [line.strip("| ").split(" | ") for line in section.partition("\n\n")[0].splitlines()]
    assert rows == [[fault, blocks] for fault, (blocks, *_) in FAULTS.items()]
