"""Checkpoints: whole or not there, whatever moment the process is killed at."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from parity.errors import ParityError
from parity.model.dflash.step import new_drafter
from parity.model.recipe.config import preset
from parity.model.training import checkpoint
from parity.model.training.checkpoint import (
    Checkpoints,
    checkpoint_differences,
    cut_log,
    find_checkpoint,
    load_drafter,
    read_checkpoint_folder,
)
from parity.model.training.states import synthetic

TRAINING = preset("unit")


@pytest.fixture(scope="module")
def drafter() -> Any:
    return new_drafter(TRAINING, synthetic(TRAINING)[0])


def save(store: Checkpoints, drafter: Any, step: int) -> Path:
    tensors = {"fc.weight.exp_avg": torch.full((2, 2), float(step))}
    return store.save(
        TRAINING,
        drafter.config,
        step=step,
        model=drafter.state_dict(),
        optimizer=tensors,
        state={"position": step},
    )


def test_what_is_saved_is_read(tmp_path: Path, drafter: Any) -> None:
    store = Checkpoints(tmp_path)
    saved = read_checkpoint_folder(save(store, drafter, 3))
    assert (saved.step, saved.training, saved.drafter) == (3, TRAINING, drafter.config)
    assert saved.state == {"position": 3} and saved.optimizer["fc.weight.exp_avg"][0, 0] == 3
    assert all(torch.equal(saved.model[name], value) for name, value in drafter.state_dict().items())
    loaded, training = load_drafter(tmp_path)
    assert training == TRAINING
    assert all(torch.equal(a, b) for a, b in zip(loaded.parameters(), drafter.parameters(), strict=True))
    store.close()


def test_the_newest_and_the_best_are_kept(tmp_path: Path, drafter: Any) -> None:
    store = Checkpoints(tmp_path, keep=2)
    for step in range(1, 6):
        save(store, drafter, step)
        if step == 2:
            store.mark_best(2, 0.5)
    assert [path.name for path in store.all()] == ["step-00000002", "step-00000004", "step-00000005"]
    assert (
        find_checkpoint(tmp_path).name == "step-00000005"
        and find_checkpoint(tmp_path, "best").name == "step-00000002"
    )
    store.mark_best(5, 0.4)
    assert [path.name for path in store.all()] == ["step-00000004", "step-00000005"]
    store.close()


def test_a_damaged_checkpoint_is_not_trained_on(tmp_path: Path, drafter: Any) -> None:
    store = Checkpoints(tmp_path)
    folder = save(store, drafter, 1)
    store.close()
    data = bytearray((folder / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (folder / "model.safetensors").write_bytes(data)
    with pytest.raises(ParityError, match="model.safetensors is damaged\ndo this: remove the folder"):
        read_checkpoint_folder(folder)
    (folder / "state.json").write_text("{")
    with pytest.raises(ParityError, match="no readable state.json"):
        read_checkpoint_folder(folder)
    (folder / "state.json").write_text('{"schema": "other/9"}')
    with pytest.raises(ParityError, match="schema 'other/9'"):
        read_checkpoint_folder(folder)
    with pytest.raises(ParityError, match="a checkpoint in .*; found: none"):
        find_checkpoint(tmp_path / "nowhere")


def test_one_writer_at_a_time(tmp_path: Path) -> None:
    store = Checkpoints(tmp_path)
    with pytest.raises(ParityError, match="another process that is training there"):
        Checkpoints(tmp_path)
    store.close()
    Checkpoints(tmp_path).close()
    (tmp_path / "file").write_text("")
    with pytest.raises(ParityError, match="a file of that name"):
        Checkpoints(tmp_path / "file")


KILLED = """
import os, signal, sys
from pathlib import Path
import torch
from tests.model.training.test_checkpoint import TRAINING, Checkpoints, checkpoint, save
from parity.model.training.states import synthetic
from parity.model.dflash.step import new_drafter

out, function, at = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
drafter = new_drafter(TRAINING, synthetic(TRAINING)[0])
store = Checkpoints(out, keep=1)
save(store, drafter, 1)
calls = 0
module, name = {"fsync": (os, "fsync"), "replace": (os, "replace"), "save_file": (checkpoint, "save_file"),
                "rmtree": (checkpoint.shutil, "rmtree")}[function]
original = getattr(module, name)

def killing(*args, **kwargs):
    global calls
    calls += 1
    if calls == at:
        os.kill(os.getpid(), signal.SIGKILL)
    return original(*args, **kwargs)

setattr(module, name, killing)
save(store, drafter, int(sys.argv[4]))
print("not killed")
"""

MOMENTS = [
    ("save_file", 1, 2),
    ("save_file", 2, 2),
    ("fsync", 1, 2),
    ("fsync", 5, 2),
    ("replace", 1, 2),  # before the rename
    ("fsync", 6, 2),  # after it
    ("replace", 2, 2),  # while the old one goes
    ("rmtree", 3, 2),
    ("replace", 2, 1),  # the same step again: between its two renames
]


@pytest.mark.parametrize(("function", "at", "step"), MOMENTS)
def test_kill_9_while_writing_loses_nothing(function: str, at: int, step: int, tmp_path: Path) -> None:
    command = [sys.executable, "-c", KILLED, str(tmp_path), function, str(at), str(step)]
    root = str(Path(__file__).resolve().parents[3])
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": root}, cwd=root, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == -signal.SIGKILL, (done.stdout, done.stderr[-2000:])
    store = Checkpoints(tmp_path, keep=1)
    saved = [read_checkpoint_folder(folder) for folder in store.all()]
    assert saved and saved[-1].step in (1, 2)
    assert not [
        path for path in store.folder.iterdir() if not checkpoint.CHECKPOINT_NAME.fullmatch(path.name)
    ]
    store.close()


def test_what_may_differ_between_two_runs() -> None:
    changed = TRAINING.with_values({"run.seed": 3, "run.save.every": 9, "recipe.loss.weights.gamma": 5.0})
    assert checkpoint_differences(TRAINING, changed) == [
        "recipe.loss.weights.gamma: 4.0, not 5.0",
        "run.seed: 0, not 3",
    ]


def test_a_log_is_cut_where_a_run_goes_on(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    log.write_text("".join(json.dumps({"step": n}) + "\n" for n in range(1, 5)) + '{"step": 5, "lo')
    cut_log(log, 3)
    assert [json.loads(line)["step"] for line in log.read_text().splitlines()] == [1, 2, 3]
    cut_log(tmp_path / "none", 3)
