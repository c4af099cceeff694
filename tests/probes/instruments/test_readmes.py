"""The worked examples of the two essays (`probes/instruments/*/README.md`) are computed again, number by number."""

import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from parity.model.dflash.config import RopeConfig
from parity.probes.adapters.base import AdapterStep
from parity.probes.instruments.drafter.reference import (
    LAYER_WEIGHTS,
    BlockRow,
    DrafterHypothesis,
    DrafterWeights,
    LayerView,
    compute_hidden_states,
    mask_context,
    measure_hidden_distance,
)
from parity.probes.instruments.loss.head_gradient import HeadGradients, compute_term_values
from parity.probes.instruments.loss.mixture import explain
from parity.probes.instruments.loss.slot_weights import WeightedSlots, recognise_law
from tests.test_packaging import ROOT

ESSAYS = ROOT / "probes" / "instruments"


def table(essay: str, first: str) -> list[list[str]]:
    """Cells of the rows of the essay's table whose first column is called `first`."""
    lines = (ESSAYS / essay / "README.md").read_text(encoding="utf-8").splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith(f"| {first} |"))
    rows = []
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    assert rows
    return rows


def quoted(essay: str, name: str) -> float:
    """The number that the essay gives as `name = number`."""
    text = (ESSAYS / essay / "README.md").read_text(encoding="utf-8")
    found = re.findall(rf"`{re.escape(name)} = ([-\d.e]+)`", text)
    assert len(found) == 1, (name, found)
    return float(found[0])


# --- loss/README.md -----------------------------------------------------------------------------------

HEAD = torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, -1.0]], dtype=torch.float64)
HIDDEN = torch.tensor([[1.0, 0.0], [0.0, 0.5], [0.5, -0.5]], dtype=torch.float64)
TEACHER = torch.tensor([[1.0, 0.0, 0.0], [0.0, 1.0, 0.5], [0.0, 0.0, 1.0]], dtype=torch.float64)


@pytest.fixture
def step() -> AdapterStep:
    """One block of four slots: .3 CE + .7 KL, weights exp(-(k - 1) / 4), divided by their sum."""
    hidden = torch.cat((torch.zeros(1, 2, dtype=torch.float64), HIDDEN))[None].requires_grad_(True)
    log_q, log_p = (hidden[0, 1:] @ HEAD.T).log_softmax(-1), TEACHER.log_softmax(-1)
    weights = torch.exp(-torch.arange(3, dtype=torch.float64) / 4)
    values = 0.3 * compute_term_values("ce", log_q, TEACHER.argmax(-1), None)
    values = values + 0.7 * compute_term_values("kl", log_q, None, log_p)
    loss = (weights * values).sum() / weights.sum()
    empty = torch.zeros(1, 2, dtype=torch.float64)
    return AdapterStep(loss=loss, hidden=hidden, head=HEAD, anchors=torch.tensor([0]), fc_input=empty)


def test_the_loss_of_the_example_is_read_as_the_essay_says(step: AdapterStep) -> None:
    at = HeadGradients.of(step)
    columns = at.columns(["ce:teacher", "kl"], {"teacher": TEACHER.argmax(-1)}, TEACHER)
    fit = explain(at.gradient, columns, limit=1e-9)
    assert fit.is_explained and set(fit.shares) == {"ce:teacher", "kl"}
    rows = table("loss", "slot")
    assert [int(row[0]) for row in rows] == at.slot.tolist() == [1, 2, 3]
    wanted = torch.cat((at.gradient, columns["ce:teacher"], columns["kl"]), dim=1)
    wanted = torch.cat((wanted, torch.from_numpy(fit.weights)[:, None]), dim=1)
    written = torch.tensor([[float(each) for cell in row[1:] for each in cell.split(",")] for row in rows])
    torch.testing.assert_close(written.double(), wanted, atol=5.1e-5, rtol=0)
    assert quoted("loss", "share of kl") == pytest.approx(fit.shares["kl"], abs=1e-6)
    alone = explain(at.gradient, {"ce:teacher": columns["ce:teacher"]}, limit=1e-9)
    assert quoted("loss", "residual of ce alone") == pytest.approx(alone.residual, rel=0.01)


