"""Faults of routed experts, forward and backward."""

from ..fault import Fault

_BIASES = "tests/functional/experts/test_biases.py::"
_LAUNCH = "tests/functional/experts/test_launch.py::"
_BACKWARD = "tests/functional/experts/test_backward_launch.py::"

FAULTS = [
    # ---- Forward ----
    Fault(
        file="functional/experts.py",
        old="up_scales=halves.up_scale_inv.data_ptr() - halves.gate_scale_inv.data_ptr(),",
        new="up_scales=split.up_scale_inv.numel() * 4,",
        caught_by=_LAUNCH + "test_launches_compute_what_the_body_does[distinct-True-one token]",
        why="the scales of up are read at a wrong address",
    ),
    Fault(
        file="functional/parts.py",
        old="None if x is None else x.narrow(0, begin * each, count * each)",
        new="None if x is None else x.narrow(0, begin, count * each)",
        caught_by=_BACKWARD + "test_many_tokens_go_in_the_parts_of_the_forward[2-True]",
        why="a part of the tokens saves gate and up among the rows of the part before",
    ),
    Fault(
        file="functional/experts.py",
        old="(x_address % 16, gate % 16,",
        new="(gate % 16,",
        caught_by="tests/functional/experts/test_kept.py::"
        "test_whatever_decides_a_launch_is_prepared_for_once",
        why="a launch that was prepared for aligned tokens reads others",
    ),
    Fault(
        file="functional/experts_records.py",
        old="GateUp(weights.up, activation, activated.scale_inv, saved)",
        new="GateUp(weights.up, SWIGLU, activated.scale_inv, saved)",
        caught_by=_LAUNCH
        + "test_any_dtype_and_strides[id_dtype0-weights_dtype0-dtype0-activation1-False]",
        why="a GPU neither clamps gate and up nor takes another activation than SwiGLU",
    ),
    Fault(
        file="functional/expert_parts.py",
        old="counter = dispatched.tile_counters.after(0 if follows_dispatch else 4)",
        new="counter = dispatched.tile_counters",
        caught_by=_LAUNCH + "test_more_tiles_than_clusters_are_taken_from_a_counter[19-takes3]",
        why="both GEMMs count tiles in one word, so the second one leaves tiles out",
    ),
    Fault(
        file="functional/experts.py",
        old="maps = build_maps(top_k_index, num_experts, 1, None, inputs.expert_offset)",
        new="maps = build_maps(top_k_index, num_experts, 1, None)",
        caught_by="tests/functional/experts/test_experts.py::test_ranks_sum_up_to_the_whole[False]",
        why="each rank computes with the ids of the first one on a CPU",
    ),
    Fault(
        file="functional/experts.py",
        old="[None if z is None else z.contiguous() for z in (gate_up_bias, down_bias)]",
        new="[gate_up_bias, down_bias]",
        caught_by=_BIASES + "test_strides_do_not_matter[frozen]",
        why="biases with gaps are read as if they had none",
    ),
    # ---- Backward ----
    Fault(
        file="functional/experts_records.py",
        old='        weight_of_row = r.buffer("weight_of_row", 4 * num_rows)\n',
        new="        pass\n",
        caught_by=_BIASES + "test_launches_compute_what_the_body_does[some for each-frozen]",
        why="the gradient of the bias of down lacks the scores",
    ),
    Fault(
        file="functional/expert_biases.py",
        old="    if biases.down is not None:\n",
        new="    if biases.grad_down is not None:\n",
        caught_by=_BIASES + "test_the_bias_of_down_counts_for_scores",
        why="gradients of scores lack a frozen bias of down",
    ),
    Fault(
        file="functional/expert_biases.py",
        old="down_bias = down_bias.contiguous()",
        new="pass",
        caught_by=_BIASES + "test_strides_do_not_matter[trained]",
        why="gradients of scores have the bias of down as if it had no gaps",
    ),
    Fault(
        file="functional/experts_records.py",
        old="        expert_offset=expert_offset,\n        min_amax=MIN_GRADIENT_AMAX,\n",
        new="        expert_offset=expert_offset,\n",
        caught_by=_BACKWARD + "test_small_gradients_are_no_zeros",
        why="small gradients become zeros on a GPU",
    ),
    Fault(
        file="functional/experts_backward.py",
        old="gate_up_scale_inv=row_scales,",
        new="gate_up_scale_inv=inputs.gate_up_scale_inv,",
        caught_by=_BACKWARD + "test_many_tokens_go_in_the_parts_of_the_forward[2-True]",
        why="parts after the first have scales of other rows of gate and up",
    ),
    Fault(
        file="functional/experts_backward.py",
        old="        inputs.activation,\n        inputs.expert_offset,\n",
        new="        inputs.expert_offset,\n",
        caught_by=_BACKWARD + "test_where_the_limit_holds_there_is_no_gradient[0.0-True]",
        why="a layer has the limit of another layer of its layout in its backward",
    ),
    Fault(
        file="functional/activation.py",
        old='"saved_row_bytes": saved.bytes_of_stride(-2),',
        new='"saved_row_bytes": size * saved.element_size(),',
        caught_by=_BACKWARD + "test_launches_compute_what_the_body_does[distinct-tiny]",
        why="saved rows, which begin at multiples of 16 bytes, are read without gaps",
    ),
    Fault(
        file="functional/feed_forward_backward.py",
        old="activate_grad(grad * weights, gate, up, activation)",
        new="activate_grad(grad, gate, up, activation)",
        caught_by="tests/layers/test_gradients.py::test_of_experts[4-5-36-saved_dtype0-cpu]",
        why="the gradient of a token lacks the scores of its choices",
    ),
    Fault(
        file="functional/activation_backward.cu",
        old="      if (row < 0) args.of_weights[choice] = 0;\n",
        new="",
        caught_by="tests/functional/activation/test_backward.py::"
        "test_the_kernels_text_is_right[activation1-False-nowhere]",
        why="the gradient of a score whose expert is elsewhere is whatever was in memory",
    ),
]
