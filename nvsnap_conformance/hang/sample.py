"""One round: all processes of an engine at one moment, under one deadline.

py-spy runs inside the pid and mount namespaces of its target, one per process and all at once; where it
cannot answer, /proc does. Every failure is data in the sample and never an exception.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, cast

from nvsnap_conformance.deadline import Deadline, wait_for
from nvsnap_conformance.errors import DeadlineExceeded
from nvsnap_conformance.hang import procfs, pyspy
from nvsnap_conformance.hang.model import Member, Reading, Round, Rung, Sample
from nvsnap_conformance.processes import ProcessId

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

JOBS = 32
"""Samplers at work at the same time."""
_GRACE = 1.0
"""Seconds that the helper has beyond the samplers' own deadline, before it is killed itself."""


@contextlib.contextmanager
def promptly() -> Iterator[None]:
    """Run this thread, and what it starts meanwhile, ahead of ordinary processes, where the rights suffice.

    Ranks that spin take every core. Measured with four of them on two cores (kernel 6.18, EEVDF with
    autogroups): a process that was started to sample them got no CPU for up to ten seconds.
    """
    try:
        policy, parameters = os.sched_getscheduler(0), os.sched_getparam(0)
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    except OSError:
        yield
        return
    try:
        yield
    finally:
        os.sched_setscheduler(0, policy, parameters)


def sample_round(
    members: Sequence[Member],
    *,
    index: int,
    began: float,
    deadline: Deadline,
    native: bool = False,
    native_pids: frozenset[int] | None = None,
    with_locals: bool = False,
) -> Round:
    """Sample ``members`` all at once and return the round.

    ``began`` is the bundle's start on the monotonic clock. With ``native`` the frames of C and C++ are
    read too, for ``native_pids`` only where given (it costs 0.3 s of CPU per process).
    """
    with promptly():
        return _sample_round(
            members,
            index=index,
            began=began,
            deadline=deadline,
            native=native,
            native_pids=native_pids,
            with_locals=with_locals,
        )


