"""Messages between the trainer's site and a site that lends an engine, in msgpack over HTTPS.

The lending site sends every request. The site first enters, then asks for jobs and posts answers
under its lease. Its name is the name in its certificate, never part of a message.
"""

import msgspec
import numpy as np

from orrery.elastic.door import Terms
from orrery.manifest.errors import OrreryError

MAX_ANSWERS = 32  # largest number of answers in a message
MAX_REASON = 300  # largest number of characters of a reason
POLL_S = 1.0  # longest wait for jobs
LEAST_LOGPROB = -50.0  # least accepted log-prob. Rarer tokens are under one in 10^16 draws


class GuestRefused(OrreryError):
    """The site may not sample for this run, for the reason in the message."""


class LeaseOver(Exception):
    """Signal that the site must enter again."""


class Entry(msgspec.Struct, frozen=True):
    """`listen`: ADDRESS:PORT where this site serves weights to others, or ""."""

    terms: Terms
    release: dict[str, str]  # versions of the engine's packages
    num_slots: int  # samples that the engine draws at a time
    listen: str = ""


class Entered(msgspec.Struct, frozen=True):
    """`attempt` names the run's attempt. Another attempt's versions have other weights."""

    lease: int
    attempt: str


class Ask(msgspec.Struct, frozen=True):
    """`version`, `digest`: weights that the engine attested. `room`: number of jobs to take."""

    lease: int
    version: int
    digest: str
    room: int


class SampleJob(msgspec.Struct, frozen=True):
    """One sample to draw after `prompt`, i32 [p]."""

    id: str
    prompt: bytes
    max_tokens: int
    temperature: float
    stop_token_ids: tuple[int, ...]
    ignore_eos: bool


class Told(msgspec.Struct, frozen=True):
    """The newest version that the site may fetch, and the `peers` that serve its blocks."""

    version: int
    peers: tuple[str, ...] = ()
    jobs: tuple[SampleJob, ...] = ()
    cancelled: tuple[str, ...] = ()
    is_over: bool = False


class GuestAnswer(msgspec.Struct, frozen=True):
    """Tokens i32 [n] and log-probs f32 [n], or a `failure`."""

    id: str
    version: int = -1
    token_ids: bytes = b""
    logprobs: bytes = b""
    finish_reason: str = ""
    failure: str = ""


class Answers(msgspec.Struct, frozen=True):
    lease: int
    answers: tuple[GuestAnswer, ...]


class Noted(msgspec.Struct, frozen=True):
    pass


def max_body_bytes(max_tokens: int) -> int:
    """Return the size of a site's longest message: MAX_ANSWERS answers of `max_tokens` tokens."""
    return MAX_ANSWERS * (8 * max_tokens + 1024) + (64 << 10)


def check_answer(
    job: SampleJob, version: int, answer: GuestAnswer, vocab_size: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return the answer's tokens i32 [n] and log-probs f32 [n].

    Raise GuestRefused if no honest engine sends this answer. `version` is the site's version when
    the site took the job.
    """
    tokens, logprobs = _array(answer.token_ids, np.int32), _array(answer.logprobs, np.float32)
    num, stops = len(tokens), np.isin(tokens, job.stop_token_ids)
    is_whole = answer.finish_reason == "length" and num == job.max_tokens and not stops.any()
    is_stopped = answer.finish_reason == "stop" and num > 0 and stops[-1] and not stops[:-1].any()
    for is_wrong, what in (
        (answer.version != version, f"version {answer.version} instead of {version}"),
        (not 0 < num <= job.max_tokens, f"{num} tokens instead of 1 to {job.max_tokens}"),
        (len(logprobs) != num, f"{len(logprobs)} log-probs of {num} tokens"),
        (((tokens < 0) | (tokens >= vocab_size)).any(), "a token outside the vocabulary"),
        (
            not ((logprobs >= LEAST_LOGPROB) & (logprobs <= 0)).all(),
            f"a log-prob that is not between {LEAST_LOGPROB:g} and 0",
        ),
        (not (is_whole or is_stopped), f"the end {answer.finish_reason[:20]!r} at token {num}"),
    ):
        if is_wrong:
            raise GuestRefused(f"it answered with {what}")
    return tokens, logprobs


def _array(data: bytes, dtype: type[np.generic]) -> np.ndarray:
    if len(data) % 4:
        raise GuestRefused(f"it answered with an array of {len(data)} bytes")
    return np.frombuffer(data, dtype)
