"""Checkpoints: safetensors and JSON, whole or not there at all.

    OUT/training.yaml                    the file this run was started with
    OUT/log.jsonl                        one object a step and a validation
    OUT/checkpoints/step-00000400/       model.safetensors, optimizer.safetensors, state.json, training.yaml
    OUT/checkpoints/best.json            which of them had the lowest validation loss

A checkpoint is written under another name, flushed to the disk with its folder, and then renamed. A process that
is killed at any moment leaves the checkpoints before it untouched; what it had half written is removed by the
next run. `state.json` holds the size and sha256 of the tensors, so that a damaged file is noticed, not trained on.
"""

import fcntl
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

from parity.errors import ParityError
from parity.files import WRITING, flush_to_disk, write_atomically
from parity.model.drafting.proposer import DrafterModule, DrafterShape
from parity.model.family import find_family
from parity.model.recipe.config import TrainingFile, dump, parse_training_file

CHECKPOINT_SCHEMA = "parity-checkpoint/1"
CHECKPOINT_NAME = re.compile(r"step-(\d{8,})")
MODEL, OPTIMIZER, STATE, TRAINING = (
    "model.safetensors",
    "optimizer.safetensors",
    "state.json",
    "training.yaml",
)
FREE = (
    "run.save",
    "run.watch",
    "run.device",
    "run.data.cache",
    "run.parallel",
    "run.states",
    "run.batch.accumulate",
    "run.drafter.attention",
)
"""Places that may differ between the run that saved and the one that goes on: they change no number that one
process computes, beyond the order of sums."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class CheckpointContents:
    """What a checkpoint holds."""

    step: int
    """Optimizer steps done."""
    training: TrainingFile
    drafter: DrafterShape
    model: dict[str, Tensor]
    optimizer: dict[str, Tensor]
    """`CHECKPOINT_NAME.exp_avg` and the like, by parameter name, and `rng.*`."""
    state: dict[str, Any]
    """Data position, best loss, counters."""


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


class Checkpoints:
    """The checkpoints of one run; one process at a time may write them."""

    def __init__(self, out: Path, keep: int = 2) -> None:
        """Open or begin the run at `out`. Raises ParityError where another process is writing there."""
        self.out, self.folder, self.keep = out, out / "checkpoints", keep
        if out.exists() and not out.is_dir():
            raise ParityError(f"output folder {out}", "a file of that name", "choose another --out")
        self.folder.mkdir(parents=True, exist_ok=True)
        self._lock = (out / ".lock").open("w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            found = "another process that is training there"
            raise ParityError(f"output folder {out}", found, "stop it, or choose another --out") from error
        for leftover in [*self.folder.glob(f"*{WRITING}*"), *out.glob(f"*{WRITING}*")]:
            shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()
        for old in self.folder.glob("old-step-*"):  # killed between the two renames of `save`
            final = self.folder / old.name.removeprefix("old-")
            shutil.rmtree(old) if final.exists() else os.replace(old, final)

    def close(self) -> None:
        """Let another process write here."""
        self._lock.close()

    def all(self) -> list[Path]:
        """Folders of whole checkpoints, oldest first."""
        found = [path for path in self.folder.iterdir() if CHECKPOINT_NAME.fullmatch(path.name)]
        return sorted(found, key=lambda path: int(path.name.removeprefix("step-")))

    def last(self) -> Path | None:
        """The newest checkpoint."""
        return next(reversed(self.all()), None)

    def best(self) -> tuple[Path, float] | None:
        """The checkpoint with the lowest validation loss, and that loss."""
        return best_of(self.out)

    def save(
        self,
        training: TrainingFile,
        drafter: DrafterShape,
        *,
        step: int,
        model: Mapping[str, Tensor],
        optimizer: Mapping[str, Tensor],
        state: Mapping[str, Any],
    ) -> Path:
        """Write a checkpoint whole, then let old ones go. Returns its folder."""
        final = self.folder / f"step-{step:08d}"
        temporary = self.folder / f"{final.name}{WRITING}-{os.getpid()}"
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
        files = {}
        for name, tensors in ((MODEL, model), (OPTIMIZER, optimizer)):
            save_file({key: value.detach().contiguous() for key, value in tensors.items()}, temporary / name)
            (temporary / name).chmod(0o644)  # safetensors makes it 0600
            files[name] = {"bytes": (temporary / name).stat().st_size, "sha256": _sha256(temporary / name)}
        record = {"schema": CHECKPOINT_SCHEMA, "step": step, "recipe": training.recipe.hash, "files": files}
        record |= {"drafter": asdict(drafter), "state": dict(state)}
        (temporary / TRAINING).write_text(dump(training), encoding="utf-8")
        (temporary / STATE).write_text(json.dumps(record, indent=1), encoding="utf-8")
        for file in (*temporary.iterdir(), temporary):
            flush_to_disk(file)
        old = self.folder / f"old-{final.name}"
        if final.exists():  # the same step again, after going on from an older checkpoint
            os.replace(final, old)
        os.replace(temporary, final)
        flush_to_disk(self.folder)
        shutil.rmtree(old, ignore_errors=True)
        self._prune()
        return final

    def mark_best(self, step: int, loss: float) -> None:
        """Say that the checkpoint of `step` is the best so far; it is kept from now on."""
        write_atomically(self.folder / "best.json", json.dumps({"step": step, "loss": loss}), durable=True)
        self._prune()

    def _prune(self) -> None:
        best = self.best()
        kept = {*self.all()[-self.keep :], *([best[0]] if best else [])}
        for folder in self.all():
            if folder not in kept:
                doomed = folder.with_name(f"{folder.name}{WRITING}-{os.getpid()}")
                os.replace(folder, doomed)
                shutil.rmtree(doomed)


def best_of(out: Path) -> tuple[Path, float] | None:
    """The checkpoint of a run with the lowest validation loss, and that loss; None before any validation."""
    with suppress(OSError, ValueError, KeyError):
        record = json.loads((out / "checkpoints" / "best.json").read_text())
        folder = out / "checkpoints" / f"step-{record['step']:08d}"
        if folder.is_dir():
            return folder, float(record["loss"])
    return None


def find_checkpoint(path: Path, which: str = "last") -> Path:
    """The checkpoint meant by a path: itself, or the `last` or `best` of a run. Raises ParityError for none."""
    if (path / STATE).is_file():
        return path
    folders = sorted(p for p in (path / "checkpoints").glob("step-*") if CHECKPOINT_NAME.fullmatch(p.name))
    best = best_of(path)
    found = best[0] if which == "best" and best else (folders[-1] if folders else None)
    if found is None:
        do = "name a folder that `parity train --out` wrote, or a checkpoint in it"
        raise ParityError(f"a checkpoint in {path}", "none", do)
    return found


def read_checkpoint_folder(folder: Path) -> CheckpointContents:
    """Read a checkpoint. Raises ParityError where it is foreign or damaged."""
    asked = f"the checkpoint {folder}"
    try:
        record = json.loads((folder / STATE).read_text(encoding="utf-8"))
        schema = record["schema"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ParityError(asked, f"no readable {STATE} ({error})", "use an older checkpoint") from error
    if schema != CHECKPOINT_SCHEMA:
        raise ParityError(
            asked, f"schema {schema!r}", f"use the parity version that wrote it, not {CHECKPOINT_SCHEMA}"
        )
    for name, known in record["files"].items():
        file = folder / name
        if not file.is_file() or file.stat().st_size != known["bytes"] or _sha256(file) != known["sha256"]:
            raise ParityError(
                asked, f"{name} is damaged", "remove the folder; an older checkpoint is used then"
            )
    training = parse_training_file((folder / TRAINING).read_text(encoding="utf-8"), str(folder / TRAINING))
    return CheckpointContents(
        step=int(record["step"]),
        training=training,
        drafter=find_family(training.recipe).read_config(record["drafter"]),
        model=load_file(folder / MODEL),
        optimizer=load_file(folder / OPTIMIZER),
        state=record["state"],
    )


def load_drafter(path: str | Path, which: str = "last") -> tuple[DrafterModule, TrainingFile]:
    """The drafter of a checkpoint, or of a run's last or best one, and what it was trained by."""
    saved = read_checkpoint_folder(find_checkpoint(Path(path), which))
    drafter = find_family(saved.training.recipe).restore(saved.drafter, saved.model)
    return drafter.eval(), saved.training


