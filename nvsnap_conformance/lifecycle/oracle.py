"""The token oracle: greedy tokens and log probabilities, compared with the same engine before.

HTTP 200 and a plausible text prove nothing: nvcf's end-to-end script greps ``"choices"``, and vLLM's
snapshot compares one token. The oracle takes 32 tokens of several prompts, one of them long, so that a
corrupted key/value cache or weight shows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nvsnap_conformance.engines.protocol import Completion, EngineHandle
from nvsnap_conformance.outcomes import Finding, finding

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nvsnap_conformance.deadline import Deadline

MAX_TOKENS = 32

LOGPROB_TOLERANCE = 1e-5
"""Absolute bound in nats. vLLM 0.32 on CPU in float32 was measured bit-identical before and after; the
bound leaves room for a reduction in another order (1e-6 between TP=1 and TP=2, and between AVX2 and
AVX-512), and none for a changed weight."""

PROMPTS: tuple[str, ...] = (
    "The capital of France is",
    "one two three four five",
    "checkpoint and restore of a tensor parallel inference engine",
    # Long enough to fill several key/value blocks of 16 tokens.
    " ".join(f"item {number} of the list" for number in range(1, 8)),
)


@dataclass(frozen=True)
class Answers:
    """What an engine answered to :data:`PROMPTS` (or a target's own), in their order."""

    completions: tuple[Completion, ...]

    def as_json(self) -> list[dict[str, Any]]:
        """Return the answers as JSON values."""
        return [
            {"prompt": c.prompt, "tokens": list(c.tokens), "logprobs": list(c.logprobs), "text": c.text}
            for c in self.completions
        ]

    @classmethod
    def from_json(cls, raw: list[dict[str, Any]]) -> Answers:
        """Read what :meth:`as_json` wrote."""
        return cls(
            tuple(Completion(c["prompt"], tuple(c["tokens"]), tuple(c["logprobs"]), c["text"]) for c in raw)
        )


def take_answers(engine: EngineHandle, deadline: Deadline, *, prompts: Sequence[str] = PROMPTS) -> Answers:
    """Ask every prompt once, one after the other, so that batching cannot change a reduction's order."""
    completions: list[Completion] = []
    for prompt in prompts:
        completions += engine.generate([prompt], max_tokens=MAX_TOKENS, deadline=deadline)
    return Answers(tuple(completions))


def check_answers(reference: Answers, observed: Answers | None, *, what: str) -> list[Finding]:
    """Compare ``observed`` with ``reference``: equal tokens, log probabilities within the bound.

    Findings: ``ORACLE:MISSING`` (no answers), ``ORACLE:SHAPE`` (other prompts or too few tokens),
    ``ORACLE:TOKENS``, ``ORACLE:LOGPROBS`` (also for a value that is not finite).
    """
    if observed is None or not observed.completions:
        return [finding(f"{what}: the engine gave no answers", "ORACLE:MISSING")]
    found: list[Finding] = []
    if [c.prompt for c in reference.completions] != [c.prompt for c in observed.completions]:
        return [finding(f"{what}: the answers are to other prompts than the reference's", "ORACLE:SHAPE")]
    for before, after in zip(reference.completions, observed.completions, strict=True):
        found += _check_one(before, after, what)
    return found


def _check_one(before: Completion, after: Completion, what: str) -> list[Finding]:
    label = f"{what}: prompt {before.prompt[:40]!r}"
    lengths = {len(before.tokens), len(before.logprobs), len(after.tokens), len(after.logprobs)}
    if lengths != {MAX_TOKENS}:
        return [
            finding(
                f"{label}: {MAX_TOKENS} tokens with log probabilities expected, "
                f"found lengths {sorted(lengths)}",
                "ORACLE:SHAPE",
            )
        ]
    for index, (left, right) in enumerate(zip(before.tokens, after.tokens, strict=True)):
        if left != right:
            return [
                finding(
                    f"{label}: token {index} is {right}, was {left} (text now {after.text[:60]!r}, "
                    f"was {before.text[:60]!r})",
                    "ORACLE:TOKENS",
                    index=index,
                )
            ]
    differences = [abs(left - right) for left, right in zip(before.logprobs, after.logprobs, strict=True)]
    if not all(math.isfinite(value) for value in (*before.logprobs, *after.logprobs)):
        return [finding(f"{label}: a log probability is not finite", "ORACLE:LOGPROBS")]
    if max(differences) > LOGPROB_TOLERANCE:
        index = differences.index(max(differences))
        return [
            finding(
                f"{label}: log probability of token {index} moved by {differences[index]:.3g} nats "
                f"(bound {LOGPROB_TOLERANCE:g})",
                "ORACLE:LOGPROBS",
                index=index,
            )
        ]
    return []


def check_text(expected: Sequence[tuple[str, str]], observed: Sequence[Completion]) -> list[Finding]:
    """Check a target's text oracle: each completion's text must contain what the target expects.

    Findings: ``ORACLE:TEXT``, ``ORACLE:MISSING``.
    """
    by_prompt = {completion.prompt: completion.text for completion in observed}
    found: list[Finding] = []
    for prompt, text in expected:
        if prompt not in by_prompt:
            found.append(finding(f"no answer to the text oracle's prompt {prompt[:40]!r}", "ORACLE:MISSING"))
        elif text not in by_prompt[prompt]:
            found.append(
                finding(
                    f"prompt {prompt[:40]!r}: {text!r} is not in the answer {by_prompt[prompt][:80]!r}",
                    "ORACLE:TEXT",
                )
            )
    return found
