"""Faults of `quant/`."""

from ..fault import Fault

FAULTS = [
    Fault(
        file="quant/quantize.py",
        old='"pitch": out.scale_inv.strides[-1],',
        new='"pitch": out.scale_inv.shape[-2],',
        caught_by="tests/quant/test_quantize_launch.py::test_launch_says_where_everything_lies",
        why="the pitch of scales is not a multiple of 16 bytes",
    ),
    Fault(
        file="quant/quantize.py",
        old="address % _VECTOR_BYTES, ue8m0, cut, min_amax)",
        new="address % _VECTOR_BYTES, ue8m0, cut)",
        caught_by="tests/quant/test_quantize_launch.py::"
        "test_gradients_with_the_layout_of_activations_have_a_floor_of_their_own",
        why="gradients are quantized by a launch that was prepared for activations",
    ),
    Fault(
        file="quant/numerics.py",
        old="_scale_from_amax(blocks.abs().amax(dim=-1), ue8m0, min_amax)",
        new="_scale_from_amax(blocks.abs().amax(dim=-1), ue8m0)",
        caught_by="tests/functional/test_linear.py::test_small_gradients_are_no_zeros",
        why="small gradients become zeros on a CPU",
    ),
    Fault(
        file="quant/transpose.py",
        old='"w_part_pitch": num_rows * w_row_pitch,',
        new='"w_part_pitch": num_rows * k,',
        caught_by="tests/quant/test_transpose_launch.py::test_launch_says_where_everything_lies",
        why="up begins where it would if rows of weights had no gaps",
    ),
    Fault(
        file="quant/both.py",
        old="*map(layout_of, tensors), *alignments(w, data, transposed))",
        new="*map(layout_of, tensors))",
        caught_by="tests/quant/test_both_launch.py::"
        "test_weights_of_one_layout_may_be_aligned_in_any_way",
        why="a launch that was prepared for aligned weights reads others",
    ),
    Fault(
        file="quant/each.py",
        old='"width": transposed.shape[-1] // parts,',
        new='"width": num_rows,',
        caught_by="tests/quant/test_each_launch.py::test_launches_of_one_layout_are_prepared_once",
        why="up is written into the columns between gate and up of W^T",
    ),
    Fault(
        file="quant/columns.cu",
        old="args.row_scale_inv[k_block * args.row_pitch + rows.first + index]",
        new="args.row_scale_inv[k_block * args.row_pitch + index]",
        caught_by="tests/quant/test_columns_launch.py::"
        "test_the_kernels_text_gives_every_code[dtype2-one with offsets]",
        why="the kernel writes the scales of all experts' rows over those of the first rows",
    ),
    Fault(
        file="quant/block_scaled.py",
        old="scale = scale_inv.repeat_interleave(BLOCK, dim=-1)[..., :k]",
        new="scale = scale_inv.repeat_interleave(BLOCK, dim=-1)[..., -k:]",
        caught_by="tests/quant/test_quant.py::"
        "test_dequantize_multiplies_by_the_scale_of_the_block[quantize_1x128-1]",
        why="a row that ends within a block is dequantized with shifted scales",
    ),
]
