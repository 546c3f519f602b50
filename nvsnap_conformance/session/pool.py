"""The engines of a session: brought up on demand, shared between cases, verified clean in between."""

from __future__ import annotations

import dataclasses
import importlib
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from nvsnap_conformance.deadline import Deadline
from nvsnap_conformance.engines.protocol import (
    EngineHandle,
    Health,
    HooksSpec,
    LaunchConfig,
    Rank,
    RankReply,
    RequestFailed,
)
from nvsnap_conformance.errors import NvsnapError, TargetError
from nvsnap_conformance.gpus import VISIBLE, Lease, lease
from nvsnap_conformance.hooks import contract
from nvsnap_conformance.hooks.injection import INJECT_PACKAGE, require_hooks
from nvsnap_conformance.lifecycle import graphs
from nvsnap_conformance.lifecycle.driver import OBSERVER
from nvsnap_conformance.lifecycle.oracle import Answers, check_answers, take_answers
from nvsnap_conformance.report.degraded import degradations
from nvsnap_conformance.report.model import EngineRecord

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from nvsnap_conformance.report.record import EventStream
    from nvsnap_conformance.session.arms import Arm
    from nvsnap_conformance.session.options import Selection
    from nvsnap_conformance.targets.model import Target

START_SECONDS = 300.0
"""Allowance for a cold start. Measured 38 to 63 s alone on two cores, up to 137 s under a load of 8."""

LEASE_SECONDS = 600.0
"""Allowance for other runs to give GPUs back."""

STOP_SECONDS = 30.0
QUICK_SECONDS = 30.0

ADAPTERS: dict[str, str] = {"vllm": "nvsnap_conformance.engines.vllm:VllmEngine"}
"""Engine adapters by the name that a target gives; ``module:Class``, imported when first needed."""


@dataclass
class LiveEngine:
    """An engine that is up, with what it was like when it came up. ``distribution`` is its name and version.

    ``spoiled`` engines still serve, but their RPC can no longer be trusted; only cases that end the
    engine may have them.
    """

    key: str
    distribution: str
    handle: EngineHandle
    ranks: list[Rank]
    baseline: Answers
    inventory: list[RankReply]
    spoiled: bool = False
    ended: bool = False
    notes: list[str] = field(default_factory=list)


