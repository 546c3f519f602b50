"""The checks over hooks' reports and over stand-ins: each finds its defect, none finds one in good hooks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from nvsnap_conformance.engines.protocol import Completion, RankReply
from nvsnap_conformance.hooks import recapture, released, standins, teardown, threads, unsupported
from nvsnap_conformance.lifecycle import accounting, graphs, report_form
from nvsnap_conformance.outcomes import Outcome

if TYPE_CHECKING:
    from nvsnap_conformance.outcomes import Finding

GOOD = (
    [
        "graph-dropped:cuda-graphs",
        "workspace-prepare:normal",
        "destroy-group:tp:0/cpu",
        "destroy-group:world",
    ],
    ["new-group:tp", "workspace-restore:normal", "memory-restore:normal"],
)


def reply(rank: int, value: Any = None, error: dict[str, str] | None = None) -> RankReply:
    return RankReply(rank, "n", "n", value, error)


def names(found: list[Finding]) -> list[str]:
    return [str(one.signature) for one in found]


def events(*texts: str) -> list[dict[str, str]]:
    return [dict(zip(("what", "name"), text.split(":", 1), strict=True)) for text in texts]


def report(calls: list[str], *, mapped: bool = True, current: bool = True) -> dict[str, Any]:
    workspaces = {"normal": {"mapped": [mapped] * 3, "current": current}}
    return {
        "events": events(*calls),
        "workspaces": workspaces,
        "graphs": 0,
        "all2all": {
            "name": "tp:0/all2all",
            "alive": not calls,
            "there": True,
            "current": True,
            "shared": True,
            "apart": True,
        },
    }


def snapshot(*held: str, identity: int = 1) -> dict[str, Any]:
    return {"resources": {name: {"kind": "x", "live": True, "identity": identity} for name in held}}


def prepared(**outcomes: str) -> dict[str, Any]:
    entries = [{"name": name, "kind": "x", "outcome": outcome} for name, outcome in outcomes.items()]
    return {"state": "prepared", "resources": entries}


def good(ranks: int = 2) -> standins.Observation:
    seen = standins.Observation(ranks)
    first, second = GOOD
    for rank in range(ranks):
        seen.reports.setdefault("before", {})[rank] = report([])
        seen.reports.setdefault("prepared", {})[rank] = report(first, mapped=False)
        seen.reports.setdefault("after", {})[rank] = report(first + second)
    seen.replies["prepare"] = [reply(rank, prepared(a="released")) for rank in range(ranks)]
    seen.replies["restore"] = [reply(rank, {"state": "serving"}) for rank in range(ranks)]
    seen.snapshots["prepared"] = [reply(rank, snapshot()) for rank in range(ranks)]
    return seen


def test_good_hooks_have_no_findings() -> None:
    seen = good()
    for check in (
        standins.check_completed,
        standins.check_order,
        standins.check_rebuild_order,
        standins.check_same_order,
        standins.check_alias_once,
        standins.check_released,
        standins.check_follows_group,
    ):
        assert check(seen) == []


def test_a_thread_without_the_device() -> None:
    assert threads.check_any_thread(good()) == []
    seen = good()
    del seen.reports["after"]
    first, _ = GOOD
    seen.reports["prepared"][1] = report(
        [*first, "no-device:prepare in a thread", "no-device:prepare in a thread"]
    )
    (found,) = threads.check_any_thread(seen)
    assert str(found.signature) == "THREAD:NO_DEVICE"
    assert found.evidence["rank"] == 1


def test_a_cycle_from_fresh_threads_that_fails_or_leaves_something_unmapped() -> None:
    seen = good()
    seen.replies["restore"][0] = reply(0, error={"type": "RuntimeError", "message": "x"})
    assert names(threads.check_any_thread(seen)) == ["CYCLE:RESTORE"]
    seen = good()
    seen.reports["after"][0] = report([], mapped=False)
    assert names(threads.check_any_thread(seen)) == ["RESTORE:UNMAPPED"]


UNANSWERED: list[tuple[str, list[RankReply]]] = [
    ("prepare", []),
    ("restore", []),
    ("prepare", [reply(0, prepared(a="released"))]),
    ("restore", [reply(1, {"state": "serving"})]),
    ("restore", [reply(0, {}), RankReply(1, "n", "m", {})]),
]


@pytest.mark.parametrize(("verb", "replies"), UNANSWERED)
def test_a_cycle_in_which_not_all_ranks_answered(verb: str, replies: list[RankReply]) -> None:
    seen = good()
    seen.replies[verb] = replies
    assert names(standins.check_completed(seen)) == [f"CYCLE:{verb.upper()}"]
    assert names(threads.check_any_thread(seen)) == [f"CYCLE:{verb.upper()}"]


@pytest.mark.parametrize("moment", ["prepared", "after"])
@pytest.mark.parametrize("left", [{}, {0: report([])}, {0: report([]), 1: report([]) | {"workspaces": {}}}])
def test_a_cycle_that_nobody_looked_at(moment: str, left: dict[int, dict[str, Any]]) -> None:
    seen = good()
    seen.reports[moment] = left
    assert names(standins.check_completed(seen)) == ["REPORT:UNOBSERVED"]
    assert names(threads.check_any_thread(seen)) == ["REPORT:UNOBSERVED"]


def test_nothing_that_was_answered_or_seen() -> None:
    for check in (standins.check_completed, threads.check_any_thread):
        assert names(check(standins.Observation(2))) == ["CYCLE:PREPARE"]
    never = standins.check_failure_told(standins.Observation(2), rank=0, what="destroy-group")
    assert names(never) == ["CYCLE:PREPARE"]
    assert set(names(standins.check_backends_agree(standins.Observation(2)))) == {
        "REPORT:UNOBSERVED",
        "BACKENDS:ACCEPTED",
    }


def idle(**outcomes: str) -> standins.Observation:
    """Give a cycle in which nothing was released, with what its reports say."""
    seen = good()
    kinds = {"cuda-graphs": "cuda-graphs", "flashinfer/normal": "flashinfer-workspace", "tp:0/shm": "other"}
    resources = {name: {"kind": kind, "live": True} for name, kind in kinds.items()}
    seen.snapshots["before"] = [reply(rank, {"resources": resources}) for rank in (0, 1)]
    seen.replies["prepare"] = [reply(rank, prepared(**outcomes)) for rank in (0, 1)]
    seen.reports["prepared"] = {rank: report([]) for rank in (0, 1)}
    return seen


def test_hooks_that_release_nothing() -> None:
    nothing = ["RELEASE:NOTHING"] * 2
    assert released.check_anything_released(good()) == []
    for outcomes in ({}, {"made/up": "unsupported"}, {"cuda-graphs": "unsupported"}):
        seen = idle(**outcomes)
        assert names(released.check_anything_released(seen)) == nothing
        assert names(standins.check_failure_told(seen, rank=0, what="no-such-call")) == nothing
    for outcome in ("absent", "released", "failed"):
        every = dict.fromkeys(("cuda-graphs", "flashinfer/normal"), outcome)
        assert names(released.check_anything_released(idle(**every))) == nothing


@pytest.mark.parametrize("outcome", ["unsupported", "kept"])
def test_hooks_that_release_nothing_and_say_so_of_each(outcome: str) -> None:
    every = dict.fromkeys(("cuda-graphs", "flashinfer/normal"), outcome)
    seen = idle(**every)
    assert released.check_anything_released(seen) == []
    # What the observer did not see cannot be left truly.
    seen.snapshots["before"] = []
    assert names(released.check_anything_released(seen)) == ["RELEASE:NOTHING"] * 2


def test_what_counts_as_released() -> None:
    seen = idle()
    seen.reports["prepared"][0] = report(["workspace-prepare:normal"])
    seen.reports["prepared"][1]["all2all"]["alive"] = False
    assert released.check_anything_released(seen) == []
    seen = idle()
    seen.replies["prepare"] = [reply(0, error={"type": "x", "message": "no"}), failed(1)]
    assert released.check_anything_released(seen) == []


def refused(message: str = "BadOption: NCCL 22809 has no ncclCommSuspend") -> standins.Observation:
    seen = standins.Observation(2)
    error = {"type": "BadOption", "message": message, "traceback": "ncclCommSuspend"}
    seen.replies["prepare"] = [reply(rank, error=error) for rank in (0, 1)]
    for moment in ("before", "prepared"):
        seen.snapshots[moment] = [reply(rank, snapshot("world/default")) for rank in (0, 1)]
        seen.reports[moment] = {rank: report([]) for rank in (0, 1)}
    return seen


def test_a_teardown_that_is_refused_by_name() -> None:
    assert teardown.check_refused(refused()) == []
    assert names(teardown.check_refused(refused("no"))) == ["TEARDOWN:UNNAMED"] * 2


@pytest.mark.parametrize("answer", [[reply(1, prepared(a="released"))], []])
def test_a_teardown_that_one_rank_takes_for_done(answer: list[RankReply]) -> None:
    seen = refused()
    seen.replies["prepare"][1:] = answer
    seen.reports["prepared"][1] = report(GOOD[0])
    (found,) = teardown.check_refused(seen)
    assert str(found.signature) == "TEARDOWN:ACCEPTED"
    assert "rank 1" in found.message


def test_a_refusal_that_had_begun() -> None:
    seen = refused()
    seen.reports["prepared"][0] = report(["graph-dropped:g"])
    assert names(teardown.check_refused(seen)) == ["TEARDOWN:TOUCHED"]
    seen = refused()
    seen.snapshots["prepared"][1] = reply(1, snapshot("world/default", identity=2))
    assert names(teardown.check_refused(seen)) == ["TEARDOWN:TOUCHED"]


@pytest.mark.parametrize("moment", ["before", "prepared"])
@pytest.mark.parametrize("left", [[], [reply(0, snapshot("world/default"))], [reply(0, None), reply(1, {})]])
def test_a_refusal_at_which_nobody_looked(moment: str, left: list[RankReply]) -> None:
    seen = refused()
    seen.snapshots[moment] = left
    assert names(teardown.check_refused(seen)) == ["REPORT:UNOBSERVED"]
    seen.snapshots.clear()
    assert names(teardown.check_refused(seen)) == ["REPORT:UNOBSERVED"]


def test_a_refusal_whose_stand_ins_nobody_saw() -> None:
    seen = refused()
    del seen.reports["prepared"][1]
    assert names(teardown.check_refused(seen)) == ["REPORT:UNOBSERVED"]


def test_a_refusal_that_never_comes_or_goes_through_the_rpc() -> None:
    seen = refused()
    seen.silent = "prepare: the call"
    assert names(teardown.check_refused(seen)) == ["TEARDOWN:UNBOUNDED"]
    seen.silent, seen.raised = None, "prepare: HTTP 500"
    assert names(teardown.check_refused(seen)) == ["TEARDOWN:RAISED"]


ANSWER = Completion("p", (1, 2), (0.0, 0.0), "x")


def told_of(outcome: str) -> dict[str, Any]:
    entry = {"name": "flashinfer/normal", "kind": "flashinfer-workspace", "outcome": outcome}
    return {"state": "prepared", "resources": [entry]}


def cannot(**fields: Any) -> unsupported.Observation:
    cycle = good()
    cycle.replies["prepare"] = [reply(rank, told_of("unsupported")) for rank in (0, 1)]
    return unsupported.Observation(cycle, **({"before": ANSWER, "after": ANSWER} | fields))


def test_what_cannot_be_torn_down_is_told_or_fails_by_name() -> None:
    seen = cannot()
    assert unsupported.check_told(seen) + unsupported.check_serves_on(seen) == []
    named = {"type": "NotImplementedError", "message": "torch symmetric memory"}
    failed = {"state": "failed", "problem": "flashinfer/normal: a workspace"}
    seen.cycle.replies["prepare"] = [reply(0, error=named), reply(1, failed)]
    del seen.cycle.reports["after"]
    seen.cycle.reports["prepared"] = {rank: report([]) for rank in (0, 1)}
    assert unsupported.check_told(seen) + unsupported.check_serves_on(seen) == []
    seen.cycle.replies["prepare"][0] = reply(0, error={"type": "RuntimeError", "message": "no"})
    assert names(unsupported.check_told(seen)) == ["UNSUPPORTED:UNNAMED"]


@pytest.mark.parametrize("answer", [[reply(1, told_of("absent"))], [reply(1)], []])
def test_what_cannot_be_torn_down_and_is_passed_over(answer: list[RankReply]) -> None:
    seen = cannot()
    seen.cycle.replies["prepare"][1:] = answer
    (found,) = unsupported.check_told(seen)
    assert str(found.signature) == "UNSUPPORTED:UNTOLD"
    assert "rank 1" in found.message


@pytest.mark.parametrize(
    ("problem", "named"),
    [
        ("NotImplementedError: no", True),
        ("RuntimeError: it lies in torch's Symmetric Memory", True),
        ("rank 1: flashinfer/normal: no", True),
        ("a FlashInfer workspace cannot go", True),
        ("KeyError: 'workspace'", False),
        ("could not get workspace lock of dir /workspace", False),
        ("no such file: /opt/flashinfer/normal", False),
        ("no such file: flashinfer/normal/lock", False),
        ("cannot import vendor.flashinfer/normal", False),
    ],
)
def test_which_error_names_what_cannot_be_torn_down(problem: str, named: bool) -> None:
    seen = cannot()
    told = {"state": "failed", "problem": problem}
    seen.cycle.replies["prepare"] = [reply(rank, told) for rank in (0, 1)]
    assert names(unsupported.check_told(seen)) == ([] if named else ["UNSUPPORTED:UNNAMED"] * 2)


@pytest.mark.parametrize(
    "change", [{"name": "made/up"}, {"name": "flashinfer/quant"}, {"kind": "process-group"}]
)
def test_another_resource_that_is_called_unsupported(change: dict[str, str]) -> None:
    seen = cannot()
    other = told_of("unsupported")
    other["resources"][0] |= change
    seen.cycle.replies["prepare"] = [reply(rank, other) for rank in (0, 1)]
    assert names(unsupported.check_told(seen)) == ["UNSUPPORTED:UNTOLD"] * 2


def test_workspaces_that_nobody_saw_afterwards() -> None:
    seen = cannot()
    seen.cycle.reports = {"after": {0: report([]) | {"workspaces": {}}, 1: report([])}}
    assert names(unsupported.check_serves_on(seen)) == ["REPORT:UNOBSERVED"]
    unseen: list[dict[str, standins.Reports]] = [
        {},
        {"prepared": {}},
        {"after": {}, "prepared": {0: report([]), 1: report([])}},
    ]
    for reports in unseen:
        seen.cycle.reports = reports
        assert names(unsupported.check_serves_on(seen)) == ["REPORT:UNOBSERVED"]


def test_an_engine_that_does_not_serve_on() -> None:
    assert names(unsupported.check_serves_on(cannot(after=None, failure="no answer"))) == [
        "UNSUPPORTED:NOT_SERVING"
    ]
    other = Completion("p", (1, 3), (0.0, 0.0), "y")
    assert names(unsupported.check_serves_on(cannot(after=other))) == ["ORACLE:TOKENS"]


def test_a_workspace_that_is_not_as_it_was() -> None:
    seen = cannot()
    seen.cycle.reports["after"] = {0: report([], mapped=False), 1: report([], current=False)}
    assert names(unsupported.check_serves_on(seen)) == ["UNSUPPORTED:WORKSPACE"] * 2
    seen.cycle.renewed = True
    assert names(unsupported.check_serves_on(seen)) == ["UNSUPPORTED:WORKSPACE"]


BOTH = ["ORDER:GROUP_BEFORE_GRAPH", "ORDER:GROUP_BEFORE_WORKSPACE"]


@pytest.mark.parametrize(
    ("calls", "signatures"),
    [
        (["destroy-group:a", "graph-dropped:g", "workspace-prepare:n"], BOTH),
        (["workspace-prepare:n", "destroy-group:a", "graph-dropped:g"], ["ORDER:GROUP_BEFORE_GRAPH"]),
        (["graph-dropped:g", "destroy-group:a"], ["ORDER:GROUP_BEFORE_WORKSPACE"]),
        (["workspace-prepare:n"], []),
    ],
)
def test_order_of_teardown(calls: list[str], signatures: list[str]) -> None:
    seen = good()
    seen.reports["prepared"][1] = report(calls)
    assert names(standins.check_order(seen)) == signatures


LATE = ["ORDER:WORKSPACE_BEFORE_GROUP"]


@pytest.mark.parametrize(
    ("calls", "signatures"),
    [
        (["destroy-group:a", "workspace-restore:n", "new-group:a"], LATE),
        (["destroy-group:a", "new-group:a", "workspace-restore:n", "new-group:b"], LATE),
        (["destroy-group:a", "workspace-restore:n"], LATE),
        (["destroy-group:a", "new-group:a", "workspace-restore:n"], []),
        (["workspace-restore:n"], []),
    ],
)
def test_order_of_rebuilding(calls: list[str], signatures: list[str]) -> None:
    seen = good()
    seen.reports["after"][1] = report(calls)
    assert names(standins.check_rebuild_order(seen)) == signatures


@pytest.mark.parametrize("what", ["destroy-group", "new-group"])
def test_ranks_in_different_orders(what: str) -> None:
    seen = good()
    for rank, order in enumerate((["a", "b"], ["b", "a"])):
        seen.reports["after"][rank] = report([f"{what}:{name}" for name in order])
    assert names(standins.check_same_order(seen)) == ["ORDER:RANKS_DIFFER"]


@pytest.mark.parametrize("what", ["workspace-prepare", "workspace-restore"])
def test_an_alias_visited_twice(what: str) -> None:
    seen = good()
    seen.reports["after"][0] = report([f"{what}:normal"] * 2)
    assert names(standins.check_alias_once(seen)) == ["ALIAS:TWICE"]


def test_a_workspace_that_does_not_come_back() -> None:
    seen = good()
    seen.reports["after"][0] = report([], mapped=False)
    seen.reports["after"][1] = report([], current=False)
    assert names(standins.check_follows_group(seen)) == ["RESTORE:UNMAPPED", "RESTORE:STALE_GROUP"]


@pytest.mark.parametrize(
    ("moment", "field", "value", "signature"),
    [
        ("prepared", "alive", True, "EXCHANGE:STILL_ALIVE"),
        ("after", "there", False, "EXCHANGE:MISSING"),
        ("after", "shared", False, "EXCHANGE:NOT_HANDED_OUT"),
        ("after", "current", False, "EXCHANGE:STALE_GROUP"),
        ("after", "apart", False, "EXCHANGE:MIXED_UP"),
    ],
)
def test_a_manager_that_did_not_go_or_come_back(moment: str, field: str, value: bool, signature: str) -> None:
    seen = good()
    seen.replies["prepare"] = [reply(rank, prepared(**{"tp:0/all2all": "released"})) for rank in (0, 1)]
    assert standins.check_exchange(seen) == []
    seen.reports[moment][1]["all2all"][field] = value
    assert names(standins.check_exchange(seen)) == [signature]


def test_a_manager_that_stays_over_a_group_made_anew_by_others() -> None:
    seen = good()
    seen.replies["prepare"] = [reply(rank, prepared(**{"tp:0/all2all": "unsupported"})) for rank in (0, 1)]
    seen.reports["prepared"][0]["all2all"]["alive"] = True
    seen.reports["after"][0]["all2all"]["current"] = False
    seen.renewed = True
    assert standins.check_exchange(seen) == []


def test_a_workspace_left_mapped_behind_a_success() -> None:
    seen = good()
    seen.snapshots["prepared"][1] = reply(1, snapshot("flashinfer/normal"))
    assert names(standins.check_released(seen)) == ["RELEASE:UNACCOUNTED"]


def failed(rank: int) -> RankReply:
    return reply(rank, {"state": "failed", "problem": "x"})


@pytest.mark.parametrize(
    ("change", "signatures"),
    [
        ({}, []),
        ({"replies": {"prepare": [failed(0), reply(1, prepared(a="released"))]}}, ["FAILURE:HIDDEN"]),
        ({"replies": {"prepare": [failed(0), failed(1)]}}, []),
        ({"replies": {"prepare": [failed(0)]}}, ["FAILURE:HIDDEN"]),
        ({"silent": "prepare: no answer"}, ["FAILURE:UNBOUNDED"]),
        ({"raised": "prepare: HTTP 500"}, ["FAILURE:RAISED"]),
    ],
)
def test_a_failure_is_told_by_all(change: dict[str, Any], signatures: list[str]) -> None:
    seen = good()
    told = standins.check_failure_told
    if not change:
        # Never reached, and the cycle succeeded.
        assert told(seen, rank=0, what="no-such-call") == []
        seen.replies["prepare"] = [failed(0), failed(1)]
        assert names(told(seen, rank=0, what="no-such-call")) == ["CYCLE:PREPARE"]
        return
    seen.replies.pop("restore")
    for name, value in change.items():
        setattr(seen, name, value)
    assert names(told(seen, rank=0, what="workspace-prepare")) == signatures


def test_two_backends() -> None:
    seen = good()
    assert names(standins.check_backends_agree(seen)) == ["BACKENDS:ACCEPTED", *["BACKENDS:TOUCHED"] * 2]
    refused = {"type": "PeerRefused", "message": "x", "traceback": ""}
    seen.replies["prepare"] = [reply(rank, error=refused) for rank in (0, 1)]
    for rank in (0, 1):
        seen.reports["prepared"][rank] = report([])
    assert standins.check_backends_agree(seen) == []
    seen.silent = "prepare: no answer"
    assert names(standins.check_backends_agree(seen)) == ["BACKENDS:UNBOUNDED"]


@pytest.mark.parametrize(
    ("outcomes", "held", "signatures"),
    [
        ({"a": "released"}, [], []),
        ({"a": "unsupported"}, ["a"], []),
        ({}, ["a", "b"], ["RELEASE:UNACCOUNTED"]),
        ({"a": "absent"}, ["a"], ["RELEASE:UNACCOUNTED"]),
        # This lie is another check's.
        ({"a": "released"}, ["a"], []),
    ],
)
def test_nothing_is_left_untold(outcomes: dict[str, str], held: list[str], signatures: list[str]) -> None:
    found = accounting.check_accounted([reply(0, prepared(**outcomes))], [reply(0, snapshot(*held))])
    assert names(found) == signatures


def test_nothing_is_judged_where_prepare_refused_or_nobody_looked() -> None:
    refused = reply(0, error={"type": "x", "message": "x", "traceback": ""})
    assert accounting.check_accounted([refused], [reply(0, snapshot("a"))]) == []
    assert names(accounting.check_accounted([reply(0, None)], [])) == ["REPORT:UNOBSERVED"]


@pytest.mark.parametrize(
    ("outcome", "identities", "signatures"),
    [
        ("released", (1, 2), []),
        ("released", (1, 1), ["RESTORE:NOT_REBUILT"]),
        ("unsupported", (1, 1), []),
        ("unsupported", (1, 2), ["RESTORE:REPLACED"]),
    ],
)
def test_what_was_released_is_another_object(
    outcome: str, identities: tuple[int, int], signatures: list[str]
) -> None:
    before, after = (snapshot("a", identity=number) for number in identities)
    found = accounting.check_fresh([reply(0, prepared(a=outcome))], [reply(0, before)], [reply(0, after)])
    assert names(found) == signatures


@pytest.mark.parametrize(("kind", "signatures"), [("cuda-graphs", []), ("process-group", ["REPORT:OUTCOME"])])
def test_only_graphs_are_deferred(kind: str, signatures: list[str]) -> None:
    value = {"resources": [{"name": "a", "kind": kind, "outcome": "deferred"}]}
    found = accounting.check_outcomes([reply(0, value)], verb="restore", allowed=accounting.RESTORE_OUTCOMES)
    assert names(found) == signatures


@pytest.mark.parametrize(
    ("before", "after", "signatures"),
    [
        ({"registered": True}, {"registered": True}, []),
        ({"registered": True}, {"registered": False}, ["RESTORE:STALE_HANDLE"]),
        # A stateless group is unknown to torch from the start.
        ({"registered": False}, {"registered": False}, []),
        ({"stale_group": False}, {"stale_group": True}, ["RESTORE:STALE_HANDLE"]),
    ],
)
def test_a_stale_handle(before: dict[str, bool], after: dict[str, bool], signatures: list[str]) -> None:
    def seen(more: dict[str, bool]) -> list[RankReply]:
        return [reply(0, {"resources": {"a": {"kind": "x", "live": True} | more}})]

    assert names(accounting.check_rebuilt(seen(before), seen(after))) == signatures


def test_a_destroyed_group_that_somebody_kept() -> None:
    kept = {"loose/undefinedNone": {"kind": "process-group", "live": True, "registered": False}}
    found = accounting.check_rebuilt(
        [reply(0, snapshot("a"))], [reply(0, {"resources": snapshot("a")["resources"] | kept})]
    )
    assert names(found) == ["RESTORE:STALE_HANDLE"]


def recaptured() -> recapture.Observation:
    tokens = Completion("p", (1, 2), (0.0, 0.0), "")
    return recapture.Observation(
        1,
        held=True,
        replies={"prepare": [reply(0, prepared(a="released"))], "restore": [reply(0, {"state": "serving"})]},
        snapshots={"after": [reply(0, snapshot(recapture.GRAPHS))]},
        answers={"before": tokens, "eager": tokens, "captured": tokens},
        reports={0: {"wanted": 3, "captured": 3, "captures": [1, 1, 1], "served": 9, "early": 0}},
    )


def test_graphs_that_come_back_have_no_findings() -> None:
    assert recapture.check_come_back(recaptured()) == []


def test_graphs_that_never_were_are_unknown() -> None:
    none = recaptured()
    none.held = False
    (found,) = recapture.check_come_back(none)
    assert (str(found.signature), found.outcome) == ("GRAPHS:NONE", Outcome.UNKNOWN)


def test_graphs_that_do_not_come_back() -> None:
    gone, some, early, silent = (recaptured() for _ in range(4))
    gone.snapshots["after"] = [reply(0, snapshot())]
    assert some.reports is not None
    assert early.reports is not None
    some.reports[0]["captured"] = 2
    early.reports[0]["early"] = 4
    silent.silent = "no answer"
    assert names(recapture.check_come_back(gone)) == ["GRAPHS:NOT_BACK"]
    assert names(recapture.check_come_back(some)) == ["GRAPHS:NOT_BACK"]
    assert names(recapture.check_come_back(early)) == ["GRAPHS:DISPATCHED_EARLY"]
    assert names(recapture.check_come_back(silent)) == ["GRAPHS:NO_ANSWER"]


def test_a_wrong_answer_after_recapture_and_a_failed_restore() -> None:
    wrong, failed = recaptured(), recaptured()
    wrong.answers["captured"] = Completion("p", (1, 3), (0.0, 0.0), "")
    eager = recaptured()
    eager.answers["eager"] = wrong.answers["captured"]
    assert names(recapture.check_come_back(eager)) == ["ORACLE:TOKENS"]
    eager.reports = None
    assert recapture.check_come_back(eager) == []
    eager.answers["between"] = eager.answers["before"]
    assert names(recapture.check_come_back(eager)) == ["ORACLE:TOKENS"]
    failed.replies["restore"] = [reply(0, error={"type": "NotPrepared", "message": ""})]
    assert names(recapture.check_come_back(wrong)) == ["ORACLE:TOKENS"]
    assert names(recapture.check_come_back(failed)) == ["CYCLE:RESTORE"]


def test_deferred_graphs_may_be_missing_after_restore() -> None:
    before, after = [reply(0, snapshot("cuda-graphs", "tp:0/cpu"))], [reply(0, snapshot("tp:0/cpu"))]
    told = [reply(0, prepared(**{"cuda-graphs": "deferred"}))]
    assert names(accounting.check_rebuilt(before, after)) == ["RESTORE:MISSING"]
    assert accounting.check_rebuilt(before, after, told) == []


def test_what_is_kept_on_request_is_told_and_is_no_release() -> None:
    told = [reply(0, prepared(a="kept"))]
    assert accounting.check_accounted(told, [reply(0, snapshot("a"))]) == []
    assert accounting.check_released(told, [reply(0, snapshot("a"))]) == []
    assert accounting.check_outcomes(told, verb="prepare", allowed=accounting.PREPARE_OUTCOMES) == []


ENTRY = {"name": "a", "kind": "x", "outcome": "released", "detail": "", "seconds": 0.1}


@pytest.mark.parametrize(
    ("change", "signatures"),
    [
        ({}, []),
        ({"state": "serving"}, ["REPORT:STATE"]),
        ({"state": None}, ["REPORT:STATE"]),
        ({"state": ["prepared"]}, ["REPORT:STATE"]),
        ({"problem": "nothing works"}, ["REPORT:PROBLEM"]),
        ({"problem": ""}, ["REPORT:PROBLEM"]),
        ({"resources": [ENTRY, ENTRY]}, ["REPORT:TWICE"]),
        ({"resources": [ENTRY, "b"]}, ["REPORT:FORM"]),
        *(({"resources": [ENTRY | {key: ["x"]}]}, ["REPORT:FORM"]) for key in ENTRY),
        *(({"resources": [{k: v for k, v in ENTRY.items() if k != key}]}, ["REPORT:FORM"]) for key in ENTRY),
        ({"resources": [ENTRY | {"seconds": True}]}, ["REPORT:FORM"]),
        ({"resources": [ENTRY | {"seconds": -1}]}, ["REPORT:FORM"]),
        ({"resources": [ENTRY | {"kind": ""}]}, ["REPORT:FORM"]),
        # Without resources, or a report, the outcomes' check speaks.
        ({"resources": None}, []),
    ],
)
def test_the_form_of_a_report(change: dict[str, Any], signatures: list[str]) -> None:
    told = {"state": "prepared", "problem": None, "resources": [ENTRY]} | change
    found = report_form.check_form([reply(0, told)], verb="prepare", reached="prepared")
    assert names(found) == signatures


@pytest.mark.parametrize("key", ["state", "problem"])
def test_a_report_without_its_key(key: str) -> None:
    told = {"state": "prepared", "problem": None, "resources": [ENTRY]}
    del told[key]
    found = report_form.check_form([reply(0, told)], verb="prepare", reached="prepared")
    assert names(found) == [f"REPORT:{key.upper()}"]


def said(before: Any = "serving", prepared: Any = "prepared", after: Any = "serving") -> dict[str, Any]:
    told = {"before": before, "prepared": prepared, "after": after}
    return {moment: [reply(0, {"state": state})] for moment, state in told.items()}


@pytest.mark.parametrize(
    ("statuses", "signatures"),
    [
        (said(), []),
        (said(prepared="serving"), ["STATUS:STATE"]),
        (said(before="prepared", after="prepared"), ["STATUS:STATE"] * 2),
        (said(after="failed"), ["STATUS:STATE"]),
        (said("bananas"), ["STATUS:STATE"]),
        (said(["serving"]), ["STATUS:FORM"]),
        (said() | {"after": [reply(0, None)]}, ["STATUS:FORM"]),
        (said() | {"after": [reply(0, error={"type": "E", "message": "x"})]}, ["STATUS:ERROR"]),
        (said() | {"after": []}, ["STATUS:NO_ANSWER"]),
        ({}, ["STATUS:NO_ANSWER"]),
    ],
)
def test_status_is_true(statuses: dict[str, Any], signatures: list[str]) -> None:
    assert names(report_form.check_status(statuses)) == signatures


def test_status_of_a_rank_that_is_missing() -> None:
    told = {"state": "prepared", "problem": None, "resources": [ENTRY]}
    rebuilt = told | {"state": "serving", "resources": [ENTRY | {"outcome": "rebuilt"}]}
    prepare, rebuild = ([reply(rank, value) for rank in (0, 1)] for value in (told, rebuilt))
    statuses = {moment: replies * 2 for moment, replies in said().items()}
    found = accounting.check_reports(prepare, rebuild, statuses, ranks=2)
    assert names(found) == ["REPORT:RANK_MISSING", "REPORT:RANK_TWICE"] * 3


@pytest.mark.parametrize("odd", [["released"], {"released": 1}, None, 3, True])
def test_outcomes_of_any_json_are_findings(odd: Any) -> None:
    told = [reply(0, {"resources": [{"name": "a", "kind": "x", "outcome": odd}]})]
    found = accounting.check_outcomes(told, verb="prepare", allowed=accounting.PREPARE_OUTCOMES)
    assert names(found) == ["REPORT:OUTCOME"]
    held = [reply(0, snapshot("a"))]
    for judge in (accounting.check_accounted, accounting.check_released, accounting.check_honest):
        judge(told, held)
    accounting.check_fresh(told, held, held)
    assert not graphs.deferred(told)
    assert not graphs.deferred([reply(0, {"resources": odd})])
    assert not graphs.captured([reply(0, {"graphs": {"state": odd}})])
