"""Known-bad hooks: the reference implementation with one defect each, for the suite to catch.

``DIRTY`` says that the engine is not usable for another case afterwards; ``mutants.toml`` says so too.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import subprocess
import sys
from pathlib import Path
from typing import Any, ClassVar

from nvsnap_hooks import dispatch, inventory
from nvsnap_hooks.errors import HookRefused, PassThrough, UnsupportedEngineVersion
from nvsnap_hooks.provenance import columns_of, packed_layers
from nvsnap_hooks.reference import PREPARED, SERVING, ReferenceHooks
from nvsnap_hooks.resources import Absent, Kept, StillHeld

Report = dict[str, Any]


class PrepareNothing(ReferenceHooks):
    """Says that it released and rebuilt everything, and touches nothing."""

    DIRTY: ClassVar[bool] = False

    def prepare(self) -> Report:
        """Report a release that never was."""
        self._require_known_engine()
        self._require_state(SERVING)
        self.state.name = PREPARED
        return _claim(PREPARED, "released")

    def restore(self) -> Report:
        """Report a rebuild that never was."""
        self._require_known_engine()
        self._require_state(PREPARED)
        self.state.name = SERVING
        return _claim(SERVING, "rebuilt")


class ReportsAbsentAsReleased(ReferenceHooks):
    """Reports what the rank does not have as released, as an 'everything succeeded' loop would."""

    DIRTY: ClassVar[bool] = False

    def prepare(self) -> Report:
        """Prepare, and lie about what was absent."""
        return recast(super().prepare(), "absent", "released")

    def restore(self) -> Report:
        """Restore, and lie about what was absent."""
        return recast(super().restore(), "absent", "rebuilt")


class UnsupportedAsReleased(ReferenceHooks):
    """Reports what it cannot release as released, as vLLM's base all-to-all manager does."""

    DIRTY: ClassVar[bool] = False

    def prepare(self) -> Report:
        """Prepare, and lie about what is unsupported."""
        return recast(super().prepare(), "unsupported", "released")

    def restore(self) -> Report:
        """Restore, and lie about what is unsupported."""
        return recast(super().restore(), "unsupported", "rebuilt")


class RankZeroOnly(ReferenceHooks):
    """Only rank 0 gives an outcome, as SGLang's RPC does; needs two ranks to differ."""

    DIRTY: ClassVar[bool] = False

    def prepare(self) -> Any:
        """Prepare on every rank, report on one."""
        return self._mine(super().prepare())

    def restore(self) -> Any:
        """Restore on every rank, report on one."""
        return self._mine(super().restore())

    def status(self) -> Any:
        """Report on one rank."""
        return self._mine(super().status())

    def _mine(self, value: Any) -> Any:
        return value if self.worker.rank == 0 else None


class DoublePrepareAccepted(ReferenceHooks):
    """Takes a second prepare for a success."""

    DIRTY: ClassVar[bool] = False

    def prepare(self) -> Report:
        """Prepare, or say so again."""
        if self.state.name == PREPARED:
            return {"state": PREPARED, "problem": None, "resources": []}
        return super().prepare()


class RestoreWithoutPrepareAccepted(ReferenceHooks):
    """Takes a restore of a serving engine for a success."""

    DIRTY: ClassVar[bool] = False

    def restore(self) -> Report:
        """Restore, or say so."""
        if self.state.name == SERVING:
            return {"state": SERVING, "problem": None, "resources": []}
        return super().restore()


class RestoreForgetsGroup(ReferenceHooks):
    """Leaves one group destroyed and reports it rebuilt. No token depends on that group."""

    DIRTY: ClassVar[bool] = True
    FORGOTTEN: ClassVar[str] = "dp:0/cpu"

    def rebuild(self, resource: Any, context: Any) -> str:
        """Rebuild all but one."""
        if resource.name == self.FORGOTTEN:
            return "handed to GroupCoordinator.cpu_group"
        return super().rebuild(resource, context)


class RestoreSwapsWeights(ReferenceHooks):
    """After the restore the last norm has the other sign: other tokens, from a healthy-looking engine."""

    DIRTY: ClassVar[bool] = True

    def restore(self) -> Report:
        """Restore, then turn the logits round."""
        report = super().restore()
        _negate_norm(self.worker)
        return report


class RestorePerturbsOneWeight(ReferenceHooks):
    """After the restore one packed weight is off by one unit in the last place: no token shows it."""

    DIRTY: ClassVar[bool] = True

    def restore(self) -> Report:
        """Restore, then change one weight."""
        report = super().restore()
        perturb_packed_weight(self.worker)
        return report


class NonceLost(ReferenceHooks):
    """Replies without the call's nonce, so that nobody can tell which call it answers."""

    DIRTY: ClassVar[bool] = False

    def nvsnap_finish_reply(self, reply: Report) -> Report:
        """Take the nonce out."""
        return {key: value for key, value in reply.items() if key != "nonce"}


