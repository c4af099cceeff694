"""What the states are worth: tau of the `tiny` preset, and of the same drafter fed token embeddings instead.

    PYTHONPATH=. OMP_NUM_THREADS=1 python tests/bench/bench_tau.py --out DIR

Both runs are what `parity train` does: same training file, documents, seeds, anchors and steps; in the control
every conditioning slice is replaced by the embedding of its token, in training and in measuring, while labels
stay the target's. Tau is measured at temperature 0 on `corpus.openings`, a fair sample of held-out beginnings of
conversations, offline; the real loop then drafts the same prompts, and its texts must be token for token what
transformers' own `generate` writes greedily. Everything is fp32. A run that was stopped goes on from DIR.

Issue B's promise is asserted at the end: 400 steps, tau of at least 4.0, and at least 1.0 more than the control.
"""

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from parity.model.drafting.decode import (
    DecodeConfig,
    DecodeResult,
    RecordedText,
    decode,
    greedy,
    offline_tau,
    slot_acceptance,
    tau,
)
from parity.model.drafting.proposer import DrafterModule
from parity.model.drafting.session import EmbeddingAndHead
from parity.model.recipe.presets import preset
from parity.model.target.backends import isolate, parse_backend
from parity.model.target.load import Target
from parity.model.tiny import corpus
from parity.model.training.build import open_trainer
from parity.model.training.data import Batch
from parity.model.training.states import StateSource, StepStates, tokenizer_of
from parity.model.training.trainer import Trainer

STEPS, TAU, MORE = 400, 4.0, 1.0
"""What issue B promises: optimizer steps, accepted length, and by how much the control stays behind."""
NEW_TOKENS = 64
"""More than any answer of the corpus takes; a text that reaches it is cut in every way of writing it alike."""


class Embeddings:
    """A source of states whose conditioning slices are token embeddings; the teacher's slice stays."""

    def __init__(self, source: StateSource, embed: Tensor) -> None:
        self.source, self.embed = source, embed

    def __call__(self, batch: Batch) -> StepStates:
        captured = self.source(batch)
        states = captured.states.clone()
        states[:, : captured.conditioning] = self.embed[batch.tokens][:, None].to(states)
        return replace(captured, states=states)

    def recorded(self, record: RecordedText, conditioning: int) -> RecordedText:
        """A recorded text with its states replaced likewise."""
        tokens = record.tokens[: len(record.states)]
        return replace(record, states=self.embed[tokens].to(record.states).repeat(1, conditioning))


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """A line of the table."""

    fed: str
    steps: int
    results: list[DecodeResult]
    minutes: float
    """Of the steps, by the clock; those before an interruption included."""
    processor: float
    """Processor minutes of this call's steps and validations: the figure to read on a shared machine."""
    accuracy: float
    """Of the supervised slots of the validation documents, at the last step."""


def trained(trainer: Trainer, fed: str) -> float:
    """Run to the end; returns the validation accuracy there."""

    def show(record: Any) -> None:
        if record["event"] == "validation" or record["step"] % 20 == 0:
            figures = {k: record[k] for k in ("loss", "accuracy", "accepted", "tau") if k in record}
            words = " ".join(f"{name} {value:.3f}" for name, value in figures.items())
            print(f"{fed}: {record['event']} {record['step']} {words}", flush=True)

    interrupted = trainer.run(show=show).interrupted
    trainer.close()
    if interrupted:
        raise SystemExit("interrupted and saved; run the same command again to go on")
    trainer.drafter.eval()
    return float(trainer.evaluate()["accuracy"])


def prompts_of(tokenizer: Any, count: int) -> list[list[int]]:
    """Token ids of the held-out openings, as a server would send them."""
    return [
        list(
            tokenizer.apply_chat_template(
                opening.messages,
                add_generation_prompt=True,
                enable_thinking=opening.thinking,
                return_dict=True,
            )["input_ids"]
        )
        for opening in corpus.openings(count)
    ]


@torch.no_grad()
def generated(target: Target, prompt: Sequence[int], stop_ids: tuple[int, ...]) -> tuple[int, ...]:
    """What transformers writes greedily after a prompt."""
    ids = torch.tensor([prompt])
    out = target.model.generate(  # type: ignore[operator]
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=NEW_TOKENS,
        eos_token_id=list(stop_ids),
    )
    return tuple(out[0, len(prompt) :].tolist())


def check_loop(
    target: Target,
    drafter: DrafterModule,
    prompts: list[list[int]],
    offline: list[DecodeResult],
    config: DecodeConfig,
) -> str:
    """Draft the prompts for real; raises AssertionError where a token or an accepted length differs."""
    results = decode(target, drafter, prompts, config)
    for prompt, made, expected in zip(prompts, results, offline, strict=True):
        assert made.tokens == generated(target, prompt, config.stop_ids), "not the target's own greedy text"
        assert made.tokens == expected.tokens and made.acceptance_lengths == expected.acceptance_lengths, (
            "offline tau differs"
        )
    tokens = sum(len(made.tokens) for made in results)
    assert tokens > 0 and tau(results) == tau(offline)
    return f"{len(prompts)} texts, {tokens:,} tokens equal transformers' greedy ones; tau {tau(results):.3f}"


