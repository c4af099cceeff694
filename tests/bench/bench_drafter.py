"""How long one step of the drafter takes, and how much memory: ours against speculators and SpecForge.

    PYTHONPATH=. python tests/bench/bench_drafter.py                     # times, growth, profile, memory
    PYTHONPATH=. python tests/bench/bench_drafter.py times --size 512/64 --repeats 5

Needs `make peers`. The same weights (each peer reads them from our export), the same batch and anchors, forward and
backward, fp32 on one thread. All steps of a size run interleaved in one process, in an order that is drawn anew in
each round; medians are of the processor's time, which other processes disturb less than the clock's. The losses
must agree to 1e-5: hard CE on labels that are the teacher's argmax and the data's tokens at once, slots weighted
alike, so that the peers' reductions are one.

The size is issue B's: hidden 256, 3 layers, 8 heads, 4 key-value heads, intermediate 768, 5 conditioning layers,
block 8, vocabulary 4,096 (32,768 for memory). Memory is the peak of a process of its own above its level before the
first step.
"""

import argparse
import contextlib
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from parity.model.dflash.config import DrafterConfig
from parity.model.dflash.drafter import Drafter
from parity.model.dflash.export import TargetLayers, save_speculators, save_zlab
from parity.model.dflash.mask import VisibilityRule, training_layout
from parity.model.drafting.session import EmbeddingAndHead
from parity.model.training.anchors import block_ids, blocks_at
from parity.model.training.loss import LossConfig, TeacherStates, Uniform, objective, teacher_labels

WIDTH, BLOCK, LAYERS = 256, 8, (1, 2, 3, 4, 5)
SIZES = ((512, 64), (1024, 128), (2048, 256))
AIMS = {"time": (0.70, 0.55, 0.42), "memory": 0.5}
"""Of issue B, as shares of the faster and of the smaller peer."""
PEERS = ("speculators-eager", "speculators-sdpa", "specforge-sdpa")
KINDS = ("ours", "ours-data", *PEERS)
"""ours: labels formed from the teacher, as speculators does. ours-data: the data's tokens, as SpecForge does."""
Step = Callable[[], Tensor]


@dataclass(frozen=True, kw_only=True)
class Batch:
    """One row, anchors, and the target's states of it."""

    ids: Tensor
    states: Tensor
    last: Tensor
    """[S, D] before the final norm, such that the teacher's argmax at t is token t + 1."""
    anchors: Tensor


