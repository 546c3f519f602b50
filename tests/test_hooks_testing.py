"""Vendors' hooks over ranks without an engine: a good class holds, each defect breaks its own clause."""

from __future__ import annotations

import functools
import math
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from nvsnap_conformance.deadline import Deadline, wait_for
from nvsnap_conformance.engines.protocol import HooksSpec, RequestFailed
from nvsnap_conformance.errors import DeadlineExceeded, UsageError
from nvsnap_conformance.lifecycle.driver import OBSERVER
from nvsnap_conformance.testing import RankGroup, check_hooks

VENDOR = '''
"""Hooks of a vendor: good ones, and one subclass for each defect."""
import threading

KNOWN = ("0.32.", "0.33.")


class Refused(Exception):
    pass


class Good:
    def __init__(self, worker, options):
        self.worker, self.options, self.state = worker, options, "serving"

    def prepare(self):
        self.require("serving")
        report = [self.entry(r, "released" if r.releasable else "unsupported", self.release)
                  for r in self.worker.resources.values()]
        self.state = "prepared"
        return {"state": self.state, "problem": None, "resources": report}

    def restore(self):
        self.require("prepared")
        report = [self.entry(r, "rebuilt" if r.releasable else "unsupported", self.rebuild)
                  for r in self.worker.resources.values()]
        self.state = "serving"
        return {"state": self.state, "problem": None, "resources": report}

    def status(self):
        return {"state": self.state}

    def release(self, resource):
        if resource.releasable:
            resource.release()

    def rebuild(self, resource):
        if resource.releasable:
            resource.rebuild()

    def entry(self, resource, outcome, act):
        act(resource)
        names = {"name": resource.name, "kind": resource.kind}
        return names | {"outcome": outcome, "detail": "", "seconds": 0.1}

    def require(self, state):
        import vllm
        if not vllm.__version__.startswith(KNOWN):
            raise Refused(f"vLLM {vllm.__version__}")
        if self.state != state:
            raise Refused(self.state)


class NoGate(Good):
    def require(self, state):
        if self.state != state:
            raise Refused(self.state)


class NoPairs(Good):
    def require(self, state):
        import vllm
        if not vllm.__version__.startswith(KNOWN):
            raise Refused(vllm.__version__)
        if self.state != state:
            raise Skip

    def prepare(self):
        try:
            return super().prepare()
        except Skip:
            return {"state": self.state, "problem": None, "resources": []}

    def restore(self):
        try:
            return super().restore()
        except Skip:
            return {"state": self.state, "problem": None, "resources": []}


class Skip(Exception):
    pass


class LeavesGroup(Good):
    def release(self, resource):
        if resource.name != "tp:0/cpu":
            super().release(resource)

    def rebuild(self, resource):
        if resource.name != "tp:0/cpu":
            super().rebuild(resource)


class SaysNothing(Good):
    def prepare(self):
        super().prepare()

    def restore(self):
        super().restore()


class OmitsQueue(LeavesGroup):
    def prepare(self):
        return self.without(super().prepare())

    def restore(self):
        return self.without(super().restore())

    def without(self, report):
        report["resources"] = [r for r in report["resources"] if r["name"] != "tp:0/cpu"]
        return report


class ForgetsGroup(Good):
    def rebuild(self, resource):
        if resource.name != "tp:0/cpu":
            super().rebuild(resource)


class Hangs(Good):
    def prepare(self):
        if self.worker.rank:
            threading.Event().wait()
        return super().prepare()


class NoStatus(Good):
    status = None


class Bananas(Good):
    def status(self):
        return {"state": "bananas"}


class OddOutcome(Good):
    def entry(self, resource, outcome, act):
        return super().entry(resource, outcome, act) | {"outcome": [{"released": True}]}


class RefusesAll(Good):
    def require(self, state):
        raise Refused("no version is known")


class Dies(Good):
    def prepare(self):
        import os
        os._exit(3)
'''

