"""One image on disk, restored several times: what is observed, and the checks over it."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from nvsnap_conformance.checkpoint.criu_image import anonymous_bytes, check_image, check_restored_memory
from nvsnap_conformance.deadline import Deadline
from nvsnap_conformance.engines.protocol import RequestFailed
from nvsnap_conformance.errors import NvsnapError
from nvsnap_conformance.lifecycle.oracle import Answers, check_answers, take_answers
from nvsnap_conformance.lifecycle.provenance import (
    RankIdentity,
    check_is_restore,
    check_weights,
    plant_nonces,
    take_identities,
)
from nvsnap_conformance.outcomes import Finding, finding

if TYPE_CHECKING:
    from pathlib import Path

    from nvsnap_conformance.checkpoint.protocol import CheckpointResult, HostCheckpointer
    from nvsnap_conformance.engines.protocol import EngineHandle, HooksSpec

SECONDS = 300.0
VERB_SECONDS = 120.0


@dataclass
class LoadObservation:
    """One restore from the image: what the engine was and answered afterwards, or why it failed."""

    result: CheckpointResult | None = None
    identities: list[RankIdentity] = field(default_factory=list)
    answers: Answers | None = None
    seconds_to_answer: float | None = None
    failure: str | None = None


@dataclass
class ImageObservation:
    """An engine before its dump, the dump, and each restore.

    ``floor`` is the anonymous memory, in bytes, that the suite saw in the engine's processes right before
    the dump. ``state_findings`` is what :func:`check_holds_state` found while the files were there.
    """

    folder: Path
    reference: Answers
    planted: dict[int, str]
    before: list[RankIdentity]
    floor: int = 0
    dump: CheckpointResult | None = None
    loads: list[LoadObservation] = field(default_factory=list)
    failure: str | None = None
    state_findings: list[Finding] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """Return the observation as JSON values, for the run record."""
        return {
            "folder": str(self.folder),
            "floor_bytes": self.floor,
            "failure": self.failure,
            "dump": None if self.dump is None else {"seconds": self.dump.seconds, **self.dump.details},
            "loads": [
                {
                    "seconds": None if load.result is None else load.result.seconds,
                    "seconds_to_answer": load.seconds_to_answer,
                    "failure": load.failure,
                    "identities": [identity.as_json() for identity in load.identities],
                }
                for load in self.loads
            ],
        }


def observe_image(
    engine: EngineHandle, hooks: HooksSpec, host: HostCheckpointer, folder: Path, *, restores: int
) -> ImageObservation:
    """Quiesce, prepare and dump an engine once; load, rebuild, resume and question it ``restores`` times.

    Whatever fails is part of the observation, and ends it.
    """
    deadline = Deadline.after(SECONDS)
    observation = ImageObservation(
        folder=folder,
        reference=take_answers(engine, deadline),
        planted=plant_nonces(engine, deadline),
        before=take_identities(engine, deadline),
    )
    try:
        engine.quiesce(deadline)
        _on_all("prepare", engine, hooks, deadline)
        observation.floor = anonymous_bytes(engine.process.tree())
        observation.dump = host.dump(engine.process, folder, deadline.sooner(VERB_SECONDS))
    except (RequestFailed, NvsnapError) as error:
        observation.failure = f"{type(error).__name__}: {error}"
        return observation
    for _ in range(restores):
        load = LoadObservation()
        observation.loads.append(load)
        began = time.monotonic()
        try:
            load.result = host.load(engine.process, folder, deadline.sooner(VERB_SECONDS))
            _on_all("restore", engine, hooks, deadline)
            engine.resume(deadline)
            load.answers = take_answers(engine, deadline)
            load.seconds_to_answer = time.monotonic() - began
            load.identities = take_identities(engine, deadline)
        except (RequestFailed, NvsnapError) as error:
            load.failure = f"{type(error).__name__}: {error}"
            break
    return observation


def _on_all(method: str, engine: EngineHandle, hooks: HooksSpec, deadline: Deadline) -> None:
    """Call a hook on every rank; raise ``RequestFailed`` where one of them reports a failure."""
    for reply in engine.rpc(method, hooks=hooks, deadline=deadline):
        state = reply.value.get("state") if isinstance(reply.value, dict) else None
        if reply.error is not None or state == "failed":
            raise RequestFailed(
                f"{method} on rank {reply.rank}", status=None, body=str(reply.error or reply.value)
            )


def check_dumped(observation: ImageObservation) -> list[Finding]:
    """Check that there is an image at all: ``IMAGE:NO_DUMP``."""
    if observation.dump is None:
        return [finding(f"the engine could not be dumped: {observation.failure}", "IMAGE:NO_DUMP")]
    return []


def check_restores_repeat(observation: ImageObservation, *, restores: int) -> list[Finding]:
    """Check that every restore worked and gave the answers of before: ``IMAGE:NO_RESTORE``, ``ORACLE:…``."""
    found = check_dumped(observation)
    for number, load in enumerate(observation.loads, start=1):
        if load.failure is not None:
            found.append(finding(f"restore {number}: {load.failure}", "IMAGE:NO_RESTORE", number=number))
        else:
            found += check_answers(observation.reference, load.answers, what=f"restore {number}")
    if not found and len(observation.loads) != restores:
        found.append(
            finding(f"{len(observation.loads)} of {restores} restores were observed", "IMAGE:NO_RESTORE")
        )
    return found


def check_each_is_a_restore(observation: ImageObservation) -> list[Finding]:
    """Check nonce, processes and weights after every restore: ``PROVENANCE:…``, ``WEIGHTS:…``."""
    found = check_dumped(observation)
    done = [load for load in observation.loads if load.failure is None]
    if not done and not found:
        found.append(finding("no restore came to an end", "IMAGE:NO_RESTORE"))
    for load in done:
        found += check_is_restore(
            observation.planted, observation.before, load.identities, replaces_processes=True
        )
        found += check_weights(observation.before, load.identities)
    return found


def check_holds_state(observation: ImageObservation) -> list[Finding]:
    """Check the image against the memory that the engine had.

    Findings: ``IMAGE:EMPTY``, ``IMAGE:TRUNCATED``, ``IMAGE:TOO_SMALL``, ``IMAGE:NOT_RESTORED``.
    """
    found = check_dumped(observation)
    if found:
        return found
    found = check_image(observation.folder / "images", observation.floor)
    for load in observation.loads:
        if load.result is not None:
            found += check_restored_memory(
                observation.floor, int(load.result.details.get("anonymous_bytes", 0))
            )
    return found
