"""Run blocks that call their experts one by one, and compare with what `ConvertedMoE` computes.

T tokens, E experts, H hidden, I intermediate, k choices, F formulas.
"""

import math
from collections.abc import Sequence
from contextlib import suppress
from itertools import permutations, product
from typing import Any, NamedTuple

import torch
from torch import nn

from ...functional.activation import activate
from .converted_moe import SCORINGS, Formula
from .expert_lists import ExpertList, Leaves, tensors_problem
from .probe import (
    FEW_TOKENS,
    MAX_CHOICES,
    NAMED_WORK,
    NARROW,
    TOKEN_SIZES,
    TOLERANCE,
    USUAL_TOKENS,
    USUAL_WORK,
    make_of,
    numbers_of,
    product_fp32,
)
from .source_code import in_reach
from .trial import attributes_of, drawn_weights, fingerprint

# Two scores that differ by less may be a tie once they are rounded to FP32, or to 16 bits. What a
# block chooses of such is not compared. They are logits, or their sigmoids.
_CLEAR = {"softmax": (1e-4, 0.02), "sigmoid": (1e-5, 0.01)}
_SEEN = 0.02  # an expert of a larger weight shows in the output
_FEW_TOKENS = 16
# Directions of more experts than that are too near to each other in NARROW dimensions: the router
# would choose some for no token.
_NARROW_EXPERTS, _LESS_NARROW = 16, 4 * NARROW
_MAX_PAIRS = 1 << 21  # tokens times experts of one call: a block may compute all of them

Tensors = Sequence[torch.Tensor]


class Tried(NamedTuple):
    """The result of a trial.

    leaves: the names of gate, up and down if each expert computes SwiGLU, else None; one name may
    hold gate and up. formula: how the block chooses, or None; problem then says why its experts
    cannot be stacked.
    """

    leaves: Leaves | None
    formula: Formula | None
    problem: str


@torch.no_grad()
def try_list(block: nn.Module, experts: ExpertList, known: dict[Any, Tried]) -> Tried:
    """Run `block` and its experts, unless a block of the same make is among those known.

    A block that is in training mode has to compute the same in both modes. The state of PyTorch's
    random numbers stays as it is.
    """
    make = make_of(block, in_reach(block))
    key = make, experts.name, experts.leaves, *(module.training for module in block.modules())
    if make is None or key not in known:
        device = experts.weights(block)[0][0].device
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            torch.random.default_generator.manual_seed(0)  # so that a dropout is the same each time
            known[key] = _try(block, experts)
    return known[key]


def _try(block: nn.Module, experts: ExpertList) -> Tried:
    leaves = _leaves_of_all(block, experts)
    problem = tensors_problem(block, experts)
    if problem is None and leaves is None:
        fused = ", gate rows first" if len(experts.leaves) == 2 else ""
        problem = (
            f"its experts must compute down(silu(gate(x)) * up(x)){fused}, and compute something "
            "else"
        )
    if problem is not None or leaves is None:
        return Tried(leaves, None, problem or "")
    formulas, problem = _try_block(block, experts.with_leaves(leaves))
    return Tried(leaves, None if problem else formulas[0], problem or "")


