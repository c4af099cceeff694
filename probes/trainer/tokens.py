"""Same text, same ids?

Built-in conversations (one turn and several, with a system message, with an empty one, with thoughts, with characters
outside ASCII, with spaces at the edges) are given to the training data's path (`tokenize`) and, without their last
turn, to the server's (`request`). Exact: the training ids must begin with the request's ids; what is trained on must
begin where the request ends and take in the whole answer and the token that ends the turn, and nothing else but
earlier answers. Where the answer begins and ends is found by what moves: the same conversation with another answer
differs only between the two.

Thoughts may be kept (then the request that thinks must fit) or dropped from the data; a plain conversation must fit
what a server forms for a client that does not choose. Where `request` has no `thinking`, thoughts are not examined.

Cost: milliseconds. Finds: z-lab/dflash#133 (thinking-mode template), double BOS, special tokens that were cut into
characters, templates with a default system message. Faults: the `tokens` rows of `parity.probes.deviations`.
"""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from parity.probes.answers import FoundDeviation, make_probe_answer
from parity.probes.base import ProbeAnswer
from parity.probes.subject import AdapterError, ExaminedAdapter
from parity.reports.record import Value

RequestMessage = Mapping[str, str]
QUOTED_IDS = 3
"""Ids quoted on each side of a difference."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TemplateCase:
    """A conversation that ends with the assistant, and another answer to it."""

    name: str
    turns: tuple[tuple[str, str], ...]
    """(role, content) without the last answer."""
    answers: tuple[str, str] = ("blue, then 12", "no")
    """Different in their first and in their last character."""
    thoughts: str = ""
    """What the assistant thinks before its answer."""

    def messages(self, answer: int = 0) -> list[RequestMessage]:
        """The whole conversation."""
        content = self.answers[answer]
        if self.thoughts:
            content = f"<think>{self.thoughts}</think>{content}"
        return [*self.history, {"role": "assistant", "content": content}]

    @property
    def history(self) -> list[RequestMessage]:
        """Without the last answer."""
        return [{"role": role, "content": content} for role, content in self.turns]

    @property
    def earlier(self) -> list[int]:
        """Places of the assistant's turns before the last."""
        return [place for place, (role, _) in enumerate(self.turns) if role == "assistant"]


TALKS = (
    TemplateCase(name="one turn", turns=(("user", "what is 3+4?"),)),
    TemplateCase(
        name="a system message", turns=(("system", "answer in one word."), ("user", "which colour?"))
    ),
    TemplateCase(name="an empty system message", turns=(("system", ""), ("user", "which colour?"))),
    TemplateCase(
        name="three turns",
        turns=(
            ("user", "first"),
            ("assistant", "one"),
            ("user", "second"),
            ("assistant", "two"),
            ("user", "third"),
        ),
    ),
    TemplateCase(name="thoughts", turns=(("user", "12*3=?"),), thoughts="10*3=30, 2*3=6"),
    TemplateCase(
        name="outside ascii", turns=(("user", "na\u00efve \u4f60\u597d \U0001f600 e\u0301 \u00bd?"),)
    ),
    TemplateCase(name="spaces at the edges", turns=(("user", "  two lines \n\n of text  "),)),
    TemplateCase(name="text like a control token", turns=(("user", "say </s> and [inst] and <eos>"),)),
)


TEXTS = ("outside ascii", "spaces at the edges", "text like a control token")
"""Conversations whose text is what is hard about them."""


