"""The documentation is true: names exist, commands parse and run, output is what a run prints, and it builds.

Output in the pages is a block ```text; a line `...` stands for what is left out. Each part must occur in the
whole output of `parity check` (docs/check.txt) or in that of a command that is run here, numbers and line
breaks apart. When a sentence of a report was changed on purpose, make docs/check.txt anew with `COLUMNS=80
parity check > docs/check.txt`, and change the pages.
"""

import contextlib
import importlib.util
import io
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

import parity
from parity.cli.main import app, run

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
WHOLE = DOCS / "check.txt"
PAGES = [ROOT / "README.md", *sorted(DOCS.glob("*.md"))]
OWN_NAME = Path(__file__).name
MOST_LINES, MOST_OUTPUT, MOST_COLUMNS = 160, 30, 110
MADE = {"report.md", "summary.md"}
"""Markdown that commands write: a report's, and the summary to which a gate appends."""
OUTSIDE = tuple("".join(parts) for parts in (("shar", "ed/"), ("fac", "ts/"), ("des", "ign.md")))
"""Working papers that no clone has; in parts, so that this file does not name them either."""
TEXT = {".py", ".md", ".toml", ".yml", ".yaml", ".txt", ".html", ".json", ""}
NOT_WIRING = {"dispatch", "loading", "floor", "golden", "kernels", "operators", "serving", "finite"}


def repository_files() -> list[Path]:
    """Every text file that git has, or would take."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout.decode().split("\0")
    paths = [ROOT / name for name in listed if name]
    return [path for path in paths if path.suffix in TEXT and path.is_file() and "embedded" not in path.parts]


FILES = repository_files()


def lines_of(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines()


def place(path: Path, number: int) -> str:
    return f"{path.relative_to(ROOT)}:{number}"


# --- names -----------------------------------------------------------------------------------------------


def missing_pages(text: str, names: set[str]) -> set[str]:
    """Markdown files that a line names and that are not in `names`, the repository's."""
    named = re.findall(r"(?<![\w/.{}*-])(?:\.\./|\./)*([\w./-]*\w\.md)\b", re.sub(r"https?://\S+", "", text))
    return {
        name
        for name in named
        if name.rpartition("/")[2] not in MADE
        and not any(f"/{known}".endswith(f"/{name}") for known in names)
    }


def test_every_markdown_file_that_is_named_exists() -> None:
    names = {path.relative_to(ROOT).as_posix() for path in FILES if path.suffix == ".md"}
    assert missing_pages("see docs/none.md", names) == {"docs/none.md"}  # it can fail
    assert missing_pages("see docs/recipe.md, [x](recipe.md)", names) == set()
    missing = [
        f"{place(path, number)} names {name}"
        for path in FILES
        if path.name != OWN_NAME
        for number, line in enumerate(lines_of(path), 1)
        for name in sorted(missing_pages(line, names))
    ]
    assert missing == []


def test_nothing_refers_to_what_a_clone_does_not_have() -> None:
    found = re.compile("|".join(rf"(?<![\w/]){re.escape(name)}" for name in OUTSIDE))
    assert found.search(f"see {OUTSIDE[1]}x") and not found.search("artifacts/x")
    named = [
        f"{place(path, number)} names {match.group()}"
        for path in FILES
        for number, line in enumerate(lines_of(path), 1)
        if (match := found.search(line))
    ]
    assert named == []


def commands() -> dict[str, Any]:
    return dict(typer.main.get_command(app).commands)  # type: ignore[attr-defined]


def test_every_command_that_is_named_exists() -> None:
    """In pages, docstrings and messages: behind a quote, a backtick, `$ `, or at the start of an indented line."""
    named = re.compile(r"""(?:(?<!"")["'`]|\$ |^ {4,})parity ([a-z][a-z_-]*)(?=[ `"']|$)""")
    known = {*commands(), "does"}  # a message says what parity does not know
    assert named.findall("`parity nothing`, 'parity none x'") == ["nothing", "none"]  # it can fail
    wrong = [
        f"{place(path, number)} names parity {name}"
        for path in FILES
        if path.suffix in (".py", ".md", ".yml", ".yaml", ".toml", "") and path.name != OWN_NAME
        for number, line in enumerate(lines_of(path), 1)
        for name in named.findall(line)
        if name not in known
    ]
    assert wrong == []


