"""Executed answers cannot harm the asking process or later answers."""

import asyncio
import os
import subprocess
import sys
import time

import psutil
import pytest
from task_chats import task_use

import orrery.tasks.reasoning_gym
from orrery.manifest.errors import OrreryError
from orrery.tasks import Message, make, scorer_pool
from orrery.tasks.reasoning_gym import Family
from orrery.tasks.scorer_pool import ScorerPool
from orrery.tasks.task import JudgeBroken

HANGS = "9**9**9**9"
WAITS = "__import__('time').sleep(600)"
# Its scorer takes an answer that evaluates to the right list as 0.1.
TASK = task_use("reasoning_gym", family="spiral_matrix", config={})


@pytest.fixture(scope="module")
def spare():
    """Yield a list that hands one living scorer to the next test: to start one takes a second."""
    scorers = []
    yield scorers
    for scorer in scorers:
        scorer.end()


@pytest.fixture
def kept(monkeypatch, spare):
    """Yield a pool of at most two scorers with a limit of 2 s. It takes the spare scorer."""
    mine = ScorerPool(num_scorers=2, limit_s=2.0)
    monkeypatch.setattr(orrery.tasks.reasoning_gym, "SCORERS", mine)
    mine._idle["reasoning_gym"] += spare
    spare.clear()
    for scorer in mine._idle["reasoning_gym"]:
        scorer.num_until_canary = 0
    yield mine
    for scorer in mine._idle["reasoning_gym"]:
        if spare or scorer.process.poll() is not None:
            scorer.end()
        else:
            spare.append(scorer)


@pytest.fixture
def unstarted(kept, spare):
    """Return the pool without a running scorer."""
    spare += kept._idle["reasoning_gym"]
    kept._idle["reasoning_gym"].clear()
    return kept


@pytest.fixture
def task(kept):
    return make(TASK)


async def said(task, text: str):
    problem = task.problem(0)
    return await task.judge(
        problem, [*problem.messages, Message("assistant", text.replace("RIGHT", problem.answer))]
    )


async def holds(task, expression: str) -> bool:
    """Whether a Python expression is true where answers are scored."""
    return (await said(task, f"'RIGHT'.split() if {expression} else []")).reward == 0.1


async def test_an_answer_that_never_ends_is_worth_nothing_and_the_loop_goes_on(task):
    await said(task, "RIGHT")
    scored, ticks = asyncio.create_task(said(task, HANGS)), 0
    while not scored.done():
        await asyncio.sleep(0.01)
        ticks += 1
    assert (scored.result().reward, scored.result().metrics) == (
        0.0,
        {"exact": 0.0, "unscorable": 1.0},
    )
    assert ticks > 20
    assert (await said(task, "RIGHT")).metrics == {"exact": 1.0, "unscorable": 0.0}


COMPARES = [
    ({"kind": "exact", "ignore_case": False, "pattern": "(-?[0-9]+)"}, "4"),
    ({"kind": "pattern", "pattern": "= {answer}$"}, "4"),
    ({"kind": "choice", "num_choices": 4}, "D"),
]


@pytest.mark.parametrize(("verdict", "answer"), COMPARES)
async def test_a_verdict_that_compares_text_needs_no_fork(kept, verdict, answer):
    request = {"verdict": verdict, "answer": answer, "row": None}
    assert await kept.score("verdict", request, f"so it = {answer}") == 1.0
    [scorer] = kept._idle["verdict"]
    before = _faults_of_children(scorer)
    assert await kept.score("verdict", request, "so it = B 17") == 0.0
    assert await kept.score("verdict", request, f"it = {answer}") == 1.0
    assert _faults_of_children(scorer) == before


def _faults_of_children(scorer) -> int:
    """Return the page faults of the children that a scorer has waited for."""
    with open(f"/proc/{scorer.process.pid}/stat") as stat:
        return int(stat.read().rpartition(")")[2].split()[8])


async def test_a_search_that_does_not_end_is_worth_nothing_and_ends_no_scorer(kept):
    verdict = {"kind": "exact", "ignore_case": False, "pattern": "(a+)+$"}
    request = {"verdict": verdict, "answer": "a", "row": None}
    assert await kept.score("verdict", request, "a") == 1.0
    [scorer] = kept._idle["verdict"]
    assert await kept.score("verdict", request, 40 * "a" + "b") is None
    assert await kept.score("verdict", request, "a") == 1.0 and kept._idle["verdict"] == [scorer]


