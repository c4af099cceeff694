"""The mapping file: what a dump does not say about itself, one part for each side.

    parity compare hs/ reference/ --map map.yaml

    a:
      layers: [2, 17, 32, 47, 62]     # the ids that were asked for, in the order of the slices
      ids: hidden_states              # layer: 0-based decoder layers; hidden_states: layer + 1
      last: pre                       # state of the last slice: pre or post the final norm
      hidden: 5120                    # to split [T, L*H]
    b:
      files: "{request}/{tap}.npy"    # which part of a file's name is the request, which the tap
      taps: {"layer.{layer}.out": "hs_{layer}"}     # our name: theirs; a list is summed
      axes: {"hs_*": "B T H"}
    align: order                      # rows without token ids are the same tokens, in file order

What is declared here is checked against the reference, never believed (`parity.dumps.identify`).
"""

import re
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import Literal, get_args

from pydantic import Field, field_validator, model_validator

from parity.errors import ParityError
from parity.policy import FrozenModel
from parity.reading import read_strict_yaml
from parity.reports.words import shorten_list

Format = Literal["speculators", "vllm", "specforge", "modelopt", "sglang", "plain"]
FORMATS: tuple[str, ...] = get_args(Format)
RowAlignment = Literal["tokens", "order"]
_AXES = {"B", "1", "T", "L", "H", "(L H)"}
_HOLE = re.compile(r"\{(\w+)\}")


class SideMap(FrozenModel):
    """What one side's dump does not say about itself."""

    format: Format | None = None
    """Which format to read it as; found by content unless given."""
    files: str | None = None
    """Pattern of file names below the folder, with `{request}` and, where a file is one tap, `{tap}`."""
    token_ids: str | None = None
    """Key (or `{tap}`) of the token ids: int [T]. `token_ids` and `input_ids` are found without it."""
    axes: dict[str, str] = {}
    """Name or glob of a tensor to its axes: T tokens, L layers, H channels, B or 1 an axis of length 1."""
    hidden: int | None = Field(default=None, ge=1)
    """Channels of one layer, to split an axis (L H)."""
    layers: tuple[int, ...] | None = Field(default=None, min_length=1)
    """Ids of the slices, in their order: of the conditioning slices, or of all of them."""
    ids: Literal["layer", "hidden_states"] | None = None
    """How `layers` counts: 0-based decoder layers, or entries of `hidden_states` (layer + 1, 0 the embedding)."""
    last: Literal["pre", "post"] | None = None
    """Whether the last state is from before or after the target's final norm."""
    taps: dict[str, str | tuple[str, ...]] = {}
    """Our tap name to theirs. `{layer}` stands for the same number on both sides; a list is summed
    (an engine that keeps the residual apart)."""
    dtype: Literal["bfloat16"] | None = None
    """What 16-bit integers are: numpy has no bfloat16, so some write its bits as integers."""

    @field_validator("files")
    @classmethod
    def _below(cls, files: str | None) -> str | None:
        if files is not None:
            path = PurePosixPath(files)
            if path.is_absolute() or ".." in path.parts or "\\" in files:
                raise ValueError("a pattern of names below the dump's folder: no leading /, no .. and no \\")
            holes = _HOLE.findall(files)
            if sorted(set(holes)) != sorted(holes) or not set(holes) <= {"request", "tap"} or not holes:
                raise ValueError("write {request}, {tap} or both, each once")
        return files

    @field_validator("axes")
    @classmethod
    def _known_axes(cls, axes: dict[str, str]) -> dict[str, str]:
        for name, text in axes.items():
            parse_axes(text, name)
        return axes

    @model_validator(mode="after")
    def _ids_are_told(self) -> "SideMap":
        if self.layers is not None and self.ids is None:
            raise ValueError("layers without ids: say `ids: layer` or `ids: hidden_states` (layer + 1)")
        return self

    def declared_layers(self) -> tuple[str, ...]:
        """The tap that each id of `layers` means, as declared."""
        shift = 1 if self.ids == "hidden_states" else 0
        return tuple(
            "embed.out" if number - shift < 0 else f"layer.{number - shift}.out"
            for number in self.layers or ()
        )

    def axes_of(self, name: str) -> str | None:
        """Declared axes of a tensor, by the first glob that matches."""
        return next((axes for glob, axes in self.axes.items() if fnmatchcase(name, glob)), None)

    def split_name(self, name: str) -> dict[str, str] | None:
        """`request` and `tap` of a file name below the folder, or None where `files` does not match it."""
        if self.files is None:
            return {}
        # `{tap}` does not cross folders; a request may
        pattern = re.escape(self.files).replace(r"\{request\}", "(?P<request>.+?)")
        found = re.fullmatch(pattern.replace(r"\{tap\}", "(?P<tap>[^/]+?)"), name)
        return found.groupdict() if found else None

    def match_sources(self, sources: tuple[str, ...]) -> dict[str, tuple[str, ...]]:
        """Our tap names, each with the source names that are summed for it, for the sources at hand.

        Raises ParityError where `taps` names a source that is not there.
        """
        result: dict[str, tuple[str, ...]] = {}
        for tap, given in self.taps.items():
            names = (given,) if isinstance(given, str) else given
            if "{layer}" in tap:
                numbers = _layers_in(names[0], sources)
                if not numbers:
                    raise _no_source(tap, names[0], sources)
            else:
                numbers = [""]
            for number in numbers:
                filled = tuple(name.replace("{layer}", number) for name in names)
                for name in filled:
                    if name not in sources:
                        raise _no_source(tap, name, sources)
                result[tap.replace("{layer}", number)] = filled
        return result


class Mapping(FrozenModel):
    """Both sides' parts, and how rows without token ids are paired."""

    a: SideMap = SideMap()
    b: SideMap = SideMap()
    align: RowAlignment = "tokens"

    @classmethod
    def load(cls, path: Path) -> "Mapping":
        """Read a mapping file. Raises ParityError, for an unknown key with the nearest known one."""
        return read_strict_yaml(cls, path, "mapping", form="YAML", known="known keys here", empty={})


def parse_axes(text: str, name: str) -> tuple[str, ...]:
    """`B T (L H)` as ("B", "T", "(L H)"). Raises ValueError for what is no such text."""
    axes = tuple(re.findall(r"\([^)]*\)|\S+", text))
    letters = "".join(axes)
    if set(axes) - _AXES or letters.count("T") != 1 or letters.count("H") != 1 or letters.count("L") > 1:
        raise ValueError(f"{name}: {text!r}: write T, H and, where there, L, B or 1, as in 'B T (L H)'")
    return axes


def _layers_in(pattern: str, sources: tuple[str, ...]) -> list[str]:
    """Numbers that `{layer}` takes in the sources, ascending."""
    expression = re.compile(re.escape(pattern).replace(r"\{layer\}", r"(\d+)"))
    found = {match.group(1) for name in sources if (match := expression.fullmatch(name)) and match.groups()}
    return sorted(found, key=int)


def _no_source(tap: str, name: str, sources: tuple[str, ...]) -> ParityError:
    found = f"tensors {shorten_list(sources, 6) or 'none'}"
    return ParityError(f"{name!r} as tap {tap!r}", found, "name one of those in --map")
