"""The token oracle: what it lets pass, and that nothing else does."""

from __future__ import annotations

import dataclasses
import math

import pytest

from nvsnap_conformance.engines.protocol import Completion
from nvsnap_conformance.lifecycle.oracle import (
    LOGPROB_TOLERANCE,
    MAX_TOKENS,
    PROMPTS,
    Answers,
    check_answers,
    check_text,
)


def answers() -> Answers:
    return Answers(
        tuple(
            Completion(
                prompt,
                tuple(range(number, number + MAX_TOKENS)),
                tuple(-0.1 * index for index in range(MAX_TOKENS)),
                f"text {number}",
            )
            for number, prompt in enumerate(PROMPTS)
        )
    )


def changed(index: int, **fields: object) -> Answers:
    completions = list(answers().completions)
    completions[index] = dataclasses.replace(completions[index], **fields)  # type: ignore[arg-type]
    return Answers(tuple(completions))


def signatures(observed: Answers | None) -> list[str]:
    return [str(finding.signature) for finding in check_answers(answers(), observed, what="test")]


def test_equal_answers_hold_and_survive_json() -> None:
    assert signatures(Answers.from_json(answers().as_json())) == []


@pytest.mark.parametrize("position", [0, MAX_TOKENS - 1])
@pytest.mark.parametrize("index", range(len(PROMPTS)))
def test_one_other_token_anywhere_is_seen(index: int, position: int) -> None:
    tokens = list(answers().completions[index].tokens)
    tokens[position] += 1
    assert signatures(changed(index, tokens=tuple(tokens))) == ["ORACLE:TOKENS"]


@pytest.mark.parametrize(("delta", "expected"), [(0.9, []), (1.5, ["ORACLE:LOGPROBS"])])
def test_log_probabilities_have_a_bound(delta: float, expected: list[str]) -> None:
    logprobs = list(answers().completions[1].logprobs)
    logprobs[7] += delta * LOGPROB_TOLERANCE
    assert signatures(changed(1, logprobs=tuple(logprobs))) == expected


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_not_finite_is_seen(value: float) -> None:
    logprobs = (value, *answers().completions[0].logprobs[1:])
    assert signatures(changed(0, logprobs=logprobs)) == ["ORACLE:LOGPROBS"]


def test_too_few_tokens_are_no_match() -> None:
    first = answers().completions[0]
    assert signatures(changed(0, tokens=first.tokens[:1], logprobs=first.logprobs[:1])) == ["ORACLE:SHAPE"]


@pytest.mark.parametrize("nothing", [None, Answers(())])
def test_no_answers_are_no_pass(nothing: Answers | None) -> None:
    assert signatures(nothing) == ["ORACLE:MISSING"]


def test_answers_to_other_prompts_are_no_match() -> None:
    assert signatures(Answers(answers().completions[:-1])) == ["ORACLE:SHAPE"]


def test_text_oracle() -> None:
    observed = answers().completions
    assert check_text([(PROMPTS[0], "text 0")], observed) == []
    (wrong,) = check_text([(PROMPTS[0], "Paris")], observed)
    assert str(wrong.signature) == "ORACLE:TEXT"
    (missing,) = check_text([("another prompt", "text")], observed)
    assert str(missing.signature) == "ORACLE:MISSING"
