"""A bundle: a folder with everything that a verdict is made of, readable later and elsewhere.

``bundle.json`` holds who the processes are and what corroborates, ``stacks/round-N.json`` one round each.
All files are 0600 in a 0700 folder. No value of an environment variable is in it, and no local variable
unless that was asked for. A bundle is written round by round: one that was cut short is a bundle too.
"""

from __future__ import annotations

import datetime
import json
import os
import re
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter, ValidationError

from nvsnap_conformance.errors import EnvironmentFailure, UsageError
from nvsnap_conformance.files import read_bytes
from nvsnap_conformance.hang import corroborate, discover, rights
from nvsnap_conformance.hang.coherence import credible_size
from nvsnap_conformance.hang.model import Bundle, Member, Role, Round
from nvsnap_conformance.hang.sample import promptly, sample_round

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from nvsnap_conformance.deadline import Deadline
    from nvsnap_conformance.engines.protocol import Rank
    from nvsnap_conformance.processes import ProcessId

FORMAT = "nvsnap-hang-bundle"
VERSION = 1
_FILE = "bundle.json"
_ROUND_NAME = re.compile(r"round-(\d+)\.json", re.ASCII)
_REPORTS = ("verdict.json", "verdict.txt")
ROUND_SECONDS = 8.0
"""The most that one round may take, in seconds; a sampler that takes longer is killed."""

_BUNDLE: TypeAdapter[Bundle] = TypeAdapter(Bundle)
_ROUND: TypeAdapter[Round] = TypeAdapter(Round)


class BundleError(UsageError):
    """A folder is no bundle, or a damaged one."""


def collect_bundle(
    root: ProcessId | None,
    *,
    ranks: Sequence[Rank] | None,
    folder: Path,
    rounds: int = 3,
    deadline: Deadline,
    native_round: bool = True,
    interval: float = 0.5,
    reason: str = "",
    members: Sequence[Member] | None = None,
    with_locals: bool = False,
    evidence: Mapping[str, Any] | None = None,
) -> Bundle:
    """Sample every process of the engine below ``root`` in ``rounds`` rounds and write them to ``folder``.

    ``ranks`` is the adapter's answer, or ``None`` to discover them; ``members`` replaces discovery (then
    ``root`` may be ``None``). ``interval`` is the pause between two rounds in seconds. The last round
    reads native frames too with ``native_round``. Fewer rounds are taken, and said, where ``deadline``
    does not leave the time. Never raises for what a target does; raises :class:`EnvironmentFailure` when
    py-spy is not installed or ``folder`` cannot be written.
    """
    folder = create_folder(folder)
    if members is None:
        members = discover.discover(root, ranks) if root is not None else []
    bundle = begin_bundle(members, ranks=ranks, reason=reason, evidence=evidence)
    write_head(bundle, folder)
    began = time.monotonic()
    with promptly():
        bundle = _take_rounds(
            bundle,
            folder,
            rounds=rounds,
            began=began,
            deadline=deadline,
            native_round=native_round,
            interval=interval,
            with_locals=with_locals,
        )
    write_head(bundle, folder)
    return bundle


def _take_rounds(
    bundle: Bundle,
    folder: Path,
    *,
    rounds: int,
    began: float,
    deadline: Deadline,
    native_round: bool,
    interval: float,
    with_locals: bool,
) -> Bundle:
    for index in range(rounds):
        left = rounds - index
        if index and deadline.remaining() < 0.5:
            short = f"{index} of {rounds} rounds taken: the deadline left no time for more"
            bundle = replace(bundle, problems=(*bundle.problems, short))
            break
        if index:
            time.sleep(min(interval, deadline.remaining() / (2 * left)))
        share = deadline.sooner(min(ROUND_SECONDS, max(0.5, deadline.remaining() / left)))
        taken = sample_round(
            bundle.members,
            index=index,
            began=began,
            deadline=share,
            native=native_round and index == rounds - 1,
            with_locals=with_locals,
        )
        bundle = with_round(bundle, taken)
        write_round(bundle.rounds[-1], folder)
    return bundle


