"""Every planted wiring fault is found and named by its own probe; every healthy variant is left alone by all."""

import pytest

from parity.probes.query import query_probes
from parity.probes.subject import ExaminedAdapter
from parity.probes.table import find_entry
from tests.faults import collect
from tests.faults.wiring import Healthy, Plant


@pytest.mark.parametrize("plant", collect.plants(), ids=lambda plant: f"{plant.trainer}: {plant.name}")
def test_a_plant_is_found_and_named(plant: Plant) -> None:
    assert plant.deviation in find_entry(plant.probe).faults
    (_, answer), *_ = query_probes(ExaminedAdapter(plant.build()), only=[plant.probe])
    failed = [finding for finding in answer.findings if finding.outcome == "fail"]
    assert failed, [finding.sentence for finding in answer.findings]
    if not plant.detection_only:
        assert failed[0].fault == plant.deviation, [(f.fault, f.sentence) for f in failed]
    assert failed[0].evidence or any(character.isdigit() for character in failed[0].sentence)


@pytest.mark.parametrize("healthy", collect.healthy(), ids=lambda each: f"{each.trainer}: {each.name}")
def test_a_healthy_variant_raises_nothing(healthy: Healthy) -> None:
    answers = query_probes(ExaminedAdapter(healthy.build()))
    findings = [finding for _, answer in answers for finding in answer.findings]
    loud = [f"{f.name} {f.outcome}: {f.sentence}" for f in findings if f.outcome in ("fail", "warn", "error")]
    assert not loud, "\n".join(loud)
    silent = {name for name, answer in answers if all(f.outcome == "skipped" for f in answer.findings)}
    assert silent == set(healthy.unshown), {
        name: answer.findings[0].sentence for name, answer in answers if name in silent ^ set(healthy.unshown)
    }


def test_names_are_unique() -> None:
    names = [(plant.trainer, plant.probe, plant.name) for plant in collect.plants()]
    assert len(set(names)) == len(names) > 0
