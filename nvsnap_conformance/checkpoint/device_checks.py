"""What must hold of a device checkpointer, judged from one observed cycle."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING

from nvsnap_conformance.checkpoint.device import AFTER
from nvsnap_conformance.checkpoint.device_failure import HANG, Fate
from nvsnap_conformance.checkpoint.device_held import BYTES
from nvsnap_conformance.checkpoint.device_ranks import NEW, OLD
from nvsnap_conformance.lifecycle.trace import Event, Verb, check_order
from nvsnap_conformance.outcomes import Finding, Outcome, finding

if TYPE_CHECKING:
    from collections.abc import Mapping

    from nvsnap_conformance.checkpoint.device_ranks import DeviceObservation


def check_completed(seen: DeviceObservation) -> list[Finding]:
    """Check that a cycle without a fault succeeds. Findings: the failure's own, ``DEVICE:FAILED``."""
    if seen.failure is not None:
        return [Finding(str(seen.failure), seen.failure.signature, seen.failure.outcome)]
    if seen.error is not None:
        return [finding(f"{seen.at} failed: {seen.error}", f"DEVICE:FAILED@{seen.at}")]
    return []


def check_device_order(seen: DeviceObservation) -> list[Finding]:
    """Check the order of the calls as the driver saw them: ``ORDER:...`` of the lifecycle."""
    ranks = {pid: rank for rank, pid in enumerate(seen.pids)}
    events = [
        Event(Verb(call["verb"]), ranks[call["pid"]], call["began"], call["ended"])
        for call in seen.order
        if call["pid"] in ranks
    ]
    return check_order(events, ranks=len(ranks))


def check_memory(seen: DeviceObservation) -> list[Finding]:
    """Check that memory left the device and came back as it was.

    Findings: ``DEVICE:MEMORY_KEPT`` (still there after checkpoint), ``DEVICE:MEMORY_LOST`` (a process does
    not find its bytes again).
    """
    found = _check_left(seen)
    wrong = _wrong(seen)
    if wrong:
        found.append(finding(f"processes do not find their memory again: {wrong}", "DEVICE:MEMORY_LOST"))
    return found


def _check_left(seen: DeviceObservation) -> list[Finding]:
    freed = seen.memory["before"] - seen.memory.get("between", seen.memory["before"])
    expected = len(seen.pids) * BYTES if seen.real else seen.memory["before"]
    if freed >= expected:
        return []
    text = f"the checkpoint took {freed} bytes off the device, the processes hold {expected}"
    return [finding(text, "DEVICE:MEMORY_KEPT")]


def check_false_success(seen: DeviceObservation, verb: str, what: str) -> list[Finding]:
    """Check that a verb that failed was told as a failure of that verb, and not of a later one.

    Findings: ``DEVICE:FALSE_SUCCESS``.
    """
    if seen.at == verb:
        return []
    later = "" if seen.error is None else f"; {seen.at} then failed: {seen.error}"
    return [finding(f"{what} at {verb} passed for a success{later}", "DEVICE:FALSE_SUCCESS")]


def check_named(seen: DeviceObservation, verb: str, pid: int, code: str, name: str) -> list[Finding]:
    """Check that a failure says verb, error and process, as data and in words.

    Findings: ``DEVICE:UNNAMED``, and those of :func:`check_false_success`.
    """
    found = check_false_success(seen, verb, name)
    if found:
        return found
    failure = seen.failure
    wanted = f"CUDA:{code}@{verb}"
    if failure is None or str(failure.signature) != wanted:
        told = "none" if failure is None else failure.signature
        return [finding(f"{name} at {verb} has the signature {told}, not {wanted}", "DEVICE:UNNAMED")]
    lacking = [word for word in (name, str(pid), verb) if word not in str(failure)]
    if lacking:
        return [finding(f"the error does not say {lacking}: {failure}", "DEVICE:UNNAMED")]
    return []


