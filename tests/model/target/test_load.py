"""Loading, structure and taps of targets: what is found, what is kept, what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from parity.errors import ParityError
from parity.model.target.backends import parse_backend
from parity.model.target.capture import capture
from parity.model.target.forward import forward, forward_steps
from parity.model.target.load import canonical, load_target
from parity.model.target.spec import CaptureEvent, TargetSpec
from parity.model.target.taps import select_taps, tap_infos
from parity.model.target.vision_language import build_vision_wrapper

IDS = [(5 * i) % 61 for i in range(70)]
TORCH = parse_backend("torch")


@pytest.mark.parametrize(
    ("key", "want"),
    [
        ("model.layers.0.mlp.up_proj.weight", "layers.0.mlp.up_proj.weight"),
        ("model.language_model.layers.0.x", "layers.0.x"),
        ("language_model.language_model.language_model.norm.weight", "norm.weight"),
        ("lm_head.weight", "lm_head.weight"),
        ("layers.1.model.x", "layers.1.model.x"),
    ],
)
def test_canonical_names(key: str, want: str) -> None:
    assert canonical(key) == want


def test_taps_are_spelled_out(hybrid: Path) -> None:
    target = load_target(TargetSpec(model=str(hybrid), dtype="float32"))
    infos = tap_infos(target)
    assert list(infos)[:5] == [
        "embed.out",
        "layer.0.conv.out",
        "layer.0.gdn.out",
        "layer.0.out",
        "layer.1.conv.out",
    ]
    assert list(infos)[-4:] == ["layer.3.out", "final.prenorm", "final.postnorm", "logits"]
    assert infos["final.prenorm"][2] == "pre" and infos["final.postnorm"][2] == "post"
    assert (
        infos["layer.1.out"][3] == 2 and infos["layer.3.out"][3] is None and infos["final.postnorm"][3] == 4
    )
    assert select_taps(target, ["layer.*.gdn.out", "logits"]) == [
        "layer.0.gdn.out",
        "layer.1.gdn.out",
        "layer.2.gdn.out",
        "logits",
    ]
    with pytest.raises(ParityError, match="layers 0 to 3"):
        select_taps(target, ["layer.7.out"])


def test_recorded_states_survive_later_changes(hybrid: Path) -> None:
    """A state is cloned when it is made: an in-place operation of the next layer does not reach it."""
    target = load_target(TargetSpec(model=str(hybrid), dtype="float32"))
    want = forward(target, IDS, backend=TORCH).taps["layer.0.out"]

    def spoil(module: Any, args: tuple[torch.Tensor, ...]) -> None:
        args[0].mul_(0)

    handle = target.layers[1].register_forward_pre_hook(spoil)
    got = forward(target, IDS, backend=TORCH).taps["layer.0.out"]
    handle.remove()
    assert torch.equal(got, want)


@pytest.mark.parametrize(
    ("mode", "want"), [("prefill", [7]), ("decode", [1] * 7), ("blocks:3", [3, 3, 1]), ("blocks:9", [7])]
)
def test_steps(mode: str, want: list[int]) -> None:
    assert forward_steps(mode, 7) == want


@pytest.mark.parametrize("mode", ["", "blocks", "blocks:0", "blocks:x", "stream"])
def test_unknown_mode(mode: str) -> None:
    with pytest.raises(ParityError, match="no such way to compute"):
        forward_steps(mode, 7)


@pytest.mark.parametrize("family", ["qwen3_5", "olmo_hybrid", "llama", "gemma2"])
def test_serving_modes_compute_the_same_tokens(family: str, models: dict[str, Path]) -> None:
    target = load_target(TargetSpec(model=str(models[family]), dtype="float32"))
    whole = forward(target, IDS, backend=TORCH, taps=["*"])
    for mode in ("decode", "blocks:8"):
        parts = forward(target, IDS, backend=TORCH, taps=["*"], mode=mode)
        assert parts.proof.valid and parts.taps.keys() == whole.taps.keys()
        for name, tensor in parts.taps.items():
            assert tensor.shape == whole.taps[name].shape, (mode, name)
            assert float((tensor - whole.taps[name]).norm() / whole.taps[name].norm()) < 1e-5, (mode, name)


def test_local_input_is_what_each_layer_gets(hybrid: Path) -> None:
    """Fed its own states, every layer repeats itself; fed a changed one, only that layer answers for it."""
    target = load_target(TargetSpec(model=str(hybrid), dtype="float32"))
    whole = forward(target, IDS, backend=TORCH).taps
    again = forward(target, IDS, backend=TORCH, local=whole).taps
    assert all(torch.equal(again[name], whole[name]) for name in whole)
    changed = whole | {"layer.0.out": whole["layer.0.out"] * 1.01}
    got = forward(target, IDS, backend=TORCH, local=changed).taps
    moved = [name for name in whole if not torch.equal(got[name], whole[name])]
    assert moved == ["layer.1.conv.out", "layer.1.gdn.out", "layer.1.out"]


@pytest.mark.parametrize("mode", ["decode", "blocks:4"])
def test_convolution_alone_can_be_recorded_in_steps(mode: str, hybrid: Path) -> None:
    """With a cache the convolution returns earlier tokens too; which are new is known without another tap."""
    target = load_target(TargetSpec(model=str(hybrid), dtype="float32"))
    taps = forward(target, IDS[:14], backend=TORCH, taps=["layer.*.conv.out"], mode=mode).taps
    assert {tensor.shape[0] for tensor in taps.values()} == {14}


def test_local_input_of_a_step_is_refused(hybrid: Path) -> None:
    target = load_target(TargetSpec(model=str(hybrid), dtype="float32"))
    with pytest.raises(ParityError, match="use --as prefill"):
        forward(target, IDS, backend=TORCH, mode="decode", local={})


def test_batch_rows_do_not_mix(hybrid: Path) -> None:
    target = load_target(TargetSpec(model=str(hybrid), dtype="float32"))
    one, four = (forward(target, IDS, backend=TORCH, rows=rows).taps["layer.3.out"] for rows in (1, 4))
    assert float((one - four).norm() / one.norm()) < 1e-6


def test_float32_parameters_of_a_bf16_checkpoint_stay(hybrid_bf16: Path) -> None:
    stored = load_file(hybrid_bf16 / "model.safetensors")
    for dtype in ("bfloat16", "auto"):
        target = load_target(TargetSpec(model=str(hybrid_bf16), dtype=dtype))
        a_log = target.linear[0].get_parameter("A_log")
        assert target.dtype == "bfloat16" and len(target.kept_float32) == 6
        key = next(name for name in stored if name.endswith("layers.0.linear_attn.A_log"))
        assert torch.equal(a_log, stored[key]) and a_log.dtype == torch.float32
        assert not torch.equal(a_log, a_log.bfloat16().float())


def test_rounding_is_asked_for_and_seen_in_the_identity(hybrid_bf16: Path) -> None:
    kept, rounded = (
        load_target(TargetSpec(model=str(hybrid_bf16), dtype="float32", round_float32=value))
        for value in (False, True)
    )
    a_log, low = (target.linear[0].get_parameter("A_log") for target in (kept, rounded))
    assert torch.equal(low, a_log.bfloat16().float())
    differing = {
        key for key, value in kept.identity.weights.items() if rounded.identity.weights[key] != value
    }
    assert differing == set(kept.kept_float32)


def test_checksums_do_not_depend_on_the_dtype_loaded(hybrid_bf16: Path) -> None:
    identities = [
        load_target(TargetSpec(model=str(hybrid_bf16), dtype=dtype)).identity
        for dtype in ("bfloat16", "float32", "float64")
    ]
    assert identities[0] == identities[1] == identities[2]


def _copy(model: Path, out: Path, change: Any) -> Path:
    out.mkdir()
    for file in model.iterdir():
        if file.name != "model.safetensors":
            (out / file.name).write_bytes(file.read_bytes())
    tensors = load_file(model / "model.safetensors")
    change(tensors)
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    return out


def test_missing_parameter_is_named(hybrid: Path, tmp_path: Path) -> None:
    broken = _copy(hybrid, tmp_path / "m", lambda t: t.pop("model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(ParityError, match=r"left random: model\.layers\.1\.mlp\.up_proj\.weight"):
        load_target(TargetSpec(model=str(broken), dtype="float32"))


def test_silently_random_parameter_is_named(hybrid: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading information says all is well, the parameter holds noise (transformers 5.4.0): the values tell."""
    from parity.model.target import load as module

    original = module._from_pretrained

    def noisy(spec: TargetSpec) -> Any:
        model, info = original(spec)
        model.model.layers[0].mlp.up_proj.weight.data.normal_()
        return model, info

    monkeypatch.setattr(module, "_from_pretrained", noisy)
    with pytest.raises(
        ParityError, match=r"differ from the checkpoint's: model\.layers\.0\.mlp\.up_proj\.weight"
    ):
        load_target(TargetSpec(model=str(hybrid), dtype="float32"))


