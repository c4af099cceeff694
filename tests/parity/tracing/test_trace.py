"""Traces on disk: written atomically, resumed at the request, read lazily, and refused when damaged."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from parity.errors import ParityError
from parity.tracing.trace import (
    BackendProof,
    CallProof,
    Manifest,
    RequestEntry,
    TapInfo,
    TargetIdentity,
    Trace,
    TraceWriter,
    layer_of,
    tap_depth,
)
from tests.parity.conftest import WriteTrace

REQUESTED = {"delta": "torch", "conv": "torch"}


def entry(name: str, tokens: int = 3) -> RequestEntry:
    return RequestEntry(
        id=name,
        token_ids=tuple(range(tokens)),
        origin="given",
        prompt_tokens=tokens,
        token_texts=tuple(f"t{i}" for i in range(tokens)),
    )


def manifest(*entries: RequestEntry, **changes: Any) -> Manifest:
    values: dict[str, Any] = {
        "schema": "parity-trace/1",
        "created": "2026-11-29T00:00:00+00:00",
        "loader": "AutoModelForCausalLM",
        "target": TargetIdentity(
            name="m",
            revision=None,
            config_sha256="0",
            model_type="x",
            layers=1,
            layer_types=("full_attention",),
            weights={},
        ),
        "dtype": "float32",
        "mode": "prefill",
        "fingerprint": "f",
        "environment": {},
        "requests": entries,
        "backend": BackendProof(requested=REQUESTED, calls=(), valid=True),
        "taps": (
            TapInfo(
                name="layer.0.out", dtype="float32", width=4, layer=0, norm="none", hf_index=1, meaning="m"
            ),
        ),
    }
    return Manifest(**(values | changes))


def write(out: Path, *names: str) -> Trace:
    with TraceWriter(out, "f") as writer:
        for index, name in enumerate(names):
            writer.add(entry(name), {"layer.0.out": torch.full((3, 4), float(index))}, position=index)
        return writer.finish(manifest(*(entry(name) for name in names)))


def test_round_trip(tmp_path: Path) -> None:
    trace = write(tmp_path / "t", "a", "b")
    assert [request.id for request in trace.requests] == ["a", "b"] and trace.taps == ("layer.0.out",)
    assert torch.equal(trace.tensor("b", "layer.0.out"), torch.ones(3, 4))
    assert not (tmp_path / "t.partial").exists() and sorted(p.name for p in (tmp_path / "t").iterdir()) == [
        "manifest.json",
        "request-000000.safetensors",
        "request-000001.safetensors",
    ]


def test_interrupted_capture_is_resumed_at_the_request(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), TraceWriter(tmp_path / "t", "f") as writer:
        writer.add(entry("a"), {"layer.0.out": torch.zeros(3, 4)}, position=0)
        raise KeyboardInterrupt
    assert not (tmp_path / "t").exists()
    with pytest.raises(ParityError, match="unfinished capture beside it"):
        Trace.open(tmp_path / "t")
    with TraceWriter(tmp_path / "t", "f") as writer:
        assert set(writer.entries) == {"a"}
        writer.add(entry("b"), {"layer.0.out": torch.ones(3, 4)}, position=1)
        trace = writer.finish(manifest(entry("a"), entry("b")))
    assert [request.id for request in trace.requests] == ["a", "b"]


def test_half_written_shard_is_done_again(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), TraceWriter(tmp_path / "t", "f") as writer:
        writer.add(entry("a"), {"layer.0.out": torch.zeros(3, 4)}, position=0)
        raise RuntimeError
    shard = next((tmp_path / "t.partial").glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-7])
    assert TraceWriter(tmp_path / "t", "f").entries == {}


def test_failure_before_the_first_request_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), TraceWriter(tmp_path / "t", "f"):
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []


def test_other_settings_do_not_resume(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), TraceWriter(tmp_path / "t", "f") as writer:
        writer.add(entry("a"), {"layer.0.out": torch.zeros(3, 4)})
        raise RuntimeError
    with pytest.raises(ParityError, match="unfinished capture of other settings"):
        TraceWriter(tmp_path / "t", "g")


def test_existing_output_is_not_overwritten(tmp_path: Path) -> None:
    write(tmp_path / "t", "a")
    with pytest.raises(ParityError, match="something of that name there already"):
        TraceWriter(tmp_path / "t", "f")


def test_missing_request_is_no_trace(tmp_path: Path) -> None:
    writer = TraceWriter(tmp_path / "t", "f")
    writer.add(entry("a"), {"layer.0.out": torch.zeros(3, 4)})
    with pytest.raises(ParityError, match="1 requests without tensors, first 'b'"):
        writer.finish(manifest(entry("a"), entry("b")))


def test_taps_that_share_memory_are_both_written(tmp_path: Path) -> None:
    """`final.prenorm` is the last layer's output: one tensor, two taps."""
    tensor = torch.arange(12.0).reshape(3, 4)
    taps = tuple(
        TapInfo(name=name, dtype="float32", width=4, layer=None, norm="none", hf_index=None, meaning="m")
        for name in ("x", "y")
    )
    with TraceWriter(tmp_path / "t", "f") as writer:
        writer.add(entry("a"), {"x": tensor, "y": tensor})
        trace = writer.finish(manifest(entry("a"), taps=taps))
    assert torch.equal(trace.tensor("a", "x"), trace.tensor("a", "y"))


