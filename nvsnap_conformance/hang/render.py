"""A verdict as text and as JSON."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING, Any

from nvsnap_conformance.hang.collectives import bare_name
from nvsnap_conformance.hang.merge import Group, Node, View, span

if TYPE_CHECKING:
    from nvsnap_conformance.hang.verdict import Verdict


MOST_SPLITS = 24
"""Splits below one another that are shown; a tree that splits deeper says nothing to a reader."""


def paragraph(verdict: Verdict) -> str:
    """Return the verdict as one paragraph: what, who, where, and the evidence."""
    evidence = f" Evidence: {'; '.join(verdict.evidence)}." if verdict.evidence else ""
    return f"{verdict.kind.value} (confidence {verdict.confidence.value}): {verdict.summary}{evidence}"


def to_json(verdict: Verdict) -> dict[str, Any]:
    """Return the verdict as JSON values."""
    return {
        "kind": verdict.kind.value,
        "signature": str(verdict.signature),
        "outcome": verdict.outcome.value,
        "hang": verdict.is_hang,
        "confidence": verdict.confidence.value,
        "summary": verdict.summary,
        "missing": list(verdict.missing),
        "split": [
            {"function": frame.name, "file": frame.file, "line": frame.line} for frame in verdict.split
        ],
        "evidence": list(verdict.evidence),
        "rounds": verdict.rounds,
        "classes": [_class(group) for group in verdict.groups],
        "fronts": [_view(view) for view in verdict.fronts],
        "tree": _nodes(verdict.root, verdict.rounds),
    }


def _class(group: Group) -> dict[str, Any]:
    return {
        "ranks": list(group.ranks),
        "condition": group.condition.value,
        "where": group.describe(),
        "entry": group.position.entry.id if group.position and group.position.entry else None,
        "moving": group.condition.name == "MOVING",
        "members": [_view(one) for one in group.views],
    }


def _view(view: View) -> dict[str, Any]:
    return {
        "rank": view.member.rank,
        "pid": view.member.pid,
        "title": view.member.title,
        "condition": view.condition.value,
        "where": view.describe(),
        "state": view.state,
        "kernel": view.kernel,
        "rounds": view.rounds,
        "readable": view.readable,
        "torn": view.torn,
        "cpu_per_second": round(view.activity.cpu, 3),
        "problems": list(view.problems),
    }


def tree(verdict: Verdict, *, width: int) -> str:
    """Return classes, fronts and the space-time prefix tree as text.

    A line of the tree is a call; a chain of calls that all the same ranks made is one line with its length.
    ``[ranks]`` stands where the set of ranks changes, with the rounds where not all of them apply.
    """
    lines = [*textwrap.wrap(paragraph(verdict), width), ""]
    for group in verdict.groups:
        mark = "~" if group.condition.name == "MOVING" else "="
        lines += _wrapped(f"{mark} ranks {span(group.ranks)}: {group.summary()}", width)
    for view in verdict.fronts:
        lines += _wrapped(f"  {view.member.title or view.label}: {view.summary()}", width)
    if verdict.root.children:
        lines.append("")
        _branch(verdict.root, 0, lines, width, verdict.rounds)
    return "\n".join(lines)


def _wrapped(text: str, width: int) -> list[str]:
    indent = text[: len(text) - len(text.lstrip())]
    return textwrap.wrap(text.lstrip(), width, initial_indent=indent, subsequent_indent="    ")


def _chains(node: Node) -> list[list[Node]]:
    """Return the branches below ``node``, each as the chain of calls that the same ranks made."""
    chains = []
    for child in sorted(node.children.values(), key=lambda n: (-len(n.seen), min(n.seen, default=0))):
        chain = [child]
        while len(chain[-1].children) == 1:
            following = next(iter(chain[-1].children.values()))
            if following.seen != child.seen:
                break
            chain.append(following)
        chains.append(chain)
    return chains


def _nodes(node: Node, rounds: int, depth: int = 0) -> list[dict[str, Any]]:
    if depth >= MOST_SPLITS:
        return []
    return [
        {
            "ranks": _who(chain[0], rounds),
            "calls": [_call(one) for one in chain],
            "children": _nodes(chain[-1], rounds, depth + 1),
        }
        for chain in _chains(node)
    ]


def _branch(node: Node, depth: int, lines: list[str], width: int, rounds: int) -> None:
    indent = "  " * depth
    if depth >= MOST_SPLITS:
        lines.append(f"{indent}...")
        return
    for chain in _chains(node):
        calls = [_call(chain[0])]
        if len(chain) > 3:
            calls.append(f"({len(chain) - 3} more)")
        calls += [_call(one) for one in chain[max(1, len(chain) - 2) :]]
        text = f"[{_who(chain[0], rounds)}] {' > '.join(calls)}"
        lines += textwrap.wrap(text, width, initial_indent=indent, subsequent_indent=indent + "    ")
        _branch(chain[-1], depth + 1, lines, width, rounds)


def _who(node: Node, rounds: int) -> str:
    everywhere = (1 << rounds) - 1
    full = [rank for rank, mask in node.seen.items() if mask == everywhere]
    partly: dict[int, list[int]] = {}
    for rank, mask in node.seen.items():
        if mask != everywhere:
            partly.setdefault(mask, []).append(rank)
    parts = [span(full)] if full else []
    for mask, ranks in sorted(partly.items()):
        where = span(i for i in range(rounds) if mask >> i & 1)
        parts.append(f"{span(ranks)} in round {where}")
    return "; ".join(parts)


def _call(node: Node) -> str:
    if node.frame is None:
        return f"<{node.operation}>"
    return f"{bare_name(node.frame.name)} {node.frame.file}:{node.frame.line}"