# --- blocks of the pages -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Block:
    page: Path
    line: int
    """Of its first line."""
    kind: str
    text: str

    def __str__(self) -> str:
        return place(self.page, self.line)


def blocks_of(page: Path) -> Iterator[Block]:
    """Every fenced block, indented ones included."""
    inside: list[str] | None = None
    begin, kind, indent = 0, "", ""
    for number, line in enumerate(lines_of(page), 1):
        fence = re.match(r"( *)```(\w*)$", line)
        if fence and inside is None:
            inside, begin, kind, indent = [], number + 1, fence[2], fence[1]
        elif fence and inside is not None:
            yield Block(page, begin, kind, "\n".join(inside))
            inside = None
        elif inside is not None:
            inside.append(line.removeprefix(indent))
    assert inside is None, f"{page}: a block that does not end"


BLOCKS = [block for page in PAGES for block in blocks_of(page)]
SHELL = [block for block in BLOCKS if block.kind == ""]


def command_lines(block: Block) -> list[list[str]]:
    """The `parity` commands of a block as arguments, without comments and what a shell does with their output."""
    found = []
    for line in block.text.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        if words[:1] == ["parity"]:
            cut = next((n for n, word in enumerate(words) if word in (">", ">>", "|", "||")), len(words))
            found.append(words[1:cut])
    return found


def parsed(arguments: list[str]) -> str:
    """What the parser says against a command line; empty where it takes it. Nothing is run."""
    name, *rest = arguments
    if name not in commands():
        return f"no command {name}"
    try:
        commands()[name].make_context(name, rest)
    except Exception as error:
        return f"{type(error).__name__}: {getattr(error, 'message', error)}"
    return ""


def test_every_command_in_the_pages_parses() -> None:
    assert "No such option" in parsed(["check", "--nothing", "x"])  # it can fail
    assert parsed(["nothing"]) and parsed(["gate"])
    lines = [(block, line) for block in BLOCKS if block.kind == "" for line in command_lines(block)]
    assert len(lines) > 40
    assert [f"{block}: {line}: {parsed(line)}" for block, line in lines if parsed(line)] == []


def test_flags_in_the_text_exist() -> None:
    """`--flag` in backticks, outside blocks: of some command, or of a tool that the pages name."""
    known = {flag for command in commands().values() for part in command.params for flag in part.opts}
    known |= {"--help", "--version", "--strict"}
    wrong = []
    for page in PAGES:
        if page.name in ("benchmarks.md", "evidence.md"):
            continue  # of scripts, and of other projects
        text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.S)
        wrong += [
            f"{page.name}: {flag}"
            for flag in re.findall(r"`[^`\n]*?(--[a-z][\w-]*)", text)
            if flag not in known
        ]
    assert wrong == []


def test_the_readme_is_short() -> None:
    assert len(lines_of(ROOT / "README.md")) <= MOST_LINES
    outputs = [block for block in BLOCKS if block.page.name == "README.md" and block.kind == "text"]
    assert outputs and all(len(block.text.splitlines()) <= MOST_OUTPUT for block in outputs)


def test_lines_of_the_sources_are_short() -> None:
    """Tables apart: they cannot be broken. docs/recipe.md is generated."""
    written = [page for page in PAGES if page.name not in ("recipe.md", "benchmarks.md")]
    long = [
        place(page, number)
        for page in written
        for number, line in enumerate(lines_of(page), 1)
        if len(line) > MOST_COLUMNS and not line.startswith(("|", "![", "["))
    ]
    assert long == []


def test_the_import_order_in_contributing_is_the_one_that_is_checked() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    block = text.partition("## What may import what")[2].split("```")[1]
    shown = [re.split(r" {2,}", line)[0] for line in block.strip().splitlines()]
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    assert shown == next(each["layers"] for each in contracts if each["id"] == "layers")


# --- files in the pages ------------------------------------------------------------------------------------


def block_of(page: str, kind: str, word: str) -> str:
    found = [b.text for b in BLOCKS if b.page.name == page and b.kind == kind and word in b.text]
    assert len(found) == 1, f"{page}: {len(found)} blocks {kind} with {word}"
    return found[0]


def test_the_recipe_on_the_page_is_the_one_that_ships() -> None:
    shown = block_of("your-trainer.md", "yaml", "conditioning:")
    assert shown.strip() == (DOCS / "example" / "recipe.yaml").read_text().strip()


def squeezed(text: str) -> str:
    return re.sub(r"\s+|,(?=\s*\))", "", re.sub(r"#.*", "", text))