def begin_bundle(
    members: Sequence[Member],
    *,
    ranks: Sequence[Rank] | None = None,
    reason: str = "",
    evidence: Mapping[str, Any] | None = None,
) -> Bundle:
    """Return a bundle without rounds; its problems say what is known to be missing already."""
    problems = list(rights.problems([m.pid for m in members if m.role is Role.RANK]))
    if not any(m.role is Role.RANK for m in members):
        problems.append("no rank was found: neither the adapter, environment, titles nor order tell one")
    size = len(ranks) if ranks is not None else discover.world_size(members)
    if not credible_size(size, members):
        problems.append(f"the ranks are told to be {size}, which these cannot be: not taken")
        size = None
    return Bundle(
        suite=_version(),
        taken_at=datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds"),
        reason=reason,
        world_size=size,
        members=tuple(members),
        rounds=(),
        problems=tuple(problems),
        evidence=dict(evidence or {}),
    )


def with_round(bundle: Bundle, taken: Round) -> Bundle:
    """Return ``bundle`` with one more round, and with what NVML says at this moment where there are GPUs."""
    evidence = bundle.evidence
    polled = corroborate.poll_nvml(m.gpu for m in bundle.members if m.gpu)
    if polled:
        evidence = {**evidence, "nvml": [*evidence.get("nvml", ()), *polled]}
    taken = replace(taken, recording=bundle.taken_at)
    return replace(bundle, rounds=(*bundle.rounds, taken), evidence=evidence)


def read_bundle(folder: Path) -> Bundle:
    """Read a bundle back; raises :class:`BundleError` for a folder that holds none or a damaged one.

    A round whose file is missing or damaged is left out and named in the bundle's problems.
    """
    path = folder / _FILE
    try:
        head = json.loads(read_bytes(path))
    except OSError as error:
        raise BundleError(
            f"{folder} holds no hang bundle: {path.name}: {error.strerror}",
            next_step=f"give the folder that holds {_FILE}",
        ) from error
    except (ValueError, RecursionError) as error:
        raise BundleError(f"{path} is damaged: {str(error)[:200]}") from error
    if not isinstance(head, dict) or head.get("format") != FORMAT:
        raise BundleError(f"{path} is no hang bundle: its format is not {FORMAT!r}")
    if type(head.get("version")) is not int or head["version"] != VERSION:  # True is 1
        raise BundleError(
            f"{path} has version {head.get('version')!r} of the format, this suite reads {VERSION}",
            next_step="use the version of the suite that wrote it, named under 'suite'",
        )
    try:
        bundle = _BUNDLE.validate_python({**_mapping(head.get("bundle")), "rounds": ()}, strict=False)
    except ValidationError as error:
        raise BundleError(f"{path} is damaged: {_first(error)}") from error
    rounds, problems = _read_rounds(folder / "stacks", bundle)
    return replace(bundle, rounds=tuple(rounds), problems=(*bundle.problems, *problems))


def _read_rounds(stacks: Path, bundle: Bundle) -> tuple[list[Round], list[str]]:
    """Return the rounds of ``bundle`` in order, and in words what lies there and is none.

    A copy that an editor or a person left is no further look, and neither is a round of another recording.
    """
    try:
        names = sorted(os.listdir(stacks))  # noqa: PTH208 - Path.glob hides that a folder cannot be read
    except OSError as error:
        return [], [f"the rounds in {stacks.name}/ cannot be read: {error.strerror}"]
    rounds, problems = [], []
    pids = {member.pid for member in bundle.members}
    for name in names:
        number = _ROUND_NAME.fullmatch(name)
        if number is None:
            if name.startswith("round"):
                problems.append(f"{name} is left out: no round is called that, so it is a copy of one")
            continue
        try:
            taken = _ROUND.validate_json(read_bytes(stacks / name))
        except (OSError, ValidationError) as error:
            what = _first(error) if isinstance(error, ValidationError) else error.strerror
            problems.append(f"{name} cannot be read: {what}")
            continue
        if name != f"round-{taken.index}.json":
            problems.append(f"{name} is left out: it says that it is round {taken.index}")
        elif taken.recording not in ("", bundle.taken_at) or not pids.issuperset(
            sample.pid for sample in taken.samples
        ):
            problems.append(f"{name} is left out: it is of another recording")
        else:
            rounds.append(taken)
    if not names:
        problems.append(f"{stacks.name}/ holds no round")
    return sorted(rounds, key=lambda r: r.index), problems


