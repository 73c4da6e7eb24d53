"""`convert` refuses experts whose forward drops tokens above a capacity, wherever that stands."""

from dataclasses import dataclass
from types import MappingProxyType, SimpleNamespace

import pytest
import torch
from torch.nn import functional as F

from moefp8.layers import plan_conversion
from tests.layers.conversion.foreign_experts import DTYPES, E, assert_refused, ranks, with_forward
from tests.layers.conversion.plain_experts import PlainExperts as Experts
from tests.layers.memory import peak

LIMIT = 900
CONFIG = SimpleNamespace(capacity=3000, unused=7)


def within_limit(ids):
    return ranks(ids) <= LIMIT


class Capacity(Experts):
    """The tokens of an expert after its fourth are dropped."""

    def forward(self, x, ids, scores):
        rank = F.one_hot(ids, E).sum(1).cumsum(0)
        return super().forward(x, ids, scores * (rank.gather(1, ids) <= 4))


class CapacityOfAttribute(Experts):
    capacity = 5000

    def forward(self, x, ids, scores):
        return super().forward(x, ids, scores * (ranks(ids) <= self.capacity))


class CapacityOfConfig(CapacityOfAttribute):
    def __init__(self):
        super().__init__()
        self.config = CONFIG

    def forward(self, x, ids, scores):
        return Experts.forward(self, x, ids, scores * (ranks(ids) <= self.config.capacity))


# run: the right forward
FORWARDS = {
    "capacity of 100": (
        lambda run, x, ids, scores: run(x, ids, scores * (ranks(ids) <= 100)),
        "on 101 random tokens of 1 choices",
    ),
    "capacity of a global": (
        lambda run, x, ids, scores: run(x, ids, scores * within_limit(ids)),
        "on 901 random tokens of 1 choices",
    ),
    "capacity of a product": (
        lambda run, x, ids, scores: run(x, ids, scores * (ranks(ids) <= 8 * x.shape[1])),
        "on 4097 random tokens of 1 choices",
    ),
}
CAPACITIES = {
    **{name: (with_forward(f), rule) for name, (f, rule) in FORWARDS.items()},
    "capacity": (Capacity, r"up to 100 % off"),
    "capacity of an attribute": (CapacityOfAttribute, "on 5001 random tokens of 1 choices"),
    "capacity of a config": (CapacityOfConfig, "on 3001 random tokens of 1 choices"),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CAPACITIES)
def test_a_capacity_is_refused(case, dtype):
    assert_refused(*CAPACITIES[case], dtype)


def guarded(most: int) -> type[Experts]:
    class Guarded(Experts):
        def __init__(self):
            super().__init__()
            self.max_tokens = most

        def forward(self, x, *choice):
            if len(x) > self.max_tokens:
                raise ValueError("too many tokens")
            return super().forward(x, *choice)

    return Guarded


def test_a_forward_may_refuse_many_tokens_but_not_few():
    assert plan_conversion(guarded(8192)()).swapped
    with pytest.raises(ValueError, match="raised ValueError: too many tokens"):
        plan_conversion(guarded(20)())


class Chunks(Experts):
    chunk = 16384

    def forward(self, x, ids, scores):
        parts = zip(*(inputs.split(self.chunk) for inputs in (x, ids, scores)), strict=True)
        return torch.cat([super(Chunks, self).forward(*part) for part in parts])


class ChunksOfItsWidth(Chunks):
    def forward(self, x, ids, scores):
        return super().forward(x.view(-1, 512), ids, scores)


class CapacityOfLarge(Chunks):
    def forward(self, x, ids, scores):
        return super().forward(x, ids, scores * (ranks(ids) <= self.chunk))


@pytest.mark.parametrize("kind", [Chunks, ChunksOfItsWidth])
def test_many_tokens_of_large_experts_take_little(kind):
    with torch.device("meta"):
        experts = kind(8, 512, 1024)
    conversions = []
    assert peak(lambda: conversions.append(plan_conversion(experts))) < 2**25
    assert conversions[0].swapped


def test_a_capacity_of_large_experts_shows_at_any_number():
    with torch.device("meta"):
        experts = CapacityOfLarge(8, 512, 1024)
    with pytest.raises(ValueError, match="on 16385 random tokens"):
        plan_conversion(experts)


@dataclass(slots=True)
class Slots:
    capacity: int = 5000


NUMBERS = {
    "NumPy's integer": lambda: pytest.importorskip("numpy").int64(5000),
    "NumPy's float": lambda: pytest.importorskip("numpy").float32(5000),
    "tensor": lambda: torch.tensor(5000.0),
    "slots": Slots,
    "mapping": lambda: MappingProxyType({"capacity": 5000}),
    "beside a sparse tensor": lambda: [torch.ones(4).to_sparse(), 5000][::-1],
}


@pytest.mark.parametrize("name", NUMBERS)
def test_a_capacity_shows_whatever_holds_it(name):
    class Held(Experts):
        def __init__(self):
            super().__init__()
            self.held = NUMBERS[name]()

        def forward(self, x, ids, scores):
            held = self.held
            if isinstance(held, Slots):
                held = held.capacity
            elif isinstance(held, MappingProxyType):
                held = held["capacity"]
            elif isinstance(held, list):
                held = held[0]
            return super().forward(x, ids, scores * (ranks(ids) <= float(held)))

    with pytest.raises(ValueError, match="on 5001 random tokens"):
        plan_conversion(Held())