def test_the_page_shows_the_adapter_that_ships() -> None:
    """Every statement of the page's class is in the adapter, comments and line breaks apart."""
    shown = squeezed(block_of("your-trainer.md", "python", "class Plain"))
    whole = squeezed((DOCS / "example" / "adapter.py").read_text())
    for statement in ("slices=", "width,vocabulary=", "self.target,self.drafter="):
        assert statement in shown and statement in whole
    call = re.search(r"returnAdapterStep\(.*?\)", shown)
    assert call is not None and call.group()[:-1].rstrip(",") in whole
    assert f"{len(lines_of(DOCS / 'example' / 'loop.py'))} lines" in (DOCS / "your-trainer.md").read_text()


def test_policy_floor_and_mapping_on_the_page_are_read(tmp_path: Path) -> None:
    from parity.comparison.tolerance import Floor
    from parity.dumps.mapping import Mapping
    from parity.policy import Policy

    file = tmp_path / "file.yaml"
    for kind, word, read in (
        ("yaml", "wiring_changes", Policy.load),
        ("yaml", "align: order", Mapping.load),
        ("json", "measured_on", Floor.load),
    ):
        file.write_text(block_of("policies-and-mappings.md", kind, word))
        assert read(file)
    with pytest.raises(parity.ParityError):
        file.write_text("gates: {}\n")
        Policy.load(file)


# --- output in the pages -----------------------------------------------------------------------------------


def masked(text: str) -> str:
    """The text's words on one line: numbers, names of layers, dates and the width of rules taken out."""
    text = re.sub(r"layer\.\d+(\.\w+)*", "layer.#", text)
    text = re.sub(r"[-+]?(\d[\d.,]*(e[-+]?\d+)?|\binf\b)", "#", text)
    return re.sub(r"─+", "─", re.sub(r"#+", "#", " ".join(text.split())))


def parts(block: Block) -> list[str]:
    """What lies between lines `...`."""
    return [part for part in re.split(r"(?m)^\.\.\.$", block.text) if part.strip()]


def printed(*arguments: str, code: int) -> str:
    """What a command prints, run in this process."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        assert run(list(arguments)) == code, out.getvalue()
    return out.getvalue()


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """What the commands of the pages print, by page; each is also what the page says it is."""
    patch, folder = pytest.MonkeyPatch(), tmp_path_factory.mktemp("docs")
    patch.setenv("COLUMNS", "80")
    patch.chdir(folder)
    patch.delitem(sys.modules, "loop", raising=False)
    made: dict[str, str] = {}
    try:
        (folder / "case.yaml").write_text(block_of("case-study.md", "yaml", "preset"))
        study = f"{ROOT}/tests/faults/case_study.py:"
        called = next(line for line in all_lines("case-study.md") if line[:1] == ["check"])
        made["case-study.md"] = printed(
            "check", "case.yaml", "--adapter", study + called[3].partition(":")[2], code=1
        )

        (folder / "watched.yaml").write_text(block_of("watching-a-run.md", "yaml", "watch"))
        train, show, gate = all_lines("watching-a-run.md")[:3]
        printed(*train, code=0)
        made["watching-a-run.md"] = printed(*show, code=0)
        printed(*gate, code=0)

        shutil.copytree(DOCS / "example", folder / "docs" / "example")
        block = next(b for b in BLOCKS if b.page.name == "your-trainer.md" and "sed" in b.text)
        change = next(line for line in block.text.splitlines() if line.startswith("sed"))
        patch.chdir(folder / "docs" / "example")
        before = Path("loop.py").read_text()
        subprocess.run(shlex.split(change), check=True)
        assert Path("loop.py").read_text() != before
        made["your-trainer.md"] = printed(*command_lines(block)[0], code=1)
    finally:
        patch.undo()
        sys.modules.pop("loop", None)
    yield made


def all_lines(page: str) -> list[list[str]]:
    return [line for block in SHELL if block.page.name == page for line in command_lines(block)]


@pytest.fixture(scope="module")
def two_machines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The example of comparing-two-machines.md, as it is on the page."""
    block = next(b for b in SHELL if b.page.name == "comparing-two-machines.md" and "printf" in b.text)
    patch = pytest.MonkeyPatch()
    patch.setenv("COLUMNS", "80")
    patch.chdir(tmp_path_factory.mktemp("machines"))
    try:
        printf = next(line for line in block.text.splitlines() if line.startswith("printf"))
        subprocess.run(["sh", "-c", printf], check=True)
        *captures, compare = command_lines(block)
        for capture in captures:
            printed(*capture, code=0)
        text = printed(*compare, code=0)
        yield text + printed("env", "--diff", "fla", "cpu", code=0)
    finally:
        patch.undo()


