"""Files written whole or not at all: the old content until the new one is there, whatever goes wrong."""

import os
from pathlib import Path

import pytest

from parity import files
from parity.files import WRITING, replace_atomically, write_atomically


def test_text_and_bytes_replace_what_was_there(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    write_atomically(file, "1 µ\n")
    assert file.read_bytes() == "1 µ\n".encode()
    write_atomically(file, b"2")
    assert file.read_bytes() == b"2" and [each.name for each in tmp_path.iterdir()] == ["a.json"]


def test_an_error_leaves_the_old_file_alone(tmp_path: Path) -> None:
    file = tmp_path / "a"
    file.write_text("old")
    with pytest.raises(ValueError, match="half"), replace_atomically(file) as temporary:
        temporary.write_text("ne")
        assert temporary.parent == tmp_path and temporary.name.endswith(WRITING)
        assert file.read_text() == "old"
        raise ValueError("half")
    assert file.read_text() == "old" and len(list(tmp_path.iterdir())) == 1


def test_two_writers_of_one_file_do_not_share_a_temporary(tmp_path: Path) -> None:
    with replace_atomically(tmp_path / "a") as one, replace_atomically(tmp_path / "a") as two:
        assert one != two
        one.write_text("1")
        two.write_text("2")
    assert (tmp_path / "a").read_text() == "1", "the last to finish"


@pytest.mark.parametrize(("durable", "expected"), [(False, []), (True, ["file", "rename", "folder"])])
def test_durable_flushes_the_file_before_its_name_and_the_folder_after(
    durable: bool, expected: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    rename = os.replace

    def note_replace(old: Path, new: Path) -> None:
        seen.extend(["rename"] * durable)
        rename(old, new)

    monkeypatch.setattr(
        files, "flush_to_disk", lambda path: seen.append("folder" if path.is_dir() else "file")
    )
    monkeypatch.setattr(os, "replace", note_replace)
    write_atomically(tmp_path / "a", "x", durable=durable)
    assert seen == expected
