"""`parity eval`: how many tokens a drafter's blocks are worth, by the real draft-verify loop.

    report = evaluate("parity-train")                             # held-out prompts of its own data
    report = evaluate("parity-train", prompts=Path("prompts.jsonl"), min_tau=4.0)

The loop runs with the target's own cache; what it writes is compared with the target's own greedy text, and the
accepted length of every cycle with the offline one, which is computed from that text and its states alone. Who
computed the linear layers is counted, as in a capture.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import KW_ONLY, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from parity.capturing.prompts import read_prompts
from parity.environment import environment
from parity.errors import ParityError
from parity.options import accept_fields
from parity.reports.record import Chart, Finding, Outcome, Report, Table, Value, declare_columns

if TYPE_CHECKING:
    from parity.model.drafting.decode import DecodeConfig, DecodeResult
    from parity.model.recipe.config import TrainingFile
    from parity.model.training.states import SharedModules
    from parity.tracing.trace import BackendProof

MAX_PROMPTS = 120
"""Prompts by default: with about ten cycles each, tau's standard error is a few hundredths."""
LISTED_PROMPTS = 40
"""Prompts up to which the terminal shows a row each; the page and the JSON always have them."""
EvaluationProgress = Callable[[int, int], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Row:
    """One prompt."""

    name: str
    ids: tuple[int, ...]


@dataclass(kw_only=True, slots=True)
class _Measured:
    """What was measured, prompt by prompt."""

    rows: Sequence[_Row]
    config: "DecodeConfig"
    dtype: str
    backend: str
    loop: list["DecodeResult"] = field(default_factory=list)
    offline: list["DecodeResult"] = field(default_factory=list)
    """Empty where tokens are sampled."""
    proof: "BackendProof | None" = None
    """None where the target has no linear layer."""


@dataclass(frozen=True, slots=True)
class EvaluateOptions:
    """What is evaluated, on which prompts, and what would be too little."""

    checkpoint: str | Path
    """A checkpoint, or the folder of a run."""
    _: KW_ONLY
    prompts: Path | None = None
    """A file as for `capture`; None takes the held-out conversations of the data it was trained on."""
    which: Literal["last", "best"] = "last"
    """Which checkpoint of a run."""
    max_prompts: int = MAX_PROMPTS
    """Prompts at most."""
    new_tokens: int = 64
    """Tokens generated for a prompt at most."""
    temperature: float = 0.0
    """0 is greedy; above it tokens are sampled."""
    seed: int = 0
    """Of the sampling."""
    min_tau: float | None = None
    """Below this acceptance length the finding `eval.tau` fails."""
    device: str | None = None
    """Instead of the training file's."""
    progress: EvaluationProgress = lambda done, total: None
    """Called with (prompts done, of how many)."""
    command: str = "parity.evaluate"
    """What the report names as its command."""


@accept_fields(EvaluateOptions)
def evaluate(options: EvaluateOptions) -> Report:
    """Measure the acceptance length (tau) of a checkpoint, or of a run's last or best one; a report of kind `eval`.

    Args:
        checkpoint: a checkpoint, or the folder of a run.
        prompts: a file as for `capture`; None takes held-out conversations of the data it was trained on.
        which: the last or the best checkpoint of a run.
        max_prompts: prompts at most.
        new_tokens: tokens generated for a prompt at most.
        temperature: 0 is greedy; above it tokens are sampled.
        seed: of the sampling.
        min_tau: below this acceptance length the finding `eval.tau` fails.
        device: instead of the training file's.
        progress: called with (prompts done, of how many).
        command: what the report names as its command.

    Raises:
        ParityError: for a checkpoint or prompts that cannot be used.
    """
    import torch

    from parity.model.drafting.decode import DecodeConfig
    from parity.model.training import checkpoint as checkpoints
    from parity.model.training.states import open_target

    began = time.monotonic()
    folder = _locate_checkpoint(Path(options.checkpoint), options.which)
    drafter, training = checkpoints.load_drafter(folder)
    run: dict[str, Any] = {"run.states": {"kind": "online"}}
    training = training.with_values(run | ({"run.device": options.device} if options.device else {}))
    parts, _, tokenizer = open_target(training)
    drafter.to(training.run.device)
    rows = _rows(training, tokenizer, options.prompts, options.max_prompts)
    config = DecodeConfig(
        layers=training.recipe.conditioning.decoder_layers,
        max_new_tokens=options.new_tokens,
        temperature=options.temperature,
        stop_ids=_stop_ids(parts),
        seed=options.seed,
    )
    dtype = str(parts.embed.dtype).removeprefix("torch.")
    measured = _Measured(rows=rows, config=config, dtype=dtype, backend=training.recipe.target.backend)
    with torch.no_grad():
        _measure(measured, parts, drafter, options.progress)
    return _report(
        measured,
        folder,
        training,
        options.prompts,
        options.min_tau,
        options.command,
        time.monotonic() - began,
    )


def _locate_checkpoint(path: Path, which: str) -> Path:
    from parity.model.training import checkpoint as checkpoints

    if (path / "config.json").is_file() and not (path / checkpoints.STATE).is_file():
        found, do = "a checkpoint for other readers", f"first: parity import {path} --out RUN; then eval RUN"
        raise ParityError(f"a checkpoint in {path}", found, do)
    return checkpoints.find_checkpoint(path, which)


def _stop_ids(parts: "SharedModules") -> tuple[int, ...]:
    """The ids with which the target ends a text."""
    generation = getattr(parts.target.model, "generation_config", None) if parts.target else None
    stop = getattr(generation, "eos_token_id", None)
    return tuple(stop) if isinstance(stop, list) else () if stop is None else (int(stop),)


def _rows(training: "TrainingFile", tokenizer: Any, prompts: Path | None, most: int) -> list[_Row]:
    """What is to be continued: the file's prompts, or the held-out ones."""
    if prompts is None:
        return _held_out(training, tokenizer, most)
    from parity.model.target.prompt_ids import entries

    model = training.recipe.target.model
    # The stand-in speaks the embedded targets' vocabulary and has their tokenizer, but no folder of its own.
    name = "embedded:hybrid" if model.startswith("synthetic:") else model
    made = entries(name, training.recipe.target.revision, read_prompts(prompts)[:most], None)
    return [_Row(name=each.id, ids=each.token_ids[: each.prompt_tokens]) for each in made]


def _held_out(training: "TrainingFile", tokenizer: Any, most: int) -> list[_Row]:
    from parity.model.training.data import read_documents

    data = training.run.data.model_copy(update={"regenerate": 0, "cache": None})  # prompts stay the same
    if data.path is None:
        data = data.model_copy(update={"validation_documents": most})
    try:
        documents = read_documents(data, tokenizer, split="held_out")[:most]
    except ParityError as error:
        raise ParityError(error.asked, error.found, "give --prompts FILE") from error
    rows = [
        _Row(name=f"held-out {each.sample_id}", ids=tuple(each.tokens[: int(each.mask.argmax())].tolist()))
        for each in documents
    ]
    rows = [row for row in rows if row.ids]
    if not rows:
        found = "no held-out document that begins with a prompt"
        raise ParityError(f"prompts from {data.path or data.source}", found, "give --prompts FILE")
    return rows


def _measure(measured: _Measured, parts: "SharedModules", drafter: Any, progress: EvaluationProgress) -> None:
    """Fill the loop's and the offline results, and the proof of who computed."""
    from parity.model.drafting.decode import decode, greedy, offline_tau
    from parity.model.drafting.session import EmbeddingAndHead
    from parity.model.target.backends import CallRecorder, parse_backend, prove

    linear = parts.target.linear if parts.target else {}
    records, config, speaker = [], measured.config, parts.speaker
    recorder = CallRecorder(linear) if linear else None
    with recorder or nullcontext():
        for number, row in enumerate(measured.rows):
            one = replace(config, seed=config.seed + number)
            measured.loop += decode(speaker, drafter, [row.ids], one)
            if config.temperature == 0:
                records.append(greedy(speaker, row.ids, one))
            progress(number + 1, len(measured.rows))
    if recorder is not None:
        measured.proof = prove(parse_backend(measured.backend), recorder.proofs(), linear)
    if records:
        ends = EmbeddingAndHead(embed=parts.embed, head=parts.head)
        measured.offline = offline_tau(drafter, ends, records, max_new_tokens=config.max_new_tokens)


# --- the answers --------------------------------------------------------------------------------------


def _report(
    measured: _Measured,
    folder: Path,
    training: "TrainingFile",
    prompts: Path | None,
    min_tau: float | None,
    command: str,
    seconds: float,
) -> Report:
    from parity.model.drafting.decode import tau

    config, target = measured.config, training.recipe.target
    value = tau(measured.loop)
    subject: tuple[tuple[str, Value], ...] = (
        ("checkpoint", str(folder)),
        ("recipe", training.recipe.hash),
        ("target", target.model),
        ("dtype", measured.dtype),
        ("backend", target.backend),
        ("prompts", str(prompts) if prompts else f"held-out, {training.run.data.source}"),
        ("texts", len(measured.rows)),
        ("new tokens at most", config.max_new_tokens),
        ("temperature", config.temperature),
        ("block", training.recipe.block.size),
        ("tau", value),
        ("offline tau", tau(measured.offline) if measured.offline else None),
    )
    return Report(
        kind="eval",
        title=f"tau {value:.2f} over {len(measured.rows)} prompts",
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        command=command,
        subject=subject,
        findings=(
            _tau(measured, min_tau),
            _dispatch(measured),
            _lossless(measured),
            _offline(measured),
        ),
        tables=(_slots(measured), _prompts(measured)),
        environment=tuple(environment().items()),
        seconds=seconds,
    )


def _tau(measured: _Measured, least: float | None) -> Finding:
    from parity.model.drafting.decode import tau

    cycles = sum(len(each.cycles) for each in measured.loop)
    value = tau(measured.loop)
    evidence: tuple[tuple[str, Value], ...] = (("tau", value), ("cycles", cycles), ("minimum", least))
    sentence, outcome, do = f"{value:.3f} tokens a cycle over {cycles:,} cycles", "pass", ""
    if not cycles:
        outcome, sentence = "skipped", "every text ended with its first token, before any draft"
        do = "give prompts with longer answers"
    elif least is not None and value < least:
        outcome, sentence = "fail", f"{sentence}, and at least {least:g} was asked for"
        do = "parity check RECIPE says what the training really does"
    elif value == 1:
        outcome, sentence = "warn", f"{sentence}: no draft was ever accepted"
        do = "train longer, or ask parity check RECIPE what the training really does"
    elif least is not None:
        sentence += f", and {least:g} was asked for"
    return _finding("eval.tau", outcome, sentence, evidence, do, "eval.slots", "eval.prompts")


def _finding(
    name: str,
    outcome: str,
    sentence: str,
    evidence: Sequence[tuple[str, Value]] = (),
    do: str = "",
    *tables: str,
) -> Finding:
    known: Outcome = outcome  # type: ignore[assignment]
    return Finding(
        name=name,
        outcome=known,
        sentence=sentence,
        evidence=tuple(evidence),
        next_step=do if outcome != "pass" else "",
        tables=tables,
    )


def _dispatch(measured: _Measured) -> Finding:
    proof = measured.proof
    if proof is None:
        sentence = "the target has no linear-attention layer: there is no kernel to choose"
        return _finding("eval.dispatch", "skipped", sentence, do="nothing is to be done")
    ran = sorted({f"{call.operator}: {call.implementation}" for call in proof.calls})
    calls = sum(call.calls for call in proof.calls)
    evidence: list[tuple[str, Value]] = [("asked for", measured.backend), ("calls", calls)]
    if proof.valid:
        return _finding("eval.dispatch", "pass", f"{'; '.join(ran)} in all {calls:,} calls", evidence)
    evidence += [(f"problem {n}", text) for n, text in enumerate(proof.problems[:4], 1)]
    sentence = f"another backend than the recipe's computed: {'; '.join(ran) or 'no call was seen'}"
    return _finding("eval.dispatch", "fail", sentence, evidence, "parity env shows which backends run here")


SAMPLED = "tokens were sampled: there is no text to compare with"
BOOTSTRAP_ROUNDS = "the target computes in {}, where a block and a single token round differently"


def _lossless(measured: _Measured) -> Finding:
    """Whether the loop wrote, token for token, what the target writes without a drafter."""
    if not measured.offline:
        return _finding("eval.lossless", "skipped", SAMPLED, do="measure at temperature 0")
    other = [
        (row.name, _first_difference(loop.tokens, own.tokens))
        for row, loop, own in zip(measured.rows, measured.loop, measured.offline, strict=True)
        if loop.tokens != own.tokens
    ]
    count, tokens = len(measured.rows), sum(len(each.tokens) for each in measured.loop)
    if not other:
        sentence = f"all {tokens:,} tokens of {count} texts are the target's own greedy ones"
        return _finding("eval.lossless", "pass", sentence)
    sentence = f"{len(other)} of {count} texts are not the target's own greedy ones"
    evidence = [(f"{name}, first at token", at) for name, at in other[:4]]
    do = "parity check: the serving checks name what a cached block computes otherwise"
    if measured.dtype not in ("float32", "float64"):
        sentence = f"{sentence}: {BOOTSTRAP_ROUNDS.format(measured.dtype)}"
        return _finding("eval.lossless", "warn", sentence, evidence, "measure in float32 to be sure")
    return _finding("eval.lossless", "fail", sentence, evidence, do)


def _first_difference(a: Sequence[int], b: Sequence[int]) -> int:
    return next((n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _offline(measured: _Measured) -> Finding:
    """Whether the offline tau counts what the loop counts."""
    from parity.model.drafting.decode import tau

    if not measured.offline:
        return _finding("eval.offline", "skipped", SAMPLED, do="measure at temperature 0")
    cycles = sum(len(each.cycles) for each in measured.loop)
    pairs = list(zip(measured.rows, measured.loop, measured.offline, strict=True))
    other = [row.name for row, loop, own in pairs if loop.acceptance_lengths != own.acceptance_lengths]
    if not cycles:
        do = "give prompts with longer answers"
        return _finding("eval.offline", "skipped", "there was no cycle to compare", do=do)
    if not other:
        sentence = f"the offline tau is the loop's: all {cycles:,} accepted lengths are equal"
        return _finding("eval.offline", "pass", sentence)
    sentence = f"accepted lengths of {len(other)} of {len(pairs)} texts differ between loop and offline tau"
    evidence: list[tuple[str, Value]] = [("tau", tau(measured.loop)), ("offline", tau(measured.offline))]
    evidence.append(("first", other[0]))
    if measured.dtype not in ("float32", "float64"):
        sentence = f"{sentence}: {BOOTSTRAP_ROUNDS.format(measured.dtype)}"
        return _finding("eval.offline", "warn", sentence, evidence, "measure in float32 to be sure")
    do = "trust the loop; the states or the cache of the two differ: parity check says where"
    return _finding("eval.offline", "fail", sentence, evidence, do, "eval.prompts")


def _slots(measured: _Measured) -> Table:
    """How often each slot was accepted, with all before it, and once all before it were."""
    from parity.model.drafting.decode import slot_acceptance

    cycles = [cycle for result in measured.loop for cycle in result.cycles]
    rows = []
    for slot, share in enumerate(slot_acceptance(measured.loop), 1):
        drafted = sum(cycle.drafted >= slot for cycle in cycles)
        before = sum(cycle.drafted >= slot and cycle.matched >= slot - 1 for cycle in cycles)
        matched = sum(cycle.matched >= slot for cycle in cycles)
        rows.append((slot, drafted, share, matched / before if before else None))
    return Table(
        name="eval.slots",
        title="Acceptance by slot",
        columns=declare_columns(
            "slot:int | drafted:int (cycles) | accepted:float (share) | "
            "given:float given those before (share)"
        ),
        rows=tuple(rows),
        caption="accepted: this slot and all before it; given those before: among cycles that came so far",
        chart=Chart(kind="bars", x="slot", y="accepted", caption="share of cycles that accept a slot"),
    )


def _prompts(measured: _Measured) -> Table:
    rows = []
    for number, (row, loop) in enumerate(zip(measured.rows, measured.loop, strict=True)):
        offline = measured.offline[number] if measured.offline else None
        some = bool(loop.cycles)
        rows.append(
            (
                row.name,
                len(row.ids),
                len(loop.tokens),
                len(loop.cycles),
                loop.tau if some else None,
                offline.tau if offline and offline.cycles else None,
                loop.tokens == offline.tokens if offline else None,
            )
        )
    return Table(
        name="eval.prompts",
        title="Prompts",
        columns=declare_columns(
            "prompt | length:int tokens | written:int | cycles:int | tau:float | offline:float | greedy:flag"
        ),
        rows=tuple(rows),
        caption="greedy: whether the text is the target's own, token for token",
        detail=len(rows) > LISTED_PROMPTS,
    )
