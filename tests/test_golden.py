"""Golden engines with a small program in an engine's place: made, restored, shared, damaged, given up."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from nvsnap_conformance.checkpoint.criu import CriuCheckpointer
from nvsnap_conformance.checkpoint.criu_failure import CriuFailure, Kind
from nvsnap_conformance.checkpoint.criu_manifest import IMAGES
from nvsnap_conformance.deadline import Deadline, wait_for
from nvsnap_conformance.engines import golden, golden_key, golden_store
from nvsnap_conformance.engines.golden import Start, bring_up
from nvsnap_conformance.engines.golden_store import DamagedImageError, GoldenStore, verify
from nvsnap_conformance.engines.process import EngineProcess
from nvsnap_conformance.engines.protocol import LaunchConfig
from nvsnap_conformance.errors import EngineStartError, EnvironmentFailure, UsageError
from tests.criu_programs import COUNTER, ENV, ask, needs_criu, soon

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

pytestmark = needs_criu


@dataclass
class Handle:
    """As much of an engine's handle as bringing one up needs."""

    config: LaunchConfig
    process: EngineProcess
    attached: bool

    def ready(self, deadline: Deadline) -> None:
        def up() -> bool:
            if self.process.poll() is not None:
                raise EngineStartError("it ended")
            return "up" in self.process.log_tail()

        wait_for("the program", up, deadline)


@dataclass
class Engine:
    """An adapter of a program: by default one that holds a secret of its own."""

    name: str = "counter"
    code: str = COUNTER
    launched: list[LaunchConfig] = field(default_factory=list)
    uses_workdir: bool = False

    def launch_plan(self, config: LaunchConfig) -> tuple[list[str], Mapping[str, str]]:
        words = [str(config.workdir)] if self.uses_workdir else []
        paths = os.pathsep.join(map(str, config.import_paths))
        env = {**ENV, **config.env, "PYTHONPATH": paths}
        return [sys.executable, "-I", "-S", "-c", self.code, *config.args, *words], env

    def launch(self, config: LaunchConfig) -> Any:
        self.launched.append(config)
        argv, env = self.launch_plan(config)
        process = EngineProcess.launch(argv, env=env, workdir=config.workdir, isolate=config.isolate)
        return Handle(config, process, attached=False)

    def attach(self, config: LaunchConfig, process: EngineProcess) -> Any:
        return Handle(config, process, attached=True)


Configure = "Callable[..., LaunchConfig]"


@pytest.fixture
def store(tmp_path: Path) -> GoldenStore:
    return GoldenStore(tmp_path / "golden")


@pytest.fixture
def configure(tmp_path: Path) -> Callable[..., LaunchConfig]:
    """Return a factory of launches that differ in their workdir alone."""
    prefix, model, injected = (tmp_path / name for name in ("prefix", "model", "injected"))
    site = prefix / "lib/python3.11/site-packages"
    (site / "engine-1.0.dist-info").mkdir(parents=True)
    (site / "engine-1.0.dist-info/RECORD").write_text("engine.py,,\n")
    (site / "engine.py").write_text("one = 1\n")
    for folder, name in ((model, "config.json"), (injected, "loader.py")):
        folder.mkdir()
        (folder / name).write_text("{}")
    golden_key._packages.cache_clear()
    count = iter(range(1000))

    def make(**changes: Any) -> LaunchConfig:
        workdir = tmp_path / f"launch-{next(count)}"
        workdir.mkdir()
        config = LaunchConfig(prefix / "bin/python", model, 1, workdir, import_paths=(injected,))
        return replace(config, **changes)

    return make


@pytest.fixture
def start(store: GoldenStore, configure: Callable[..., LaunchConfig]) -> Iterator[Callable[..., Start]]:
    """Bring engines up, and close them afterwards."""
    started: list[Start] = []

    def up(engine: Engine | None = None, *, cold: bool = False, **changes: Any) -> Start:
        start = bring_up(engine or Engine(), configure(**changes), cold=cold, seconds=60, store=store)
        started.append(start)
        return start

    yield up
    for one in started:
        one.handle.process.close()


def secret(start: Start) -> str:
    return ask(start.handle.process)[0]


def images(store: GoldenStore) -> list[Path]:
    return sorted((store.root / "entries").iterdir())


