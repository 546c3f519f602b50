"""Probing the machine: every capability is tried for real, in children, and an absence has its reason."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from nvsnap_conformance.cache import cache_dir
from nvsnap_conformance.capabilities import MACHINE, Capabilities, Capability
from nvsnap_conformance.checkpoint.criu_program import check_kernel, find_criu
from nvsnap_conformance.engines.namespaces import isolation_gap
from nvsnap_conformance.engines.process import EngineProcess
from nvsnap_conformance.engines.recipes import load_recipes
from nvsnap_conformance.errors import EnvironmentFailure, NvsnapError
from nvsnap_conformance.gpus import REFUSED_DRIVERS, visible
from nvsnap_conformance.held_folder import PROBE, held

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

MULTICAST_SWITCHES = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
"""Environment variables, and the values with which each switches NVLink multicast off."""

_CHILD_SECONDS = 20.0
_GPU_SECONDS = 60.0  # cuInit takes 2.7 s on a machine with one GPU, more with many
_PIP_SECONDS = 60.0
_DIE_WITH_PARENT = "import ctypes; ctypes.CDLL(None).prctl(1, 9)\n"  # PR_SET_PDEATHSIG, SIGKILL

_WAITING_CHILD = _DIE_WITH_PARENT + "import sys\nprint('up', flush=True)\nsys.stdin.read()\n"

# cuda.h: CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED is 132. Asking creates no context and no object.
_GPU_CHILD = (
    _DIE_WITH_PARENT
    + """
import ctypes, json, sys
try:
    cuda = ctypes.CDLL("libcuda.so.1")
except OSError as error:
    print(json.dumps({"error": f"no CUDA driver: {error}"})); sys.exit()
code = cuda.cuInit(0)
if code:
    print(json.dumps({"error": f"cuInit answers error {code}"})); sys.exit()
number = ctypes.c_int()
cuda.cuDeviceGetCount(ctypes.byref(number)); count = number.value
devices = []
for index in range(count):
    device = ctypes.c_int(); cuda.cuDeviceGet(ctypes.byref(device), index); devices.append(device)
names, multicast = [], []
for device in devices:
    text = ctypes.create_string_buffer(100); cuda.cuDeviceGetName(text, 100, device)
    names.append(text.value.decode())
    code = cuda.cuDeviceGetAttribute(ctypes.byref(number), 132, device)
    multicast.append(code == 0 and number.value == 1)
blind = []
for one in devices:
    for other in devices:
        if one.value != other.value:
            code = cuda.cuDeviceCanAccessPeer(ctypes.byref(number), one, other)
            if code or not number.value: blind.append([one.value, other.value])
print(json.dumps({"names": names, "multicast": multicast, "blind": blind,
                  "checkpoint": hasattr(cuda, "cuCheckpointProcessLock")}))
