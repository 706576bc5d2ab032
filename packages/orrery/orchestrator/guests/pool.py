"""Draw samples on engines of other sites (clusters), and check the answers.

- The run's own samples set bounds of log-prob differences. Without bounds, sites get no jobs.
- A site's answers are held until a random share of them has passed the check.
- If a site restarts or sends no request for `lease_s`, the run's engines draw its samples.
- A false answer drops the site's queued rollouts. The run refuses the site until its line in
  `refused_sites.json` is removed.
"""

import asyncio
import math
import secrets
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from orrery.elastic.types import Terms
from orrery.manifest.schema import Manifest
from orrery.orchestrator.engines.messages import Generation
from orrery.orchestrator.engines.pool import Phase
from orrery.orchestrator.guests.messages import (
    MAX_ANSWERS,
    MAX_REASON,
    Answers,
    Ask,
    Entered,
    Entry,
    GuestAnswer,
    GuestRefused,
    LeaseOver,
    SampleJob,
    Told,
    check_answer,
    max_body_bytes,
)
from orrery.orchestrator.guests.sites import (
    CHANCE,
    NUM_HONEST,
    GuestJob,
    GuestSite,
    HonestSpread,
    RolloutScore,
    SiteTable,
)
from orrery.wire.recompute import Recomputed
from orrery.wire.weight_wire import Published

LEAST = 8  # minimum jobs per reply to a site, if enough wait
TAKE_S = 2.0  # after this wait, the run's engines draw the sample
MAX_OWN_CHECKS = 2  # concurrent, once bounds are known
Check = Callable[[int, np.ndarray, np.ndarray, float], Awaitable[Recomputed]]
Note = Callable[..., None]


