"""An adapter under examination: what probes hand to its step, and the care that is taken of it.

    subject = Subject(adapter)
    shown = subject.step()                                  # the shared synthetic row, seed 0
    answers = ask(subject)                                  # every wiring probe in turn

What an adapter gets wrong as an adapter (a part that it lacks, a detached graph, a changed random state, an
exception) is a finding that names the part; the other probes go on. Each probe's visit ends with a look
at parameters, their `.grad`, the optimizer, hooks and random state: what it changed is put back, and told.

Shapes as in `parity.probes.adapters.base`.
"""

import random
import re
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from parity.errors import ParityError
from parity.model.recipe.config import Recipe
from parity.model.training.anchors import PADDING, AnchorConfig, is_candidate
from parity.model.training.data import Batch
from parity.probes.adapters.base import Adapter, AdapterStep, NotExposed, TargetReference
from parity.probes.base import ProbeAnswer
from parity.probes.deviations import deviation
from parity.probes.suppress import suppress_dependent
from parity.probes.table import TABLE, ProbeEntry
from parity.reports.record import WORST_FIRST, Finding, Outcome, Statement, Table, Value

DRAWS = 8
"""Draws of the trainer's own anchors whose union says which tokens can be an anchor."""


class AdapterError(Exception):
    """The adapter did not do what an adapter does."""

    def __init__(self, part: str, expected: str, found: str, *, do: str = "", at: str = "") -> None:
        """do: how to put it right, where that is known. at: FILE:LINE of an exception."""
        super().__init__(f"{part}: expected {expected}, found {found}")
        self.part, self.expected, self.found, self.at = part, expected, found, at
        self.do = do or f"correct {part.split('.')[0]} in the adapter"

    @property
    def sentence(self) -> str:
        """What a report says of it."""
        return f"the adapter's {self.part}: expected {self.expected}, found {self.found}"

    @property
    def mistake(self) -> tuple[str, str, str]:
        """What makes two of them one mistake: the part, and the line that raised, or both texts but for their numbers
        (rows of probes differ in length)."""
        if self.at:
            return self.part, self.at, ""
        return self.part, _numberless(self.expected), _numberless(self.found)


def _numberless(text: str) -> str:
    return re.sub(r"\d+", "#", text)


@dataclass(frozen=True, kw_only=True, slots=True)
class SyntheticDocument:
    """One document of a synthetic row."""

    length: int
    prompt: int = 0
    """Tokens at its beginning that are not trained on."""
    holes: tuple[int, ...] = ()
    """Further tokens that are not, counted from its beginning."""


def synthetic_row(
    texts: Sequence[SyntheticDocument],
    vocabulary: int,
    *,
    avoid: Sequence[int] = (),
    padding: int = 0,
    seed: int = 0,
) -> Batch:
    """A packed row whose tokens are all different as long as the vocabulary lasts.

    avoid: ids that no text uses (the mask token). Raises ParityError where fewer than 2 ids are left.
    """
    ids = np.setdiff1d(np.arange(vocabulary), np.array(list(avoid), dtype=np.int64))
    if len(ids) < 2:
        raise ParityError("a synthetic row", f"{vocabulary} tokens", "give the adapter's vocabulary")
    total = sum(text.length for text in texts)
    order = np.random.default_rng(seed).permutation(ids)
    tokens = np.concatenate((np.resize(order, total), np.zeros(padding, dtype=np.int64)))
    mask, document, position = [], [], []
    for number, text in enumerate(texts):
        own = np.arange(text.length) >= text.prompt
        own[list(text.holes)] = False
        mask.append(own)
        document.append(np.full(text.length, number))
        position.append(np.arange(text.length))
    mask.append(np.zeros(padding, dtype=np.bool_))
    document.append(np.full(padding, PADDING))
    position.append(np.arange(padding))
    return Batch(
        tokens=torch.from_numpy(tokens.astype(np.int64)),
        loss_mask=torch.from_numpy(np.concatenate(mask)),
        document=torch.from_numpy(np.concatenate(document).astype(np.int64)),
        position=torch.from_numpy(np.concatenate(position).astype(np.int64)),
        sample_ids=tuple(range(len(texts))),
        epoch=0,
    )


