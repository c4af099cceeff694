"""Train the embedded targets from nothing: seeded, resumable, on one CPU thread.

    python -m parity.model.tiny.train --out DIR [--variant hybrid|dense|both] [--steps N]
    python -m parity.model.tiny.train --measure DIR --tasks 60       # JSON figures of saved files

Writes DIR/hybrid, DIR/dense and DIR/sha256.json, the layout of the package data. A run that was stopped
goes on from DIR/.train. Same seed, same data and same order, but not the same bytes: sums differ in
their last bits between processors.

Legend: B rows, T tokens, V vocabulary.
"""

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from parity.errors import ParityError
from parity.files import replace_atomically
from parity.model.target.chat import ChatTokenizer
from parity.model.tiny import corpus, embedded

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ProgressReport = Callable[[int, float, float], None]
"""Called with steps done, smoothed loss in nats and seconds a step."""

FLOAT32_NAMES = ("A_log", "dt_bias")
"""Stay float32: the decay of a state is an exponential of theirs, which magnifies rounding."""
CHECKPOINT_EVERY = 200
REPORT_EVERY = 50
MEASURE_EVERY = 800


@dataclass(frozen=True, kw_only=True, slots=True)
class TinyPlan:
    """How one variant is trained."""

    variant: embedded.Name
    """Which model."""
    steps: int
    """Optimizer steps."""
    rows: int = 12
    """Conversations in a step."""
    tokens: int = 192
    """Longest row; a row is one conversation, never two."""
    learning_rate: float = 2e-3
    """Peak of the cosine."""
    warmup: int = 100
    """Steps of linear warmup."""
    weight_decay: float = 0.01
    """On matrices only."""
    question_weight: float = 0.1
    """Weight of a token the user or the template wrote; the model's own tokens weigh 1."""
    focus: tuple[str, ...] = ()
    """Kinds that alone are drawn in the first `focus_steps` steps."""
    focus_steps: int = 0
    """0 draws every kind from the start."""
    seed: int = 0
    """Of the initial weights and of the corpus."""


DEFAULTS: dict[str, dict[str, Any]] = {
    "hybrid": {"steps": 3300},
    # In the full mix this one still answered no chain and no lookup after 2,500 steps: without a convolution
    # both take a pair of attention layers of which neither is of use alone. Asked nothing else, it learns it.
    "dense": {"steps": 4400, "focus": ("lookup", "chain", "repeat"), "focus_steps": 600},
}


@dataclass(frozen=True, kw_only=True, slots=True)
class TinyQuality:
    """What a target can do on held-out material. Shares and accuracies lie between 0 and 1."""

    loss: float
    """Mean negative log-likelihood of the answer tokens of held-out conversations, in nats a token."""
    below_90: float
    """Share of those answer tokens on which the target's top probability is below .9."""
    accuracy: float
    """Greedy answers right, over held-out tasks with one right answer."""
    thinking_accuracy: float
    """The same with `enable_thinking`, judged by what follows </think>."""
    tasks: int
    """How many tasks `accuracy` is over; `thinking_accuracy` is over as many."""
    by_kind: dict[str, float]
    """Accuracy of each kind with one right answer."""
    open_by_kind: dict[str, float]
    """Share of greedy answers that are valid, of each kind with several right answers."""
    wrong: list[str]
    """Question -> answer of every task that failed, as text."""


def build(plan: TinyPlan) -> "PreTrainedModel":
    """Make the untrained float32 model of a plan.

    A_log is uniform in -5..1 instead of transformers' log(0..16), so that some states live for 100 tokens.
    """
    from transformers import Qwen3_5ForCausalLM, Qwen3ForCausalLM

    torch.manual_seed(plan.seed)
    if plan.variant == "dense":
        dense: PreTrainedModel = Qwen3ForCausalLM(embedded.dense_config()).float()
        return dense
    model: PreTrainedModel = Qwen3_5ForCausalLM(embedded.tiny_config()).float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("A_log"):
                parameter.uniform_(-5.0, 1.0)
    return model


def sample_batch(
    tokenizer: ChatTokenizer, chats: list[list[corpus.CorpusMessage]], question_weight: float
) -> tuple[Tensor, Tensor]:
    """Render chats to int64 ids_BT, padded on the right, and float32 weights_BT.

    A token of an answer weighs 1, any other `question_weight`, padding 0.
    """
    made = tokenizer.apply_chat_template(chats, return_assistant_tokens_mask=True, return_dict=True)
    longest = max(map(len, made["input_ids"]))
    ids_BT = torch.full((len(chats), longest), tokenizer.pad_token_id)
    weights_BT = torch.zeros(len(chats), longest)
    for row, (ids, answers) in enumerate(zip(made["input_ids"], made["assistant_masks"], strict=True)):
        ids_BT[row, : len(ids)] = torch.tensor(ids)
        weights_BT[row, : len(ids)] = torch.tensor(answers).float().clamp(min=question_weight)
    return ids_BT, weights_BT


