"""The probe `tokens` on a template that is written by hand: every rule once, and the faults it must tell apart."""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from parity.probes.adapters.builtin import Builtin
from parity.probes.base import ProbeAnswer
from parity.probes.query import query_probes
from parity.probes.subject import ExaminedAdapter
from parity.probes.trainer.tokens import TALKS, _runs
from tests.faults.wiring import builtin

BOS, START, END, LINE = 1, 2, 3, 4
ROLES = {"system": 5, "user": 6, "assistant": 7}
OPEN, CLOSE = 8, 9

Ids = list[int]


def _text(text: str) -> Ids:
    return [100 + ord(character) for character in text]


class Mine(Builtin):
    """BOS, then <start> role content <end> <line> a turn; an answer begins with its thoughts' two marks."""

    first: Ids = [BOS]
    marks: Ids = [OPEN, CLOSE]
    """In front of a plain answer in training."""
    asked: Ids = [OPEN, CLOSE]
    """And at the end of the request."""
    trained_from, trained_to = 0, 0
    """Tokens by which the mask is moved at both ends."""

    def _turns(self, messages: Sequence[Mapping[str, str]]) -> tuple[Ids, list[bool]]:
        ids, mask = list(self.first), [False] * len(self.first)
        for message in messages:
            head = [START, ROLES[message["role"]]]
            if message["role"] != "assistant":
                made = [*head, *_text(message["content"]), END, LINE]
                ids, mask = ids + made, mask + [False] * len(made)
                continue
            thoughts, _, content = message["content"].rpartition("</think>")
            thoughts = thoughts.removeprefix("<think>")
            marks = [OPEN] if thoughts else self.marks
            body = [*(_text(thoughts) + [CLOSE] if thoughts else []), *_text(content), END]
            made = [*head, *marks, *body, LINE]
            begin = len(head) + len(marks)
            on = [
                begin + self.trained_from <= n < begin + len(body) + self.trained_to for n in range(len(made))
            ]
            ids, mask = ids + made, mask + on
        return ids, mask

    def tokenize(self, messages: Sequence[Mapping[str, str]]) -> tuple[Sequence[int], Sequence[bool]]:
        return self._turns(messages)

    def request(self, messages: Sequence[Mapping[str, str]], thinking: bool | None = None) -> Sequence[int]:
        right = Mine._turns(Mine.__new__(Mine), messages)[0]
        return [*right, START, ROLES["assistant"], *([OPEN] if thinking else self.asked)]


def _answer(**attributes: Any) -> ProbeAnswer:
    adapter = builtin()
    adapter.__class__ = type("Changed", (Mine,), attributes)
    return query_probes(ExaminedAdapter(adapter), only=["tokens"])[0][1]


def test_right() -> None:
    answer = _answer()
    assert [finding.outcome for finding in answer.findings] == ["pass"], answer.findings
    assert answer.statement is not None
    assert dict(answer.statement.facts) == {"tokens.right": 8, "tokens.asked": 8, "tokens.thoughts": "kept"}


@pytest.mark.parametrize(
    ("attributes", "fault", "words"),
    [
        ({"first": [BOS, BOS]}, "tokens-bos", "training has one token more at its beginning, 1"),
        ({"first": []}, "tokens-bos", "the request has one token more at its beginning, 1"),
        ({"marks": []}, "tokens-thinking", "in 7 of 8 conversations, first in 'one turn'"),
        ({"asked": []}, "tokens-thinking", "the template puts 8, 9"),
        ({"trained_from": 1}, "tokens-mask", "the answer begins at token"),
        ({"trained_from": -2}, "tokens-mask", "training on it at token"),
        ({"trained_to": -1}, "tokens-end", "token 3, 4 ends the turn and is not trained on"),
        ({"trained_to": 1}, "tokens-mask", "the turn ends with token"),
        ({"trained_to": -100}, "tokens-mask", "the last answer is not trained on"),
    ],
)
def test_faults_by_hand(attributes: dict[str, Any], fault: str, words: str) -> None:
    first = _answer(**attributes).findings[0]
    assert first.outcome == "fail" and first.fault == fault, first.sentence
    assert words in first.sentence, first.sentence


def test_a_server_that_cannot_be_told_to_think_is_not_asked_about_thoughts() -> None:
    def request(self: Mine, messages: Sequence[Mapping[str, str]]) -> Sequence[int]:
        return Mine.request(self, messages)

    answer = _answer(request=request)
    assert answer.findings[0].outcome == "pass"
    assert (
        "7 of 7 conversations" in answer.findings[0].sentence and "not asked" in answer.findings[0].sentence
    )


def test_a_mask_of_another_length_is_the_adapters_fault() -> None:
    def tokenize(self: Mine, messages: Sequence[Mapping[str, str]]) -> tuple[Ids, list[bool]]:
        ids, mask = self._turns(messages)
        return ids, mask[:-1]

    finding = _answer(tokenize=tokenize).findings[0]
    assert finding.outcome == "error" and "tokenize: expected a mask of" in finding.sentence


def test_answers_of_every_talk_differ_at_both_ends() -> None:
    for talk in TALKS:
        one, two = talk.answers
        assert one[0] != two[0] and one[-1] != two[-1]


def test_runs() -> None:
    assert _runs([]) == [] and _runs([False, False]) == []
    assert _runs([True, True, False, True]) == [(0, 2), (3, 4)]
