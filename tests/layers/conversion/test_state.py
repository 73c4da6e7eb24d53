"""A trial leaves nothing changed, and experts whose forward changes something are refused."""

import pytest
import torch
from torch import nn

from moefp8 import convert
from moefp8.layers import plan_conversion
from tests.layers.conversion.foreign_experts import DTYPES, E, assert_refused, with_forward
from tests.layers.conversion.plain_experts import PlainExperts as Experts

NUM_CALLS = 0


def counted(*inputs):
    global NUM_CALLS
    NUM_CALLS += 1
    return inputs


class CountsInContainer(Experts):
    def __init__(self):
        super().__init__()
        self.counts = {"calls": [0]}

    def forward(self, *inputs):
        self.counts["calls"][0] += 1
        return super().forward(*inputs)


class CountsInTensor(Experts):
    def __init__(self):
        super().__init__()
        self.counts = torch.zeros(E)

    def forward(self, x, ids, scores):
        self.counts += ids.flatten().bincount(minlength=E)
        return super().forward(x, ids, scores)


class CountsInClass(Experts):
    num_calls = 0

    def forward(self, *inputs):
        type(self).num_calls += 1
        return super().forward(*inputs)


class Counts(Experts):
    num_calls = 0

    def forward(self, *inputs):
        self.num_calls += 1
        return super().forward(*inputs)


class CountsInBuffer(Experts):
    def __init__(self):
        super().__init__()
        self.register_buffer("counts", torch.zeros(E), persistent=False)

    def forward(self, x, ids, scores):
        self.counts += ids.flatten().bincount(minlength=E)
        return super().forward(x, ids, scores)


COUNTS = {
    "counts in a global": (
        with_forward(lambda run, *inputs: run(*counted(*inputs))),
        "changes .*NUM_CALLS",
    ),
    "counts in a container": (CountsInContainer, "changes nothing .*, but that changes .*calls"),
    "counts in a tensor": (CountsInTensor, "changes nothing .*, but that changes counts"),
    "counts in its class": (CountsInClass, "changes nothing .*, but that changes .*num_calls"),
    "counts": (Counts, "changes nothing in it, but that changes num_calls"),
    "counts in a buffer": (CountsInBuffer, "changes nothing in it, but that changes counts"),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", COUNTS)
def test_a_forward_that_counts_is_refused(case, dtype):
    assert_refused(*COUNTS[case], dtype)


class ReordersOnce(Experts):
    """Its up rows come first until its first forward."""

    def __init__(self, how):
        super().__init__(8, 256, 288)
        self.how, self.is_ready = how, False

    def expert(self, x, expert):
        if not self.is_ready:
            other = torch.cat(self.gate_up_proj.detach().chunk(2, dim=1)[::-1], dim=1)
            if self.how == "data":
                self.gate_up_proj.data = other
            else:
                self.gate_up_proj.data.copy_(other)
            self.is_ready = True
        return super().expert(x, expert)


@pytest.mark.parametrize("how", ["data", "copy"])
def test_what_a_forward_does_to_large_weights_is_undone(how):
    experts = ReordersOnce(how)
    assert experts.gate_up_proj.numel() > 2**20
    before = experts.gate_up_proj.detach().clone()
    with pytest.raises(ValueError, match=r"up rows come before its gate rows|changes is_ready"):
        plan_conversion(experts)
    assert torch.equal(experts.gate_up_proj, before)
    assert not experts.is_ready


class ReordersByGlobal(ReordersOnce):
    is_ready = property(lambda self: READY[0], lambda self, value: READY.__setitem__(0, value))


READY = [False]


@pytest.mark.parametrize("how", ["data", "copy"])
def test_so_it_is_where_nothing_in_the_module_tells(how):
    experts = ReordersByGlobal(how)
    before = experts.gate_up_proj.detach().clone()
    with pytest.raises(ValueError, match=r"up rows come before its gate rows|changes gate_up_proj"):
        plan_conversion(experts)
    assert torch.equal(experts.gate_up_proj, before)


FIRST_CALLS: dict[object, object] = {}
NAN, IMPLEMENTATION = float("nan"), None


class KeepsFromFirstCall(Experts):
    def activate(self, gate, up):
        global IMPLEMENTATION
        if IMPLEMENTATION is None:
            IMPLEMENTATION = self.act_fn
        FIRST_CALLS.setdefault(gate.dtype, 1)
        return super().activate(gate, up)


def test_a_forward_may_keep_something_from_its_first_call():
    FIRST_CALLS.clear()
    assert plan_conversion(KeepsFromFirstCall()).swapped


def test_nan_is_no_change():
    class Fills(Experts):
        def __init__(self):
            super().__init__()
            self.fill = float("nan")
            self.register_buffer("filled", torch.tensor([1.0, torch.nan]), persistent=False)

        def activate(self, gate, up):
            return super().activate(gate, up) if len(gate) else gate * NAN * self.fill

    assert plan_conversion(Fills()).swapped


def test_a_probe_leaves_no_trace():
    experts, other, third = Experts().train(), CountsInBuffer(), Counts()
    names = {name: id(x) for name, x in experts.named_parameters()}
    state = torch.random.get_rng_state()
    with pytest.raises(ValueError, match="changes counts"):
        convert(nn.ModuleList([experts, other, third]))
    assert not other.counts.any()
    assert "num_calls" not in vars(third)
    assert experts.training
    assert {name: id(x) for name, x in experts.named_parameters()} == names
    assert torch.equal(torch.random.get_rng_state(), state)