def check_known_end(seen: DeviceObservation) -> list[Finding]:
    """Check that after a failed verb all processes run with their memory, or none is left, and it is told.

    Findings: ``DEVICE:UNTOLD``, ``DEVICE:HALF_DEAD``, ``DEVICE:LEFT_LOCKED``, ``DEVICE:MEMORY_LOST``,
    ``DEVICE:FATE_UNTRUE`` (all run or none is left, but it was told otherwise).
    """
    failure = seen.failure
    if failure is None:
        return [finding(f"the failure does not say what became of the engine: {seen.error}", "DEVICE:UNTOLD")]
    alive = [pid for pid, lives in seen.alive.items() if lives]
    if alive and len(alive) < len(seen.alive):
        return [finding(f"of {sorted(seen.alive)} only {alive} are left", "DEVICE:HALF_DEAD")]
    held = {pid: state for pid, state in seen.states.items() if pid in alive and state != "RUNNING"}
    if held:
        return [finding(f"processes are left as {held}", "DEVICE:LEFT_LOCKED")]
    wrong = {pid: told for pid, told in seen.answers.items() if told != "right"}
    if wrong:
        return [finding(f"processes run on without their memory: {wrong}", "DEVICE:MEMORY_LOST")]
    if failure.fate is not (Fate.RUNNING if alive else Fate.KILLED):
        return [finding(f"{len(alive)} processes are alive, told as {failure.fate}", "DEVICE:FATE_UNTRUE")]
    return []


def check_hang(seen: DeviceObservation, verb: str) -> list[Finding]:
    """Check that a call that never returns ended as a hang of its verb, and that nothing is left of it.

    Findings: ``DEVICE:HANG_HIDDEN``, ``DEVICE:HELPER_LEFT``.
    """
    failure = seen.failure
    if failure is None or failure.signature.code != HANG or seen.at != verb:
        told = failure.signature if failure else seen.error or "a success"
        return [finding(f"a call of {verb} that never returned was told as {told}", "DEVICE:HANG_HIDDEN")]
    if failure.outcome is not Outcome.HANG:
        return [finding(f"a hang has the outcome {failure.outcome}", "DEVICE:HANG_HIDDEN")]
    if seen.helpers:
        return [finding(f"{seen.helpers} helper processes are left", "DEVICE:HELPER_LEFT")]
    return []


def check_context_free(seen: DeviceObservation) -> list[Finding]:
    """Check that a process without a context was left alone, named, and no failure.

    Findings: ``DEVICE:NOT_LEFT_ALONE``, ``DEVICE:UNNAMED``.
    """
    touched = sorted({call["pid"] for call in seen.order} & set(seen.context_free))
    if seen.error is not None or touched:
        return [
            finding(
                f"a process without a context was called ({touched}) or failed the cycle: {seen.error}",
                "DEVICE:NOT_LEFT_ALONE",
            )
        ]
    named = seen.results["lock"].details.get("without_context", {})
    missing = [pid for pid in seen.context_free if pid not in named]
    if missing:
        return [finding(f"nothing says that {missing} were left alone", "DEVICE:UNNAMED")]
    return []


def check_refused(seen: DeviceObservation, verb: str, what: str) -> list[Finding]:
    """Check that the driver itself refused a verb for ``what``, by an error of its own, and how it ended.

    Findings: ``DEVICE:UNREFUSED`` (it failed for a reason of the suite's or of nobody's), and those of
    :func:`check_false_success` and :func:`check_known_end`.
    """
    found = check_false_success(seen, verb, what)
    if not found and not (seen.failure and seen.failure.signature.code.isdecimal()):
        found = [finding(f"the driver did not refuse {what}: {seen.error}", "DEVICE:UNREFUSED")]
    return found or check_known_end(seen)


def came_to(seen: DeviceObservation) -> str:
    """Return in words what a cycle came to, for the record: carried, refused, lost or wrong."""
    if seen.error is not None:
        told = seen.failure.signature if seen.failure else seen.error.what
        return f"{'refused' if _refused(seen) else 'failed'} at {seen.at}: {told}"
    wrong = sorted(set(_wrong(seen).values()))
    wrong += [f"{what} memory not shared again: {why}" for what, why in seen.shared_again.items() if why]
    return ", ".join(wrong) or "carried"


def check_carried(seen: DeviceObservation, what: str) -> list[Finding]:
    """Check that ``what`` the processes hold works again, or was refused while every process runs on.

    Findings: the failure's own where it came too late to be a refusal, its place the verb and ``what`` was
    held (``CUDA:1@restore.ipc``); ``DEVICE:STATE_LOST``, ``DEVICE:MEMORY_KEPT`` (nothing was checkpointed),
    ``DEVICE:FALSE_SUCCESS`` (the driver's own error was passed over) and those of :func:`check_known_end`.
    """
    if seen.error is not None:
        late = [] if _refused(seen) else check_completed(seen)
        if seen.failure is not None:
            late = [replace(one, signature=replace(one.signature, place=f"{seen.at}.{what}")) for one in late]
        return late + check_believed(seen) + check_known_end(seen)
    found = check_believed(seen) + _check_left(seen)
    wrong = _wrong(seen)
    if wrong:
        found.append(finding(f"after the restore processes find: {wrong}", "DEVICE:STATE_LOST"))
    return found


