"""What a capture costs over the bare forward, writing included: an interleaved ratio, medians.

    PYTHONPATH=. python tests/bench/bench_capture.py [ROUNDS] [DTYPE]

A random hybrid of hidden 1,024 and 8 layers, four requests of 512 tokens, bfloat16 by default, the
taps that `parity capture` records by default.
The bare forward is run twice in each round: their ratio is the noise of this machine.
"""

import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from parity.model.target.backends import isolate, parse_backend

isolate(parse_backend("torch"))
torch.set_num_threads(1)

TOKENS, LAYERS = 512, 8


def build(folder: Path) -> None:
    """Save the model."""
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    torch.manual_seed(0)
    config = Qwen3_5TextConfig(
        vocab_size=512,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=LAYERS,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=128,
        linear_num_key_heads=8,
        linear_num_value_heads=8,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        tie_word_embeddings=True,
        max_position_embeddings=2048,
    )
    Qwen3_5ForCausalLM(config).save_pretrained(folder)


def timed(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def main() -> None:
    """Print the table."""
    from parity.model.target.capture import capture
    from parity.model.target.load import load_target
    from parity.model.target.spec import TargetSpec, TraceOptions

    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 7
    dtype = sys.argv[2] if len(sys.argv) > 2 else "bfloat16"
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        build(folder / "model")
        target = load_target(TargetSpec(model=str(folder / "model"), dtype=dtype))
        target.identity  # noqa: B018 (checksums of the weights are taken once a target, not once a request)
        ids = [(7 * i) % 500 for i in range(TOKENS)]
        requests: list[dict[str, object]] = [
            {
                "id": f"r{number}",
                "token_ids": ids,
                "origin": "given",
                "prompt_tokens": TOKENS,
                "token_texts": [str(i) for i in ids],
            }
            for number in range(4)
        ]

        def bare() -> None:
            with torch.inference_mode():
                for _ in requests:
                    target.model(input_ids=torch.tensor([ids]), use_cache=False)

        def captured() -> None:
            capture(
                target,
                requests,
                folder / "t",
                TraceOptions(taps=("states",)),
                backend=parse_backend("torch"),
                fingerprint="f",
            )

        ratios: dict[str, list[float]] = {"capture / bare": [], "bare / bare": []}
        seconds = []
        bare()
        for _ in range(rounds):
            first, with_capture, second = timed(bare), timed(captured), timed(bare)
            size = sum(file.stat().st_size for file in (folder / "t").iterdir())
            shutil.rmtree(folder / "t")
            seconds.append(first)
            ratios["capture / bare"].append(2 * with_capture / (first + second))
            ratios["bare / bare"].append(second / first)
    print(
        f"{dtype}: bare forward {statistics.median(seconds):.2f} s, {size / 2**20:.0f} MiB written, {rounds} rounds"
    )
    for name, values in ratios.items():
        print(f"{name:16} {statistics.median(values):.3f}   ({min(values):.3f} to {max(values):.3f})")


if __name__ == "__main__":
    main()
