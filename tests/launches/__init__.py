"""What the library launches, recorded without a GPU: so that a redesign is seen to launch the same.

    python -m tests.launches check [--only OP]
    python -m tests.launches show ID
    python -m tests.launches record

Some two thousand layouts of all ops that launch kernels (`layouts/`) run on a stand-in for a GPU
(`gpu.py`). It computes nothing and records each launch: kernel, grid, block, attributes, tensor
maps, and the bytes of arguments with names in place of addresses (`record.py`). `golden.txt` has
digests of these records, and `golden.py` compares with them. What differs is seen by `show` on both
checkouts: it prints all that is recorded of one layout.
"""