def make_target(folder: Path, vocabulary: int) -> EmbeddingAndHead:
    """A random dense target that the peers read embedding, head and norm from."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    sizes: dict[str, Any] = dict(
        num_attention_heads=2, num_key_value_heads=1, head_dim=16, intermediate_size=32
    )
    config = Qwen3Config(vocab_size=vocabulary, hidden_size=WIDTH, num_hidden_layers=7, **sizes)
    model = Qwen3ForCausalLM(config)
    model.save_pretrained(folder)
    return EmbeddingAndHead(
        embed=model.model.embed_tokens.weight.detach(), head=model.lm_head.weight.detach()
    )


def make_drafter(vocabulary: int) -> Drafter:
    drafter = Drafter(
        DrafterConfig(
            hidden_size=WIDTH,
            intermediate_size=768,
            num_heads=8,
            num_kv_heads=4,
            head_dim=32,
            conditioning=len(LAYERS),
            block_size=BLOCK,
            mask_token_id=vocabulary - 1,
            layers=(VisibilityRule(),) * 3,
        )
    )
    drafter.reset(torch.Generator().manual_seed(0))
    return drafter


def make_batch(size: tuple[int, int], head: Tensor) -> Batch:
    tokens, anchors = size
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(len(head) - 1, (tokens,), generator=generator)
    chosen = torch.randperm(tokens - BLOCK, generator=generator)[:anchors].sort().values
    states = torch.randn(tokens, len(LAYERS) * WIDTH, generator=generator)
    last = head[ids.roll(-1)] * WIDTH**0.5
    labels = (F.rms_norm(last, (WIDTH,)) @ head.T).argmax(-1)
    assert torch.equal(labels[:-1], ids[1:]), "the teacher must say what the data says"
    return Batch(ids=ids, states=states, last=last, anchors=chosen)


class Bench:
    """Steps of all kinds on one batch; `size` may be changed."""

    def __init__(self, folder: Path, vocabulary: int, kinds: tuple[str, ...], size: tuple[int, int]) -> None:
        self.folder, self.vocabulary = folder, vocabulary
        self.ends = make_target(folder / "target", vocabulary)
        self.drafter = make_drafter(vocabulary)
        self.batch = make_batch(size, self.ends.head)
        self.wiring = TargetLayers(
            layers=LAYERS,
            num_target_layers=7,
            vocab_size=vocabulary,
            target=str(folder / "target"),
            architectures=("Qwen3ForCausalLM",),
        )
        self.steps = {kind: self._make(kind) for kind in kinds}

    def _make(self, kind: str) -> Step:
        if kind.startswith("ours"):
            return self._ours(teacher=kind == "ours")
        name, _, attention = kind.partition("-")
        with quiet():
            return self._specforge(attention) if name == "specforge" else self._speculators(attention)

    def _ours(self, *, teacher: bool) -> Step:
        config = LossConfig(terms={"ce": 1.0}, weights=Uniform())
        drafter, ends = self.drafter, self.ends

        def step() -> Tensor:
            batch = self.batch
            drafter.zero_grad(set_to_none=True)
            position, document = torch.arange(len(batch.ids)), torch.zeros_like(batch.ids)
            blocks = blocks_at(batch.anchors, batch.ids, torch.ones_like(batch.ids), document, BLOCK)
            layout = training_layout(position, document, batch.anchors, BLOCK)
            embedded = F.embedding(
                block_ids(batch.ids, batch.anchors, BLOCK, self.vocabulary - 1), ends.embed
            )
            labels = blocks.labels
            if teacher:
                normed = F.rms_norm(batch.last, (WIDTH,), eps=1e-6)
                own = TeacherStates(states=normed, index=blocks.teacher_index, head=ends.head)
                labels = teacher_labels(own, blocks.supervised)
            hidden = drafter(batch.states, embedded, layout)
            loss = objective(hidden, ends.head, labels, blocks.supervised, config).loss()
            loss.backward()
            return loss.detach()

        return step

    def _speculators(self, attention: str) -> Step:
        from speculators.losses import resolve_loss_config
        from speculators.models.dflash import core
        from speculators.models.dflash.config import DFlashSpeculatorConfig

        path = str(save_speculators(self.folder / f"speculators-{attention}", self.drafter, self.wiring))
        config = DFlashSpeculatorConfig.from_pretrained(path)
        config.transformer_layer_config._attn_implementation = attention
        model = core.DFlashDraftModel.from_pretrained(path, config=config).train()
        core.select_anchors = lambda *_: (
            self.batch.anchors,
            torch.ones(len(self.batch.anchors), dtype=torch.bool),
        )
        losses = resolve_loss_config("ce", "eager")

        def step() -> Tensor:
            batch = self.batch
            model.zero_grad(set_to_none=True)
            ones = torch.ones(1, len(batch.ids), dtype=torch.long)
            loss = model(
                hidden_states=batch.states[None],
                input_ids=batch.ids[None],
                loss_mask=ones,
                verifier_last_hidden_states=batch.last[None],
                document_ids=torch.zeros_like(ones),
                max_anchors=len(batch.anchors),
                loss_config=losses,
                gamma=1e12,  # exp(-k / gamma) is 1: then its mean over the mask is the weighted mean
                per_position_loss_weight="fixed-exp-decay",
            )[1].squeeze()
            loss.backward()
            return torch.as_tensor(loss.detach())

        return step

    def _specforge(self, attention: str) -> Step:
        from specforge.algorithms.common.dflash_family_model import OnlineDFlashModel
        from specforge.modeling.draft.dflash import DFlashDraftModel

        path = save_zlab(self.folder / "specforge", self.drafter, self.wiring)
        head = torch.nn.Linear(WIDTH, self.vocabulary, bias=False)
        embed = torch.nn.Embedding(self.vocabulary, WIDTH)
        head.weight, embed.weight = (
            torch.nn.Parameter(each, requires_grad=False) for each in (self.ends.head, self.ends.embed)
        )
        wrapper = OnlineDFlashModel(
            draft_model=DFlashDraftModel.from_pretrained(path, attn_implementation=attention),
            target_lm_head=head,
            target_embed_tokens=embed,
            mask_token_id=self.vocabulary - 1,
            block_size=BLOCK,
            attention_backend=attention,
        ).train()
        wrapper._sample_anchor_positions = lambda *_: (
            self.batch.anchors[None],
            torch.ones(1, len(self.batch.anchors), dtype=torch.bool),
        )

        def step() -> Tensor:
            batch = self.batch
            wrapper.zero_grad(set_to_none=True)
            ones = torch.ones(1, len(batch.ids), dtype=torch.long)
            loss = wrapper(input_ids=batch.ids[None], hidden_states=batch.states[None], loss_mask=ones)[0]
            loss.backward()
            return torch.as_tensor(loss.detach())

        return step


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Peers announce themselves on both streams."""
    with Path(os.devnull).open("w") as nowhere:
        with contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
            yield


