"""What a run measures beside its losses: accepted length against the target's own text, and TensorBoard.

Imported only where a training file asks for it.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from parity.errors import ParityError
from parity.model.drafting.decode import DecodeConfig, RecordedText, greedy, offline_tau, tau
from parity.model.drafting.proposer import DrafterModule
from parity.model.drafting.session import EmbeddingAndHead
from parity.model.recipe.config import TrainingFile
from parity.model.training.data import Document
from parity.model.training.states import SharedModules
from parity.model.training.step import StepOutput

TAU_TOKENS = 64
"""Generated tokens of a prompt: enough for several blocks, few enough for a validation."""


def tau_of(
    training: TrainingFile, parts: SharedModules, documents: Sequence[Document]
) -> Callable[[DrafterModule], float]:
    """Measures tau at temperature 0 on what stands before the answers of `documents`.

    The target writes its own text once, at the first call; drafts are compared with it from then on. Raises
    ParityError where the target is not in this process.
    """
    target = parts.target
    if target is None:
        asked, found = f"run.save.tau_prompts: {training.run.save.tau_prompts}", "no target in this process"
        raise ParityError(asked, found, "write 0, or train on a model that transformers loads")
    prompts = [document.tokens[: int(document.mask.argmax())].tolist() for document in documents]
    stop = getattr(target.model.generation_config, "eos_token_id", None)
    config = DecodeConfig(
        layers=training.recipe.conditioning.decoder_layers,
        max_new_tokens=TAU_TOKENS,
        stop_ids=tuple(stop) if isinstance(stop, list) else () if stop is None else (int(stop),),
    )
    records: list[RecordedText] = []

    def measure(drafter: DrafterModule) -> float:
        records[:] = records or [greedy(target, prompt, config) for prompt in prompts if prompt]
        return tau(offline_tau(drafter, EmbeddingAndHead.of(target), records, max_new_tokens=TAU_TOKENS))

    return measure


class TrainingTensorBoard:
    """An observer that writes the log's figures for TensorBoard, into OUT/tensorboard."""

    def __init__(self, out: Path) -> None:
        """Raises ParityError where tensorboard is not installed."""
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            do = "pip install 'drafter-parity[tensorboard]', or write false"
            raise ParityError("run.save.tensorboard: true", f"no tensorboard ({error})", do) from error
        self.writer: Any = SummaryWriter(str(out / "tensorboard"))

    def on_step(self, step: int, output: StepOutput) -> None:
        """Nothing: figures come after the update."""

    def on_update(self, step: int, record: Mapping[str, Any]) -> None:
        """Write every number of a line of the log; lists become one curve a slot."""
        event = record["event"]
        for name, value in record.items():
            each = {name: value}
            if isinstance(value, Mapping):
                each = {f"{name}/{key}": inner for key, inner in value.items()}
            elif isinstance(value, list):
                each = {f"{name}/{slot}": inner for slot, inner in enumerate(value, 1)}
            for key, number in each.items():
                if isinstance(number, int | float) and key != "step":
                    self.writer.add_scalar(f"{event}/{key}", number, step)