def test_the_weights_of_the_example_follow_the_law_that_the_essay_names(step: AdapterStep) -> None:
    at = HeadGradients.of(step)
    fit = explain(at.gradient, at.columns(["ce:t", "kl"], {"t": TEACHER.argmax(-1)}, TEACHER), limit=1e-9)
    labels = TEACHER.argmax(-1)
    slots = WeightedSlots(
        block=at.block.numpy(),
        slot=at.slot.numpy(),
        weight=fit.weights,
        tolerance=np.full(3, 1e-6),
        chance=at.chance(labels).numpy(),
        value=-at.chance(labels).log().numpy(),
        right=(at.best[0] == labels).numpy(),
        document=np.zeros(3, dtype=np.int64),
        size=4,
    )
    law = recognise_law(slots)
    assert law.kind == "exp"
    assert quoted("loss", "gamma") == pytest.approx(law.parameters["gamma"], rel=1e-4)
    assert quoted("loss", "denominator") == pytest.approx(1 / law.scale, abs=5e-4)
    assert quoted("loss", "sum of weights") == pytest.approx(float(law.raw.sum()), abs=5e-4)


# --- drafter/README.md --------------------------------------------------------------------------------

ROW = BlockRow(
    tokens=torch.arange(12),
    position=torch.arange(12),
    document=torch.zeros(12, dtype=torch.long),
    anchors=torch.tensor([6, 8]),
    block=4,
)
DECLARED = DrafterHypothesis(layers=(LayerView(),), rope=RopeConfig(rope_theta=1e6), mask_token_id=11)


def draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def drafter(attention: float) -> DrafterWeights:
    """One layer of width 8 with two heads; `attention` scales its output projection."""
    shapes = {"q_norm": (4,), "k_norm": (4,), "k_proj": (4, 8), "v_proj": (4, 8)}
    shapes |= {"gate_proj": (16, 8), "up_proj": (16, 8), "down_proj": (8, 16)}
    values = {"fc.weight": draw(8, 16, seed=1) / 4}
    for number, part in enumerate(LAYER_WEIGHTS):
        name, shape = f"layers.0.{part}.weight", shapes.get(part.split(".")[-1], (8, 8))
        norm = part.endswith(("norm", "layernorm"))
        values[name] = (
            torch.ones(shape[:1]).double() if norm else draw(*shape, seed=number) * shape[1] ** -0.5
        )
    values |= {name: torch.ones(8).double() for name in ("hidden_norm.weight", "norm.weight")}
    values["layers.0.self_attn.o_proj.weight"] *= attention
    made = DrafterWeights.of(values)
    assert made is not None
    return made


OTHERS = {
    "causal within the block": replace(DECLARED, layers=(LayerView(causal=True),)),
    "rope base 1e4": replace(DECLARED, rope=RopeConfig(rope_theta=1e4)),
    "block one position too high": replace(DECLARED, shift=1),
    "mask token 10": replace(DECLARED, mask_token_id=10),
}


def distances(attention: float) -> dict[str, float]:
    """Of each other hypothesis from the declared one."""
    inputs = (drafter(attention), draw(12, 16, seed=21), draw(12, 8, seed=22))

    def compute(reading: DrafterHypothesis) -> Tensor:
        return compute_hidden_states(inputs[0], reading, ROW, inputs[1], inputs[2])

    return {name: measure_hidden_distance(compute(each), compute(DECLARED)) for name, each in OTHERS.items()}


def test_the_distances_of_hypotheses_are_those_of_the_essay() -> None:
    fresh, scaled = distances(1e-5), distances(1.0)
    rows = table("drafter", "hypothesis")
    assert [row[0] for row in rows] == list(OTHERS)
    for name, small, large in rows:
        assert float(small) == pytest.approx(fresh[name], rel=0.06), name
        assert float(large) == pytest.approx(scaled[name], rel=0.06), name


def test_the_staircase_of_windows_is_that_of_the_essay() -> None:
    rows = table("drafter", "slot")
    views = [LayerView(), LayerView(window=3), LayerView(window=3, window_from="anchor")]
    one = replace(ROW, anchors=ROW.anchors[:1])
    for slot, *cells in rows:
        for view, cell in zip(views, cells, strict=True):
            seen = mask_context(view, DECLARED, one)[0, int(slot)].nonzero().squeeze(-1).tolist()
            assert cell == (f"{seen[0]}-{seen[-1]}" if len(seen) > 1 else str(seen[0]) if seen else "none")
