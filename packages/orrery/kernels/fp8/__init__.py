"""Block-scaled FP8: e4m3 values, one float32 scale a block (DeepSeek-V3, arXiv 2412.19437 §3.3)."""
