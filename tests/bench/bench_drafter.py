"""How long one forward and backward of the drafter takes, grouped against dense attention.

    PYTHONPATH=. python tests/bench/bench_drafter.py --size 512/64 --size 1024/128

Variants run interleaved in one process on one thread, on the same weights and the same batch; medians are
printed, and the losses must agree. On a shared machine read the processor's time, not the clock's. The size
is issue B's: hidden 256, 3 layers, 8 heads, 4 key-value heads, intermediate 768, 5 conditioning layers,
vocabulary 4,096, block 8.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from parity.model.anchors import blocks_at
from parity.model.drafter import AttentionKind, Drafter, block_ids
from parity.model.drafter_config import DrafterConfig
from parity.model.loss import ExpDecay, LossConfig, objective
from parity.model.mask import Rule, training_layout

VOCAB, WIDTH, BLOCK, CONDITIONING = 4_096, 256, 8, 5


def make_drafter() -> Drafter:
    config = DrafterConfig(
        hidden_size=WIDTH,
        intermediate_size=768,
        num_heads=8,
        num_kv_heads=4,
        head_dim=32,
        conditioning=CONDITIONING,
        block_size=BLOCK,
        mask_token_id=VOCAB - 1,
        layers=(Rule(),) * 3,
    )
    drafter = Drafter(config)
    drafter.reset(torch.Generator().manual_seed(0))
    return drafter


def make_step(drafter: Drafter, tokens: int, anchors: int) -> Callable[[AttentionKind], Tensor]:
    """A step on one fixed batch: embeddings, drafter, chunked objective, backward; returns the loss."""
    generator = torch.Generator().manual_seed(1)
    states = torch.randn(tokens, CONDITIONING * WIDTH, generator=generator)
    ids = torch.randint(VOCAB - 1, (tokens,), generator=generator)
    embedding = torch.randn(VOCAB, WIDTH, generator=generator)
    head = torch.randn(VOCAB, WIDTH, generator=generator) * WIDTH**-0.5
    position, document = torch.arange(tokens), torch.zeros(tokens, dtype=torch.long)
    chosen = torch.randperm(tokens - BLOCK, generator=generator)[:anchors].sort().values
    blocks = blocks_at(chosen, ids, torch.ones(tokens, dtype=torch.bool), document, BLOCK)
    config = LossConfig(terms={"ce": 1.0}, weights=ExpDecay(gamma=4.0))

    def step(attention: AttentionKind) -> Tensor:
        drafter.zero_grad(set_to_none=True)
        embedded = embedding[block_ids(ids, chosen, BLOCK, VOCAB - 1)]
        layout = training_layout(position, document, chosen, BLOCK)
        hidden = drafter(states, embedded, layout, attention=attention)
        out = objective(hidden, head, blocks.labels, blocks.supervised, config)
        loss = out.loss()
        loss.backward()
        return loss.detach()

    return step


def measure(size: tuple[int, int], kinds: Sequence[AttentionKind], repeats: int) -> None:
    tokens, anchors = size
    step = make_step(make_drafter(), tokens, anchors)
    losses = {kind: float(step(kind)) for kind in kinds}
    seconds: dict[AttentionKind, list[tuple[float, float]]] = {kind: [] for kind in kinds}
    for _ in range(repeats):
        for kind in kinds:
            start = (time.process_time(), time.perf_counter())
            step(kind)
            seconds[kind].append((time.process_time() - start[0], time.perf_counter() - start[1]))
    for kind in kinds:
        processor, clock = (statistics.median(column) for column in zip(*seconds[kind], strict=True))
        print(
            f"{tokens}/{anchors} {kind:8s} processor {processor:.3f} s, clock {clock:.3f} s "
            f"(medians of {repeats}); loss {losses[kind]:.6f}"
        )
    assert max(losses.values()) - min(losses.values()) < 1e-5, "variants must compute the same loss"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--size", action="append", help="tokens/anchors, may repeat", default=None)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--kinds", nargs="+", default=["grouped", "sdpa", "eager"])
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for size in arguments.size or ["512/64", "1024/128"]:
        tokens, anchors = (int(part) for part in size.split("/"))
        measure((tokens, anchors), arguments.kinds, arguments.repeats)


if __name__ == "__main__":
    main()
