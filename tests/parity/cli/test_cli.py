"""The command line as a hurried person meets it: flags, messages of two lines, exit codes, nothing half-written."""

import errno
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors import SafetensorError

from parity.cli import main as cli
from parity.cli.output import complain
from tests.parity.conftest import unwrapped

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str]) -> Run:
    """(exit code, standard output, standard error) of one command, in this process."""

    def command(*arguments: str | Path) -> tuple[int, str, str]:
        capfd.readouterr()
        code = cli.run([str(argument) for argument in arguments])
        captured = capfd.readouterr()
        return code, captured.out, unwrapped(captured.err)

    return command


def capture(model: Path, prompts: Path, out: Path, *more: str) -> list[str | Path]:
    return ["capture", "--model", model, "--prompts", prompts, "--out", out, *more]


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    file = tmp_path / "prompts.jsonl"
    file.write_text(
        '{"id": "a", "token_ids": [1, 2, 3, 4, 5, 6]}\n{"id": "b", "token_ids": [9, 8, 7, 6, 5]}\n'
    )
    return file


def is_two_lines(err: str) -> bool:
    lines = err.strip().splitlines()
    return (
        len(lines) == 2
        and lines[0].startswith("parity: asked: ")
        and "; found: " in lines[0]
        and lines[1].startswith("do this: ")
    )


def test_capture_compare_show(hybrid: Path, prompts: Path, tmp_path: Path, run: Run) -> None:
    """The way a user goes: two captures, one comparison, the report painted again in every form."""
    for name in ("a", "b"):
        code, out, _ = run(*capture(hybrid, prompts, tmp_path / name, "--dtype", "float32"))
        assert code == 0 and "2 requests, 11 tokens" in out and "ran conv: torch; delta: torch" in out
    code, out, err = run("compare", tmp_path / "a", tmp_path / "b", "--out", tmp_path / "report")
    assert (code, err) == (0, "") and out.startswith("PASS")
    assert sorted(p.name for p in (tmp_path / "report").iterdir()) == [
        "report.html",
        "report.json",
        "report.md",
    ]
    for form, start in (
        ("text", "PASS"),
        ("json", "{"),
        ("html", "<!doctype html>"),
        ("markdown", "#"),
        ("junit", "<?xml"),
    ):
        code, out, _ = run("show", tmp_path / "report", "--as", form)
        assert code == 0 and out.lower().startswith(start.lower()), form


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        (["--model", "/no/such/model"], "no such folder or .gguf file"),
        (["--taps", "layer.9.out"], "has layers 0 to 3"),
        (["--backend", "fla"], "no CUDA device"),
        (["--backend", "magic"], "no such backend"),
        (["--as", "sideways"], "no such way"),
        (["--dtype", "int8"], "no such dtype"),
        (["--loader", "AutoModelForMagic"], "no such loader"),
    ],
)
def test_capture_refuses(
    changes: list[str], found: str, hybrid: Path, prompts: Path, tmp_path: Path, run: Run
) -> None:
    code, out, err = run(*capture(hybrid, prompts, tmp_path / "t"), *changes)
    assert (code, out) == (2, "") and is_two_lines(err) and found in err, err
    assert sorted(p.name for p in tmp_path.iterdir()) == ["prompts.jsonl"], "a half-written folder was left"


@pytest.mark.parametrize(
    ("content", "found"),
    [
        ("", "an empty file"),
        ('{"token_ids": [1, 999]}', "token id 999, the vocabulary has 64"),
        ('{"token_ids": [' + ", ".join(["1"] * 300) + "]}", "allows 256"),
        ('{"prompt": "hello"}', "has no tokenizer"),
    ],
    ids=["empty", "outside the vocabulary", "too long", "no tokenizer"],
)
def test_prompts_are_refused(content: str, found: str, hybrid: Path, tmp_path: Path, run: Run) -> None:
    (tmp_path / "p.jsonl").write_text(content)
    code, out, err = run(*capture(hybrid, tmp_path / "p.jsonl", tmp_path / "t"))
    assert (code, out) == (2, "") and is_two_lines(err) and found in err, err
    assert sorted(p.name for p in tmp_path.iterdir()) == ["p.jsonl"]