def test_wrapper_gives_the_same_states(hybrid: Path, tmp_path: Path) -> None:
    build_vision_wrapper(hybrid, tmp_path / "w")
    want = forward(load_target(TargetSpec(model=str(hybrid), dtype="float32")), IDS, backend=TORCH).taps
    for loader, model in (
        ("AutoModel", hybrid),
        ("AutoModel", tmp_path / "w"),
        ("AutoModelForCausalLM", tmp_path / "w"),
        ("AutoModelForImageTextToText", tmp_path / "w"),
    ):
        target = load_target(TargetSpec(model=str(model), dtype="float32", loader=loader))
        assert (target.head is None) == (loader == "AutoModel")
        got = forward(target, IDS, backend=TORCH).taps
        assert all(torch.equal(got[name], want[name]) for name in want), (loader, model)


def test_wrapper_of_another_family_is_refused(models: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(ParityError, match="model type llama"):
        build_vision_wrapper(models["llama"], tmp_path / "w")


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"model": "/no/such/folder"}, "no such folder"),
        ({"model": "./nothing"}, "no such folder"),
        ({"model": "x", "loader": "AutoModelForMagic"}, "no such loader"),
        ({"model": "x", "dtype": "float8"}, "no such dtype"),
    ],
)
def test_bad_specifications(spec: dict[str, Any], message: str) -> None:
    with pytest.raises(ParityError, match=message):
        load_target(TargetSpec(**spec))