class EnginePool:
    """Brings engines up and takes them down again; one live engine for each key."""

    def __init__(
        self,
        selection: Selection,
        stream: EventStream,
        progress: Callable[[str], None],
        *,
        worker: str | None = None,
    ) -> None:
        """``worker`` names an xdist worker: several of them write into one record's folder."""
        self._selection = selection
        self._worker = worker
        self._stream = stream
        self._progress = progress
        self._live: dict[str, LiveEngine] = {}
        self._count = 0
        # By target: what it takes before an engine can be started does not come by asking again.
        self._refused: dict[str, NvsnapError] = {}
        self.on_start: Callable[[EngineRecord, str, str], None] = lambda _record, _target, _version: None

    def get(self, arm: Arm, *, expendable: bool = False) -> LiveEngine:
        """Return a live engine for ``arm``; a spoiled one only where ``expendable``.

        Raises ``EngineStartError`` where it does not come up, ``EnvironmentFailure`` where its
        environment cannot be built.
        """
        live = self._live.get(arm.engine_key)
        if live is not None and live.spoiled and not expendable:
            self.discard(live, "its RPC is out of step")
            live = None
        if live is None:
            self._make_room(arm)
            live = self._start(arm)
            self._live[arm.engine_key] = live
        return live

    def settle(self, live: LiveEngine) -> None:
        """Keep ``live`` for the next case if it is as it was when it came up, else end it."""
        if live.ended:
            self.discard(live, "its case ended it")
        elif not live.spoiled:
            reason = self._unclean(live)
            if reason:
                self.discard(live, reason)

    def discard(self, live: LiveEngine, reason: str) -> None:
        """End an engine and forget it."""
        self._live.pop(live.key, None)
        self._stream.emit("engine-discarded", engine=live.key, reason=reason)
        live.handle.process.close()

    def close(self) -> None:
        """End every engine."""
        for live in list(self._live.values()):
            self.discard(live, "the session ends")

    def _make_room(self, arm: Arm) -> None:
        """End engines of other keys: cases are ordered by engine, so they will not be wanted again."""
        for key, live in list(self._live.items()):
            if key != arm.engine_key:
                self.discard(live, f"room for {arm.engine_key}")

    def _start(self, arm: Arm) -> LiveEngine:
        from nvsnap_conformance.engines.environment import EngineEnvironment  # noqa: PLC0415
        from nvsnap_conformance.models import ensure_model  # noqa: PLC0415

        target = arm.target
        if target is None:
            raise TargetError("a case without a target asked for an engine")
        if target.name in self._refused:
            raise self._refused[target.name]
        label = f"[{target.name} tp={arm.tensor_parallel}]"
        self._progress(f"{label} engine environment {target.engine.requirement or target.engine.python}")
        try:
            environment = EngineEnvironment.for_target(
                target, on_progress=lambda text: self._progress(f"{label} {text}")
            )
            model = ensure_model(target.engine.model)
        except NvsnapError as error:
            self._refused[target.name] = error
            raise
        self._count += 1
        workdir = self._workdir(arm)
        held = self._lease(target, arm.tensor_parallel, label)
        mutation = None
        if arm.mutant is not None and arm.mutant.layer == "engine":
            mutation = arm.mutant.implementation
        config = LaunchConfig(
            python=environment.python,
            model=model,
            tensor_parallel=arm.tensor_parallel,
            workdir=workdir,
            args=target.engine.args,
            env={**target.engine.env, VISIBLE: held.setting} if held else target.engine.env,
            import_paths=environment.import_paths,
            mutation=mutation,
            inject=target.hooks.inject.value,
            processor=target.engine.processor,
            sleep_mode=target.checkpoint.sleep_level is not None,
        )
        built = f"{environment.distribution} {environment.version}"
        return self._bring_up(arm, config, label, built, lambda: self._give_back(held))

    def beside(self, arm: Arm, live: LiveEngine) -> LiveEngine:
        """Bring up another engine as ``live`` is, beside it and on the same GPUs; the caller ends it.

        Raises ``EngineStartError`` where it does not come up.
        """
        self._count += 1
        config = dataclasses.replace(live.handle.config, workdir=self._workdir(arm))
        label = f"[{arm.id} second engine]"
        return self._bring_up(arm, config, label, live.distribution, lambda: None)

    def _bring_up(
        self, arm: Arm, config: LaunchConfig, label: str, distribution: str, at_end: Callable[[], None]
    ) -> LiveEngine:
        """Start an engine, look at it and record it. ``at_end`` is called when it is gone, or never came."""
        from nvsnap_conformance.engines.golden import bring_up  # noqa: PLC0415

        target = arm.target
        assert target is not None  # the caller's condition
        began = time.monotonic()

        def say(text: str) -> None:
            self._progress(f"{label} {time.monotonic() - began:5.1f} s  {text}")

        try:
            engine = adapter(target.engine.adapter)(on_progress=say)
            self._require_hooks(engine, config, target)
            start = bring_up(
                engine,
                config,
                cold=self._selection.cold,
                seconds=START_SECONDS,
                say=say,
            )
        except BaseException:
            at_end()
            raise
        handle = start.handle
        handle.process.keep_until_closed(at_end)
        try:
            live = self._inspect(arm, handle, distribution)
        except BaseException:
            handle.process.close()
            raise
        communication = handle.communication_environment()
        record = EngineRecord(
            arm=arm.id,
            distribution=distribution,
            start=start.start,
            start_reason=start.reason,
            image=start.image,
            seconds_to_ready=round(start.seconds, 3),
            io_uring=handle.process.io_uring,
            isolation=sorted(handle.process.isolation),
            communication=communication,
            degraded=list(degradations(communication)),
        )
        self._progress(f"{label} ready after {start.seconds:.1f} s ({start.start}: {start.reason})")
        self.on_start(record, target.name, distribution.partition(" ")[2])
        return live

    def _require_hooks(self, engine: Any, config: LaunchConfig, target: Target) -> None:
        """Raise :class:`TargetError` for hooks that the engine's interpreter does not find."""
        try:
            require_hooks([str(config.python)], engine.launch_plan(config)[1], target.hooks.spec())
        except TargetError as error:
            self._refused[target.name] = error
            raise

    def _lease(self, target: Target, size: int, label: str) -> Lease | None:
        """Take the GPUs of an engine; ``None`` for one that runs on none."""
        if target.engine.processor != "cuda":
            return None
        held = lease(size, Deadline.after(LEASE_SECONDS))
        blind = f", no peer access between {held.blind}" if held.blind else ""
        self._progress(f"{label} GPUs {', '.join(gpu.uuid for gpu in held.gpus)}{blind}")
        self._stream.emit(
            "gpus",
            gpus=[[gpu.uuid, gpu.name, gpu.memory] for gpu in held.gpus],
            used=held.baseline,
            blind=held.blind,
        )
        return held

    def _give_back(self, held: Lease | None) -> None:
        for text in held.release() if held else ():
            self._stream.emit("gpu-not-clean", text=text)
            self._progress(f"GPU memory did not come back: {text}")

    def _workdir(self, arm: Arm) -> Path:
        worker = f"{self._worker}-" if self._worker else ""
        folder = self._selection.out / "engines" / f"{worker}{self._count:02d}-{arm.engine_key}"
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def _inspect(self, arm: Arm, handle: EngineHandle, distribution: str) -> LiveEngine:
        deadline = Deadline.after(START_SECONDS / 3)
        if arm.target is not None:
            try:
                require_imported(handle, arm.target.hooks.spec(), deadline)
            except TargetError as error:
                self._refused[arm.target.name] = error
                raise
        return LiveEngine(
            key=arm.engine_key,
            distribution=distribution,
            handle=handle,
            ranks=handle.ranks(deadline),
            baseline=take_answers(handle, deadline),
            inventory=handle.rpc("snapshot", hooks=OBSERVER, deadline=deadline),
        )

    def _unclean(self, live: LiveEngine) -> str | None:
        """Return why an engine is not as it was when it came up, ``None`` where it is."""
        deadline = Deadline.after(QUICK_SECONDS)
        handle = live.handle
        try:
            if handle.health(deadline) is not Health.SERVING:
                return "it does not serve"
            if handle.paused(deadline):
                return "it is still quiesced"
            if [rank.process for rank in handle.ranks(deadline)] != [r.process for r in live.ranks]:
                return "its ranks are other processes"
            inventory = handle.rpc("snapshot", hooks=OBSERVER, deadline=deadline)
            if resources_by_rank(inventory) != resources_by_rank(live.inventory):
                # A case that restored it need not have waited for the graphs to come back.
                graphs.capture_all(handle, HooksSpec(), deadline=deadline)
                inventory = handle.rpc("snapshot", hooks=OBSERVER, deadline=deadline)
            if resources_by_rank(inventory) != resources_by_rank(live.inventory):
                return "its ranks hold other resources than at the start"
            found = check_answers(live.baseline, take_answers(handle, deadline), what="after a case")
            if found:
                return found[0].message
        except (RequestFailed, NvsnapError) as error:
            return f"{type(error).__name__}: {error}"
        return None