class GuestPool:
    def __init__(
        self,
        manifest: Manifest,
        terms: Terms,
        release: dict[str, str],
        check: Check,
        note: Note,
        refused: dict[str, str] | None = None,
    ) -> None:
        """`check(version, prompt, tokens, temperature)` recomputes the log-probs of `tokens`."""
        spec = manifest.orchestrator.guests
        assert spec is not None
        self._spec, self._manifest = spec, manifest
        self._table = SiteTable(manifest, terms, release)
        self.registry, self.sites = self._table.registry, self._table.sites
        self._check, self._note = check, note
        self.max_body_bytes = max_body_bytes(manifest.inference.max_model_len_tokens)
        self.first_index = manifest.inference.num_replicas
        self.refused = {} if refused is None else refused
        self.on_refused: Callable[[int], int] = lambda index: 0  # drops a site's rollouts
        self.publish: Callable[[Published], None] = lambda version: None
        self.digests: dict[int, str] = {}
        self.spread, self.is_over = HonestSpread(spec), False
        self.error: Exception | None = None
        self.num_dropped = 0
        self._attempt = secrets.token_hex(8)
        self._waiting: deque[GuestJob] = deque()
        self._changed = asyncio.Event()
        self._num_home = 0
        self._last = "", False
        self._own_checks: set[asyncio.Task[None]] = set()

    async def draw(
        self,
        here: Callable[[], Awaitable[Generation]],
        share: str,
        token_ids: Sequence[int] | np.ndarray,
        **options: Any,
    ) -> Generation:
        found = await self.generate(share, token_ids, **options)
        if found is not None:
            return found
        return await self.draw_here(here(), token_ids, options["temperature"])

    async def generate(
        self, share: str, token_ids: Sequence[int] | np.ndarray, **options: Any
    ) -> Generation | None:
        """Return a sample from another site, or None if the run's engines must draw it.

        Consecutive calls with equal `share` have the same prompt. Either other sites or the run's
        engines get all of them, so that few engines prefill the prompt.
        """
        if share != self._last[0]:
            self._last = share, self._prefers_guests()
        if not self._last[1]:
            return None
        prompt = np.asarray(token_ids, np.int32)
        job = SampleJob(
            secrets.token_hex(16),
            prompt.tobytes(),
            options["max_tokens"],
            options["temperature"],
            tuple(map(int, options.get("stop_token_ids", ()))),
            options.get("ignore_eos", False),
        )
        own = GuestJob(job, prompt, asyncio.get_running_loop().create_future())
        self._waiting.append(own)
        self._wake()
        timer = asyncio.get_running_loop().call_later(TAKE_S, self._take_back, own)
        try:
            return await own.result
        finally:
            timer.cancel()
            self._forget(own)

    async def draw_here(
        self, draw: Awaitable[Generation], token_ids: Sequence[int] | np.ndarray, temperature: float
    ) -> Generation:
        """Return a sample of the run's engines. Some samples update the bounds."""
        self._num_home += 1
        try:
            found = await draw
        finally:
            self._num_home -= 1
        is_known = self.spread.is_known
        is_wanted = CHANCE.random() < self._spec.verified_share if is_known else True
        most = MAX_OWN_CHECKS if is_known else NUM_HONEST
        if is_wanted and len(self._own_checks) < most and _is_of_one_version(found):
            prompt = np.asarray(token_ids, np.int32)
            task = asyncio.create_task(self._learn(prompt, found, temperature))
            self._own_checks.add(task)
            task.add_done_callback(self._own_checks.discard)
        return found

    def want(self, version: int, digest: str) -> None:
        self.digests[version] = digest
        self.registry.want(version)
        self._wake()

    def expire(self, now_s: float) -> None:
        for site in self.sites.values():
            is_up = self.registry[site.index].phase is not Phase.FENCED
            if is_up and now_s - site.seen_s > self._spec.lease_s:
                self._fence(site, f"no request for {self._spec.lease_s:g} s")

    def check(self) -> None:
        if self.error is not None:
            raise self.error

    async def close(self) -> None:
        self.is_over = True
        self._wake()
        for own in [*self._waiting, *(j for s in self.sites.values() for j in s.jobs.values())]:
            own.give_back()
        checks = [site.checking for site in self.sites.values() if site.checking]
        tasks = [*checks, *self._own_checks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # Requests from sites. `name` is from the TLS certificate.

    def enter(self, name: str, entry: Entry, now_s: float) -> Entered:
        self.check_allowed(name)
        self._table.check_entry(name, entry)
        if name not in self.sites:
            self.sites[name] = GuestSite(name, self.registry.add())
        site = self.sites[name]
        if self._table.is_up(site):
            self._fence(site, "it entered again")
        site.lease, site.seen_s = site.lease + 1, now_s
        site.num_slots, site.listen = entry.num_slots, entry.listen
        self.registry.listens(site.index, site.lease)
        self._note(event="guest_entered", site=name, engine=self.first_index + site.index)
        return Entered(site.lease, self._attempt)

    async def ask(self, name: str, ask: Ask, poll_s: float) -> Told:
        site, end_s = self._site(name, ask.lease), time.monotonic() + poll_s
        self._attest(site, ask)
        while True:
            free = site.num_slots - len(site.jobs)
            site.room = max(0, min(ask.room, free)) if self._table.is_fresh(site) else 0
            jobs, wanted = self._give(site) if site.room else [], self._table.told(site)
            left_s = end_s - time.monotonic()
            is_news = jobs or site.cancelled or self.is_over or wanted > site.told
            if is_news or not ask.room or left_s <= 0:
                return self._tell(site, wanted, jobs)
            await _event(self._changed, left_s)
            self._site(name, ask.lease)

    def _tell(self, site: GuestSite, wanted: int, jobs: list[SampleJob]) -> Told:
        if wanted > site.told:
            site.told, site.told_s = wanted, time.monotonic()
        cancelled = tuple(site.cancelled)
        site.cancelled.clear()
        return Told(wanted, self._table.peers(site, wanted), tuple(jobs), cancelled, self.is_over)

    def answer(self, name: str, answers: Answers) -> None:
        site = self._site(name, answers.lease)
        if len(answers.answers) > MAX_ANSWERS:
            self._refuse(site, f"it sent {len(answers.answers)} answers at once")
        for answer in answers.answers:
            own = site.jobs.get(answer.id)
            if own is None or own.result.done() or any(own is each for each, _ in site.arrived):
                continue  # a late or repeated answer, or another site's job
            self._take(site, own, answer)
        if site.arrived and site.checking is None:
            site.checking = asyncio.create_task(self._check_windows(site))

    def check_allowed(self, name: str) -> None:
        if (why := self.refused.get(name)) is not None:
            raise GuestRefused(f"site {name} is refused: {why}")

    def _site(self, name: str, lease: int) -> GuestSite:
        self.check_allowed(name)
        site = self.sites.get(name)
        if site is None or site.lease != lease or not self._table.is_up(site):
            raise LeaseOver
        site.seen_s = time.monotonic()
        return site

    def _attest(self, site: GuestSite, ask: Ask) -> None:
        if ask.version not in self.digests or ask.version == self.registry[site.index].version:
            return
        if self.digests[ask.version] != ask.digest:
            self._refuse(site, f"its weights differ from version {ask.version}")
        if self.registry.took(site.index, site.lease, ask.version):
            self.registry.serves(site.index, site.lease)
        self._wake()

    def _prefers_guests(self) -> bool:
        """Return whether other sites have room and are no busier than the run's engines."""
        open_sites = self._table.open_sites()
        if not self.spread.is_known or len(self._waiting) >= sum(s.room for s in open_sites):
            return False
        slots = sum(site.num_slots for site in open_sites)
        taken = len(self._waiting) + sum(len(site.jobs) for site in open_sites)
        inference = self._manifest.inference
        at_home = self._num_home / (inference.num_replicas * inference.max_num_sequences)
        return taken <= at_home * slots

    def _give(self, site: GuestSite) -> list[SampleJob]:
        given: list[SampleJob] = []
        version = self.registry[site.index].version
        assert version is not None
        num_open = max(1, len(self._table.open_sites()))
        most = min(site.room, max(LEAST, math.ceil(len(self._waiting) / num_open)))
        while self._waiting and len(given) < most:
            own = self._waiting.popleft()
            if own.result.done():
                continue
            own.site, own.version = site, version
            site.jobs[own.job.id] = own
            given.append(own.job)
        site.room -= len(given)
        return given

    def _take(self, site: GuestSite, own: GuestJob, answer: GuestAnswer) -> None:
        if answer.failure:
            why = answer.failure[:MAX_REASON]
            self._note(event="guest_failure", site=site.name, why=why)
            own.fail(f"site {site.name}: {why}")
            return
        try:
            tokens, logprobs = check_answer(
                own.job, own.version, answer, self._manifest.model.vocab_size
            )
        except GuestRefused as error:
            self._refuse(site, str(error))
        versions = np.full(len(tokens), own.version, np.int32)
        engine = self.first_index + site.index
        reason = answer.finish_reason
        made = Generation(own.job.id, tokens, logprobs, versions, reason, 0, engine=engine)
        site.arrived.append((own, made))

    def _take_back(self, own: GuestJob) -> None:
        if own.site is None:
            own.give_back()

    def _forget(self, own: GuestJob) -> None:
        if own.site is None:
            self._waiting = deque(each for each in self._waiting if each is not own)
            return
        made = own.result
        is_unused = made.cancelled() or made.exception() is not None or made.result() is None
        if own.site.jobs.pop(own.job.id, None) is not None and is_unused:
            own.site.cancelled.append(own.job.id)

    def _fence(self, site: GuestSite, why: str) -> None:
        self.registry.failed(site.index, site.lease, why)
        for own in list(site.jobs.values()):
            own.give_back()
        site.jobs.clear()
        site.arrived.clear()
        self._note(event="guest_lost", site=site.name, why=why)

    def _refuse(self, site: GuestSite, why: str) -> None:
        """Refuse the site permanently, and raise GuestRefused."""
        num_held = len(site.arrived)
        num_waiting = self.on_refused(self.first_index + site.index)
        self.num_dropped += num_held + num_waiting
        self.refused[site.name] = why
        self._fence(site, why)
        dropped = {"num_held": num_held, "num_waiting": num_waiting}
        self._note(event="guest_refused", site=site.name, why=why, **dropped)
        self.check_allowed(site.name)

    async def _check_windows(self, site: GuestSite) -> None:
        try:
            while site.arrived:
                lease, window = site.lease, list(site.arrived)
                removed = await self._verify(site, window)
                if site.lease != lease or not self._table.is_up(site):
                    continue
                del site.arrived[: len(window)]
                for own, made in window:
                    if own.version in removed:
                        own.fail(f"the weights of version {own.version} were removed")
                    elif not own.result.done():
                        own.result.set_result(made)
                        site.num_accepted += 1
        except GuestRefused:
            pass
        except Exception as error:
            self.error = self.error or error
        finally:
            site.checking = None

    async def _verify(
        self, site: GuestSite, window: Sequence[tuple[GuestJob, Generation]]
    ) -> set[int]:
        """Check a random share of the answers. Return versions whose weights are gone."""
        removed: set[int] = set()
        for version in {own.version for own, _ in window}:
            group = [each for each in window if each[0].version == version]
            num = math.ceil(self._spec.verified_share * len(group))
            for own, made in CHANCE.sample(group, num):
                score = await self._score(own.prompt, made, own.job.temperature)
                if score is None:
                    removed.add(version)
                    break
                if fault := site.evidence.fault(score, self.spread):
                    self._refuse(site, fault)
        return removed

    async def _learn(self, prompt: np.ndarray, made: Generation, temperature: float) -> None:
        try:
            score = await self._score(prompt, made, temperature)
        except Exception as error:
            self.error = self.error or error
            return
        if score is not None:
            self.spread.add(score)
            self._wake()

    async def _score(
        self, prompt: np.ndarray, made: Generation, temperature: float
    ) -> RolloutScore | None:
        version = int(made.versions[0])
        found = await self._check(version, prompt, made.token_ids, temperature)
        return RolloutScore.of(made.logprobs, found) if found.logprob else None

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


async def _event(event: asyncio.Event, within_s: float) -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(within_s):
            await event.wait()


def _is_of_one_version(made: Generation) -> bool:
    versions = made.versions
    return len(versions) > 0 and versions[0] >= 0 and bool((versions == versions[0]).all())
