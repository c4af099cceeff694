"""What is installed is what stands in the tree, and a wheel built from the sdist answers by itself.

A package that `packages` does not list works in an editable install and is silently missing from the
wheel; a link that points elsewhere makes a second copy of a module. Both are seen here first.
"""

import ast
import importlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import Any

import pytest

import parity

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("parity", "model", "probes", "reports")
"""The four folders that are installed; tests/ is the fifth."""

UNDECLARED = {"kernels", "speculators", "specforge", "dflash"}
"""Imported only where a user has them: `kernels` to be recognised, the trainers to be asked (their pins contradict
ours, so they are no extras: `make peers`)."""

HOSTS = tuple(
    ".".join(parts)
    for parts in (  # in parts, so that this file does not name them either
        ("pypi", "org"),
        ("pythonhosted", "org"),
        ("npmjs", "org"),
        ("yarnpkg", "com"),
        ("debian", "org"),
        ("ubuntu", "com"),
        ("crates", "io"),
        ("golang", "org"),
        ("maven", "org"),
        ("anaconda", "org"),
        ("download", "pytorch", "org"),
    )
)


def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def repository_files() -> list[Path]:
    """Every file that git has, or would take: committed, staged and new ones, none that is ignored."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return [Path(name) for name in sorted(set(listed.split("\0"))) if name and os.path.lexists(ROOT / name)]


def source_files() -> Iterator[Path]:
    """The Python files of the four folders, relative to the root, each once."""
    for path in repository_files():
        if path.suffix == ".py" and path.parts[0] in FOLDERS and not (ROOT / path).is_symlink():
            yield path


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", re.split(r"[\s\[<>=!~;]", name, maxsplit=1)[0]).lower()


def test_packages_are_the_folders_of_the_tree() -> None:
    folders = {path.parent for path in source_files()}
    for folder in folders:
        assert (ROOT / folder / "__init__.py").exists(), f"{folder}/ has Python files and no __init__.py"
    expected = {".".join(f.parts if f.parts[0] == "parity" else ("parity", *f.parts)) for f in folders}
    assert set(project()["tool"]["setuptools"]["packages"]) == expected


def test_links_say_the_same_as_the_mapping() -> None:
    mapping = project()["tool"]["setuptools"]["package-dir"]
    assert mapping.pop("parity") == "parity"
    assert set(mapping) == {"parity.model", "parity.probes", "parity.reports"}
    for package, folder in mapping.items():
        link = ROOT / "parity" / package.removeprefix("parity.")
        assert link.is_symlink(), f"{link} is no link: cloned with core.symlinks=false?"
        assert os.readlink(link) == f"../{folder}"
    assert mapping.keys() == {f"parity.{p.name}" for p in (ROOT / "parity").iterdir() if p.is_symlink()}


def test_only_python_files_of_the_right_name_are_at_the_top() -> None:
    """A module at the root could be imported by its bare name, and would not be in the wheel."""
    assert [path for path in repository_files() if len(path.parts) == 1 and path.suffix == ".py"] == []


def test_every_import_is_a_declared_dependency() -> None:
    declared = {normal(name) for name in project()["project"]["dependencies"]}
    for extra, names in project()["project"]["optional-dependencies"].items():
        declared |= set() if extra == "dev" else {normal(name) for name in names}
    distributions = packages_distributions()
    assert "numpy" in distributions, "importlib.metadata no longer knows who provides a module"
    missing = set()
    for path in source_files():
        for module in top_level_imports(ROOT / path):
            if module in sys.stdlib_module_names or module in UNDECLARED | {"parity"}:
                continue
            owners = {normal(name) for name in distributions.get(module, [module])}
            if module == "fla":
                owners.add("flash-linear-attention")  # fla-core holds the files
            if not owners & declared:
                missing.add(f"{path} imports {module}, and pyproject.toml does not name it")
    assert sorted(missing) == []


def top_level_imports(path: Path) -> set[str]:
    """First part of every module imported anywhere in a file, functions included."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            found.add(node.module.partition(".")[0])
    return found


