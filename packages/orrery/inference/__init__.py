"""vLLM engines that take new weights while requests run, and attest the weights they hold."""
