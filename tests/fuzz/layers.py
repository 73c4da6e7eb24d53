"""What the fuzz tests draw for layers, the router and its plans: see `cases.py`.

T tokens, k choices each, E experts, H hidden, I intermediate.
"""

import math
from typing import NamedTuple

import torch
from hypothesis import strategies as st

from moefp8.kernels import num_blocks
from moefp8.kernels.common.activation import Activation
from tests.fuzz import cases as fuzz

IDS = "distinct", "any", "few", "out of range", "nowhere"
_FAR = -1, -5, 2**31 - 1, -(2**31)
_LIMITS = None, None, 0.0, 0.5, 7.0, 1e30, fuzz.INF


class Weights(NamedTuple):
    """Weights of a linear (columns K, rows N), of shared experts (H, I) or of routed ones."""

    seed: int
    num_experts: int
    columns: int
    rows: int
    codes: str
    scales: str
    place: str
    scale_place: str

    @property
    def are_ordinary(self) -> bool:
        """Whether all numbers are, and are so many that a few codes are lost among the others."""
        kinds, places = {self.codes, self.scales}, {self.place, self.scale_place}
        is_large = min(self.columns, self.rows) >= 64
        return is_large and kinds == {"ordinary"} and not fuzz.REPEATED & places

    def make(self, device: str) -> tuple[torch.Tensor, torch.Tensor]:
        """[E, rows, columns] and its scales."""
        torch.manual_seed(self.seed)
        return self._placed(device, self.rows, self.columns, num_blocks(self.rows))

    def make_experts(self, device: str) -> list[torch.Tensor]:
        """gate_up, its scales, down, its scales."""
        torch.manual_seed(self.seed)
        h, i = self.columns, self.rows
        gate_up = self._placed(device, 2 * i, h, 2 * num_blocks(i))
        return [*gate_up, *self._placed(device, h, i, num_blocks(h))]

    def _placed(self, device: str, rows: int, columns: int, scale_rows: int):
        data = fuzz.codes(self.codes, self.num_experts, rows, columns).to(device)
        scale_shape = self.num_experts, scale_rows, num_blocks(columns)
        scale_inv = fuzz.scales(self.scales, *scale_shape).to(device)
        data = fuzz.placed(fuzz.OPERAND_PLACES, self.place, data)
        return data, fuzz.placed(fuzz.SCALE_PLACES, self.scale_place, scale_inv)


class Layer(NamedTuple):
    """A layer and its tokens, x [T, H]."""

    x: fuzz.Matrices
    weights: Weights
    bias: torch.dtype | None
    limit: float | None

    @property
    def activation(self) -> Activation:
        return Activation(limit=self.limit)

    @property
    def is_ordinary(self) -> bool:
        is_ordinary = self.x.kind == "ordinary" and self.x.place not in fuzz.REPEATED
        return is_ordinary and self.weights.are_ordinary

    def make_bias(self, device: str) -> torch.Tensor | None:
        return fuzz.biases(self.x.seed, self.x.kind, self.bias, self.weights.rows, device)