def loss_of(model: "PreTrainedModel", ids_BT: Tensor, weights_BT: Tensor) -> Tensor:
    """Weighted mean of the next-token cross-entropy, a scalar in nats."""
    logits_BTV = model(input_ids=ids_BT, use_cache=False).logits[:, :-1].float()
    each = F.cross_entropy(logits_BTV.flatten(0, 1), ids_BT[:, 1:].flatten(), reduction="none")
    weights = weights_BT[:, 1:].flatten()
    return (each * weights).sum() / weights.sum()


def optimizer_of(model: "PreTrainedModel", plan: TinyPlan) -> torch.optim.AdamW:
    """AdamW with weight decay on matrices only."""
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [
        {"params": matrices, "weight_decay": plan.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=plan.learning_rate, betas=(0.9, 0.95))


def tiny_rate(plan: TinyPlan, step: int) -> float:
    """Learning rate of a step: linear warmup, then a cosine down to a fiftieth of the peak."""
    if step < plan.warmup:
        return plan.learning_rate * (step + 1) / plan.warmup
    progress = (step - plan.warmup) / max(1, plan.steps - plan.warmup)
    return plan.learning_rate * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * progress)))


def save_checkpoint(
    path: Path,
    plan: TinyPlan,
    model: "PreTrainedModel",
    optimizer: torch.optim.Optimizer,
    *,
    step: int,
    seconds: float,
) -> None:
    """Write everything a run needs to go on, atomically: a reader sees the old file or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    state = {"plan": asdict(plan), "step": step, "seconds": seconds}
    state |= {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    with replace_atomically(path) as temporary:
        torch.save(state, temporary)


def load_tiny_checkpoint(
    path: Path, plan: TinyPlan, model: "PreTrainedModel", optimizer: torch.optim.Optimizer
) -> tuple[int, float]:
    """Restore a run in place and return (steps done, seconds used).

    Raises ParityError when the checkpoint is of another plan: going on would give neither run's figures.
    """
    state = torch.load(path, weights_only=True)
    if state["plan"] != asdict(plan):
        raise ParityError(
            f"go on with the training in {path}",
            f"it was started with another plan, {state['plan']}",
            f"delete {path} or pass the same options",
        )
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return int(state["step"]), float(state["seconds"])


@contextmanager
def tiny_progress(plan: TinyPlan, done: int) -> Iterator[ProgressReport]:
    """Give a function (step, loss, seconds a step) that shows progress.

    It draws a bar on a terminal and prints a line every `REPORT_EVERY` steps when piped.
    """
    from rich.progress import Progress

    def words(step: int, loss: float, pace: float) -> str:
        minutes = (plan.steps - step) * pace / 60
        return f"{plan.variant} loss {loss:.4f} {pace:.2f} s/step eta {minutes:.1f} min"

    if not sys.stdout.isatty():

        def plain(step: int, loss: float, pace: float) -> None:
            if step % REPORT_EVERY == 0 or step == plan.steps:
                print(f"step {step}/{plan.steps} {words(step, loss, pace)}", flush=True)

        yield plain
        return
    with Progress() as bar:
        job = bar.add_task(plan.variant, total=plan.steps, completed=done)
        yield lambda step, loss, pace: bar.update(job, completed=step, description=words(step, loss, pace))


def train_tiny(plan: TinyPlan, checkpoint: Path) -> tuple["PreTrainedModel", float]:
    """Train one variant, going on from `checkpoint` if it exists.

    Returns the float32 model and the minutes used, those before an interruption included.
    """
    tokenizer, model = embedded.tokenizer(), build(plan)
    optimizer, done, seconds = optimizer_of(model, plan), 0, 0.0
    if checkpoint.is_file():
        done, seconds = load_tiny_checkpoint(checkpoint, plan, model, optimizer)
    started, smooth, pace = time.perf_counter() - seconds, math.nan, math.nan
    with tiny_progress(plan, done) as show:
        for step in range(done, plan.steps):
            # Rows by number, so that a run that goes on draws what an uninterrupted one would.
            before = time.perf_counter()
            first = (plan.seed * plan.steps + step) * plan.rows
            kinds = plan.focus if step < plan.focus_steps else ()
            seeds = range(first, first + plan.rows)
            chats = [corpus.conversation(each, "train", plan.tokens, kinds=kinds) for each in seeds]
            loss = loss_of(model, *sample_batch(tokenizer, chats, plan.question_weight))
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for group in optimizer.param_groups:
                group["lr"] = tiny_rate(plan, step)
            optimizer.step()
            # What is reported is smoothed: loss over 50 steps, seconds over 20.
            smooth = loss.item() if math.isnan(smooth) else 0.98 * smooth + 0.02 * loss.item()
            took = time.perf_counter() - before
            pace = took if math.isnan(pace) else 0.95 * pace + 0.05 * took
            show(step + 1, smooth, pace)
            if (step + 1) % CHECKPOINT_EVERY == 0 or step + 1 == plan.steps:
                seconds = time.perf_counter() - started
                save_checkpoint(checkpoint, plan, model, optimizer, step=step + 1, seconds=seconds)
            if (step + 1) % MEASURE_EVERY == 0:
                figures = asdict(measure(model, tokenizer, tasks=45, rows=16))
                print(json.dumps({"step": step + 1} | figures | {"wrong": figures["wrong"][:8]}), flush=True)
    return model, (time.perf_counter() - started) / 60


@torch.no_grad()
def answers(
    model: "PreTrainedModel",
    tokenizer: ChatTokenizer,
    tasks: list[corpus.CorpusTask],
    *,
    thinking: bool = False,
) -> list[str]:
    """Answer each task greedily in one left-padded batch; the texts end before <|im_end|>."""
    chats = [[{"role": "user", "content": each.question}] for each in tasks]
    made = tokenizer.apply_chat_template(
        chats,
        add_generation_prompt=True,
        enable_thinking=thinking,
        padding=True,
        return_dict=True,
        return_tensors="pt",
    )
    out_BT = model.generate(  # type: ignore[operator]
        **made, do_sample=False, max_new_tokens=64
    )
    texts = tokenizer.batch_decode(out_BT[:, made["input_ids"].shape[1] :])
    return [text.split("<|im_end|>")[0] for text in texts]


@torch.no_grad()
def certainty(model: "PreTrainedModel", tokenizer: ChatTokenizer, rows: int) -> tuple[float, float]:
    """Return (loss in nats, share with top probability below .9) over held-out answer tokens."""
    chats = [corpus.conversation(row, "held_out") for row in range(rows)]
    loss, below, count = 0.0, 0.0, 0.0
    for first in range(0, rows, 16):
        ids_BT, weights_BT = sample_batch(tokenizer, chats[first : first + 16], 0.0)
        logp_BTV = model(input_ids=ids_BT, use_cache=False).logits[:, :-1].float().log_softmax(-1)
        weights_BT = weights_BT[:, 1:]
        loss -= (logp_BTV.gather(-1, ids_BT[:, 1:, None])[..., 0] * weights_BT).sum().item()
        below += ((logp_BTV.amax(-1) < math.log(0.9)) * weights_BT).sum().item()
        count += weights_BT.sum().item()
    return loss / count, below / count


def measure(
    model: "PreTrainedModel",
    tokenizer: ChatTokenizer,
    *,
    tasks: int = 180,
    rows: int = 64,
    seed: int = 0,
) -> TinyQuality:
    """Measure a float32 model on `rows` held-out conversations and `tasks` held-out tasks of each sort."""
    model.eval()
    loss, below = certainty(model, tokenizer, rows)
    closed = corpus.held_out_tasks(tasks, seed)
    plain, thought = (answers(model, tokenizer, closed, thinking=thinking) for thinking in (False, True))
    several = [
        t for t in corpus.held_out_tasks(tasks, seed, one_right_answer=False) if not t.one_right_answer
    ]
    free = answers(model, tokenizer, several)
    judged = zip(closed + closed + several, plain + thought + free, strict=True)
    return TinyQuality(
        loss=loss,
        below_90=below,
        accuracy=sum(t.check(a) for t, a in zip(closed, plain, strict=True)) / len(closed),
        thinking_accuracy=sum(t.check(a) for t, a in zip(closed, thought, strict=True)) / len(closed),
        tasks=len(closed),
        by_kind=_by_kind(closed, plain),
        open_by_kind=_by_kind(several, free),
        wrong=[f"{task.question} -> {text}" for task, text in judged if not task.check(text)],
    )


def _by_kind(tasks: list[corpus.CorpusTask], texts: list[str]) -> dict[str, float]:
    """Share of right answers of each kind that occurs in `tasks`."""
    right: dict[str, list[bool]] = {}
    for task, text in zip(tasks, texts, strict=True):
        right.setdefault(task.kind, []).append(task.check(text))
    return {kind: sum(hits) / len(hits) for kind, hits in right.items()}


def off_grid(value: Tensor) -> Tensor:
    """Move every entry that bfloat16 could hold to the next float32, so that rounding changes each."""
    on_grid = value == value.bfloat16().float()
    return torch.where(on_grid, torch.nextafter(value, torch.full_like(value, math.inf)), value)


def save_tiny(model: "PreTrainedModel", tokenizer: ChatTokenizer, folder: Path) -> None:
    """Write a target: bfloat16, but A_log and dt_bias in float32 and asserted off the bfloat16 grid."""
    state = {}
    for name, value in model.state_dict().items():
        if name == "lm_head.weight":  # tied to the embedding
            continue
        keep = name.endswith(FLOAT32_NAMES)
        state[name] = off_grid(value.float()) if keep else value.bfloat16()
        assert not keep or bool((state[name] != state[name].bfloat16()).all()), name
    folder.mkdir(parents=True, exist_ok=True)
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)  # safetensors makes it 0600
    model.config.architectures = [type(model).__name__]
    model.config.dtype = torch.bfloat16
    model.config.save_pretrained(folder)
    model.generation_config.update(do_sample=False, pad_token_id=0, eos_token_id=model.config.eos_token_id)
    model.generation_config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def load_plan(folder: Path) -> tuple[Any, Any]:
    """Load saved files as (model, tokenizer) in float32: asking for bfloat16 would round A_log as well."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")
    return model.eval(), AutoTokenizer.from_pretrained(folder)


