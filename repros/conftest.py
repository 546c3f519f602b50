"""Fixtures of the repros: many ranks at little cost, in the engine's own interpreter."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from nvsnap_conformance.engines.environment import EngineEnvironment
from nvsnap_conformance.hang.ranks.client import RankServer, RankSet

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from nvsnap_conformance.session.state import ConformanceSession


@pytest.fixture(scope="session")
def engine_environment(conformance_session: ConformanceSession) -> EngineEnvironment:
    """Return the interpreter of the session's first target; built where it is missing."""
    return EngineEnvironment.for_target(conformance_session.selection.targets[0])


@pytest.fixture(scope="session")
def rank_servers(engine_environment: EngineEnvironment) -> Iterator[Callable[..., RankServer]]:
    """Return a function that gives the server with these paths and modules loaded, one for each choice."""
    servers: dict[object, RankServer] = {}

    def server(*, paths: Sequence[Path] = (), preload: Sequence[str] = ()) -> RankServer:
        key = (tuple(paths), tuple(preload))
        if key not in servers:
            servers[key] = RankServer(
                engine_environment.python,
                paths=[*paths, *engine_environment.import_paths],
                preload=preload,
                environment={"VLLM_LOGGING_LEVEL": "ERROR"},
            )
        return servers[key]

    yield server
    for one in servers.values():
        one.close()


@pytest.fixture
def fork_ranks(rank_servers: Callable[..., RankServer]) -> Iterator[Callable[..., RankSet]]:
    """Return a function that forks the ranks of a script; they end with the test."""
    started: list[RankSet] = []

    def fork(
        script: Path,
        *,
        world: int = 8,
        options: dict[str, Any] | None = None,
        paths: Sequence[Path] = (),
        preload: Sequence[str] = (),
    ) -> RankSet:
        ranks = rank_servers(paths=paths, preload=preload).run(script, world=world, options=options)
        started.append(ranks)
        return ranks

    yield fork
    for ranks in started:
        ranks.end()
