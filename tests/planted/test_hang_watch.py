"""Watching real ranks: quick when they are stuck, silent when they are not, gone when they are."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from click.testing import CliRunner

from nvsnap_conformance.deadline import Deadline, wait_for
from nvsnap_conformance.errors import EnvironmentFailure, UsageError
from nvsnap_conformance.hang import commands, discover
from nvsnap_conformance.hang.bundle import write_bundle
from nvsnap_conformance.hang.discover import from_ranks
from nvsnap_conformance.hang.progress import Metrics, Poll
from nvsnap_conformance.hang.ranks.client import RankSet
from nvsnap_conformance.hang.verdict import VerdictKind
from nvsnap_conformance.hang.watch import Watch
from tests.planted import synthetic as make
from tests.planted import victims

Fork = Callable[..., RankSet]
HERE = Path(__file__).parent
SECONDS = 30.0


@contextlib.contextmanager
def engine_metrics(ranks: RankSet, *, pending: int = 1) -> Iterator[str]:
    """A metrics page in vLLM's form that counts the steps of these ranks."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            tokens = f'vllm:generation_tokens_total{{engine="0"}} {ranks.steps()}\n'
            self.wfile.write(f"{tokens}vllm:num_requests_running {pending}\n".encode())

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/metrics"
    finally:
        server.shutdown()
        server.server_close()


def test_wedge_is_seen_by_the_engines_own_counter(fork: Fork, tmp_path: Path) -> None:
    ranks = fork(HERE / "stepping_ranks.py", options={"absent": [1]})
    ranks.wait_told("entered", Deadline.after(SECONDS))
    with engine_metrics(ranks) as url, contextlib.closing(Metrics(url)) as source:
        wait_for("steps", lambda: ranks.steps() > 10, Deadline.after(SECONDS))
        watch = Watch(from_ranks(ranks.ranks), tmp_path / "b", metrics=source, stall=0.5, poll=0.1)
        ranks.release("wedge")
        stopped = watch.run(Deadline.after(SECONDS))
    assert stopped.verdict is not None
    assert stopped.verdict.kind is VerdictKind.MISSING_ARRIVAL
    assert stopped.verdict.missing == (1,)
    assert url in stopped.reason
    assert "progress counters stood still" in stopped.verdict.paragraph()
    assert watch.looks == 1


def test_wedge_is_seen_without_a_metrics_page(fork: Fork, tmp_path: Path) -> None:
    """An engine that starts has none: the kernel's counters of its ranks do."""
    ranks = fork("missing_rank", options={"absent": [0]})
    ranks.wait_told("entered", Deadline.after(SECONDS))
    stopped = Watch(from_ranks(ranks.ranks), tmp_path / "b", stall=0.5, poll=0.1).run(Deadline.after(SECONDS))
    assert stopped.verdict is not None
    assert (stopped.verdict.kind, stopped.verdict.missing) == (VerdictKind.MISSING_ARRIVAL, (0,))
    assert "kernel counters" in stopped.reason


def test_steps_cost_no_look(fork: Fork, tmp_path: Path) -> None:
    ranks = fork(HERE / "stepping_ranks.py", options={"absent": []})
    ranks.wait_told("entered", Deadline.after(SECONDS))
    with engine_metrics(ranks) as url, contextlib.closing(Metrics(url)) as source:
        wait_for("steps", lambda: ranks.steps() > 10, Deadline.after(SECONDS))
        watch = Watch(from_ranks(ranks.ranks), tmp_path / "b", metrics=source, stall=1.0, poll=0.1)
        stopped = watch.run(Deadline.after(2.5))
    assert stopped.verdict is None
    assert watch.looks == 0


def test_idle_engine_costs_no_look(fork: Fork, tmp_path: Path) -> None:
    """Nothing is pending: standing counters are no stall."""
    ranks = fork("missing_rank", options={"absent": [0, 1, 2, 3]})
    ranks.wait_told("entered", Deadline.after(SECONDS))
    with engine_metrics(ranks, pending=0) as url, contextlib.closing(Metrics(url)) as source:
        watch = Watch(from_ranks(ranks.ranks), tmp_path / "b", metrics=source, stall=0.2, poll=0.05)
        watch.run(Deadline.after(1.5))
    assert watch.looks == 0


