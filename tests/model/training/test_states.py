"""States: the recipe's slices in fc's order, no document seen from another, offline equal to online."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from parity.errors import ParityError
from parity.model.recipe.config import Recipe, TrainingFile, preset
from parity.model.training.data import Batch, Document, make_batch, read_documents
from parity.model.training.states import (
    OnlineStates,
    SharedModules,
    SpeculatorsStates,
    SyntheticTarget,
    TraceStates,
    open_target,
    store,
    taps_of,
)


@pytest.fixture(scope="module")
def opened() -> tuple[TrainingFile, SharedModules, OnlineStates, list[Document]]:
    """The embedded hybrid target with three short documents."""
    training = preset("tiny").with_values(
        {"run.data.documents": 3, "run.data.document_length": 80, "run.states.keep_mib": 0}
    )
    parts, source, tokenizer = open_target(training)
    assert isinstance(source, OnlineStates)
    return training, parts, source, read_documents(training.run.data, tokenizer)


@pytest.fixture
def batch(opened: Any) -> Iterator[Batch]:
    documents = opened[3]
    yield make_batch(documents, epoch=0, pad_to=sum(map(len, documents)) + 5)


TAPS: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    ({}, ("layer.1.out", "layer.5.out", "final.postnorm")),
    ({"recipe.teacher.norm": "pre"}, ("layer.1.out", "layer.5.out", "final.prenorm")),
    ({"recipe.conditioning.ids": "hidden_states"}, ("layer.0.out", "layer.4.out", "final.postnorm")),
    (
        {"recipe.teacher.state": 8, "recipe.teacher.norm": "pre"},
        ("layer.1.out", "layer.5.out", "layer.8.out"),
    ),
    ({"recipe.labels": "data"}, ("layer.1.out", "layer.5.out")),
    (
        {"recipe.labels": "data", "recipe.loss.terms": {"ce": 0.5, "kl": 0.5}},
        ("layer.1.out", "layer.5.out", "final.postnorm"),
    ),
]


@pytest.mark.parametrize(("changes", "taps"), TAPS)
def test_slices_of_a_recipe(changes: dict[str, Any], taps: tuple[str, ...]) -> None:
    made = preset("tiny").with_values({"recipe.conditioning.layers": [1, 5]} | changes)
    assert taps_of(made.recipe) == taps


def test_online_states_are_the_targets_own(opened: Any, batch: Batch) -> None:
    training, parts, source, documents = opened
    captured = source(batch)
    assert captured.states.shape == (len(batch.tokens), 6, 128) and captured.conditioning == 5
    assert not captured.states[-5:].any()
    for document, (_, span) in zip(documents, batch.spans(), strict=True):
        with torch.inference_mode():
            out = parts.target.model(
                input_ids=torch.from_numpy(document.tokens)[None], output_hidden_states=True, use_cache=False
            )
        for slot, layer in enumerate(training.recipe.conditioning.decoder_layers):
            assert torch.equal(captured.states[span, slot], out.hidden_states[layer + 1][0])
        logits = captured.states[span, -1] @ parts.head.T
        torch.testing.assert_close(logits, out.logits[0], atol=1e-4, rtol=1e-4)


def test_kept_states_are_the_same_and_bounded(opened: Any, batch: Batch, monkeypatch: Any) -> None:
    training, _, source, documents = opened
    size = len(documents[0]) * 6 * 128 * 4
    keeping = OnlineStates(training.recipe, source.target, source.backend, keep_mib=1)
    keeping._room = size  # only the first document fits
    first = keeping(batch).states
    computed: list[int] = []
    original = keeping._compute_states

    def counted(ids: list[int]) -> Tensor:
        computed.append(len(ids))
        return original(ids)

    monkeypatch.setattr(keeping, "_compute_states", counted)
    assert torch.equal(keeping(batch).states, first) and torch.equal(first, source(batch).states)
    assert computed == [len(document) for document in documents[1:]]


def test_a_document_does_not_see_its_neighbours(opened: Any) -> None:
    _, _, source, documents = opened
    alone = source(make_batch(documents[1:2], epoch=0)).states
    packed = source(make_batch(documents, epoch=0)).states
    start = len(documents[0])
    assert torch.equal(packed[start : start + len(documents[1])], alone)


def test_a_trace_gives_what_the_target_gave(opened: Any, batch: Batch, tmp_path: Path) -> None:
    training, parts, source, documents = opened
    trace = store(parts.target, source.backend, documents, tmp_path / "trace", training.recipe)
    offline = TraceStates(training.recipe, trace)
    assert torch.equal(offline(batch).states, source(batch).states)
    first = Document(sample_id=0, tokens=documents[0].tokens[:20], mask=documents[0].mask[:20])
    cut = make_batch([first], epoch=0)  # cut shorter than it was captured: the same first states
    assert torch.equal(offline(cut).states, source(make_batch(documents[:1], epoch=0)).states[:20])
    foreign = make_batch([_reversed(documents[0])], epoch=0)
    with pytest.raises(
        ParityError, match="states of sample 9 from .*trace; found: no request with its tokens"
    ):
        offline(foreign)
    other = training.with_values({"recipe.conditioning.layers": [2, 3, 5, 7, 9]})
    with pytest.raises(ParityError, match="tap 'layer.2.out' of"):
        TraceStates(other.recipe, trace)


def _reversed(document: Document) -> Document:
    return Document(sample_id=9, tokens=document.tokens[::-1].copy(), mask=document.mask)


def write_speculators(folder: Path, recipe: Recipe, source: OnlineStates, documents: list[Document]) -> Path:
    """hs_*.safetensors as speculators 0.9.0 writes them: the last slice before the final norm."""
    folder.mkdir()
    pre = OnlineStates(recipe, source.target, source.backend)
    for document in documents:
        states = pre.document(torch.from_numpy(document.tokens))
        file = folder / f"hs_{document.sample_id}.safetensors"
        save_file(
            {"token_ids": torch.from_numpy(document.tokens), "hidden_states": states.contiguous()}, file
        )
    return folder


def test_speculators_files(opened: Any, batch: Batch, tmp_path: Path) -> None:
    training, parts, source, documents = opened
    pre = training.with_values({"recipe.teacher.norm": "pre"}).recipe
    folder = write_speculators(tmp_path / "hs", pre, source, documents)
    as_is = SpeculatorsStates(pre, folder, parts)(batch).states
    assert torch.equal(as_is, OnlineStates(pre, source.target, source.backend)(batch).states)
    normed = SpeculatorsStates(training.recipe, folder, parts)(batch).states
    torch.testing.assert_close(normed, source(batch).states)  # the file's last slice is normed as declared
    none = training.with_values({"recipe.labels": "data"}).recipe
    assert SpeculatorsStates(none, folder, parts)(batch).states.shape[1] == 5


def test_speculators_files_that_do_not_fit(opened: Any, batch: Batch, tmp_path: Path) -> None:
    training, parts, source, documents = opened
    folder = write_speculators(tmp_path / "hs", training.recipe, source, documents)
    fewer = training.with_values({"recipe.conditioning.layers": [1, 3]}).recipe
    with pytest.raises(
        ParityError, match=r"hidden_states \[\d+, 6, 128\] for \d+ tokens\ndo this: give \[T, 3, D\]"
    ):
        SpeculatorsStates(fewer, folder, parts)(batch)
    with pytest.raises(ParityError, match="hold the conditioning layers and the final state only"):
        layer = training.with_values({"recipe.teacher": {"state": 10, "norm": "pre"}}).recipe
        SpeculatorsStates(layer, folder, parts)
    (folder / "hs_1.safetensors").write_bytes((folder / "hs_0.safetensors").read_bytes())
    with pytest.raises(ParityError, match="states of sample 1 .*; found: other token ids than the data"):
        SpeculatorsStates(training.recipe, folder, parts)(batch)
    (folder / "hs_0.safetensors").unlink()
    with pytest.raises(ParityError, match="states of sample 0"):
        SpeculatorsStates(training.recipe, folder, parts)(batch)
    with pytest.raises(ParityError, match=r"no hs_\*.safetensors there"):
        SpeculatorsStates(training.recipe, tmp_path, parts)


def test_another_backend_than_the_recipes_is_refused(opened: Any, batch: Batch) -> None:
    from parity.model.target.backends import parse_backend

    training, _, source, _ = opened
    wrong = OnlineStates(training.recipe, source.target, parse_backend("fla"))
    with pytest.raises(ParityError, match="recipe.target.backend: fla"):
        wrong(batch)


def test_layers_are_checked_against_the_target() -> None:
    with pytest.raises(ParityError, match='synthetic:unit"; found: it has decoder layers 0 to 3'):
        open_target(preset("unit").with_values({"recipe.conditioning.layers": [1, 4]}))
    with pytest.raises(ParityError, match="the only one is synthetic:unit"):
        open_target(preset("unit").with_values({"recipe.target.model": "synthetic:big"}))


def test_the_synthetic_target_is_causal_and_layered() -> None:
    target = SyntheticTarget(torch.float64)
    tokens = torch.arange(10, 30)
    taps, cut = target(tokens), target(tokens[:12])
    for name, state in taps.items():
        torch.testing.assert_close(state[:12], cut[name])
    changed = tokens.clone()
    changed[3] = 60
    assert (target(changed)["layer.0.out"] != taps["layer.0.out"]).any(1)[3:].all()
    assert not torch.equal(taps["layer.1.out"], taps["layer.2.out"])