@pytest.mark.parametrize("leaves", ["exit(0)", "__import__('os')._exit(0)"])
async def test_an_answer_that_exits_ends_nobody_but_its_own_scorer(task, leaves):
    assert (await said(task, leaves)).metrics == {"exact": 0.0, "unscorable": 1.0}
    assert (await said(task, "RIGHT")).reward == 1.0


async def test_an_answer_that_hangs_holds_up_one_scorer_of_all_and_there_are_no_more_than_there_may(
    unstarted, task
):
    ended = []
    scored = [asyncio.create_task(said(task, text)) for text in (WAITS, *["RIGHT"] * 20)]
    for number, one in enumerate(scored):
        one.add_done_callback(lambda _, number=number: ended.append(number))
    await asyncio.gather(*scored)
    assert ended[-1] == 0 and [one.result().reward for one in scored] == [0.0, *[1.0] * 20]
    assert len(unstarted._idle["reasoning_gym"]) == 2


async def test_the_limit_counts_from_an_answers_turn(kept, task):
    kept.num_scorers = 1
    waits_longer_than_the_limit = [WAITS, "RIGHT"]
    judged = await asyncio.gather(*(said(task, text) for text in waits_longer_than_the_limit))
    assert [one.reward for one in judged] == [0.0, 1.0]


async def test_an_answer_finds_neither_the_token_nor_a_file_nor_room_for_one(
    unstarted, task, monkeypatch, tmp_path
):
    monkeypatch.setenv("HF_TOKEN", "secret")
    monkeypatch.setenv("MY_PASSWORD", "secret")
    assert await holds(task, "True") and not await holds(task, "False")
    assert await holds(task, "'secret' not in __import__('os').environ.values()")
    assert await holds(task, "__import__('os').listdir() == []")
    kept = tmp_path / "kept"
    await said(task, f"open({str(kept)!r}, 'w').write('x' * 100)")
    assert kept.read_text() == ""
    limits = [("AS", 4 * 2**30), ("FSIZE", 0), ("CORE", 0)]
    assert await holds(
        task,
        "all((r := __import__('resource')).getrlimit(getattr(r, 'RLIMIT_' + n)) == (m, m) "
        f"for n, m in {limits})",
    )
    assert await holds(task, "0 < (r := __import__('resource')).getrlimit(r.RLIMIT_CPU)[0] < 60")


async def test_what_a_scorer_prints_is_no_answer_and_what_speaks_in_its_place_is_not_believed(task):
    assert (
        await said(task, "[print('[1, 1.0]', flush=True), __import__('os').write(1, b'[1, 1.0]')]")
    ).reward == 0.0
    for descriptor in range(16):  # wherever its scorer answers
        forged = await said(task, f"[__import__('os').write({descriptor}, b'[7777, 1.0]\\n')]")
        assert forged.metrics["exact"] == 0.0
    assert (await said(task, "wrong")).metrics == {"exact": 0.0, "unscorable": 0.0}


PATCHES = {
    "the scorer": "setattr("
    "__import__('reasoning_gym').algorithmic.spiral_matrix.SpiralMatrixDataset, "
    "'score_answer', lambda *_: 1.0)",
    "the interpreter": "setattr(__import__('builtins'), 'float', lambda *_: 1.0)",
    "a thread": "__import__('threading').Thread("
    "target=lambda: [__import__('os').write(n, b'1.0') for n in range(9999)]).start()",
}


@pytest.mark.parametrize("patch", PATCHES)
async def test_what_an_answer_changes_in_its_process_scores_no_other_answer(task, patch):
    await said(task, f"[{PATCHES[patch]}]")
    assert (await said(task, "wrong")).metrics == {"exact": 0.0, "unscorable": 0.0}
    assert (await said(task, "RIGHT")).metrics == {"exact": 1.0, "unscorable": 0.0}


