"""Evidence beside the stacks: flight recorder, NCCL RAS, NVML, progress counters.

A source never turns a verdict that stacks carry; it says whether it agrees, and it decides where hosts only
wait for their devices, which stacks cannot see into. Every one has its own blindness:
the flight recorder sees process groups of torch alone, RAS counts *launched* operations (a stuck one reads
as healthy, a count one behind is normal), and utilisation cannot tell a spinning kernel from a working one.
"""

from __future__ import annotations

import io
import json
import pickle
import pickletools
import re
from typing import TYPE_CHECKING, Any

from nvsnap_conformance.errors import UsageError
from nvsnap_conformance.files import read_bytes
from nvsnap_conformance.hang.merge import span

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

LOW_POWER = 0.45
"""Share of its power limit below which a fully busy GPU is taken to spin rather than to work."""

_MOST_TENSORS = 256
"""Tensors of a collective, and dimensions of a tensor, that are kept; one with more is kept without sizes."""

_RANK = re.compile(r"[0-9]{1,9}")
_RANK_IN_NAME = re.compile(rf"(?<![0-9])({_RANK.pattern})(?:\.json)?$")


def pending_and_frozen(evidence: dict[str, Any]) -> bool:
    """Whether the progress polls show work pending and a counter that stood still over two polls."""
    polls = [p for p in _list(evidence.get("progress")) if isinstance(p, dict)][-3:]
    if len(polls) < 2 or not all(p.get("pending") is True for p in polls):
        return False
    counters = [p.get("counter") for p in polls]
    return all(isinstance(c, int | float) for c in counters) and len(set(counters)) == 1


def devices_stand(evidence: dict[str, Any]) -> bool:
    """Whether NVML shows every GPU it was asked for spinning or idle over two polls: none of them works."""
    gpus = {str(_dict(p).get("gpu")) for p in _list(evidence.get("nvml")) if isinstance(p, dict)}
    spinning, idle = _standing([_dict(poll) for poll in _list(evidence.get("nvml"))])
    return bool(gpus) and gpus == {*spinning, *idle}


def behind(evidence: dict[str, Any]) -> tuple[int, ...]:
    """Return the ranks that, by the flight recorder, have not launched what others of a group wait in."""
    found: set[int] = set()
    for ranks in _by_group(_dict(evidence.get("flight_recorder"))).values():
        waiting = [last["sequence"] for last in ranks.values() if not last.get("completed")]
        if waiting:
            found |= {rank for rank, last in ranks.items() if last["sequence"] < max(waiting)}
    return tuple(sorted(found))


def remarks(evidence: dict[str, Any]) -> list[str]:
    """Return one sentence for everything that a source says; malformed parts are left out."""
    found = []
    if pending_and_frozen(evidence):
        found.append("progress counters stood still while requests were pending")
    found += _flight_recorder(_dict(evidence.get("flight_recorder")))
    found += _ras([_dict(poll) for poll in _list(evidence.get("nccl_ras"))])
    found += _nvml([_dict(poll) for poll in _list(evidence.get("nvml"))])
    return found


# --- torch flight recorder -------------------------------------------------------------------------------