def _sample_round(
    members: Sequence[Member],
    *,
    index: int,
    began: float,
    deadline: Deadline,
    native: bool,
    native_pids: frozenset[int] | None,
    with_locals: bool,
) -> Round:
    cpu = procfs.CpuTable()
    samples: dict[int, Sample] = {}
    groups: dict[tuple[str, ...], list[tuple[Member, Sample, dict[str, Any]]]] = {}
    budget = max(0.2, deadline.remaining() - _GRACE)
    for member in members:
        sample = _prepare(member, began, cpu)
        samples[member.pid] = sample
        if sample.reading is None:
            continue
        wants_native = native and (native_pids is None or member.pid in native_pids)
        ladder, why = pyspy.rungs(
            member.namespace_pid or member.pid, sample.reading, native=wants_native, with_locals=with_locals
        )
        if why:
            samples[member.pid] = sample = replace(sample, problems=(*sample.problems, why))
        if ladder:
            request = {"pid": member.namespace_pid or member.pid, "seconds": budget, "rungs": ladder}
            groups.setdefault(procfs.namespaces(member.pid), []).append((member, sample, request))
    threads = [
        threading.Thread(target=_run_group, args=(spaces, group, samples, began, deadline), daemon=True)
        for spaces, group in groups.items()
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return Round(index, native, tuple(samples[m.pid] for m in members))


def _prepare(member: Member, began: float, cpu: procfs.CpuTable) -> Sample:
    at = time.monotonic() - began
    identity = ProcessId.of(member.pid)
    if identity is None or identity.create_time != member.create_time:
        why = "the process is gone" if identity is None else "another process has its pid now: it is gone"
        return Sample(member.pid, at, Rung.GONE, problems=(why,))
    reading = procfs.read(member.pid, cpu)
    if reading is None:
        return Sample(member.pid, at, Rung.GONE, problems=("the process is gone",))
    return Sample(member.pid, at, Rung.PROC, reading)


def _run_group(
    spaces: tuple[str, ...],
    group: list[tuple[Member, Sample, dict[str, Any]]],
    samples: dict[int, Sample],
    began: float,
    deadline: Deadline,
) -> None:
    """Sample the processes that share the namespaces ``spaces``; replaces their entries in ``samples``."""
    by_inner = {request["pid"]: (member, sample) for member, sample, request in group}
    why = ""
    try:
        with _descriptors(group[0][0].pid, spaces) as (program, namespaces):
            request = {
                "program": program,
                "namespaces": namespaces,
                "jobs": JOBS,
                "targets": [request for _, _, request in group],
            }
            for reply in _ask(request, [program, *namespaces], deadline):
                if "enter" in reply:
                    why = str(reply["enter"])
                elif reply.get("pid") in by_inner:
                    member, sample = by_inner.pop(reply["pid"])
                    samples[member.pid] = _merge(member, sample, reply, began)
    except OSError as error:
        why = f"the sampler cannot be started: {error}"
    for member, sample in by_inner.values():
        problem = why or "the sampler gave no answer in time"
        samples[member.pid] = replace(sample, problems=(*sample.problems, problem))


@contextlib.contextmanager
def _descriptors(pid: int, spaces: tuple[str, ...]) -> Iterator[tuple[int, list[int]]]:
    """Open py-spy (it need not exist on the other side) and the namespaces that differ from ours."""
    own = procfs.namespaces(os.getpid())
    with contextlib.ExitStack() as stack:

        def opened(path: str | Path) -> int:
            descriptor = os.open(path, os.O_RDONLY)
            stack.callback(os.close, descriptor)
            return descriptor

        program = opened(pyspy.program())
        namespaces = [
            opened(f"/proc/{pid}/ns/{name}")
            for name, theirs, ours in zip(("pid", "mnt"), spaces, own, strict=False)
            if theirs != ours
        ]
        yield program, namespaces


def _ask(request: dict[str, Any], descriptors: list[int], deadline: Deadline) -> Iterator[dict[str, Any]]:
    """Run the helper on ``request`` and yield its replies; kills it when the deadline has passed."""
    helper = Path(__file__).with_name("helper.py")
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", str(helper)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        pass_fds=descriptors,
        start_new_session=True,
    )
    killer = threading.Timer(deadline.remaining() + _GRACE, process.kill)
    killer.daemon = True
    killer.start()
    stdin, stdout = cast("IO[bytes]", process.stdin), cast("IO[bytes]", process.stdout)
    try:
        # Kept open until all is read: the helper takes its end for the death of whoever asked.
        with contextlib.suppress(BrokenPipeError):
            stdin.write(json.dumps(request).encode() + b"\n")
            stdin.flush()
        for line in stdout:
            with contextlib.suppress(ValueError):
                yield json.loads(line)
    finally:
        killer.cancel()
        with contextlib.suppress(BrokenPipeError):
            stdin.close()
        stdout.close()
        process.kill()
        process.wait()


def _merge(member: Member, sample: Sample, reply: dict[str, Any], began: float) -> Sample:
    problems = [*sample.problems, *reply["problems"]]
    if reply.get("killed") and sample.reading:
        problems += _continue(member, sample.reading)
    identity = ProcessId.of(member.pid)
    at = time.monotonic() - began
    if identity is None or identity.create_time != member.create_time:
        problems.append("the process ended while it was sampled")
        return Sample(member.pid, at, Rung.GONE, sample.reading, problems=tuple(problems))
    threads, bad = pyspy.parse(reply["stdout"], member.namespace_pid) if reply["rung"] else ((), "")
    if bad:
        problems.append(bad)
    return replace(
        sample,
        rung=Rung(reply["rung"]) if threads else Rung.PROC,
        threads=threads,
        problems=tuple(problems),
        seconds=reply["seconds"],
    )


def _continue(member: Member, before: Reading) -> list[str]:
    """Undo the stop that a sampler killed between its attach and its wait can leave behind."""
    if before.state in "Tt":
        return []
    with contextlib.suppress(DeadlineExceeded):
        wait_for(
            "a stop that was left behind", lambda: procfs.state_of(member.pid) == "T", Deadline.after(0.2)
        )
        ProcessId(member.pid, member.create_time).send(signal.SIGCONT)
        return ["the killed sampler had left the process stopped: continued it"]
    return []
