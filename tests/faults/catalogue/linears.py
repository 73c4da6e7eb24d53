"""Faults of linears and of feed-forwards."""

from ..fault import Fault

FAULTS = [
    Fault(
        file="functional/linear.py",
        old="        None if bias is None else layout_of(bias),\n",
        new="",
        caught_by="tests/functional/test_linear.py::"
        "test_whatever_decides_a_launch_is_prepared_for_once",
        why="a linear without a bias makes others of its layout forget theirs",
    ),
    Fault(
        file="functional/feed_forward.py",
        old=" and gate_scales.stride() == up_scales.stride()",
        new="",
        caught_by="tests/functional/test_feed_forward.py::"
        "test_one_number_may_be_the_scale_of_all_blocks[2-weights fit]",
        why="scales of up are read with the strides of gate's",
    ),
    Fault(
        file="functional/feed_forward_backward.py",
        old="torch.cat([gate_scales, up_scales]).mT",
        new="torch.cat([up_scales, gate_scales]).mT",
        caught_by="tests/functional/test_feed_forward_backward.py::"
        "test_launches_compute_what_the_body_does[3-200-72-activation0]",
        why="gate and up have each other's scales in a backward",
    ),
    Fault(
        file="quant/weight_format.py",
        old="    return part_scales.expand(",
        new="    return part_scales.flip(-3).expand(",
        caught_by="tests/layers/test_weight_format.py::test_experts[200-72-emulated GPU]",
        why="a backward reads gate's rows with the scale of up",
    ),
    Fault(
        file="functional/transposed.py",
        old="return self.versions == versions and are_same",
        new="return are_same",
        caught_by="tests/functional/transposed/test_kept.py::"
        "test_it_is_made_once_and_again_in_its_memory_after_a_change[1]",
        why="gradients go through W^T of former weights",
    ),
]
