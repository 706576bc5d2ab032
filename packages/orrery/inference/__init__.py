"""Run vLLM engines, which load new weights during requests and report their weights' digests."""