def test_proofs_of_requests_are_merged(tmp_path: Path) -> None:
    call = CallProof(layer=0, operator="delta", implementation="torch", callee="m.f", calls=2)
    good = BackendProof(requested=REQUESTED, calls=(call,), valid=True)
    bad = BackendProof(requested=REQUESTED, calls=(call,), valid=False, problems=("layer 0 delta: fla ran",))
    with TraceWriter(tmp_path / "t", "f") as writer:
        writer.add(entry("a"), {"layer.0.out": torch.zeros(3, 4)}, proof=good, position=0)
        writer.add(entry("b"), {"layer.0.out": torch.zeros(3, 4)}, proof=bad, position=1)
        proof = writer.finish(manifest(entry("a"), entry("b"))).manifest.backend
    assert (
        [c.calls for c in proof.calls] == [4]
        and not proof.valid
        and proof.problems == ("layer 0 delta: fla ran",)
    )


def test_reading_is_lazy(tmp_path: Path) -> None:
    """Opening reads no tensor, and a tensor is a map of the file rather than a copy."""
    trace = write(tmp_path / "t", "a")
    trace.tensor("a", "layer.0.out")
    assert any("request-000000" in line for line in Path("/proc/self/maps").read_text().splitlines())


def _edit(folder: Path, **changes: Any) -> None:
    data = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(data | changes))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda t: (t / "manifest.json").unlink(), "a folder without manifest.json"),
        (lambda t: (t / "manifest.json").write_text("{"), "no readable JSON"),
        (lambda t: (t / "manifest.json").write_bytes(b"\xff\xfe"), "no readable JSON"),
        (lambda t: (t / "manifest.json").write_text("[]"), "schema None"),
        (lambda t: _edit(t, schema="parity-trace/9"), "schema 'parity-trace/9'"),
        (lambda t: _edit(t, surprise=1), "surprise"),
        (lambda t: _edit(t, taps="no"), "taps"),
        (lambda t: (t / "request-000000.safetensors").unlink(), "no shard 'request-000000.safetensors'"),
    ],
    ids=[
        "no manifest",
        "half a manifest",
        "not text",
        "another JSON",
        "newer schema",
        "unknown key",
        "wrong type",
        "no shard",
    ],
)
def test_damage_is_named(damage: Any, message: str, tmp_path: Path) -> None:
    write(tmp_path / "t", "a")
    damage(tmp_path / "t")
    with pytest.raises(ParityError, match=message):
        Trace.open(tmp_path / "t")


def test_no_such_folder(tmp_path: Path) -> None:
    with pytest.raises(ParityError, match="no such folder"):
        Trace.open(tmp_path / "nothing")


def test_shard_outside_the_folder_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "t", "a")
    data = json.loads((tmp_path / "t/manifest.json").read_text())
    data["requests"][0]["shard"] = "../secret.safetensors"
    (tmp_path / "secret.safetensors").write_bytes((tmp_path / "t/request-000000.safetensors").read_bytes())
    (tmp_path / "t/manifest.json").write_text(json.dumps(data))
    with pytest.raises(ParityError, match="no shard"):
        Trace.open(tmp_path / "t")


def test_truncated_shard_is_named(tmp_path: Path) -> None:
    write(tmp_path / "t", "a")
    shard = tmp_path / "t/request-000000.safetensors"
    shard.write_bytes(shard.read_bytes()[:-5])
    with pytest.raises(ParityError, match="a damaged shard"):
        Trace.open(tmp_path / "t").tensor("a", "layer.0.out")


def test_shard_that_disagrees_with_the_manifest(tmp_path: Path) -> None:
    write(tmp_path / "t", "a")
    data = json.loads((tmp_path / "t/manifest.json").read_text())
    data["taps"][0]["width"] = 5
    (tmp_path / "t/manifest.json").write_text(json.dumps(data))
    with pytest.raises(ParityError, match="shard and manifest disagree"):
        Trace.open(tmp_path / "t").tensor("a", "layer.0.out")


def _two(folder: Path, fingerprint: str = "f") -> Path:
    """Two requests of equal length, so that their shards have equal tensors' names, shapes and sizes."""
    with TraceWriter(folder, fingerprint) as writer:
        for position, name in enumerate("ab"):
            tensor = torch.full((3, 4), float(position))
            writer.add(entry(name), {"layer.0.out": tensor}, position=position)
        writer.finish(manifest(entry("a"), entry("b")))
    return folder