def test_no_file_names_a_package_registry() -> None:
    """Installation goes by package name; where packages come from is the machine's business."""
    assert hosts_in("see https://files." + HOSTS[1] + "/simple") == [HOSTS[1]]
    named = {}
    for path in repository_files():
        if (ROOT / path).is_symlink() or path.suffix in {".png", ".safetensors", ".gz"}:
            continue
        if found := hosts_in((ROOT / path).read_text(encoding="utf-8", errors="replace")):
            named[str(path)] = found
    assert named == {}


def hosts_in(text: str) -> list[str]:
    return [host for host in HOSTS if host in text]


def test_public_names_are_found_and_are_listed_once() -> None:
    assert sorted(parity.PUBLIC) == sorted(parity.__all__)
    for name, place in parity.PUBLIC.items():
        module, _, attribute = place.partition(":")
        found = getattr(importlib.import_module(module), attribute)
        assert getattr(parity, name) is found, name
    with pytest.raises(AttributeError, match="has no attribute 'nonsense'"):
        _ = parity.nonsense


def test_no_folder_is_called_like_a_public_function() -> None:
    """`parity.compare` would mean a function or a module, by the order of imports."""
    assert [name for name in parity.PUBLIC if importlib.util.find_spec(f"parity.{name}") is not None] == []


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from the sdist, built from a copy of what git has: no leftover can help it."""
    copy, out = tmp_path_factory.mktemp("copy"), tmp_path_factory.mktemp("dist")
    for path in repository_files():
        (copy / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / path, copy / path, follow_symlinks=False)
    # `build` without --sdist or --wheel makes the sdist first, and the wheel from it.
    run([sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(copy)], cwd=out)
    assert len(list(out.glob("*.tar.gz"))) == 1
    (built,) = out.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def empty_venv(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A new environment that holds this wheel only; its dependencies are borrowed from ours by a path.

    Installing torch anew takes a minute and proves nothing about the wheel: that the declared
    dependencies are enough is shown by every fresh `make test`, and by the test of imports above.
    A path file in a borrowed folder is not read, so our own editable install stays invisible.
    """
    venv = tmp_path_factory.mktemp("wheel") / "venv"
    run([sys.executable, "-m", "venv", "--without-pip", str(venv)])
    python = venv / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python)]
    run([*pip, "install", "--no-deps", "--no-index", str(wheel)])
    (site,) = venv.glob("lib/python*/site-packages")
    borrowed = [path for path in sys.path if Path(path).name == "site-packages"]
    (site / "borrowed.pth").write_text("\n".join(borrowed) + "\n", encoding="utf-8")
    return venv


def run(command: list[str], cwd: Path | None = None) -> str:
    """Run in an environment that cannot lead back to the source tree; fail with what was printed."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, f"{command} ended with {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def test_wheel_holds_all_files_of_the_packages(wheel: Path) -> None:
    held = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    expected = {str(p) if p.parts[0] == "parity" else f"parity/{p}" for p in source_files()}
    for path in repository_files():  # and the data that package-data promises
        shipped = path.parts[0] in ("reports", "probes") and path.suffix in (".html", ".json")
        if path.parts[:2] == ("model", "embedded") or shipped:
            expected.add(f"parity/{path}")
    assert held == expected | {"parity/py.typed"}


def test_wheel_imports_its_own_files(empty_venv: Path, tmp_path: Path) -> None:
    names = project()["tool"]["setuptools"]["packages"]
    code = f"import importlib as i, json; print(json.dumps([i.import_module(n).__file__ for n in {names}]))"
    files = json.loads(run([str(empty_venv / "bin" / "python"), "-I", "-c", code], cwd=tmp_path))
    assert [file for file in files if not Path(file).is_relative_to(empty_venv)] == []


def test_wheel_runs_parity_check(empty_venv: Path, tmp_path: Path) -> None:
    """In an empty folder, with nothing but the wheel: exit 0, and a report that compared something."""
    out = tmp_path / "report"
    run([str(empty_venv / "bin" / "parity"), "check", "--out", str(out)], cwd=tmp_path)
    report = json.loads((out / "report.json").read_text(encoding="utf-8"))
    outcomes = [finding["outcome"] for finding in report["findings"]]
    assert "pass" in outcomes
    assert not {"fail", "error"} & set(outcomes)
