"""The registry under any order of events."""

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from orrery.orchestrator.engines.pool import EngineRegistry, Phase

NUM, START = 3, -1
engines = st.integers(0, NUM - 1)


class AnyOrder(RuleBasedStateMachine):
    """Events in any order, also late events of dead incarnations."""

    def __init__(self):
        super().__init__()
        self.roster = EngineRegistry(NUM, START)
        self.newest = [-1] * NUM
        self.attested: dict[
            tuple[int, int], int
        ] = {}  # (engine, incarnation) → version that it said it holds, last
        self.fenced: set[tuple[int, int]] = set()

    @rule(index=engines, back=st.integers(0, 2))
    def listens(self, index, back):
        incarnation = max(0, self.newest[index] + 1 - back)
        is_news = incarnation > self.newest[index]
        assert self.roster.listens(index, incarnation) == is_news
        if is_news:
            self.newest[index] = incarnation
            assert self.roster[index].phase is Phase.STALE

    @rule(rise=st.integers(0, 2))
    def want(self, rise):
        self.roster.want(self.roster.wanted + rise)

    @rule(index=engines, back=st.integers(0, 1), behind=st.integers(0, 1))
    def took(self, index, back, behind):
        incarnation, version = self.newest[index] - back, self.roster.wanted - behind
        before = self.roster[index].phase
        if before is Phase.STALE:  # only stale engines are updated
            self.attested[index, incarnation] = version
        may_serve = self.roster.took(index, incarnation, version)
        assert may_serve == (back == 0 and behind == 0 and before is Phase.STALE)

    @rule(index=engines, back=st.integers(0, 1))
    def serves(self, index, back):
        before = self.roster[index].phase
        assert self.roster.serves(index, self.newest[index] - back) == (
            back == 0 and before is Phase.UPDATED
        )

    @rule(index=engines, back=st.integers(0, 1))
    def failed(self, index, back):
        incarnation, before = self.newest[index] - back, self.roster[index].phase
        is_news = self.roster.failed(index, incarnation, "it is dead")
        assert is_news == (back == 0 and before not in (Phase.STARTING, Phase.FENCED))
        if is_news:
            self.fenced.add((index, incarnation))

    @precondition(lambda self: self.roster.wanted > START)
    @rule()
    def versions_only_rise(self):
        try:
            self.roster.want(self.roster.wanted - 1)
        except AssertionError:
            return
        raise RuntimeError("an older version was wanted")

    @invariant()
    def whoever_serves_holds_the_wanted_version_and_said_so_itself(self):
        for index in self.roster.at(Phase.UPDATED, Phase.HEALTHY):
            standing = self.roster[index]
            assert standing.version == self.roster.wanted
            assert standing.incarnation == self.newest[index]
            assert self.attested[index, standing.incarnation] == standing.version
            assert (index, standing.incarnation) not in self.fenced

    @invariant()
    def who_is_fenced_holds_nothing_and_says_why(self):
        for index in self.roster.at(Phase.FENCED):
            assert self.roster[index].version is None and self.roster[index].why


TestAnyOrder = AnyOrder.TestCase


@given(rises=st.lists(st.integers(1, 3), max_size=4))
def test_every_engine_gets_to_healthy_from_wherever_it_was(rises):
    roster = EngineRegistry(1, START)
    for incarnation, rise in enumerate(rises):
        roster.want(roster.wanted + rise)
        assert (
            roster.listens(0, incarnation)
            and roster.took(0, incarnation, roster.wanted)
            and roster.serves(0, incarnation)
        )
        assert roster.at(Phase.HEALTHY) == [0]
        assert roster.failed(0, incarnation, "it is dead")
