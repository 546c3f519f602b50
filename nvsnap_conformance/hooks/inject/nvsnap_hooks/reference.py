"""The suite's reference hooks: what ``prepare`` and ``restore`` have to do, for a vLLM engine on CPU or CUDA.

``prepare`` checks that the worker is drained and releases every cross-rank resource; ``restore`` rebuilds
them over a fresh rendezvous and hands them to everything that had held the old ones. Both agree with the
other ranks by votes over a store, each bounded in time, so that no rank waits for one that failed.

They know vLLM 0.26 to 0.33 and refuse every other version: they reach into ``GroupCoordinator``, its device
communicators, ``MessageQueue`` and the holders of CUDA graphs, which have no stable interface for this.
"""

from __future__ import annotations

import secrets
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nvsnap_hooks import graphs, held_workspace, inventory
from nvsnap_hooks.communicators import Communicator
from nvsnap_hooks.device import Device
from nvsnap_hooks.errors import (
    AlreadyPrepared,
    BadOption,
    HookRefused,
    NoDevice,
    NotDrained,
    NotPrepared,
    PeerRefused,
    PeerSilent,
    StateFailed,
    UnsupportedEngineVersion,
    UnsupportedPlatform,
)
from nvsnap_hooks.held_workspace import HeldWorkspace
from nvsnap_hooks.rendezvous import Rendezvous, next_call
from nvsnap_hooks.resources import Absent, Context, Deferred, Group, LeftAlive, Unsupported
from nvsnap_hooks.teardown import Teardown

SUPPORTED = ">=0.26,<0.34"

SERVING, PREPARED, FAILED = "serving", "prepared", "failed"


@dataclass
class EngineState:
    """Where this rank's engine stands; one for each worker process, whatever implementation is asked.

    ``resources`` is what ``prepare`` released, ``path`` the file of the rendezvous for ``restore``,
    ``addresses`` where shared memory lay before, and ``recapture`` how far graphs are captured again.
    """

    name: str = SERVING
    cycles: int = 0
    problem: str | None = None
    resources: list[Any] = field(default_factory=list)
    path: str = ""
    addresses: dict[str, list[int]] = field(default_factory=dict)
    recapture: graphs.Recapture | None = None


STATE = EngineState()