CLAUSES = {
    "HOOKS-PREPARE-RESTORE-PAIR",
    "HOOKS-ERROR-IS-VALUE",
    "HOOKS-VERSION-GATE",
    "HOOKS-ALL-RANKS-REPORT",
    "HOOKS-STATUS-TRUE",
    "HOOKS-OUTCOME-HONEST",
    "HOOKS-PREPARE-RELEASES",
    "HOOKS-SUCCESS-MEANS-RELEASED",
    "HOOKS-RESTORE-REBUILDS",
}


@pytest.fixture
def vendor(tmp_path: Path) -> Path:
    (tmp_path / "vendor_hooks.py").write_text(VENDOR)
    return tmp_path


@pytest.mark.parametrize("ranks", [1, 3])
def test_good_hooks_hold(vendor: Path, ranks: int) -> None:
    report = check_hooks("vendor_hooks:Good", path=vendor, ranks=ranks)
    assert report.conformant, str(report)
    assert set(report.findings) == CLAUSES
    assert str(report).count("holds") == len(CLAUSES)


@pytest.mark.parametrize(
    ("name", "broken"),
    [
        ("NoGate", {"HOOKS-VERSION-GATE": "PAIR:ACCEPTED", "HOOKS-ERROR-IS-VALUE": "HOOKS:FAILURE_HIDDEN"}),
        ("NoPairs", {"HOOKS-PREPARE-RESTORE-PAIR": "PAIR:ACCEPTED"}),
        ("LeavesGroup", {"HOOKS-PREPARE-RELEASES": "RELEASE:STILL_LIVE"}),
        (
            "SaysNothing",
            {"HOOKS-ALL-RANKS-REPORT": "REPORT:EMPTY", "HOOKS-OUTCOME-HONEST": "REPORT:UNLISTED"},
        ),
        ("OmitsQueue", {"HOOKS-SUCCESS-MEANS-RELEASED": "RELEASE:UNACCOUNTED"}),
        ("NoStatus", {"HOOKS-STATUS-TRUE": "STATUS:ERROR"}),
        ("Bananas", {"HOOKS-STATUS-TRUE": "STATUS:STATE"}),
        ("RefusesAll", {"HOOKS-VERSION-GATE": "GATE:KNOWN_REFUSED"}),
        ("ForgetsGroup", {"HOOKS-RESTORE-REBUILDS": "RESTORE:MISSING"}),
        ("OddOutcome", {"HOOKS-ALL-RANKS-REPORT": "REPORT:OUTCOME"}),
    ],
)
def test_each_defect_breaks_its_clause(vendor: Path, name: str, broken: dict[str, str]) -> None:
    report = check_hooks(f"vendor_hooks:{name}", path=vendor)
    assert not report.conformant
    for clause, signature in broken.items():
        assert signature in {str(one.signature) for one in report.findings[clause]}, str(report)
    assert "broken" in str(report)