"""
)


@functools.cache
def probe_machine() -> Capabilities:
    """Return what this machine can do, probed once per process (a few hundred ms without a GPU)."""
    found = [
        _root(), _namespaces(), _ptrace(), _criu(), *_gpus(), _python(), _pip(), _torch_cpu(),
        _disk(),
        _size("shm", _shm_bytes(), "in /dev/shm"),
        _size("memory", psutil.virtual_memory().available, "of memory available"),
    ]  # fmt: skip
    items = {capability.name: capability for capability in found}
    assert tuple(items) == MACHINE, "the probe and the list of its capabilities have drifted apart"
    return Capabilities(items)


def _root() -> Capability:
    if os.geteuid() == 0:
        return Capability("root", present=True, detail="effective user id 0")
    return Capability(
        "root",
        present=False,
        why_not=f"effective user id {os.geteuid()}",
        how_to_get="run as root (sudo, or a container's root with SYS_ADMIN, NET_ADMIN and SYS_PTRACE)",
    )


def _namespaces() -> Capability:
    """Launch a program in namespaces of its own, exactly as an engine is launched."""
    how = "run as root with the capabilities SYS_ADMIN, NET_ADMIN and SYS_PTRACE (docker run --privileged)"
    gap = isolation_gap()
    if gap:
        why = f"missing rights: {gap}" if gap.startswith("CAP_") else gap
        return Capability("namespaces", present=False, why_not=why, how_to_get=how)
    with held(PROBE) as folder:
        try:
            argv = [sys.executable, "-I", "-S", "-c", "input()"]
            with EngineProcess.launch(argv, env={}, workdir=folder) as process:
                made = ", ".join(sorted(process.isolation))
        except NvsnapError as error:
            why = " ".join(part for part in (error.what, error.cause) if part)
            return Capability("namespaces", present=False, why_not=why, how_to_get=error.next_step or how)
    return Capability("namespaces", present=True, detail=f"own {made}")


def _ptrace() -> Capability:
    """Take the stack of a child with py-spy."""
    from nvsnap_conformance.hang.pyspy import program  # noqa: PLC0415 - the samplers load much else

    try:
        py_spy = program()
    except NvsnapError as error:
        return Capability("ptrace", present=False, why_not=error.what, how_to_get=error.next_step)
    child = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", _WAITING_CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert child.stdout is not None  # asked for above
        child.stdout.readline()
        dump = _run([str(py_spy), "dump", "--json", "--pid", str(child.pid)])
    finally:
        child.kill()
        child.communicate()
    if dump.returncode == 0 and json.loads(dump.stdout):
        return Capability("ptrace", present=True, detail=f"py-spy reads the stack of a child ({py_spy})")
    scope = Path("/proc/sys/kernel/yama/ptrace_scope")
    hint = f" (kernel.yama.ptrace_scope is {scope.read_text().strip()})" if scope.exists() else ""
    return Capability(
        "ptrace",
        present=False,
        why_not=f"py-spy cannot read a child's stack{hint}: {dump.stderr.strip()[-200:]}",
        how_to_get="run as root, or set kernel.yama.ptrace_scope to 0; in a container add the capability "
        "SYS_PTRACE",
    )


def _criu() -> Capability:
    """Look for the CRIU that a dump would use, and let it look at kernel and rights."""
    try:
        criu = find_criu()
        check_kernel(criu)
    except EnvironmentFailure as error:
        why = f"{error.what}: {error.cause}"
        return Capability("criu", present=False, why_not=why, how_to_get=error.next_step)
    return Capability("criu", present=True, value=criu.version, detail=str(criu.program))


def _gpus() -> list[Capability]:
    """Ask the CUDA driver in a child; no context, no allocation and no multicast object is made."""
    answer = _run([sys.executable, "-I", "-S", "-c", _GPU_CHILD], seconds=_GPU_SECONDS)
    try:
        seen: dict[str, Any] = json.loads(answer.stdout)
    except ValueError:
        seen = {"error": f"asking the CUDA driver ended with {answer.returncode}: {answer.stderr[-200:]}"}
    names: list[str] = seen.get("names", [])
    why = seen.get("error", "")
    driver_how = "install an NVIDIA driver, and pass the GPUs into the container"
    if not names:
        why = why or "the CUDA driver sees no device (CUDA_VISIBLE_DEVICES?)"
        gpus = Capability("gpus", present=False, why_not=why, how_to_get=driver_how)
        others = ("driver", "peer-access", "multicast", "cuda-checkpoint")
        return [gpus, *(replace(gpus, name=name, why_not="there is no GPU") for name in others)]
    version = visible().driver
    several, alone = len(names) > 1, "there is one GPU only"
    pairs = seen["blind"]
    off = [f"{name}={value}" for name, value in MULTICAST_SWITCHES.items() if os.environ.get(name) == value]
    if off:
        no_multicast = f"switched off by {', '.join(off)}"
    elif not all(seen["multicast"]):
        no_multicast = "the driver reports no multicast support"
    else:
        no_multicast = "" if several else alone
    return [
        Capability("gpus", present=True, value=str(len(names)), detail=", ".join(sorted(set(names)))),
        Capability(
            "driver",
            present=version is not None,
            value=version,
            why_not="NVML is not there to tell the driver's version",
            how_to_get="pip install nvidia-ml-py (the extra 'gpu')",
        ),
        Capability(
            "peer-access",
            present=several and not pairs,
            why_not=f"no access between the devices {pairs}" if several else alone,
            how_to_get="use GPUs of one host that are joined by NVLink or one PCIe switch",
        ),
        Capability(
            "multicast",
            present=not no_multicast,
            why_not=no_multicast,
            how_to_get="use GPUs behind an NVSwitch, and leave those variables unset",
        ),
        _cuda_checkpoint(version, offered=bool(seen["checkpoint"])),
    ]


def _cuda_checkpoint(driver: str | None, *, offered: bool) -> Capability:
    """Tell whether the driver's checkpoint can be used; no process is touched."""
    if not offered:
        why, how = "the driver has no cuCheckpointProcess* calls", "install driver 570 or later"
    elif driver in REFUSED_DRIVERS:
        why, how = f"driver {driver} is refused: {REFUSED_DRIVERS[driver]}", "install another driver version"
    elif not _has_cuda_bindings():
        why, how = "cuda-bindings is not installed beside the suite", "pip install 'nvsnap-conformance[gpu]'"
    else:
        return Capability("cuda-checkpoint", present=True, detail="the driver has cuCheckpointProcess*")
    return Capability("cuda-checkpoint", present=False, why_not=why, how_to_get=how)


