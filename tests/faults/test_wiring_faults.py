"""Every injected wiring fault is found and named by its own probe; every healthy variant is left alone by all."""

import pytest

from parity.probes.query import query_probes
from parity.probes.subject import ExaminedAdapter
from parity.probes.table import find_entry
from tests.faults import collect
from tests.faults.wiring import HealthyVariant, InjectedFault


@pytest.mark.parametrize("fault", collect.list_faults(), ids=lambda fault: f"{fault.trainer}: {fault.name}")
def test_an_injected_fault_is_found_and_named(fault: InjectedFault) -> None:
    assert fault.deviation in find_entry(fault.probe).faults
    (_, answer), *_ = query_probes(ExaminedAdapter(fault.build()), only=[fault.probe])
    failed = [finding for finding in answer.findings if finding.outcome == "fail"]
    assert failed, [finding.sentence for finding in answer.findings]
    if not fault.detection_only:
        assert failed[0].fault == fault.deviation, [(f.fault, f.sentence) for f in failed]
    assert failed[0].evidence or any(character.isdigit() for character in failed[0].sentence)


@pytest.mark.parametrize("healthy", collect.list_variants(), ids=lambda each: f"{each.trainer}: {each.name}")
def test_a_healthy_variant_raises_nothing(healthy: HealthyVariant) -> None:
    answers = query_probes(ExaminedAdapter(healthy.build()))
    findings = [finding for _, answer in answers for finding in answer.findings]
    loud = [f"{f.name} {f.outcome}: {f.sentence}" for f in findings if f.outcome in ("fail", "warn", "error")]
    assert not loud, "\n".join(loud)
    silent = {name for name, answer in answers if all(f.outcome == "skipped" for f in answer.findings)}
    assert silent == set(healthy.unshown), {
        name: answer.findings[0].sentence for name, answer in answers if name in silent ^ set(healthy.unshown)
    }


def test_names_are_unique() -> None:
    names = [(fault.trainer, fault.probe, fault.name) for fault in collect.list_faults()]
    assert len(set(names)) == len(names) > 0