def unknown_parts(block: Block, texts: list[str]) -> list[str]:
    return [part for part in parts(block) if not any(masked(part) in text for text in texts)]


@pytest.mark.slow
def test_output_in_the_pages_is_what_a_run_prints(outputs: dict[str, str], two_machines: str) -> None:
    texts = [masked(text) for text in (WHOLE.read_text(), *outputs.values(), two_machines)]
    blocks = [block for block in BLOCKS if block.kind == "text"]
    assert len(blocks) > 8
    made_up = Block(WHOLE, 1, "text", blocks[0].text.replace("PASS", "FAIL"))
    assert unknown_parts(made_up, texts) != []  # it can fail
    assert {str(block): bad for block in blocks if (bad := unknown_parts(block, texts))} == {}


@pytest.mark.slow
def test_the_whole_output_is_what_a_check_says() -> None:
    """Of the wiring probes every sentence; of the rest the suspicions' names and their number."""
    whole = masked(WHOLE.read_text())
    probes = [name for name in wiring_probes()]
    report = parity.check(recipe="tiny", only=probes)
    assert report.outcome == "pass" and len(report.findings) >= len(probes)
    assert [f.name for f in report.findings if masked(f"PASS {f.name} {f.sentence}") not in whole] == []
    table = WHOLE.read_text().partition("Suspicions: ")[2]
    assert table.startswith(f"{len(report.suspicions)} ruled out")
    # A name is the first column, broken over lines: read it out of the columns' positions.
    width = len(re.findall(r"(?m)^(─+)  ─+  ─+$", table)[0])
    column = " ".join(line[:width].strip() for line in table.splitlines()[3:] if line.strip())
    assert [each.name for each in report.suspicions if each.name not in " ".join(column.split())] == []
    names = re.findall(r"(?m)^(?:PASS|WARN|FAIL|SKIPPED|ERROR) +([\w.-]+)", WHOLE.read_text())
    assert {name.partition(".")[0] for name in names[1:]} == {*probes, *NOT_WIRING}


def wiring_probes() -> list[str]:
    """Those that `parity probes` lists as asking a trainer; their table on the page has the same."""
    page = (DOCS / "your-trainer.md").read_text().partition("## What the probes do")[2]
    return re.findall(r"(?m)^\| `(\w+)` \|", page)


def test_the_page_lists_every_probe_of_a_trainer() -> None:
    listed = re.findall(r"(?m)^(\w+) \((.*)\)", printed("probes", code=0))
    assert wiring_probes() == [name for name, kind in listed if "trainer" in kind]


def test_the_reference_shows_every_public_name() -> None:
    shown = re.findall(r"(?m)^::: parity\.(\w+)$", (DOCS / "api.md").read_text())
    assert sorted([*shown, "Trace"]) == sorted(parity.__all__)  # a trace is opened by commands


def test_the_example_of_the_reference_runs() -> None:
    """It prints what it says, in a process of its own: `import parity` there loads no torch before it is used."""
    code = block_of("api.md", "python", "parity.check")
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        env=dict(os.environ),
    )
    assert done.returncode == 0 and done.stdout.startswith("pass ["), done.stderr


# --- the site ----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_site_builds_without_a_warning_and_loads_nothing(tmp_path: Path) -> None:
    for name in ("mkdocs", "material", "mkdocstrings"):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed: make docs")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    env = dict(os.environ) | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, env=env)
    assert done.returncode == 0, done.stderr
    loads = re.compile(
        r"<(?:script|img|iframe)[^>]*\bsrc=\"(?:https?:)?//|<link[^>]*\brel=\"stylesheet\"[^>]*href=\"http"
    )
    assert loads.search('<script src="https://example.org/x.js">')  # it can fail
    pages = sorted(tmp_path.glob("*.html"))
    assert {page.stem for page in pages} >= {page.stem for page in DOCS.glob("*.md")}
    assert [page.name for page in pages if loads.search(page.read_text(encoding="utf-8"))] == []
    nav = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]
    assert str(nav).count(".md") == len(list(DOCS.glob("*.md")))