def test_second_engine_comes_from_the_first_one_s_image(
    start: Callable[..., Start], store: GoldenStore
) -> None:
    engine = Engine()
    first = start(engine)
    assert (first.start, len(engine.launched)) == ("golden", 1)
    assert first.reason.startswith("its image was made now, after a cold start of ")
    second = start(engine)
    assert (second.start, len(engine.launched)) == ("golden", 1)
    assert second.reason == f"restored from {second.image['key']}"
    assert second.handle.attached  # type: ignore[attr-defined]
    assert second.image == first.image
    assert second.image["bytes"] > 1 << 20
    assert second.image["criu"] == CriuCheckpointer().criu.as_json()
    # Both live at once, on the same ports and pids, and are copies of the one that was dumped.
    assert secret(first) == secret(second)
    assert first.handle.process.log_path != second.handle.process.log_path
    assert first.handle.process.root != second.handle.process.root
    ask(second.handle.process, b"say")
    wait_for("its line", lambda: "said" in second.handle.process.log_tail(), soon())
    assert first.handle.process.log_tail() == "up"
    assert len(images(store)) == 1


def test_cold_means_cold(start: Callable[..., Start], store: GoldenStore) -> None:
    started = start(cold=True)
    assert (started.start, started.reason, started.image) == ("cold", "a cold start was asked for", {})
    assert images(store) == []


@pytest.mark.parametrize(
    "change",
    ["args", "env", "tensor_parallel", "model", "injected", "package", "packages", "code", "interpreter"],
)
def test_what_a_cold_start_would_have_read_is_in_the_key(
    start: Callable[..., Start], configure: Callable[..., LaunchConfig], tmp_path: Path, change: str
) -> None:
    engine = Engine()
    start(engine)
    changes: dict[str, Any] = {}
    if change == "args":
        changes = {"args": ("--more",)}
    elif change == "env":
        changes = {"env": {"SETTING": "1"}}
    elif change == "tensor_parallel":
        changes = {"tensor_parallel": 2}
    elif change == "model":
        (tmp_path / "model/config.json").write_text("{1}")
    elif change == "injected":
        (tmp_path / "injected/loader.py").write_text("{1}")
    elif change == "package":
        (tmp_path / "prefix/lib/python3.11/site-packages/engine.py").write_text("one = 11\n")
    elif change == "packages":
        (tmp_path / "prefix/lib/python3.11/site-packages/other-2.0.dist-info").mkdir()
    elif change == "code":
        engine.code += "\n"
    elif change == "interpreter":
        shutil.copytree(tmp_path / "prefix", tmp_path / "another")
        changes = {"python": tmp_path / "another/bin/python"}
    golden_key._packages.cache_clear()  # as in the next process
    start(engine, **changes)
    assert len(engine.launched) == 2
    start(engine, **changes)
    assert len(engine.launched) == 2


def test_compiled_python_is_not_in_the_key(start: Callable[..., Start], tmp_path: Path) -> None:
    engine = Engine()
    start(engine)
    for place in ("prefix/lib/python3.11/site-packages", "injected"):
        cache = tmp_path / place / "__pycache__"
        cache.mkdir()
        (cache / "engine.cpython-311.pyc").write_bytes(b"x")
    golden_key._packages.cache_clear()
    start(engine)
    assert len(engine.launched) == 1


# Engines that cannot be golden -------------------------------------------------------------------


def test_editable_engine_is_started_cold(start: Callable[..., Start], tmp_path: Path) -> None:
    info = tmp_path / "prefix/lib/python3.11/site-packages/engine-1.0.dist-info"
    (info / "direct_url.json").write_text('{"dir_info": {"editable": true}, "url": "file:///src"}')
    started = start()
    assert (started.start, started.image) == ("cold", {})
    assert "engine is installed in editable form" in started.reason


@pytest.mark.parametrize("how", ["system-site-packages", "no-packages"])
def test_engine_whose_packages_cannot_be_followed_is_started_cold(
    start: Callable[..., Start], tmp_path: Path, how: str
) -> None:
    if how == "no-packages":
        shutil.rmtree(tmp_path / "prefix/lib")
    else:
        (tmp_path / "prefix/pyvenv.cfg").write_text("include-system-site-packages = true\n")
    started = start()
    assert started.start == "cold"
    assert "cannot be found" in started.reason


def test_engine_that_needs_its_workdir_is_started_cold(start: Callable[..., Start]) -> None:
    started = start(Engine(uses_workdir=True))
    assert started.start == "cold"
    assert "the launch's own folder" in started.reason