def _has_cuda_bindings() -> bool:
    try:
        return importlib.util.find_spec("cuda.bindings.driver") is not None
    except ModuleNotFoundError:
        return False


def _python() -> Capability:
    return Capability("python", present=True, value=platform.python_version(), detail=sys.executable)


def _pip() -> Capability:
    missing = [name for name in ("venv", "ensurepip") if importlib.util.find_spec(name) is None]
    if missing:
        return Capability(
            "pip",
            present=False,
            why_not=f"this Python has no module {' and '.join(missing)} to build an engine environment with",
            how_to_get="apt install python3-venv (Debian, Ubuntu), or use another Python",
        )
    return Capability("pip", present=True, detail="venv and ensurepip are there")


def _torch_cpu() -> Capability:
    """Ask pip whether the torch build that the recipes demand can be found."""
    wanted = [recipe.torch.version for recipe in load_recipes() if recipe.torch]
    with _some_pip() as pip:
        # Without retries: a machine without network is no error here, and must not wait for one.
        quick = ["--retries", "0", "--timeout", "15", "--disable-pip-version-check"]
        ask = ["index", "versions", "torch", "--pre", *quick]
        answer = _run([pip, "-m", "pip", *ask], seconds=_PIP_SECONDS)
    offered = re.findall(r"[^\s,()]+", answer.stdout)
    missing = [version for version in wanted if version not in offered]
    if not missing:
        return Capability("torch-cpu", present=True, value=wanted[0], detail="pip finds it")
    lines = [line for line in answer.stderr.splitlines() if line.strip()]
    return Capability(
        "torch-cpu",
        present=False,
        why_not=f"pip finds no torch {missing[0]}" + (f": {lines[-1][:200]}" if lines else ""),
        how_to_get="add PyTorch's CPU wheel index to pip's extra-index-url (PyTorch's 'Get Started' page, "
        "choices pip and CPU, gives its address)",
    )


@contextlib.contextmanager
def _some_pip() -> Iterator[str]:
    """Give an interpreter that has pip: the suite's own, or that of a throw-away environment."""
    if importlib.util.find_spec("pip") is not None:
        yield sys.executable
        return
    with held(PROBE) as folder:
        _run([sys.executable, "-m", "venv", str(folder)], seconds=_PIP_SECONDS)
        yield f"{folder}/bin/python"


def _disk() -> Capability:
    try:
        folder = cache_dir()
    except NvsnapError as error:
        return Capability("disk", present=False, why_not=error.what, how_to_get=error.next_step)
    return _size("disk", shutil.disk_usage(folder).free, f"free where the cache is, {folder}")


def _size(name: str, number: int, where: str) -> Capability:
    return Capability(name, present=True, value=str(number >> 20), detail=f"{number >> 20} MiB {where}")


def _shm_bytes() -> int:
    with contextlib.suppress(OSError):
        return shutil.disk_usage("/dev/shm").total  # noqa: S108 - its size is asked for, nothing is written
    return 0


def _run(argv: Sequence[str], *, seconds: float = _CHILD_SECONDS) -> subprocess.CompletedProcess[str]:
    """Run a child that ends by itself soon; one that does not is killed and answers with status 124."""
    try:
        return subprocess.run(
            list(argv), capture_output=True, text=True, timeout=seconds, check=False, stdin=subprocess.DEVNULL
        )
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(list(argv), 124, "", f"no answer within {seconds:.0f} s")
    except OSError as error:
        return subprocess.CompletedProcess(list(argv), 127, "", str(error))
