"""The pytest plugin: options, markers, fixtures, and the hooks that make a session a conformance run.

It is loaded in every pytest run of an environment that has the suite installed, so it imports nothing
beyond pytest, and stays inert until a collected test bears the ``clause`` mark or a target is named.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

    from nvsnap_conformance.session.state import ConformanceSession

FIXTURES = (
    "nvsnap_conformance.fixtures.arms",
    "nvsnap_conformance.fixtures.engines",
    "nvsnap_conformance.fixtures.cycles",
    "nvsnap_conformance.fixtures.device",
    "nvsnap_conformance.fixtures.images",
)

MARKERS = (
    "clause(id, ...): the clauses that this case judges",
    "spoils_engine: leaves the engine unusable for cases that need its RPC in step",
    "takes_spoiled_engine: can do with an engine that was spoiled",
    "ends_engine: ends the engine that it is given",
    "gpu: runs on at least one GPU",
    "multigpu: runs on at least two GPUs; `-m multigpu` without a target picks vllm-gpu",
    "world_size(n): runs an engine of n ranks",
    "multicast: needs NVLink multicast",
    "criu: needs CRIU",
)

_SESSION: pytest.StashKey[ConformanceSession] = pytest.StashKey()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Register the options; all of them are also reachable through ``nvsnap-conformance run``."""
    group = parser.getgroup("nvsnap", "nvsnap-conformance")
    group.addoption(
        "--nvs-target",
        dest="nvs_target",
        action="append",
        metavar="NAME|FILE",
        help="target under test: a shipped name or a TOML file (environment: NVS_TARGET, comma-separated)",
    )
    group.addoption(
        "--nvs-profile", dest="nvs_profile", metavar="NAME", help="run this profile's clauses only"
    )
    group.addoption(
        "--nvs-tp",
        dest="nvs_tp",
        action="append",
        type=int,
        metavar="N",
        help="restrict the tensor-parallel sizes",
    )
    group.addoption(
        "--nvs-mutant",
        dest="nvs_mutant",
        action="append",
        metavar="NAME|all",
        help="put a shipped known-bad implementation in place of the one under test",
    )
    group.addoption(
        "--nvs-inject",
        dest="nvs_inject",
        metavar="WAY",
        help="how the loader gets into the engine: extension, plugin or sitecustomize; default: the target's",
    )
    group.addoption("--nvs-out", dest="nvs_out", metavar="DIR", help="folder of the run record")
    group.addoption(
        "--nvs-cold",
        dest="nvs_cold",
        action="store_true",
        default=False,
        help="start every engine cold, never from a golden image",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Register markers and fixtures; validate the options where any was given."""
    for marker in MARKERS:
        config.addinivalue_line("markers", marker)
    for name in FIXTURES:
        config.pluginmanager.import_plugin(name)
    config.pluginmanager.register(ReportListener(config), "nvsnap-report-listener")
    given = ("nvs_target", "nvs_profile", "nvs_tp", "nvs_mutant", "nvs_inject", "nvs_out")
    if os.environ.get("NVS_TARGET") or any(config.getoption(name) is not None for name in given):
        conformance(config)


def conformance(config: pytest.Config) -> ConformanceSession:
    """Return the session's conformance state, made on first use.

    Raises ``pytest.UsageError`` for options that cannot be taken, and ends pytest where the record cannot be
    written.
    """
    session = config.stash.get(_SESSION, None)
    if session is None:
        from nvsnap_conformance.errors import NvsnapError, UsageError  # noqa: PLC0415 - light otherwise
        from nvsnap_conformance.session.state import ConformanceSession  # noqa: PLC0415

        try:
            session = ConformanceSession(config)
        except UsageError as error:
            raise pytest.UsageError(str(error)) from error
        except NvsnapError as error:
            pytest.exit(str(error), returncode=int(error.exit_code))
        config.stash[_SESSION] = session
    return session


def _existing(config: pytest.Config) -> ConformanceSession | None:
    return config.stash.get(_SESSION, None)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> object | None:
    """Keep the cases that share an engine on one worker, unless another way was asked for."""
    session = _existing(config)
    if session is None or config.getoption("dist") not in {"load", "loadgroup"}:
        return None
    from nvsnap_conformance.session.scheduling import EngineScheduling  # noqa: PLC0415 - needs pytest-xdist

    selection = session.selection
    return EngineScheduling(config, log, [*selection.engine_arms(), *selection.host_arms()])


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Tell an xdist worker where the controller writes the record."""
    session = _existing(node.config)
    if session is not None:
        node.workerinput["nvs_out"] = str(session.selection.out)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:  # noqa: ARG001 - the hook's arguments by name
    """Take over how much of each clause an xdist worker was to run."""
    session = _existing(node.config)
    if session is not None:
        session.take_extent(getattr(node, "workeroutput", {}))


def pytest_deselected(items: Sequence[pytest.Item]) -> None:
    """Note the cases of the session that ``-k``, ``-m``, ``--deselect`` or another plugin leaves out."""
    session = _existing(items[0].config) if items else None
    if session is not None:
        session.leave_out(items)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Give every case that asks for an arm one item for each arm."""
    if metafunc.definition.get_closest_marker("clause") is None:
        return
    session = conformance(metafunc.config)
    from nvsnap_conformance.session.marks import marks_of  # noqa: PLC0415 - the plugin stays light

    clauses = [str(word) for mark in metafunc.definition.iter_markers("clause") for word in mark.args]
    known = [name for name in clauses if name in session.selection.registry.clauses]
    for name, arms in (
        ("arm", session.selection.engine_arms),
        ("host_arm", session.selection.host_arms),
    ):
        if name in metafunc.fixturenames:
            values = [
                pytest.param(arm, id=arm.id, marks=marks_of(arm, known, session.selection.registry))
                for arm in arms()
            ]
            metafunc.parametrize(name, values, indirect=True, scope="session")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the cases that belong to the session, in the order in which engines can be shared."""
    if any(item.get_closest_marker("clause") for item in items):
        from nvsnap_conformance.session.plan import plan_items  # noqa: PLC0415

        plan_items(conformance(config), config, items)


def pytest_report_header(config: pytest.Config) -> list[str]:
    """Print what is in force: target, sizes, profiles, mutants, the suite's environment variables."""
    session = _existing(config)
    return session.header() if session else []


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Block or skip a case before its engine is started."""
    session = _existing(item.config)
    if session is not None:
        session.before_case(item)


@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, object, object]:
    """Note that the body of a case was run: no case has passed without."""
    if _existing(pyfuncitem.config) is None:
        return (yield)
    from nvsnap_conformance.session.execution import watched  # noqa: PLC0415 - the plugin stays light

    with watched(pyfuncitem):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Judge each phase of a case and put the judgement on its report."""
    report = yield
    session = _existing(item.config)
    if session is not None:
        session.after_phase(item, call, report)
    return report


class ReportListener:
    """Feeds reports, also those of xdist workers, to the controller's session."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Take the case record that a report carries."""
        if hasattr(report, "nvs_conformance"):
            conformance(self.config).take_report(report)


@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> Generator[None]:
    """Close engines, finish the record, and set the exit code, whatever reporters could not write."""
    state = _existing(session.config)
    if state is None:
        return (yield)
    try:
        yield
    except OSError as error:
        state.file_failed(error)
    session.exitstatus = state.finish(exitstatus)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print outcomes by clause and the verdict."""
    state = _existing(config)
    if state is not None:
        state.summary(terminalreporter)
