"""Messages between a run and a site (cluster) that lends it an engine, in msgpack over HTTPS.

The site sends all requests. `Entry` begins its lease (membership), `Ask` gets jobs, and `Answers`
returns samples. The lease ends after `lease_s` without a request.
"""

import msgspec
import numpy as np

from orrery.elastic.types import Terms
from orrery.manifest.errors import OrreryError

MAX_ANSWERS = 32
MAX_REASON = 300
POLL_S = 1.0  # longest wait of an `Ask`
LEAST_LOGPROB = -50.0  # smallest accepted log-prob (probability 2e-22)


class GuestRefused(OrreryError):
    """The run accepts no samples from the site."""


class LeaseOver(Exception):
    pass


class Entry(msgspec.Struct, frozen=True):
    """A site's first message. `listen`: ADDRESS:PORT where other sites get weights, or ""."""

    terms: Terms
    release: dict[str, str]  # {engine package: version}
    num_slots: int  # maximum number of concurrent samples
    listen: str = ""


class Entered(msgspec.Struct, frozen=True):
    """The answer to Entry. `attempt`: id of the run's start. A new id invalidates weights."""

    lease: int
    attempt: str


class Ask(msgspec.Struct, frozen=True):
    """A request for at most `room` jobs, with `version` and `digest` of the site's weights."""

    lease: int
    version: int
    digest: str
    room: int


class SampleJob(msgspec.Struct, frozen=True):
    """A request for one sample. `prompt`: token ids, i32 [p]."""

    id: str
    prompt: bytes
    max_tokens: int
    temperature: float
    stop_token_ids: tuple[int, ...]
    ignore_eos: bool


class Told(msgspec.Struct, frozen=True):
    """The answer to Ask. `version`: newest version to fetch. `peers`: addresses that serve it."""

    version: int
    peers: tuple[str, ...] = ()
    jobs: tuple[SampleJob, ...] = ()
    cancelled: tuple[str, ...] = ()
    is_over: bool = False


class GuestAnswer(msgspec.Struct, frozen=True):
    """A sample's tokens i32 [n] and log-probs f32 [n], or a `failure`."""

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
    return MAX_ANSWERS * (8 * max_tokens + 1024) + (64 << 10)


def check_answer(
    job: SampleJob, version: int, answer: GuestAnswer, vocab_size: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return the answer's tokens i32 [n] and log-probs f32 [n].

    Raise GuestRefused if no correct engine could give this answer. `version`: version of the
    site's weights for this job.
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
        (
            not (is_whole or is_stopped),
            f"finish_reason {answer.finish_reason[:20]!r} at token {num}",
        ),
    ):
        if is_wrong:
            raise GuestRefused(f"it answered with {what}")
    return tokens, logprobs


def _array(data: bytes, dtype: type[np.generic]) -> np.ndarray:
    if len(data) % 4:
        raise GuestRefused(f"it answered with an array of {len(data)} bytes, not a multiple of 4")
    return np.frombuffer(data, dtype)