def test_folder_without_a_model(tmp_path: Path) -> None:
    with pytest.raises(ParityError, match="config.json"):
        load_target(TargetSpec(model=str(tmp_path)))


def test_manifest_of_a_capture(hybrid: Path, tmp_path: Path) -> None:
    target = load_target(TargetSpec(model=str(hybrid), dtype="float32"))
    request = {
        "id": "r",
        "token_ids": IDS,
        "origin": "given",
        "prompt_tokens": 3,
        "token_texts": [str(i) for i in IDS],
    }
    capture(target, [request], tmp_path / "t", backend=TORCH, fingerprint="f")
    data = json.loads((tmp_path / "t/manifest.json").read_text())
    assert (
        data["schema"] == "parity-trace/1"
        and data["dtype"] == "float32"
        and data["loader"] == "AutoModelForCausalLM"
    )
    assert data["target"]["layer_types"] == ["linear_attention"] * 3 + ["full_attention"]
    assert {"torch", "transformers", "flash-linear-attention", "triton", "cpu", "cuda"} <= set(
        data["environment"]
    )
    assert data["backend"]["valid"] and len(data["backend"]["calls"]) == 6
    assert "hidden_states[i + 1]" in data["layer_ids"]
    assert data["requests"][0]["prompt_tokens"] == 3 and data["requests"][0]["origin"] == "given"


def test_resuming_with_other_weights_is_refused(hybrid: Path, tmp_path: Path) -> None:
    """The path is the same, the weights are not: a trace never mixes two models."""
    model = _copy(hybrid, tmp_path / "m", lambda tensors: None)
    requests = [
        {
            "id": f"r{i}",
            "token_ids": IDS[i : i + 9],
            "origin": "given",
            "prompt_tokens": 9,
            "token_texts": ["x"] * 9,
        }
        for i in range(3)
    ]

    def interrupt(event: CaptureEvent) -> None:
        if event["done"] == 2:
            raise KeyboardInterrupt

    def go(progress: Any) -> None:
        target = load_target(TargetSpec(model=str(model), dtype="float32"))
        capture(target, requests, tmp_path / "t", backend=TORCH, fingerprint="f", progress=progress)

    with pytest.raises(KeyboardInterrupt):
        go(interrupt)
    tensors = load_file(model / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][0, 0] += 1
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ParityError, match="unfinished capture of other settings"):
        go(lambda event: None)
    assert not (tmp_path / "t").exists()
