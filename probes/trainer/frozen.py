"""What trains?

One whole optimizer step of the trainer (`update`), then everything is put back. Exact, bit for bit: a parameter that
the recipe freezes may not change, whatever moved it (gradient, weight decay, a tied tensor); every other parameter
must have been given a gradient, be held by the optimizer and change. Where `update` or `optimizer` is not exposed, the
gradients of the step's loss and the flags are examined alone, and the sentence reports it. A learning rate of 0 (the
first step of a warmup) moves nothing: then gradients and membership decide. Gradients are the step's own, by autograd.

The embedding and the head must be the target's own, row by row (`reference`), in the trainer's precision; a reduced
head's rows must each be one of them.

Cost: one step with backward and optimizer. Finds: SpecForge#455 (a head that was initialised, not loaded), speculators'
`from_pretrained` without a verifier (a random embedding), parameters that nobody thaws (SpecForge#563). Whether norms
get weight decay is reported, not judged. Faults: the `frozen` rows of `parity.probes.deviations`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from parity.model.training.step import is_frozen
from parity.probes.adapters.base import NotExposed
from parity.probes.answers import FoundDeviation, make_probe_answer
from parity.probes.base import ProbeAnswer
from parity.probes.subject import ExaminedAdapter
from parity.reports.record import Value
from parity.reports.words import shorten_list

TEACHERS = ("verifier_",)
"""What names of the teacher's own parts begin with (speculators): copies that never train."""
SHARED_PARTS = {"embed_tokens.weight": "embed-differs", "lm_head.weight": "head-differs"}


class FrozenProbe:
    """One step, and what it moved."""

    name = "frozen"

    def run(self, subject: ExaminedAdapter) -> ProbeAnswer:
        """One finding a fault."""
        seen = _watch_parameters(subject)
        recipe = subject.recipe
        frozen = [name for name in seen if is_frozen(name, recipe) or name.startswith(TEACHERS)]
        trained = [name for name in seen if name not in frozen]
        faults = [*_frozen_faults(seen, frozen), *_trained_faults(seen, trained)]
        shared, told = _check_shared(subject)
        faults += shared
        moved = sum(seen[name].moved for name in trained)
        words = (
            f"{moved} of {len(trained)} parameters train"
            if _has_stepped(seen)
            else f"{len(trained)} parameters train"
        )
        words += f", {len(frozen)} are frozen ({', '.join(recipe.frozen)})"
        words += "" if _has_stepped(seen) else ", by their gradients: no optimizer step was seen to move them"
        facts: dict[str, Value] = {
            "frozen.moved": moved,
            "frozen.trained": len(trained),
            "frozen.frozen": len(frozen),
        }
        decays = _decay(subject, seen)
        if decays is not None:
            words += f"; weight decay on norms: {decays:g}"
            facts["frozen.decay_on_norms"] = decays
        words += "".join(f"; {each}" for each in told)
        return make_probe_answer(self.name, words, faults, facts=facts)


@dataclass(frozen=True, kw_only=True, slots=True)
class ParameterChange:
    """One parameter around an optimizer step."""

    flag: bool
    """requires_grad."""
    gradient: float | None
    """Largest absolute gradient; None where there was none."""
    held: bool | None
    """Whether the optimizer holds it; None where it is not exposed."""
    moved: bool
    change: float
    rate: float
    """Learning rate of its group; nan where not exposed."""
    stepped: bool
    """Whether an optimizer step was made at all."""


def _has_stepped(seen: dict[str, ParameterChange]) -> bool:
    """Whether anything moved."""
    return any(each.moved for each in seen.values())


def _watch_parameters(subject: ExaminedAdapter) -> dict[str, ParameterChange]:
    """Every parameter before and after a step that is undone."""
    batch = subject.batch
    states, anchors = subject.states(batch), subject.anchors(batch)
    parameters = subject.parameters
    with subject.restore_state():  # everything below is undone
        before = {name: tensor.detach().clone() for name, tensor in parameters.items()}
        groups, gradients = _groups(subject), _by_autograd(subject)
        try:
            with subject.guard_adapter_call("update"), torch.random.fork_rng():
                subject.adapter.update(batch, states, anchors=anchors, seed=0)
            stepped = True
        except NotExposed:
            stepped = False
        # Compared while the changed values are still there.
        found = {}
        for name, tensor in parameters.items():
            gradient, rate = gradients[name], None if groups is None else groups.get(_key(tensor))
            change = float((tensor.detach() - before[name]).abs().max())
            found[name] = ParameterChange(
                flag=tensor.requires_grad,
                gradient=None if gradient is None else float(gradient.detach().abs().max()),
                held=None if groups is None else rate is not None,
                moved=not torch.equal(tensor.detach(), before[name]),
                change=change,
                rate=float("nan") if rate is None else rate,
                stepped=stepped,
            )
    subject.__dict__.pop("shown", None)  # its graph holds parameters that were written to
    return found


def _key(tensor: Tensor) -> tuple[int, torch.Size]:
    """Two names of one memory are one parameter."""
    return tensor.data_ptr(), tensor.shape


def _groups(subject: ExaminedAdapter) -> dict[tuple[int, torch.Size], float] | None:
    """Learning rate of what the optimizer holds; None where it is not exposed."""
    try:
        optimizer = subject.adapter.optimizer()
    except NotExposed:
        return None
    return {_key(each): float(group["lr"]) for group in optimizer.param_groups for each in group["params"]}


