"""From an engine's process tree to its ranks, with the source of each rank stated.

Sources, first that answers: the adapter's own answer; RANK, LOCAL_RANK or TP_RANK in the process'
environment (torchrun, mpirun); its title (``VLLM::Worker_TP3``, ``sglang::scheduler_TP2``); the order in
which alike processes were started, which is a guess and says so.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING

import psutil

from nvsnap_conformance.hang import procfs
from nvsnap_conformance.hang.model import Member, Role
from nvsnap_conformance.processes import ProcessId, tree

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from nvsnap_conformance.engines.protocol import Rank

_NUMBER = re.compile(r"[0-9]{1,9}")
RANK_VARIABLES = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "LOCAL_RANK", "TP_RANK")
SIZE_VARIABLES = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")

# vLLM: v1/executor/multiproc_executor.py setup_proc_title_and_log_prefix; SGLang: managers/scheduler.py.
_WORKER_TITLE = re.compile(r"(?:::Worker|sglang::scheduler)(?P<coordinates>(?:_[A-Z]+(?:_[A-Z]+)*\d+)*)$")
_CORE_TITLE = re.compile(r"::EngineCore(?:_DP(?P<dp>\d+))?$")
_FRONT_TITLE = re.compile(r"::APIServer(?:_\d+)?$|sglang::(?:detokenizer|data_parallel_controller|server)")
_HELPERS = ("multiprocessing.resource_tracker", "multiprocessing.forkserver", "compile_worker")
_COORDINATE = re.compile(r"_([A-Z]+(?:_[A-Z]+)*)(\d+)")
_ORDERS = (("tp",), ("pp", "tp"), ("pp", "pcp", "tp"), ("dp", "pp", "pcp", "tp"))
"""Coordinates that may count up the global rank, slowest first: the first choice that tells all ranks apart.
The others (dcp, ep, and dp where attention is data-parallel inside a tensor-parallel group) repeat these."""


def discover(root: ProcessId, ranks: Sequence[Rank] | None = None) -> list[Member]:
    """Return the members of the engine below ``root``: its ranks first by rank, then the others.

    With ``ranks`` (the adapter's answer) those are the ranks, also when their processes are gone by now.
    A process whose rank no source tells is a front or a helper, never a rank.
    """
    members = [_describe(process) for process in tree(root)]
    if ranks is not None:
        found = _from_adapter(members, ranks)
    else:
        found = _from_environment(members) or _from_title(members) or _from_order(members)
    members = _with_fronts(members, found)
    gpus = _gpus() if found else {}
    result = []
    for member in members:
        known = found.pop(member.pid, None)
        result.append(known or member)
    result.extend(found.values())  # ranks outside the tree, or gone
    result = [replace(m, gpu=m.gpu or gpus.get(m.pid)) for m in result]
    return sorted(result, key=lambda m: (m.role is not Role.RANK, m.rank if m.rank is not None else 0, m.pid))


def from_ranks(ranks: Sequence[Rank]) -> list[Member]:
    """Return the ranks that an adapter named as members, without looking at the rest of the engine."""
    members = [
        _describe(rank.process)
        for rank in ranks
        if rank.process.create_time and rank.process.process() is not None
    ]
    return sorted(_from_adapter(members, ranks).values(), key=lambda m: m.rank or 0)


def listed(pids: Iterable[int]) -> list[Member]:
    """Return ``pids`` as members, taken for the ranks; their own sources first, else the order given.

    A pid that does not exist is a member too (create time 0): it counts as a dead rank.
    """
    members = []
    for pid in pids:
        process = ProcessId.of(pid)
        members.append(_describe(process) if process else Member(pid, 0.0, Role.HELPER))
    found = _from_environment(members) or _from_title(members)
    if len(found) != len(members):
        found = {
            m.pid: replace(m, role=Role.RANK, rank=i, source="order given") for i, m in enumerate(members)
        }
    return sorted(found.values(), key=lambda m: m.rank or 0)


def world_size(members: Iterable[Member]) -> int | None:
    """Return the number of ranks that the engine should have, ``None`` where no process tells it.

    Read from WORLD_SIZE (and its kin) in the environment of the ranks.
    """
    sizes: set[int] = set()
    for member in members:
        if member.role is Role.RANK:
            environment = _environment(member.pid, SIZE_VARIABLES)
            sizes.update(int(v) for v in environment.values() if _NUMBER.fullmatch(v))
    return sizes.pop() if len(sizes) == 1 else None


def _describe(process: ProcessId) -> Member:
    title = _title(process.pid)
    role = Role.HELPER
    if _CORE_TITLE.search(title):
        role = Role.CORE
    elif _FRONT_TITLE.search(title):
        role = Role.FRONT
    return Member(
        process.pid,
        process.create_time,
        role,
        title=title[:200],
        namespace_pid=procfs.namespace_pid(process.pid),
    )


def _with_fronts(members: list[Member], ranks: Mapping[int, Member]) -> list[Member]:
    """Call the process that started engine core or ranks their front: it bears no title of its own."""
    led = {m.pid for m in members if m.role is Role.CORE} | set(ranks)
    parents = {int(_parent(pid)) for pid in led}
    return [
        replace(m, role=Role.FRONT)
        if m.role is Role.HELPER and m.pid in parents and m.pid not in ranks
        else m
        for m in members
    ]


def _parent(pid: int) -> str:
    return (procfs.stat_fields(procfs.read_text(pid, "stat"))[1:2] or ["0"])[0]


def _title(pid: int) -> str:
    """Return what a process calls itself, never its whole command line: arguments may hold secrets."""
    words = [w for w in procfs.read_text(pid, "cmdline").split("\0") if w]
    if not words:
        return procfs.read_text(pid, "comm").strip()
    if "::" in words[0]:
        return words[0].strip()
    title = [words[0].rpartition("/")[2]]
    for position, word in enumerate(words[1:], start=1):
        following = words[position + 1 : position + 2]
        if word == "-m":
            title += [word, *following]
        elif word == "-c":
            title += [word, *(f for f in following if f.startswith("from multiprocessing"))]
        elif word.startswith("-"):
            continue
        else:
            title.append(word.rpartition("/")[2])
        break
    return " ".join(title)


def _from_adapter(members: list[Member], ranks: Sequence[Rank]) -> dict[int, Member]:
    by_pid = {m.pid: m for m in members}
    titled = _from_title(members)
    found = {}
    for rank in ranks:
        pid, created = rank.process.pid, rank.process.create_time
        known = by_pid.get(pid)
        if known is None or known.create_time != created:
            known = Member(pid, created, Role.RANK)
        groups = titled[pid].groups if pid in titled else {}
        found[pid] = replace(
            known, role=Role.RANK, rank=rank.rank, source=rank.source, gpu=rank.gpu, groups=groups
        )
    return found


def _environment(pid: int, names: Sequence[str]) -> dict[str, str]:
    wanted = {}
    for entry in procfs.read_text(pid, "environ").split("\0"):
        name, _, value = entry.partition("=")
        if name in names:
            wanted[name] = value
    return wanted


def _from_environment(members: list[Member]) -> dict[int, Member]:
    for variable in RANK_VARIABLES:
        claims: dict[int, list[Member]] = {}
        for member in members:
            value = _environment(member.pid, (variable,)).get(variable, "")
            if _NUMBER.fullmatch(value) and _is_python(member):
                claims.setdefault(int(value), []).append(member)
        # A rank's own helpers inherit its variable: the outermost process is the rank. One claim alone is
        # no proof: a launcher's own variable is inherited by a whole engine.
        if len(claims) > 1 or (len(claims) == 1 and len(next(iter(claims.values()))) == 1):
            return {
                claimants[0].pid: replace(
                    claimants[0], role=Role.RANK, rank=rank, source=f"environment {variable}"
                )
                for rank, claimants in claims.items()
            }
    return {}


def _from_title(members: list[Member]) -> dict[int, Member]:
    workers: dict[int, tuple[Member, dict[str, int]]] = {}
    for member in members:
        match = _WORKER_TITLE.search(member.title)
        if match:
            pairs = _COORDINATE.findall(match["coordinates"])
            workers[member.pid] = (member, {name.lower(): int(number) for name, number in pairs})
    if not workers:
        # One process that is front of the executor and rank in one (vLLM's uniproc executor).
        cores = [m for m in members if m.role is Role.CORE]
        return {
            core.pid: replace(core, role=Role.RANK, rank=i, source="process title")
            for i, core in enumerate(cores)
        }
    for order in _ORDERS:
        sizes = {axis: 1 + max(c.get(axis, 0) for _, c in workers.values()) for axis in order}
        found: dict[int, Member] = {}
        for member, coordinates in workers.values():
            rank = 0
            for axis in order:
                rank = rank * sizes[axis] + coordinates.get(axis, 0)
            found.setdefault(
                rank,
                replace(member, role=Role.RANK, rank=rank, source="process title", groups=coordinates),
            )
        if len(found) == len(workers):
            return {member.pid: member for member in found.values()}
    # Workers of one engine that is still starting have no coordinates yet.
    return _in_order([m for m, _ in workers.values()], "start order of equal titles (guess)")


def _from_order(members: list[Member]) -> dict[int, Member]:
    """Take the largest set of alike siblings for the ranks, in the order in which they were started."""
    families: dict[tuple[int, str], list[Member]] = {}
    for member in members:
        if member.role is Role.HELPER and _is_python(member):
            families.setdefault((int(_parent(member.pid)), member.title), []).append(member)
    largest = max(families.values(), key=len, default=[])
    return _in_order(largest, "start order (guess)") if len(largest) > 1 else {}


def _in_order(members: list[Member], source: str) -> dict[int, Member]:
    ordered = sorted(members, key=lambda m: (m.create_time, m.pid))
    return {m.pid: replace(m, role=Role.RANK, rank=i, source=source) for i, m in enumerate(ordered)}


def _is_python(member: Member) -> bool:
    if any(helper in member.title for helper in _HELPERS):
        return False
    try:
        executable = psutil.Process(member.pid).exe()
    except psutil.Error:
        return False
    return "python" in executable.rpartition("/")[2] or "libpython" in procfs.read_text(member.pid, "maps")


def _gpus() -> Mapping[int, str]:
    """Return pid -> GPU UUID from NVML, empty where there is no driver or no binding for it."""
    try:
        import pynvml  # noqa: PLC0415 - optional: the extra `gpu`
    except ImportError:
        return {}
    found: dict[int, str] = {}
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return {}
    try:
        for index in range(pynvml.nvmlDeviceGetCount()):
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            for process in pynvml.nvmlDeviceGetComputeRunningProcesses(handle):
                found[process.pid] = str(pynvml.nvmlDeviceGetUUID(handle))
    except pynvml.NVMLError:
        return found
    finally:
        pynvml.nvmlShutdown()
    return found
