"""What `columns.cu` does, on the CPU, and whether its arguments are right.

A part of the stand-in for libcuda: see `emulator.py`.
"""

import torch

from moefp8.kernels import num_blocks
from moefp8.quant import columns as room
from tests.fakes.emulated_gemm import dtype_of, memory


def columns(made, parameters) -> None:
    x, dtype = made.arguments, dtype_of(made.kernel)
    has_blocks, with_rows, vectorized = (
        flag == "true" for flag in made.kernel.name.rstrip(">").split(", ")[1:]
    )
    num_experts = None if x.expert_offsets is None else x.num_experts
    blocks = room.num_column_blocks(x.num_rows, num_experts)
    assert x.num_k_blocks.value == num_blocks(x.k)
    assert (made.grid, made.block) == (blocks * num_blocks(x.k), 256)
    assert made.shared_bytes == 0
    assert x.data % 16 == 0
    assert min(x.pitch, x.row_pitch or x.pitch) > 0
    if vectorized:
        assert (x.x | x.row_bytes | 2 * x.k) % 16 == 0
    source = memory(x.x, dtype, [x.num_tokens, x.k], [x.row_bytes // dtype.itemsize, 1])
    expert_offsets = row_to_token = None
    if x.expert_offsets is not None:
        expert_offsets = memory(x.expert_offsets, torch.int32, [x.num_experts + 1], [1])
    if x.row_to_token is not None:
        row_to_token = memory(x.row_to_token, torch.int32, [x.num_rows], [1])
    options = bool(x.ue8m0), x.min_amax, has_blocks
    if with_rows:
        assert row_to_token is None
        *rows, data, scales = torch.ops.moefp8.quantize_1x128_and_128x1(
            source, expert_offsets, *options
        )
        row_data = memory(x.row_data, torch.uint8, [x.num_rows, x.k], [x.k, 1])
        row_data.copy_(rows[0].view(torch.uint8))
        shape = [x.num_rows, num_blocks(x.k)]
        memory(x.row_scale_inv, torch.float32, shape, [1, x.row_pitch]).copy_(rows[1])
    else:
        assert (x.row_data, x.row_scale_inv) == (None, None)
        data, scales = torch.ops.moefp8.quantize_128x1(
            source, expert_offsets, row_to_token, *options
        )
    memory(x.data, torch.uint8, [*data.shape], [*data.stride()]).copy_(data.view(torch.uint8))
    assert x.pitch >= scales.shape[1] == (num_blocks(x.k) if has_blocks else x.k)
    memory(x.scale_inv, torch.float32, [*scales.shape], [x.pitch, 1]).copy_(scales)