def make(plan: TinyPlan, out: Path) -> None:
    """Train, measure, save, reload and measure again; the figures go to standard output as JSON lines."""
    model, minutes = train_tiny(plan, out / ".train" / f"{plan.variant}.pt")
    tokenizer = embedded.tokenizer()
    parameters = sum(p.numel() for p in model.parameters())
    run = {
        "variant": plan.variant,
        "parameters": parameters,
        "steps": plan.steps,
        "minutes": round(minutes, 1),
    }
    print(json.dumps(run | {"weights": "as trained"} | asdict(measure(model, tokenizer))), flush=True)
    folder = out / plan.variant
    save_tiny(model, tokenizer, folder)
    size = sum(path.stat().st_size for path in folder.iterdir())
    run["bytes"] = size
    print(json.dumps(run | {"weights": "as saved"} | asdict(measure(*load_plan(folder)))), flush=True)
    hashes = {name: embedded.file_hashes(out / name) for name in ("dense", "hybrid") if (out / name).is_dir()}
    (out / "sha256.json").write_text(json.dumps(hashes, indent=2) + "\n")


def hide_kernels() -> None:
    """Make this process unable to import fla and causal-conv1d; call it before transformers is imported.

    transformers 5.24 takes an importable fla for CPU tensors as well, and its Triton kernels then crash.
    """
    for name in ("fla", "causal_conv1d"):
        sys.modules[name] = None  # type: ignore[assignment]