async def test_what_an_answer_starts_ends_with_it(kept, task):
    await said(task, "[__import__('subprocess').Popen(['sleep', '600'], start_new_session=True)]")
    assert psutil.Process(kept._idle["reasoning_gym"][0].process.pid).children(recursive=True) == []


@pytest.mark.parametrize(
    ("signal", "how"), [("SIGKILL", "ended, or gave"), ("SIGSTOP", "timed out")]
)
async def test_an_answer_that_ends_or_stops_the_process_behind_it_fails_its_rollout(
    kept, task, monkeypatch, signal, how
):
    monkeypatch.setattr(scorer_pool, "SLACK_S", 0.5)
    await said(task, "RIGHT")
    with pytest.raises(OrreryError, match=how):
        await said(
            task,
            "[(o := __import__('os')).kill(o.getppid(), "
            f"__import__('signal').{signal}), __import__('time').sleep(60)]",
        )
    assert kept._idle["reasoning_gym"] == [] and (await said(task, "RIGHT")).reward == 1.0


READS_ALL = """
import os, re
def ancestors():
    pid = os.getpid()
    while pid > 1:
        yield pid
        pid = int(open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[1])
def seen():
    for pid in list(ancestors())[1:LAST] + ["self"]:  # not the test, which knows the token too
        for file in ("environ", "cmdline"):
            try:
                yield open(f"/proc/{pid}/{file}", "rb").read()
            except OSError:
                pass
        try:
            with open(f"/proc/{pid}/mem", "rb", 0) as memory:
                for line in open(f"/proc/{pid}/maps"):
                    begin, end = (int(each, 16) for each in line.split()[0].split("-"))
                    try:
                        memory.seek(begin)
                        yield memory.read(min(end - begin, 1 << 26))
                    except (OSError, ValueError, OverflowError):
                        pass
        except OSError:
            pass
        try:
            for name in os.listdir(f"/proc/{pid}/fd"):
                yield os.readlink(f"/proc/{pid}/fd/{name}").encode()
        except OSError:
            pass
found = any(bytes.fromhex(HALF) + bytes.fromhex(OTHER) in each for each in seen())
"""