class StaleEcho(ReferenceHooks):
    """Replies with the nonce of the call before, as vLLM's ranks do after one failed RPC."""

    DIRTY: ClassVar[bool] = False

    def __init__(self, worker: Any, options: dict[str, Any]) -> None:
        super().__init__(worker, options)
        self._previous = secrets.token_hex(16)

    def nvsnap_finish_reply(self, reply: Report) -> Report:
        """Put the earlier nonce in."""
        stale = reply | {"nonce": self._previous}
        self._previous = reply["nonce"]
        return stale


class AcceptsAnyVersion(ReferenceHooks):
    """Goes ahead on an engine version that nobody has looked at. Leaves such an engine prepared."""

    DIRTY: ClassVar[bool] = True

    def _require_known_engine(self) -> None:
        """Ask nothing."""


class RaisesInsteadOfReporting(ReferenceHooks):
    """Its refusals on one rank (option ``rank``, default 0) leave through the engine's RPC as exceptions.

    At a world size of two and more that puts the engine's per-rank replies out of step for good.
    """

    DIRTY: ClassVar[bool] = True

    def prepare(self) -> Report:
        """Prepare, or raise."""
        return self._loudly(super().prepare)

    def restore(self) -> Report:
        """Restore, or raise."""
        return self._loudly(super().restore)

    def _loudly(self, method: Any) -> Report:
        try:
            report: Report = method()
        except HookRefused as error:
            if self.worker.rank == self.options.get("rank", 0):
                raise PassThrough(str(error)) from error
            raise
        return report


class SecondCycleBroken(ReferenceHooks):
    """Its first cycle is right; from the second on, the answers are others."""

    DIRTY: ClassVar[bool] = True

    def __init__(self, worker: Any, options: dict[str, Any]) -> None:
        super().__init__(worker, options)
        self._restored = 0

    def restore(self) -> Report:
        """Restore, and spoil every restore but the first."""
        report = super().restore()
        self._restored += 1
        if self._restored > 1:
            _negate_norm(self.worker)
        return report


class SwallowsDeviceError(ReferenceHooks):
    """Restore meets an error of the device on the last rank, logs it and reports success."""

    DIRTY: ClassVar[bool] = False

    def restore(self) -> Report:
        """Restore, and swallow an error as PyTorch words it."""
        report = super().restore()
        if self.worker.rank == self.worker.parallel_config.world_size - 1:
            sys.stderr.write("restore goes on after CUDA error: an illegal memory access was encountered\n")
            sys.stderr.flush()
        return report


class LeavesDaemon(ReferenceHooks):
    """Prepare leaves a process behind, in a session of its own, that outlives the engine."""

    DIRTY: ClassVar[bool] = True

    def prepare(self) -> Report:
        """Prepare, and start what nobody ends."""
        report = super().prepare()
        # Handed to init by the shell's exit, like a daemon.
        subprocess.run(
            ["/bin/sh", "-c", "sleep 3600 >/dev/null 2>&1 </dev/null &"], check=True, start_new_session=True
        )
        return report


class LeavesShm(ReferenceHooks):
    """Prepare leaves a file in /dev/shm behind."""

    DIRTY: ClassVar[bool] = True

    def prepare(self) -> Report:
        """Prepare, and litter."""
        report = super().prepare()
        Path(f"/dev/shm/nvsnap-mutant-{secrets.token_hex(8)}").write_bytes(bytes(4096))  # noqa: S108 - the defect
        return report


class ForgetsItsPast(ReferenceHooks):
    """The last rank comes back without what its memory held, as a worker that was started anew does."""

    DIRTY: ClassVar[bool] = False

    def restore(self) -> Report:
        """Restore, and forget every other implementation's state."""
        report = super().restore()
        if self.worker.rank == self.worker.parallel_config.world_size - 1:
            dispatch.forget()
        return report


class EnvironmentDrifts(ReferenceHooks):
    """Rebuilds the last rank's groups under another setting of NVLS than the one that it began with."""

    DIRTY: ClassVar[bool] = True
    VARIABLE: ClassVar[str] = "NCCL_NVLS_ENABLE"

    def restore(self) -> Report:
        """Change the setting, then restore."""
        if self.worker.rank == self.worker.parallel_config.world_size - 1:
            os.environ[self.VARIABLE] = "1" if os.environ.get(self.VARIABLE) == "0" else "0"
        return super().restore()


class EnvironmentFlips(ReferenceHooks):
    """Rebuilds the last rank's groups under another setting of NVLS, and then puts the first one back."""

    DIRTY: ClassVar[bool] = False

    def restore(self) -> Report:
        """Change the setting for the restore alone."""
        if self.worker.rank != self.worker.parallel_config.world_size - 1:
            return super().restore()
        variable = EnvironmentDrifts.VARIABLE
        had = os.environ.get(variable)
        os.environ[variable] = "1" if had == "0" else "0"
        try:
            return super().restore()
        finally:
            if had is None:
                del os.environ[variable]
            else:
                os.environ[variable] = had