def test_missing_prompt_file(hybrid: Path, tmp_path: Path, run: Run) -> None:
    code, _, err = run(*capture(hybrid, tmp_path / "none.jsonl", tmp_path / "t"))
    assert code == 2 and is_two_lines(err) and list(tmp_path.iterdir()) == []


def test_existing_output_is_kept(hybrid: Path, prompts: Path, tmp_path: Path, run: Run) -> None:
    (tmp_path / "t").mkdir()
    (tmp_path / "t/precious").touch()
    code, _, err = run(*capture(hybrid, prompts, tmp_path / "t"))
    assert code == 2 and is_two_lines(err) and (tmp_path / "t/precious").exists()


def test_compare_refuses_what_is_no_trace(hybrid: Path, prompts: Path, tmp_path: Path, run: Run) -> None:
    run(*capture(hybrid, prompts, tmp_path / "a", "--dtype", "float32"))
    (tmp_path / "empty").mkdir()
    for other, found in (
        (tmp_path / "empty", "without manifest.json"),
        (tmp_path / "nothing", "no such folder"),
    ):
        code, out, err = run("compare", tmp_path / "a", other)
        assert (code, out) == (2, "") and is_two_lines(err) and found in err


def test_other_tokens_are_nothing_comparable(hybrid: Path, prompts: Path, tmp_path: Path, run: Run) -> None:
    (tmp_path / "q.jsonl").write_text(
        '{"id": "a", "token_ids": [50, 51, 52]}\n{"id": "b", "token_ids": [40, 41]}\n'
    )
    run(*capture(hybrid, prompts, tmp_path / "a", "--dtype", "float32"))
    run(*capture(hybrid, tmp_path / "q.jsonl", tmp_path / "b", "--dtype", "float32"))
    code, out, err = run("compare", tmp_path / "a", tmp_path / "b")
    assert (code, out) == (3, "") and is_two_lines(err)


def test_invalid_trace_does_not_pass(hybrid: Path, prompts: Path, tmp_path: Path, run: Run) -> None:
    """A trace whose proof disagrees with what was asked for: equal numbers, and still exit 1."""
    from parity.capturing.client import capture_to

    run(*capture(hybrid, prompts, tmp_path / "a", "--dtype", "float32"))
    result = capture_to(
        tmp_path / "b",
        model=str(hybrid),
        prompts=prompts,
        backend="fla-interpreted",
        dtype="float32",
        hide=("fla",),
    )
    assert not result.valid and "dispatch FAILED, this trace is no evidence:" in result.lines()
    code, out, _ = run("compare", tmp_path / "b", tmp_path / "a")
    assert code == 1 and out.startswith("FAIL") and "dispatch" in out


def test_show_refuses_what_is_no_report(tmp_path: Path, run: Run) -> None:
    (tmp_path / "report.json").write_text('{"schema": "other"}')
    for path in (tmp_path / "report.json", tmp_path / "none.json"):
        code, out, err = run("show", path)
        assert (code, out) == (2, "") and is_two_lines(err), err


def test_wrong_use_is_exit_2(run: Run) -> None:
    for arguments in (["capture"], ["nonsense"], ["check", "--no-such-flag"], ["show", "x", "--as", "pdf"]):
        code, _, err = run(*arguments)
        assert code == 2 and "Usage" in err, arguments


def test_our_own_fault_is_exit_4(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import parity.reports.schema as schema

    def broken(*_: object) -> None:
        raise RuntimeError("a fault of ours")

    monkeypatch.setattr(schema, "read_report", broken)
    code, _, err = run("show", tmp_path)
    assert code == 4 and "Traceback" in err and "a fault of parity's own" in err


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (OSError(errno.ENOSPC, "No space left on device", "x"), 2),
        (PermissionError(errno.EACCES, "Permission denied", "x"), 2),
        (SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"), 2),
        (SafetensorError("Error while serializing: a name that is no string"), 4),
        (FileNotFoundError(errno.ENOENT, "No such file or directory", "x"), 4),
        (RuntimeError("No space left on device (os error 28)"), 4),
    ],
)
def test_a_system_that_refuses_a_file_is_no_fault_of_ours(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, error: Exception, code: int
) -> None:
    import parity.reports.schema as schema

    def refused(*_: object) -> None:
        raise error

    monkeypatch.setattr(schema, "read_report", refused)
    found, _, err = run("show", tmp_path)
    assert found == code
    assert ("Traceback" in err) == (code == 4) and ("free some space" in err) == (code == 2)


