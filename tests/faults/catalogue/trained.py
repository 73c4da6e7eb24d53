"""Faults of weights that are trained."""

from ..fault import Fault

_LAUNCHES = "tests/functional/training/test_launches.py::"

FAULTS = [
    Fault(
        file="functional/training/weights.py",
        old="if self.is_old or self.version != weight._version:",
        new="if self.is_old:",
        caught_by="tests/functional/training/test_weights.py::test_a_loaded_state_is_seen",
        why="codes of W and of W^T stay what they were when a state is loaded",
    ),
    Fault(
        file="functional/training/experts_backward.py",
        old="accumulate=(inputs.adds_to_down_proj, inputs.adds_to_gate_up_proj)",
        new="accumulate=(inputs.adds_to_gate_up_proj, inputs.adds_to_down_proj)",
        caught_by=_LAUNCHES + "test_one_weight_of_experts_may_have_main_grad[down_proj]",
        why="main_grad of one weight is overwritten where the other weight has none",
    ),
    Fault(
        file="functional/training/experts_records.py",
        old='gathered("x_columns", x,',
        new='gathered("x_columns", grad,',
        caught_by=_LAUNCHES + "test_experts[sizes0-saved_dtype0-128x1]",
        why="the gradient of gate and up is summed over gradients in place of tokens",
    ),
    Fault(
        file="functional/training/main_grad.py",
        old="return main_grad, not (begins and overwrites(weight))",
        new="return main_grad, not overwrites(weight)",
        caught_by="tests/functional/training/test_main_grad.py::"
        "test_parts_of_a_call_overwrite_once[True-bf16]",
        why="each part of many tokens overwrites the gradients of the parts before",
    ),
    Fault(
        file="functional/training/linear_records.py",
        old="_key_of(x, *codes, bias), blocks, batch_invariant,",
        new="_key_of(x, *codes, bias), batch_invariant,",
        caught_by=_LAUNCHES + "test_linears_of_one_layout_hold_their_inputs_each_in_its_way",
        why="a linear saves its input with the blocks of another one of its layout",
    ),
    Fault(
        file="functional/training/feed_forward.py",
        old="grad_gated, grad_ungated = grad_gate_up.unbind(1)",
        new="grad_ungated, grad_gated = grad_gate_up.unbind(1)",
        caught_by="tests/functional/training/test_feed_forward.py::"
        "test_gradients_are_near_those_in_fp64[activation0-128x1-cpu]",
        why="the weights of gate and of up get each other's gradient",
    ),
    Fault(
        file="functional/activation_rows.py",
        old="(_GRAD, layout_of(grad), layout_of(gate_up), activation)",
        new="(_GRAD, layout_of(grad), layout_of(gate_up))",
        caught_by="tests/functional/activation/test_rows.py::test_the_launches_are_right[8]",
        why="shared experts have the gradient of an activation that others of their sizes have",
    ),
    Fault(
        file="functional/training/experts.py",
        old="weighted = (activation_gradients.weight_of_row[:, None] * activated).bfloat16()",
        new="weighted = activated.bfloat16()",
        caught_by="tests/functional/training/test_experts.py::"
        "test_gradients_are_those_of_the_codes[0.5-master2-bf16-cpu]",
        why="the gradient of down lacks the scores of choices",
    ),
]
