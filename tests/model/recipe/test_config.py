"""Training files: round trips, presets with sources, and the text of every refusal."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from parity.errors import ParityError
from parity.model.recipe import keys
from parity.model.recipe.check import LOSS_TERMS, check_layers
from parity.model.recipe.config import (
    TrainingFile,
    dump,
    from_data,
    load_declared,
    load_training_file,
    merge_values,
    parse_training_file,
    preset,
)
from parity.model.recipe.presets import PRESETS


def refusal(text: str) -> str:
    """The message that a training file gives."""
    with pytest.raises(ParityError) as caught:
        parse_training_file(text, "t.yaml")
    return str(caught.value)


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_survives_its_own_yaml(name: str) -> None:
    made = preset(name)
    assert parse_training_file(dump(made)) == made
    assert parse_training_file(f"preset: {name}\n") == made


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_value_names_a_source(name: str) -> None:
    assert all(row.source for row in PRESETS[name])
    places = [row.place for row in PRESETS[name]]
    assert len(places) == len(set(places))
    for wiring in ("labels", "loss.terms", "loss.weights.kind", "loss.reduction", "noise.kind"):
        assert f"recipe.{wiring}" in places or name == "unit", wiring


def test_published_values() -> None:
    """What the sources say (docs/evidence.md)."""
    paper, theirs, ours = (
        preset("dflash-paper").recipe,
        preset("speculators-0.9").recipe,
        preset("qwen3.6-27b"),
    )
    assert (paper.block.size, paper.loss.weights.gamma, paper.labels) == (16, 7.0, "data")
    assert (theirs.labels, theirs.loss.weights.alpha) == ("teacher_argmax", 0.5)
    assert theirs.conditioning.decoder_layers == (1, 17, 32)
    assert ours.recipe.conditioning.decoder_layers == (1, 16, 31, 46, 61)
    assert ours.recipe.block.mask_token_id == 248070


def test_the_hash_is_of_the_recipe_alone() -> None:
    tiny = preset("tiny")
    assert tiny.with_values({"run.seed": 5}).recipe.hash == tiny.recipe.hash
    assert tiny.with_values({"recipe.loss.weights.gamma": 5.0}).recipe.hash != tiny.recipe.hash


def test_numbers_without_a_point_are_numbers() -> None:
    """YAML 1.1 reads 6e-4 as text."""
    assert parse_training_file("preset: tiny\nrun: {optimizer: {lr: 6e-4}}").run.optimizer.lr == 6e-4


TABLE: list[tuple[str, str, str]] = [
    # what is wrong, the file after `preset: tiny`, the message
    (
        "teacher among conditioning",
        "recipe:\n  conditioning: {layers: [1, 3], ids: layer}\n  teacher: {state: 3, norm: pre}\n",
        'asked: line 4 "teacher: {state: 3, norm: pre}" and line 3 "conditioning: {layers: [1, 3], ids: layer}"'
        " in t.yaml; found: decoder layer 3 makes the labels and is fed to fc too\n"
        "do this: take it out of conditioning.layers, or take the labels from another state",
    ),
    (
        "teacher among conditioning, other ids",
        "recipe:\n  conditioning: {layers: [2, 4], ids: hidden_states}\n  teacher: {state: 4, norm: pre}\n",
        "decoder layer 3 makes the labels and is fed to fc too",
    ),
    (
        "window larger than context",
        "recipe:\n  attention:\n    layers: [sliding, full]\n    window: 4096\nrun:\n  data:\n    length: 2048\n",
        'asked: line 5 "window: 4096" and line 8 "length: 2048" in t.yaml; found: no row has 4096 tokens, so the'
        " layer would be full in all but name\ndo this: make the window at most run.data.length, or the layers full",
    ),
    (
        "gamma with uniform",
        "recipe:\n  loss:\n    weights:\n      kind: uniform\n      gamma: 4\n",
        'asked: line 6 "gamma: 4" and line 5 "kind: uniform" in t.yaml; found: gamma belongs to kind exp\n'
        "do this: leave gamma out, or write kind: exp",
    ),
    (
        "alpha with exp",
        "recipe: {loss: {weights: {kind: exp, gamma: 4, alpha: .5}}}\n",
        "alpha belongs to kind dpace\ndo this: leave alpha out, or write kind: dpace",
    ),
    (
        "exp without gamma",
        "recipe: {loss: {weights: {kind: exp, gamma: null}}}\n",
        "no gamma\ndo this: add gamma",
    ),
    (
        "ids ambiguous",
        "recipe:\n  conditioning:\n    layers: [2, 18]\n    ids: null\n",
        'asked: line 4 "layers: [2, 18]" in t.yaml; found: no ids, so they may be decoder layers [2, 18] (0-based;'
        " z-lab, SpecForge) or [1, 17] (entries of hidden_states; speculators, vLLM)\n"
        "do this: add ids: layer or ids: hidden_states",
    ),
    (
        "embeddings as a layer",
        "recipe: {conditioning: {layers: [0, 3], ids: hidden_states}}\n",
        "that counts the embeddings or less as a layer\ndo this: name decoder layers only",
    ),
    (
        "a layer twice",
        "recipe: {conditioning: {layers: [1, 3, 3]}}\n",
        "a layer twice\ndo this: name each conditioning layer once",
    ),
    (
        "noise without kind",
        "recipe:\n  noise:\n    kind: none\n    std: 0.05\n",
        'asked: line 5 "std: 0.05" and line 4 "kind: none" in t.yaml; found: a strength without a kind\n'
        "do this: write kind: none and std: 0, or uniform or gaussian with std above 0",
    ),
    ("noise without strength", "recipe: {noise: {kind: uniform}}\n", "a kind without a strength"),
    (
        "labels without a teacher",
        "recipe: {teacher: null}\n",
        'asked: "recipe.labels: teacher_argmax" and line 2 "recipe: {teacher: null}" in t.yaml; found: no teacher'
        " state to take them from\ndo this: give teacher: {state: final, norm: post}, or train on labels: data with"
        " ce alone",
    ),
    (
        "ce on a distribution",
        "recipe: {labels: teacher_distribution}\n",
        "ce needs one token a slot\ndo this: use labels: teacher_argmax or data, or leave ce out",
    ),
    (
        "labels that nothing uses",
        "recipe: {labels: data, loss: {terms: {kl: 1.0}}}\n",
        "kl compare with the teacher's distribution and no term uses the label\n"
        "do this: use labels: teacher_distribution, or add ce to the terms",
    ),
    (
        "temperature without a soft term",
        "recipe: {loss: {temperature: 2.0}}\n",
        "a temperature changes the soft terms only, and there is none\ndo this: leave temperature at 1",
    ),
    (
        "unknown term",
        "recipe: {loss: {terms: {kll: 1.0}}}\n",
        "found: no term 'kll'\ndo this: did you mean kl? ",
    ),
    ("a term that weighs nothing", "recipe: {loss: {terms: {ce: 0}}}\n", "ce weighs 0.0"),
    ("no term", "recipe: {loss: {terms: {}}}\n", "found: no term\ndo this: use one or more of ce, kl, rkl"),
    (
        "post of a layer",
        "recipe: {teacher: {state: 2, norm: post}}\n",
        "only the state `final` exists after the final norm\ndo this: write norm: pre",
    ),
    (
        "sliding without window",
        "recipe: {attention: {layers: [sliding]}}\n",
        "sliding layers without a window",
    ),
    ("window without sliding", "recipe: {attention: {window: 8}}\n", "a window that no layer uses"),
    (
        "embedding trains",
        "recipe: {frozen: [lm_head]}\n",
        "embed_tokens would train, but the drafter shares the target's own",
    ),
    ("one map", "recipe: {draft_vocab: {size: 9, t2d: a.npy}}\n", "one map without the other"),
    ("steps and epochs", "run: {schedule: {epochs: 2}}\n", "found: both\ndo this: give exactly one of them"),
    (
        "block longer than a row",
        "run: {data: {length: 8, document_length: 8}}\nrecipe: {block: {size: 9}}\n",
        "a block longer",
    ),
    ("document longer than a row", "run: {data: {length: 100}}\n", "a document longer than a row"),
    ("corpus with a path", "run: {data: {path: x}}\n", "the corpus is generated"),
    ("file without a path", "run: {data: {source: jsonl}}\n", "nothing to read"),
    ("corpus without an end", "run: {data: {documents: null}}\n", "the corpus has no end"),
    ("offline without a path", "run: {states: {kind: trace}}\n", "no file to read them from"),
    ("too many passes", "run: {batch: {rows: 2, accumulate: 3}}\n", "more forward passes than rows"),
    # keys and values
    (
        "unknown key",
        "recipe:\n  teacher:\n    stat: final\n",
        "asked: line 4 \"stat: final\"; found: no key 'stat' under recipe.teacher\n"
        "do this: did you mean state? There are state, norm; `parity train --keys` says what each key takes",
    ),
    (
        "unknown part",
        "receipt: {}\n",
        "found: no key 'receipt' under the top\ndo this: did you mean recipe? There are recipe, run, preset",
    ),
    ("not a mapping", "recipe: {noise: 3}\n", "asked: recipe.noise; found: a int\ndo this: give a mapping"),
    (
        "wrong type",
        "recipe:\n  block:\n    size: many\n",
        'asked: line 4 "size: many"; found: Input should be a valid integer, unable to parse string as an integer\n'
        "do this: correct the value; `parity train --keys` says what each key takes",
    ),
    (
        "wrong choice",
        "recipe: {labels: argmax}\n",
        "Input should be 'teacher_argmax', 'teacher_distribution' or 'data'",
    ),
    (
        "a key twice",
        "run:\n  seed: 1\n  seed: 2\n",
        "asked: run.seed on line 4; found: the same key on line 3",
    ),
]


@pytest.mark.parametrize(("text", "message"), [row[1:] for row in TABLE], ids=[row[0] for row in TABLE])
def test_a_training_file_that_contradicts_itself_is_refused(text: str, message: str) -> None:
    assert message in refusal("preset: tiny\n" + text)


def test_what_is_missing_is_named() -> None:
    assert refusal("recipe: {}\nrun: {}\n").startswith(
        "asked: recipe.target; found: not given\ndo this: add target under recipe; `parity train --keys` says"
    )


def test_files_that_are_none(tmp_path: Path) -> None:
    assert "no YAML" in refusal("a: [")
    assert "asked: a training file; found: nothing" in refusal("")
    assert "no such preset" in refusal("preset: tinny")
    with pytest.raises(ParityError, match="training file .*No such file"):
        load_training_file(tmp_path / "none.yaml")


def test_a_training_made_in_python_is_checked_too() -> None:
    data = preset("tiny").model_dump(mode="json")
    data["recipe"]["noise"]["std"] = 0.1
    with pytest.raises(ParityError, match='"recipe.noise.std: 0.1" and "recipe.noise.kind: none"'):
        from_data(data)
    with pytest.raises(ParityError, match="a strength without a kind"):
        TrainingFile.model_validate(data)


def test_a_kind_that_changes_replaces_its_mapping() -> None:
    base: dict[str, Any] = {"w": {"kind": "exp", "gamma": 4}, "terms": {"ce": 1}, "n": {"a": 1, "b": 2}}
    over = {"w": {"kind": "dpace", "alpha": 0.5}, "terms": {"kl": 1}, "n": {"b": 3}}
    assert merge_values(base, over) == {**over, "n": {"a": 1, "b": 3}}
    assert merge_values(base, {"w": {"gamma": 5}})["w"] == {"kind": "exp", "gamma": 5}


LAYERS: list[tuple[dict[str, Any], int, str]] = [
    ({}, 12, ""),
    ({}, 9, r"it has decoder layers 0 to 8; \[9\] is none of them"),
    ({}, 10, "the output of the last of 10 layers, which the teacher state `final` is made of"),
    ({"recipe.teacher.state": 20, "recipe.teacher.norm": "pre"}, 12, "it has decoder layers 0 to 11"),
    (
        {"recipe.conditioning": {"layers": [2, 10], "ids": "hidden_states"}},
        10,
        "entry 10 is after the final norm in transformers and before it in vLLM",
    ),
    ({"recipe.teacher": None, "recipe.labels": "data"}, 10, ""),
]


@pytest.mark.parametrize(("changes", "layers", "message"), LAYERS)
def test_layers_that_a_target_lacks(changes: dict[str, Any], layers: int, message: str) -> None:
    recipe = preset("tiny").with_values(changes).recipe
    if message:
        with pytest.raises(ParityError, match=message):
            check_layers(recipe, layers)
    else:
        check_layers(recipe, layers)


# --- where the target is ------------------------------------------------------------------------------

TARGETS: list[tuple[str, str, str]] = [
    # what it names, the name, what is found; empty where it is accepted
    ("a hub name", "Qwen/Qwen3-8B", ""),
    ("a hub name with dots", "HuggingFaceTB/SmolLM2-135M.v1", ""),
    ("a hub name without an owner", "gpt2", ""),
    ("ours", "embedded:dense", ""),
    ("synthetic", "synthetic:unit", ""),
    ("a folder", "{}/model", ""),
    ("a folder from here", "./model", ""),
    ("a folder from here, as a hub name", "work/model", ""),
    ("a gguf file", "{}/m.gguf", ""),
    ("a trainer's file", "mine.py", ""),
    ("a trainer's file beside the recipe", "beside.py", ""),
    ("no Python file", "nothere.py", "no such file"),
    ("no Python file there", "{}/nothere.py", "no such file"),
    ("no gguf file", "nothere.gguf", "no such file or folder"),
    ("no path from here", "./nothere", "no such file or folder"),
    ("no path from above", "../nothere", "no such file or folder"),
    ("no path from home", "~/no/such/folder", "no such file or folder"),
    ("no whole path", "{}/nothere", "no such file or folder"),
    ("deeper than a hub name", "a/b/c", "no such file or folder"),
    ("an empty folder", "{}/empty", "a folder without config.json"),
    ("another file", "notes.txt", "a file that is no model"),
    (
        "beside the recipe only",
        "./other",
        "no such file or folder\ndo this: paths are looked for where the command runs",
    ),
]


@pytest.mark.parametrize(("name", "found"), [row[1:] for row in TARGETS], ids=[row[0] for row in TARGETS])
@pytest.mark.parametrize("whole", [True, False])
def test_a_target_that_is_no_model_is_refused(
    whole: bool, name: str, found: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in ("model", "work/model", "recipes/other"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "config.json").write_text("{}")
    (tmp_path / "empty").mkdir()
    for each in ("m.gguf", "mine.py", "notes.txt", "recipes/beside.py"):
        (tmp_path / each).touch()
    monkeypatch.chdir(tmp_path)
    name = name.format(tmp_path)
    made = preset("tiny").with_values({"recipe.target.model": name})
    text = dump(made) if whole else "recipe:" + dump(made).split("recipe:")[1].split("run:")[0]
    file = tmp_path / "recipes/r.yaml"
    file.write_text(text)
    for read in (load_training_file, load_declared) if whole else (load_declared,):
        if read is load_training_file and not found and name.endswith(".py"):
            with pytest.raises(ParityError, match="only a trainer of your own can make a target of"):
                load_training_file(file)
            continue
        if not found:
            assert read(file) in (made, made.recipe)
            continue
        with pytest.raises(ParityError) as caught:
            read(file)
        said = str(caught.value)
        assert f"model: {name}" in said and f"r.yaml; found: {found}" in said, said


def test_a_training_that_was_stored_is_read_wherever_it_is(tmp_path: Path) -> None:
    """A checkpoint says where its target was; the folder may be on another machine."""
    made = preset("tiny").with_values({"recipe.target.model": "/on/another/machine"})
    assert parse_training_file(dump(made)) == made


# --- the table of keys --------------------------------------------------------------------------------


def test_the_page_of_keys_is_up_to_date() -> None:
    page = Path(__file__).resolve().parents[3] / "docs" / "recipe.md"
    do = "run: python -m parity.model.recipe.keys > docs/recipe.md"
    assert page.read_text(encoding="utf-8") == keys.as_markdown(), do


def test_every_key_is_listed_with_a_meaning() -> None:
    """Those of a whole file, found by another way: what a training says when it is written out."""
    listed = {f"{s.place}.{k.name}".lstrip("."): k for s in keys.sections() for k in s.keys}
    assert [place for place, key in listed.items() if len(key.meaning) < 10] == []

    def written(value: Any, at: str) -> set[str]:
        if not isinstance(value, dict) or at == "recipe.loss.terms":
            return {at}
        return set().union(*(written(inner, f"{at}.{name}".lstrip(".")) for name, inner in value.items()))

    watched = preset("tiny").with_values({"run.watch": {}, "recipe.draft_vocab": {"size": 8}})
    assert set(listed) - {"preset"} == written(watched.model_dump(mode="json"), "")


def test_a_key_has_its_type_default_and_unit() -> None:
    listed = {f"{s.place}.{k.name}": k for s in keys.sections() for k in s.keys}
    for place, type_, default, unit in (
        ("recipe.block.size", "integer, at least 2", "required", "slots"),
        ("recipe.block.share", "number, above 0, at most 1", "1.0", "share"),
        ("recipe.attention.window", "integer, at least 1 or null", "null", "tokens"),
        ("recipe.attention.layers", "list of full or sliding, not empty", "required", ""),
        ("recipe.teacher.state", "final or integer", "final", ""),
        ("recipe.noise.on", "conditioning", "conditioning", ""),
        ("recipe.loss.terms", "mapping of names to number", "required", ""),
        ("run.optimizer.betas", "list of 2 numbers", "[0.9, 0.95]", ""),
        ("run.states.keep_mib", "integer, at least 0", "0", "MiB"),
    ):
        key = listed[place]
        assert (key.type, key.default, key.unit) == (type_, default, unit), place
    marks = {s.place: s.default for s in keys.sections()}
    assert (marks["recipe"], marks["recipe.noise"], marks["run.watch"]) == ("required", "", "null")


def test_terms_are_those_of_the_loss() -> None:
    from parity.model.training.loss import SOFT_TERMS

    assert LOSS_TERMS == ("ce", *SOFT_TERMS)
    said = next(k.meaning for s in keys.sections() for k in s.keys if k.name == "terms")
    assert all(re.search(rf"\b{name}\b", said) for name in LOSS_TERMS)


def test_keys_are_listed_without_torch() -> None:
    code = "import sys; from parity.model.recipe import keys as k; k.as_text(); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