def is_bundle(folder: Path) -> bool:
    """Whether ``folder`` looks like a bundle, by its content."""
    try:
        return FORMAT.encode() in read_bytes(folder / _FILE)[:200]
    except OSError:
        return False


def write_bundle(bundle: Bundle, folder: Path) -> None:
    """Write a whole bundle (a synthetic or a changed one) to ``folder``.

    Raises :class:`ValueError` for two rounds of one index: one would replace the other.
    """
    if len({taken.index for taken in bundle.rounds}) < len(bundle.rounds):
        raise ValueError("two rounds of the bundle have one index")
    folder = create_folder(folder)
    for taken in bundle.rounds:
        write_round(taken, folder)
    write_head(bundle, folder)


def write_round(taken: Round, folder: Path) -> None:
    """Write one round of a bundle."""
    _write(folder / "stacks" / f"round-{taken.index}.json", _ROUND.dump_json(taken))


def write_head(bundle: Bundle, folder: Path) -> None:
    """Write ``bundle.json``: all of the bundle but its rounds."""
    head = {
        "format": FORMAT,
        "version": VERSION,
        "bundle": _BUNDLE.dump_python(replace(bundle, rounds=()), mode="json"),
    }
    _write(folder / _FILE, json.dumps(head, indent=1).encode())


def write_text(folder: Path, name: str, text: str) -> Path:
    """Write a report beside a bundle, 0600, and return its path."""
    path = folder / name
    _write(path, text.encode(errors="backslashreplace"))
    return path


def create_folder(folder: Path) -> Path:
    """Make the folder of a bundle, 0700, and drop an older bundle that lies in it, with its verdict.

    Nothing else in an existing folder is touched, its mode neither. Raises :class:`EnvironmentFailure`
    where it cannot be written.
    """
    stacks = folder / "stacks"
    try:
        if not folder.exists():
            folder.mkdir(parents=True, mode=0o700)
        stacks.mkdir(exist_ok=True, mode=0o700)
        old = [path for path in stacks.iterdir() if _ROUND_NAME.fullmatch(path.name)]
        if (folder / _FILE).exists():
            # Last of all, so that a drop that was cut short is taken up again.
            old += [*(folder / name for name in _REPORTS), folder / _FILE]
        for path in old:
            path.unlink(missing_ok=True)
    except OSError as error:
        raise EnvironmentFailure(
            f"cannot write the hang bundle to {folder}: {error.strerror}",
            next_step="give a folder that can be written, on a disk that has room",
        ) from error
    return folder


def _write(path: Path, data: bytes) -> None:
    """Write ``path`` with mode 0600, in one step: a reader never meets half a file."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
        temporary.replace(path)
    except OSError as error:
        raise EnvironmentFailure(
            f"cannot write {path}: {error.strerror}", next_step="make room on that disk"
        ) from error


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _first(error: ValidationError) -> str:
    detail = error.errors()[0]
    return f"{'.'.join(map(str, detail['loc']))}: {detail['msg']}"


def _version() -> str:
    from importlib import metadata  # noqa: PLC0415 - only where a bundle is written

    try:
        return metadata.version("nvsnap-conformance")
    except metadata.PackageNotFoundError:
        return "unknown"
