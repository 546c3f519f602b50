"""The parts of the CRIU checkpointer by themselves: the log's meaning, images, programs, installation."""

from __future__ import annotations

import os
import platform
import re
import shutil
import struct
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nvsnap_conformance.checkpoint import criu_install, criu_program
from nvsnap_conformance.checkpoint.criu import CriuCheckpointer
from nvsnap_conformance.checkpoint.criu_failure import CriuFailure, Kind, read_log
from nvsnap_conformance.checkpoint.criu_image import (
    PAGE,
    anonymous_bytes,
    check_image,
    check_restored_memory,
    stored_bytes,
)
from nvsnap_conformance.checkpoint.criu_install import install_criu
from nvsnap_conformance.checkpoint.criu_manifest import Manifest
from nvsnap_conformance.checkpoint.criu_mutants import ImageTooSmall, TruncatesImage
from nvsnap_conformance.checkpoint.criu_preflight import _endpoint, _text
from nvsnap_conformance.checkpoint.criu_program import elf_build_id, find_criu
from nvsnap_conformance.errors import EnvironmentFailure
from nvsnap_conformance.processes import ProcessId
from tests.criu_programs import COUNTER, Launch, launch, needs_criu, soon

if TYPE_CHECKING:
    from nvsnap_conformance.outcomes import Finding

__all__ = ["launch"]

NOISE = "Error (criu/util.c:1534): rlimit: Can't setup RLIMIT_NOFILE for self: Operation not permitted\n"


# The log ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "kind", "words"),
    [
        ("Error (criu/sk-inet.c:191): inet: In-flight connection (l) for 2f1a3", Kind.IN_FLIGHT, "accepted"),
        (
            "Error (criu/files-ext.c:98): Can't dump file 14 (unknown anon_inode:[io_uring])",
            Kind.IO_URING,
            "io_uring",
        ),
        ("Error (criu/sk-unix.c:870): unix: External socket is used. Consider", Kind.EXTERNAL_UNIX, "UNIX"),
        (" 9: Error (criu/cr-restore.c:1413): Can't fork for 363: File exists", Kind.PID_TAKEN, "pid 363"),
        (
            " 9000: Error (criu/sk-inet.c:839): inet: Can't bind inet socket (id 5): Address already in use",
            Kind.PORT_TAKEN,
            "port",
        ),
        (
            " 9000: Error (criu/files-reg.c:2217): File tmp/notes has bad size 18 (expect 6)",
            Kind.FILE_CHANGED,
            "tmp/notes is another file",
        ),
        (
            " 9: Error (files-reg.c:2): Can't open file dev/shm/psm_4f on restore: No such file or directory",
            Kind.FILE_MISSING,
            "dev/shm/psm_4f is missing",
        ),
        ("Error (criu/image.c:557): Can't write 4096 bytes: No space left on device", Kind.NO_SPACE, "full"),
        ("Error (image.c:554): Head magic doesn't match for pagemap-1.img", Kind.IMAGE_DAMAGED, "damaged"),
        ("Error (sockets.c:4): sockets: Can't get 1:16 opt: Operation not supported", Kind.KERNEL, "kernel"),
        ("Error (criu/proc_parse.c:1): Can't seize task 5: Operation not permitted", Kind.RIGHTS, "right"),
        ("Error (criu/files.c:1): Something that nobody has seen", Kind.OTHER, "Something that nobody"),
    ],
)  # fmt: skip
def test_log_is_read(line: str, kind: Kind, words: str) -> None:
    failure = read_log(
        f"{NOISE}(00.1) {line}\nError (criu/cr-dump.c:2): Dumping FAILED.\n", "the dump failed"
    )
    assert failure.kind is kind
    assert words in str(failure)
    assert failure.next_step
    assert "RLIMIT" not in str(failure)
    assert failure.engine_runs is None


@pytest.mark.parametrize(("runs", "words"), [(True, "runs on"), (False, "DAMAGED OR GONE")])
def test_failure_says_what_became_of_the_engine(runs: bool, words: str) -> None:
    assert words in str(read_log("", "the dump failed", engine_runs=runs))


def test_log_without_an_error_is_shown() -> None:
    assert "Killed" in str(read_log(f"{NOISE}Killed\n", "the dump failed"))


@settings(deadline=None)
@given(st.text())
def test_any_log_is_read(text: str) -> None:
    assert isinstance(read_log(text, "it failed"), CriuFailure)