def medians(bench: Bench, repeats: int) -> dict[str, float]:
    """Seconds of the processor for one step of each kind, interleaved; checks that all compute the same loss."""
    losses = {kind: float(step()) for kind, step in bench.steps.items()}
    assert max(losses.values()) - min(losses.values()) < 1e-5, losses
    seconds: dict[str, list[float]] = {kind: [] for kind in bench.steps}
    order, shuffle = list(bench.steps), random.Random(0)
    for _ in range(repeats):
        shuffle.shuffle(order)
        for kind in order:
            start = time.process_time()
            bench.steps[kind]()
            seconds[kind].append(time.process_time() - start)
    return {kind: statistics.median(each) for kind, each in seconds.items()}


def times(bench: Bench, sizes: list[tuple[int, int]], repeats: int) -> None:
    """The table of issue B."""
    print("processor seconds a step, medians; share: ours of the faster peer; aim: issue B's")
    print(f"{'tokens/anchors':14s}" + "".join(f"{kind:>19s}" for kind in bench.steps) + "   share   aim")
    for size in sizes:
        bench.batch = make_batch(size, bench.ends.head)
        found = medians(bench, repeats)
        peers = [found[kind] for kind in PEERS if kind in found]
        share = f"{found['ours'] / min(peers):.2f}" if peers else "-"
        aim = f"{AIMS['time'][SIZES.index(size)]:.2f}" if size in SIZES else "-"  # type: ignore[index]
        row = "".join(f"{found[kind]:19.3f}" for kind in bench.steps)
        print(f"{size[0]:>7d}/{size[1]:<6d}{row}   {share:>5s}  {aim:>4s}", flush=True)


def growth(bench: Bench, tokens: int, repeats: int) -> None:
    """How time grows with anchors on a row of one length."""
    kinds = [kind for kind in bench.steps if kind in ("ours", "speculators-sdpa", "specforge-sdpa")]
    print(f"\ngrowth with anchors, {tokens} tokens (processor seconds, and times the first row)")
    print(f"{'anchors':>7s}" + "".join(f"{kind:>26s}" for kind in kinds))
    first: dict[str, float] = {}
    for anchors in (32, 64, 128, 256):
        bench.batch = make_batch((tokens, anchors), bench.ends.head)
        found = medians(bench, repeats)
        first = first or found
        cells = "".join(f"{found[kind]:18.3f} x{found[kind] / first[kind]:6.2f}" for kind in kinds)
        print(f"{anchors:7d}{cells}", flush=True)


