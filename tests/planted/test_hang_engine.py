"""A real vLLM engine at TP=2, looked at from outside while it starts, idles, works and is wedged."""

from __future__ import annotations

import contextlib
import signal
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from nvsnap_conformance import cores
from nvsnap_conformance.deadline import Deadline, wait_for
from nvsnap_conformance.engines.protocol import HooksSpec, LaunchConfig, Rank, RequestFailed
from nvsnap_conformance.engines.vllm import VllmEngine, VllmHandle
from nvsnap_conformance.errors import NvsnapError
from nvsnap_conformance.fixtures.engines import CORES_SECONDS
from nvsnap_conformance.hang.bundle import collect_bundle
from nvsnap_conformance.hang.discover import discover
from nvsnap_conformance.hang.follow import follow
from nvsnap_conformance.hang.model import Role
from nvsnap_conformance.hang.progress import Metrics, Poll, find_metrics
from nvsnap_conformance.hang.verdict import Verdict, VerdictKind, judge
from nvsnap_conformance.hang.watch import Watch
from nvsnap_conformance.models import ensure_model
from tests.planted import victims

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nvsnap_conformance.engines.environment import EngineEnvironment

INJECT = Path(__file__).parent / "inject"
SECONDS = 60.0


class Engine:
    """The engine of this module, its ranks as it named them, and what a look while it started gave."""

    def __init__(self, handle: VllmHandle, ranks: list[Rank], starting: list[Verdict]) -> None:
        self.handle = handle
        self.ranks = ranks
        self.starting = starting


@pytest.fixture(scope="module")
def engine(
    engine_environment: EngineEnvironment, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engine]:
    folder = tmp_path_factory.mktemp("engine")
    config = LaunchConfig(
        python=engine_environment.python,
        model=ensure_model("tiny-llama"),
        tensor_parallel=2,
        workdir=folder,
        import_paths=engine_environment.import_paths,
    )
    with cores.held(2, Deadline.after(CORES_SECONDS)):
        handle = VllmEngine().launch(config)
        try:
            workers = wait_for(
                "the workers",
                lambda: (
                    [m for m in discover(handle.process.root) if m.role is Role.RANK and "Worker" in m.title]
                    or None
                ),
                Deadline.after(300.0),
            )
            starting = [
                judge(
                    collect_bundle(
                        handle.process.root,
                        ranks=None,
                        folder=folder / f"starting-{number}",
                        deadline=Deadline.after(SECONDS),
                    )
                )
                for number in range(2)
            ]
            assert workers
            handle.ready(Deadline.after(300.0))
            yield Engine(handle, handle.ranks(Deadline.after(SECONDS)), starting)
        finally:
            handle.process.close()


def look(engine: Engine, folder: Path, *, ranks: bool = True) -> Verdict:
    members = discover(engine.handle.process.root, engine.ranks if ranks else None)
    _, verdict = follow(members, folder=folder, deadline=Deadline.after(SECONDS), most_rounds=6)
    return verdict


@contextlib.contextmanager
def requests(engine: Engine) -> Iterator[None]:
    """Keep the engine busy."""
    stop = threading.Event()

    def ask() -> None:
        while not stop.is_set():
            with contextlib.suppress(RequestFailed, NvsnapError):
                engine.handle.generate(["hello"], max_tokens=64, deadline=Deadline.after(SECONDS))

    asking = threading.Thread(target=ask)
    asking.start()
    try:
        yield
    finally:
        stop.set()
        asking.join()


def test_starting_engine_is_no_hang(engine: Engine) -> None:
    """Imports, weights, warm-up: minutes without a token, and nothing is stuck."""
    assert [v.paragraph() for v in engine.starting if v.is_hang] == []


def test_ranks_are_found_in_the_engines_namespaces(engine: Engine) -> None:
    members = discover(engine.handle.process.root)
    ranks = [m for m in members if m.role is Role.RANK]
    assert [(m.rank, m.pid) for m in ranks] == [(r.rank, r.process.pid) for r in engine.ranks]
    assert {m.source for m in ranks} == {"process title"}
    assert all(m.namespace_pid != m.pid for m in ranks)
    assert [m.role for m in members if m.title.endswith("EngineCore")] == [Role.CORE]
    assert any(m.role is Role.FRONT for m in members)


def test_idle_engine_is_idle(engine: Engine, tmp_path: Path) -> None:
    verdict = look(engine, tmp_path / "b")
    assert verdict.kind is VerdictKind.PROGRESSING, verdict.tree()
    assert "idle" in verdict.summary, verdict.tree()


def test_busy_engine_is_no_hang(engine: Engine, tmp_path: Path) -> None:
    with requests(engine):
        verdicts = [look(engine, tmp_path / str(number)) for number in range(3)]
    assert [v.paragraph() for v in verdicts if v.is_hang] == []


def test_watch_reads_the_engines_own_metrics_and_leaves_a_busy_engine_alone(
    engine: Engine, tmp_path: Path
) -> None:
    members = discover(engine.handle.process.root)
    url = find_metrics([m.pid for m in members if m.role is Role.FRONT])
    assert url is not None
    with contextlib.closing(Metrics(url, engine.handle.process.root.pid)) as source, requests(engine):

        def tokens() -> Poll | None:
            poll = source.poll()
            return poll if poll is not None and poll.counter > 0 else None

        first = wait_for("tokens", tokens, Deadline.after(SECONDS))
        watch = Watch(members, tmp_path / "b", metrics=source)
        stopped = watch.run(Deadline.after(5.0))
        last = source.poll()
    assert stopped.verdict is None
    assert watch.looks == 0
    assert last is not None
    assert last.counter > first.counter


def test_stopped_worker_of_a_busy_engine_is_named(engine: Engine, tmp_path: Path) -> None:
    """Requests run, one worker is stopped: the other spins in the all-reduce over shared memory."""
    victim = engine.ranks[1].process
    with requests(engine):
        victim.send(signal.SIGSTOP)
        victims.in_state(victim.pid, "T")
        try:
            verdict = look(engine, tmp_path / "b")
        finally:
            victim.send(signal.SIGCONT)
    assert verdict.kind is VerdictKind.MISSING_ARRIVAL, verdict.tree()
    assert verdict.missing == (1,), verdict.tree()


def test_wedged_rpc_names_rank_and_front(engine: Engine, tmp_path: Path) -> None:
    """The last test: nothing frees these ranks again."""
    hooks = HooksSpec("nvs_wedge:Wedge", path=INJECT, options={"absent": [1]})
    failed: list[Any] = []

    def wedge() -> None:
        try:
            engine.handle.rpc("wedge", hooks=hooks, deadline=Deadline.after(15.0))
        except (RequestFailed, NvsnapError) as error:
            failed.append(error)

    calling = threading.Thread(target=wedge)
    calling.start()

    def stuck() -> Verdict | None:
        verdict = look(engine, tmp_path / "b")
        return verdict if verdict.is_hang else None

    verdict = wait_for("the wedge", stuck, Deadline.after(SECONDS))
    assert verdict.kind is VerdictKind.MISSING_ARRIVAL, verdict.tree()
    assert verdict.missing == (1,)
    assert "all_reduce (torch.distributed)" in verdict.summary
    core = next(v for v in verdict.fronts if v.member.role is Role.CORE)
    assert core.describe().startswith("waits for the ranks' answers"), verdict.tree()
    calling.join()
    assert failed