# Images -----------------------------------------------------------------------------------------


def codes(findings: list[Finding]) -> list[str]:
    return [str(found.signature) for found in findings]


@needs_criu
def test_image_of_a_program_is_whole_and_holds_its_memory(launch: Launch, tmp_path: Path) -> None:
    process = launch(COUNTER)
    floor = anonymous_bytes(process.tree())
    assert floor > 1 << 20
    CriuCheckpointer().dump(process, tmp_path / "image", soon())
    images = tmp_path / "image/images"
    assert check_image(images, floor) == []
    assert stored_bytes(images) >= floor * 0.9
    assert codes(check_image(images, stored_bytes(images) * 2)) == ["IMAGE:TOO_SMALL"]
    loaded = CriuCheckpointer().load(process, tmp_path / "image", soon())
    assert check_restored_memory(floor, loaded.details["anonymous_bytes"]) == []
    assert codes(check_restored_memory(floor, floor // 2)) == ["IMAGE:NOT_RESTORED"]
    pages = max(images.glob("pages-*.img"), key=lambda path: path.stat().st_size)
    os.truncate(pages, pages.stat().st_size - PAGE)
    assert codes(check_image(images, 0)) == ["IMAGE:TRUNCATED"]


@needs_criu
@pytest.mark.parametrize(
    ("mutant", "code"), [(TruncatesImage, "IMAGE:TRUNCATED"), (ImageTooSmall, "IMAGE:TOO_SMALL")]
)
def test_known_bad_image_is_found(
    launch: Launch, tmp_path: Path, mutant: type[CriuCheckpointer], code: str
) -> None:
    process = launch(COUNTER)
    floor = anonymous_bytes(process.tree())
    mutant().dump(process, tmp_path / "image", soon())
    assert code in codes(check_image(tmp_path / "image/images", floor))
    claimed = mutant().load(process, tmp_path / "image", soon())
    assert check_restored_memory(floor, claimed.details["anonymous_bytes"]) == []  # it lies well
    assert not process.tree()


def test_no_image_is_found_empty(tmp_path: Path) -> None:
    assert codes(check_image(tmp_path / "nowhere", 0)) == ["IMAGE:EMPTY"]
    (tmp_path / "inventory.img").touch()
    assert codes(check_image(tmp_path, 0)) == ["IMAGE:EMPTY"]


def test_restored_memory_of_nothing_is_no_proof() -> None:
    assert codes(check_restored_memory(0, 0)) == ["IMAGE:NOT_RESTORED"]


def pagemap(*entries: bytes) -> bytes:
    head = struct.pack("<II", 0x54564319, 0x56084025)
    return head + b"".join(struct.pack("<I", len(entry)) + entry for entry in entries)


@pytest.mark.parametrize(
    ("entries", "held", "expected"),
    [
        ((b"\x08\x01", b"\x08\x00\x10\x02\x20\x04"), 2, []),
        ((b"\x08\x01", b"\x08\x00\x10\x02\x20\x04"), 1, ["IMAGE:TRUNCATED"]),
        ((b"\x08\x01", b"\x08\x00\x20\x04\x28\x83\x02"), 259, []),  # nr_pages in field 5, two bytes long
        ((b"\x08\x01", b"\x08\x00\x20\x04\x28\x83\x02"), 258, ["IMAGE:TRUNCATED"]),
        ((b"\x08\x01", b"\x08\x00\x10\x02\x20\x01"), 0, []),  # in the parent image
        ((b"\x08\x01", b"\x08\x00\x10\x02"), 2, []),  # without flags
        ((b"\x08\x01", b"\x08\x00\x10\x02\x18\x01"), 0, []),  # without flags, in the parent
        ((), 0, ["IMAGE:TRUNCATED"]),
    ],
)
def test_pagemap_is_held_against_its_pages(
    tmp_path: Path, entries: tuple[bytes, ...], held: int, expected: list[str]
) -> None:
    (tmp_path / "inventory.img").touch()
    (tmp_path / "pagemap-9.img").write_bytes(pagemap(*entries))
    (tmp_path / "pages-1.img").write_bytes(bytes(held * PAGE))
    assert codes(check_image(tmp_path, 0)) == expected


@settings(deadline=None)
@given(cut=st.integers(0, 25), junk=st.binary(max_size=40))
def test_cut_or_wrong_pagemap_never_raises(
    tmp_path_factory: pytest.TempPathFactory, cut: int, junk: bytes
) -> None:
    folder = tmp_path_factory.mktemp("image")
    (folder / "inventory.img").touch()
    whole = pagemap(b"\x08\x01", b"\x08\x00\x10\x02\x20\x04")
    (folder / "pagemap-9.img").write_bytes(whole[:cut])
    (folder / "pagemap-10.img").write_bytes(pagemap(junk))
    found = codes(check_image(folder, 0))
    assert set(found) <= {"IMAGE:TRUNCATED"}
    assert found or cut == len(pagemap(b"\x08\x01"))  # which is an image of a process without memory


def test_memory_of_a_process_that_is_gone_is_none() -> None:
    assert anonymous_bytes([ProcessId(2**22 + 1, 0.0)]) == 0


def test_manifest_that_is_damaged_is_no_checkpoint(tmp_path: Path) -> None:
    for text in ("", "{", "[]", "{}", '{"processes": {}}', '{"processes": {"x": []}}'):
        (tmp_path / "checkpoint.json").write_text(text)
        with pytest.raises(CriuFailure, match="no finished checkpoint") as caught:
            Manifest.read(tmp_path)
        assert caught.value.kind is Kind.NO_IMAGE


# Endpoints --------------------------------------------------------------------------------------


@pytest.mark.skipif(sys.byteorder != "little", reason="the examples are a little-endian machine's")
@pytest.mark.parametrize(
    ("text", "endpoint", "shown"),
    [
        ("0100007F:1F40", ("127.0.0.1", 8000), "127.0.0.1:8000"),
        ("0000000000000000FFFF00000100007F:0016", ("127.0.0.1", 22), "127.0.0.1:22"),
        ("00000000000000000000000001000000:6D84", ("::1", 28036), "[::1]:28036"),
    ],
)
def test_endpoint_of_proc_net_tcp_is_read(text: str, endpoint: tuple[str, int], shown: str) -> None:
    assert _endpoint(text) == endpoint
    assert _text(endpoint) == shown


# Programs ---------------------------------------------------------------------------------------


def fake(folder: Path, name: str, script: str) -> Path:
    folder.mkdir(exist_ok=True)
    program = folder / name
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    return program


@pytest.fixture
def no_criu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("NVS_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    if shutil.which("criu"):
        monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    return tmp_path / "bin"


def test_without_criu_the_next_step_is_told(no_criu: Path) -> None:
    with pytest.raises(EnvironmentFailure, match="--install-criu") as caught:
        find_criu()
    assert "no program 'criu' on PATH" in str(caught.value)


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("echo Version: 3.17.1", "version 3.17.1 is too old"),
        ("echo Version: 4.1.1", "version 4.1.1 is too old"),
        ("echo Version: master", "version master is no release"),
        ("echo nothing; exit 1", "answers 'nothing'"),
    ],
)
def test_criu_that_will_not_do_is_named_with_its_reason(no_criu: Path, script: str, reason: str) -> None:
    program = fake(no_criu, "criu", script)
    with pytest.raises(EnvironmentFailure, match=re.escape(f"{program}: ")) as caught:
        find_criu()
    assert reason in str(caught.value)


def test_criu_on_path_is_taken(no_criu: Path) -> None:
    program = fake(no_criu, "criu", "echo Version: 4.2.1; echo GitID: v4.2.1")
    found = find_criu()
    assert (found.command, found.program, found.version) == ((str(program),), program, "4.2.1")
    assert found.build_id == ""  # a script has none


def test_failed_check_tells_what_is_missing(no_criu: Path) -> None:
    fake(no_criu, "criu", 'case $1 in check) echo "vdso: no"; exit 1;; *) echo Version: 4.2.1;; esac')
    with pytest.raises(EnvironmentFailure, match="vdso: no"):
        criu_program.check_kernel(find_criu())


def test_build_id_is_the_linker_s() -> None:
    program = Path(sys.executable).resolve()
    if shutil.which("readelf") is None:
        pytest.skip("no readelf to compare with")
    notes = subprocess.run(["readelf", "-n", str(program)], capture_output=True, text=True, check=True).stdout
    match = re.search(r"Build ID: (\w+)", notes)
    assert elf_build_id(program) == (match[1] if match else "")


# Installation -----------------------------------------------------------------------------------

APT = r"""
case "$*" in
*indextargets*) echo "http://mirror.invalid/debian/ bookworm main" ;;
*update*) for word; do case $word in
    -oDir::Etc::SourceParts=*) cp "${word#*=}/debian.sources" "$SEEN" ;; esac; done
    %(update)s ;;
*install*) echo "Inst libc6 (2.43-7 Debian:testing [amd64])"; echo "Inst python3 (3.14 Debian:testing [all])"
    grep -q "Suites: testing" "$SEEN" && echo "Inst criu (4.2.1-1 Debian:testing [amd64])"
    grep -q "Suites: stable" "$SEEN" && echo "Inst criu (4.1.1-1 Debian:stable [amd64])"; true ;;
*download*) echo "$*" > "$SEEN.download"; touch criu.deb libc6.deb ;;
esac
"""
DPKG_DEB = r"""
case $2 in */criu.deb) mkdir -p "$3/usr/sbin"; touch "$3/usr/sbin/criu" ;;
*) mkdir -p "$3/usr/lib/x"; cd "$3/usr/lib/x"; touch libc.so.6
   printf '#!/bin/sh\necho Version: %(version)s\n' > ld-linux.so.2; chmod +x ld-linux.so.2 ;;
esac
"""


@pytest.fixture
def apt(no_criu: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put an apt of our own on PATH, which has CRIU 4.1.1 in stable and 4.2.1 in testing."""
    seen = tmp_path / "seen"
    monkeypatch.setenv("SEEN", str(seen))
    release = {"ID": "debian", "NAME": "Debian", "VERSION_CODENAME": "bookworm"}
    monkeypatch.setattr(platform, "freedesktop_os_release", lambda: release)
    fake(no_criu, "apt-get", APT % {"update": "true"})
    fake(no_criu, "dpkg-deb", DPKG_DEB % {"version": "4.2.1"})
    fake(no_criu, "dpkg", "case $2 in 4.1*) exit 0;; *) exit 1;; esac")
    return seen


def left() -> list[str]:
    return sorted(path.name for path in criu_program.side_by_side().parent.iterdir())


def test_first_release_with_a_criu_that_will_do_is_installed(apt: Path, no_criu: Path) -> None:
    told: list[str] = []
    criu = install_criu(told.append)
    assert criu.version == "4.2.1"
    assert criu.program == criu_program.side_by_side() / "usr/sbin/criu"
    assert find_criu() == criu
    assert left() == ["current", "install.lock"]
    assert "URIs: http://mirror.invalid/debian/\nSuites: testing\n" in apt.read_text()
    assert "python3" not in Path(f"{apt}.download").read_text()
    assert told == [
        "looking for CRIU 4.2 or later in Debian stable",
        "looking for CRIU 4.2 or later in Debian testing",
        "downloading criu 4.2.1-1 and 1 libraries",
        f"CRIU 4.2.1 (build id ) from Debian testing in {criu_program.side_by_side()}",
    ]
    fake(no_criu, "apt-get", "exit 1")
    assert install_criu(told.append) == criu
    assert told[-1] == f"CRIU 4.2.1 is installed in {criu_program.side_by_side()}"


def test_apt_that_fails_leaves_nothing(apt: Path, no_criu: Path) -> None:
    fake(no_criu, "apt-get", APT % {"update": "echo 'E: cannot reach it' >&2; exit 100"})
    with pytest.raises(EnvironmentFailure, match="cannot reach it"):
        install_criu()
    assert left() == ["install.lock"]


def test_package_that_cannot_be_used_leaves_nothing(apt: Path, no_criu: Path) -> None:
    fake(no_criu, "dpkg-deb", DPKG_DEB % {"version": "3.17"})
    with pytest.raises(EnvironmentFailure, match="too old"):
        install_criu()
    assert left() == ["install.lock"]


def test_another_distribution_is_refused(apt: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "freedesktop_os_release", lambda: {"ID": "fedora", "NAME": "Fedora"})
    with pytest.raises(EnvironmentFailure, match="on Debian only, and this is Fedora"):
        install_criu()
    assert left() == ["install.lock"]


def test_release_without_a_criu_says_what_was_tried(apt: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(criu_install, "SUITES", ("stable", "unstable"))
    with pytest.raises(EnvironmentFailure, match=r"stable has 4\.1\.1-1, unstable has none"):
        install_criu()
    assert left() == ["install.lock"]
