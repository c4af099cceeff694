"""What a step of the built-in trainer contains: its states, its gradients at fc and at the head, its slots.

Nothing is computed twice: forward and backward are over, and the gradients are read where they arrived. The weight of
each slot is measured, not looked up: the gradient at the head's input is compared with what the recipe's terms leave
there at weight 1 (as the loss probe does on its own row), for a few blocks of the real row.

Shapes: S tokens of a row, A anchors, B slots, n slots examined, D width, V the draft's vocabulary.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from parity.model.training.loss import LossConfig
from parity.model.training.step import StepOutput
from parity.probes.deviations import deviation
from parity.probes.instruments.loss.head_gradient import compute_term_values
from parity.probes.instruments.loss.mixture import explain
from parity.reports.record import Finding, Table, Value, declare_columns
from parity.watching.values import StepValues, norm_of

SLOT_LIMIT = 64
"""Slots examined, at most: whole blocks, evenly spaced."""
PIECE = 1 << 25
"""Numbers of the head brought to float64 at once: 256 MiB."""
FLOOR, ROUNDINGS = 1e-6, 4.0
"""The loss probe's limits of the residual: in float64 itself, and times the rounding of the step's own dtypes."""
CERTAIN_SHARE = 0.05
"""Standard error of a term's share from which on the mixture counts as not identifiable on these tokens."""


@torch.no_grad()
def read_step(values: StepValues, output: StepOutput) -> None:
    """Put a step's numbers into `values`: its tensors, each conditioning slice's signal to noise and influence, and how
    many supervised tokens the anchors reach."""
    captured, made = output.captured, output.objective
    divide = made.denominator.clamp(min=torch.finfo(made.denominator.dtype).tiny)
    values.describe("captured", captured.states)
    for name in ("fc_input", "hidden", "labels"):
        values.describe(name, getattr(output, name))
    if output.teacher is not None:
        values.describe("teacher", output.teacher.states)
    values.describe("hidden.gradient", output.hidden.grad)
    values.describe("fc_input.gradient", output.fc_input.grad)
    # Each slice of fc's input: noise against the clean state, and how far the loss depends on it.
    width = captured.states.shape[2]
    for index in range(captured.conditioning):
        part, tap = slice(index * width, (index + 1) * width), captured.taps[index]
        clean = captured.states[:, index].to(output.fc_input)
        noise = norm_of(output.fc_input[:, part] - clean)
        values.put(f"{tap}.snr", torch.where(noise > 0, norm_of(clean) / noise, torch.inf))
        if output.fc_input.grad is not None:
            values.put(f"{tap}.influence", norm_of(output.fc_input.grad[:, part]) / divide)
    # Of the tokens with a loss, how many are an anchor or in a block behind one.
    many = output.batch.loss_mask.sum().clamp(min=1)
    values.put("anchors.count", len(output.anchors))
    values.put("anchors.share", len(output.anchors) / many)
    reached = output.anchors[:, None] + torch.arange(output.labels.shape[1]).to(output.anchors)
    values.put("anchors.covered", reached[output.supervision_mask].unique().numel() / many)


def read_slots(output: StepOutput) -> tuple[list[tuple[str, Value]], list[Finding], list[Table]]:
    """Weights of the slots and shares of the terms, from the gradient at the head's input.

    Returns:
        (numbers, findings, tables), empty where there is no gradient. The finding fails where the recipe's terms do
        not explain that gradient to rounding.
    """
    looked = _StepSlots.of(output)
    if looked is None:
        return [], [], []
    # Each slot's weight is the factor of its gradient along the recipe's mixture; what is left over is unexplained.
    columns = looked.columns(output.loss_config)
    mixed = sum((factor * columns[name] for name, factor in output.loss_config.terms.items()))
    assert isinstance(mixed, Tensor)
    square = mixed.square().sum(-1)
    weights = (looked.gradient * mixed).sum(-1) / square.clamp(min=1e-300)
    left = (looked.gradient - weights[:, None] * mixed).norm() / looked.gradient.norm()
    limit = max(FLOOR, ROUNDINGS * looked.rounding(mixed, weights))
    numbers: list[tuple[str, Value]] = [("loss.step.residual", float(left))]
    rows: list[tuple[Value, ...]] = []
    for slot in range(1, output.labels.shape[1]):
        own = weights[looked.slot == slot]
        if len(own):
            numbers.append((f"slot.{slot}.weight", float(own.mean())))
            rows.append((slot, float(own.mean()), float(own.min()), float(own.max()), len(own)))
    shares, words = _shares(looked, columns, output.loss_config.terms, limit)
    numbers += shares
    return numbers, [_judge_slots(float(left), limit, len(looked.slot), words)], [_table(rows)]


def _shares(
    looked: "_StepSlots", columns: Mapping[str, Tensor], terms: Mapping[str, float], limit: float
) -> tuple[list[tuple[str, Value]], str]:
    """The terms' measured shares, where they can be identified; and the same in words."""
    if len(terms) == 1:
        return [], f"{next(iter(terms))} alone"
    fit = explain(looked.gradient, columns, limit)
    if set(fit.shares) != set(terms) or max(fit.errors.values()) > CERTAIN_SHARE:
        return [("loss.step.mix", "not identifiable")], "their mix is not identifiable on these tokens"
    words = ", ".join(f"{share:.4g} {name}" for name, share in fit.shares.items())
    return [(f"loss.step.{name}.share", share) for name, share in fit.shares.items()], words