class _PlainUnpickler(pickle.Unpickler):
    """Reads plain containers and numbers only: a dump comes from the process under suspicion."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"a flight recorder dump holds no {module}.{name}")


def read_flight_recorder(folder: Path) -> dict[str, Any]:
    """Return the state of every process group per rank from dumps in ``folder``, JSON values only.

    Files are named like torch names them, with the rank at the end (``nccl_trace_rank_3``); pickled dumps
    (torch >= 2.3, version 2.x) and JSON dumps are read. Raises :class:`UsageError` where none is there or
    one cannot be read.
    """
    try:
        files = sorted(path for path in folder.iterdir() if path.is_file())
    except (FileNotFoundError, NotADirectoryError):
        files = []
    except OSError as error:
        raise UsageError(
            f"the flight recorder dumps in {folder} cannot be read: {error.strerror}",
            next_step="give a folder that you have the right to read",
        ) from error
    found = {match[1]: _summary(path) for path in files if (match := _RANK_IN_NAME.search(path.name))}
    if not found:
        raise UsageError(
            f"no flight recorder dump in {folder}",
            next_step="give the folder with the files that end in the rank, e.g. nccl_trace_rank_0",
        )
    return found


_NO_DUMP = (
    ValueError,
    pickle.UnpicklingError,
    EOFError,
    LookupError,
    RecursionError,
    TypeError,
    AttributeError,
    ArithmeticError,
    MemoryError,
)
"""What bytes that are no pickle can end an unpickler with."""


def _unpickled(data: bytes) -> Any:
    """Return the plain value that is pickled in ``data``; raises one of :data:`_NO_DUMP` for what is none.

    Lengths and places that exceed the file are refused first: the unpickler makes room for what it is told.
    """
    for opcode, argument, _ in pickletools.genops(data):
        if opcode.name in ("PUT", "BINPUT", "LONG_BINPUT") and not 0 <= int(argument or 0) <= len(data):
            raise pickle.UnpicklingError(f"it puts aside value {argument} of {len(data)} bytes")
    return _PlainUnpickler(io.BytesIO(data)).load()


def _summary(path: Path) -> dict[str, Any]:
    try:
        data = read_bytes(path)
    except OSError as error:
        raise UsageError(
            f"the flight recorder dump {path} cannot be read: {error.strerror}",
            next_step="give files that you have the right to read",
        ) from error
    try:
        dump = json.loads(data) if data[:1] in (b"{", b" ", b"\n") else _unpickled(data)
    except _NO_DUMP as error:
        why = str(error)[:200] or type(error).__name__
        raise UsageError(f"{path} is no flight recorder dump: {why}") from error
    groups: dict[str, dict[str, Any]] = {}
    for raw in _list(_dict(dump).get("entries")):
        entry = _dict(raw)
        sequence, name = entry.get("collective_seq_id"), entry.get("profiling_name")
        if not _is_count(sequence) or not isinstance(name, str) or entry.get("is_p2p"):
            continue
        group = _group_name(entry.get("process_group"))
        known = groups.setdefault(group, {"sequence": -1})
        if sequence >= known["sequence"]:
            groups[group] = {
                "sequence": sequence,
                "operation": name.partition(":")[2] or name,
                "sizes": _sizes(entry.get("input_sizes")),
                "completed": bool(entry.get("retired")) or entry.get("state") == "completed",
            }
    return groups


def _is_count(value: Any) -> bool:
    """Whether ``value`` is a count as torch has them, in 64 bits: a longer one may not even be printable."""
    return type(value) is int and -1 <= value < 1 << 63


def _group_name(label: Any) -> str:
    """Return a group's description, else its name: torch writes ``(name, description)``."""
    names = list(label)[1::-1] if isinstance(label, list | tuple) else []
    return next((name for name in names if isinstance(name, str) and name), "default")


def _sizes(value: Any) -> list[list[int]] | None:
    """Return the sizes of tensors, ``None`` for whatever else: a pickle may hold one list over and over."""
    if not isinstance(value, list | tuple) or len(value) > _MOST_TENSORS:
        return None
    sizes = [list(size) for size in value if isinstance(size, list | tuple) and len(size) <= _MOST_TENSORS]
    return sizes if all(_is_count(n) for size in sizes for n in size) else None


def _by_group(dumps: dict[str, Any]) -> dict[str, dict[int, dict[str, Any]]]:
    found: dict[str, dict[int, dict[str, Any]]] = {}
    for rank, groups in dumps.items():
        if _RANK.fullmatch(rank):
            for group, last in _dict(groups).items():
                if _is_count(_dict(last).get("sequence")):
                    found.setdefault(group, {})[int(rank)] = _dict(last)
    return found


def _flight_recorder(dumps: dict[str, Any]) -> list[str]:
    found = []
    for group, ranks in sorted(_by_group(dumps).items()):
        at: dict[tuple[int, str, bool], list[int]] = {}
        for number, last in ranks.items():
            key = (last["sequence"], str(last.get("operation")), bool(last.get("completed")))
            at.setdefault(key, []).append(number)
        if len(at) == 1 and next(iter(at))[2]:
            continue
        parts = [
            f"rank{'s' if len(who) > 1 else ''} {span(who)} at {name} #{sequence} "
            f"({'done' if done else 'pending'})"
            for (sequence, name, done), who in sorted(at.items(), reverse=True)
        ]
        found.append(f"flight recorder, group {group}: {', '.join(parts)}")
    return found


# --- NCCL RAS --------------------------------------------------------------------------------------------


