"""Asked: SIGUSR1 asks a process what it is doing, also one whose main thread is stuck in a library.

- Every role answers with the stacks of all its threads on stderr, from the signal handler itself (`stacks_on_signal`).
- A process that can say more (`call_on_signal`) does so from a thread of its own: Python's handlers run in the main thread only, but the
  byte that a signal writes to the wake-up descriptor comes at once.
"""

import faulthandler
import os
import signal
import threading
from collections.abc import Callable

STDERR = 2  # the descriptor: `sys.stderr` may be a stand-in without one


def stacks_on_signal(chain: bool = False) -> None:
    """Before anybody may send the signal, which ends a process that does not handle it."""
    faulthandler.register(signal.SIGUSR1, file=STDERR, all_threads=True, chain=chain)


def call_on_signal(answer: Callable[[], object]) -> None:
    """Run `answer` too, each time that this process is asked. For the main thread; the wake-up descriptor is this module's from then on."""
    asked, wakes = os.pipe()
    os.set_blocking(wakes, False)
    signal.set_wakeup_fd(wakes, warn_on_full_buffer=False)
    faulthandler.unregister(signal.SIGUSR1)
    signal.signal(signal.SIGUSR1, lambda *_: None)
    stacks_on_signal(chain=True)

    def listen() -> None:
        while numbers := os.read(asked, 64):
            if signal.SIGUSR1 in numbers:
                answer()

    threading.Thread(target=listen, name="asked", daemon=True).start()
