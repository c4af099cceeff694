"""`parity train`, `eval`, `export` and `import`, one after another, as a user meets them; on the `unit` preset."""

import json
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import parity
from parity.cli import main as cli
from parity.commands.convert import export, import_
from parity.commands.evaluate import _Measured, _Row, _slots, evaluate
from parity.commands.train import _validation
from parity.errors import ParityError
from parity.model.dflash.step import new_drafter
from parity.model.drafting.decode import Cycle, DecodeConfig, DecodeResult
from parity.model.recipe.config import dump, load_training_file
from parity.model.recipe.presets import preset
from parity.model.training.checkpoint import Checkpoints, find_checkpoint, load_drafter
from parity.model.training.trainer import Trainer
from parity.reports import schema
from parity.reports.record import Report
from tests.parity.conftest import unwrapped

Run = Callable[..., tuple[int, str, str]]
LEARNED = preset("unit").with_values(
    {
        "run.optimizer.lr": 8e-3,
        "run.schedule.steps": 150,
        "run.data.documents": 64,
        "run.save": {"every": 50, "validate_every": 50},
    }
)
"""Enough for some drafts to be accepted; two seconds."""
SMALL = ["--max-prompts", "6", "--new-tokens", "32"]
SHORT = preset("unit").with_values({"run.data.validation_documents": 2})


@pytest.fixture
def command(capfd: pytest.CaptureFixture[str]) -> Run:
    """(exit code, standard output, standard error) of one command, in this process."""

    def run(*arguments: object) -> tuple[int, str, str]:
        capfd.readouterr()
        code = cli.run([str(argument) for argument in arguments])
        captured = capfd.readouterr()
        return code, captured.out, unwrapped(captured.err)

    return run


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("recipe") / "learned.yaml"
    file.write_text(dump(LEARNED))
    return file


