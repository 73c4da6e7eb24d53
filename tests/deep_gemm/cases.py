"""What the tests of DeepGEMM's calls share: how forms are written and called, and operands."""

import re

import torch

import moefp8.deep_gemm as deep_gemm
from moefp8.deep_gemm.utils import layout, math
from moefp8.deep_gemm.utils.layout import get_mn_major_tma_aligned_tensor
from moefp8.quant import dequantize, quantize_1x128, quantize_128x128

NAN = float("nan")
N, K = 200, 300
COUNTS = 100, 0, 130, 128, 1  # rows of each group


def forms(text: str) -> list[str]:
    """Each line is a call, which indented lines continue."""
    return [" ".join(form.split()) for form in re.split(r"\n(?=\S)", text.strip())]


def called(form: str, names: dict[str, object]) -> object:
    tools = {"deep_gemm": deep_gemm, "layout": layout, "math": math, "torch": torch}
    tools |= {"get_mn_major_tma_aligned_tensor": get_mn_major_tma_aligned_tensor}
    return eval(form, tools | names)


def row_major(quantized) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales as DeepGEMM's casts give them."""
    data, scales = quantized
    return data, scales.contiguous()


def dense(device: str = "cpu", m: int = 130) -> dict[str, object]:
    x, w = torch.randn(m, K, device=device), torch.randn(N, K, device=device)
    a, b = row_major(quantize_1x128(x)), quantize_128x128(w)
    d = torch.full((m, N), NAN, dtype=torch.bfloat16, device=device)
    c = torch.randn(m, N, device=device).bfloat16()
    names = {"x": x, "w": w, "a": a, "b": tuple(b), "c": c, "d": d, "m": m, "k": K}
    return names | {"a_t": (a[0].T, a[1].T), "b_t": (b[0].T, b[1].T)}


def product(a, b) -> torch.Tensor:
    return dequantize(a).double() @ dequantize(b).double().mT


def experts(device: str) -> tuple[torch.Tensor, torch.Tensor]:
    return tuple(quantize_128x128(torch.randn(len(COUNTS), N, K, device=device)))


def contiguous(device: str = "cpu", alignment: int = 128, spare: int = 148) -> dict[str, object]:
    """Groups of `COUNTS` rows, and NaN in a and d where there is padding.

    After the last group follow `spare` rows of padding.
    """
    m_indices, ends = [], []
    for group, count in enumerate(COUNTS):
        ends.append(len(m_indices) + count)
        m_indices += [group] * count + [-1] * (-count % alignment)
    rows = torch.tensor(m_indices + [-1] * spare, dtype=torch.int32, device=device)
    x, b = torch.randn(len(rows), K, device=device), experts(device)
    a = row_major(quantize_1x128(x.masked_fill(rows[:, None] < 0, NAN)))
    d = torch.full((len(rows), N), NAN, dtype=torch.bfloat16, device=device)
    psum_m = torch.tensor(ends, dtype=torch.int32, device=device)
    names = {"a": a, "b": b, "b_t": (b[0].mT, b[1].mT), "d": d}
    return names | {"m_indices": rows, "psum_m": psum_m}