@st.composite
def layers(draw: st.DrawFn, most_experts: int = 1) -> Layer:
    of_weights = fuzz.size(300, 1000), fuzz.size(260, 800)
    sizes = st.tuples(st.integers(1, most_experts), fuzz.size(40, 300), *of_weights)
    most_numbers, most_products = (2**20, 2**26) if fuzz.HAS_GPU else (2**18, 2**21)
    sizes = sizes.filter(lambda x: x[0] * x[2] * x[3] <= most_numbers)
    sizes = sizes.filter(lambda x: math.prod(x[1:]) <= most_products // most_experts)
    ordinary, floats = fuzz.ORDINARY, st.sampled_from(fuzz.FLOATS)
    wild = st.tuples(floats, st.sampled_from(fuzz.CODES), st.sampled_from(fuzz.SCALES))
    kinds = st.one_of(st.tuples(*[ordinary] * 3), st.tuples(floats, ordinary, ordinary), wild)
    known = fuzz.FLOAT_PLACES, fuzz.OPERAND_PLACES, fuzz.SCALE_PLACES

    num_experts, num_tokens, columns, rows = draw(sizes)
    kind, *kinds_of_weights = draw(kinds)
    place, *places = (draw(fuzz.place_in(each)) for each in known)
    dtype = draw(st.sampled_from(fuzz.DTYPES))
    x = fuzz.Matrices(draw(fuzz.SEEDS), (num_tokens, columns), kind, dtype, place)
    weights = Weights(draw(fuzz.SEEDS), num_experts, columns, rows, *kinds_of_weights, *places)
    return Layer(x, weights, draw(st.sampled_from(fuzz.BIASES)), draw(st.sampled_from(_LIMITS)))


# ---- Routing ----


class Choices(NamedTuple):
    """What T tokens choose; their top_k_weights are numbers of any kind."""

    seed: int
    kind: str
    top_k: int
    wide: bool
    transposed: bool
    weights: fuzz.Matrices  # its kind and dtype count, its shape does not

    def make_ids(self, num_tokens: int, num_experts: int, device: str) -> torch.Tensor:
        """Ids [T, k], int32 or int64, among them some that only a GPU takes."""
        torch.manual_seed(self.seed)
        shape = num_tokens, self.top_k
        ids = torch.randint(0, num_experts + 1, shape)
        if self.kind == "distinct":
            scores = torch.rand(num_tokens, max(num_experts, self.top_k))
            ids = scores.argsort(1)[:, : self.top_k]
        elif self.kind == "few":
            ids = ids % 2
        elif self.kind == "nowhere":
            ids = torch.full(shape, num_experts)
        elif self.kind == "out of range":
            far = torch.tensor((*_FAR, num_experts + 1))[torch.randint(5, shape)]
            ids = torch.where(torch.rand(shape) < 0.3, far, ids)
            if self.wide:
                ids = torch.where(torch.rand(shape) < 0.1, ids * 2**32 + 1, ids)
        ids = ids.to(torch.int64 if self.wide else torch.int32).to(device)
        return ids.mT.contiguous().mT if self.transposed else ids

    def make_weights(self, num_tokens: int, device: str) -> torch.Tensor:
        return self.weights._replace(shape=(num_tokens, self.top_k)).make(device)


def choices(most: int = 8) -> st.SearchStrategy[Choices]:
    flags = st.booleans(), st.booleans()
    return st.builds(
        Choices, fuzz.SEEDS, st.sampled_from(IDS), st.integers(1, most), *flags, fuzz.matrices()
    )


def known_to_cpu(ids: torch.Tensor, num_experts: int) -> torch.Tensor:
    """Ids with E in place of those that the CPU refuses and a GPU takes for E."""
    return ids.masked_fill((ids < 0) | (ids > num_experts), num_experts)


class Router(NamedTuple):
    logits: fuzz.Matrices
    bias: fuzz.Matrices | None
    k: int
    num_groups: int
    topk_groups: int
    renormalize: bool
    factor: float

    @property
    def rest(self) -> tuple:
        return self.k, self.num_groups, self.topk_groups, self.renormalize, self.factor


@st.composite
def routers(draw: st.DrawFn) -> Router:
    num_groups = draw(st.sampled_from((1, 1, 2, 3, 8)))
    size = draw(st.integers(1, (512 if fuzz.HAS_GPU else 64) // num_groups))
    topk_groups = draw(st.integers(1, num_groups))
    k = min(draw(st.integers(1, topk_groups * size)), draw(st.sampled_from((1, 8, 40, 512))))
    num_experts = num_groups * size
    logits = draw(fuzz.matrices())._replace(shape=(draw(fuzz.size(12, 300)), num_experts))
    bias = draw(st.one_of(st.none(), fuzz.matrices()))
    if bias is not None:
        bias = bias._replace(shape=(1, num_experts))
    options = draw(st.booleans()), draw(st.sampled_from((1.0, 2.5, -3e38)))
    return Router(logits, bias, k, num_groups, topk_groups, *options)


class Route(NamedTuple):
    """Tokens [T, H], the weight [E, H] of a router, and how it chooses, but not its `logits`."""

    x: fuzz.Matrices
    weight: fuzz.Matrices
    router: Router
    by_sigmoid: bool

    def make(self, device: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        bias = self.router.bias
        made = None if bias is None else bias.make(device)[0]
        return self.x.make(device), self.weight.make(device), made

    @property
    def rest(self) -> tuple:
        k, *rest, factor = self.router.rest
        return k, self.by_sigmoid, *rest, factor if self.by_sigmoid else 1.0


@st.composite
def routes(draw: st.DrawFn) -> Route:
    router, x, weight = draw(routers()), draw(fuzz.matrices()), draw(fuzz.matrices())
    num_tokens, num_experts = router.logits.shape
    hidden_size = draw(fuzz.size(200, 1100, 1))
    dtype = draw(st.sampled_from((torch.bfloat16, torch.bfloat16, x.dtype)))  # kernels take BF16
    x = x._replace(shape=(num_tokens, hidden_size), dtype=dtype)
    weight = weight._replace(shape=(num_experts, hidden_size), dtype=torch.float32)
    by_sigmoid = draw(st.booleans())
    bias = router.bias._replace(dtype=torch.float32) if router.bias and by_sigmoid else None
    return Route(x, weight, router._replace(bias=bias), by_sigmoid)