@pytest.mark.parametrize("asks_as", ["whoever tests", "an ordinary user"])
def test_an_answer_reads_the_token_of_the_process_that_asks_neither_in_variables_nor_in_memory(
    asks_as, tmp_path
):
    """The answer holds the token in two parts, so that it does not find itself."""
    token = "5ca1ab1e0ddba11"
    reads = READS_ALL.replace("HALF", repr(token[:7].encode().hex())).replace(
        "OTHER", repr(token[7:].encode().hex())
    )
    itself = f"(names := {{}}, exec({reads.replace('LAST', '3')!r}, names), names['found'])[2]"
    program = [sys.executable, "-c", f"{reads.replace('LAST', '4')}print(found)"]
    a_program = (
        f"__import__('subprocess').run({program!r}, capture_output=True).stdout != b'False\\n'"
    )
    (tmp_path / "itself").write_text(f"RIGHT if {itself} else []")
    (tmp_path / "a program that it starts").write_text(f"RIGHT if {a_program} else []")
    code = f"""
import asyncio
import orrery.tasks.reasoning_gym as gym
from orrery.runtime.process_control import drop_privileges
from orrery.runtime.network import take_token
from orrery.tasks.scorer_pool import ScorerPool
if {asks_as == "an ordinary user"}:
    drop_privileges()
token = take_token()
assert len(token) == {len(token)}
item = gym.Family("spiral_matrix", {{}}).dataset(0)[0]
files = "itself", "a program that it starts"
answers = [open({str(tmp_path)!r} + "/" + file).read() for file in files]
answers.append("RIGHT if True else []")
async def main():
    scorers = ScorerPool(limit_s=60.0)
    texts = [each.replace("RIGHT", repr(item["answer"].split())) for each in answers]
    request = ["spiral_matrix", {{}}, 0, item["question"]]
    print([await scorers.score("reasoning_gym", request, text) for text in texts])
asyncio.run(main())
"""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "ORRERY_TOKEN_FILE": "-"}
    asks = subprocess.run(
        [sys.executable, "-c", code],
        input=token,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert asks.stdout == "[0.0, 0.0, 0.1]\n", asks.stderr


async def test_a_scorer_that_knows_known_answers_no_more_ends_the_run(
    unstarted, task, monkeypatch, tmp_path
):
    module = (
        "from reasoning_gym.algorithmic.spiral_matrix import SpiralMatrixDataset as S\n"
        "S.score_answer = lambda *_: 1.0\n"
    )
    (tmp_path / "sitecustomize.py").write_text(module)
    with monkeypatch.context() as broken:
        broken.syspath_prepend(tmp_path)
        with pytest.raises(
            JudgeBroken,
            match=r"reasoning_gym gave 1\.0 to a known answer that is worth 0. Rewards since",
        ):
            await said(task, "RIGHT")
    assert (await said(task, "RIGHT")).reward == 1.0


async def test_known_answers_come_again_after_so_many(kept, task, monkeypatch):
    monkeypatch.setattr(scorer_pool, "CANARY_EVERY", 2)
    for _ in range(2):
        await said(task, "RIGHT")
    request, _, wrong = scorer_pool._canary("reasoning_gym")
    monkeypatch.setattr(scorer_pool, "_canary", lambda kind: (request, "no list", wrong))
    with pytest.raises(JudgeBroken, match=r"gave 0\.0 to a known answer"):
        await said(task, "RIGHT")


async def test_a_scorer_of_verdicts_does_not_wait_for_imports_of_reasoning_gym(kept):
    request = {"verdict": scorer_pool.EXACT, "answer": "1", "row": None}
    assert await kept.score("verdict", request, "1") == 1.0
    [scorer] = kept._idle["verdict"]
    with open(f"/proc/{scorer.process.pid}/maps") as mapped:
        assert "matplotlib" not in mapped.read()


async def test_a_scorer_whose_answer_nobody_waits_for_does_not_give_it_to_the_next(task):
    await said(task, "RIGHT")
    given_up = asyncio.create_task(
        said(task, "[__import__('time').sleep(0.5)] and 'RIGHT'.split()")
    )
    await asyncio.sleep(0.1)
    given_up.cancel()
    with pytest.raises(asyncio.CancelledError):
        await given_up
    assert (await said(task, "RIGHT")).reward == 1.0


async def test_a_start_that_nobody_waits_for_any_more_serves_the_next_answer(unstarted, task):
    given_up = asyncio.create_task(said(task, "RIGHT"))
    await asyncio.sleep(0.1)
    given_up.cancel()
    with pytest.raises(asyncio.CancelledError):
        await given_up
    [scorer] = unstarted._idle["reasoning_gym"]
    assert (await said(task, "RIGHT")).reward == 1.0 and unstarted._idle["reasoning_gym"] == [
        scorer
    ]


async def test_a_scorer_that_ended_while_idle_costs_no_answer(kept, task):
    await said(task, "RIGHT")
    [scorer] = kept._idle["reasoning_gym"]
    scorer.process.kill()
    scorer.process.wait()
    assert (await said(task, "RIGHT")).reward == 1.0


def test_processes_survive_a_change_of_event_loop_and_signals_to_the_group(kept, task):
    assert asyncio.run(said(task, "RIGHT")).reward == 1.0
    [scorer] = kept._idle["reasoning_gym"]
    for number in (15, 2, 10):
        scorer.process.send_signal(number)
    assert asyncio.run(said(task, "RIGHT")).reward == 1.0
    assert kept._idle["reasoning_gym"] == [scorer]


async def test_a_scorer_that_cannot_start_is_no_answers_fault(unstarted, task, monkeypatch):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(
        OrreryError,
        match="the process that scores answers did not start: its error is above in this log",
    ):
        await said(task, "RIGHT")
    monkeypatch.undo()
    monkeypatch.setattr(scorer_pool, "START_S", 0.001)
    with pytest.raises(OrreryError, match="did not start: it was too slow"):
        await ScorerPool().score("reasoning_gym", ["spiral_matrix", {}, 0, ""], "")


@pytest.mark.parametrize("seed", ["0", "1"])
def test_a_family_that_orders_words_by_their_hashes_is_scored_on_its_own_problem_or_not_at_all(
    seed,
):
    code = """
import asyncio
from task_chats import task_use
from orrery.manifest.errors import OrreryError
from orrery.tasks import Message, make
task = make(task_use("reasoning_gym", family="polynomial_multiplication", config={}))
async def main():
    problem = task.problem(0)
    chat = [*problem.messages, Message("assistant", problem.answer)]
    return (await task.judge(problem, chat)).reward
try:
    print(asyncio.run(main()))
except OrreryError as error:
    print(error)
"""
    path = os.pathsep.join([os.path.dirname(__file__), *sys.path])
    environment = os.environ | {"PYTHONPATH": path, "PYTHONHASHSEED": seed}
    said = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    ).stdout
    expected = {
        "0": "1.0\n",
        "1": "family polynomial_multiplication: two processes make different problems of seed ",
    }
    assert said.startswith(expected[seed])


