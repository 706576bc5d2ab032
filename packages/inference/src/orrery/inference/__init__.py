"""Inference: vLLM engines that take weights in flight, say what weights they hold, and leave nothing behind."""
