"""Faults of `kernels/jit/`."""

from ..fault import Fault

FAULTS = [
    Fault(
        file="kernels/jit/abi.py",
        old="fields[field] = kind * _number(source, count) if count else kind",
        new="fields[field] = kind",
        caught_by="tests/kernels/jit/test_abi.py::"
        "test_arguments_lie_in_memory_as_the_kernels_read_them[each]",
        why="what follows an array in a kernel's arguments is written at a wrong place",
    ),
    Fault(
        file="kernels/jit/kernel.py",
        old="files = sorted(program.files.items())",
        new="files = sorted(program.files.items())[:1]",
        caught_by="tests/kernels/jit/test_jit.py::"
        "test_a_change_of_any_file_compiles_anew[inner.cuh]",
        why="a kernel stays what it was when a file that it includes changes",
    ),
    Fault(
        file="kernels/jit/cache.py",
        old="if held > max_bytes and path != kept:",
        new="if held > max_bytes:",
        caught_by="tests/kernels/jit/test_folder.py::"
        "test_kernels_that_were_used_longest_ago_go_and_nothing_else[1-d]",
        why="a kernel that was just compiled is removed from the cache",
    ),
]
