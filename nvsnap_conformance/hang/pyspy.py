"""py-spy: where its program is, with what arguments it is asked, and what its answer means.

Its traps (py-spy 0.4.3, measured): a blocking dump fails on a stopped or already traced process; failing
dumps still print a header, so the exit code counts; ``--json --subprocesses`` answers for the parent only;
a native dump from outside the target's pid and mount namespace fails, a plain one gives wrong thread ids.
"""

from __future__ import annotations

import json
import re
import shutil
import sysconfig
from pathlib import Path
from typing import Any

from nvsnap_conformance.errors import EnvironmentFailure
from nvsnap_conformance.hang.model import Frame, Reading, Rung, Thread

_LIBRARIES = re.compile(r"^.*/(?:site-packages|dist-packages|python3\.\d+)/")
_SOURCE_TREES = re.compile(r"^.*/((?:vllm|sglang|flashinfer|torch|triton|tensorrt_llm)/.+)$")
_MAX_FRAMES = 2000
_MAX_LOCAL = 200


def program() -> Path:
    """Return the path of the py-spy program that was installed with the suite, else one on PATH."""
    beside = Path(sysconfig.get_path("scripts")) / "py-spy"
    if beside.is_file():
        return beside
    found = shutil.which("py-spy")
    if found is None:
        raise EnvironmentFailure(
            "py-spy is not there, so no stack can be read",
            cause="the suite was installed without its dependencies",
            next_step="pip install 'py-spy>=0.4.1' into the interpreter that runs the suite",
        )
    return Path(found)


def rungs(
    pid: int, reading: Reading, *, native: bool, with_locals: bool
) -> tuple[list[tuple[Rung, list[str]]], str]:
    """Return the rungs to try on a process in this state, and why some are left out (empty: none are).

    ``pid`` is in the target's own namespace. No rung at all for a zombie and for an uninterruptible
    sleep, in which an attach would wait for as long as the target does.
    """
    if reading.state in "ZX":
        return [], f"state {reading.state}: there is no stack any more"
    if reading.state == "D":
        return [], "state D (uninterruptible sleep): not attached to"
    base = ["dump", "--json", "--full-filenames", "--pid", str(pid)]
    if with_locals:
        base.append("--locals")
    nonblocking = (Rung.NONBLOCKING, [*base, "--nonblocking"])
    if reading.state in "Tt" or reading.tracer:
        why = f"traced by pid {reading.tracer}" if reading.tracer else f"state {reading.state} (stopped)"
        return [nonblocking], f"{why}: read without attaching"
    ladder = [(Rung.BLOCKING, base), nonblocking]
    if native:
        ladder.insert(0, (Rung.NATIVE, [*base, "--native"]))
    return ladder, ""


def parse(text: str, namespace_pid: int) -> tuple[tuple[Thread, ...], str]:
    """Return the threads in a JSON dump and what is wrong with it in words (empty: nothing).

    Whatever the text holds, no exception: what cannot be understood is left out and said.
    """
    try:
        records = json.loads(text)
    except (ValueError, RecursionError) as error:
        return (), f"the sampler's answer is no JSON: {str(error)[:100]}"
    if not isinstance(records, list):
        return (), "the sampler's answer is no list of threads"
    threads = []
    bad = 0
    for record in records:
        thread = _thread(record, namespace_pid)
        if thread is None:
            bad += 1
        else:
            threads.append(thread)
    return tuple(threads), f"{bad} threads of the answer are malformed" if bad else ""


def _thread(record: Any, namespace_pid: int) -> Thread | None:
    if not isinstance(record, dict) or not isinstance(record.get("frames"), list):
        return None
    frames = [frame for frame in map(_frame, record["frames"][:_MAX_FRAMES]) if frame]
    tid = record.get("os_thread_id")
    tid = tid if isinstance(tid, int) else 0
    name = record.get("thread_name")
    name = name if isinstance(name, str) else ""
    return Thread(
        tid=tid,
        name=name[:100],
        frames=tuple(reversed(frames)),
        main=tid == namespace_pid or (tid == 0 and name == "MainThread"),
        active=record.get("active") is True,
        owns_gil=record.get("owns_gil") is True,
    )


def _frame(record: Any) -> Frame | None:
    if not isinstance(record, dict):
        return None
    name, file, line = record.get("name"), record.get("filename"), record.get("line")
    if not isinstance(name, str) or not isinstance(file, str):
        return None
    line = line if isinstance(line, int) and 0 <= line < 1 << 31 else 0
    # A native frame carries the file of its library as module; a Python frame has none.
    module = record.get("module")
    native = isinstance(module, str) or (line == 0 and ".so" in file)
    return Frame(name[:300], short(file), line, native, _locals(record.get("locals")))


def _locals(records: Any) -> dict[str, str] | None:
    if not isinstance(records, list):
        return None
    found = {}
    for record in records:
        if isinstance(record, dict) and isinstance(record.get("name"), str):
            found[record["name"][:100]] = str(record.get("repr"))[:_MAX_LOCAL]
    return found


def short(file: str) -> str:
    """Return ``file`` relative to the folder that imports start from, so that it is equal on every host.

    An engine that runs from a source tree is cut the same way; any other file outside of a library keeps
    its last three components.
    """
    cut = _LIBRARIES.sub("", file)
    if cut != file or not file.startswith("/"):
        return cut[:300]
    tree = _SOURCE_TREES.match(file)
    if tree:
        return tree[1][:300]
    if ".so" in file.rpartition("/")[2]:
        return file.rpartition("/")[2][:300]
    return "/".join(file.split("/")[-3:])[:300]
