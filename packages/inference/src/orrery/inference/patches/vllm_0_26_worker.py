"""A worker for vLLM 0.26 with data parallelism inside one server, by `--worker-cls`.

Upstream: every data-parallel rank seeds its sampler with the same `--seed`, so that two members of a group that fall to two ranks may come
out token for token alike. 0.32 adds the rank to the seed. Versions: 0.26 (read). Remove with 0.26.
"""

from vllm.v1.worker.gpu_worker import Worker

SEEDS_APART = 1_000_003  # more than there are replicas, whose seeds differ by 1


class SeededWorker(Worker):  # type: ignore[misc]
    """Tensor-parallel workers of a rank keep one seed: they must sample the same token."""

    def init_device(self) -> None:
        self.model_config.seed += SEEDS_APART * self.parallel_config.data_parallel_index
        super().init_device()
