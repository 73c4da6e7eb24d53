"""Faults of `kernels/program/`, and of what descriptions tell it."""

from ..fault import Fault

FAULTS = [
    Fault(
        file="kernels/program/place.py",
        old="if since <= last and first <= until:",
        new="if since < last and first < until:",
        caught_by="tests/kernels/program/test_place.py::"
        "test_two_buffers_share_memory_where_one_is_written_after_the_other_was_last_read",
        why="a kernel writes over what it reads",
    ),
    Fault(
        file="kernels/program/place.py",
        old="begin = i - 1 if base in step.early and i else i",
        new="begin = i",
        caught_by="tests/kernels/program/test_place.py::"
        "test_what_is_read_early_lives_a_step_longer_than_what_is_not",
        why="a kernel reads early what shares memory with a buffer of the step before",
    ),
    Fault(
        file="routing/combine.py",
        old='early=(token_to_row, weights.place, arguments["addend"]),',
        new='early=(weights.place, arguments["addend"]),',
        caught_by="tests/kernels/program/test_early.py::"
        "test_the_step_before_may_not_write_what_is_read_early[combine-token_to_row]",
        why="a record may let combine read a map that is not written yet",
    ),
    Fault(
        file="kernels/program/prepare.py",
        old="strides.append(x.strides[0] if x.shape[0] > 1 else pitch * x.shape[1])",
        new="strides.append(pitch * x.shape[1])",
        caught_by="tests/kernels/gemm/test_grouped_launch.py::"
        "test_halves_of_weights_are_taken_where_they_lie[kRows]",
        why="TMA takes the weights of an expert from where they would be without gaps",
    ),
]
