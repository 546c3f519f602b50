"""One observed cycle: what the engine answered and held before and after it, and the cycle's own record."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from nvsnap_conformance.deadline import Deadline
from nvsnap_conformance.engines.protocol import EngineHandle, HooksSpec, RequestFailed
from nvsnap_conformance.errors import NvsnapError
from nvsnap_conformance.lifecycle import graphs
from nvsnap_conformance.lifecycle.log_errors import device_errors_in
from nvsnap_conformance.lifecycle.oracle import Answers, take_answers
from nvsnap_conformance.lifecycle.provenance import RankIdentity, plant_nonces, take_identities
from nvsnap_conformance.lifecycle.trace import Verb
from nvsnap_conformance.outcomes import Finding, Outcome, Signature, finding

if TYPE_CHECKING:
    from collections.abc import Callable

    from nvsnap_conformance.lifecycle.driver import CycleRecord, LifecycleDriver, Variant

CYCLE_SECONDS = 240.0


@dataclass(frozen=True)
class Diagnosis:
    """What an outside look at a stuck engine said: the signature of the hang, a paragraph, the bundle."""

    signature: Signature
    outcome: Outcome
    paragraph: str
    bundle: str | None


@dataclass
class CycleObservation:
    """Everything that the checks over one cycle need.

    ``after`` holds the answers of each repeat, ``logged`` what the engine logged from the cycle's begin to
    the last of them.
    """

    record: CycleRecord
    replaces_processes: bool
    reference: Answers
    planted: dict[int, str]
    before: list[RankIdentity]
    after: list[Answers] = field(default_factory=list)
    identities: list[RankIdentity] = field(default_factory=list)
    broken: str | None = None
    diagnosis: Diagnosis | None = None
    logged: str = ""

    def as_json(self) -> dict[str, Any]:
        """Return the observation as JSON values, for the run record."""
        return {
            "cycle": self.record.as_json(),
            "reference": self.reference.as_json(),
            "after": [answers.as_json() for answers in self.after],
            "identities": [identity.as_json() for identity in self.identities],
            "broken": self.broken,
            "device_errors": device_errors_in(self.logged),
        }


def observe_cycle(
    engine: EngineHandle,
    driver: LifecycleDriver,
    variant: Variant,
    *,
    repeats: int = 2,
    reference: Answers | None = None,
    diagnose: Callable[[str], Diagnosis] | None = None,
) -> CycleObservation:
    """Take answers and identities, run one cycle, take them again ``repeats`` times.

    ``reference`` is what the engine is known to answer, where it was just asked; else it is asked first.
    A cycle that fails, or an engine that no longer answers after it, is part of the observation. Graphs that
    the hooks put off are captured before answers are compared. Where a verb ran into its deadline,
    ``diagnose`` looks at the engine from outside at once.
    """
    deadline = Deadline.after(CYCLE_SECONDS)
    observation = CycleObservation(
        record=driver.record,
        replaces_processes=driver.host.replaces_processes if driver.host is not None else False,
        reference=reference or take_answers(engine, deadline),
        planted=plant_nonces(engine, deadline),
        before=take_identities(engine, deadline),
    )
    position = engine.process.log_position()
    observation.record = driver.run(variant, deadline)
    failure = observation.record.failure
    if failure is None:
        _take_after(observation, engine, driver.hooks, repeats, deadline)
    elif failure.timed_out and diagnose is not None:
        observation.diagnosis = diagnose(f"{failure.verb} did not end: {failure.message}")
    observation.logged = engine.process.log_since(position)
    return observation


def _take_after(
    observation: CycleObservation, engine: EngineHandle, hooks: HooksSpec, repeats: int, deadline: Deadline
) -> None:
    """Take what the engine answers and holds after its cycle, into ``observation``."""
    try:
        if graphs.deferred(observation.record.replies.get(Verb.REBUILD, ())):
            graphs.capture_all(engine, hooks, deadline=deadline)
        for _ in range(repeats):
            observation.after.append(take_answers(engine, deadline))
        observation.identities = take_identities(engine, deadline)
    except (RequestFailed, NvsnapError) as error:
        observation.broken = f"{type(error).__name__}: {error}"


def check_completed(observation: CycleObservation) -> list[Finding]:
    """Check that every verb succeeded and that the engine answered afterwards.

    Findings: the diagnosis' own (``HANG:...``) where a verb hung, the device layer's own
    (``CUDA:801@restore``), that of a verb whose failure has a name of its own (``FRONT:RELEASED@<verb>``,
    ``SLEEP:...``, ``DEVICE:MEMORY_KEPT@checkpoint``), else ``CYCLE:<VERB>``; ``CYCLE:AFTER`` where the engine
    no longer answered.
    """
    failure = observation.record.failure
    if observation.diagnosis is not None:
        diagnosis = observation.diagnosis
        return [
            Finding(diagnosis.paragraph, diagnosis.signature, diagnosis.outcome, {"bundle": diagnosis.bundle})
        ]
    if failure is not None:
        return [
            Finding(
                f"the cycle ended at {failure.verb}: {failure.message}",
                failure.signature or Signature("CYCLE", failure.verb.upper()),
                failure.outcome,
                {"kind": failure.kind},
            )
        ]
    if observation.broken is not None:
        return [
            finding(
                f"the engine did not answer after the cycle: {observation.broken}",
                "CYCLE:AFTER",
                outcome=Outcome.CRASH,
            )
        ]
    return []
