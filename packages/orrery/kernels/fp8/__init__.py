"""FP8 in blocks: e4m3 values, one float32 scale per block (DeepSeek-V3, arXiv 2412.19437 §3.3)."""
