"""Find tensors of a model that share memory: a read into one would change another."""

from collections.abc import Iterable, Iterator

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ...kernels.common.checks import is_expanded

Named = tuple[str, torch.Tensor]


def memory_problems(named: Iterable[Named]) -> Iterator[str]:
    """Yield a sentence for each tensor that is expanded or shares elements; tied ones come once."""
    stored = [pair for pair in named if _has_memory(pair[1])]
    for name, tensor in stored:
        if is_expanded(tensor):
            yield (
                f"{name}: several of its elements are one place in memory, as expand makes it; "
                "give it memory of its own by .clone()"
            )
    for (first, _), (second, _) in _overlapping(stored):
        yield (
            f"{second}: shares memory with {first}, which has another key; make both the same "
            "Parameter, which ties them, or give each memory of its own by .clone()"
        )


def _has_memory(tensor: torch.Tensor) -> bool:
    if is_traceable_wrapper_subclass(tensor) or tensor.layout is not torch.strided:
        return False
    return not tensor.is_meta and tensor.numel() > 0


def _overlapping(stored: list[Named]) -> Iterator[tuple[Named, Named]]:
    """Yield pairs that have elements in common, in the order of addresses, device by device."""
    open_spans: list[Named] = []  # tensors that end after the next one begins
    for name, tensor in sorted(stored, key=lambda pair: (str(pair[1].device), pair[1].data_ptr())):
        open_spans = [pair for pair in open_spans if _reaches(pair[1], tensor)]
        yield from ((pair, (name, tensor)) for pair in open_spans if _meet(pair[1], tensor))
        open_spans.append((name, tensor))


def _reaches(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether first, which does not begin later, ends after second begins."""
    distance = second.data_ptr() - first.data_ptr()
    return first.device == second.device and num_spanned_bytes(first) > distance


def num_spanned_bytes(tensor: torch.Tensor) -> int:
    """Count the bytes from the first to the last element of a tensor that is not empty."""
    steps = zip(tensor.stride(), tensor.shape, strict=True)
    return (1 + sum(stride * (size - 1) for stride, size in steps)) * tensor.itemsize


def _meet(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether two tensors with overlapping spans, of which first begins first, share an element."""
    distance, rest = divmod(second.data_ptr() - first.data_ptr(), first.itemsize)
    is_simple = first.is_contiguous() and second.is_contiguous()
    if is_simple or rest or first.itemsize != second.itemsize:
        return True
    ends = num_spanned_bytes(first), distance * first.itemsize + num_spanned_bytes(second)
    # Columns of one matrix share none, for instance.
    is_used = torch.zeros(max(ends) // first.itemsize, dtype=torch.bool, device="cpu")
    is_used.as_strided(first.shape, first.stride()).fill_(True)
    return bool(is_used.as_strided(second.shape, second.stride(), distance).any())
