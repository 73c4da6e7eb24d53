"""FP8 numbers: `BlockScaled`, and how tensors become one and come back."""

from .block_scaled import BlockScaled, dequantize, quantize_1x128, quantize_128x128

__all__ = ["BlockScaled", "dequantize", "quantize_128x128", "quantize_1x128"]