def test_engine_without_namespaces_is_started_cold(start: Callable[..., Start]) -> None:
    code = "import signal; print('up', flush=True); signal.pause()"
    started = start(Engine(code=code), isolate=False)
    assert started.start == "cold"
    assert "no namespaces of its own" in started.reason


def test_without_criu_the_reason_says_how_to_get_it(
    start: Callable[..., Start], monkeypatch: pytest.MonkeyPatch
) -> None:
    def none() -> None:
        raise EnvironmentFailure("there is no CRIU", cause="none", next_step="install it")

    monkeypatch.setattr(golden, "find_criu", none)
    started = start()
    assert started.start == "cold"
    assert started.reason == "there is no CRIU (none); install it"


def test_engine_that_cannot_be_dumped_serves_cold(start: Callable[..., Start], store: GoldenStore) -> None:
    outside = str(store.root / "outside.sock")
    code = f"import socket\nout = socket.socket(socket.AF_UNIX); out.connect({outside!r})\n{COUNTER}"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(outside)
        listener.listen()
        engine = Engine(code=code)
        started = start(engine)
        assert started.start == "cold"
        assert started.reason.startswith("no image could be taken of it: ")
        assert "UNIX" in started.reason
        assert images(store) == []
        assert secret(started)
        assert start(engine).start == "cold"
    assert len(engine.launched) == 2


def test_engine_that_does_not_start_raises_and_leaves_nothing(
    start: Callable[..., Start], store: GoldenStore
) -> None:
    engine = Engine(code="raise SystemExit(3)")
    with pytest.raises(EngineStartError):
        start(engine)
    assert images(store) == []


# Images that will not do -------------------------------------------------------------------------


