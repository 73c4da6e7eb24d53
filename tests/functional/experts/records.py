"""The memory of expert layers of given sizes."""

from moefp8.functional.experts_records import experts_backward_record, experts_record
from moefp8.kernels.gemm.sizes import Sizes
from moefp8.kernels.program import place


def forward_bytes(sizes: Sizes) -> int:
    return 0 if 0 in sizes[:5] else place(experts_record(sizes)).num_bytes


def backward_bytes(sizes: Sizes) -> int:
    return place(experts_backward_record(sizes)).num_bytes
