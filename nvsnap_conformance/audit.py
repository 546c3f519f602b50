"""What runs of the suite have left on a host, whatever killed them.

A run audits itself against what was there before it (:mod:`nvsnap_conformance.lifecycle.residue`). This is
the look from outside, at any time, over whatever runs there were: it goes by the mark that their processes
bear and by the names of what they make. A run that is still at work is found too.
"""

from __future__ import annotations

import os
import re
import shlex
import tempfile
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from nvsnap_conformance import held_folder
from nvsnap_conformance.cache import cache_dir
from nvsnap_conformance.deadline import Deadline, wait_for
from nvsnap_conformance.errors import DeadlineExceeded, EnvironmentFailure
from nvsnap_conformance.gpus import SETTLE_SECONDS, VISIBLE, Gpu, Nvml, load_pynvml, visible, why_unfit
from nvsnap_conformance.lifecycle import residue
from nvsnap_conformance.processes import ProcessId

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

PROCESS, GPU, MOUNT, SHM, FOLDER = "process", "gpu", "mount", "shm", "folder"

_TMP = Path("/tmp")  # noqa: S108 - it is what is audited
_SHM = Path("/dev/shm")  # noqa: S108 - as above

_ENGINES_SHM = re.compile(
    r"psm_"  # Python's SharedMemory without a name: vLLM's message queues
    r"|sem\.mp-"  # multiprocessing's locks
    r"|vllm|VLLM_"  # vLLM's CPU all-reduce, offloading, multimodal cache
    r"|nccl-"  # NCCL between processes without P2P
    r"|torch_\d+_"  # tensors that torch shares between processes
    r"|nvsnap"  # the suite's own
)
"""How the names begin of what engines and the suite have in /dev/shm."""

_SEE_GPUS = "see `nvidia-smi`, and the kernel's log for Xid errors"

_GONE = (FileNotFoundError, ProcessLookupError, PermissionError)


@dataclass(frozen=True)
class Left:
    """One thing that was left: its kind, what it is, and what to do about it; each fits one line."""

    kind: str
    what: str
    to_do: str


@dataclass(frozen=True)
class Audit:
    """What was left on the host. ``gpus_unseen`` says why GPUs were not looked at, empty where they were."""

    left: tuple[Left, ...]
    gpus_unseen: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return it as plain data."""
        return asdict(self)


def look(
    *,
    module: Any | None = None,
    notes: Path | None = None,
    temporary: Sequence[Path] | None = None,
    settle: Deadline | None = None,
) -> Audit:
    """Look at the host now: processes, GPUs, mounts, shared memory and temporary folders of any run.

    ``module`` is ``pynvml`` or what stands for it, ``notes`` the folder of the leases' notes, ``temporary``
    the folders in which rank servers and cases have theirs (default: TMPDIR and /tmp). Until ``settle``
    (default: :data:`SETTLE_SECONDS`) memory on a GPU without a process may still come back. Raises
    :class:`EnvironmentFailure` where /proc or the engines' mount point cannot be looked at.
    """
    places = [Path(tempfile.gettempdir()), _TMP] if temporary is None else temporary
    try:
        Path("/proc/self/environ").read_bytes()
        left = [*_processes(), *_mounts(), *_shm(), *_folders(places)]
    except (OSError, psutil.Error) as error:
        raise EnvironmentFailure(
            f"what runs have left cannot be looked at: {error}",
            cause="/proc is not mounted, or hides processes",
            next_step="run it where /proc is that of the host, as the user who ran the suite or as root",
        ) from error
    on_gpus, unseen = _gpus(module, notes, settle or Deadline.after(SETTLE_SECONDS))
    return Audit((*left, *on_gpus), unseen)


def _processes() -> Iterable[Left]:
    """Yield the processes of every run, but the caller's own, which may be part of one itself."""
    runs = {process.pid: run for process, run in residue.marks(residue.RUN_ID).items()}
    ours = {os.getpid(), *(parent.pid for parent in psutil.Process().parents()), *_readers()}
    for pid in sorted(residue.with_kin(set(runs) - ours) - ours):
        process = ProcessId.of(pid)
        if process is None or not process.alive:
            continue
        name = residue.ResidualProcess.of(process).name
        run = f"run {runs[pid]}" if pid in runs else "a run, by its parent or pid namespace"
        yield Left(
            PROCESS,
            _line(f"process {pid} ({name}) of {run} is alive"),
            f"kill -KILL {pid}, unless its run still goes on",
        )