def train_from_command_line() -> None:
    """Parse the command line of this script."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, help="folder for hybrid/, dense/ and sha256.json")
    parser.add_argument("--variant", choices=("hybrid", "dense", "both"), default="both")
    parser.add_argument("--steps", type=int, help="optimizer steps instead of the variant's own")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--measure", type=Path, help="measure the saved files of this folder and stop")
    parser.add_argument("--tasks", type=int, default=180, help="held-out tasks for --measure")
    parser.add_argument("--rows", type=int, default=64, help="held-out conversations for --measure")
    options = parser.parse_args()
    torch.set_num_threads(1)  # two threads on shared cores were ten times slower
    hide_kernels()
    if options.measure:
        print(
            json.dumps(
                asdict(
                    measure(
                        *load_plan(options.measure), tasks=options.tasks, rows=options.rows, seed=options.seed
                    )
                )
            )
        )
        return
    if not options.out:
        parser.error("one of --out and --measure is needed")
    for variant in ("hybrid", "dense") if options.variant == "both" else (options.variant,):
        changed = {"steps": options.steps} if options.steps else {}
        try:
            make(TinyPlan(variant=variant, seed=options.seed, **DEFAULTS[variant] | changed), options.out)
        except ParityError as error:
            parser.exit(error.exit_code, f"{error}\n")


if __name__ == "__main__":
    train_from_command_line()
