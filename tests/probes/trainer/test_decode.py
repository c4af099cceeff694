"""What the probe `decode` does where parts are missing, and what counts as equal."""

import copy
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from parity.comparison.error import logit_errors
from parity.model.training.data import Batch
from parity.probes.adapters.base import NotExposed
from parity.probes.adapters.builtin import Builtin
from parity.probes.base import ProbeAnswer
from parity.probes.query import query_probes
from parity.probes.subject import ExaminedAdapter
from parity.probes.trainer.decode import _loop_fault, _tie
from tests.faults.wiring import builtin


class NoDraft(Builtin):
    def draft(self, batch: Batch, states: Tensor, anchor: int) -> Tensor:
        raise NotExposed("draft")


class NoLoop(Builtin):
    def generate(self, prompt: Sequence[int], new_tokens: int) -> tuple[Sequence[int], Sequence[int]]:
        raise NotExposed("generate")


class Neither(NoDraft, NoLoop):
    pass


class Served(Builtin):
    """Inference holds its own copy of the weights."""

    def draft(self, batch: Batch, states: Tensor, anchor: int) -> Tensor:
        if not hasattr(self, "copied"):
            self.copied = copy.deepcopy(self.trainer.drafter)
        kept, self.trainer.drafter = self.trainer.drafter, self.copied
        try:
            return super().draft(batch, states, anchor)
        finally:
            self.trainer.drafter = kept


class OneShort(Builtin):
    def draft(self, batch: Batch, states: Tensor, anchor: int) -> Tensor:
        return super().draft(batch, states, anchor)[:-1]


def _answer(kind: type[Builtin]) -> ProbeAnswer:
    adapter = builtin()
    adapter.__class__ = kind
    return query_probes(ExaminedAdapter(adapter), only=["decode"])[0][1]


@pytest.mark.parametrize(
    ("kind", "outcome", "words"),
    [
        (Builtin, "pass", "11 anchors, positions 0 to 496"),
        (NoDraft, "pass", "not tested: draft; drafting and verifying writes the target's own 32 tokens"),
        (NoLoop, "pass", "not tested: generate"),
        (Neither, "skipped", "the adapter does not show draft"),
        (Served, "pass", "whose weights are a copy of the step's"),
        (OneShort, "error", "draft: expected logits [3, 80], found [2, 80]"),
    ],
)
def test_what_is_not_shown_is_told(kind: type[Builtin], outcome: str, words: str) -> None:
    finding = _answer(kind).findings[0]
    assert finding.outcome == outcome and words in finding.sentence, finding.sentence


def test_distances_are_of_the_logits_own_spread() -> None:
    wanted = torch.tensor([[[101.0, 99.0], [0.0, 0.0]], [[3.0, 1.0], [1.0, 3.0]]])
    found = wanted + torch.tensor([[[0.1, -0.1], [0.0, 0.0]], [[0.0, 0.0], [0.0, 0.0]]])
    torch.testing.assert_close(
        logit_errors(found, wanted), torch.tensor([0.1, 0.0]).double(), atol=1e-5, rtol=0
    )
    assert logit_errors(found * torch.nan, wanted)[0] == torch.inf


def test_where_a_text_leaves_the_targets() -> None:
    own, said = list(range(12)), [0, 1, 2, 3, 4, 5, 6, 99, 8, 9, 10, 11]
    fault = _loop_fault(4, own, said, [4, 4, 3], 7)  # full cycles of a block of 4 end at 5 and 9
    assert fault.name == "verification" and "in cycle 2, after 0 rejections" in fault.measured
    fault = _loop_fault(4, own, said, [2, 3, 4, 2], 7)
    assert fault.name == "recurrent-state" and "in cycle 3, after 2 rejections" in fault.measured


def test_a_tie_is_judged_by_the_targets_own_logits() -> None:
    subject = ExaminedAdapter(builtin())
    text = [5, 6, 7, 8]
    logits = subject.adapter.reference(
        Batch(
            tokens=torch.tensor(text),
            loss_mask=torch.ones(4, dtype=torch.bool),
            document=torch.zeros(4, dtype=torch.long),
            position=torch.arange(4),
            sample_ids=(0,),
            epoch=0,
        )
    ).logits[-1]
    first, second = logits.topk(2).indices.tolist()
    assert not _tie(subject, text, first, second)
    assert _tie(subject, text, first, first)
    gap = float(logits[first] - logits[second])
    subject.adapter.dtype = torch.bfloat16
    assert _tie(subject, text, first, second) == (gap <= 8 * 2**-7 * float(logits.abs().max()))