def _by_autograd(subject: ExaminedAdapter) -> dict[str, Tensor | None]:
    """Gradients of the step's loss: an optimizer may have cleared its own when the update is done."""
    shown = subject.step()
    wanted = {name: tensor for name, tensor in subject.parameters.items() if tensor.requires_grad}
    made = torch.autograd.grad(shown.loss, list(wanted.values()), allow_unused=True)
    return dict.fromkeys(subject.parameters) | dict(zip(wanted, made, strict=True))


def _frozen_faults(seen: dict[str, ParameterChange], names: Sequence[str]) -> list[FoundDeviation]:
    """What is frozen and trains."""
    moved = [name for name in names if seen[name].moved]
    if moved:
        size = max(seen[name].change for name in moved)
        why = "with a gradient" if any(seen[name].gradient for name in moved) else "without a gradient"
        words = f"{shorten_list(moved, 3)} changed by up to {size:.3g} in one step, {why}"
        return [FoundDeviation("frozen-trains", words, {"change": size})]
    ready = [name for name in names if seen[name].flag and (seen[name].gradient or seen[name].held)]
    if ready:
        size = max(seen[name].gradient or 0.0 for name in ready)
        words = f"{shorten_list(ready, 3)} asks for gradients and gets up to {size:.3g}"
        return [FoundDeviation("frozen-trains", words, {"gradient": size})]
    return []


def _trained_faults(seen: dict[str, ParameterChange], names: Sequence[str]) -> list[FoundDeviation]:
    """What should train and does not, by the first reason."""
    reasons: dict[str, list[str]] = {}
    for name in names:
        each = seen[name]
        if not each.flag:
            reasons.setdefault("trained-frozen", []).append(name)
        elif not each.gradient:
            reasons.setdefault("trained-without-gradient", []).append(name)
        elif each.held is False:
            reasons.setdefault("trained-not-in-optimizer", []).append(name)
        elif each.stepped and not each.moved and not each.rate == 0:
            reasons.setdefault("trained-still", []).append(name)
    words = {
        "trained-frozen": "do not ask for gradients",
        "trained-without-gradient": "get no gradient, or one of exactly 0",
        "trained-not-in-optimizer": "are not held by the optimizer",
        "trained-still": "have a gradient and do not change in an optimizer step",
    }
    return [
        FoundDeviation(
            reason,
            f"{len(found)} of {len(names)} {words[reason]}: {shorten_list(found, 3)}",
            {"parameters": len(found)},
        )
        for reason, found in reasons.items()
    ]


def _decay(subject: ExaminedAdapter, seen: dict[str, ParameterChange]) -> float | None:
    """Largest weight decay of a group with vectors in it."""
    try:
        groups = subject.adapter.optimizer().param_groups
    except NotExposed:
        return None
    found = [float(g.get("weight_decay", 0.0)) for g in groups if any(each.ndim < 2 for each in g["params"])]
    return max(found) if found else None


def _check_shared(subject: ExaminedAdapter) -> tuple[list[FoundDeviation], list[str]]:
    """Whether the embedding and the head are the target's: faults, and a note on each part."""
    try:
        reference = subject.reference(subject.batch)
    except NotExposed as missing:
        return [], [
            f"embedding and head were not compared with the target's ({missing.args[0]} is not shown)"
        ]
    wanted = {"embed_tokens.weight": reference.embed, "lm_head.weight": reference.head}
    faults, told = [], []
    for name, fault in SHARED_PARTS.items():
        own = subject.parameters.get(name)
        own = subject.step().head if own is None and name == "lm_head.weight" else own
        if own is None:
            told.append("the embedding is not shown")
            continue
        wrong, size = _unlike(own.detach(), wanted[name])
        if wrong:
            words = f"{wrong} of {len(own)} rows of {name} are not the target's, by up to {size:.3g}"
            faults.append(FoundDeviation(fault, words, {"rows": wrong, "change": size}))
        else:
            told.append(f"{name}: all {len(own)} rows are the target's")
    return faults, told


PARAMETER_CHUNK = 8192
"""Rows of an embedding that are converted at once."""


def _unlike(own: Tensor, target: Tensor) -> tuple[int, float]:
    """How many rows are not the target's, and the largest difference.

    Args:
        own: [n, D] the trainer's embedding or head. Of n = V rows each is compared in its place; of fewer each must be
            one of the target's, which is found by a random projection.
        target: [V, D].
    """
    if own.shape[1] != target.shape[1]:
        return len(own), float("inf")
    target = target.detach()
    place = torch.arange(len(own)) if len(own) == len(target) else _nearest(own, target)
    wrong, size = 0, 0.0
    if len(own) == len(target) and torch.equal(own, target.to(own.dtype)):
        return 0, 0.0
    for start in range(0, len(own), PARAMETER_CHUNK):
        part = own[start : start + PARAMETER_CHUNK]
        apart = (
            (part.double() - target[place[start : start + PARAMETER_CHUNK]].to(own.dtype).double())
            .abs()
            .amax(1)
        )
        wrong, size = wrong + int((apart > 0).sum()), max(size, float(apart.max()))
    return wrong, size


def _nearest(own: Tensor, target: Tensor) -> Tensor:
    """[n] the row of `target` whose projection is nearest to that of each of `own`."""
    direction = torch.randn(own.shape[1], generator=torch.Generator().manual_seed(1), dtype=torch.float64)

    def project_rows(rows: Tensor) -> Tensor:
        return torch.cat([part.to(own.dtype).double() @ direction for part in rows.split(PARAMETER_CHUNK)])

    values, order = project_rows(target).sort()
    wanted = project_rows(own)
    after = torch.searchsorted(values, wanted).clamp(1, len(values) - 1)
    lower = (wanted - values[after - 1]).abs() < (values[after] - wanted).abs()
    return order[after - lower.long()]
