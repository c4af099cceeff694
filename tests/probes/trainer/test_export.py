"""What the probe `export` does with missing readers, other dtypes and refusals, beside the faults of tests/faults."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from parity.probes.adapters.builtin import Builtin
from parity.probes.base import ProbeAnswer
from parity.probes.query import query_probes
from parity.probes.subject import ExaminedAdapter
from tests.faults.injected.export import _config, _tensors
from tests.faults.wiring import builtin


def _answer(adapter: Builtin) -> ProbeAnswer:
    return query_probes(ExaminedAdapter(adapter), only=["export"])[0][1]


@pytest.mark.parametrize(
    ("changes", "peer"), [({}, "dflash"), ({"recipe.draft_vocab": {"size": 40}}, "speculators")]
)
def test_a_reader_that_is_not_installed_is_told(
    changes: dict[str, Any], peer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("dflash.model", "speculators.models.dflash", "speculators.models.dflash.config"):
        monkeypatch.setitem(sys.modules, name, None)
    (finding,) = _answer(builtin(changes)).findings
    assert finding.outcome == "pass"
    assert "read by parity; logits at 6 anchors" in finding.sentence
    assert f"{peer} was not asked: not installed (make peers)" in finding.sentence


def test_facts() -> None:
    statement = _answer(builtin()).statement
    assert statement is not None
    facts = dict(statement.facts)
    assert facts["export.layers"] == "0, 1, 2" and facts["export.block_size"] == 4
    assert facts["export.mask_token_id"] == 3 and facts["export.rope.base"] == 10_000
    assert facts["export.layout"] == "zlab" and facts["export.dtype"] == "float32"


def _rounded(held: dict[str, torch.Tensor]) -> None:
    for name in list(held):
        held[name] = held[name].to(torch.bfloat16)


def test_a_checkpoint_in_bfloat16_is_judged_by_its_rounding() -> None:
    answer = _answer(builtin(then=_tensors(_rounded)))
    assert answer.findings[0].outcome == "pass", answer.findings[0].sentence
    assert answer.statement is not None
    facts = dict(answer.statement.facts)
    assert facts["export.dtype"] == "bfloat16" and 1e-5 < float(str(facts["export.apart"])) < 1e-2


def test_an_exporter_that_writes_its_own_copy_is_compared_unscaled() -> None:
    class Averaged(Builtin):
        """What is served is an average of its own, here equal to the live parameters before they are scaled."""

        average: dict[str, torch.Tensor]

        def export(self, folder: Path) -> str:
            layout = super().export(folder)
            save_file(self.average, folder / "model.safetensors", metadata={"format": "pt"})
            return layout

    adapter = builtin()
    adapter.__class__ = Averaged
    state = adapter.trainer.drafter.state_dict()
    adapter.average = {name: value.clone() for name, value in state.items()}  # type: ignore[attr-defined]
    (finding,) = _answer(adapter).findings
    assert finding.outcome == "pass", finding.sentence


def test_a_refusal_quotes_our_reader() -> None:
    finding = _answer(
        builtin(then=_config(lambda raw: raw["dflash_config"].update(shift_label=True)))
    ).findings[0]
    assert finding.fault == "export-unreadable"
    assert "the meaning of shift_label in config.json" in finding.sentence


def test_a_layout_that_nobody_reads_is_the_adapters_fault() -> None:
    class Other(Builtin):
        def export(self, folder: Path) -> str:
            super().export(folder)
            return "gguf"

    adapter = builtin()
    adapter.__class__ = Other
    finding = _answer(adapter).findings[0]
    assert (
        finding.outcome == "error"
        and "expected a layout: zlab or speculators, found 'gguf'" in finding.sentence
    )


def test_nothing_is_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import tempfile

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    query_probes(ExaminedAdapter(builtin()), only=["export", "resume"])
    assert list(tmp_path.iterdir()) == []


def test_a_configuration_is_read_as_it_was_written(tmp_path: Path) -> None:
    adapter = builtin({"recipe.attention": {"layers": ["sliding", "full"], "window": 6}})
    adapter.export(tmp_path / "out")
    raw = json.loads((tmp_path / "out" / "config.json").read_text())
    assert raw["layer_types"] == ["sliding_attention", "full_attention"] and raw["is_causal"] is False
    assert _answer(adapter).findings[0].outcome == "pass"