def require_imported(handle: EngineHandle, hooks: HooksSpec, deadline: Deadline) -> None:
    """Raise :class:`TargetError` where a worker cannot import ``hooks``, which only the engine can tell.

    A method that no hooks have is asked for, so that none of theirs is run.
    """
    if hooks.implementation.startswith(f"{INJECT_PACKAGE}."):
        return
    refused = contract.not_imported(handle, hooks, deadline)
    if refused is not None:
        raise TargetError(
            (refused.error or {}).get("message", ""),
            cause=f"rank {refused.rank} of the engine could not import the module, or found no such class",
            next_step="import it in the engine's interpreter, with [hooks] path on sys.path",
        )


def resources_by_rank(replies: list[RankReply]) -> dict[int, dict[str, Any]]:
    """Return what the observer saw on each rank: resource name to its kind, without identities."""
    return {
        reply.rank: {
            name: entry.get("kind")
            for name, entry in reply.value.get("resources", {}).items()
            if entry.get("live")
        }
        for reply in replies
        if reply.rank is not None and isinstance(reply.value, dict)
    }


def adapter(name: str) -> Callable[..., Any]:
    """Return the factory of an engine adapter; raise :class:`TargetError` for a name that has none."""
    try:
        module, _, attribute = ADAPTERS[name].partition(":")
    except KeyError:
        raise TargetError(
            f"no engine adapter named {name!r}",
            cause=f"this version has {', '.join(sorted(ADAPTERS))}",
            next_step="set [engine] adapter to one of these",
        ) from None
    factory: Callable[..., Any] = getattr(importlib.import_module(module), attribute)
    return factory
