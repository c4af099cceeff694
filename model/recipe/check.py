"""Lines of a training file that cannot both hold, each rule with its reason and its way out.

Every refusal quotes the lines it is about: as they stand in the file, or as `place: value` for a training
that was made in Python.
"""

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from pydantic import BaseModel

from parity.errors import ParityError
from parity.model.recipe.methods import METHODS

if TYPE_CHECKING:
    from parity.model.recipe.config import Recipe, TrainingFile

KeyPath = tuple[str, ...]
"""A place in the file: ("recipe", "teacher", "state")."""
LOSS_TERMS = ("ce", "kl", "rkl", "js", "tv", "nla", "lk")
"""Terms of the loss: ce and `parity.model.training.loss.SOFT_TERMS`, by name: a training file is read without torch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KeyLines:
    """Where the keys of a file stand, to quote them."""

    file: str = ""
    text: dict[KeyPath, str] = field(default_factory=dict)
    """Key -> `line 5 "teacher: {state: 61, norm: pre}"`."""

    def quote(self, key: KeyPath, value: Any) -> str:
        """The line that says `value`, or the key and value where no line does."""
        found = next((self.text[key[:n]] for n in range(len(key), 1, -1) if key[:n] in self.text), None)
        return found or f'"{".".join(key)}: {flow(value)}"'


@dataclass(frozen=True, kw_only=True, slots=True)
class RecipeConflict:
    """Two lines that cannot both hold; `second` None: one line that says too little."""

    first: KeyPath
    second: KeyPath | None
    why: str
    do: str

    def refuse(self, root: Mapping[str, Any], lines: KeyLines | None) -> None:
        """Raise ParityError with the lines quoted."""
        lines = lines or KeyLines()
        keys = [key for key in (self.first, self.second) if key]
        quoted = list(dict.fromkeys(lines.quote(key, _at(root, key)) for key in keys))
        where = f" in {lines.file}" if lines.file else ""
        raise ParityError(f"{' and '.join(quoted)}{where}", self.why, self.do)


def _at(root: Mapping[str, Any], key: KeyPath) -> Any:
    value: Any = root
    for name in key:
        value = value.get(name) if isinstance(value, Mapping) else getattr(value, name, None)
    return value


def flow(value: Any) -> str:
    """A value as one line of YAML."""
    if isinstance(value, BaseModel):
        value = value.model_dump(mode="json")
    value = list(value) if isinstance(value, tuple) else value
    text: str = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=10_000)
    return text.removesuffix("...\n").strip()


def recipe_clashes(recipe: "Recipe") -> Iterator[RecipeConflict]:
    """What contradicts itself within the recipe."""
    if recipe.method not in METHODS:
        yield _clash("recipe.method", None, "no such family of drafters", nearest(recipe.method, METHODS))
    yield from _loss_clashes(recipe)
    yield from _layer_clashes(recipe)
    yield from _label_clashes(recipe)
    yield from _block_clashes(recipe)


def _clash(first: str, second: str | None, why: str, do: str) -> RecipeConflict:
    """Keys are written as dotted places."""
    return RecipeConflict(
        first=tuple(first.split(".")), second=tuple(second.split(".")) if second else None, why=why, do=do
    )


def _layer_clashes(recipe: "Recipe") -> Iterator[RecipeConflict]:
    layers, ids, teacher = recipe.conditioning.layers, recipe.conditioning.ids, recipe.teacher
    place = "recipe.conditioning.layers"
    if ids is None:
        low = [number - 1 for number in layers]
        why = (
            f"no ids, so they may be decoder layers {list(layers)} (0-based; z-lab, SpecForge) or"
            f" {low} (entries of hidden_states; speculators, vLLM)"
        )
        yield _clash(place, None, why, "add ids: layer or ids: hidden_states")
    if len(set(layers)) < len(layers):
        yield _clash(place, None, "a layer twice", "name each conditioning layer once")
    if min(recipe.conditioning.decoder_layers) < 0:
        why = "that counts the embeddings or less as a layer"
        yield _clash(place, "recipe.conditioning.ids", why, "name decoder layers only")
    if teacher is not None and teacher.state != "final":
        layer = recipe.conditioning.layer_of(teacher.state)
        if layer in recipe.conditioning.decoder_layers:
            why = f"decoder layer {layer} makes the labels and is fed to fc too"
            do = "take it out of conditioning.layers, or take the labels from another state"
            yield _clash("recipe.teacher.state", place, why, do)
        if teacher.norm == "post":
            why = "only the state `final` exists after the final norm"
            yield _clash("recipe.teacher.state", "recipe.teacher.norm", why, "write norm: pre")


def _label_clashes(recipe: "Recipe") -> Iterator[RecipeConflict]:
    soft = [name for name in recipe.loss.terms if name != "ce"]
    labels, terms = "recipe.labels", "recipe.loss.terms"
    if recipe.needs_teacher and recipe.teacher is None:
        first = labels if recipe.labels != "data" else terms
        do = "give teacher: {state: final, norm: post}, or train on labels: data with ce alone"
        yield _clash(first, "recipe.teacher", "no teacher state to take them from", do)
    if recipe.labels == "teacher_distribution" and "ce" in recipe.loss.terms:
        why, do = "ce needs one token a slot", "use labels: teacher_argmax or data, or leave ce out"
        yield _clash(labels, terms, why, do)
    if recipe.labels != "teacher_distribution" and soft and "ce" not in recipe.loss.terms:
        why = f"{', '.join(soft)} compare with the teacher's distribution and no term uses the label"
        yield _clash(labels, terms, why, "use labels: teacher_distribution, or add ce to the terms")
    vocab = recipe.draft_vocab
    if vocab is not None and (vocab.t2d is None) != (vocab.d2t is None):
        why = "one map without the other"
        yield _clash("recipe.draft_vocab.t2d", "recipe.draft_vocab.d2t", why, "give both files, or neither")


def _loss_clashes(recipe: "Recipe") -> Iterator[RecipeConflict]:
    loss, noise = recipe.loss, recipe.noise
    for name, factor in loss.terms.items():
        if name not in LOSS_TERMS:
            yield _clash("recipe.loss.terms", None, f"no term {name!r}", nearest(name, LOSS_TERMS))
        if not factor > 0:
            yield _clash("recipe.loss.terms", None, f"{name} weighs {factor}", "give a factor above 0")
    if not loss.terms:
        yield _clash("recipe.loss.terms", None, "no term", f"use one or more of {', '.join(LOSS_TERMS)}")
    if loss.temperature != 1 and set(loss.terms) == {"ce"}:
        why = "a temperature changes the soft terms only, and there is none"
        yield _clash("recipe.loss.temperature", "recipe.loss.terms", why, "leave temperature at 1")
    for name, kind in (("gamma", "exp"), ("alpha", "dpace")):
        given, place = getattr(loss.weights, name), f"recipe.loss.weights.{name}"
        if given is not None and loss.weights.kind != kind:
            why = f"{name} belongs to kind {kind}"
            do = f"leave {name} out, or write kind: {kind}"
            yield _clash(place, "recipe.loss.weights.kind", why, do)
        if given is None and loss.weights.kind == kind:
            yield _clash("recipe.loss.weights.kind", None, f"no {name}", f"add {name}")
    if (noise.kind == "none") != (noise.std == 0):
        why = "a strength without a kind" if noise.kind == "none" else "a kind without a strength"
        do = "write kind: none and std: 0, or uniform or gaussian with std above 0"
        yield _clash("recipe.noise.std", "recipe.noise.kind", why, do)


def _block_clashes(recipe: "Recipe") -> Iterator[RecipeConflict]:
    sliding, window = "sliding" in recipe.attention.layers, recipe.attention.window
    if sliding != (window is not None):
        why = "sliding layers without a window" if sliding else "a window that no layer uses"
        do = "give window in tokens" if sliding else "write window: null, or make a layer sliding"
        yield _clash("recipe.attention.window", "recipe.attention.layers", why, do)
    missing = sorted({"embed_tokens", "lm_head"} - set(recipe.frozen))
    if missing:
        why = f"{' and '.join(missing)} would train, but the drafter shares the target's own"
        yield _clash("recipe.frozen", None, why, "keep embed_tokens and lm_head in the list")


def run_clashes(training: "TrainingFile") -> Iterator[RecipeConflict]:
    """What contradicts itself within `run:`, or between it and the recipe."""
    recipe, run = training.recipe, training.run
    window, schedule, data = recipe.attention.window, run.schedule, run.data
    if window is not None and window > data.length:
        why = f"no row has {window} tokens, so the layer would be full in all but name"
        do = "make the window at most run.data.length, or the layers full"
        yield _clash("recipe.attention.window", "run.data.length", why, do)
    if recipe.block.size > data.length:
        why = "a block longer than a row"
        yield _clash("recipe.block.size", "run.data.length", why, "give longer rows or shorter blocks")
    if (schedule.steps is None) == (schedule.epochs is None):
        why = "both" if schedule.steps else "neither steps nor epochs"
        yield _clash("run.schedule.steps", "run.schedule.epochs", why, "give exactly one of them")
    if data.document_length is not None and data.document_length > data.length:
        why = "a document longer than a row"
        yield _clash("run.data.document_length", "run.data.length", why, "make it at most length")
    if (data.source == "corpus") != (data.path is None):
        why = "the corpus is generated" if data.path else "nothing to read"
        yield _clash("run.data.source", "run.data.path", why, "give a path exactly when source is not corpus")
    if data.source == "corpus" and data.documents is None:
        yield _clash("run.data.source", "run.data.documents", "the corpus has no end", "give documents")
    if (run.states.kind == "online") != (run.states.path is None):
        why = "online states have no file" if run.states.path else "no file to read them from"
        do = "give states.path exactly when kind is not online"
        yield _clash("run.states.kind", "run.states.path", why, do)
    if run.batch.accumulate > run.batch.rows:
        why = "more forward passes than rows"
        yield _clash("run.batch.accumulate", "run.batch.rows", why, "make accumulate at most rows")


def nearest(name: str, known: Iterable[Any]) -> str:
    """What to do about an unknown name: the nearest known one, and all of them."""
    names = [str(each) for each in known]
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.0)
    return f"did you mean {close[0]}? There are {', '.join(names)}"


def check_layers(recipe: "Recipe", layers: int) -> None:
    """Refuse conditioning and teacher layers that a target of `layers` decoder layers does not have."""
    conditioning, teacher = recipe.conditioning, recipe.teacher
    place, model, clash = "recipe.conditioning.layers", "recipe.target.model", None
    outside = [number for number in conditioning.layers if conditioning.layer_of(number) >= layers]
    if outside:
        why = f"it has decoder layers 0 to {layers - 1}; {outside} is none of them"
        clash = _clash(place, model, why, "name layers that it has")
    elif conditioning.ids == "hidden_states" and layers in conditioning.layers:
        why = f"entry {layers} is after the final norm in transformers and before it in vLLM"
        clash = _clash(
            place,
            "recipe.conditioning.ids",
            why,
            f"leave it out, or write layer {layers - 1} with ids: layer",
        )
    elif teacher is not None and recipe.needs_teacher:
        if layers - 1 in conditioning.decoder_layers and teacher.state == "final":
            why = f"the output of the last of {layers} layers, which the teacher state `final` is made of"
            clash = _clash("recipe.teacher.state", place, why, "leave the last layer out")
        if teacher.state != "final" and not 0 <= conditioning.layer_of(teacher.state) < layers:
            clash = _clash(
                "recipe.teacher.state", model, f"it has decoder layers 0 to {layers - 1}", "name one of them"
            )
    if clash is not None:
        clash.refuse({"recipe": recipe}, None)


HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
"""`name` or `owner/name`, as hubs allow them."""
FILES = {".gguf"}
"""Files that are a model by themselves."""


def check_target(recipe: "Recipe", lines: KeyLines, *, ours: bool = False) -> None:
    """Refuse a target that can only be meant as a path and is no model: not there, or something else.

    `owner/name` where nothing of that name is on this disk is a name on a hub, which is asked later. A Python file is
    the target of a user's own trainer, which alone knows what to do with it; it is looked for beside the training file
    too, and refused where `ours`: parity's own trainer is to load it. Raises ParityError that quotes the line.
    """
    name = recipe.target.model
    if name.startswith(("embedded:", "synthetic:")):
        return
    path, key = Path(name).expanduser(), ("recipe", "target", "model")
    beside = Path(lines.file).parent / path
    local = path.suffix in {".py", *FILES} or HUB_NAME.fullmatch(name) is None
    found, do = "", "give a hub name, the folder that holds config.json, or a .gguf file"
    if path.suffix == ".py":
        if not path.is_file() and not beside.is_file():
            found, do = "no such file", f"check the path, or {do}"
        elif ours:
            found = "a Python file, which only a trainer of your own can make a target of"
    elif path.is_dir():
        if not (path / "config.json").is_file() and not any(path.glob("*.gguf")):
            found = "a folder without config.json"
    elif path.is_file():
        if path.suffix not in FILES:
            found = "a file that is no model"
    elif local:
        found = "no such file or folder"
        if beside.exists():
            do = f"paths are looked for where the command runs ({Path.cwd()}): there is one at {beside.resolve()}"
    if found:
        where = f" in {lines.file}" if lines.file else ""
        raise ParityError(f"{lines.quote(key, name)}{where}", found, do)
