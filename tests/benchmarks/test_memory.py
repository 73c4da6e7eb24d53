"""What calls take is counted, and nothing of it stays."""

import gc
import weakref

import torch

from benchmarks.memory import saved_bytes


class Mark:
    """Lives as long as the node of a graph that it is given to."""


def test_saved_bytes_count_and_leave_nothing():
    x = torch.ones(8, 4, requires_grad=True)
    weight = torch.ones(4, 4, requires_grad=True)
    marks = []

    def forward() -> torch.Tensor:
        y = (x @ weight).softmax(-1)  # a result that is saved for its own backward
        for node in (y.grad_fn, torch.autograd.graph.get_gradient_edge(x).node):
            mark = Mark()
            node.metadata["mark"] = mark
            marks.append(weakref.ref(mark))
        return y

    assert saved_bytes(forward, [weight]) == 2 * x.nbytes
    gc.collect()
    assert [mark() for mark in marks] == [None, None]
