"""The suite's reference hooks: what ``prepare`` and ``restore`` have to do, for a vLLM engine on CPU.

``prepare`` checks that the worker is drained and releases every cross-rank resource; ``restore`` rebuilds
them over a fresh rendezvous and hands them to everything that had held the old ones. Both agree with the
other ranks by votes over a store, each bounded in time, so that no rank waits for one that failed.

They know vLLM 0.27 to 0.33 and refuse every other version: they reach into ``GroupCoordinator``,
``CpuCommunicator`` and ``MessageQueue``, which have no stable interface for this.
"""

from __future__ import annotations

import secrets
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nvsnap_hooks import inventory
from nvsnap_hooks.errors import (
    AlreadyPrepared,
    HookRefused,
    NotDrained,
    NotPrepared,
    PeerRefused,
    PeerSilent,
    StateFailed,
    UnsupportedEngineVersion,
    UnsupportedPlatform,
)
from nvsnap_hooks.flashinfer import Workspace
from nvsnap_hooks.rendezvous import Rendezvous, next_call
from nvsnap_hooks.resources import Absent, Context, Deferred, Group, Unsupported

SUPPORTED = ">=0.27,<0.34"

SERVING, PREPARED, FAILED = "serving", "prepared", "failed"


@dataclass
class EngineState:
    """Where this rank's engine stands; one for each worker process, whatever implementation is asked.

    ``resources`` is what ``prepare`` released, ``path`` the file of the rendezvous for ``restore``.
    """

    name: str = SERVING
    cycles: int = 0
    problem: str | None = None
    resources: list[Any] = field(default_factory=list)
    path: str = ""


STATE = EngineState()


