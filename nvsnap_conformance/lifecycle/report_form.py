"""Whether reports of hooks, and the state that they tell, are of the form that docs/hooks.md fixes."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from nvsnap_conformance.outcomes import Finding, finding

if TYPE_CHECKING:
    from collections.abc import Mapping

    from nvsnap_conformance.engines.protocol import RankReply

STATES = {"before": "serving", "prepared": "prepared", "after": "serving"}
"""The state in which hooks are at each moment of a cycle."""


class Entry(BaseModel):
    """One resource in a report; ``seconds`` is how long it took. A report may say more."""

    model_config = ConfigDict(strict=True, extra="ignore")

    name: str = Field(min_length=1)
    kind: str = Field(min_length=1)
    outcome: str
    detail: str
    seconds: float = Field(ge=0, allow_inf_nan=False)


def check_form(replies: list[RankReply], *, verb: str, reached: str) -> list[Finding]:
    """Check that each report names the state ``reached``, no problem, and each resource once, in full.

    A reply without any resource is not judged here: ``accounting.check_outcomes`` tells it.

    Findings: ``REPORT:STATE``, ``REPORT:PROBLEM`` (one is told, or the key is missing, beside a success),
    ``REPORT:TWICE``, ``REPORT:FORM`` (an entry without one of its keys, or with a value of another type).
    """
    found: list[Finding] = []
    for reply in replies:
        report = reply.value
        if not isinstance(report, dict) or not isinstance(report.get("resources"), list):
            continue
        what = f"{verb}: rank {reply.rank}"
        if report.get("state") != reached:
            told = f"names the state {report['state']!r}" if "state" in report else "names no state"
            found.append(_of(reply, f"{what} {told} and was to reach {reached!r}", "REPORT:STATE"))
        if "problem" not in report or report["problem"] is not None:
            told = (
                f"tells the problem {report['problem']!r}" if "problem" in report else "has no key 'problem'"
            )
            found.append(_of(reply, f"{what} {told} beside a success (it is null there)", "REPORT:PROBLEM"))
        names = Counter(str(entry.get("name")) for entry in report["resources"] if isinstance(entry, dict))
        found += [
            _of(reply, f"{what}: {name} is in the report {count} times", "REPORT:TWICE")
            for name, count in names.items()
            if count > 1
        ]
        for index, entry in enumerate(report["resources"]):
            if wrong := _wrong(entry):
                name = entry.get("name") if isinstance(entry, dict) else entry
                found.append(_of(reply, f"{what}: resource {index} ({name!r}): {wrong}", "REPORT:FORM"))
    return found


def check_status(statuses: Mapping[str, list[RankReply]]) -> list[Finding]:
    """Check that ``status`` answers on each rank with the state of the moment (:data:`STATES`).

    ``statuses`` has the moments that the cycle came to. Findings: ``STATUS:NO_ANSWER``, ``STATUS:ERROR`` (an
    error value), ``STATUS:FORM`` (no table with a state), ``STATUS:STATE`` (another state than the hooks are
    in).
    """
    if not statuses:
        return [finding("nobody asked the hooks for their status", "STATUS:NO_ANSWER")]
    found: list[Finding] = []
    for moment, replies in statuses.items():
        if not replies:
            found.append(finding(f"status ({moment}): no answer", "STATUS:NO_ANSWER"))
        for reply in replies:
            what = f"status ({moment}): rank {reply.rank}"
            value = reply.value
            state = value.get("state") if isinstance(value, dict) else None
            if reply.error is not None:
                told = f"{reply.error.get('type')}: {reply.error.get('message')}"
                found.append(_of(reply, f"{what} answers with an error: {told}", "STATUS:ERROR"))
            elif not isinstance(state, str):
                found.append(_of(reply, f"{what} tells no state: {value!r}", "STATUS:FORM"))
            elif state != STATES[moment]:
                found.append(_of(reply, f"{what} tells {state!r}, not {STATES[moment]!r}", "STATUS:STATE"))
    return found


def _wrong(entry: Any) -> str:
    """Return what is wrong with a report's entry, by key; empty where nothing is."""
    try:
        Entry.model_validate(entry)
    except ValidationError as error:
        return ", ".join(
            f"{'.'.join(map(str, each['loc'])) or 'it'}: {each['msg']}" for each in error.errors()
        )
    return ""


def _of(reply: RankReply, what: str, signature: str) -> Finding:
    return finding(what, signature, rank=reply.rank)
