"""Sleep and wake in the lifecycle, over a stand-in engine that keeps the rules of vLLM's sleep mode."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest

from nvsnap_conformance.deadline import Deadline
from nvsnap_conformance.engines.protocol import EngineHandle, HooksSpec, RankReply, RequestFailed
from nvsnap_conformance.errors import DeadlineExceeded
from nvsnap_conformance.fixtures.cycles import make_driver
from nvsnap_conformance.lifecycle.asleep import problem
from nvsnap_conformance.lifecycle.driver import LifecycleDriver, Variant
from nvsnap_conformance.lifecycle.mutants import WakesWithoutReload
from nvsnap_conformance.lifecycle.observe import CycleObservation, check_completed
from nvsnap_conformance.lifecycle.oracle import Answers
from nvsnap_conformance.lifecycle.trace import Verb, check_order, wanted
from nvsnap_conformance.session.arms import Arm
from nvsnap_conformance.session.pool import EnginePool
from nvsnap_conformance.targets.model import load_target
from tests.told_host import ToldHost

if TYPE_CHECKING:
    from pathlib import Path

    from nvsnap_conformance.engines.protocol import LaunchConfig
    from nvsnap_conformance.report.record import EventStream
    from nvsnap_conformance.session.options import Selection

RANKS = 2


class Engine:
    """Says what it was asked, and has weights or not."""

    def __init__(self, *, sleep_mode: bool = True) -> None:
        self.config = SimpleNamespace(tensor_parallel=RANKS, sleep_mode=sleep_mode)
        self.process = SimpleNamespace(clock_offset=0.0, tree=list)
        self.told: list[str] = []
        self.held = False
        self.weights = "the model's"
        self.free: int | None = None
        self.frees = 0
        self.told_of: dict[str, int | None] = {"weights": 15, "cache": 25}
        self.silent: set[int] = set()
        self.looks = 0

    def quiesce(self, _deadline: Deadline) -> None:
        self.told.append("quiesce")
        self.held = True

    def sleep(self, level: int, _deadline: Deadline) -> None:
        self.told.append(f"sleep {level}")
        self.free = None if self.free is None else self.free + self.frees
        self.weights = "kept" if level == 1 else "lost"

    def rpc(self, method: str, **_arguments: Any) -> list[RankReply]:
        if method not in {"snapshot", "status"}:
            self.told.append(method)
        if method == "lose":
            self.weights = "lost"
        self.looks += method == "snapshot"
        if method == "snapshot" and self.looks in self.silent:
            raise RequestFailed("POST /collective_rpc", status=500)
        value: dict[str, Any] = {"state": "ok"}
        if self.free is not None:
            value["memory"] = {"free": self.free, "total": 100} | self.told_of
        return [RankReply(rank, "n", "n", value=value) for rank in range(RANKS)]

    def wake(self, _deadline: Deadline, *, reload: bool) -> None:
        self.told.append("wake with reload" if reload else "wake")
        if reload or self.weights == "kept":
            self.weights = "the model's"

    def paused(self, _deadline: Deadline) -> bool:
        return self.held

    def resume(self, _deadline: Deadline) -> None:
        self.told.append("resume")
        self.held = False


def orchestrate(
    engine: Engine,
    folder: Path,
    level: int | None,
    *,
    variant: Variant = Variant.FULL,
    kind: type[LifecycleDriver] = LifecycleDriver,
) -> LifecycleDriver:
    driver = kind(
        cast("EngineHandle", engine),
        HooksSpec(),
        ToldHost(engine.told),
        folder,
        between=engine.told.append,
        sleep_level=level,
    )
    driver.run(variant, Deadline.after(20.0))
    return driver


def signature(driver: LifecycleDriver) -> str:
    (found,) = check_completed(CycleObservation(driver.record, False, Answers(()), {}, []))
    return str(found.signature)


def verbs(driver: LifecycleDriver) -> list[Verb]:
    return list(dict.fromkeys(event.verb for event in driver.record.events))


@pytest.mark.parametrize(("level", "wake"), [(1, "wake"), (2, "wake with reload")])
def test_a_full_cycle_sleeps_around_the_hooks(tmp_path: Path, level: int, wake: str) -> None:
    engine = Engine()
    driver = orchestrate(engine, tmp_path, level)
    assert engine.told == [
        *("quiesce", f"sleep {level}", "prepare", "prepared", "dump", "load"),
        *("restore", "rebuilt", wake, "resume"),
    ]
    assert driver.record.failure is None
    assert check_order(driver.record.events, ranks=RANKS) == []
    assert [verb for verb in verbs(driver) if verb in {Verb.SLEEP, Verb.WAKE}] == [Verb.SLEEP, Verb.WAKE]
    assert {"sleep", "wake"} <= set(driver.record.as_json()["seconds"])
    assert engine.weights == "the model's"


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize(
    ("frees", "failure"),
    [
        (41, None),
        (40, None),
        (39, "SLEEP:FREED_LITTLE"),
        (1, "SLEEP:FREED_LITTLE"),
        (0, "SLEEP:FREED_NOTHING"),
        (-5, "SLEEP:FREED_NOTHING"),
    ],
)
def test_a_sleep_that_frees_less_than_weights_and_cache_is_none(
    tmp_path: Path, level: int, frees: int, failure: str | None
) -> None:
    engine = Engine()
    engine.free, engine.frees = 10, frees
    driver = orchestrate(engine, tmp_path, level)
    if failure is None:
        assert driver.record.failure is None
    else:
        assert signature(driver) == failure
        assert driver.record.failure is not None
        assert driver.record.failure.verb is Verb.SLEEP
        assert "dump" not in engine.told


@pytest.mark.parametrize("silent", [{1}, {2}, {1, 2}])
@pytest.mark.parametrize("free", [10, None])
def test_a_sleep_that_nobody_looked_at_is_none(tmp_path: Path, silent: set[int], free: int | None) -> None:
    engine = Engine()
    engine.free, engine.frees, engine.silent = free, 40, silent
    assert signature(orchestrate(engine, tmp_path, 2)) == "SLEEP:UNREAD"


@pytest.mark.parametrize("unknown", ["weights", "cache"])
def test_a_sleep_that_was_to_free_nobody_knows_how_much_is_none(tmp_path: Path, unknown: str) -> None:
    engine = Engine()
    engine.free, engine.frees = 10, 40
    engine.told_of[unknown] = None
    assert signature(orchestrate(engine, tmp_path, 2)) == "SLEEP:UNREAD"


def test_memory_that_is_told_at_one_moment_only() -> None:
    answers = {"ok": {}, "gpu": {"memory": {"free": 1, "weights": 0, "cache": 0}}}
    for before, after in (("ok", "gpu"), ("gpu", "ok")):
        snapshots = {
            moment: [RankReply(0, "n", "n", value=answers[kind])]
            for moment, kind in (("before", before), ("asleep", after))
        }
        found = problem(snapshots, 1)
        assert found is not None
        assert str(found.signature) == "SLEEP:UNREAD"


@pytest.mark.parametrize(("level", "variant"), [(None, Variant.FULL), (2, Variant.HOOKS_ONLY)])
def test_no_other_cycle_sleeps(tmp_path: Path, level: int | None, variant: Variant) -> None:
    engine = Engine()
    driver = orchestrate(engine, tmp_path, level, variant=variant)
    assert driver.record.failure is None
    assert not {Verb.SLEEP, Verb.WAKE} & set(verbs(driver))
    assert "resume" in engine.told


@pytest.mark.parametrize("level", [None, 1, 2])
def test_an_orchestrator_that_never_sleeps(tmp_path: Path, level: int | None) -> None:
    class NeverSleeps(LifecycleDriver):
        def sleep(self, level: int, deadline: Deadline) -> None:
            pass

        def wake(self, level: int, deadline: Deadline) -> None:
            pass

    driver = orchestrate(Engine(), tmp_path, level, kind=NeverSleeps)
    assert driver.record.failure is None
    required = wanted(host=True, device=False, sleeps=level is not None)
    found = check_order(driver.record.events, ranks=RANKS, required=required)
    assert [one.evidence["verb"] for one in found] == ([] if level is None else ["sleep", "wake"])
    assert {str(one.signature) for one in found} <= {"ORDER:INCOMPLETE"}
    ordinary = orchestrate(Engine(), tmp_path, level).record.events
    assert check_order(ordinary, ranks=RANKS, required=required) == []


def test_a_key_value_cache_that_does_not_wake_is_a_failed_resume(tmp_path: Path) -> None:
    class CacheStays(Engine):
        def resume(self, _deadline: Deadline) -> None:
            raise RequestFailed("POST /wake_up", status=500, body="CUDA out of memory")

    driver = orchestrate(CacheStays(), tmp_path, 2)
    assert signature(driver) == "CYCLE:RESUME"
    assert driver.record.failure is not None
    assert "POST /wake_up: HTTP 500: CUDA out of memory" in driver.record.failure.message


def test_a_sleep_without_a_wake_is_no_lifecycle(tmp_path: Path) -> None:
    class NeverWakes(LifecycleDriver):
        def wake(self, level: int, deadline: Deadline) -> None:
            pass

    driver = orchestrate(Engine(), tmp_path, 1, kind=NeverWakes)
    found = check_order(driver.record.events, ranks=RANKS)
    assert [str(one.signature) for one in found] == ["ORDER:INCOMPLETE"]


@pytest.mark.parametrize("verb", [Verb.SLEEP, Verb.WAKE])
@pytest.mark.parametrize(
    ("error", "timed_out"),
    [
        (RequestFailed("POST /collective_rpc", status=500, body="a meta tensor"), False),
        (DeadlineExceeded("no answer"), True),
    ],
)
def test_a_failure_is_one_of_its_verb_and_ends_the_cycle(
    tmp_path: Path, verb: Verb, error: Exception, *, timed_out: bool
) -> None:
    class Fails(Engine):
        def sleep(self, level: int, deadline: Deadline) -> None:
            super().sleep(level, deadline)
            if verb is Verb.SLEEP:
                raise error

        def wake(self, deadline: Deadline, *, reload: bool) -> None:
            super().wake(deadline, reload=reload)
            raise error

    engine = Fails()
    driver = orchestrate(engine, tmp_path, 2)
    failure = driver.record.failure
    assert failure is not None
    assert (failure.verb, failure.timed_out) == (verb, timed_out)
    assert signature(driver) == f"CYCLE:{verb.upper()}"
    last = driver.record.events[-1]
    assert (last.verb, last.rank, last.ok) == (verb, None, False)
    assert "resume" not in engine.told
    assert ("prepare" in engine.told) is (verb is Verb.WAKE)


@pytest.mark.parametrize("verb", [Verb.SLEEP, Verb.WAKE])
def test_an_engine_that_resumes_by_itself_is_caught_at_that_verb(tmp_path: Path, verb: Verb) -> None:
    class Resumes(Engine):
        def sleep(self, level: int, deadline: Deadline) -> None:
            super().sleep(level, deadline)
            self.held = verb is not Verb.SLEEP

        def wake(self, deadline: Deadline, *, reload: bool) -> None:
            super().wake(deadline, reload=reload)
            self.held = False

    engine = Resumes()
    driver = orchestrate(engine, tmp_path, 1)
    assert signature(driver) == f"FRONT:RELEASED@{verb}"
    assert driver.record.events[-1].ok is False
    assert "resume" not in engine.told


@pytest.mark.parametrize("sleep_mode", [True, False])
@pytest.mark.parametrize("level", [None, 1, 2])
def test_the_mutant_wakes_an_engine_without_its_weights(
    tmp_path: Path, level: int | None, *, sleep_mode: bool
) -> None:
    engine = Engine(sleep_mode=sleep_mode)
    driver = orchestrate(engine, tmp_path, level, kind=WakesWithoutReload)
    # Nothing but the weights tells: the cycle ends well, in its order.
    assert driver.record.failure is None
    assert check_order(driver.record.events, ranks=RANKS) == []
    assert engine.weights == "lost"
    assert "wake with reload" not in engine.told
    assert ("lose" in engine.told) is not sleep_mode


def test_a_mutant_that_could_not_do_its_damage_says_so(tmp_path: Path) -> None:
    class Refuses(Engine):
        def rpc(self, method: str, **_arguments: Any) -> list[RankReply]:
            error = {"type": "BadRequest", "message": "cannot be imported"} if method == "lose" else None
            return [RankReply(0, "n", "n", value={}, error=error), RankReply(1, "n", "n", value={})]

    driver = orchestrate(Refuses(sleep_mode=False), tmp_path, None, kind=WakesWithoutReload)
    assert signature(driver) == "CYCLE:WAKE"


@pytest.mark.parametrize(("name", "level"), [("vllm-gpu", None), ("vllm-gpu-sleep", 2)])
def test_a_target_s_level_reaches_launch_and_orchestrator(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, level: int | None
) -> None:
    loaded = load_target(name)
    arm = Arm(loaded, 1)
    launched: list[LaunchConfig] = []
    built = SimpleNamespace(python=tmp_path, import_paths=(), distribution="vllm", version="0.31.0")
    monkeypatch.setattr(
        "nvsnap_conformance.engines.environment.EngineEnvironment.for_target", lambda *_, **__: built
    )
    monkeypatch.setattr("nvsnap_conformance.models.ensure_model", lambda _name: tmp_path)
    monkeypatch.setattr(EnginePool, "_lease", lambda *_: None)
    monkeypatch.setattr(EnginePool, "_bring_up", lambda _pool, _arm, config, *_: launched.append(config))
    pool = EnginePool(
        cast("Selection", SimpleNamespace(out=tmp_path)), cast("EventStream", None), lambda _text: None
    )
    pool.get(arm)
    assert [config.sleep_mode for config in launched] == [level is not None]
    factory = cast("Any", make_driver).__wrapped__
    made = factory(arm, cast("EngineHandle", Engine()), HooksSpec(), None, None, LifecycleDriver, tmp_path)()
    assert made.sleep_level == level