def profile(bench: Bench, size: tuple[int, int], rows: int = 12) -> None:
    """The operators that ours spends its time in."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as recording

    bench.batch = make_batch(size, bench.ends.head)
    bench.steps["ours"]()
    with quiet(), recording(activities=[ProfilerActivity.CPU]) as made:
        for _ in range(3):
            bench.steps["ours"]()
    events = sorted(made.key_averages(), key=lambda event: -event.self_cpu_time_total)
    whole = sum(event.self_cpu_time_total for event in events)
    print(f"\nprofile of ours at {size[0]}/{size[1]}: {whole / 3e6:.3f} s a step")
    for event in events[:rows]:
        print(f"{event.self_cpu_time_total / whole:7.1%} {event.count // 3:6d} calls a step  {event.key}")


# --- memory -------------------------------------------------------------------------------------------


def _status(key: str) -> int:
    """A size of this process in bytes, from /proc."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    raise AssertionError(key)


def peak(kind: str, vocabulary: int, size: tuple[int, int]) -> None:
    """In a process of its own: print the peak of three steps above the level before the first, in bytes."""
    with tempfile.TemporaryDirectory() as scratch:
        bench = Bench(Path(scratch), vocabulary, (kind,), size)
        before = _status("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts anew
        for _ in range(3):
            bench.steps[kind]()
        print(_status("VmHWM") - before)


def memory(vocabulary: int, sizes: list[tuple[int, int]]) -> None:
    kinds = [kind for kind in KINDS if kind != "speculators-eager"]
    print(f"\npeak resident MiB above the level before the first step, vocabulary {vocabulary:,}")
    print(f"{'tokens/anchors':14s}" + "".join(f"{kind:>19s}" for kind in kinds) + "   share   aim")
    for size in sizes:
        found = {}
        for kind in kinds:
            line = [sys.executable, __file__, "peak", "--kind", kind, "--vocabulary", str(vocabulary)]
            line += ["--size", f"{size[0]}/{size[1]}"]
            done = subprocess.run(line, capture_output=True, text=True, check=True)
            found[kind] = int(done.stdout.split()[-1]) / 2**20
        share = found["ours"] / min(found[kind] for kind in PEERS if kind in found)
        cells = "".join(f"{found[kind]:19.0f}" for kind in kinds)
        print(f"{size[0]:>7d}/{size[1]:<6d}{cells}   {share:5.2f}  {AIMS['memory']:4.2f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parts = ("all", "times", "growth", "profile", "memory", "peak")
    parser.add_argument("part", nargs="?", choices=parts, default="all")
    parser.add_argument("--size", action="append", help="tokens/anchors, may repeat")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--kind", action="append", choices=KINDS, help="which steps, may repeat")
    parser.add_argument("--vocabulary", type=int, default=None)
    given = parser.parse_args()
    torch.set_num_threads(1)
    sizes = [(int(t), int(a)) for t, _, a in (each.partition("/") for each in given.size or [])] or list(
        SIZES
    )
    part, kinds = given.part, tuple(given.kind or KINDS)
    if part == "peak":
        peak(kinds[0], given.vocabulary or 32_768, sizes[0])
        return
    if part != "memory":
        with tempfile.TemporaryDirectory() as scratch:
            bench = Bench(Path(scratch), given.vocabulary or 4_096, kinds, sizes[0])
            if part in ("all", "times"):
                times(bench, sizes, given.repeats)
            if part in ("all", "growth"):
                growth(bench, 1024, given.repeats)
            if part in ("all", "profile"):
                profile(bench, sizes[min(1, len(sizes) - 1)])
    if part in ("all", "memory"):
        memory(given.vocabulary or 32_768, sizes)


if __name__ == "__main__":
    main()