class TokensProbe:
    """Training ids against request ids, talk by talk."""

    name = "tokens"

    def run(self, subject: ExaminedAdapter) -> ProbeAnswer:
        """One finding a fault, each reported with the first talk that shows it."""
        # Every talk by both paths.
        says = "thinking" in inspect.signature(subject.adapter.request).parameters
        read = [TokenizedTalk.of(subject, talk) for talk in TALKS if says or not talk.thoughts]
        tail = _tail([each.request for each in read if not each.talk.thoughts])
        found = {each.talk.name: each.faults(tail) for each in read}
        # A text that differs in ordinary talks too is a matter of the template, not of hard characters.
        grouped: dict[str, list[tuple[str, str, int]]] = {}
        texts = {talk for talk, faults in found.items() if any(name == "tokens-text" for name, *_ in faults)}
        another = bool(texts) and not texts <= set(TEXTS)
        for talk, faults in found.items():
            for name, words, size in faults:
                if another and name in ("tokens-text", "tokens-thinking"):
                    name = "tokens-template"  # what differs elsewhere is no matter of how an answer begins
                grouped.setdefault(name, []).append((talk, words, size))
        # One finding a name, and the counts of what is right.
        told = [
            FoundDeviation(
                name,
                f"in {len(some)} of {len(read)} conversations, first in '{some[0][0]}': {some[0][1]}",
                {"conversations": len(some), "tokens": some[0][2]},
            )
            for name, some in grouped.items()
        ]
        right = sum(not faults for faults in found.values())
        prompt, trained = sum(len(each.request) for each in read), sum(sum(each.mask) for each in read)
        thoughts = next((each.thoughts for each in read if each.talk.thoughts), "not asked")
        words = (
            f"{right} of {len(read)} conversations have the server's ids ({prompt} of their prompts) and train on"
            f" answers with their ends alone ({trained} tokens); thoughts are {thoughts}"
        )
        facts: dict[str, Value] = {
            "tokens.right": right,
            "tokens.asked": len(read),
            "tokens.thoughts": thoughts,
        }
        return make_probe_answer(self.name, words, told, facts=facts)


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenizedTalk:
    """One talk by both paths."""

    talk: TemplateCase
    ids: tuple[int, ...]
    mask: tuple[bool, ...]
    other: tuple[int, ...]
    """Ids with the other answer."""
    request: tuple[int, ...]
    before: tuple[tuple[int, ...], ...]
    """Requests before each earlier answer."""
    thoughts: str
    """kept or dropped, of a talk that has some."""

    @classmethod
    def of(cls, subject: ExaminedAdapter, talk: TemplateCase) -> "TokenizedTalk":
        """Raises Missing."""
        adapter = subject.adapter
        with subject.guard_adapter_call("tokenize"):
            ids, mask = adapter.tokenize(talk.messages())
            other = adapter.tokenize(talk.messages(1))[0]
            plain = adapter.tokenize(replace(talk, thoughts="").messages())[0]
        kept = list(plain) != list(ids)
        with subject.guard_adapter_call("request"):
            if talk.thoughts and kept:
                request = adapter.request(talk.history, thinking=True)  # type: ignore[call-arg]
            else:
                request = adapter.request(talk.history)
            before = [adapter.request(talk.history[:place]) for place in talk.earlier]
        if len(ids) != len(mask):
            raise AdapterError("tokenize", f"a mask of {len(ids)}", f"{len(mask)}")
        return cls(
            talk=talk,
            ids=tuple(ids),
            mask=tuple(bool(flag) for flag in mask),
            other=tuple(other),
            request=tuple(request),
            before=tuple(tuple(each) for each in before),
            thoughts="kept" if kept else "dropped",
        )

    def faults(self, tail: int) -> list[tuple[str, str, int]]:
        """What is wrong with the talk.

        Args:
            tail: tokens that every request ends with.

        Returns:
            (name of the fault, words, a number of tokens) of each.
        """
        shared = _common(self.ids, self.request)
        return self._mask() if shared == len(self.request) else [self._prompt(shared, tail)]

    def _prompt(self, shared: int, tail: int) -> tuple[str, str, int]:
        """Why the prompt's ids differ from token `shared` on."""
        ids, request = self.ids, self.request
        there = (
            f"token {shared} is {_quote_ids(ids, shared)} in training and {_quote_ids(request, shared)} in "
            f"the request"
        )
        sides = (("training", ids, request), ("the request", request, ids))
        for name, longer, shorter in sides:
            length = min(len(longer) - 1, len(shorter), len(request) - 1)
            if longer[1 : 1 + length] == shorter[:length]:
                return "tokens-bos", f"{name} has one token more at its beginning, {longer[0]}", 1
        for name, longer, shorter in sides:
            absent = set(shorter) - set(longer)
            if shared == 0 and absent and len(longer) > len(shorter) + QUOTED_IDS:
                return "tokens-cut", f"{len(absent)} ids occur nowhere in {name}; {there}", len(absent)
        if any(len(each) - tail < shared <= len(each) for each in (request, *self.before)):
            return "tokens-thinking", f"the request ends otherwise: {there}", len(request) - shared
        return "tokens-text", there, shared

    def _mask(self) -> list[tuple[str, str, int]]:
        """Whether exactly the answers and the ends of their turns are trained on."""
        # Where the answer begins and ends, found by the same talk with another one; runs of trained tokens.
        begin, first = len(self.request), _common(self.ids, self.other)
        end = len(self.ids) - _common(self.ids[::-1], self.other[::-1])
        runs = _runs(self.mask)
        last = [run for run in runs if run[1] > begin]
        starts = {len(each) for each in self.before if self.ids[: len(each)] == each}
        # Earlier answers may be trained on, whole.
        found = []
        for start, stop in (run for run in runs if run[1] <= begin):
            if start not in starts or self.ids[stop - 1] != self.ids[end]:
                words = (
                    f"tokens {start} to {stop - 1} of the prompt are trained on, and are no earlier answer"
                )
                found.append(("tokens-mask", words, stop - start))
        # The last answer: its first token, its last, and that it is one piece.
        if not last:
            return [*found, ("tokens-mask", "the last answer is not trained on", 0)]
        start, stop = last[0][0], last[-1][1]
        if begin < start <= first:
            words = f"the template puts {_quote_ids(self.ids, begin)} in front of the answer, the request does not"
            found.append(("tokens-thinking", words, start - begin))
        elif start != begin:
            words = f"the answer begins at token {begin}, training on it at token {start}"
            found.append(("tokens-mask", words, abs(start - begin)))
        if stop == end:
            words = f"token {_quote_ids(self.ids, end)} ends the turn and is not trained on"
            found.append(("tokens-end", words, 1))
        elif stop != end + 1:
            words = f"the turn ends with token {end}, training on it with token {stop - 1}"
            found.append(("tokens-mask", words, abs(stop - end - 1)))
        if len(last) > 1:
            found.append(("tokens-mask", f"the answer is trained on in {len(last)} pieces", len(last)))
        return found


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the longest common beginning."""
    length = min(len(a), len(b))
    return next((n for n in range(length) if a[n] != b[n]), length)


def _tail(requests: Sequence[Sequence[int]]) -> int:
    """Tokens that all requests end with: the end of the user's turn and the beginning of the assistant's."""
    back = [tuple(each)[::-1] for each in requests]
    return min((_common(back[0], each) for each in back[1:]), default=0)


def _runs(mask: Sequence[bool]) -> list[tuple[int, int]]:
    """(first, one past the last) of every run of True."""
    edges = [n for n in range(len(mask) + 1) if (n < len(mask) and mask[n]) != (n > 0 and mask[n - 1])]
    return list(zip(edges[::2], edges[1::2], strict=True))


def _quote_ids(ids: Sequence[int], at: int) -> str:
    """A few ids from a place on."""
    return ", ".join(map(str, ids[at : at + QUOTED_IDS])) or "the end"