def _readers() -> set[int]:
    """Return the processes that read what this one writes: the rest of its pipeline."""
    pipes = set()
    for number in (1, 2):
        with suppress(OSError):
            pipes.add(str(Path(f"/proc/self/fd/{number}").readlink()))
    found = set()
    for pid in psutil.pids():
        with suppress(*_GONE):
            source = str(Path(f"/proc/{pid}/fd/0").readlink())
            if source.startswith("pipe:") and source in pipes:
                found.add(pid)
    return found


def _mounts() -> Iterable[Left]:
    """Yield the mounts that engines have in namespaces of their own, and that came out into the caller's."""
    # The last one first, for so they can be undone.
    for mount in reversed(residue.mount_points()):
        point, _, kind = mount.rpartition(" ")
        if residue.in_engines_place(Path(point)) or residue.of_some_run(Path(point)):
            yield Left(MOUNT, _line(f"{kind} is mounted over {point}"), f"umount {_quoted(point)}")


def _shm() -> Iterable[Left]:
    for name in residue.abandoned_shm():
        if _ENGINES_SHM.match(name):
            place = _SHM / name
            yield Left(
                SHM,
                _line(f"{place} is there, and no process has it open or mapped"),
                f"rm {_quoted(place)}, unless it is another program's",
            )


def _folders(places: Iterable[Path]) -> Iterable[Left]:
    """Yield the folders that no process holds: by lock, by run, or by a file or working directory in them."""
    locked = {folder for place in places for folder in held_folder.unheld(place)}
    # The caller's own too: a job that has a run's id goes on for as long as this is called from it.
    runs = {*residue.marks(residue.RUN_ID).values(), os.environ.get(residue.RUN_ID, "")}
    ours = {residue.temporary_prefix(run).name for run in runs}
    of_runs = {
        folder
        for folder in _TMP.glob("nvsnap-*")
        if residue.of_some_run(folder) and not folder.name.startswith(tuple(ours))
    }
    candidates = sorted(folder for folder in locked | of_runs if residue.may_judge(folder))
    used = _used(candidates) if candidates else set()
    for folder in candidates:
        if folder not in used and folder.exists():
            yield Left(
                FOLDER, _line(f"{folder} is there, and no process holds it"), f"rm -r {_quoted(folder)}"
            )


def _used(folders: Sequence[Path]) -> set[Path]:
    """Return those of ``folders`` that some process has as its working directory, or a file in them open."""
    used = set()
    for pid in psutil.pids():
        links = [Path(f"/proc/{pid}/cwd")]
        with suppress(*_GONE):
            links += Path(f"/proc/{pid}/fd").iterdir()
        for link in links:
            with suppress(*_GONE):
                target = link.readlink()
                used |= {folder for folder in folders if target == folder or folder in target.parents}
    return used


def _gpus(module: Any | None, notes: Path | None, settle: Deadline) -> tuple[list[Left], str]:
    """Return what is on the visible GPUs, and why they were not looked at."""
    try:
        nvml = module or load_pynvml()
    except EnvironmentFailure as failure:
        return [], failure.what
    try:
        seen = visible(nvml)
    except nvml.NVMLError as error:
        # One that a run has broken: a driver that is there, and a GPU that no longer answers.
        return [Left(GPU, _line(f"a GPU does not answer: {error}"), _SEE_GPUS)], ""
    if not seen.gpus:
        return [], seen.why_none
    place = notes or cache_dir("gpus")
    with Nvml(nvml) as api:
        found = [(gpu, _why_not_idle(api, gpu, place, settle, nvml.NVMLError)) for gpu in seen.gpus]
    to_do = f"end what is on it (see `nvidia-smi`), or choose other GPUs with {VISIBLE}"
    return [
        Left(GPU, _line(f"GPU {gpu.selector} is not idle: {why}"), to_do) for gpu, why in found if why
    ], ""


def _why_not_idle(api: Nvml, gpu: Gpu, place: Path, settle: Deadline, error: type[Exception]) -> str:
    """Return why a GPU is not idle, empty where it is; memory of what has just ended may come back first."""
    why = ""

    def idle() -> bool:
        nonlocal why
        why = why_unfit(api, gpu, place)[0]
        return not why or api.use(gpu).processes > 0

    try:
        with suppress(DeadlineExceeded):
            wait_for(f"memory of GPU {gpu.uuid} to come back", idle, settle, interval=0.2)
    except error as failed:
        return f"{gpu.uuid}: NVML answers {failed}"
    return why


def _line(text: str) -> str:
    """Return ``text`` with what does not print escaped: names of processes and files may hold anything."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def _quoted(path: Path | str) -> str:
    return _line(shlex.quote(str(path)))
