"""`orrery` as a fork of a process with a fetch's imports.

- The hub's client is imported anew, because it reads its variables at import. Its chunks are small,
  because it keeps whole chunks of a broken download.
- The programs that a fetch starts are forks too.
"""

import importlib
import multiprocessing
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

from forked_roles import be


def run(command: list[str], env: dict[str, str], **_options: bool) -> subprocess.CompletedProcess:
    """Fork `python -m MODULE WORDS`."""
    _python, _m, module, *words = command
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder, "out"), Path(folder, "err")
        arguments = (module, words, (out, err), env, "", Path.cwd(), "/proc/self/ns/net")
        process = multiprocessing.Process(target=be, args=arguments)
        process.start()
        process.join()
        texts = [path.read_text() for path in (out, err)]
    return subprocess.CompletedProcess(command, process.exitcode, *texts)


if __name__ == "__main__":
    for name in [name for name in sys.modules if name.partition(".")[0] == "huggingface_hub"]:
        del sys.modules[name]
    importlib.import_module("huggingface_hub.constants").DOWNLOAD_CHUNK_SIZE = 1024
    from orrery.launcher import cli, fetch

    fetch.subprocess = SimpleNamespace(run=run)
    cli.main()
