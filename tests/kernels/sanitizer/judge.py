"""What a launch is, what it works on, and how what is wrong is told."""

from collections.abc import Callable

import torch

Launch = Callable[[], None]  # with a check of what it made
SILU = 0.7310586  # of 1


def tell(what: str, wrong: int) -> None:
    print(f"{what}: {wrong} wrong", flush=True)
    if wrong:
        raise SystemExit(1)


def ones(*shape: int) -> torch.Tensor:
    codes = torch.full(shape, 0x38, dtype=torch.uint8, device="cuda")
    return codes.view(torch.float8_e4m3fn)


def num_far(found: torch.Tensor, expected: torch.Tensor) -> int:
    found = found.float().cpu()
    return int(((found - expected).abs() > 0.02 * expected.abs().clamp(min=1)).sum()) + int(
        found.isnan().sum()
    )