def table(rows: list[Row], ceiling: float, prompts: int) -> Table:
    made = Table(title=f"tiny preset, {prompts} held-out openings, fp32, one thread")
    for name in (
        "fed to fc",
        "steps",
        "tau",
        "of ceiling",
        "accuracy",
        "minutes",
        "processor",
        "acceptance by slot",
    ):
        made.add_column(name, justify="right" if name != "fed to fc" else "left")
    for row in rows:
        slots = " ".join(f"{share:.2f}" for share in slot_acceptance(row.results))
        shares = (f"{tau(row.results):.3f}", f"{tau(row.results) / ceiling:.0%}", f"{row.accuracy:.3f}")
        made.add_row(row.fed, str(row.steps), *shares, f"{row.minutes:.1f}", f"{row.processor:.1f}", slots)
    return made


def ceiling_of(records: Sequence[RecordedText], block: int) -> float:
    """Tau of a drafter whose every draft is right: texts end, and their last block is cut short."""
    new = [len(record.tokens) - record.prompt - 1 for record in records]
    return sum(new) / sum(-(-count // block) for count in new)


def main() -> None:
    """Train both, measure, print, assert."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for both runs; they can be continued")
    parser.add_argument("--prompts", type=int, default=120)
    parser.add_argument("--loop", type=int, default=120, help="prompts that the real loop drafts as well")
    parser.add_argument("--set", default="{}", help="JSON of dotted changes to the preset, to try things")
    options = parser.parse_args()
    torch.set_num_threads(1)
    isolate(
        parse_backend("torch")
    )  # before transformers is imported: without a GPU an importable fla would be chosen
    console = Console(width=120)

    began = time.perf_counter()
    training = preset("tiny").with_values(
        {"run.data.cache": str(options.out / "cache")} | json.loads(options.set)
    )
    first = open_trainer(training, out=options.out / "states", say=print)
    opened = (time.perf_counter() - began) / 60
    target, block = first.parts.target, training.recipe.block.size
    assert target is not None and block == 8 and training.recipe.target.dtype == "float32"
    weights = {name: value.clone() for name, value in first.drafter.state_dict().items()}
    source = Embeddings(first.source, first.parts.embed)
    control = Trainer(
        training,
        first.parts,
        source,
        first.feed.documents,
        first.validation,
        out=options.out / "embeddings",
    )
    if first.step_number == control.step_number == 0:
        assert all(torch.equal(weights[name], value) for name, value in control.drafter.state_dict().items())

    tokenizer = tokenizer_of(training.recipe)
    layers, stop = training.recipe.conditioning.decoder_layers, (tokenizer.eos_token_id,)
    config = DecodeConfig(layers=layers, max_new_tokens=NEW_TOKENS, stop_ids=stop)
    prompts = prompts_of(tokenizer, options.prompts)
    records = [greedy(target, prompt, config) for prompt in prompts]
    fed = {"states": records, "embeddings": [source.recorded(record, len(layers)) for record in records]}

    rows = []
    for name, trainer in (("states", first), ("embeddings", control)):
        start = time.process_time()
        accuracy = trained(trainer, name)
        processor = (time.process_time() - start) / 60
        results = offline_tau(
            trainer.drafter, EmbeddingAndHead.of(target), fed[name], max_new_tokens=NEW_TOKENS
        )
        minutes = trainer.seconds / 60
        spent = {"minutes": minutes, "processor": processor}
        row = Row(fed=name, steps=trainer.step_number, results=results, accuracy=accuracy, **spent)
        rows.append(row)
        console.print(
            f"{name}: tau {tau(results):.3f} after {row.steps} steps, {minutes:.1f} min", style="bold"
        )
    some = slice(min(options.loop, options.prompts))
    loop = check_loop(target, first.drafter, prompts[some], rows[0].results[some], config)

    ceiling = ceiling_of(records, block)
    console.print(table(rows, ceiling, len(prompts)))
    console.print(f"ceiling {ceiling:.3f}: every draft right; texts end before their last block does")
    console.print(f"loop: {loop}")
    console.print(
        f"before the first step {opened:.1f} min (the target wrote {len(first.feed.documents):,} documents)"
    )
    own, other = (tau(row.results) for row in rows)
    assert all(row.steps == STEPS for row in rows), f"steps {[row.steps for row in rows]}, not {STEPS}"
    assert own >= TAU, f"tau {own:.3f}, promised {TAU}"
    assert own - other >= MORE, f"{own - other:.3f} more than on embeddings, promised {MORE}"
    console.print(
        f"tau {own:.3f}, {own - other:.3f} more than on embeddings, after {STEPS} steps each: as promised"
    )


if __name__ == "__main__":
    main()