def test_slow_rank_costs_fewer_and_fewer_looks(fork: Fork, tmp_path: Path) -> None:
    ranks = fork("straggler", options={"slow": [2]})
    ranks.wait_told("entered", Deadline.after(SECONDS))
    said: list[str] = []
    with engine_metrics(ranks) as url, contextlib.closing(Metrics(url)) as source:
        watch = Watch(
            from_ranks(ranks.ranks), tmp_path / "b", metrics=source, stall=0.2, poll=0.05, say=said.append
        )
        stopped = watch.run(Deadline.after(10.0))
    assert stopped.verdict is None
    assert watch.looks >= 1
    assert not any("MISSING" in text for text in said)


def test_killed_rank_ends_the_watch_at_once(fork: Fork, tmp_path: Path) -> None:
    ranks = fork("missing_rank", options={"absent": [0, 1, 2, 3]})
    ranks.wait_told("entered", Deadline.after(SECONDS))
    watch = Watch(from_ranks(ranks.ranks), tmp_path / "b", stall=600.0)
    ranks.signal(1, signal.SIGKILL)
    stopped = watch.run(Deadline.after(SECONDS))
    assert stopped.verdict is not None
    assert (stopped.verdict.kind, stopped.verdict.missing) == (VerdictKind.DEAD_RANK, (1,))


def test_engine_that_ends_is_no_death(fork: Fork, tmp_path: Path) -> None:
    ranks = fork("missing_rank")
    ranks.wait_exit(Deadline.after(SECONDS))
    stopped = Watch(from_ranks(ranks.ranks), tmp_path / "b").run(Deadline.after(SECONDS))
    assert stopped.verdict is None
    assert stopped.reason == "the engine has ended"


class Fixed:
    """A source that says what it is told."""

    name = "fixed"

    def __init__(self, polls: Sequence[Poll]) -> None:
        self.polls = list(polls)

    def poll(self) -> Poll | None:
        return self.polls.pop(0) if len(self.polls) > 1 else self.polls[0]


def test_progress_during_a_look_ends_it(fork: Fork, tmp_path: Path) -> None:
    """The step was long, and it is over: no verdict, and no more rounds."""
    ranks = fork("missing_rank", options={"absent": [0]})
    ranks.wait_told("entered", Deadline.after(SECONDS))
    source = Fixed([*[Poll(0.0, 1.0, True)] * 4, Poll(1.0, 2.0, True), Poll(2.0, 3.0, False)])
    watch = Watch(from_ranks(ranks.ranks), tmp_path / "b", metrics=source, stall=0.01, poll=0.05)
    stopped = watch.run(Deadline.after(2.0))
    assert watch.looks == 1
    assert stopped.verdict is None


WATCH = (
    sys.executable,
    "-c",
    "import sys\nfrom nvsnap_conformance.hang import commands\ncommands.watch(sys.argv[1:], 'watch')",
)


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*WATCH, *arguments], capture_output=True, text=True, check=False, timeout=60,
        cwd=HERE.parents[1],
    )  # fmt: skip


def test_command_watches_pids_and_leaves_a_bundle(fork: Fork, tmp_path: Path) -> None:
    ranks = fork("missing_rank", options={"absent": [2]})
    ranks.wait_told("entered", Deadline.after(SECONDS))
    pids = [word for rank in ranks.ranks for word in ("--pid", str(rank.process.pid))]
    done = command(
        *pids, "--stall", "0.5", "--poll", "0.1", "--metrics", "none", "--out", str(tmp_path / "b")
    )
    assert done.returncode == 1, done.stderr
    assert "MISSING_ARRIVAL" in done.stdout
    assert json.loads((tmp_path / "b" / "verdict.json").read_text())["missing"] == [2]
    again = CliRunner().invoke(commands.inspect, [str(tmp_path / "b"), "--format", "json"])
    assert again.exit_code == 1
    assert json.loads(again.stdout) == json.loads((tmp_path / "b" / "verdict.json").read_text())


