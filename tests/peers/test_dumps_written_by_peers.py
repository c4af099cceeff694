"""Dumps that speculators' connector and SpecForge's feature store wrote, of states that transformers computed.

Three parties: transformers gives the states (its own `output_hidden_states`), the peer writes them and reads them
back with its own reader, and our reader has to see the same numbers and find the layers in a capture of ours.
"""

import gzip
import json
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from parity.capturing.client import capture_to
from parity.comparison.traces import compare_traces
from parity.dumps.mapping import Mapping
from parity.dumps.pair import open_pair

Import = Callable[[str], Any]
INDICES = (1, 2, 3)
"""Entries of transformers' `hidden_states`, as speculators and vLLM count: the outputs of layers 0, 1 and 2."""
TAPS = ("layer.0.out", "layer.1.out", "layer.2.out")
IDS = {"q0": list(range(3, 43)), "q1": [5, 9, 60, 2, 2, 31, 17, 8, 44, 21, 13, 50]}


@dataclass(frozen=True)
class Sample:
    """What transformers computed for one request."""

    ids: Tensor
    states: tuple[Tensor, ...]
    """[T, H] each: `output_hidden_states`, the last of them after the final norm."""
    prenorm: Tensor
    """[T, H] what entered the final norm."""

    @property
    def stacked(self) -> Tensor:
        """[T, L + 1, H] as vLLM stacks it: the layers asked for, then the state before the final norm."""
        return torch.stack([*(self.states[index] for index in INDICES), self.prenorm], dim=1)

    @property
    def joined(self) -> Tensor:
        """[1, T, L * H] as SGLang's capture hands it to SpecForge."""
        return torch.cat([self.states[index] for index in INDICES], dim=1)[None]


@pytest.fixture(scope="module")
def samples(hybrid_bf16: Path) -> dict[str, Sample]:
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(hybrid_bf16, dtype=torch.bfloat16).eval()
    for name, parameter in model.named_parameters():  # as checkpoints and engines keep them
        if name.endswith(("A_log", "dt_bias")):
            parameter.data = parameter.data.float()
    from safetensors.torch import load_file

    stored = load_file(hybrid_bf16 / "model.safetensors")
    for name, parameter in model.named_parameters():
        if name.endswith(("A_log", "dt_bias")):
            parameter.data = stored[name].clone()
    before: dict[str, Tensor] = {}
    norm = model.model.norm
    norm.register_forward_pre_hook(lambda _, args: before.update(state=args[0][0]))
    found = {}
    for request, ids in IDS.items():
        with torch.no_grad():
            out = model(torch.tensor([ids]), output_hidden_states=True)
        states = tuple(state[0].clone() for state in out.hidden_states)
        found[request] = Sample(torch.tensor(ids), states, before["state"].clone())
    return found


