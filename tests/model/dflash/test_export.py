"""Checkpoints written and read back; what can be read in two ways is refused with the question to answer."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from parity.errors import ParityError
from parity.model.dflash.config import DrafterConfig, RopeConfig, layer_rules
from parity.model.dflash.drafter import Drafter
from parity.model.dflash.export import (
    AmbiguityAnswers,
    TargetLayers,
    load_checkpoint,
    save_speculators,
    save_zlab,
)
from parity.model.target.load import load_target
from parity.model.target.spec import TargetSpec
from parity.model.training.vocabulary import DraftVocab

WIRING = TargetLayers(
    layers=(1, 4, 6),
    num_target_layers=9,
    vocab_size=50,
    target="some/target",
    architectures=("Qwen3ForCausalLM",),
    max_position_embeddings=512,
)
CONFIG = DrafterConfig(
    hidden_size=32,
    intermediate_size=48,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    conditioning=3,
    block_size=4,
    mask_token_id=49,
    layers=layer_rules(["sliding_attention", "full_attention"], 6),
    rope=RopeConfig(rope_theta=5e5),
    rms_norm_eps=1e-5,
)
YARN = RopeConfig(rope_theta=1e6, rope_type="yarn", factor=4.0, original_max_position_embeddings=128)
VOCAB = DraftVocab.from_kept(torch.arange(50) % 3 == 0)


def _drafter(config: DrafterConfig = CONFIG, vocab: DraftVocab | None = None) -> Drafter:
    drafter = Drafter(config, vocab)
    drafter.reset(torch.Generator().manual_seed(0))
    return drafter


def _zlab(folder: Path, changes: dict[str, Any] | None = None, inner: dict[str, Any] | None = None) -> Path:
    """A z-lab checkpoint with keys changed, or removed where the value is `...`."""
    save_zlab(folder, _drafter(), WIRING)
    return _change(folder, changes, inner, "dflash_config")


def _speculators(
    folder: Path, changes: dict[str, Any] | None = None, inner: dict[str, Any] | None = None
) -> Path:
    save_speculators(folder, _drafter(), WIRING)
    return _change(folder, changes, inner, "transformer_layer_config")


def _change(folder: Path, changes: dict[str, Any] | None, inner: dict[str, Any] | None, key: str) -> Path:
    raw = json.loads((folder / "config.json").read_text())
    for place, given in ((raw, changes), (raw[key], inner)):
        for name, value in (given or {}).items():
            if value is ...:
                place.pop(name, None)
            else:
                place[name] = value
    (folder / "config.json").write_text(json.dumps(raw))
    return folder


CAUSAL = {
    "reader's default": (["sliding_attention", "full_attention"], None),
    "bidirectional": (["sliding_attention", "full_attention"], False),
    "causal": (["sliding_attention", "full_attention"], True),
    "full": (["full_attention", "full_attention"], None),
    "full causal": (["full_attention", "full_attention"], True),
    "sliding": (["sliding_attention", "sliding_attention"], None),
}


@pytest.mark.parametrize("name", CAUSAL)
@pytest.mark.parametrize("rope", [RopeConfig(), YARN], ids=["default", "yarn"])
def test_zlab_round_trip(name: str, rope: RopeConfig, tmp_path: Path) -> None:
    types, causal = CAUSAL[name]
    config = replace(CONFIG, layers=layer_rules(types, 6, causal), rope=rope)
    drafter = _drafter(config)
    read = load_checkpoint(save_zlab(tmp_path / "out", drafter, WIRING))
    assert read.layout == "zlab" and not read.shared
    assert read.drafter.config == config
    assert read.wiring == replace(WIRING, target=None, architectures=())  # this layout has no place for them
    for key, tensor in drafter.state_dict().items():
        assert torch.equal(tensor, read.drafter.state_dict()[key])


@pytest.mark.parametrize("name", ["reader's default", "bidirectional", "full", "sliding"])
@pytest.mark.parametrize("vocab", [None, VOCAB], ids=["full", "reduced"])
def test_speculators_round_trip(name: str, vocab: DraftVocab | None, tmp_path: Path) -> None:
    types, causal = CAUSAL[name]
    config = replace(CONFIG, layers=layer_rules(types, 6, causal), rope=YARN)
    drafter, head = _drafter(config, vocab).to(torch.bfloat16), torch.randn(50, 32)
    read = load_checkpoint(save_speculators(tmp_path / "out", drafter, WIRING, head=head))
    assert read.layout == "speculators" and read.wiring == WIRING
    assert read.drafter.config == config
    assert read.drafter.fc.weight.dtype == torch.bfloat16
    assert read.drafter.state_dict().keys() == drafter.state_dict().keys()
    for key, tensor in drafter.state_dict().items():
        assert torch.equal(tensor, read.drafter.state_dict()[key])
    if vocab is not None:
        assert torch.equal(read.shared["lm_head.weight"], head[::3])


def test_what_the_files_say(tmp_path: Path) -> None:
    config = json.loads((save_zlab(tmp_path / "z", _drafter(), WIRING) / "config.json").read_text())
    assert config["dflash_config"] == {"target_layer_ids": [1, 4, 6], "mask_token_id": 49, "block_size": 4}
    assert (config["block_size"], config["num_target_layers"]) == (4, 9)
    assert (config["layer_types"], config["sliding_window"]) == (["sliding_attention", "full_attention"], 6)
    assert config["use_sliding_window"] is True and "is_causal" not in config
    assert config["rope_parameters"]["rope_theta"] == config["rope_theta"] == 5e5
    assert config["rope_scaling"] is None

    config = json.loads((save_speculators(tmp_path / "s", _drafter(), WIRING) / "config.json").read_text())
    assert config["aux_hidden_state_layer_ids"] == [2, 5, 7]
    assert config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 3
    assert config["sliding_window_non_causal"] is False
    assert config["draft_vocab_size"] == 50


def test_layout_to_layout(tmp_path: Path) -> None:
    first = load_checkpoint(save_zlab(tmp_path / "a", _drafter(), WIRING))
    second = load_checkpoint(save_speculators(tmp_path / "b", first.drafter, first.wiring))
    third = load_checkpoint(save_zlab(tmp_path / "c", second.drafter, second.wiring))
    assert third.drafter.config == CONFIG and third.wiring == first.wiring
    assert (tmp_path / "a/config.json").read_text() == (tmp_path / "c/config.json").read_text()
    assert (tmp_path / "a/model.safetensors").read_bytes() == (tmp_path / "c/model.safetensors").read_bytes()


def test_wiring_of_a_loaded_target(models: dict[str, Path]) -> None:
    wiring = TargetLayers.of(load_target(TargetSpec(model=str(models["qwen3_5"]))), (0, 2))
    assert (wiring.layers, wiring.num_target_layers, wiring.vocab_size) == ((0, 2), 4, 64)
    assert wiring.architectures == ("Qwen3_5ForCausalLM",)


ZLAB_QUESTIONS: list[tuple[dict[str, Any], dict[str, Any], str, AmbiguityAnswers | None]] = [
    (
        {"block_size": 8},
        {},
        r"block_size: 4, block_size: 8; .*\n.*answer block_size",
        AmbiguityAnswers(block_size=4),
    ),
    (
        {"block_size": ...},
        {"block_size": ...},
        "none of dflash_config.block_size, block_size",
        AmbiguityAnswers(block_size=4),
    ),
    ({}, {"mask_token_id": ...}, "meaning of mask_token_id", AmbiguityAnswers(mask_token_id=49)),
    ({}, {"mask_token_id": 50}, "mask_token_id: 50, vocab_size: 50", AmbiguityAnswers(mask_token_id=49)),
    ({}, {"target_layer_ids": ...}, "meaning of layers", AmbiguityAnswers(layers=(1, 4, 6))),
    (
        {"aux_hidden_state_layer_ids": [1, 4, 6]},
        {},
        r"layer_ids - 1: \[0, 3, 5\]",
        AmbiguityAnswers(layers=(1, 4, 6)),
    ),
    ({}, {"target_layer_ids": [1, 4, 8]}, r"layers \[1, 4, 8\] of 9", AmbiguityAnswers(layers=(1, 4, 6))),
    ({"num_target_layers": ...}, {}, "meaning of num_target_layers", AmbiguityAnswers(num_target_layers=9)),
    ({"rope_theta": 1e4}, {}, "500000.0 in rope_parameters, 10000.0 flat", None),
    (
        {"rope_theta": ..., "rope_parameters": ...},
        {},
        "neither rope_parameters.rope_theta",
        AmbiguityAnswers(rope_theta=5e5),
    ),
    (
        {"use_sliding_window": False},
        {},
        "use_sliding_window not true",
        AmbiguityAnswers(use_sliding_window=True),
    ),
    (
        {"layer_types": ...},
        {},
        "no layer_types",
        AmbiguityAnswers(layer_types=("sliding_attention", "full_attention")),
    ),
    ({"layer_types": ["full_attention"]}, {}, "1 layer_types, num_hidden_layers 2", None),
    ({"sliding_window_non_causal": True}, {}, "is_causal: None, sliding_window_non_causal: True", None),
    (
        {},
        {"output_multiplier": 0.5},
        "output_multiplier: 0.5",
        AmbiguityAnswers(ignore=("output_multiplier",)),
    ),
    ({}, {"selector_rank": 4}, "keys selector_rank", AmbiguityAnswers(ignore=("selector_rank",))),
    ({"model_type": "llama"}, {}, "model_type: 'llama'", AmbiguityAnswers(ignore=("model_type",))),
]


@pytest.mark.parametrize(("changes", "inner", "question", "answers"), ZLAB_QUESTIONS)
def test_an_ambiguous_zlab_checkpoint_asks(
    changes: dict[str, Any],
    inner: dict[str, Any],
    question: str,
    answers: AmbiguityAnswers | None,
    tmp_path: Path,
) -> None:
    folder = _zlab(tmp_path / "out", changes, inner)
    with pytest.raises(ParityError, match=question):
        load_checkpoint(folder)
    if answers is not None:
        read = load_checkpoint(folder, answers)
        assert read.drafter.config == CONFIG and read.wiring.layers == WIRING.layers


SPECULATORS_QUESTIONS: list[tuple[dict[str, Any], dict[str, Any], str, AmbiguityAnswers | None]] = [
    (
        {"aux_hidden_state_layer_ids": [0, 5, 7]},
        {},
        "0 is the embedding's output",
        AmbiguityAnswers(layers=(1, 4, 6)),
    ),
    (
        {"aux_hidden_state_layer_ids": [2, 5, 9]},
        {},
        "9 is the last layer",
        AmbiguityAnswers(layers=(1, 4, 6)),
    ),
    ({"aux_hidden_state_layer_ids": None}, {}, "meaning of layers", AmbiguityAnswers(layers=(1, 4, 6))),
    (
        {"num_target_layers": ...},
        {},
        "the verifier's num_hidden_layers",
        AmbiguityAnswers(num_target_layers=9),
    ),
    ({"block_size": 5}, {}, r"block_size: 5, speculative_tokens \+ 1: 4", AmbiguityAnswers(block_size=4)),
    ({"mask_token_id": None}, {}, "meaning of mask_token_id", AmbiguityAnswers(mask_token_id=49)),
    ({"sample_from_anchor": True}, {}, "sample_from_anchor: True", None),
    ({"target_hidden_size": 64}, {}, "target_hidden_size: 64, hidden_size: 32", None),
    ({"speculators_model_type": "eagle3"}, {}, "speculators_model_type 'eagle3'", None),
    ({"draft_vocab_size": 17}, {}, "draft_vocab_size 17 of 50 and no t2d, d2t", None),
    ({}, {"attention_bias": True}, "attention_bias: True", None),
    ({}, {"hidden_size": 64}, r"fc.weight \[32, 96\] for \[64, 192\]", None),
]


@pytest.mark.parametrize(("changes", "inner", "question", "answers"), SPECULATORS_QUESTIONS)
def test_an_ambiguous_speculators_checkpoint_asks(
    changes: dict[str, Any],
    inner: dict[str, Any],
    question: str,
    answers: AmbiguityAnswers | None,
    tmp_path: Path,
) -> None:
    folder = _speculators(tmp_path / "out", changes, inner)
    with pytest.raises(ParityError, match=question):
        load_checkpoint(folder)
    if answers is not None:
        read = load_checkpoint(folder, answers)
        assert read.drafter.config == CONFIG and read.wiring == WIRING


def test_layers_of_the_target_come_from_a_verifier_on_this_machine(
    models: dict[str, Path], tmp_path: Path
) -> None:
    wiring = replace(WIRING, layers=(0, 1, 2), num_target_layers=4, target=str(models["qwen3_5"]))
    save_speculators(tmp_path / "out", _drafter(), wiring)
    _change(tmp_path / "out", {"num_target_layers": ...}, None, "transformer_layer_config")
    assert load_checkpoint(tmp_path / "out").wiring == wiring


def test_partial_rotary_is_a_question_both_ways(tmp_path: Path) -> None:
    config = replace(CONFIG, rope=RopeConfig(partial_rotary_factor=0.5))
    for save in (save_zlab, save_speculators):
        with pytest.raises(ParityError, match="vLLM turns that share"):
            save(tmp_path / "no", _drafter(config), WIRING)
        folder = save(tmp_path / save.__name__, _drafter(config), WIRING, partial_rotary=True)
        with pytest.raises(ParityError, match="partial_rotary_factor: 0.5, which vLLM applies"):
            load_checkpoint(folder)
        assert load_checkpoint(folder, AmbiguityAnswers(partial_rotary=True)).drafter.config == config
        assert (
            load_checkpoint(folder, AmbiguityAnswers(partial_rotary=False)).drafter.config.rope
            == RopeConfig()
        )


def test_a_dropped_window_can_be_answered(tmp_path: Path) -> None:
    folder = _zlab(tmp_path / "out", {"use_sliding_window": ...})
    read = load_checkpoint(folder, AmbiguityAnswers(use_sliding_window=False))
    assert [(rule.window, rule.causal) for rule in read.drafter.config.layers] == [
        (None, True),
        (None, False),
    ]


def test_what_a_layout_cannot_say_is_refused(tmp_path: Path) -> None:
    full, sliding = layer_rules(["full_attention", "sliding_attention"], 6)
    mixed = _drafter(replace(CONFIG, layers=(replace(full, causal=True), replace(sliding, causal=False))))
    for save in (save_zlab, save_speculators):
        with pytest.raises(ParityError, match="causal"):
            save(tmp_path / "out", mixed, WIRING)
    two = _drafter(replace(CONFIG, layers=(sliding, replace(sliding, window=9))))
    with pytest.raises(ParityError, match=r"windows \[6, 9\]"):
        save_zlab(tmp_path / "out", two, WIRING)
    with pytest.raises(ParityError, match="2 layers for a drafter that takes 3"):
        save_zlab(tmp_path / "out", _drafter(), replace(WIRING, layers=(1, 4)))
    with pytest.raises(ParityError, match="reduced draft vocabulary, for which it has no place"):
        save_zlab(tmp_path / "out", _drafter(vocab=VOCAB), WIRING)
    with pytest.raises(ParityError, match="give the target's head"):
        save_speculators(tmp_path / "out", _drafter(vocab=VOCAB), WIRING)
    for layer in (8, -1):
        with pytest.raises(ParityError, match="0-based decoder layers from 0 to 7"):
            replace(WIRING, layers=(1, layer))
    assert not list(tmp_path.iterdir())
    read = load_checkpoint(save_zlab(tmp_path / "out", _drafter(vocab=VOCAB), WIRING, full_vocabulary=True))
    assert read.drafter.draft_vocab is None


def test_ids_where_offsets_belong_are_named(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = save_speculators(tmp_path / "out", _drafter(vocab=VOCAB), WIRING, head=torch.randn(50, 32))
    tensors = load_file(folder / "model.safetensors")
    tensors["d2t"] += torch.arange(len(tensors["d2t"]))
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ParityError, match=r"target ids where offsets belong\n.*subtract torch.arange"):
        load_checkpoint(folder)


def test_damaged_or_unsafe_weights_are_refused(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = save_zlab(tmp_path / "out", _drafter(), WIRING)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    save_file(
        {name: x for name, x in tensors.items() if name != "norm.weight"} | {"g_proj": torch.ones(1)}, path
    )
    with pytest.raises(ParityError, match="no norm.weight; g_proj, which no DFlash drafter has"):
        load_checkpoint(folder)
    save_file(tensors | {"norm.weight": torch.full((32,), torch.nan)}, path)
    with pytest.raises(ParityError, match="norm.weight with values that are not finite"):
        load_checkpoint(folder)
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(ParityError, match="the file is damaged"):
        load_checkpoint(folder)
    path.rename(folder / "pytorch_model.bin")
    with pytest.raises(ParityError, match=r"but pytorch_model.bin\n.*pickles are never loaded"):
        load_checkpoint(folder)
    with pytest.raises(ParityError, match="config.json in"):
        load_checkpoint(tmp_path / "nowhere")


def test_a_checkpoint_appears_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save_zlab(tmp_path / "out", _drafter(), WIRING)
    before = (folder / "model.safetensors").read_bytes()
    with pytest.raises(ParityError, match="something is there"):
        save_zlab(folder, _drafter(), WIRING)

    def broken(*_: Any, **__: Any) -> None:
        raise OSError("no space left")

    with monkeypatch.context() as patch:
        patch.setattr("parity.model.training.exchange.flush_to_disk", broken)
        with pytest.raises(OSError, match="no space"):
            save_zlab(folder, _drafter(), WIRING, overwrite=True)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert (folder / "model.safetensors").read_bytes() == before
    other = _drafter()
    other.reset(torch.Generator().manual_seed(1))
    save_zlab(folder, other, WIRING, overwrite=True)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert torch.equal(load_checkpoint(folder).drafter.fc.weight, other.fc.weight)