class ReferenceHooks:
    """Prepare and restore of one rank.

    Option ``rendezvous_seconds`` (default 20) bounds each wait for the other ranks, in seconds. Every
    refusal (:class:`nvsnap_hooks.errors.HookRefused`) leaves the engine as it was.
    """

    def __init__(self, worker: Any, options: dict[str, Any]) -> None:
        self.worker = worker
        self.options = options
        self.state = STATE
        self.seconds = float(options.get("rendezvous_seconds", 20.0))

    def prepare(self) -> dict[str, Any]:
        """Release what this rank holds across ranks.

        Returns ``{"state", "problem", "resources": [{"name", "kind", "outcome", "detail", "seconds"}]}``;
        ``outcome`` is ``released``, ``absent``, ``unsupported`` or ``failed``. ``state`` is ``failed``
        where any rank failed to release something, and ``problem`` says which.
        """
        call = next_call()
        import torch.distributed as dist
        from torch.distributed import distributed_c10d as c10d

        refusal = self._refusal(SERVING)
        if not dist.is_initialized():
            # Nothing to vote over: this rank is prepared, or has failed.
            raise refusal or StateFailed("torch.distributed is not initialised")
        votes = Rendezvous(
            c10d._world.pg_map[c10d._get_default_group()][1],
            f"prepare-{call}",
            rank=dist.get_rank(),
            size=dist.get_world_size(),
            seconds=self.seconds,
        )
        resources: list[Any] = []
        try:
            resources = [] if refusal else self.inventory()
        except Exception as error:
            # The others must hear of it, or they would wait for this rank's vote.
            refusal = UnsupportedPlatform(f"cannot list what is held: {type(error).__name__}: {error}")
        self.state.path = self._agree_to_prepare(votes, refusal, resources)
        self.bound(resources)
        outcomes = [self._attempt(resource, "release") for resource in self.release_order(resources)]
        self.state.resources = resources
        self._conclude(votes, outcomes, PREPARED)
        return self._report(outcomes)

    def restore(self) -> dict[str, Any]:
        """Rebuild what :meth:`prepare` released.

        Returns the same report, with ``rebuilt`` in place of ``released``, and ``deferred`` for what the
        engine makes again by itself (CUDA graphs). Where one rank cannot rebuild something, all ranks stop
        there, ``state`` is ``failed``, and the rest is ``failed`` too.
        """
        call = next_call()
        import torch.distributed as dist

        refusal = self._refusal(PREPARED)
        if not self.state.path:
            # Nothing to vote over: this rank serves.
            raise refusal or StateFailed("prepare left no rendezvous")
        rank, size = self.worker.rank, self.worker.parallel_config.world_size
        store = dist.FileStore(self.state.path, size)
        votes = Rendezvous(store, f"restore-{call}", rank=rank, size=size, seconds=self.seconds)
        self._vote(votes, refusal, {})
        context = Context(store, votes, rank, size, self.seconds)
        outcomes: list[dict[str, Any]] = []
        for resource in inventory.rebuild_order(self.state.resources):
            outcome = self._attempt(resource, "rebuild", context)
            outcomes.append(outcome)
            if outcome["outcome"] in ("rebuilt", "failed") and not self._all_rebuilt(votes, outcome):
                break
        else:
            for resource in self.state.resources:
                if isinstance(resource, Group):
                    resource.settle()
            self.state.resources, self.state.path = [], ""
            self.state.cycles += 1
        done = {outcome["name"] for outcome in outcomes}
        outcomes += [
            _outcome(resource, "failed", "not attempted: an earlier one failed", 0.0)
            for resource in self.state.resources
            if resource.name not in done
        ]
        self._conclude(votes, outcomes, SERVING)
        return self._report(outcomes)

    def status(self) -> dict[str, Any]:
        """Return ``{"state", "cycles", "problem"}``.

        ``state`` is ``serving``, ``prepared`` or ``failed``, ``cycles`` how many were completed, and
        ``problem`` what went wrong.
        """
        return {"state": self.state.name, "cycles": self.state.cycles, "problem": self.state.problem}

    # The steps, in methods of their own: a known-bad implementation overrides one.

    def inventory(self) -> list[Any]:
        """Return what this rank holds, in the order of its release."""
        return inventory.take()

    def shared(self, resources: list[Any]) -> list[str]:
        """Return what all ranks must hold alike.

        Groups are made, and workspaces released, by all ranks together, and workspaces of different backends
        differ in their number of barriers.
        """
        return sorted(
            f"{resource.name} {resource.backend}"
            for resource in resources
            if isinstance(resource, (Group, Workspace))
        )

    def bound(self, resources: list[Any]) -> None:
        """Bound every collective: a rank that fails must not keep others in a barrier for half an hour."""
        for resource in resources:
            if isinstance(resource, Group):
                resource.bound(self.seconds)

    def release_order(self, resources: list[Any]) -> list[Any]:
        """Return the resources in the order in which they are released: the inventory's own."""
        return resources

    def release(self, resource: Any) -> str:
        """Release one resource and return a detail; raise where it is still there."""
        detail: str = resource.release()
        return detail

    def rebuild(self, resource: Any, context: Context) -> str:
        """Rebuild one resource and return a detail."""
        detail: str = resource.rebuild(context)
        return detail

    def _refusal(self, wanted: str) -> HookRefused | None:
        """Return why this rank must not go ahead from the state ``wanted``, ``None`` where it may."""
        try:
            self._require_known_engine()
            self._require_state(wanted)
            if wanted == SERVING:
                self._require_drained()
        except HookRefused as refusal:
            return refusal
        return None

    def _require_known_engine(self) -> None:
        import vllm
        from packaging.specifiers import SpecifierSet

        if not SpecifierSet(SUPPORTED).contains(vllm.__version__, prereleases=True):
            raise UnsupportedEngineVersion(
                f"vLLM {vllm.__version__} is not one of the versions that these hooks know ({SUPPORTED})"
            )
        if self.worker.device.type != "cpu" or self.worker.parallel_config.nnodes != 1:
            raise UnsupportedPlatform("these hooks cover vLLM on CPU on one node")

    def _require_state(self, wanted: str) -> None:
        if self.state.name == FAILED:
            raise StateFailed(f"an earlier call failed half-way: {self.state.problem}")
        if self.state.name != wanted:
            if wanted == SERVING:
                raise AlreadyPrepared("the engine is prepared already; restore comes first")
            raise NotPrepared("the engine serves; prepare comes first")

    def _vote(
        self, votes: Rendezvous, refusal: HookRefused | None, ballot: dict[str, Any]
    ) -> list[dict[str, Any]]:
        """Vote on going ahead and return every rank's ballot; raise where any rank refuses."""
        problem = None if refusal is None else f"{type(refusal).__name__}: {refusal}"
        ballots = votes.exchange("begin", {"problem": problem} | ballot)
        if refusal is not None:
            raise refusal
        against = [f"rank {rank}: {b['problem']}" for rank, b in enumerate(ballots) if b["problem"]]
        if against:
            raise PeerRefused("; ".join(against))
        return ballots

    def _agree_to_prepare(self, votes: Rendezvous, refusal: HookRefused | None, resources: list[Any]) -> str:
        """Vote on going ahead; return the file of the next rendezvous, named by rank 0."""
        ballot = {
            "path": str(Path(tempfile.gettempdir()) / f"vllm_dist_{secrets.token_hex(16)}"),
            "groups": self.shared(resources),
        }
        ballots = self._vote(votes, refusal, ballot)
        if any(other["groups"] != ballot["groups"] for other in ballots):
            raise PeerRefused(f"ranks hold different groups or workspaces: {[b['groups'] for b in ballots]}")
        path: str = ballots[0]["path"]
        return path

    def _require_drained(self) -> None:
        runner = self.worker.model_runner
        # Model runner V1 keeps requests by id; V2 keeps them in its request states.
        held = getattr(runner, "requests", None)
        if held is None:
            held = getattr(getattr(runner, "req_states", None), "req_id_to_index", None)
        if held is None:
            raise NotDrained("cannot tell whether requests are in this model runner")
        if held:
            raise NotDrained(f"{len(held)} requests are in the worker; quiesce comes first")
        for name, coordinator, _aliases in inventory.coordinators():
            if getattr(coordinator, "_pending_isends", None):
                raise NotDrained(f"{name} has sends in flight")

    def _attempt(self, resource: Any, verb: str, context: Context | None = None) -> dict[str, Any]:
        began = time.monotonic()
        try:
            if isinstance(resource, Absent) and not resource.held():
                return _outcome(resource, "absent", resource.why, 0.0)
            detail = self.release(resource) if context is None else self.rebuild(resource, context)
        except Unsupported as error:
            return _outcome(resource, "unsupported", str(error), time.monotonic() - began)
        except Deferred as error:
            return _outcome(resource, "deferred", str(error), time.monotonic() - began)
        except Exception as error:
            detail = f"{type(error).__name__}: {error}"
            return _outcome(resource, "failed", detail, time.monotonic() - began)
        return _outcome(
            resource, f"{verb}d" if verb == "release" else "rebuilt", detail, time.monotonic() - began
        )

    def _all_rebuilt(self, votes: Rendezvous, outcome: dict[str, Any]) -> bool:
        problem = outcome["detail"] if outcome["outcome"] == "failed" else None
        try:
            votes.agree(outcome["name"], problem)
        except (PeerRefused, PeerSilent) as error:
            self.state.problem = str(error)
            return False
        return True

    def _conclude(self, votes: Rendezvous, outcomes: list[dict[str, Any]], reached: str) -> None:
        """Agree on how the call ended and set the state; a failure on one rank is one on all."""
        failed = [f"{o['name']}: {o['detail']}" for o in outcomes if o["outcome"] == "failed"]
        try:
            votes.agree("end", "; ".join(failed) or None)
            votes.part()
            self.state.name, self.state.problem = reached, None
        except (PeerRefused, PeerSilent, RuntimeError) as error:
            self.state.name = FAILED
            self.state.problem = self.state.problem or str(error)

    def _report(self, outcomes: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "state": self.state.name,
            "problem": self.state.problem,
            "resources": sorted(outcomes, key=lambda outcome: str(outcome["name"])),
        }


def _outcome(resource: Any, outcome: str, detail: str, seconds: float) -> dict[str, Any]:
    return {
        "name": resource.name,
        "kind": resource.kind,
        "outcome": outcome,
        "detail": detail,
        "seconds": round(seconds, 6),
    }