def test_command_looks_once_at_a_tree(fork: Fork, tmp_path: Path) -> None:
    ranks = fork("missing_rank", options={"absent": [3]})
    ranks.wait_told("entered", Deadline.after(SECONDS))
    done = command("--tree", str(ranks.root.pid), "--once", "--out", str(tmp_path / "b"), "--format", "json")
    assert done.returncode == 1, done.stderr
    data = json.loads(done.stdout)
    assert (data["kind"], data["missing"]) == ("MISSING_ARRIVAL", [3])
    assert any("start order (guess)" in e for e in data["evidence"])


def test_command_ends_quietly_when_nothing_is_stuck(fork: Fork, tmp_path: Path) -> None:
    ranks = fork(HERE / "stepping_ranks.py", options={"absent": []})
    ranks.wait_told("entered", Deadline.after(SECONDS))
    with engine_metrics(ranks) as url:
        done = command(
            "--tree", str(ranks.root.pid), "--metrics", url, "--timeout", "2", "--out", str(tmp_path / "b")
        )
    assert done.returncode == 0, done.stdout
    assert "nothing was stuck" in done.stdout
    assert not (tmp_path / "b").exists()


LATE = """
import subprocess, sys
print("up", flush=True)
sys.stdin.readline()
code = "import signal; signal.pause()"
children = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(2)]
sys.stdin.read()
"""


def test_command_waits_for_an_engine_that_has_no_ranks_yet(tmp_path: Path) -> None:
    with victims.python(LATE) as (one, _):
        options = ["--metrics", "none", "--timeout", "30", "--out", str(tmp_path / "b")]
        watching = subprocess.Popen(
            [*WATCH, "--tree", str(one.pid), *options], stdout=subprocess.PIPE, text=True, cwd=HERE.parents[1]
        )
        with watching:
            assert watching.stdout is not None
            victims.say(one, "go")
            line = watching.stdout.readline()
            watching.kill()
        assert line.startswith("watching 3 processes")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "give either --pid"),
        (["--pid", "1", "--tree", "1"], "give either --pid"),
        (["--pid", str(2**22 - 1)], "no such process"),
        (["--tree", str(2**22 - 1)], "no such process"),
        (["--tree", "1", "--stall", "0"], "not above 0"),
    ],
)
def test_wrong_use_is_refused_before_anything_is_read(arguments: list[str], says: str) -> None:
    result = CliRunner().invoke(commands.watch, arguments)
    assert isinstance(result.exception, UsageError)
    assert says in str(result.exception)


def test_metrics_that_are_no_url_are_refused() -> None:
    with victims.python(victims.SLEEPER) as (one, _):
        result = CliRunner().invoke(commands.watch, ["--pid", str(one.pid), "--metrics", "localhost:80"])
    assert isinstance(result.exception, UsageError)
    assert "is no URL" in str(result.exception)


def test_tree_without_ranks_is_said() -> None:
    with victims.python(victims.SLEEPER) as (one, _):
        assert not [m for m in discover.discover(one) if m.rank is not None]
        result = CliRunner().invoke(commands.watch, ["--tree", str(one.pid), "--timeout", "1"])
    assert isinstance(result.exception, EnvironmentFailure)
    assert "name the ranks in order" in str(result.exception)


def test_inspect_of_too_little_data_is_no_pass(tmp_path: Path) -> None:
    write_bundle(make.bundle({rank: [make.collective("all_reduce")] for rank in range(4)}), tmp_path / "b")
    result = CliRunner().invoke(commands.inspect, [str(tmp_path / "b")])
    assert result.exit_code == 6
    assert result.stdout.startswith("UNKNOWN")


def test_inspect_refuses_what_is_no_bundle(tmp_path: Path) -> None:
    result = CliRunner().invoke(commands.inspect, [str(tmp_path)])
    assert isinstance(result.exception, UsageError)
    assert "holds no hang bundle and no run record" in str(result.exception)