class StaleHolder(ReferenceHooks):
    """Rebuilds every group, and leaves the communicators with the CPU groups from before."""

    DIRTY: ClassVar[bool] = True

    def __init__(self, worker: Any, options: dict[str, Any]) -> None:
        super().__init__(worker, options)
        self._old: list[tuple[Any, Any]] = []

    def prepare(self) -> Report:
        """Prepare, and keep what the communicators held."""
        communicators = [found.device_communicator for _, found, _ in inventory.coordinators()]
        self._old = [(one, one.cpu_group) for one in communicators if one is not None]
        return super().prepare()

    def release(self, resource: Any) -> str:
        """Release, and think nothing of a group that is still held."""
        try:
            return super().release(resource)
        except StillHeld:
            return f"{resource.name} destroyed"

    def restore(self) -> Report:
        """Restore, and put the old groups back."""
        report = super().restore()
        for communicator, group in self._old:
            communicator.cpu_group = group
        return report


class RestoreLeaksGroup(ReferenceHooks):
    """Makes one group more than there was, at each restore."""

    DIRTY: ClassVar[bool] = True
    EXTRA: ClassVar[list[Any]] = []

    def restore(self) -> Report:
        """Restore, and make another group."""
        import torch.distributed as dist

        report = super().restore()
        if report["state"] == SERVING:
            self.EXTRA.append(dist.new_group(backend="gloo", group_desc="extra"))
        return report


class GateOnRankZero(ReferenceHooks):
    """Only rank 0 looks at the engine's version. Leaves an engine prepared that should have refused."""

    DIRTY: ClassVar[bool] = True

    def _require_known_engine(self) -> None:
        """Ask on rank 0."""
        if self.worker.rank == 0:
            super()._require_known_engine()


class RefusesEveryVersion(ReferenceHooks):
    """Refuses every version of the engine, the known ones too, and so keeps its gate closed for good."""

    DIRTY: ClassVar[bool] = False

    def _require_known_engine(self) -> None:
        """Refuse."""
        raise UnsupportedEngineVersion("these hooks know no version")


class RefusalChangesState(ReferenceHooks):
    """Refuses a restore without prepare, after it has begun with it."""

    DIRTY: ClassVar[bool] = True
    EXTRA: ClassVar[list[Any]] = []

    def restore(self) -> Report:
        """Make a group, then look whether that was called for."""
        import torch.distributed as dist

        if self.state.name == SERVING:
            self.EXTRA.append(dist.new_group(backend="gloo", group_desc="extra"))
        return super().restore()


class WarmsUpPrepared(ReferenceHooks):
    """Runs a warm-up batch while the groups are not there yet, and takes no notice of how it ends."""

    DIRTY: ClassVar[bool] = True

    def restore(self) -> Report:
        """Warm up, then restore."""
        if self.state.name == PREPARED:
            with contextlib.suppress(Exception):
                self.worker.execute_dummy_batch()
        return super().restore()


def _claim(state: str, outcome: str) -> Report:
    """Report ``outcome`` for whatever is held, honest about the rest."""
    resources = []
    for resource in inventory.take():
        honest = "unsupported" if isinstance(resource, Kept) else "absent"
        resources.append(
            {
                "name": resource.name,
                "kind": resource.kind,
                "outcome": honest if isinstance(resource, Absent) else outcome,
                "detail": "",
                "seconds": 0.0,
            }
        )
    return {"state": state, "problem": None, "resources": resources}


def recast(report: Report, was: str, claimed: str) -> Report:
    """Claim ``claimed`` for every resource whose outcome was ``was``."""
    for entry in report["resources"]:
        if entry["outcome"] == was:
            entry["outcome"] = claimed
    return report


def _negate_norm(worker: Any) -> None:
    import torch

    weights = dict(worker.model_runner.get_model().named_parameters())
    last_norm = next(name for name in weights if name.endswith("model.norm.weight"))
    with torch.inference_mode():
        weights[last_norm].neg_()


def perturb_packed_weight(worker: Any) -> str:
    """Change one element of the first packed weight by one unit in the last place; return its layer."""
    import torch
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

    name, layer = packed_layers(worker.model_runner.get_model())[0]
    with torch.inference_mode():
        weight = torch.cat(list(columns_of(layer))).T.contiguous()
        weight[0, 0] = torch.nextafter(weight[0, 0], torch.full((), torch.inf, dtype=weight.dtype))
    emptied = layer.weight.numel() == 0
    layer.weight = torch.nn.Parameter(weight, requires_grad=False)
    dispatch_cpu_unquantized_gemm(layer, remove_weight=emptied)
    return name