def _narrowed(
    experts: ExpertList, widest: int | None
) -> tuple[dict[str, tuple[int, ...]], dict[int, int]]:
    """Shapes of the block's weights whose H and I are at most `widest`, and sizes replaced."""
    e, h, i = experts.sizes
    narrow_h, narrow_i = (min(size, widest or size) for size in (h, i))
    shapes: dict[str, tuple[int, ...]] = {f"{experts.gate}.weight": (e, narrow_h)}
    *gate_up, down = experts.leaves
    rows, narrow_rows = (2 * size // len(gate_up) for size in (i, narrow_i))
    for leaf in gate_up:
        shape = narrow_rows, narrow_h
        shapes |= {f"{name}.weight": shape for name in experts.names_of(leaf)}
    shapes |= {f"{name}.weight": (narrow_h, narrow_i) for name in experts.names_of(down)}
    sizes = {rows: narrow_rows, i: narrow_i, h: narrow_h}
    sizes.pop(e, None)  # it is more likely the number of experts
    return shapes, sizes


# ---- Experts ----


def _leaves_of_all(block: nn.Module, experts: ExpertList) -> Leaves | None:
    """The names of gate, up and down, if they are the same in all experts."""
    by_make: dict[Any, Leaves | None] = {}
    for expert in block.get_submodule(experts.name).children():
        make = tuple(
            (path, type(child), name, fingerprint(x))
            for path, child in expert.named_modules()
            for name, x in (("", None), *attributes_of(child).items())
        )
        if make not in by_make:
            by_make[make] = _leaves_of(expert, experts)
    return by_make.popitem()[1] if len({*by_make.values()}) == 1 else None


def _leaves_of(expert: nn.Module, experts: ExpertList) -> Leaves | None:
    random = torch.Generator().manual_seed(0)
    names = [f"{leaf}.weight" for leaf in experts.leaves]
    for widest in (NARROW, None):
        shapes, sizes = _narrowed(experts, widest)
        own = {name: shapes[f"{experts.name}.{experts.keys[0]}.{name}"] for name in names}
        drawn = drawn_weights(expert, random, False, own, sizes, dtype=torch.float32)
        with drawn, suppress(Exception):  # a forward of others may raise anything
            weights = {x: expert.get_parameter(f"{x}.weight").detach() for x in experts.leaves}
            device = weights[experts.leaves[0]].device
            with torch.autocast(device.type, enabled=False):
                x = _drawn((6, own[names[0]][1]), random) * _in_turn(TOKEN_SIZES, 6)
                x = x.to(device)
                came = expert.forward(x.clone())
            for leaves in permutations(experts.leaves):
                *gate_up, down = matrices = [weights[leaf] for leaf in leaves]
                shape = 2 * down.shape[1] // len(gate_up), down.shape[0]
                if all(weight.shape == shape for weight in gate_up):
                    errors = _errors(came, _expert(x, matrices))
                    if came.shape == x.shape and float(errors.max()) < TOLERANCE[torch.float32]:
                        return leaves
    return None


def _expert(x: torch.Tensor, weights: Tensors) -> torch.Tensor:
    """weights: gate and up, or both in one, and down."""
    *gate_up, down = weights
    gate, up = torch.cat([product_fp32(x, weight) for weight in gate_up], dim=-1).chunk(2, dim=-1)
    return product_fp32(activate(gate, up), down)


def _errors(came: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """The relative error of each row."""
    return ((came - wanted).norm(dim=-1) / wanted.norm(dim=-1)).nan_to_num(torch.inf)


def _drawn(shape: tuple[int, int], random: torch.Generator) -> torch.Tensor:
    return torch.randn(shape, generator=random, dtype=torch.float32, device="cpu")


def _in_turn(sizes: Sequence[float], count: int) -> torch.Tensor:
    """fp32 [count, 1] of the sizes in turn."""
    each = torch.tensor(sizes, dtype=torch.float32, device="cpu")
    return each[torch.arange(count, device="cpu") % len(sizes), None]


# ---- Blocks ----


class _Trial(NamedTuple):
    """One width, dtype and mode. is_whole: with many tokens, too, and those of all experts."""

    widest: int | None
    dtype: torch.dtype
    training: bool
    is_whole: bool = True


def _try_block(block: nn.Module, experts: ExpertList) -> tuple[list[Formula], str | None]:
    """Return the formulas that fit, and the problem if none does.

    Many tokens are tried with narrow weights. A block that takes one width alone is run at that.
    """
    formulas = [
        Formula(scoring, renormalize, top_k, gives_logits)
        for top_k in range(1, min(experts.sizes[0], MAX_CHOICES) + 1)
        for scoring, renormalize, gives_logits in product(SCORINGS, (True, False), (False, True))
    ]
    own = experts.weights(block)[0][0].dtype
    modes = sorted({False, any(module.training for module in block.modules())})
    dtypes = dict.fromkeys((torch.float32, own))
    last = _Trial(None, own, modes[-1], is_whole=False)
    widest = NARROW if experts.sizes[0] <= _NARROW_EXPERTS else _LESS_NARROW
    narrow = [_Trial(widest, *form) for form in product(dtypes, modes)]
    fitting, problem, has_raised = _run(block, experts, [*narrow, last], formulas)
    if has_raised:  # it may know H or I
        wide = [_Trial(None, torch.float32, mode) for mode in modes]
        fitting, problem, _ = _run(block, experts, [*wide, last], formulas)
    if problem is None and len({formula.top_k for formula in fitting}) > 1:
        problem = "its forward must show how many experts it chooses"
    return fitting, problem


def _run(
    block: nn.Module, experts: ExpertList, trials: Sequence[_Trial], formulas: list[Formula]
) -> tuple[list[Formula], str | None, bool]:
    """Return the formulas that fit, the problem, and whether that is an error of the forward."""
    lists = [[f"{name}.weight" for name in experts.names_of(leaf)] for leaf in experts.leaves]
    for trial in trials:
        random = torch.Generator().manual_seed(0)
        shapes, sizes = _narrowed(experts, trial.widest)
        drawn = drawn_weights(block, random, trial.training, shapes, sizes, lists, trial.dtype)
        with drawn as (stacks, changed):
            comparison = _Comparison(block, experts.gate, stacks, formulas, random)
            has_raised = False
            with torch.autocast(stacks[0].device.type, enabled=False):
                try:
                    problem = comparison.with_few()
                    reach = in_reach(block)
                    if problem is None and trial.is_whole:
                        problem = comparison.with_many(numbers_of(reach.values))
                    change = changed(reach)
                except _ForwardError as error:
                    problem, has_raised, change = str(error), True, ""
        if problem is None and change:
            problem = f"its forward must change nothing in it, and changes {change}"
        if problem is not None:
            way_out = " in training mode (call model.eval() before, if it is only to serve)"
            return [], problem + (way_out if trial.training else ""), has_raised
        formulas = comparison.formulas
    return formulas, None, False


class _ForwardError(Exception):
    """Wraps an error of a block's forward."""


class _Comparison:
    """Calls of a block, and the formulas that fit its outputs so far.

    stacks: gate and up [E, I, H], or both in one [E, 2I, H], and down [E, H, I]. gate: the name of
    its router, which has to be called once, with all tokens as they are, so that `ConvertedMoE`
    gets the same logits.
    """

    def __init__(
        self,
        block: nn.Module,
        gate: str,
        stacks: Tensors,
        formulas: list[Formula],
        random: torch.Generator,
    ) -> None:
        self.formulas = formulas
        self._block, self._name, self._gate = block, gate, block.get_submodule(gate)
        self._stacks, self._random = stacks, random
        self._logits = stacks[0].new_empty(0)  # those of the last call
        self._dims: list[int] = []  # how many dimensions its input may have
        # Large tokens show a clamp. In 16 bits, the weights of their choices would be rounded much.
        is_exact = stacks[0].dtype == torch.float32
        self._sizes = TOKEN_SIZES if is_exact else TOKEN_SIZES[:2]

    def with_few(self) -> str | None:
        """A few tokens as [T, H] and as [B, S, H], of which the block has to take one."""
        x, errors = self._tokens(_FEW_TOKENS), []
        for shape in ((_FEW_TOKENS,), (1, _FEW_TOKENS), (2, _FEW_TOKENS // 2)):
            try:
                problem = self._compare(x, 1, shape)
            except _ForwardError as error:
                errors.append(error)
                continue
            if problem is not None:
                return problem
            self._dims.append(len(shape) + 1)
        if not self._dims:
            raise errors[-1]
        return None

    def with_many(self, numbers: Sequence[int]) -> str | None:
        """Tokens of each expert in turn, then as many of one as each number, and one more."""
        num_experts, batch = len(self._stacks[0]), (2,) if 3 in self._dims else ()
        x = self._tokens(max(_FEW_TOKENS, num_experts + num_experts % 2), is_aimed=True)
        if problem := self._compare(x, 1, (*batch, len(x) // (2 if batch else 1))):
            return problem
        if not (_weights(self.formulas[0], self._logits) > _SEEN).any(dim=0).all():
            return "its router must choose each expert for some token, and for a small H may not"
        row = int(_gaps(self._logits, self.formulas[0]).argmax())
        for count in self._counts(numbers):
            try:
                problem = self._compare(x[row : row + 1], count, (1, count) if batch else (count,))
            except _ForwardError:
                if count > FEW_TOKENS:
                    continue  # a guard, which changes no result
                raise
            if problem is not None:
                return problem
        return None

    def _counts(self, numbers: Sequence[int]) -> list[int]:
        """How many tokens of one expert to try: around the numbers, as far as that is cheap."""
        num_experts, *sizes = self._stacks[-1].shape
        work = 3 * math.prod(sizes) * self.formulas[0].top_k
        usual = max(FEW_TOKENS, min(USUAL_TOKENS, USUAL_WORK // work)) + 1
        named = {n + i for n in numbers for i in (0, 1) if (n + i) * work <= NAMED_WORK}
        return [n for n in sorted({1, usual, *named}) if n * num_experts <= _MAX_PAIRS]

    def _tokens(self, count: int, is_aimed: bool = False) -> torch.Tensor:
        """[T, H] of several sizes. is_aimed: the router scores each expert highest in turn."""
        router = self._gate.get_parameter("weight").float().cpu()
        x = _drawn((count, router.shape[1]), self._random)
        if is_aimed:
            directions = nn.functional.normalize(router) * 3 * router.shape[1] ** 0.5
            x += directions[torch.arange(count, device="cpu") % len(router)]
        order = torch.randperm(count, generator=self._random, device="cpu")
        sizes = _in_turn(TOKEN_SIZES[:2] if is_aimed else self._sizes, count)
        return (x[order] * sizes).to(self._stacks[0])

    def _compare(self, rows: torch.Tensor, count: int, shape: tuple[int, ...]) -> str | None:
        """Call the block with rows, `count` times each; keep the formulas that fit."""
        x, calls = rows.repeat(count, 1).reshape(*shape, rows.shape[1]), list[Any]()
        taken = x.clone()
        handle = self._gate.register_forward_hook(
            lambda _, inputs, logits: calls.append(([y.clone() for y in inputs], logits.clone()))
        )
        try:
            came = self._block.forward(taken)
        except Exception as error:  # a forward of others may raise anything
            message = f"its forward of {list(x.shape)} raised {type(error).__name__}: {error}"
            raise _ForwardError(message[:300]) from error
        finally:
            handle.remove()
        if len(calls) != 1:
            return (
                f"its forward must call {self._name} once, for all tokens, got {len(calls)} calls"
            )
        inputs, logits = calls[0]
        if len(inputs) != 1 or not _is_equal(inputs[0].flatten(), x.flatten().to(inputs[0].dtype)):
            return f"its forward must call {self._name} with its input, got something else"
        logits = logits.reshape(count * len(rows), -1)
        y, *rest = came if type(came) is tuple else (came,)
        is_known = isinstance(y, torch.Tensor) and y.shape == x.shape and y.dtype == x.dtype
        if not is_known or not all(_is_equal(z, logits) for z in rest) or len(rest) > 1:
            return (
                "its forward must give a tensor in the shape and dtype of its input, or a tuple of "
                f"that and the logits [T, E] of {self._name}, got {_described(came)}"
            )
        if not torch.equal(taken, x):
            return "its forward must leave its input as it is, and changes it"
        self._logits = logits.float()
        self.formulas = [x for x in self.formulas if x.gives_logits == bool(rest)]
        if not self.formulas:
            return "its forward must give one tensor each time, or two each time, and gives both"
        return self._keep_fitting(y.reshape(count, *rows.shape).float(), rows)

    def _keep_fitting(self, came: torch.Tensor, rows: torch.Tensor) -> str | None:
        """came: fp32 [copies, T, H]."""
        logits = self._logits[: len(rows)]
        weights = torch.stack([_weights(x, logits) for x in self.formulas])
        wanted = rows.new_zeros(len(weights), *rows.shape, dtype=torch.float32)
        for expert in range(len(self._stacks[0])):
            token = weights[:, :, expert].any(dim=0).nonzero()[:, 0]
            if len(token):
                y = _expert(rows[token].float(), [x[expert] for x in self._stacks])
                wanted[:, token] += weights[:, token, expert, None] * y
        # In 16 bits, the weights are rounded, too: blocks were up to 1.4 % off in bf16.
        is_rounded = rows.dtype != torch.float32
        tolerance = TOLERANCE[rows.dtype] * (2 if is_rounded else 1)
        worst = {}
        for formula, each in zip(self.formulas, wanted, strict=True):
            is_clear = _gaps(logits, formula) > _CLEAR[formula.scoring][is_rounded]
            errors = _errors(came, each)[:, is_clear]
            worst[formula] = float(errors.max()) if errors.numel() else 0.0
        self.formulas = [x for x, off in worst.items() if off < tolerance]
        if self.formulas:
            return None
        off = max(1, round(100 * min(worst.values())))
        return (
            "its forward must weigh the experts of the k largest logits by softmax or sigmoid, and "
            f"sum them up: on {came.shape[0] * came.shape[1]} random tokens, rows are up to {off} "
            "% off"
        )


def _weights(formula: Formula, logits: torch.Tensor) -> torch.Tensor:
    """fp32 [T, E], zero where an expert is not chosen."""
    ids, weights = formula.choose(logits)
    return torch.zeros_like(logits).scatter(1, ids, weights)


def _gaps(logits: torch.Tensor, formula: Formula) -> torch.Tensor:
    """By how much the last score that is chosen exceeds the next one."""
    scores = logits if formula.scoring == "softmax" else logits.sigmoid()
    if formula.top_k == logits.shape[1]:
        return logits.new_full((len(logits),), torch.inf)
    best = scores.topk(formula.top_k + 1, dim=1).values
    return best[:, -2] - best[:, -1]


def _is_equal(x: Any, y: torch.Tensor) -> bool:
    return isinstance(x, torch.Tensor) and x.dtype == y.dtype and torch.equal(x, y)


def _described(came: Any) -> str:
    if isinstance(came, torch.Tensor):
        return f"{str(came.dtype).removeprefix('torch.')} {list(came.shape)}"
    return f"a {type(came).__name__}"