def checkpoint_differences(a: TrainingFile, b: TrainingFile, free: tuple[str, ...] = FREE) -> list[str]:
    """Each place in which two trainings differ, as `place: a, not b`; `free` places may."""
    left, right = (_flat(each.model_dump(mode="json")) for each in (a, b))
    places = sorted(key for key in left.keys() | right.keys() if left.get(key) != right.get(key))
    allowed: Callable[[str], bool] = lambda place: any(f"{place}.".startswith(f"{f}.") for f in free)  # noqa: E731
    return [f"{p}: {left.get(p)!r}, not {right.get(p)!r}" for p in places if not allowed(p)]


def _flat(data: Any, at: str = "") -> dict[str, Any]:
    if not isinstance(data, Mapping) or not data:
        return {at: data}
    found: dict[str, Any] = {}
    for name, value in data.items():
        found |= _flat(value, f"{at}.{name}" if at else str(name))
    return found


def cut_log(file: Path, step: int) -> None:
    """Take out of a log what came after `step`, half a last line included: it is about to be done again."""
    if not file.is_file():
        return
    kept = []
    for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
        with suppress(ValueError, KeyError, TypeError):
            if json.loads(line)["step"] <= step:
                kept.append(line)
    write_atomically(file, "".join(f"{line}\n" for line in kept), durable=True)
