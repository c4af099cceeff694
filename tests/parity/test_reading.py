"""Files that others wrote: YAML as models, JSON without bare words, and what is said of what cannot be read."""

from pathlib import Path

import pytest
from pydantic import BaseModel, ConfigDict

from parity.errors import ParityError
from parity.reading import decode_json, read_json, read_strict_yaml


class _Inner(BaseModel):
    model_config = ConfigDict(extra="forbid")
    size: int = 1
    sides: tuple[int, ...] = ()


class _Outer(BaseModel):
    model_config = ConfigDict(extra="forbid")
    inner: _Inner = _Inner()
    by_name: dict[str, _Inner] = {}
    several: tuple[_Inner, ...] = ()


@pytest.mark.parametrize("literal", ["NaN", "Infinity", "-Infinity"])
def test_json_has_no_bare_words(literal: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"the literal {literal} is no JSON"):
        decode_json(f'{{"loss": {literal}}}')
    (tmp_path / "x.json").write_text(f"[{literal}]")
    with pytest.raises(ParityError, match="found: no readable JSON .the literal"):
        read_json(tmp_path / "x.json", "the file x", "write it again")


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b"[" * 100_000])
def test_what_is_no_json_names_the_file_and_what_to_do(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "x.json").write_bytes(content)
    with pytest.raises(ParityError) as caught:
        read_json(tmp_path / "x.json", "the file x", "write it again")
    assert (caught.value.asked, caught.value.do) == ("the file x", "write it again")
    with pytest.raises(ParityError, match="No such file"):
        read_json(tmp_path / "none.json", "the file x", "write it again")


def test_json_is_read(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text('{"a": [1, 2.5, null, "\u00e4"]}', encoding="utf-8")
    assert read_json(tmp_path / "x.json", "x", "y") == {"a": [1, 2.5, None, "\u00e4"]}


@pytest.mark.parametrize(
    ("text", "found", "do"),
    [
        ("inne: {}", "inne: Extra inputs", "write 'inner'"),
        ("inner: {siz: 1}", "inner.siz: Extra inputs", "write 'size'"),
        ("by_name: {a: {siz: 1}}", "by_name.a.siz: Extra inputs", "write 'size'"),
        ("several: [{}, {side: 1}]", "several.1.side: Extra inputs", "write 'sides'"),
        ("inner: {size: many}", "inner.size: Input should be a valid integer", "known keys: size, sides"),
        ("[1]", "the file: Input should be a valid dictionary", "known keys: inner, by_name, several"),
        ("", "the file: Input should be a valid dictionary", "known keys: inner"),
        ("inner: [", "no readable YAML", "name a YAML or JSON file"),
    ],
)
def test_a_key_that_is_not_known_is_refused_with_the_nearest(
    text: str, found: str, do: str, tmp_path: Path
) -> None:
    (tmp_path / "x.yaml").write_text(text)
    with pytest.raises(ParityError) as caught:
        read_strict_yaml(_Outer, tmp_path / "x.yaml", "plan")
    assert found in caught.value.found and do in caught.value.do
    assert caught.value.asked == f"the plan {tmp_path / 'x.yaml'}"


def test_an_empty_file_may_hold_a_default(tmp_path: Path) -> None:
    (tmp_path / "x.yaml").write_text("# nothing yet\n")
    assert read_strict_yaml(_Outer, tmp_path / "x.yaml", "plan", empty={}) == _Outer()
