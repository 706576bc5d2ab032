"""Block-scaled FP8: e4m3 values, a float32 scale per block (DeepSeek-V3, arXiv 2412.19437 §3.3)."""
