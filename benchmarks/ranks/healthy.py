"""Long phases that are healthy: what an engine does for minutes without a token."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


def main(context: Any) -> None:
    """Spend the time in the phase that the options name, on the ranks they name; the others wait."""
    context.join()
    phase: Callable[[Any], None] = globals()[context.options["phase"]]
    who = context.options.get("ranks")
    context.tell("entered")
    if who is None or context.rank in who:
        phase(context)
    dist.all_reduce(torch.ones(4))
    context.tell("done")


def steps(context: Any) -> None:
    """Run collectives one after the other, with little between them."""
    stop = torch.zeros(1)
    while not stop.item():
        dist.all_reduce(torch.ones(4096))
        stop = torch.tensor([float(context.rank == 0 and context.is_open("enough"))])
        dist.broadcast(stop, src=0)


def compute(context: Any) -> None:
    """Work in several functions, as a forward pass does."""
    state = torch.rand(96, 96)
    while not context.is_open("enough"):
        for layer in (torch.tanh, _multiply, _normalise, _shift):
            for _ in range(50):
                state = layer(state)


def _multiply(state: torch.Tensor) -> torch.Tensor:
    return state @ state


def _normalise(state: torch.Tensor) -> torch.Tensor:
    return state / (state.abs().max() + 1e-6)


def _shift(state: torch.Tensor) -> torch.Tensor:
    return torch.roll(state, 1, dims=0)


def matmul(context: Any) -> None:
    """One line of code that spends its time in native arithmetic."""
    state = torch.rand(700, 700)
    while not context.is_open("enough"):
        state = torch.mm(state, state).clamp_(0.0, 1.0)


def load_weights(context: Any) -> None:
    """Read weights from disk, again and again, as a large checkpoint is read shard by shard."""
    path = Path(context.folder) / f"weights-{context.rank}.pt"
    torch.save({f"layer.{i}": torch.rand(256, 256) for i in range(32)}, path)
    while not context.is_open("enough"):
        torch.load(path, weights_only=True)


def safetensors(context: Any) -> None:
    """Read weights through safetensors."""
    from safetensors.torch import load_file, save_file  # noqa: PLC0415 - the engine's interpreter has it

    path = Path(context.folder) / f"weights-{context.rank}.safetensors"
    save_file({f"layer.{i}": torch.rand(256, 256) for i in range(32)}, path)
    while not context.is_open("enough"):
        load_file(path)


def dynamo(context: Any) -> None:
    """Compile one new function after the other with torch.compile's front end."""
    lines = "".join(f"    x = torch.sin(x) * {i}\n" for i in range(20))
    for layer in _new_layers(context, lines):
        torch.compile(layer, backend="eager")(torch.ones(4))


def inductor(context: Any) -> None:
    """Compile with Inductor, which runs the C++ compiler in children."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{context.folder}/inductor-{context.rank}"
    for layer in _new_layers(context, "    x = torch.sin(x) + x.sum()\n"):
        torch.compile(layer)(torch.ones(64))


def imports(context: Any) -> None:
    """Import modules, as an engine does for its first half minute."""
    lines = "".join(f"    x = [x + {i} for _ in range({i})]\n" for i in range(2000))
    for _ in _new_layers(context, lines):
        pass


def _new_layers(context: Any, lines: str) -> Iterator[Callable[[torch.Tensor], torch.Tensor]]:
    """Give a function that nobody has seen before, again and again, until it is enough."""
    folder = Path(context.folder) / f"modules-{context.rank}"
    folder.mkdir()
    sys.path.insert(0, str(folder))
    number = 0
    while not context.is_open("enough"):
        number += 1
        name = f"generated_{context.rank}_{number}"
        text = f"import torch\n\n\ndef layer(x):\n{lines}    return x * {number}\n"
        (folder / f"{name}.py").write_text(text)
        yield importlib.import_module(name).layer


def capture_model(context: Any) -> None:
    """Graph capture by name: sizes are run one after the other."""
    while not context.is_open("enough"):
        for size in (1, 2, 4, 8, 16, 32, 64, 128, 256):
            _capture_one(size)


def _capture_one(size: int) -> None:
    state = torch.rand(size, 64)
    for _ in range(50):
        state = torch.tanh(state @ torch.rand(64, 64))


def children(context: Any) -> None:
    """Wait for compilers that run as children."""
    while not context.is_open("enough"):
        subprocess.run([sys.executable, "-c", "sum(i * i for i in range(3_000_000))"], check=True)


def sort(context: Any) -> None:
    """Long calls into C that touch memory."""
    while not context.is_open("enough"):
        sorted(str(number) for number in range(200_000))
