"""vLLM's disk tier with a bound: its files, its threads and its lookups, and the oldest files make room (`bounded_folder`).

- Upstream: the `fs` tier (`FileSystemTierManager`) has neither capacity nor eviction; "evicting chunks if capacity is needed" is the
  matter of a tier's `submit_store`. vLLM loads tiers and specs of others by name, so nothing of its is patched: loading this module names
  the tier, and `Tiers` is how a configuration has it loaded (`spec_module_path`).
- A block is used when it is written, written again, or loaded. Room is made by the thread that writes, never by the scheduler's.
- A file may be removed between its lookup and its load. The load then fails. vLLM keeps the blocks
  before it, treats the others as missing in this tier, and computes them.
- Versions: 0.32 (seen). Remove where upstream's tier takes a bound.
"""

from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory
from vllm.v1.kv_offload.tiering.fs.manager import FileSystemTierManager
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from orrery.inference.bounded_folder import BoundedFolder
from orrery.inference.kv_offload import DISK_TIER


class BoundedFiles(FileSystemTierManager):
    """The `fs` tier, whose files take at most `max_bytes`."""

    def __init__(self, *, max_bytes: int, **options: Any) -> None:
        super().__init__(**options)
        self._files = BoundedFolder(
            Path(f"{self.file_mapper.base_path}_r{self.file_mapper.rank}"), max_bytes
        )
        self._enqueue = self._pool.enqueue_store
        self._pool.enqueue_store = self._enqueue_stores  # type: ignore[method-assign]

    def submit_load(self, job_metadata: Any) -> None:
        self._files.used(map(self.file_mapper.get_file_name, job_metadata.keys))
        super().submit_load(job_metadata)

    def _enqueue_stores(self, job_id: int, n_tasks: int, tasks: Iterable[Any]) -> None:
        self._enqueue(job_id, n_tasks, [partial(self._store, task) for task in tasks])

    def _store(self, task: Any) -> None:
        """Run a task in a thread of the pool.

        It is a `functools.partial` whose first argument is the paths that it writes.
        """
        with self._files.writing(task.args[0], self._block_size):
            task()


class Tiers(TieringOffloadingSpec):
    """`TieringOffloadingSpec` with the bounded disk tier of this module."""


SecondaryTierFactory.register_tier(DISK_TIER, __name__, BoundedFiles.__name__)