def check_believed(seen: DeviceObservation) -> list[Finding]:
    """Check that no error of the driver was passed over. Findings: ``DEVICE:FALSE_SUCCESS``."""
    locked = seen.results.get("lock")
    left_alone = locked.details.get("without_context", {}) if locked else {}
    passed = sorted(
        f"{call['verb']} answered {call['result']} on process {call['pid']}"
        for call in seen.calls
        if call["code"] and call["verb"] in AFTER and call["verb"] != seen.at and not call.get("roll_back")
        if call["pid"] not in left_alone
    )
    return [finding(f"passed over: {'; '.join(passed)}", "DEVICE:FALSE_SUCCESS")] if passed else []


def _wrong(seen: DeviceObservation) -> dict[int, str]:
    """Return by pid what is not right with a process that held memory, one that is gone included."""
    told = {pid: seen.answers.get(pid, "no answer: it is gone") for pid in seen.pids}
    return {pid: answer for pid, answer in told.items() if answer != "right"}


def check_shared_again(seen: DeviceObservation, what: str) -> list[Finding]:
    """Check that after a cycle memory can be shared again: what there was before, and new memory.

    Findings: ``DEVICE:NOT_SHARED_AGAIN`` (old) and ``DEVICE:NOT_SHARED_ANEW`` (new), also where nobody tried;
    the place is ``what`` was shared and the driver's error where it is one (``ipc.CUDA_ERROR_UNKNOWN``).
    """
    codes = {OLD: "DEVICE:NOT_SHARED_AGAIN", NEW: "DEVICE:NOT_SHARED_ANEW"}
    told = {age: seen.shared_again.get(age, "nobody tried") for age in codes}
    return [
        finding(
            f"{age} memory cannot be shared after the restore: {why}", f"{codes[age]}@{what}{_error(why)}"
        )
        for age, why in told.items()
        if why
    ]


def _error(answer: str) -> str:
    """Return the driver's error that an answer of a process is about, with a dot before it; or nothing."""
    named = re.fullmatch(r"rank \d+ cannot \w+ memory: failed: CUDA answers (CUDA_ERROR_\w+)", answer)
    return f".{named[1]}" if named else ""


def _refused(seen: DeviceObservation) -> bool:
    failure = seen.failure
    return (
        failure is not None
        and seen.at in {"lock", "checkpoint"}
        and failure.outcome is not Outcome.HANG
        and failure.fate is Fate.RUNNING
    )


def check_unmoved(before: list[str], after: list[str]) -> list[Finding]:
    """Check that after a move that was refused every process is where it was.

    Findings: ``DEVICE:HALF_MOVED``.
    """
    if before == after:
        return []
    return [finding(f"the processes were on {before}, and are on {after}", "DEVICE:HALF_MOVED")]


def check_devices(before: list[str], after: list[str], moves: Mapping[str, str]) -> list[Finding]:
    """Check that each process sees the device that it was moved to, by UUID and by bus id.

    ``before`` and ``after`` are what each process said: UUID and bus id, a space between. Findings:
    ``DEVICE:NOT_MOVED``, ``DEVICE:STALE_BUS_ID`` (the UUID is the new one's, the bus id is not).
    """
    buses = dict(told.split(" ", 1) for told in before)
    found: list[Finding] = []
    for rank, (old, new) in enumerate(zip(before, after, strict=True)):
        wanted = moves[old.split(" ", 1)[0]]
        uuid, _, bus = new.partition(" ")
        if uuid != wanted:
            found.append(finding(f"rank {rank} is on {new}, not on {wanted}", "DEVICE:NOT_MOVED"))
        elif bus != buses.get(wanted, bus):
            found.append(
                finding(
                    f"rank {rank} is on {uuid} and has the bus id {bus}, not {buses[wanted]}",
                    "DEVICE:STALE_BUS_ID",
                )
            )
    return found
