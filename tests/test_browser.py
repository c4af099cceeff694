"""tests/browser.sh, with a PATH that has no chromium and an apt-get of our own: what it installs, says and returns."""

import os
import subprocess
from pathlib import Path

import pytest

from tests.reports import test_page

SCRIPT = Path(__file__).with_name("browser.sh")
TOOLS = ("bash", "tail", "mktemp", "rm", "cat", "chmod")


def write_tool(folder: Path, name: str, script: str) -> None:
    file = folder / name
    file.write_text(f"#!/bin/bash\n{script}\n")
    file.chmod(0o755)


def run(
    folder: Path, apt: str | None, *, root: bool = True, ci: str = ""
) -> subprocess.CompletedProcess[str]:
    """Run the script. apt: what apt-get does, as a script; None: there is no apt-get."""
    for name in TOOLS:
        path = next(Path(each) / name for each in ("/bin", "/usr/bin") if (Path(each) / name).exists())
        if not (folder / name).exists():
            (folder / name).symlink_to(path)
    write_tool(folder, "id", f"echo {0 if root else 1000}")
    if apt is not None:
        write_tool(folder, "apt-get", f'echo "$*" >> "{folder}/calls"\n{apt}')
    environment = {"PATH": str(folder), "CI": ci, "TMPDIR": str(folder), "HOME": os.environ.get("HOME", "/")}
    return subprocess.run(
        [str(folder / "bash"), str(SCRIPT)], env=environment, capture_output=True, text=True, timeout=60
    )


INSTALLS = 'case "$*" in *install*) cat > "{0}/chromium" <<< "#!"; chmod +x "{0}/chromium" ;; esac'
FAILS = 'echo "E: Unable to fetch some archives"; exit 100'


def test_as_root_it_is_installed_once(tmp_path: Path) -> None:
    for ci in ("", "true"):
        done = run(tmp_path, INSTALLS.format(tmp_path), ci=ci)
        assert (done.returncode, done.stderr) == (0, "")
    calls = (tmp_path / "calls").read_text().splitlines()
    assert len(calls) == 2 and calls[0].endswith("update"), (
        "the second run finds the browser and calls nothing"
    )
    assert calls[1].endswith("install -y --no-install-recommends chromium fonts-dejavu-core")
    assert done.stdout == "", "nothing is said where it is there"


@pytest.mark.parametrize(
    ("apt", "root", "why"),
    [
        (None, True, "there is no apt-get here"),
        (FAILS, False, "installing it takes root"),
        (FAILS, True, "apt-get failed: E: Unable to fetch some archives"),
        ("exit 0", True, "the package brought no chromium"),
    ],
)
def test_where_it_cannot_it_says_one_line_and_only_ci_fails(
    tmp_path: Path, apt: str | None, root: bool, why: str
) -> None:
    done = run(tmp_path, apt, root=root)
    assert done.returncode == 0
    assert done.stderr == (
        f"no chromium, and {why}; tests/reports/test_page.py needs one: "
        "apt-get install chromium fonts-dejavu-core\n"
    )
    if not root:
        assert not (tmp_path / "calls").exists(), "without root nothing is tried"
    done = run(tmp_path, apt, root=root, ci="true")
    assert done.returncode == 1 and why in done.stderr


def test_pages_are_skipped_with_the_command_and_never_in_ci(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(test_page, "CHROMIUM", None)
    assert "apt-get install chromium" in test_page._missing()
    fixture = test_page.browser.__wrapped__  # type: ignore[attr-defined]
    monkeypatch.delenv("CI", raising=False)
    with pytest.raises(pytest.skip.Exception, match="apt-get install chromium"):
        next(fixture())
    monkeypatch.setenv("CI", "true")
    with pytest.raises(pytest.fail.Exception, match="CI installs both"):
        next(fixture())
    monkeypatch.setitem(__import__("sys").modules, "playwright.sync_api", None)
    assert "pip install -c constraints.txt playwright" in test_page._missing()
