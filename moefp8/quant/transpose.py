import torch
from ..kernels.common.blocks import BLOCK, round_up


def empty_transposed(w, shape):
    *m, k, n = shape
    return w.new_empty(*m, k, round_up(n, 16))[..., :n]


def transpose_codes_into(w, parts, out):
    n, k = w.shape[-2:]
    part, wide = n // parts, out.shape[-1] // parts
    out = out.view(torch.uint8).zero_()
    for p in range(parts):
        out[..., p * wide : p * wide + part] = (
            w[..., p * part : (p + 1) * part, :].view(torch.uint8).mT
        )


def transpose_codes(w, parts=1):
    n, k = w.shape[-2:]
    wide = round_up(n // parts, BLOCK) * parts if parts > 1 else n
    out = empty_transposed(w, (*w.shape[:-2], k, wide))
    transpose_codes_into(w, parts, out)
    return out