@pytest.fixture(scope="module")
def trained(recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a whole run."""
    out = tmp_path_factory.mktemp("trained") / "run"
    assert parity.train(recipe, out=out).step == 150
    return out


@pytest.fixture(scope="module")
def ends(trained: Path) -> Report:
    """The report of its evaluation on six held-out prompts."""
    return parity.evaluate(trained, max_prompts=6, new_tokens=32)


def is_plain(text: str, width: int = 80) -> bool:
    """No colour, and nothing wider than a piped report may be (paths apart)."""
    return "\x1b" not in text and all(len(line) <= width or "/" in line for line in text.splitlines())


def is_two_lines(err: str) -> bool:
    lines = err.strip().splitlines()
    return len(lines) == 2 and lines[0].startswith("parity: asked: ") and lines[1].startswith("do this: ")


def outcomes(report: Report) -> dict[str, str]:
    return {finding.name: finding.outcome for finding in report.findings}


# --- train --------------------------------------------------------------------------------------------


def test_train_and_again(tmp_path: Path, command: Run) -> None:
    out = tmp_path / "run"
    code, text, err = command("train", "--preset", "unit", "--out", out)
    assert code == 0 and is_plain(text) and text.startswith("PASS     step 8 of 8"), text
    assert "training preset unit: 74,176 parameters, 8 steps, 32 documents\n" in err
    assert err.count("\nstep ") == 10 and "tokens/s" in err and "step 4/8 validation loss" in err
    report = schema.read_report(out / "report.json")
    assert report.kind == "train" and outcomes(report) == {
        "train.schedule": "pass",
        "train.validation": "pass",
    }
    log = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in log if line["event"] == "step"]
    table = report.table("train.steps")
    assert [row[:2] for row in table.rows] == list(enumerate(losses, 1))
    code, text, err = command("train", "--preset", "unit", "--out", out)
    assert code == 0 and err == "preset unit: all 8 steps are done already\n" and "step 8 of 8" in text
    code, text, err = command("train", "--preset", "unit", "--out", out, "--no-resume")
    assert (code, text) == (2, "") and is_two_lines(err) and "checkpoints of another" in err


def test_stopping_early_is_a_warning(tmp_path: Path, command: Run) -> None:
    code, text, _ = command("train", "--preset", "unit", "--out", tmp_path / "run", "--stop-after", 3)
    assert code == 0 and text.startswith("WARN     step 3 of 8") and "run the same command again" in text
    assert outcomes(schema.read_report(tmp_path / "run" / "report.json")) == {
        "train.schedule": "warn",
        "train.validation": "skipped",
    }


def test_ctrl_c_saves_and_the_same_command_goes_on(
    tmp_path: Path, command: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = ["train", "--preset", "unit", "--out"]
    command(*line, tmp_path / "whole")
    update = Trainer.update

    def interrupted(self: Trainer) -> dict[str, Any]:
        record = update(self)
        if self.step_number == 3:
            signal.raise_signal(signal.SIGINT)
        return record

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "update", interrupted)
        code, text, err = command(*line, tmp_path / "run")
    assert code == 130 and text.startswith("WARN     step 3 of 8") and "Traceback" not in err
    assert err.endswith("interrupted; run the same command again to go on\n")
    code, text, err = command(*line, tmp_path / "run")
    assert code == 0 and "going on at step 3" in err
    whole, cut = (
        [row[:2] for row in schema.read_report(tmp_path / name / "report.json").table("train.steps").rows]
        for name in ("whole", "run")
    )
    assert whole == cut  # losses bit for bit


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        (["--preset", "huge"], "no such preset"),
        (["nowhere.yaml"], "No such file"),
        (["broken.yaml"], "no key 'recip'"),
        (["--preset", "unit", "--steps", "4", "--out", "file"], "a file of that name"),
    ],
)
def test_train_refuses(
    arguments: list[str], found: str, tmp_path: Path, command: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("broken.yaml").write_text("recip: {}\n")
    Path("file").write_text("")
    code, text, err = command("train", *arguments)
    assert (code, text) == (2, "") and found in err and err.count("asked:") == 1, err
    assert not Path("parity-train").exists()


@pytest.mark.parametrize(
    ("losses", "outcome"), [([2.0, 1.5], "pass"), ([2.0, 1.0, 2.0], "warn"), ([2.0], "skipped")]
)
def test_what_validation_says(losses: list[float], outcome: str) -> None:
    finding = _validation([{"step": n, "loss": loss} for n, loss in enumerate(losses, 1)])
    assert finding.outcome == outcome and ("it did not fall" in finding.sentence) == (outcome == "warn")


# --- eval ---------------------------------------------------------------------------------------------


def test_eval_is_the_loop(trained: Path, ends: Report, tmp_path: Path, command: Run) -> None:
    code, text, err = command("eval", trained, *SMALL, "--out", tmp_path / "report")
    assert (code, err) == (0, "") and is_plain(text)
    report = schema.read_report(tmp_path / "report" / "report.json")
    assert outcomes(report) == {
        "eval.tau": "pass",
        "eval.dispatch": "skipped",
        "eval.lossless": "pass",
        "eval.offline": "pass",
    }
    assert report.tables == ends.tables and len(report.table("eval.prompts").rows) == 6
    values = dict(report.subject)
    tau = values["tau"]
    assert isinstance(tau, float) and 1.1 < tau < 3 and values["offline tau"] == tau
    rows = report.table("eval.prompts").rows
    written, cycles = (sum(int(row[n] or 0) for row in rows) for n in (2, 3))
    assert tau == pytest.approx((written - len(rows)) / cycles)  # the first token of a text is no draft's
    assert f"tau {tau:.2f} over 6 prompts" in text.splitlines()[0]


def test_a_minimum_gates(trained: Path, tmp_path: Path, command: Run) -> None:
    for least, expected in ((1.05, 0), (3.5, 1)):
        code, text, _ = command(
            "eval", trained, "--max-prompts", 2, "--min-tau", least, "--out", tmp_path / "r"
        )
        assert code == expected and f"{least:g} was asked for" in " ".join(text.split())


def test_eval_takes_prompts(trained: Path, tmp_path: Path, command: Run) -> None:
    file = tmp_path / "prompts.jsonl"
    lines = [
        {"id": "ids", "token_ids": [5, 6, 7]},
        {"id": "text", "prompt": "12 + 7"},
        {"id": "chat", "messages": [{"role": "user", "content": "12 + 7"}]},
    ]
    file.write_text("\n".join(map(json.dumps, lines)))
    command("eval", trained, "--prompts", file, "--new-tokens", 12, "--out", tmp_path / "report")
    rows = schema.read_report(tmp_path / "report" / "report.json").table("eval.prompts").rows
    assert [row[0] for row in rows] == ["ids", "text", "chat"]
    assert rows[0][1] == 3 and all(row[2] == 12 for row in rows)
    file.write_text('{"token_ids": [999]}')
    code, text, err = command("eval", trained, "--prompts", file, "--out", tmp_path / "none")
    assert (code, text) == (2, "") and is_two_lines(err) and not (tmp_path / "none").exists()


def test_sampling_is_measured_without_a_text_to_compare(trained: Path) -> None:
    report = evaluate(trained, max_prompts=2, new_tokens=16, temperature=1.0)
    assert outcomes(report) == {
        "eval.tau": "pass",
        "eval.dispatch": "skipped",
        "eval.lossless": "skipped",
        "eval.offline": "skipped",
    }
    assert report.outcome == "pass" and dict(report.subject)["offline tau"] is None


def test_a_loop_that_writes_another_text_fails(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: a refused draft stays in the text, as where a cache is not rolled back."""
    from parity.model.training.states import SyntheticSession

    def keep(self: SyntheticSession, count: int) -> None:
        self.tokens = self.tokens[: len(self.tokens) - self.fed + min(count + 1, self.fed)]

    monkeypatch.setattr(SyntheticSession, "keep", keep)
    report = evaluate(trained, max_prompts=3, new_tokens=32)
    assert outcomes(report)["eval.lossless"] == "fail" and report.outcome == "fail"


def test_an_offline_tau_from_other_states_fails(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: the recorded states are those of the token after."""
    from parity.model.drafting import decode

    def shifted(*arguments: Any) -> Any:
        record = decode_greedy(*arguments)
        return replace(record, states=record.states.roll(1, 0))

    decode_greedy = decode.greedy
    monkeypatch.setattr(decode, "greedy", shifted)
    report = evaluate(trained, max_prompts=6, new_tokens=32)
    assert outcomes(report)["eval.offline"] == "fail" and outcomes(report)["eval.lossless"] == "pass"


def test_slots_by_hand() -> None:
    """Three cycles: two of three drafted slots matched, none of three, one of one."""
    made = ((3, 2, 3), (3, 0, 1), (1, 1, 2))
    cycles = tuple(Cycle(drafted=d, matched=m, accepted=a) for d, m, a in made)
    result = DecodeResult(prompt=(1,), tokens=(2,) * 7, cycles=cycles)
    rows = [_Row(name="a", ids=(1,))]
    config = DecodeConfig(layers=(0,))
    measured = _Measured(rows=rows, config=config, dtype="float32", backend="torch", loop=[result])
    assert _slots(measured).rows == ((1, 3, 2 / 3, 2 / 3), (2, 2, 1 / 2, 1.0), (3, 2, 0.0, 0.0))


def test_who_computed_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the embedded hybrid target; then the recipe asks for a backend that does not run."""
    from parity.model.training import checkpoint
    from parity.model.training.states import open_target

    training = preset("tiny").with_values({"run.data.regenerate": 0, "run.save.tau_prompts": 0})
    parts, _, _ = open_target(training)
    drafter = new_drafter(training, parts)
    store = Checkpoints(tmp_path)
    store.save(training, drafter.config, step=1, model=drafter.state_dict(), optimizer={}, state={})
    store.close()
    file = tmp_path / "p.txt"
    file.write_text("12 + 7\n")
    report = evaluate(tmp_path, prompts=file, new_tokens=6)
    (dispatch,) = (f for f in report.findings if f.name == "eval.dispatch")
    assert dispatch.outcome == "pass" and "conv: torch; delta: torch" in dispatch.sentence
    assert outcomes(report)["eval.lossless"] == outcomes(report)["eval.offline"] == "pass"
    wrong = training.with_values({"recipe.target.backend": "fla"})
    monkeypatch.setattr(checkpoint, "load_drafter", lambda path: (drafter, wrong))
    monkeypatch.setattr("parity.model.training.states.isolate", lambda backend: ())
    report = evaluate(tmp_path, prompts=file, new_tokens=6)
    assert outcomes(report)["eval.dispatch"] == "fail" and report.outcome == "fail"


@pytest.mark.parametrize("command_", ["eval", "export"])
def test_no_checkpoint(command_: str, tmp_path: Path, command: Run) -> None:
    more = {"eval": ["--out", "r"], "export": ["--to", "zlab", "--out", "r"]}[command_]
    code, text, err = command(command_, tmp_path, *more)
    assert (code, text) == (2, "") and is_two_lines(err) and "a checkpoint in" in err
    assert list(tmp_path.iterdir()) == []


# --- export and import --------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["zlab", "speculators"])
def test_there_and_back(
    layout: str, trained: Path, ends: Report, recipe: Path, tmp_path: Path, command: Run
) -> None:
    code, text, _ = command("export", trained, "--to", layout, "--out", tmp_path / "theirs")
    assert code == 0 and is_plain(text) and "every weight bit for bit" in text
    code, text, err = command("eval", tmp_path / "theirs")
    assert code == 2 and is_two_lines(err) and "parity import" in err
    target = ["--target", "synthetic:unit"]
    if layout == "zlab":  # it does not name the target
        code, text, err = command("import", tmp_path / "theirs", "--out", tmp_path / "ours")
        assert (code, text) == (2, "") and is_two_lines(err) and "--target" in err
        assert not (tmp_path / "ours").exists()
    more = ["--recipe", recipe, *(target if layout == "zlab" else [])]
    code, text, _ = command("import", tmp_path / "theirs", "--out", tmp_path / "ours", *more)
    assert code == 0 and is_plain(text) and "decoder layers 0, 1, 2 (0-based)" in text
    (before, _), (after, training) = load_drafter(trained), load_drafter(tmp_path / "ours")
    assert before.config == after.config
    assert all(torch.equal(a, b) for a, b in zip(before.parameters(), after.parameters(), strict=True))
    again = evaluate(tmp_path / "ours", max_prompts=6, new_tokens=32)
    assert again.tables == ends.tables
    assert training == load_training_file(tmp_path / "ours" / "training.yaml")
    fresh = parity.train(recipe, out=tmp_path / "fresh", stop_after=1).report
    further = parity.train(tmp_path / "ours" / "training.yaml", out=tmp_path / "ours", stop_after=1)
    losses = [float(report.table("train.steps").rows[0][1] or 0) for report in (fresh, further.report)]
    assert further.step == 1 and losses[1] < losses[0] - 1  # it goes on from the weights, not from new ones


def test_a_reduced_vocabulary_there_and_back(tmp_path: Path, command: Run) -> None:
    training = SHORT.with_values({"recipe.draft_vocab": {"size": 40}, "run.schedule.steps": 2})
    parity.train(training, out=tmp_path / "run")
    code, text, err = command("export", tmp_path / "run", "--to", "zlab", "--out", tmp_path / "z")
    assert (code, text) == (2, "") and is_two_lines(err) and "reduced draft vocabulary" in err
    code, text, _ = command(
        "export", tmp_path / "run", "--to", "zlab", "--out", tmp_path / "z", "--full-vocabulary"
    )
    assert code == 0 and "left out" in text
    done = export(tmp_path / "run", to="speculators", out=tmp_path / "s")
    assert done.draft_vocab == 40
    import_(tmp_path / "s", out=tmp_path / "ours")
    (before, _), (after, made) = load_drafter(tmp_path / "run"), load_drafter(tmp_path / "ours")
    assert torch.equal(before.t2d, after.t2d) and torch.equal(before.d2t, after.d2t)
    file = tmp_path / "ours" / "t2d.npy"
    assert made.recipe.draft_vocab is not None and made.recipe.draft_vocab.t2d == str(file)


def test_an_ambiguous_import_asks(trained: Path, tmp_path: Path, command: Run) -> None:
    export(trained, to="zlab", out=tmp_path / "theirs")
    file = tmp_path / "theirs" / "config.json"
    raw = json.loads(file.read_text())
    raw["block_size"], raw["dflash_config"]["block_size"] = 4, 5
    file.write_text(json.dumps(raw))
    line = ["import", tmp_path / "theirs", "--out", tmp_path / "ours", "--target", "synthetic:unit"]
    code, text, err = command(*line)
    assert (code, text) == (2, "") and is_two_lines(err)
    assert "the meaning of block_size" in err and "answer block_size=..." in err
    for answer, found in (
        ("block=4", "no such question"),
        ("block_size", "no ="),
        ("block_size=(", "no such value"),
        ("block_size=__import__('os')", "no such value"),
    ):
        code, _, err = command(*line, "--answer", answer)
        assert code == 2 and is_two_lines(err) and found in err, err
    assert not (tmp_path / "ours").exists()
    code, text, _ = command(*line, "--answer", "block_size=4", "--answer", "layers=(0, 1, 2)")
    assert code == 0 and "block 4 (drafts 3)" in text
    code, _, err = command(*line, "--answer", "block_size=4")
    assert (
        code == 2
        and "something is there" in err
        and find_checkpoint(tmp_path / "ours").name == "step-00000000"
    )


@pytest.mark.parametrize(
    ("key", "value", "found"),
    [
        ("num_target_layers", 6, "num_target_layers 6, the target has 4"),
        ("vocab_size", 90, "vocab_size 90, the target has 80"),
        (
            "rope_scaling",
            {"rope_type": "linear", "factor": 2.0},
            "with this target our trainer would make rope",
        ),
    ],
)
def test_a_drafter_of_another_target(key: str, value: Any, found: str, trained: Path, tmp_path: Path) -> None:
    export(trained, to="zlab", out=tmp_path / "theirs")
    file = tmp_path / "theirs" / "config.json"
    raw = json.loads(file.read_text())
    raw[key] = value
    if key == "rope_scaling":
        raw["rope_parameters"] |= value
    file.write_text(json.dumps(raw))
    with pytest.raises(ParityError, match=found):
        import_(tmp_path / "theirs", out=tmp_path / "ours", target="synthetic:unit")
    assert not (tmp_path / "ours").exists()


def test_what_is_there_is_kept(trained: Path, tmp_path: Path, command: Run) -> None:
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "file").touch()
    for line in (["export", trained, "--to", "zlab"], ["import", trained, "--target", "synthetic:unit"]):
        code, text, err = command(*line, "--out", tmp_path / "precious")
        assert (code, text) == (2, "") and is_two_lines(err)
        assert [path.name for path in (tmp_path / "precious").iterdir()] == ["file"]


def test_the_presets_that_fill_in_are_trainable(trained: Path, tmp_path: Path) -> None:
    """Without a training file a preset says what the checkpoint does not; its data are not there, and that is told."""
    for layout in ("zlab", "speculators"):
        export(trained, to=layout, out=tmp_path / layout)
        done = import_(tmp_path / layout, out=tmp_path / f"run-{layout}", target="synthetic:unit")
        assert any("those of preset" in note for note in done.notes)
        with pytest.raises(ParityError, match="no such file or folder|no hs_"):
            parity.train(tmp_path / f"run-{layout}" / "training.yaml", out=tmp_path / f"run-{layout}")
        with pytest.raises(ParityError, match="do this: give --prompts FILE"):
            evaluate(tmp_path / f"run-{layout}")
