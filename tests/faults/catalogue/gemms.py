"""Faults of `kernels/gemm/`."""

from ..fault import Fault

_LAUNCH = "tests/kernels/gemm/test_launch.py::"

FAULTS = [
    Fault(
        file="kernels/gemm/call.py",
        old="key = (options, tensor_layouts, aligned, driver.max_sms)",
        new="key = (options, tensor_layouts, aligned)",
        caught_by=_LAUNCH + "test_num_sms_limits_the_grid[kOffsets]",
        why="a GEMM that was prepared before set_num_sms takes SMs that must stay free",
    ),
    Fault(
        file="kernels/gemm/sm90/launch.py",
        old="scale_box = config.token_scales, config.k_blocks_per_stage",
        new="scale_box = config.token_scales, 1",
        caught_by=_LAUNCH + "test_what_tma_can_address_is_not_copied[aligned columns-None]",
        why="TMA loads the scales of one block of K, where a stage has two",
    ),
    Fault(
        file="kernels/gemm/sm90/launch.py",
        old='"weight_scale_stride": b.scale_inv.strides[0],',
        new='"weight_scale_stride": b.scale_inv.strides[1],',
        caught_by="tests/kernels/gemm/test_grouped_launch.py::"
        "test_rows_of_no_group_survive_a_copy_of_d[130-kOffsets]",
        why="the weights of a group are multiplied by scales of the first group",
    ),
    Fault(
        file="kernels/gemm/sm90/launch.py",
        old='early = [b.data.place, b.scale_inv.place, arguments["bias"]]',
        new='early = [a.data.place, b.data.place, b.scale_inv.place, arguments["bias"]]',
        caught_by="tests/functional/test_linear.py::"
        "test_other_layers_of_one_layout_prepare_nothing_for_gradients",
        why="a record says that tokens are read before the kernel before has quantized them",
    ),
    Fault(
        file="kernels/gemm/call.py",
        old="rows = row < bounds[:, None]",
        new="rows = row <= bounds[:, None]",
        caught_by=_LAUNCH
        + "test_without_k_rows_of_groups_are_zero_or_the_bias[every other row-kMasked]",
        why="a masked GEMM with K = 0 writes a row after the last one of a group",
    ),
    Fault(
        file="kernels/gemm/segments.py",
        old="ZERO_OF_LIST = 4",
        new="ZERO_OF_LIST = 0",
        caught_by="tests/kernels/gemm/sm90/test_tile_counter.py::"
        "test_the_counter_is_memory_of_each_call_and_zeroed_before[False-kSegments]",
        why="clusters count tiles in the word that says how many segments there are",
    ),
    Fault(
        file="kernels/gemm/sm90/tile_counter.cu",
        old="  wait_for_previous_kernel();\n",
        new="",
        caught_by="tests/kernels/test_launch_order.py::"
        "test_a_kernel_waits_before_it_lets_the_next_one_start[tile_counter]",
        why="a kernel writes memory that the kernel before it may still use",
    ),
    Fault(
        file="kernels/gemm/sm90/k_grouped/launch.py",
        old="box_m = config.tile_m // config.multicast",
        new="box_m = config.tile_m",
        caught_by="tests/kernels/gemm/k_grouped/test_launch.py::"
        "test_num_sms_limits_the_grid[True-257-520-3]",
        why="each of two CTAs loads the rows that they share",
    ),
]
