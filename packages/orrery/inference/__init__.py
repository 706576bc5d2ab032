"""Run vLLM engines that load new weights during requests and report weight digests."""