class ReferenceHooks:
    """Prepare and restore of one rank.

    Options: ``rendezvous_seconds`` (default 20) bounds each wait for the other ranks, ``recapture_seconds``
    (default 300) one capture of graphs, both in seconds; ``teardown`` says what is taken down
    (:mod:`nvsnap_hooks.teardown`). Every refusal (:class:`nvsnap_hooks.errors.HookRefused`) leaves the
    engine as it was. They may be called from any thread, and leave the worker's device current in it.
    """

    def __init__(self, worker: Any, options: dict[str, Any]) -> None:
        self.worker = worker
        self.options = options
        self.state = STATE
        self.seconds = float(options.get("rendezvous_seconds", 20.0))
        self.recapture_seconds = float(options.get("recapture_seconds", 300.0))
        self.teardown = Teardown.of(options.get("teardown"))
        self.device = Device(getattr(worker, "device", None))

    def prepare(self) -> dict[str, Any]:
        """Release what this rank holds across ranks.

        Returns ``{"state", "problem", "resources": [{"name", "kind", "outcome", "detail", "seconds"}]}``;
        ``outcome`` is ``released``, ``absent``, ``unsupported``, ``kept`` (on request) or ``failed``.
        ``state`` is ``failed`` where any rank failed to release something, and ``problem`` says which. On
        CUDA ``memory`` is the device's free memory before and after, in bytes, and a resource may have
        ``freed`` (bytes) and ``addresses`` (``before`` and ``after``, in hexadecimal).
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
        for resource in resources:
            if isinstance(resource, Communicator | HeldWorkspace):
                resource.votes, resource.seconds = votes, self.seconds
        free = self.device.free()
        self.device.synchronize()
        outcomes = [self._attempt(resource, "release") for resource in self.release_order(resources)]
        self.state.resources = resources
        self.state.recapture = next(
            (found.recapture for found in resources if isinstance(found, graphs.Graphs)), self.state.recapture
        )
        self._conclude(votes, outcomes, PREPARED)
        # Only now: peers may have mapped memory of dropped graphs until the last of them came this far.
        self.device.give_back()
        return self._report(outcomes, free)

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
        free = self.device.free()
        outcomes: list[dict[str, Any]] = []
        for resource in self.rebuild_order(self.state.resources):
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
        return self._report(outcomes, free)

    def recapture(self, number: int = 1) -> dict[str, Any]:
        """Capture the next ``number`` of the dropped CUDA graphs again, on all ranks together.

        To be called until ``graphs.state`` is ``captured``: the engine serves in between, and computes
        eagerly until then. Returns ``{"state", "problem", "graphs"}`` with ``graphs`` either ``{"state",
        "wanted", "captured", "problem"}`` or ``None`` where there is nothing to capture. Where one rank
        fails, all give up for good, and the engine goes on computing eagerly.
        """
        call = next_call()
        import torch.distributed as dist
        from torch.distributed import distributed_c10d as c10d

        refusal = self._refusal(SERVING)
        if not dist.is_initialized():
            raise refusal or StateFailed("torch.distributed is not initialised")
        default = c10d._get_default_group()
        votes = Rendezvous(
            c10d._world.pg_map[default][1],
            f"recapture-{call}",
            rank=dist.get_rank(),
            size=dist.get_world_size(),
            seconds=self.seconds,
        )
        progress = self.state.recapture
        ballot = None if progress is None else progress.progress()
        ballots = self._vote(votes, refusal, {"graphs": ballot})
        if any(other["graphs"] != ballot for other in ballots):
            raise PeerRefused(f"ranks differ in what is to be captured: {[b['graphs'] for b in ballots]}")
        if progress is not None and progress.state in ("eager", "capturing"):
            self._capture(progress, number, votes)
        return {
            "state": self.state.name,
            "problem": self.state.problem,
            "graphs": None if progress is None else progress.progress(),
        }

    def status(self) -> dict[str, Any]:
        """Return ``{"state", "cycles", "problem"}``.

        ``state`` is ``serving``, ``prepared`` or ``failed``, ``cycles`` how many were completed, and
        ``problem`` what went wrong. Where graphs were dropped, ``graphs`` is as :meth:`recapture` returns it.
        """
        told = {"state": self.state.name, "cycles": self.state.cycles, "problem": self.state.problem}
        if self.state.recapture is not None:
            told["graphs"] = self.state.recapture.progress()
        return told

    # The steps, in methods of their own: a known-bad implementation overrides one.

    def inventory(self) -> list[Any]:
        """Return what this rank holds, in the order of its release."""
        found = inventory.take(self.worker, self.teardown)
        for resource in found:
            if isinstance(resource, graphs.Graphs):
                resource.pending = self.state.recapture
        return found

    def shared(self, resources: list[Any]) -> list[str]:
        """Return what all ranks must hold alike.

        Groups are made, and workspaces and communicators released, by all ranks together, and workspaces of
        different backends differ in their number of barriers.
        """
        return sorted(
            f"{resource.name} {resource.backend}"
            for resource in resources
            if getattr(resource, "backend", None) is not None
        )

    def bound(self, resources: list[Any]) -> None:
        """Bound every collective: a rank that fails must not keep others in a barrier for half an hour."""
        for resource in resources:
            if isinstance(resource, Group):
                resource.bound(self.seconds)

    def release_order(self, resources: list[Any]) -> list[Any]:
        """Return the resources in the order in which they are released: the inventory's own."""
        return resources

    def rebuild_order(self, resources: list[Any]) -> list[Any]:
        """Return the resources in the order in which they are rebuilt."""
        return inventory.rebuild_order(resources)

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
            self._take_device()
            if self.device.on_gpu:
                self._require_known_device()
            if self.teardown.nccl == "suspended":
                self._require_suspend()
            self._require_state(wanted)
            if wanted == SERVING:
                self._require_graphs_may_stay()
                self._require_drained()
        except HookRefused as refusal:
            return refusal
        return None

    def _require_known_engine(self) -> None:
        import torch.distributed as dist
        import vllm
        from packaging.specifiers import SpecifierSet

        if not SpecifierSet(SUPPORTED).contains(vllm.__version__, prereleases=True):
            raise UnsupportedEngineVersion(
                f"vLLM {vllm.__version__} is not one of the versions that these hooks know ({SUPPORTED})"
            )
        if self.worker.device.type not in ("cpu", "cuda") or self.worker.parallel_config.nnodes != 1:
            raise UnsupportedPlatform("these hooks cover vLLM on CPU and CUDA on one node")
        if dist.is_initialized() and dist.get_world_size() != self.worker.parallel_config.world_size:
            raise UnsupportedPlatform("a world with data parallelism in it")

    def _take_device(self) -> None:
        """Make the worker's device current in this thread, which need not be the worker's own."""
        try:
            self.device.make_current()
        except Exception as error:
            # As a refusal, which the other ranks hear of: they would wait for this rank's vote.
            raise NoDevice(f"{self.worker.device} in this thread: {type(error).__name__}: {error}") from error

    def _require_known_device(self) -> None:
        """Refuse what these hooks cannot take down on CUDA, and what they were asked for and do not know."""
        import torch.distributed as dist
        from torch.distributed import distributed_c10d as c10d
        from vllm import envs
        from vllm.platforms import current_platform

        if not current_platform.is_cuda():
            raise UnsupportedPlatform("these hooks cover CUDA, and no other GPU platform")
        if envs.VLLM_DISTRIBUTED_USE_SPLIT_GROUP:
            raise UnsupportedPlatform("groups made by split_group (VLLM_DISTRIBUTED_USE_SPLIT_GROUP)")
        if envs.VLLM_USE_NCCL_SYMM_MEM:
            raise UnsupportedPlatform("memory registered with NCCL (VLLM_USE_NCCL_SYMM_MEM)")
        default = c10d._get_default_group() if dist.is_initialized() else None
        if getattr(default, "bound_device_id", None) is not None:
            raise UnsupportedPlatform("a default group that is bound to a device")
        if self.teardown.cuda_graphs == "dropped" and (found := graphs.foreign()):
            raise UnsupportedPlatform(f"graphs that cannot be captured again: {', '.join(found)}")

    def _require_suspend(self) -> None:
        """Refuse to suspend where the library cannot: vLLM's own ``suspend`` warns, and skips it."""
        for name, coordinator, _aliases in inventory.coordinators():
            made = getattr(coordinator.device_communicator, "pynccl_comm", None)
            if made is None or made.disabled:
                continue
            known = getattr(made.nccl, "has_symbol", lambda _: False)
            if not (known("ncclCommSuspend") and known("ncclCommResume")):
                raise BadOption(
                    f"{name}: NCCL {made.nccl_version} has no ncclCommSuspend (2.29.7 has), or vLLM does not "
                    "know it (0.30 does); teardown of nccl is destroyed or live here"
                )

    def _require_graphs_may_stay(self) -> None:
        """Refuse to keep graphs with addresses in them that are sure to be others afterwards."""
        if self.teardown.cuda_graphs != "kept" or self.teardown.flashinfer_workspace != "freed":
            return
        if moving := held_workspace.moving():
            raise BadOption(
                f"{', '.join(moving)}: FlashInfer has no checkpoint_prepare here (0.6.15 has), so this comes "
                "back at other addresses, which kept graphs would miss; teardown of cuda-graphs is dropped, "
                "or that of flashinfer-workspace live"
            )

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
        if isinstance(resource, Absent) and not resource.held():
            return _outcome(resource, "absent", resource.why, 0.0)
        free, lay = self.device.free(), self._addresses(resource)
        began = time.monotonic()
        try:
            detail = self.release(resource) if context is None else self.rebuild(resource, context)
            outcome = f"{verb}d" if verb == "release" else "rebuilt"
        except Unsupported as error:
            outcome, detail = "unsupported", str(error)
        except Deferred as error:
            outcome, detail = "deferred", str(error)
        except LeftAlive as error:
            outcome, detail = "kept", str(error)
        except Exception as error:
            outcome, detail = "failed", f"{type(error).__name__}: {error}"
        told = _outcome(resource, outcome, detail, time.monotonic() - began)
        now = self.device.free()
        if free is not None and now is not None:
            told["freed"] = now - free
        if context is None and lay:
            self.state.addresses[resource.name] = lay
            told["addresses"] = {"before": [hex(address) for address in lay]}
        elif context is not None and (before := self.state.addresses.pop(resource.name, None)):
            told["addresses"] = {
                "before": [hex(address) for address in before],
                "after": [hex(address) for address in self._addresses(resource)],
            }
        return told

    def _addresses(self, resource: Any) -> list[int]:
        found: list[int] = resource.addresses() if hasattr(resource, "addresses") else []
        return found

    def _capture(self, progress: graphs.Recapture, number: int, votes: Rendezvous) -> None:
        """Capture on this rank, and have all ranks give up where one of them fails."""
        from datetime import timedelta

        from torch.distributed import distributed_c10d as c10d

        # A capture is collective, and a rank that fails must not keep others in it for the engine's timeout.
        bounds = {group: _timeout(group) for group in list(c10d._world.pg_map)}
        problem: str | None = None
        for group in bounds:
            c10d._set_pg_timeout(timedelta(seconds=self.recapture_seconds), group)
        try:
            progress.step(number)
            self.device.synchronize()
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
        finally:
            for group, timeout in bounds.items():
                if timeout is not None:
                    c10d._set_pg_timeout(timeout, group)
        try:
            votes.within(self.recapture_seconds).agree("captured", problem)
        except (PeerRefused, PeerSilent) as error:
            progress.give_up(str(error))

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

    def _report(self, outcomes: list[dict[str, Any]], free: int | None) -> dict[str, Any]:
        report: dict[str, Any] = {
            "state": self.state.name,
            "problem": self.state.problem,
            "resources": sorted(outcomes, key=lambda outcome: str(outcome["name"])),
        }
        if free is not None:
            report["memory"] = {"free_before": free, "free_after": self.device.free()}
        return report


def _timeout(group: Any) -> Any:
    backend = group._get_backend(group._device_types[0])
    return getattr(getattr(backend, "options", None), "_timeout", None)


def _outcome(resource: Any, outcome: str, detail: str, seconds: float) -> dict[str, Any]:
    return {
        "name": resource.name,
        "kind": resource.kind,
        "outcome": outcome,
        "detail": detail,
        "seconds": round(seconds, 6),
    }
