"""What a process can hold on a GPU, each kind made by calls of the driver's own API; loaded where a GPU is.

What the driver's checkpoint is known to leave out, or to fail on later, is listed in NVIDIA/cuda-checkpoint
issue 14; vLLM's sleep mode and torch's expandable segments hold ``virtual`` memory, NIM and Triton ``pinned``
pages, custom all-reduce ``ipc`` mappings, FlashInfer's and torch's symmetric memory ``descriptor`` ones.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import socket
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

BYTES = 64 << 20
"""Plain device memory of every process, in bytes."""

_EXTRA = 2 << 20
"""What a kind adds to it, in bytes: one granule of the driver's virtual memory management."""

_PTX = b"""
.version 8.0
.target sm_75
.address_size 64
.visible .entry add_one(.param .u64 at, .param .u32 count)
{
    .reg .pred %p;
    .reg .b32 %r<6>;
    .reg .b64 %d<3>;
    ld.param.u64 %d1, [at];
    ld.param.u32 %r1, [count];
    mov.u32 %r2, %ctaid.x;
    mov.u32 %r3, %ntid.x;
    mov.u32 %r4, %tid.x;
    mad.lo.u32 %r2, %r2, %r3, %r4;
    setp.ge.u32 %p, %r2, %r1;
    @%p bra done;
    mul.wide.u32 %d2, %r2, 4;
    add.s64 %d1, %d1, %d2;
    ld.global.u32 %r5, [%d1];
    add.u32 %r5, %r5, 1;
    st.global.u32 [%d1], %r5;
done:
    ret;
}
.visible .entry wait_for(.param .u64 at)
{
    .reg .pred %p;
    .reg .b32 %r<2>;
    .reg .b64 %d<2>;
    ld.param.u64 %d1, [at];
again:
    ld.volatile.global.u32 %r1, [%d1];
    setp.eq.u32 %p, %r1, 0;
    @%p bra again;
    ret;
}
\0"""
"""``add_one`` adds 1 to each of ``count`` 32-bit words; ``wait_for`` runs for as long as a word is 0."""

_THREADS = 256