@pytest.mark.parametrize(("name", "signature"), [("Hangs", "HOOKS:SILENT"), ("Dies", "HOOKS:RAISED")])
def test_hooks_that_never_answer_are_bounded(vendor: Path, name: str, signature: str) -> None:
    report = check_hooks(f"vendor_hooks:{name}", path=vendor, seconds=1.0)
    for clause, found in report.findings.items():
        if clause not in ("HOOKS-VERSION-GATE", "HOOKS-ERROR-IS-VALUE"):
            assert [str(one.signature) for one in found][:1] in ([signature], ["CYCLE:PREPARE"]), clause


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"ranks": 0}, "0 ranks"),
        ({"ranks": -1}, "-1 ranks"),
        ({"ranks": 1.5}, "1.5 ranks"),
        ({"seconds": 0}, "seconds=0"),
        ({"seconds": -1.0}, "seconds=-1"),
        ({"seconds": math.nan}, "seconds=nan"),
        ({"seconds": math.inf}, "seconds=inf"),
        ({"python": Path("/nonexistent")}, "/nonexistent cannot be started"),
        ({"python": Path("/")}, "cannot be started"),
        ({"options": {"a": {1}}}, "not JSON"),
        ({"options": {"a": math.nan}}, "not JSON"),
        ({"options": {(1, 2): 3}}, "not JSON"),
        ({"path": Path("nopath")}, "nopath is no folder"),
        ({"worker": "nocolon"}, "the worker 'nocolon' is not of the form"),
        ({"implementation": "nocolon"}, "'nocolon' is not of the form"),
        ({"implementation": "nomod:Hooks"}, "No module named 'nomod'"),
        ({"implementation": "vendor_hooks:Missing"}, "no attribute 'Missing'"),
        ({"implementation": "vendor_hooks:KNOWN"}, "not a class"),
        ({"implementation": "ends:Hooks"}, "SystemExit: 3"),
        ({"implementation": "fails:Hooks"}, "ZeroDivisionError"),
        ({"observer": HooksSpec("nomod:Observer")}, "the observer nomod:Observer sees nothing on rank 0"),
        ({"observer": HooksSpec("vendor_hooks:Good")}, "the observer vendor_hooks:Good sees nothing"),
        ({"observer": HooksSpec("nocolon")}, "the observer 'nocolon' is not of the form"),
    ],
)
def test_what_cannot_be_judged_is_refused(vendor: Path, given: dict[str, Any], words: str) -> None:
    (vendor / "ends.py").write_text("raise SystemExit(3)\n")
    (vendor / "fails.py").write_text("1 / 0\n")
    asked: dict[str, Any] = {"implementation": "vendor_hooks:Good", "path": vendor, "ranks": 1} | given
    with pytest.raises(UsageError, match=re.escape(words)):
        check_hooks(asked.pop("implementation"), **asked)


def test_a_group_answers_by_rank_and_leaves_nothing(vendor: Path) -> None:
    good = HooksSpec("vendor_hooks:Good", vendor)
    with RankGroup(2) as group:
        deadline = Deadline.after(30)
        replies = group.rpc("status", hooks=good, deadline=deadline)
        assert [(r.rank, r.in_step, r.value) for r in replies] == [
            (0, True, {"state": "serving"}),
            (1, True, {"state": "serving"}),
        ]
        held = group.rpc("snapshot", hooks=OBSERVER, deadline=deadline)
        assert "tp:0/device" in held[1].value["resources"]
        with pytest.raises(DeadlineExceeded, match=r"ranks \[1\]"):
            group.rpc("prepare", hooks=HooksSpec("vendor_hooks:Hangs", vendor), deadline=Deadline.after(0.2))
        pids = group.pids
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_ranks_end_with_their_owner(vendor: Path, tmp_path: Path) -> None:
    """Also in the middle of a call that never ends."""
    import subprocess

    code = (
        "import os, sys, threading; from pathlib import Path\n"
        "from nvsnap_conformance.testing import RankGroup\n"
        "from nvsnap_conformance.engines.protocol import HooksSpec\n"
        "from nvsnap_conformance.deadline import Deadline\n"
        "group = RankGroup(2)\n"
        "print(*group.pids, flush=True)\n"
        "spec = HooksSpec('vendor_hooks:Hangs', Path(sys.argv[1]))\n"
        "try: group.rpc('prepare', hooks=spec, deadline=Deadline.after(0.3))\n"
        "except Exception: os.kill(os.getpid(), 9)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(vendor)], capture_output=True, text=True, check=False
    )
    assert done.returncode == -9, done.stderr
    for pid in map(int, done.stdout.split()):
        wait_for(f"rank {pid} to end", functools.partial(_gone, pid), Deadline.after(10))


def _gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    # Nobody may be there to reap it.
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"


def test_a_worker_that_cannot_be_made_is_told() -> None:
    with pytest.raises(UsageError, match=r"no\.such:Worker"):
        RankGroup(1, worker="no.such:Worker")


def test_a_dead_rank_is_named(vendor: Path) -> None:
    with RankGroup(2) as group, pytest.raises(RequestFailed, match=r"ranks \[0, 1\] have ended"):
        group.rpc("prepare", hooks=HooksSpec("vendor_hooks:Dies", vendor), deadline=Deadline.after(20))
