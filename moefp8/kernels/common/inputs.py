"""The float types that kernels read: the names of `Input` in device/input.cuh."""

import torch

INPUTS = {
    torch.bfloat16: "Input::kBFloat16",
    torch.float16: "Input::kHalf",
    torch.float32: "Input::kFloat",
}