def test_no_scorer_outlives_who_started_it():
    question = Family("spiral_matrix", {}).dataset(0)[0]["question"]
    code = f"""
import asyncio, orrery.tasks.reasoning_gym as gym
async def main():
    request = ["spiral_matrix", {{}}, 0, {question!r}]
    for text in ("wrong", {WAITS!r}):
        asyncio.create_task(gym.SCORERS.score("reasoning_gym", request, text))
    await asyncio.sleep(600)
asyncio.run(main())
"""
    parent = subprocess.Popen(
        [sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    )
    try:
        limit_s = time.monotonic() + 60
        found = []
        while len(found) < 2 or not all(_is_limited(scorer.pid) for scorer in found):
            assert time.monotonic() < limit_s and parent.poll() is None
            time.sleep(0.02)
            found = psutil.Process(parent.pid).children()
    finally:
        parent.kill()
        parent.wait()
    assert not psutil.wait_procs(found, timeout=10)[1]


async def test_a_scorer_ends_with_its_input(kept, task):
    await said(task, "RIGHT")
    [scorer] = kept._idle["reasoning_gym"]
    scorer._wire.close()
    assert scorer.process.wait(20) == 0


def _is_limited(pid: int) -> bool:
    """Whether a scorer is about to take answers: its folder is removed by then."""
    return os.readlink(f"/proc/{pid}/cwd").endswith(" (deleted)")


class Counting(ScorerPool):
    """Record each scored answer in `asked`. `worth` maps an answer to its score or error."""

    def __init__(self, **worth):
        super().__init__()
        self.asked, self.worth = [], worth

    async def score(self, kind, request, text):
        self.asked.append((request, text))
        await asyncio.sleep(0)
        worth = self.worth.get(text, 1.0)
        if isinstance(worth, Exception):
            raise worth
        return worth


async def test_equal_answers_are_scored_once_whether_at_once_or_later():
    pool = Counting()
    calls = [pool.score_once("verdict", {"answer": a}, t) for a in "12" for t in ("x", "x", "y")]
    assert await asyncio.gather(*calls) == [1.0] * 6
    assert await pool.score_once("verdict", {"answer": "1"}, "y") == 1.0
    assert pool.asked == [({"answer": a}, t) for a in "12" for t in "xy"]


async def test_an_answer_without_a_score_is_scored_again():
    pool = Counting(late=None, broken=OrreryError("the process ended"))
    for _ in range(2):
        results = await asyncio.gather(
            *(pool.score_once("verdict", 1, text) for text in ("late", "late", "broken", "broken")),
            return_exceptions=True,
        )
        assert results[:2] == [None, None]
        assert [str(each) for each in results[2:]] == ["the process ended"] * 2
    assert [text for _, text in pool.asked] == ["late", "broken"] * 2


async def test_a_cancelled_call_does_not_cancel_the_score_of_another():
    pool = Counting()
    first, second = (asyncio.create_task(pool.score_once("verdict", 1, "x")) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    assert await second == 1.0 and first.cancelled() and len(pool.asked) == 1


async def test_the_oldest_scores_make_room(monkeypatch):
    monkeypatch.setattr(scorer_pool, "KEPT_SCORES", 2)
    pool = Counting()
    for text in "abcca":
        await pool.score_once("verdict", 1, text)
    assert [text for _, text in pool.asked] == list("abca") and len(pool._scores) == 2