def _swap(first: Path, second: Path) -> None:
    one, two = first.read_bytes(), second.read_bytes()
    assert len(one) == len(two), "otherwise the size alone gives it away"
    first.write_bytes(two)
    second.write_bytes(one)


def _rewrite(shard: Path, **said: str) -> None:
    """The same tensors with another header."""
    with safe_open(shard, framework="pt") as held:
        metadata = held.metadata() | said
        tensors = {name: held.get_tensor(name) for name in held.keys()}  # noqa: SIM118
    save_file(tensors, shard, metadata={key: value for key, value in metadata.items() if value})


def test_exchanged_shards_are_found(tmp_path: Path) -> None:
    folder = _two(tmp_path / "t")
    _swap(folder / "request-000000.safetensors", folder / "request-000001.safetensors")
    with pytest.raises(ParityError, match="of request 'a' .*; found: the states of request 'b'"):
        Trace.open(folder).tensor("a", "layer.0.out")


def test_shards_exchanged_between_captures_are_found(tmp_path: Path) -> None:
    """The same prompts on another backend: every name, id and shape is the same."""
    one, two = _two(tmp_path / "one", "torch"), _two(tmp_path / "two", "fla--")
    _swap(one / "request-000000.safetensors", two / "request-000000.safetensors")
    trace = Trace.open(one)
    with pytest.raises(ParityError, match="a shard of another capture"):
        trace.tensor("a", "layer.0.out")
    assert trace.tensor("b", "layer.0.out")[0, 0] == 1


@pytest.mark.parametrize(
    ("said", "found"),
    [
        ({"request": ""}, "a shard that does not say which request it holds"),
        ({"request": '{"id": "a"}'}, "a shard that does not say which request it holds"),
        ({"request": "tokens"}, "other token ids than the manifest's"),
    ],
    ids=["nothing", "damaged", "other tokens"],
)
def test_shard_says_what_it_holds(said: dict[str, str], found: str, tmp_path: Path) -> None:
    folder = write(tmp_path / "t", "a").path
    if said["request"] == "tokens":
        held = Trace.open(folder).request("a")
        said = {"request": held.model_copy(update={"token_ids": (7, 8, 9)}).model_dump_json()}
    _rewrite(folder / "request-000000.safetensors", **said)
    with pytest.raises(ParityError, match=found):
        Trace.open(folder).tensor("a", "layer.0.out")


def test_older_shards_without_a_fingerprint_are_read(tmp_path: Path) -> None:
    folder = write(tmp_path / "t", "a").path
    _rewrite(folder / "request-000000.safetensors", fingerprint="")
    assert Trace.open(folder).tensor("a", "layer.0.out").shape == (3, 4)


def test_shard_is_checked_without_reading_tensors(tmp_path: Path) -> None:
    """The check reads the header once a request; the map stays untouched until a tensor is."""
    trace = write(tmp_path / "t", "a")
    seen: list[str] = []

    class Header:
        """A shard whose tensors nobody may ask for."""

        def metadata(self) -> dict[str, str]:
            seen.append("metadata")
            return {"request": trace.request("a").model_dump_json()}

    trace._shard = lambda shard: Header()  # type: ignore[assignment]
    for _ in range(3):
        trace.shard_of(trace.request("a"))
    assert seen == ["metadata"]


DEPTHS = {
    # tap: stages that rounded before it, of a target with four layers
    "embed.out": 0,
    "embed.norm": 0,
    "layer.0.in": 1,
    "layer.0.out": 1,
    "layer.2.gdn.out": 3,
    "layer.3.out": 4,
    "final.prenorm": 5,
    "final.postnorm": 5,
    "logits": 5,
}


@pytest.mark.parametrize("name", DEPTHS)
def test_depth_of_a_tap(name: str, write_trace: WriteTrace) -> None:
    """Decided once, for every floor: behind the last layer is one stage more than the last layer."""
    assert tap_depth(name, 4) == DEPTHS[name]
    requests = {"r0": {name: torch.ones(2, 4)}}
    assert write_trace("whole", requests).depth(name) == DEPTHS[name]
    assert write_trace("local", requests, mode="prefill+local").depth(name) == 1, "fed another trace's input"


def test_depth_by_the_layer_that_a_manifest_states(write_trace: WriteTrace) -> None:
    """Another tool's tap may not say its layer in its name."""
    assert tap_depth("hidden_states", 4, layer=2) == 3 and tap_depth("hidden_states", 4) == 5
    with pytest.raises(ParityError, match="tap 'layer.9.out'"):
        write_trace("a", {"r0": {"layer.0.out": torch.ones(2, 4)}}).depth("layer.9.out")


def test_layer_of_a_tap() -> None:
    assert [layer_of(tap) for tap in ("layer.16.out", "layer.3.gdn.out", "embed.out", "logits")] == [
        16,
        3,
        None,
        None,
    ]