def test_probes_are_listed(run: Run) -> None:
    code, out, _ = run("probes")
    assert code == 0 and all(
        name in out for name in ("dispatch", "loading", "floor", "golden", "kernels", "operators", "serving")
    )
    assert max(map(len, out.splitlines())) <= 80


def test_env_names_backends_and_variables(run: Run) -> None:
    code, out, _ = run("env")
    assert (
        code == 0
        and "backend torch" in out
        and "does not run here: no CUDA device" in out
        and "triton" in out
    )


LONG = "/" + "/".join(["a-rather-long-folder"] * 6) + "/model-of-mine"


@pytest.mark.parametrize("columns", [None, 50, 200])
def test_messages_are_wrapped(
    columns: int | None, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the terminal's width, at 80 where there is none; a path stays in one piece, and nothing is lost."""
    if columns is not None:
        monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
        monkeypatch.setattr(shutil, "get_terminal_size", lambda *_: os.terminal_size((columns, 24)))
    complain(f"asked: {LONG}; found: {'a word ' * 20}\ndo this: {'parity check --only noise, ' * 6}")
    lines = capfd.readouterr().err.splitlines()
    assert all(len(line) <= (columns or 80) for line in lines if LONG not in line)
    assert sum(LONG in line for line in lines) == 1
    first = next(n for n, line in enumerate(lines) if line.startswith("do this: "))
    assert [line.startswith("  ") for line in lines] == [n not in (0, first) for n in range(len(lines))]
    said = " ".join(" ".join(lines).split())
    assert said == " ".join(
        f"parity: asked: {LONG}; found: {'a word ' * 20} do this: {'parity check --only noise, ' * 6}".split()
    )


def test_a_command_wraps_its_errors(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert cli.run(["train", str(tmp_path / "no-such-file.yaml")]) == 2
    lines = capfd.readouterr().err.splitlines()
    assert lines[0].startswith("parity: asked: ") and all(
        len(line) <= 80 or " " not in line[2:] for line in lines
    )


def test_keys_are_listed(run: Run) -> None:
    code, out, err = run("train", "--keys")
    assert (code, err) == (0, "") and max(map(len, out.splitlines())) <= 80
    for line in (
        "recipe.block (required): ",
        "  size: integer, at least 2 (slots); required",
        "run.watch (default null)",
    ):
        assert f"\n{line}" in out, line


FLAGS = {
    "capture": {
        "--model",
        "--prompts",
        "--out",
        "--backend",
        "--taps",
        "--dtype",
        "--loader",
        "--revision",
        "--device-map",
        "--as",
        "--max-tokens",
        "--complete-with",
        "--complete-model",
        "--new-tokens",
        "--local-from",
        "--sketch",
        "--threads",
    },
    "check": {
        "--adapter",
        "--only",
        "--model",
        "--prompts",
        "--backend",
        "--loader",
        "--revision",
        "--device-map",
        "--max-tokens",
        "--out",
        "--threads",
    },
    "compare": {
        "--golden",
        "--taps",
        "--map",
        "--align",
        "--policy",
        "--floor",
        "--out",
        "--threads",
        "--live",
    },
    "train": {"--out", "--preset", "--steps", "--stop-after", "--resume", "--threads", "--keys"},
    "eval": {
        "--prompts",
        "--which",
        "--max-prompts",
        "--new-tokens",
        "--temperature",
        "--seed",
        "--min-tau",
        "--device",
        "--out",
        "--threads",
    },
    "export": {"--to", "--out", "--which", "--full-vocabulary", "--partial-rotary", "--overwrite"},
    "import": {"--out", "--target", "--recipe", "--answer"},
    "show": {"--as", "--parquet"},
    "gate": {"--policy", "--baseline", "--junit", "--summary", "--annotations"},
    "env": {"--diff", "--as"},
    "probes": {"--matrix"},
}


def test_flags_are_a_promise() -> None:
    """A flag is changed on purpose, here, with a line in CHANGELOG."""
    import typer

    group: Any = typer.main.get_command(cli.app)
    assert {
        name: {option for parameter in command.params for option in parameter.opts if option.startswith("--")}
        - {"--help"}
        for name, command in group.commands.items()
    } == FLAGS