def _cut(folder: Path) -> None:
    pages = max((folder / IMAGES).glob("pages-*.img"), key=lambda path: path.stat().st_size)
    os.truncate(pages, pages.stat().st_size // 2)


def _flip(folder: Path) -> None:
    pages = max((folder / IMAGES).glob("pages-*.img"), key=lambda path: path.stat().st_size)
    with pages.open("r+b") as file:
        file.seek(5000)
        byte = file.read(1)
        file.seek(5000)
        file.write(bytes([byte[0] ^ 1]))


def _remove(folder: Path) -> None:
    (folder / "files/shm/kept").unlink()


def _note(folder: Path) -> None:
    (folder / "checkpoint.json").write_text("{}")


@pytest.mark.parametrize("damage", [_cut, _flip, _remove, _note])
def test_damaged_image_is_found_and_made_anew(
    start: Callable[..., Start], store: GoldenStore, damage: Callable[[Path], None]
) -> None:
    engine = Engine()
    old = secret(start(engine))
    (folder,) = images(store)
    damage(folder)
    again = start(engine)
    assert again.start == "golden"
    assert "is damaged and is made anew" in again.reason
    assert "its image was made now" in again.reason
    assert len(engine.launched) == 2
    assert secret(again) != old
    assert start(engine).reason.startswith("restored from")


def test_damaged_list_of_an_image_is_no_image(start: Callable[..., Start], store: GoldenStore) -> None:
    engine = Engine()
    key = start(engine).image["key"]
    (store.root / f"{key}.json").write_text("{")
    assert start(engine).start == "golden"
    assert len(engine.launched) == 2


def test_image_that_cannot_be_restored_is_made_anew(
    start: Callable[..., Start], tmp_path: Path, store: GoldenStore
) -> None:
    notes = tmp_path / "notes"
    notes.write_text("one")
    engine = Engine(code=f"held = open({str(notes)!r})\n{COUNTER}")
    start(engine)
    notes.write_text("another length")
    again = start(engine)
    assert again.start == "golden"
    assert "cannot be restored and is made anew" in again.reason
    assert len(engine.launched) == 2
    # What the failed restore left is kept beside the new launch.
    workdir = again.handle.process.workdir
    assert (workdir / "failed-restore/criu/restore-1.log").is_file()


def test_restored_engine_that_does_not_serve_is_made_anew(
    start: Callable[..., Start], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine()
    start(engine)

    def dead(self: Handle, deadline: Deadline) -> None:
        if self.attached:
            raise EngineStartError("it is dead")

    monkeypatch.setattr(Handle, "ready", dead)
    assert "cannot be restored and is made anew: it is dead" in start(engine).reason


def test_contents_are_hashed_after_a_boot_and_after_a_touch(
    start: Callable[..., Start], store: GoldenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    start()
    (folder,) = images(store)
    (pointer,) = store.root.glob("*.json")
    files = json.loads(pointer.read_text())["files"]
    assert "checkpoint.json" in files
    hashed: list[Path] = []
    real = golden_store.inventory

    def counted(place: Path) -> dict[str, tuple[int, str]]:
        hashed.append(place)
        return real(place)

    monkeypatch.setattr(golden_store, "inventory", counted)
    verify(folder, files)
    assert hashed == []  # its maker hashed them
    os.utime(folder / "checkpoint.json")
    verify(folder, files)
    verify(folder, files)
    assert len(hashed) == 1
    note = folder / "verified.json"
    note.write_text(note.read_text().replace('"boot": "', '"boot": "before-'))
    verify(folder, files)
    assert len(hashed) == 2
    note.write_text("{")
    verify(folder, files)
    assert len(hashed) == 3
    (folder / "files/shm/kept").unlink()
    with pytest.raises(DamagedImageError, match="files/shm/kept cannot be read"):
        verify(folder, files)


# Several runs ------------------------------------------------------------------------------------


def test_many_at_once_make_one_image_and_share_it(
    configure: Callable[..., LaunchConfig], store: GoldenStore
) -> None:
    engine = Engine()
    configs = [configure() for _ in range(3)]

    def up(config: LaunchConfig) -> Start:
        return bring_up(engine, config, cold=False, seconds=60, store=GoldenStore(store.root))

    with ThreadPoolExecutor(3) as executor:
        started = list(executor.map(up, configs))
    try:
        assert len(engine.launched) == 1
        assert [one.start for one in started] == ["golden"] * 3
        assert len({secret(one) for one in started}) == 1
    finally:
        for one in started:
            one.handle.process.close()
    assert len(images(store)) == 1


def entry(store: GoldenStore, key: str, size: int) -> Path:
    made = store.new_folder(key)
    (made.folder / "image").write_bytes(os.urandom(size))
    store.publish(key, made, {}).close()
    return made.folder


def test_least_recently_used_images_go_first_and_never_one_in_use(tmp_path: Path) -> None:
    store = GoldenStore(tmp_path, limit_bytes=3 << 20)
    folders = {}
    for age, key in enumerate(("used", "old", "new")):  # used last long ago
        folders[key] = entry(store, key, 1 << 20)
        os.utime(tmp_path / f"{key}.json", (1000 + age, 1000 + age))
    in_use = store.open("used")
    assert in_use is not None
    os.utime(tmp_path / "used.json", (1, 1))
    folders["last"] = entry(store, "last", 1 << 20)
    assert {key for key, folder in folders.items() if folder.exists()} == {"used", "new", "last"}
    assert store.open("old") is None
    in_use.close()
    # Opening makes it used last, so the next one to go is the other.
    reopened = store.open("new")
    assert reopened is not None
    reopened.close()
    for key in ("used", "last"):
        long_ago(store, key)
    os.utime(tmp_path / "used.json", (1, 1))
    entry(store, "more", 1 << 20)
    assert not folders["used"].exists()
    assert folders["new"].exists()


def long_ago(store: GoldenStore, key: str) -> None:
    then = time.time() - golden_store.RECENT_SECONDS - 1
    os.utime(store.root / f"{key}.json", (then, then))


def test_image_that_was_used_a_moment_ago_is_kept_beyond_the_bound(tmp_path: Path) -> None:
    store = GoldenStore(tmp_path, limit_bytes=1)
    folders = {key: entry(store, key, 1 << 20) for key in ("a", "b", "c")}
    assert all(folder.exists() for folder in folders.values())
    for key in folders:
        long_ago(store, key)
    used = store.open("a")
    assert used is not None
    used.close()
    assert sorted(store.evict()) == sorted([folders["b"].name, folders["c"].name])
    assert folders["a"].exists()


@pytest.mark.parametrize("given", ["many", "-1", "1.5", "8 GiB", "1e3", "0x10", "²", "9" * 30])
def test_bound_that_is_no_number_is_a_usage_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str
) -> None:
    monkeypatch.setenv("NVS_GOLDEN_MIB", given)
    with pytest.raises(UsageError, match="Next step: ") as caught:
        GoldenStore(tmp_path)
    assert "NVS_GOLDEN_MIB" in str(caught.value)


def test_one_image_beyond_the_bound_is_kept_for_its_maker(tmp_path: Path) -> None:
    store = GoldenStore(tmp_path, limit_bytes=1)
    folder = entry(store, "key", 1 << 20)
    assert folder.exists()
    long_ago(store, "key")
    entry(store, "other", 1 << 20)
    assert not folder.exists()


def test_bound_comes_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = GoldenStore(tmp_path)
    monkeypatch.delenv("NVS_GOLDEN_MIB", raising=False)
    assert store.limit_bytes == 8192 << 20
    monkeypatch.setenv("NVS_GOLDEN_MIB", "100")
    assert store.limit_bytes == 100 << 20


def test_abandoned_folder_is_removed_and_one_in_the_making_is_not(tmp_path: Path) -> None:
    store = GoldenStore(tmp_path)
    abandoned = store.new_folder("a")
    abandoned.close()  # as the kernel does when its maker is killed
    making = store.new_folder("b")
    assert not abandoned.folder.exists()
    entry(store, "c", 10)
    assert making.folder.exists()
    store.drop(making)
    assert not making.folder.exists()


def test_image_that_is_being_removed_is_not_opened(tmp_path: Path) -> None:
    store = GoldenStore(tmp_path)
    folder = entry(store, "key", 10)
    with (folder / "in-use.lock").open("r+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert store.open("key") is None
    opened = store.open("key")
    assert opened is not None
    opened.close()


MAKER = """
import signal
import sys
from pathlib import Path
from nvsnap_conformance.checkpoint import criu
from nvsnap_conformance.engines.golden import bring_up
from nvsnap_conformance.engines.golden_store import GoldenStore
from nvsnap_conformance.engines.protocol import LaunchConfig
from tests import test_golden
def gate(*_):
    print("gate", flush=True)
    signal.pause()
if sys.argv[1] == "dump":
    criu.save_files = gate
else:
    criu.put_files = gate
python, model, workdir, injected, root = map(Path, sys.argv[2:])
config = LaunchConfig(python, model, 1, workdir, import_paths=(injected,))
bring_up(test_golden.Engine(), config, cold=False, seconds=60, store=GoldenStore(root))
"""


@pytest.mark.parametrize("stage", ["dump", "restore"])
def test_maker_that_is_killed_leaves_nothing_in_the_way(
    start: Callable[..., Start], configure: Callable[..., LaunchConfig], store: GoldenStore, stage: str
) -> None:
    config = configure()
    words = [config.python, config.model, config.workdir, config.import_paths[0], store.root]
    maker = subprocess.Popen(
        [sys.executable, "-c", MAKER, stage, *map(str, words)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[1],
    )
    try:
        assert maker.stdout is not None
        assert maker.stdout.readline() == "gate\n"
    finally:
        maker.send_signal(signal.SIGKILL)
        maker.wait()
    engine = Engine()
    started = start(engine)
    assert (started.start, len(engine.launched)) == ("golden", 1)
    assert len(images(store)) == 1
    assert secret(started)


def test_engine_that_cannot_be_brought_back_is_started_cold(
    start: Callable[..., Start], store: GoldenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise CriuFailure(Kind.KERNEL, "it cannot be", cause="the kernel")

    monkeypatch.setattr(CriuCheckpointer, "load", fail)
    engine = Engine()
    started = start(engine)
    assert (started.start, len(engine.launched)) == ("cold", 2)
    assert started.reason == "its image could not be restored: it cannot be (the kernel)"
    assert secret(started)
    assert images(store) == []


def test_wait_for_a_maker_that_hangs_ends(
    configure: Callable[..., LaunchConfig], store: GoldenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine()
    monkeypatch.setattr(golden_store, "MAKER_SECONDS", 0.1)
    monkeypatch.setattr(golden, "golden_key", lambda **_: golden_key.GoldenKey("key", {}))
    with store.maker("key"), pytest.raises(EnvironmentFailure, match="--cold"):
        bring_up(engine, configure(), cold=False, seconds=60, store=GoldenStore(store.root))
    assert engine.launched == []


def test_dump_that_takes_the_engine_along_is_an_error(
    start: Callable[..., Start], store: GoldenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lose(self: CriuCheckpointer, process: EngineProcess, *_: object) -> None:
        raise CriuFailure(Kind.OTHER, "it failed", engine_runs=False)

    monkeypatch.setattr(CriuCheckpointer, "dump", lose)
    engine = Engine()
    with pytest.raises(CriuFailure, match="DAMAGED OR GONE"):
        start(engine)
    assert images(store) == []