def read_ras(path: Path) -> dict[str, Any]:
    """Read one answer of ``ncclras -f json`` (NCCL >= 2.28); raises :class:`UsageError` for anything else."""
    try:
        data = json.loads(read_bytes(path))
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"{path} is no JSON answer of ncclras: {str(error)[:200]}") from error
    if not isinstance(data, dict) or not isinstance(data.get("communicators"), list):
        raise UsageError(
            f"{path} is no JSON answer of ncclras: it has no communicators",
            next_step="write it with: ncclras -f json > FILE",
        )
    return data


def _ras(polls: list[dict[str, Any]]) -> list[str]:
    found: list[str] = []
    if not polls:
        return found
    for communicator in map(_dict, _list(polls[-1].get("communicators"))):
        name = str(communicator.get("hash"))
        for missing in map(_dict, _list(communicator.get("missing_ranks"))):
            status = _dict(missing.get("status"))
            words = "considered dead" if status.get("considered_dead") else "unresponsive"
            found.append(
                f"NCCL RAS, communicator {name}: rank {missing.get('rank')} "
                f"(pid {missing.get('pid')}) {words}"
            )
        counts = _counts(communicator)
        before = [
            _counts(other)
            for poll in polls[:-1]
            for other in map(_dict, _list(poll.get("communicators")))
            if other.get("hash") == communicator.get("hash")
        ]
        if before and counts and all(b == counts for b in before):
            spread = max(counts.values()) - min(counts.values())
            if spread == 0:
                how = "launched equally often on all ranks"
            else:
                behind = [rank for rank, n in counts.items() if n == min(counts.values())]
                how = f"up to {spread} behind on rank {span(behind)} (one behind alone proves nothing)"
            found.append(
                f"NCCL RAS, communicator {name}: operations stood still over {len(before) + 1} polls, {how}"
            )
    return found


def _counts(communicator: dict[str, Any]) -> dict[int, int]:
    found = {}
    for rank in map(_dict, _list(communicator.get("ranks"))):
        counts = [n for n in _dict(rank.get("collective_counts")).values() if _is_count(n)]
        if _is_count(rank.get("rank")):
            found[rank["rank"]] = sum(counts)
    return found


# --- NVML ------------------------------------------------------------------------------------------------


def poll_nvml(gpus: Iterable[str]) -> list[dict[str, Any]]:
    """Return utilisation (percent) and power (watts, and the limit) of the GPUs with these UUIDs.

    Empty where there is no driver or no binding for it.
    """
    wanted = sorted(set(gpus))
    if not wanted:
        return []
    try:
        import pynvml  # noqa: PLC0415 - optional: the extra `gpu`
    except ImportError:
        return []
    found = []
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return []
    try:
        for uuid in wanted:
            handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
            found.append(
                {
                    "gpu": uuid,
                    "utilization": int(pynvml.nvmlDeviceGetUtilizationRates(handle).gpu),
                    "power": pynvml.nvmlDeviceGetPowerUsage(handle) / 1000.0,
                    "limit": pynvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1000.0,
                }
            )
    except pynvml.NVMLError:
        return found
    finally:
        pynvml.nvmlShutdown()
    return found


def _standing(polls: list[dict[str, Any]]) -> tuple[list[str], list[str]]:
    """Return the GPUs that are fully busy at low power in every poll, and those that are idle in all."""
    by_gpu: dict[str, list[dict[str, Any]]] = {}
    for poll in polls:
        if all(isinstance(poll.get(name), int | float) for name in ("utilization", "power", "limit")):
            by_gpu.setdefault(str(poll.get("gpu")), []).append(poll)
    spinning, idle = [], []
    for gpu, seen in sorted(by_gpu.items()):
        if len(seen) < 2:
            continue
        if all(p["utilization"] >= 99 and p["power"] < LOW_POWER * p["limit"] for p in seen):
            spinning.append(gpu)
        elif all(p["utilization"] == 0 for p in seen):
            idle.append(gpu)
    return spinning, idle


def _nvml(polls: list[dict[str, Any]]) -> list[str]:
    spinning, idle = _standing(polls)
    found = []
    if spinning:
        found.append(
            f"NVML: {len(spinning)} GPUs fully busy at low power, as in a collective kernel that spins"
        )
    if idle:
        found.append(f"NVML: {len(idle)} GPUs idle: nothing was launched there")
    return found


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