class ExaminedAdapter:
    """An adapter, the rows that it is asked with, and its answers checked for being answers."""

    def __init__(self, adapter: Adapter) -> None:
        self.adapter, self.recipe = adapter, adapter.recipe
        if not adapter.slices or adapter.width < 1 or adapter.vocabulary < 2:
            found = f"slices {adapter.slices!r}, width {adapter.width}, vocabulary {adapter.vocabulary}"
            raise AdapterError("__init__", "slices, width and vocabulary set", found)

    @property
    def block(self) -> int:
        """B as declared."""
        return self.recipe.block.size

    # --- rows -----------------------------------------------------------------------------------------

    def row(self, texts: Sequence[SyntheticDocument], *, padding: int = 0, seed: int = 0) -> Batch:
        """`synthetic_row` for this trainer: the declared mask token is in no text."""
        avoid = [self.recipe.block.mask_token_id]
        return synthetic_row(texts, self.adapter.vocabulary, avoid=avoid, padding=padding, seed=seed)

    @cached_property
    def batch(self) -> Batch:
        """The row most probes share: three documents with a prompt, none (where labels could cross into it), and a
        prompt with a hole behind it, then padding. One document where the trainer does not pack."""
        size = self.block
        begins = size if self.recipe.block.documents == "prompt_masked" else 0
        texts = [
            SyntheticDocument(length=4 * size, prompt=2),
            SyntheticDocument(length=3 * size, prompt=begins),
        ]
        texts.append(SyntheticDocument(length=3 * size, prompt=size, holes=(2 * size,)))
        return self.row(texts, padding=3)

    def states(self, batch: Batch, *, seed: int = 0, grad: bool = False) -> Tensor:
        """Captured states [S, N, D] as the capture delivers them: normal, every slice its own, zero on padding."""
        generator = torch.Generator().manual_seed(seed)
        shape = (len(batch.tokens), len(self.adapter.slices), self.adapter.width)
        states = torch.randn(shape, generator=generator)
        states[batch.document == PADDING] = 0
        return states.to(self.adapter.dtype).requires_grad_(grad)

    def candidates(self, batch: Batch) -> Tensor:
        """bool [S]: tokens that this trainer may make an anchor: by its own draws, or the rule where it shows none."""
        seen = torch.zeros(len(batch.tokens), dtype=torch.bool)
        try:
            for seed in range(DRAWS):
                with self.guard_adapter_call("draw"):
                    seen[self.adapter.draw(batch, seed=seed, epoch=seed).cpu()] = True
        except NotExposed:
            config = AnchorConfig(partial=self.recipe.block.partial)
            seen = is_candidate(batch.loss_mask, batch.document, self.block, config)
        return seen & (batch.document != PADDING)

    def anchors(self, batch: Batch, count: int = 8) -> Tensor:
        """Up to `count` anchors [A] spread over the row: each document's first and last possible one among them."""
        possible = self.candidates(batch)
        chosen: list[int] = []
        each = max(2, count // max(1, int(batch.document.max()) + 1))
        for number in range(int(batch.document.max()) + 1):
            own = (possible & (batch.document == number)).nonzero().squeeze(-1)
            if len(own):
                picks = np.unique(np.linspace(0, len(own) - 1, min(each, len(own))).round().astype(int))
                chosen += own[torch.from_numpy(picks)].tolist()
        if not chosen:
            raise AdapterError("draw", "an anchor in a row with supervised tokens", "none")
        return torch.tensor(sorted(chosen)[:count])

    # --- steps ----------------------------------------------------------------------------------------

    def step(
        self,
        batch: Batch | None = None,
        states: Tensor | None = None,
        *,
        anchors: Tensor | None = None,
        seed: int = 0,
        training: bool = True,
    ) -> AdapterStep:
        """One step of the trainer, checked. Raises Broken where it is not what `Adapter.step` promises."""
        batch = self.batch if batch is None else batch
        states = self.states(batch, grad=True) if states is None else states
        anchors = self.anchors(batch) if anchors is None else anchors
        with self.guard_adapter_call("step"), torch.enable_grad():
            shown = self.adapter.step(batch, states, anchors=anchors, seed=seed, training=training)
            shown = shown.as_blocks() if isinstance(shown, AdapterStep) else shown
        self._check(shown, batch, anchors)
        return shown

    @cached_property
    def step_output(self) -> AdapterStep:
        """The shared row's step, with its graph. States are `shown_states`."""
        return self.step(self.batch, self.shown_states)

    @cached_property
    def shown_states(self) -> Tensor:
        """The captured states [S, N, D] that `step_output` was made from, a leaf that takes gradients."""
        return self.states(self.batch, grad=True)

    def _check(self, shown: Any, batch: Batch, anchors: Tensor) -> None:
        """Raise Broken for what is not shown as promised."""
        if not isinstance(shown, AdapterStep):
            raise AdapterError("step", "a Shown", type(shown).__name__)
        own = (
            shown.head.ndim == 2 and shown.head.shape[1:] == shown.hidden.shape[2:]
        )  # a head of its own width
        width = shown.head.shape[1] if own else self.adapter.width
        where = (len(anchors), self.block, width)
        shapes: dict[str, tuple[Tensor, tuple[int | None, ...]]] = {
            "step.hidden": (shown.hidden, where),
            "step.loss": (shown.loss, ()),
            "step.head": (shown.head, (None, width)),
            "step.fc_input": (shown.fc_input, (len(batch.tokens), None)),
            "step.anchors": (shown.anchors, (len(anchors),)),
        }
        if shown.labels is not None:
            shapes["step.labels"] = (shown.labels, where[:2])
        if shown.teacher is not None:
            shapes["step.teacher"] = (shown.teacher, (*where[:2], len(shown.head)))
        for part, (tensor, shape) in shapes.items():
            if not isinstance(tensor, Tensor):
                raise AdapterError(part, f"a tensor {_shape(shape)}", type(tensor).__name__)
            fits = tensor.ndim == len(shape) and all(
                want in (None, have) for want, have in zip(shape, tensor.shape, strict=True)
            )
            if not fits:
                raise AdapterError(part, _shape(shape), _shape(tensor.shape))
        for part in ("loss", "hidden"):
            if not getattr(shown, part).requires_grad:
                raise AdapterError(f"step.{part}", "a tensor in the graph", "a detached one")
        if not torch.equal(shown.anchors.cpu(), anchors):
            raise AdapterError(
                "step.anchors", f"the anchors it was given {anchors.tolist()}", f"{shown.anchors.tolist()}"
            )

    def reference(self, batch: Batch) -> TargetReference:
        """The target's own states and logits. Raises Missing."""
        with self.guard_adapter_call("reference"), torch.no_grad():
            return self.adapter.reference(batch)

    def capture(self, batch: Batch) -> Tensor:
        """The trainer's own capture [S, N, D]. Raises Missing, or Broken for another shape."""
        with self.guard_adapter_call("capture"), torch.no_grad():
            states = self.adapter.capture(batch)
        shape = (len(batch.tokens), len(self.adapter.slices), self.adapter.width)
        if tuple(states.shape) != shape:
            raise AdapterError("capture", _shape(shape), _shape(states.shape))
        return states

    @cached_property
    def captured_states(self) -> Tensor:
        """The shared row as the trainer's own capture delivers it, [S, N, D]. Raises Missing."""
        return self.capture(self.batch)

    @cached_property
    def target_reference(self) -> TargetReference:
        """The target's own states and logits of the shared row. Raises Missing."""
        return self.reference(self.batch)

    @cached_property
    def parameters(self) -> Mapping[str, Tensor]:
        """Every parameter by name. Raises Broken for what is no tensor, or none at all."""
        with self.guard_adapter_call("parameters"):
            found = self.adapter.parameters()
        if not found or not all(isinstance(each, Tensor) for each in found.values()):
            raise AdapterError(
                "parameters", "tensors by name", f"{len(found)} of {sorted(map(type_name, found.values()))}"
            )
        return found

    # --- care -----------------------------------------------------------------------------------------

    @contextmanager
    def guard_adapter_call(self, part: str) -> Iterator[None]:
        """Run something of the adapter's: an exception is told as its own, a changed random state put back and told."""
        before = _random_state()
        try:
            yield
        except (NotExposed, AdapterError):
            raise
        except NotImplementedError as error:
            raise AdapterError(part, "a method", "not written") from error
        except Exception as error:
            last = traceback.extract_tb(error.__traceback__)[-1]
            found = f"{type(error).__name__}: {error} ({last.filename.rsplit('/', 1)[-1]}:{last.lineno})"
            at = f"{type(error).__name__} at {last.filename}:{last.lineno}"
            raise AdapterError(part, "no exception", found, at=at) from error
        finally:
            after = _random_state()
            _set_random_state(before)
        moved = [name for name in before if not _same(before[name], after[name])]
        if moved:
            found = f"{', '.join(moved)} moved"
            raise AdapterError(
                part, "the global random state left as it was", found, do=_forked_hint(part, moved)
            )

    @contextmanager
    def restore_state(self) -> Iterator[None]:
        """Put parameters, `.grad`, optimizer and random state back afterwards, whatever is done to them."""
        snapshot = Snapshot(self)
        try:
            yield
        finally:
            snapshot.restore()


def type_name(value: object) -> str:
    """Name of a value's class, for messages."""
    return type(value).__name__


def _shape(shape: Sequence[int | None]) -> str:
    return f"[{', '.join('*' if size is None else str(size) for size in shape)}]"


def _random_state() -> dict[str, Any]:
    """State of the generators that a step could draw from without saying so."""
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "numpy": np.random.get_state(legacy=False),
        "python": random.getstate(),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def _forked_hint(part: str, moved: Sequence[str]) -> str:
    """What to do about a method that uses up these global generators."""
    ways = {
        "torch": "wrap what draws in `with torch.random.fork_rng():` and call torch.manual_seed(seed) in it",
        "cuda": "wrap what draws in `with torch.random.fork_rng():`, which forks CUDA's generators too",
        "numpy": "draw from numpy.random.default_rng(seed)",
        "python": "draw from random.Random(seed)",
    }
    return f"in the adapter's {part.split('.')[0]}, {', and '.join(ways[name] for name in moved)}"


def _set_random_state(state: Mapping[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    np.random.set_state(state["numpy"])
    random.setstate(state["python"])
    if "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])


def _same(a: Any, b: Any) -> bool:
    """Bit for bit, through mappings and sequences."""
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and a.dtype == b.dtype and torch.equal(_bits(a), _bits(b).to(a.device))
    if isinstance(a, np.ndarray):
        return np.array_equal(a, b)
    if isinstance(a, Mapping):
        return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    if isinstance(a, tuple) and a and isinstance(a[0], int):
        return bool(a == b)  # plain numbers: python's random state has 625 of them
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(_same(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)


def _own(tensor: Tensor) -> Tensor:
    """This rank's part of a sharded tensor, the tensor itself where it is whole."""
    part: Any = getattr(tensor.detach(), "to_local", None)
    own: Tensor = tensor.detach() if part is None else part()
    return own


def _bits(tensor: Tensor) -> Tensor:
    """As bytes, so that nan equals itself."""
    own = _own(tensor)
    return own.contiguous().view(-1).view(torch.uint8) if own.numel() else own


def _map_tensors(value: Any, make: Callable[[Tensor], Any]) -> Any:
    """Mappings and sequences with `make` of every tensor in its place."""
    if isinstance(value, Tensor):
        return make(value)
    if isinstance(value, Mapping):
        return {key: _map_tensors(each, make) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_map_tensors(each, make) for each in value)
    return value


def _clone_tensors(value: Any) -> Any:
    """A copy that shares no memory, in the host's, through mappings and sequences."""
    return _map_tensors(value, lambda tensor: _own(tensor).to("cpu", copy=True))


def _digest_tensors(value: Any) -> Any:
    """A sum of every tensor's bits in its place: what was changed is seen, and nothing is kept."""
    kinds = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

    def digest(tensor: Tensor) -> int:
        whole = _own(tensor).contiguous().view(-1)
        return int(whole.view(kinds.get(whole.element_size(), torch.int8)).sum(dtype=torch.int64))

    return _map_tensors(value, digest)


def _copy_into(live: Any, kept: Any) -> bool:
    """Copy kept tensors into the live ones, in place; False where the two are not built alike."""
    if isinstance(live, Tensor) and isinstance(kept, Tensor):
        own = _own(live)
        return own.shape == kept.shape and own.copy_(kept) is own
    if isinstance(live, Mapping) and isinstance(kept, Mapping):
        return live.keys() == kept.keys() and all([_copy_into(live[key], kept[key]) for key in live])
    if isinstance(live, list | tuple) and isinstance(kept, list | tuple):
        return len(live) == len(kept) and all([_copy_into(a, b) for a, b in zip(live, kept, strict=True)])
    return bool(live == kept)


class Snapshot:
    """What a probe must leave as it found it: parameters, `.grad`, optimizer, hooks, random state."""

    def __init__(self, subject: ExaminedAdapter, *, copies: bool = True) -> None:
        """copies: in the host's memory, to put back from; without them what was changed is only told."""
        self.copies = copies
        keep = _clone_tensors if copies else _digest_tensors
        self._now: Callable[[Any], Any] = (lambda value: value) if copies else _digest_tensors
        self.parameters = dict(subject.parameters)
        self.values = {name: keep(tensor) for name, tensor in self.parameters.items()}
        self.flags = {name: tensor.requires_grad for name, tensor in self.parameters.items()}
        self.grads = {name: (tensor.grad, keep(tensor.grad)) for name, tensor in self.parameters.items()}
        self.hooks = {name: _hooks(tensor) for name, tensor in self.parameters.items()}
        self.random = _random_state()
        try:
            with subject.guard_adapter_call("optimizer"):
                self.optimizer: torch.optim.Optimizer | None = subject.adapter.optimizer()
                self.state = keep(self.optimizer.state_dict())
        except NotExposed:
            self.optimizer = None

    def list_changes(self) -> list[str]:
        """What is no longer bit for bit as it was."""
        told = []
        for name, tensor in self.parameters.items():
            if not _same(self.values[name], self._now(tensor)):
                told.append(f"parameter {name}")
            if tensor.requires_grad != self.flags[name]:
                told.append(f"requires_grad of {name}")
            held, value = self.grads[name]
            if tensor.grad is not held or not _same(value, self._now(tensor.grad)):
                told.append(f"grad of {name}")
            if _hooks(tensor) != self.hooks[name]:
                told.append(f"hooks of {name}")
        if self.optimizer is not None and not _same(self.state, self._now(self.optimizer.state_dict())):
            told.append("optimizer")
        told += [
            f"random state of {name}"
            for name, old in self.random.items()
            if not _same(old, _random_state()[name])
        ]
        return told

    @torch.no_grad()
    def restore(self) -> None:
        """Put everything back, in place, of which there are copies."""
        assert self.copies
        for name, tensor in self.parameters.items():
            tensor.requires_grad_(self.flags[name])
            if not _same(self.values[name], tensor):
                _own(tensor).copy_(self.values[name])
            held, value = self.grads[name]
            if held is not None:
                _own(held).copy_(value)
            tensor.grad = held
        if self.optimizer is not None and not _copy_into(self.optimizer.state_dict(), self.state):
            self.optimizer.load_state_dict(self.state)
        _set_random_state(self.random)


def _hooks(tensor: Tensor) -> tuple[int, ...]:
    hooks: Any = tensor._backward_hooks  # no public way to ask
    return tuple(hooks) if hooks else ()


# --- asking -------------------------------------------------------------------------------------------


def query_probes(
    subject: ExaminedAdapter,
    only: Sequence[str] | None = None,
    say: Callable[[str], None] = lambda name: None,
    *,
    copies: bool = True,
) -> list[tuple[str, ProbeAnswer]]:
    """Every wiring probe's answer by its name, or those named in `only`. `say` hears which one is asked.

    copies: of the trainer's state are kept while a probe asks, so that what it changes is put back at once. Without
    them one look after the last probe tells what was changed, as an answer `untouched`; it stays changed.
    """
    asked, moved = list[tuple[str, ProbeAnswer | AdapterError]](), dict[str, tuple[Finding, ...]]()
    whole: Snapshot | None = None
    with suppress(AdapterError):  # then the probes say so
        whole = None if copies else Snapshot(subject, copies=False)
    for entry in TABLE:
        if entry.asks == "trainer" and (only is None or entry.name in only):
            say(entry.name)
            made, moved[entry.name] = _answer(entry, subject, copies)
            asked.append((entry.name, made))
    answers = [
        (name, replace(made, findings=(*made.findings, *moved.get(name, ()))))
        for name, made in suppress_dependent(subject, _told_once(asked))
    ]
    changed = whole.list_changes() if whole else []
    if changed:
        answers.append(
            ("untouched", _changed_answer("asking.untouched", changed, "not put back: no copy was kept"))
        )
    return answers


def query_adapter(
    adapter: Adapter,
    only: Sequence[str] | None = None,
    say: Callable[[str], None] = lambda name: None,
    *,
    copies: bool = True,
) -> list[tuple[str, ProbeAnswer]]:
    """`query_probes` of an adapter; one of which no subject can be made is the only answer, `adapter`."""
    try:
        return query_probes(ExaminedAdapter(adapter), only, say, copies=copies)
    except AdapterError as broken:
        return [("adapter", _broken_adapter(broken))]


def _broken_adapter(broken: AdapterError, name: str = "adapter", probes: Sequence[str] = ()) -> ProbeAnswer:
    """A mistake of the adapter as a finding, with the probes that could not be asked because of it."""
    because = f"; not asked because of it: {', '.join(probes)}" if probes else ""
    evidence = (("part", broken.part), ("expected", broken.expected), ("found", broken.found))
    return one(name, "error", broken.sentence + because, evidence=evidence, next_step=broken.do)


def _told_once(asked: Sequence[tuple[str, ProbeAnswer | AdapterError]]) -> list[tuple[str, ProbeAnswer]]:
    """Answers in which a mistake of the adapter that stops several probes is one finding, before the first of them.

    A mistake that stops one probe is that probe's finding. The probes that another finding speaks for have an answer
    without one, which says why (`Answer.unasked`).
    """
    stopped: dict[tuple[str, str, str], list[str]] = {}
    for name, answer in asked:
        if isinstance(answer, AdapterError):
            stopped.setdefault(answer.mistake, []).append(name)
    answers, told = list[tuple[str, ProbeAnswer]](), dict[tuple[str, str, str], str]()
    for name, answer in asked:
        if not isinstance(answer, AdapterError):
            answers.append((name, answer))
            continue
        probes = stopped[answer.mistake]
        if len(probes) == 1:
            answers.append((name, _broken_adapter(answer, name)))
            continue
        if answer.mistake not in told:
            finding = f"adapter.{answer.part}"
            same = sum(other == finding or other.startswith(f"{finding}-") for other in told.values())
            told[answer.mistake] = f"{finding}-{same + 1}" if same else finding
            answers.append(("adapter", _broken_adapter(answer, told[answer.mistake], probes)))
        answers.append((name, ProbeAnswer(findings=(), unasked=f"see the finding {told[answer.mistake]}")))
    return answers


def _changed_answer(name: str, changed: Sequence[str], then: str) -> ProbeAnswer:
    do = "let the adapter's methods leave the trainer as they found it"
    if any(each.startswith("random state") for each in changed):
        do += "; wrap what draws at random in `with torch.random.fork_rng():`, seeded in it"
    return one(
        name,
        "error",
        f"asking changed {', '.join(changed[:4])}{' and more' if len(changed) > 4 else ''}; {then}",
        next_step=do,
    )


def _answer(
    entry: ProbeEntry, subject: ExaminedAdapter, copies: bool
) -> tuple[ProbeAnswer | AdapterError, tuple[Finding, ...]]:
    """One probe's answer, or the adapter's mistake that it met, and what it left changed. A probe that breaks is a
    finding."""
    snapshot: Snapshot | None = None
    made: ProbeAnswer | AdapterError
    try:
        snapshot = Snapshot(subject) if copies else None
        made = entry.load().run(subject)
    except NotExposed as missing:
        part = str(missing.args[0]) if missing.args else "a part"
        made = one(
            entry.name,
            "skipped",
            f"the adapter does not show {part}",
            next_step=f"write `{part.split()[0]}` (parity.probes.adapters.base) to have this asked",
        )
    except AdapterError as broken:
        made = broken
    except Exception as error:
        told = traceback.format_exc().strip().splitlines()
        made = one(
            entry.name,
            "error",
            f"the probe itself broke: {type(error).__name__}: {error}",
            evidence=(("traceback", "\n".join(told[-12:])),),
            next_step="report it to parity with this report",
        )
    changed = snapshot.list_changes() if snapshot else []
    if snapshot and changed:
        snapshot.restore()
        return made, _changed_answer(f"{entry.name}.untouched", changed, "put back").findings
    return made, ()


@dataclass(frozen=True, kw_only=True, slots=True)
class FoundDeviation:
    """A deviation that a probe found."""

    name: str
    """A row of `parity.probes.deviations`."""
    measured: str
    """The measured numbers in words; follows the row's own sentence."""
    evidence: tuple[tuple[str, Value], ...] = ()
    outcome: Outcome = "fail"


def make_probe_answer(
    name: str,
    sentence: str,
    faults: Sequence[FoundDeviation] = (),
    *,
    facts: Mapping[str, Value] | None = None,
    tables: Sequence[Table] = (),
) -> ProbeAnswer:
    """A wiring probe's answer: one finding a fault, worst first, or one that passes with `sentence`.

    sentence: what was measured, right or wrong; with `facts` it is the probe's part of the conformance statement.
    """
    pairs, shown = tuple((facts or {}).items()), tuple(table.name for table in tables)
    findings = [
        Finding(
            name=name if index == 0 else f"{name}.{index}",
            outcome=fault.outcome,
            sentence=f"{deviation(fault.name).sentence}: {fault.measured}",
            fault=fault.name,
            evidence=fault.evidence,
            next_step=deviation(fault.name).do,
            tables=shown,
        )
        for index, fault in enumerate(sorted(faults, key=lambda each: WORST_FIRST.index(each.outcome)))
    ]
    if not findings:
        findings = [Finding(name=name, outcome="pass", sentence=sentence, evidence=pairs, tables=shown)]
    statement = Statement(probe=name, sentence=sentence, facts=pairs)
    return ProbeAnswer(findings=tuple(findings), tables=tuple(tables), statement=statement)


def one(name: str, outcome: Outcome, sentence: str, **rest: Any) -> ProbeAnswer:
    """An answer of one finding and no statement."""
    return ProbeAnswer(findings=(Finding(name=name, outcome=outcome, sentence=sentence, **rest),))


def list_fc_taps(recipe: Recipe) -> tuple[str, ...]:
    """Taps of the slices that the recipe feeds to fc, in order."""
    return tuple(f"layer.{layer}.out" for layer in recipe.conditioning.decoder_layers)