@pytest.fixture(scope="module")
def reference(hybrid_bf16: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Our capture of the same model and tokens, made by a worker."""
    folder = tmp_path_factory.mktemp("reference")
    (folder / "p.jsonl").write_text(
        "\n".join(json.dumps({"id": name, "token_ids": ids}) for name, ids in IDS.items())
    )
    capture_to(folder / "trace", model=str(hybrid_bf16), prompts=folder / "p.jsonl", dtype="bfloat16")
    return folder / "trace"


def by_ids(dump: Any) -> dict[tuple[int, ...], str]:
    return {entry.token_ids: entry.id for entry in dump.requests}


def test_speculators_files_as_its_trainer_reads_them(
    peer: Import, samples: dict[str, Sample], reference: Path, tmp_path: Path
) -> None:
    """The trainer's own data set reads [T, L*H] and the last state; ours are the same numbers under found names."""
    import datasets
    from safetensors.torch import save_file

    (tmp_path / "data/hidden_states").mkdir(parents=True)
    rows = {
        "input_ids": [sample.ids.tolist() for sample in samples.values()],
        "loss_mask": [[1] * len(sample.ids) for sample in samples.values()],
        "seq_len": [len(sample.ids) for sample in samples.values()],
    }
    datasets.Dataset.from_dict(rows).with_format("torch").save_to_disk(tmp_path / "data")
    for index, sample in enumerate(samples.values()):
        data = {"token_ids": sample.ids, "hidden_states": sample.stacked}
        save_file(data, tmp_path / f"data/hidden_states/hs_{index}.safetensors")
    train = peer("speculators.train.data")
    theirs = train.ArrowDataset(max_len=64, datapath=tmp_path / "data", on_missing="raise")

    pair = open_pair(tmp_path / "data", reference)
    dump = pair.a.trace
    assert pair.a.format == "speculators" and dump.taps == (*TAPS, "final.prenorm")
    for index, sample in enumerate(samples.values()):
        row, request = theirs[index], by_ids(dump)[tuple(sample.ids.tolist())]
        assert torch.equal(
            torch.cat([dump.tensor(request, tap) for tap in TAPS], dim=1), row["hidden_states"]
        )
        assert torch.equal(dump.tensor(request, "final.prenorm"), row["verifier_last_hidden_states"])
    found = compare_traces(dump, pair.b.trace, taps=pair.taps)
    assert found.outcome == "pass" and found.tokens == sum(map(len, IDS.values()))


def test_speculators_fp8_files(
    peer: Import,
    samples: dict[str, Sample],
    reference: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Written by the fp8 connector itself (its base class, vLLM's, is not needed to write) and read by its reader."""
    # vLLM is no CPU package; the connector only needs a base class of that name
    name = "vllm.distributed.kv_transfer.kv_connector.v1"
    module = types.ModuleType(name)
    module.example_hidden_states_connector = types.SimpleNamespace(  # type: ignore[attr-defined]
        ExampleHiddenStatesConnector=object
    )
    for depth in range(1, len(name.split("."))):
        parent = ".".join(name.split(".")[:depth])
        monkeypatch.setitem(sys.modules, parent, types.ModuleType(parent))
    monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "hs_connectors.fp8_hidden_states_connector", raising=False)
    transfer = peer("hs_connectors.transfer")
    connector = peer("hs_connectors.fp8_hidden_states_connector").FP8HiddenStatesConnector
    written = types.SimpleNamespace(synchronize=lambda: None)  # stands for a CUDA event that has happened
    for index, sample in enumerate(samples.values()):
        data = {"token_ids": sample.ids, "hidden_states": sample.stacked}
        connector._write_tensors(data, written, str(tmp_path / f"hs_{index}.safetensors"), None)
    pair = open_pair(tmp_path, reference)
    dump = pair.a.trace
    assert dump.taps == (*TAPS, "final.prenorm") and dump.tap(TAPS[0]).dtype == "bfloat16"
    for index, sample in enumerate(samples.values()):
        theirs = transfer.FP8Transfer(tmp_path).get_cached(index)["hidden_states"]
        request = by_ids(dump)[tuple(sample.ids.tolist())]
        ours = torch.stack([dump.tensor(request, tap) for tap in dump.taps], dim=1)
        assert torch.equal(ours, theirs)
    found = compare_traces(dump, pair.b.trace, taps=pair.taps)
    # three bits of significand: half a step is 1/16 of the value at most, 1/16/sqrt(3) = .036 rms at the worst value
    assert all(0.02 < tap.error_rms < 0.036 and tap.error_max < 1 / 16 for tap in found.taps)
    assert any("float8_e4m3fn" in note for note in pair.a.notes)


@pytest.mark.parametrize("packed", [False, True], ids=["ckpt", "ckpt.gz"])
@pytest.mark.parametrize("last", [False, True], ids=["dflash", "dspark"])
def test_specforge_features(
    packed: bool, last: bool, peer: Import, samples: dict[str, Sample], reference: Path, tmp_path: Path
) -> None:
    """Written by SpecForge's feature store; its own loader and normalizer see what we see."""
    store_module = peer("specforge.runtime.data_plane.feature_store")
    family = peer("specforge.algorithms.common.dflash_family_data")
    store = store_module.LocalFeatureStore(dump_dir=str(tmp_path))
    for request, sample in samples.items():
        data = {
            "input_ids": sample.ids,
            "loss_mask": torch.ones_like(sample.ids),
            "hidden_states": sample.joined,
        }
        if last:
            data["target_last_hidden_states"] = sample.states[-1][None]
        store.put(data, sample_id=f"data_{request}", metadata={"num_tokens": len(sample.ids)})
        file = tmp_path / f"data_{request}.ckpt"
        assert file.is_file(), "SpecForge wrote nothing"
        if packed:
            with gzip.open(f"{file}.gz", "wb") as stream:
                stream.write(file.read_bytes())
            file.unlink()
    pair = open_pair(tmp_path, reference)
    dump = pair.a.trace
    assert pair.a.format == "specforge" and dump.taps == TAPS + (("final.postnorm",) if last else ())
    normalize = family.normalize_dspark_offline_sample if last else family.normalize_offline_sample
    for request in samples:
        file = tmp_path / f"data_{request}.ckpt{'.gz' if packed else ''}"
        theirs = normalize(store_module.load_feature_file(str(file)), max_len=4096)
        mine = by_ids(dump)[tuple(theirs["input_ids"][0].tolist())]
        ours = torch.cat([dump.tensor(mine, tap) for tap in TAPS], dim=1)
        assert torch.equal(ours, theirs["hidden_states"][0])
        if last:
            assert torch.equal(dump.tensor(mine, "final.postnorm"), theirs["target_last_hidden_states"][0])
    assert compare_traces(dump, pair.b.trace, taps=pair.taps).outcome == "pass"


def test_a_modelopt_dump_with_ids_one_too_low(
    samples: dict[str, Sample], reference: Path, tmp_path: Path
) -> None:
    """Model-Optimizer's two scripts, played on transformers' states: the one for transformers adds 1 to 0-based
    ids; the one for vLLM hands them over as they are, and does not set its prenorm flag. Both faults are found."""
    layers = (0, 1, 2)
    for folder, shift, last in (("hf", 1, "post"), ("vllm", 0, "pre")):
        (tmp_path / folder).mkdir()
        for request, sample in samples.items():
            aux = torch.cat([sample.states[layer + shift] for layer in layers], dim=1)
            data = {
                "input_ids": sample.ids,
                "hidden_states": sample.states[-1] if last == "post" else sample.prenorm,
                "aux_hidden_states": aux,
                "conversation_id": request,
            }
            torch.save(data, tmp_path / folder / f"{request}.pt")
    mapping = Mapping.model_validate({"a": {"layers": layers, "ids": "layer"}})
    right = open_pair(tmp_path / "hf", reference, mapping).a.found
    wrong = open_pair(tmp_path / "vllm", reference, mapping).a.found
    assert right is not None and wrong is not None
    assert all(match.as_declared for match in right.matches) and right.shift == 0
    assert wrong.shift == -1 and [m.found for m in wrong.matches] == ["embed.out", *TAPS[:2], "final.prenorm"]
    assert wrong.match("hidden_states").declared == "final.postnorm"


def test_what_a_peer_wrote_compares_with_what_another_wrote(
    peer: Import, samples: dict[str, Sample], tmp_path: Path
) -> None:
    """speculators against SpecForge, without any capture of ours: the same layers, found by their numbers."""
    from safetensors.torch import save_file

    store = peer("specforge.runtime.data_plane.feature_store").LocalFeatureStore(dump_dir=str(tmp_path / "b"))
    (tmp_path / "a").mkdir()
    for index, (request, sample) in enumerate(samples.items()):
        data = {"token_ids": sample.ids, "hidden_states": sample.stacked}
        save_file(data, tmp_path / f"a/hs_{index}.safetensors")
        store.put(
            {
                "input_ids": sample.ids,
                "loss_mask": torch.ones_like(sample.ids),
                "hidden_states": sample.joined,
            },
            sample_id=request,
            metadata={},
        )
    pair = open_pair(tmp_path / "a", tmp_path / "b")
    common = [tap for tap in pair.a.trace.taps if tap in pair.b.trace.taps]
    assert common == [f"hidden_states.{index}" for index in range(3)]
    found = compare_traces(pair.a.trace, pair.b.trace, taps=common)
    assert found.outcome == "pass" and all(tap.error_max == 0 for tap in found.taps)