def _judge_slots(left: float, limit: float, many: int, words: str) -> Finding:
    numbers = f"residual {left:.1g}, limit {limit:.1g}, {many} slots of the step"
    evidence: tuple[tuple[str, Value], ...] = (("residual", left), ("limit", limit), ("slots", many))
    if left <= limit:
        sentence = f"the step's own gradient at the head is that of the recipe's terms, {words} ({numbers})"
        return Finding(name="step.loss", outcome="pass", sentence=sentence, evidence=evidence)
    row = deviation("loss-unrecognised")
    return Finding(
        name="step.loss",
        outcome="fail",
        fault=row.name,
        sentence=f"{row.sentence}: the recipe's terms leave a share of the step's own gradient unexplained ({numbers})",
        evidence=evidence,
        next_step=row.do,
    )


def _table(rows: list[tuple[Value, ...]]) -> Table:
    return Table(
        name="slots",
        title="Weight of each slot, from the step's own gradient",
        columns=declare_columns(
            "slot:int | weight:float mean weight | least:float | most:float | slots:int slots looked at"
        ),
        rows=tuple(rows),
        detail=True,
    )


class _StepSlots:
    """n supervised slots of a step: states [n, D], labels [n], and the gradient [n, D] that arrived at them."""

    def __init__(self, output: StepOutput, blocks: Tensor) -> None:
        on = output.supervision_mask[blocks]
        block, slot = on.nonzero(as_tuple=True)
        where = (blocks[block], slot)
        assert output.hidden.grad is not None
        self.own = output.hidden.detach()[where]
        self.gradient, self.slot = output.hidden.grad[where].double().cpu(), slot.cpu()
        self.labels, self.head = output.labels[where], output.head
        self.states = self.teacher = None
        if output.teacher is not None and output.loss_config.needs_teacher:
            self.states = output.teacher.states[output.teacher.index[where]]
            self.teacher = self._logits(self.states)

    @classmethod
    def of(cls, output: StepOutput) -> "_StepSlots | None":
        """Some blocks' slots; None where nothing is trained or no gradient was kept."""
        grad = output.hidden.grad
        blocks = output.supervision_mask.any(1).nonzero().squeeze(-1)
        if grad is None or not len(blocks) or not bool(grad.isfinite().all()):
            return None
        many = max(1, SLOT_LIMIT // output.labels.shape[1])
        chosen = torch.linspace(0, len(blocks) - 1, min(many, len(blocks))).round().long()
        return cls(output, blocks[chosen.to(blocks.device)])

    def _pieces(self) -> list[Tensor]:
        return list(self.head.split(max(1, PIECE // self.head.shape[1])))

    def _logits(self, states: Tensor) -> Tensor:
        """[n, V] in float64."""
        return torch.cat([states.double() @ piece.double().T for piece in self._pieces()], dim=-1)

    def _through_head(self, slope: Tensor) -> Tensor:
        """[n, D] the gradient at the head's input from that at the logits."""
        made, at = slope.new_zeros(len(slope), self.head.shape[1]), 0
        for piece in self._pieces():
            made += slope[:, at : at + len(piece)] @ piece.double()
            at += len(piece)
        return made

    def columns(self, config: LossConfig) -> dict[str, Tensor]:
        """Term -> [n, D] its gradient at the head's input, with weight 1; by autograd from its value."""
        logits = self._logits(self.own)
        made = {}
        for name in config.terms:
            heat = 1.0 if name == "ce" else config.temperature

            def value(at: Tensor, name: str = name, heat: float = heat) -> Tensor:
                log_p = (
                    None if name == "ce" or self.teacher is None else (self.teacher / heat).log_softmax(-1)
                )
                return compute_term_values(
                    name, (at / heat).log_softmax(-1), self.labels, log_p, config.lk_eta
                ).sum()

            made[name] = self._through_head(_slope(value, logits)).cpu()
        return made

    def rounding(self, mixed: Tensor, weights: Tensor) -> float:
        """Relative error of the gradient that the step's own dtypes account for: a logit's and a product's rounding.

        Measured, by forming the draft's distribution once as the step does and taking it through the head.
        """
        dtype = self.head.dtype
        wide = torch.promote_types(dtype, torch.float32)
        rough = (self.own.to(dtype) @ self.head.T).to(wide).softmax(-1)
        exact = self._logits(self.own).softmax(-1)
        if self.states is not None and self.teacher is not None:
            rough = rough - (self.states.to(dtype) @ self.head.T).to(wide).softmax(-1)
            exact = exact - self.teacher.softmax(-1)
        through = (rough.to(dtype) @ self.head).to(self.own.dtype).double()
        error = (through - self._through_head(exact)).cpu() * weights[:, None]
        return float(error.norm() / (mixed * weights[:, None]).norm().clamp(min=1e-300))


def _slope(value: Callable[[Tensor], Tensor], logits: Tensor) -> Tensor:
    at = logits.clone().requires_grad_(True)
    with torch.enable_grad():
        (slope,) = torch.autograd.grad(value(at), at)
    return slope
