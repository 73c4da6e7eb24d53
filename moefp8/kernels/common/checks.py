"""Argument checks shared by the launchers: the rule, what came, the way out.

All checks but `check_choices`, which is for the CPU, look only at dtypes, shapes, strides and
devices, so they wait for no device.
"""

from collections.abc import Iterable, Sequence

import torch

from .blocks import E4M3, num_blocks

# The float types that kernels read, and their names in `Input` of device/input.cuh.
INPUTS = {
    torch.bfloat16: "Input::kBFloat16",
    torch.float16: "Input::kHalf",
    torch.float32: "Input::kFloat",
}
FLOATS = tuple(INPUTS)


def check_tensor(
    op: str, name: str, x: torch.Tensor, dtypes: Sequence[torch.dtype], ndim: int | None = None
) -> None:
    if not isinstance(x, torch.Tensor):
        way_out = "; torch.stack makes one of several" if isinstance(x, list | tuple) else ""
        raise TypeError(f"{op}: {name} must be a tensor, got {type(x).__name__}{way_out}")
    if x.dtype not in dtypes:
        allowed = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        came = str(x.dtype).removeprefix("torch.")
        raise TypeError(f"{op}: {name} must be {allowed}, got {came}")
    if ndim is not None and x.ndim != ndim:
        raise ValueError(f"{op}: {name} must have {ndim} dimensions, got shape {list(x.shape)}")


def check_quantized_or_not(
    op: str, name: str, x: torch.Tensor, scale_inv: torch.Tensor | None
) -> None:
    """Check that `x` [T, H] has its 1x128 scales, fp32 [T, ceil(H/128)], just if it is e4m3."""
    scale_name, came = f"{name}_scale_inv", str(x.dtype).removeprefix("torch.")
    if scale_inv is None and x.dtype == E4M3:
        allowed = " or ".join(str(dtype).removeprefix("torch.") for dtype in FLOATS)
        raise TypeError(f"{op}: {name} must be {allowed}, or come with {scale_name}, got {came}")
    if scale_inv is None:
        check_tensor(op, name, x, FLOATS, 2)
        return
    if x.dtype != E4M3:
        raise TypeError(
            f"{op}: {name} must be float8_e4m3fn where {scale_name} is given, got {came}; give None"
        )
    check_tensor(op, name, x, (E4M3,), 2)
    check_tensor(op, scale_name, scale_inv, (torch.float32,), 2)
    (num_tokens, hidden_size), rule = x.shape, f"[T, ceil(H/128)] for {name} [T, H]"
    check_shape(op, scale_name, scale_inv, [num_tokens, num_blocks(hidden_size)], rule)


def check_shape(op: str, name: str, x: torch.Tensor, shape: Sequence[int], rule: str) -> None:
    """`x.shape` must be `shape`; `rule` says where that comes from, e.g. "[M, ceil(K/128)]"."""
    if list(x.shape) != list(shape):
        raise ValueError(f"{op}: {name} must be {rule} = {list(shape)}, got {list(x.shape)}")


def check_rows_contiguous(op: str, name: str, x: torch.Tensor) -> None:
    if x.shape[-1] > 1 and x.stride(-1) != 1 and x.numel():  # an empty tensor's strides say nothing
        raise ValueError(
            f"{op}: the last dimension of {name} must be contiguous, got strides "
            f"{list(x.stride())} for shape {list(x.shape)}; call .contiguous()"
        )


def is_expanded(x: torch.Tensor) -> bool:
    """Whether elements may share memory: a stride is within the span of axes of smaller strides."""
    extent = 1
    for stride, size in sorted(zip(x.stride(), x.shape, strict=True)):
        if size > 1:
            if stride < extent:
                return True
            extent += (size - 1) * stride
    return False


def check_not_expanded(op: str, name: str, x: torch.Tensor) -> None:
    """Check that elements of `x`, which is written, have memory of their own."""
    if x.numel() and not x.is_contiguous() and is_expanded(x):
        raise ValueError(
            f"{op}: {name} must not be expanded, since it is written, got strides "
            f"{list(x.stride())} for shape {list(x.shape)}; give one that torch.empty makes"
        )


def check_same_device(op: str, **tensors: torch.Tensor | None) -> None:
    devices = {name: x.device for name, x in tensors.items() if x is not None}
    if len(set(devices.values())) > 1:
        came = ", ".join(f"{name} on {device}" for name, device in devices.items())
        raise ValueError(f"{op}: all tensors must be on one device, got {came}")


def check_no_gradient(op: str, names: Iterable[str], outputs: Sequence[torch.Tensor]) -> None:
    """Check that no output requires a gradient; names: of all arguments that the op can write."""
    if torch.is_grad_enabled() and any(output.requires_grad for output in outputs):
        raise ValueError(
            f"{op}: {' and '.join(names)} must not require a gradient, since what is written has "
            "none; give a detached tensor, or run it under torch.no_grad()"
        )


def check_bias(op: str, bias: torch.Tensor | None, n: int) -> None:
    if bias is not None:
        check_tensor(op, "bias", bias, FLOATS, 1)
        check_shape(op, "bias", bias, [n], "[N]")


def check_group_bias(
    op: str, name: str, bias: torch.Tensor | None, shape: Sequence[int], rule: str
) -> None:
    if bias is not None:
        check_tensor(op, name, bias, FLOATS, 2)
        check_shape(op, name, bias, shape, rule)


def check_rank(
    op: str, num_experts: int, expert_offset: int, num_global_experts: int | None
) -> None:
    """Check that a rank's experts, from `expert_offset` on, are some of the whole model's."""
    num_all = num_experts if num_global_experts is None else num_global_experts
    if not 0 <= expert_offset <= num_all - num_experts:
        raise ValueError(
            f"{op}: expert_offset must be in [0, num_global_experts - E] for E = {num_experts} "
            f"experts here of {num_all} in the whole model, got {expert_offset}"
        )


def check_choices(op: str, top_k_index: torch.Tensor, num_experts: int) -> None:
    """Check the values of top_k_index: only on a CPU, where that costs no synchronisation."""
    if top_k_index.numel() == 0:
        return
    low, high = (int(x) for x in top_k_index.aminmax())
    if low < 0 or high > num_experts:
        raise ValueError(
            f"{op}: top_k_index must be in [0, E] for E = {num_experts} experts (E itself marks "
            f"a choice held elsewhere, of weight 0), got ids from {low} to {high}"
        )