class Cuda:
    """The driver's API on one GPU, its primary context current in this thread."""

    def __init__(self, number: int) -> None:
        from cuda.bindings import driver  # noqa: PLC0415 - only where there is a GPU

        self.driver = driver
        self.made(driver.cuInit(0))
        self.device = self.made(driver.cuDeviceGet(number))
        self.made(driver.cuCtxSetCurrent(self.made(driver.cuDevicePrimaryCtxRetain(self.device))))
        self._module: Any = None

    @staticmethod
    def made(answer: tuple[Any, ...]) -> Any:
        """Return what a call gives; raise :class:`RuntimeError` with the driver's error."""
        if int(answer[0]) != 0:
            raise RuntimeError(f"CUDA answers {answer[0].name}")
        return answer[1] if len(answer) > 1 else None

    def allocate(self, count: int) -> int:
        """Return the address of ``count`` bytes of plain device memory."""
        return int(self.made(self.driver.cuMemAlloc(count)))

    def fill(self, address: int, word: int, count: int) -> None:
        """Set ``count`` bytes to a 32-bit word."""
        self.made(self.driver.cuMemsetD32(address, word, count // 4))
        self.made(self.driver.cuCtxSynchronize())

    def read(self, address: int, count: int) -> bytes:
        """Return ``count`` bytes from the device."""
        back = bytearray(count)
        self.made(self.driver.cuMemcpyDtoH(back, address, count))
        return bytes(back)

    def launch(self, kernel: str, stream: Any, *arguments: tuple[int, Any], words: int = 1) -> None:
        """Launch a kernel of ours over 32-bit words; ``arguments`` are pairs of value and C type."""
        if self._module is None:
            self._module = self.made(self.driver.cuModuleLoadData(_PTX))
        function = self.made(self.driver.cuModuleGetFunction(self._module, kernel.encode()))
        values, types = tuple(zip(*arguments, strict=True))
        blocks = -(-words // _THREADS)
        self.made(
            self.driver.cuLaunchKernel(
                function, blocks, 1, 1, min(words, _THREADS), 1, 1, 0, stream, (values, types), 0
            )
        )

    def add_one(self, address: int, count: int, stream: Any = 0) -> None:
        """Add 1 to each 32-bit word of ``count`` bytes."""
        words = count // 4
        self.launch("add_one", stream, (address, ctypes.c_void_p), (words, ctypes.c_uint32), words=words)


class Memory:
    """Plain device memory (``cuMemAlloc``) with a pattern; every kind holds it beside what is its own."""

    def __init__(self, cuda: Cuda, channel: socket.socket | None) -> None:
        self.cuda = cuda
        self._channel = channel
        self.word = int.from_bytes(os.urandom(4), "little")
        self.address = cuda.allocate(BYTES)
        cuda.fill(self.address, self.word, BYTES)
        self.hold()

    @property
    def channel(self) -> socket.socket:
        """The socket to the process with which memory is shared."""
        assert self._channel is not None  # the kinds that share are started with one
        return self._channel

    def hold(self) -> None:
        """Make what this kind holds beside the memory."""

    def problem(self) -> str:
        """Return what of it does not work as it did, empty where all does."""
        return ""

    def look(self) -> str:
        """Return ``right``, or what is wrong."""
        if self.cuda.read(self.address, BYTES) != _words(self.word, BYTES):
            return "wrong: plain memory"
        problem = self.problem()
        return f"wrong: {problem}" if problem else "right"

    def share(self) -> None:
        """Give the peer a handle of what is shared."""
        raise NotImplementedError

    def renew(self) -> None:
        """Make new memory to share, in place of what was made at the start."""
        raise NotImplementedError

    def take(self) -> None:
        """Map what the peer gave the handle of."""
        raise NotImplementedError

    def drop(self) -> None:
        """Close what :meth:`take` had mapped."""
        raise NotImplementedError

    def where(self) -> str:
        """Return the UUID and the PCI bus id of the device, as this process sees it, with a space between."""
        uuid = self.cuda.made(self.cuda.driver.cuDeviceGetUuid(self.cuda.device))
        bus = self.cuda.made(self.cuda.driver.cuDeviceGetPCIBusId(32, self.cuda.device))
        return f"{bytes(uuid.bytes).hex()} {bytes(bus).partition(bytes(1))[0].decode().lower()}"


class Graph(Memory):
    """A captured graph of a memset and a kernel, instantiated."""

    def hold(self) -> None:
        """Capture it."""
        driver, made = self.cuda.driver, self.cuda.made
        self._at = self.cuda.allocate(_EXTRA)
        self.cuda.add_one(self._at, _EXTRA)  # loads the module: that cannot be captured
        self._stream = made(driver.cuStreamCreate(1))
        mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        made(driver.cuStreamBeginCapture(self._stream, mode))
        made(driver.cuMemsetD32Async(self._at, self.word, _EXTRA // 4, self._stream))
        self.cuda.add_one(self._at, _EXTRA, self._stream)
        graph = made(driver.cuStreamEndCapture(self._stream))
        self._executable = made(driver.cuGraphInstantiate(graph, 0))

    def problem(self) -> str:
        """Replay it."""
        self.cuda.fill(self._at, 0, _EXTRA)
        self.cuda.made(self.cuda.driver.cuGraphLaunch(self._executable, self._stream))
        self.cuda.made(self.cuda.driver.cuStreamSynchronize(self._stream))
        return (
            "" if self.cuda.read(self._at, _EXTRA) == _words(self.word + 1, _EXTRA) else "the graph's replay"
        )


class Pinned(Memory):
    """Pages of the process, registered with the driver and mapped for the device (``cuMemHostRegister``)."""

    _MAPPED = 2

    def hold(self) -> None:
        """Register them."""
        self._pages = mmap.mmap(-1, _EXTRA)
        self._host = ctypes.addressof(ctypes.c_char.from_buffer(self._pages))
        self._pages[:] = _words(self.word, _EXTRA)
        self._register()

    def _register(self) -> None:
        driver, made = self.cuda.driver, self.cuda.made
        made(driver.cuMemHostRegister(self._host, _EXTRA, self._MAPPED))
        self._mapped = int(made(driver.cuMemHostGetDevicePointer(self._host, 0)))

    def problem(self) -> str:
        """Have the device write to them, unregister them and register them again."""
        if self._pages[:] != _words(self.word, _EXTRA):
            return "the registered pages"
        self.cuda.add_one(self._mapped, _EXTRA)
        self.cuda.made(self.cuda.driver.cuCtxSynchronize())
        if self._pages[:] != _words(self.word + 1, _EXTRA):
            return "what the device writes to the registered pages"
        self._pages[:] = _words(self.word, _EXTRA)
        self.cuda.made(self.cuda.driver.cuMemHostUnregister(self._host))
        self._register()
        return ""


class Managed(Memory):
    """Managed memory (``cuMemAllocManaged``), written by the host."""

    _ATTACH_GLOBAL = 1

    def hold(self) -> None:
        """Allocate it."""
        self._at = int(self.cuda.made(self.cuda.driver.cuMemAllocManaged(_EXTRA, self._ATTACH_GLOBAL)))
        ctypes.memmove(self._at, _words(self.word, _EXTRA), _EXTRA)

    def problem(self) -> str:
        """Read it, and have the device write to it."""
        if ctypes.string_at(self._at, _EXTRA) != _words(self.word, _EXTRA):
            return "managed memory"
        self.cuda.add_one(self._at, _EXTRA)
        self.cuda.made(self.cuda.driver.cuCtxSynchronize())
        right = ctypes.string_at(self._at, _EXTRA) == _words(self.word + 1, _EXTRA)
        ctypes.memmove(self._at, _words(self.word, _EXTRA), _EXTRA)
        return "" if right else "what the device writes to managed memory"


class Virtual(Memory):
    """Memory by the driver's virtual memory management (``cuMemCreate``, ``cuMemMap``), not exportable."""

    def handle_type(self) -> Any:
        """Return the type of handle that can be exported."""
        return self.cuda.driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_NONE

    def hold(self) -> None:
        """Create, map and fill it."""
        driver = self.cuda.driver
        properties = driver.CUmemAllocationProp()
        properties.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        properties.location = self._location()
        properties.requestedHandleTypes = self.handle_type()
        self.handle = self.cuda.made(driver.cuMemCreate(_EXTRA, properties, 0))
        self._at = self.map(self.handle)
        self.cuda.fill(self._at, self.word, _EXTRA)

    def _location(self) -> Any:
        location = self.cuda.driver.CUmemLocation()
        location.type = self.cuda.driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        location.id = int(self.cuda.device)
        return location

    def map(self, handle: Any) -> int:
        """Return the address at which a handle's memory can be read and written."""
        driver, made = self.cuda.driver, self.cuda.made
        at = int(made(driver.cuMemAddressReserve(_EXTRA, 0, 0, 0)))
        made(driver.cuMemMap(at, _EXTRA, 0, handle, 0))
        access = driver.CUmemAccessDesc()
        access.location = self._location()
        access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        made(driver.cuMemSetAccess(at, _EXTRA, [access], 1))
        return at

    def problem(self) -> str:
        """Read it."""
        return "" if self.cuda.read(self._at, _EXTRA) == _words(self.word, _EXTRA) else "virtual memory"


class Exportable(Virtual):
    """The same, such that a file descriptor of it could be exported; none is."""

    def handle_type(self) -> Any:
        """Return a POSIX file descriptor's."""
        return self.cuda.driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR


class Exported(Exportable):
    """The same with a file descriptor exported and kept open, as one that waits to be fetched is."""

    def hold(self) -> None:
        """Export it."""
        super().hold()
        self._descriptor = self.export()

    def export(self) -> int:
        """Return a new file descriptor of the memory."""
        exported = self.cuda.driver.cuMemExportToShareableHandle(self.handle, self.handle_type(), 0)
        return int(self.cuda.made(exported))


class HandleTaken(Memory):
    """Plain memory of which a CUDA IPC handle was taken, and opened by nobody."""

    def hold(self) -> None:
        """Take it."""
        self.ipc_handle(self.address)

    def ipc_handle(self, address: int) -> bytes:
        """Take a handle; one from before a checkpoint is none after the restore (driver 580.159.04)."""
        return bytes(self.cuda.made(self.cuda.driver.cuIpcGetMemHandle(address)).reserved)


class Ipc(HandleTaken):
    """Plain memory that another process has opened by its CUDA IPC handle (``cuIpcOpenMemHandle``)."""

    _PEER_ACCESS = 1

    def hold(self) -> None:
        """Nothing of the peer's is open yet."""
        self._shared = self.address
        self._peer: int | None = None
        self._peer_word = 0

    def share(self) -> None:
        """Send a handle and the word that its memory is filled with."""
        self.channel.send(self.word.to_bytes(4, "little") + self.ipc_handle(self._shared))

    def renew(self) -> None:
        """Allocate it."""
        self._shared = self.cuda.allocate(BYTES)
        self.cuda.fill(self._shared, self.word, BYTES)

    def take(self) -> None:
        """Open the peer's handle."""
        message = self.channel.recv(4096)
        self._peer_word = int.from_bytes(message[:4], "little")
        handle = self.cuda.driver.CUipcMemHandle()
        handle.reserved = message[4:]
        self._peer = int(self.cuda.made(self.cuda.driver.cuIpcOpenMemHandle(handle, self._PEER_ACCESS)))

    def drop(self) -> None:
        """Close it."""
        self.cuda.made(self.cuda.driver.cuIpcCloseMemHandle(self._peer))
        self._peer = None

    def problem(self) -> str:
        """Read the peer's memory."""
        if self._peer is None or self.cuda.read(self._peer, BYTES) == _words(self._peer_word, BYTES):
            return ""
        return "the peer's memory"


class Descriptor(Exported):
    """Virtual memory that another process has imported by its file descriptor and mapped."""

    def hold(self) -> None:
        """Make it; nothing is exported yet."""
        Virtual.hold(self)
        self._peer: tuple[Any, int] | None = None
        self._peer_word = 0

    def share(self) -> None:
        """Send a descriptor and the word that its memory is filled with."""
        descriptor = self.export()
        socket.send_fds(self.channel, [self.word.to_bytes(4, "little")], [descriptor])
        os.close(descriptor)

    def renew(self) -> None:
        """Create and map it; what was made before stays."""
        Virtual.hold(self)

    def take(self) -> None:
        """Import and map the peer's descriptor."""
        message, (descriptor,), _, _ = socket.recv_fds(self.channel, 4, 1)
        self._peer_word = int.from_bytes(message, "little")
        imported = self.cuda.driver.cuMemImportFromShareableHandle(descriptor, self.handle_type())
        handle = self.cuda.made(imported)
        os.close(descriptor)
        self._peer = handle, self.map(handle)

    def drop(self) -> None:
        """Unmap and release it."""
        assert self._peer is not None  # dropped is what was taken
        handle, at = self._peer
        driver, made = self.cuda.driver, self.cuda.made
        made(driver.cuMemUnmap(at, _EXTRA))
        made(driver.cuMemAddressFree(at, _EXTRA))
        made(driver.cuMemRelease(handle))
        self._peer = None

    def problem(self) -> str:
        """Read its own memory, and the peer's."""
        if own := super().problem():
            return own
        if self._peer is None or self.cuda.read(self._peer[1], _EXTRA) == _words(self._peer_word, _EXTRA):
            return ""
        return "the peer's memory"


class Busy(Memory):
    """A kernel that runs until it is told to end, which a look does."""

    def hold(self) -> None:
        """Launch it."""
        driver, made = self.cuda.driver, self.cuda.made
        pinned = made(driver.cuMemHostAlloc(4096, 2))
        self._flag = ctypes.c_uint32.from_address(int(pinned))
        self._flag.value = 0
        mapped = int(made(driver.cuMemHostGetDevicePointer(pinned, 0)))
        self._stream = made(driver.cuStreamCreate(1))
        self.cuda.launch("wait_for", self._stream, (mapped, ctypes.c_void_p))

    def look(self) -> str:
        """End the kernel first: a copy would wait for it."""
        self._flag.value = 1
        self.cuda.made(self.cuda.driver.cuStreamSynchronize(self._stream))
        return super().look()


class Everything(Memory):
    """All memory that the device has left."""

    def hold(self) -> None:
        """Take ever smaller blocks until not one MiB is left."""
        driver = self.cuda.driver
        block = 1 << 36
        while block >= 1 << 20:
            if int(driver.cuMemAlloc(block)[0]) != 0:
                block >>= 1


def _words(word: int, count: int) -> bytes:
    return (word & 0xFFFFFFFF).to_bytes(4, "little") * (count // 4)


KINDS: dict[str, Callable[[Cuda, socket.socket | None], Memory]] = {
    "memory": Memory,
    "graph": Graph,
    "pinned": Pinned,
    "managed": Managed,
    "virtual": Virtual,
    "exportable": Exportable,
    "exported": Exported,
    "handle": HandleTaken,
    "ipc": Ipc,
    "descriptor": Descriptor,
    "busy": Busy,
    "everything": Everything,
}
