"""Faults of `adapters/`."""

from ..fault import Fault

FAULTS = [
    Fault(
        file="adapters/experts.py",
        old="(through.weight_of_row[:, None] * z).bfloat16() for z in",
        new="z.bfloat16() for z in",
        caught_by="tests/adapters/test_gradients.py::"
        "test_gradients_are_those_of_merged_weights[3-dtype1]",
        why="the gradients of down's adapter lack the scores of choices",
    ),
    Fault(
        file="adapters/layout.py",
        old="return a.narrow(0, *here), b.narrow(0, *here)",
        new="return a.narrow(0, 0, here[1]), b.narrow(0, 0, here[1])",
        caught_by="tests/adapters/test_files.py::test_a_rank_takes_its_own_experts",
        why="each rank loads the adapters of the first rank's experts",
    ),
    Fault(
        file="adapters/lora.py",
        old="self.scaling = alpha / (math.sqrt(rank) if use_rslora else rank)",
        new="self.scaling = alpha / rank",
        caught_by="tests/adapters/test_lora.py::test_an_adapter_adds_its_product[True-8]",
        why="an adapter with use_rslora has the scale of one without",
    ),
]
