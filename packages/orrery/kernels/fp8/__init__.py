"""Block-scaled FP8: e4m3 values and one float32 scale a block (DeepSeek-V3, arXiv 2412.19437 §3.3).

`quantize` makes the values, `products` multiplies them: dense layers, groups of experts, and both
gradients.
"""
