"""`make faults`: every injected wiring fault and healthy variant against all probes; writes the matrix that ships.

    python -m tests.faults.matrix [--out FILE]

A fault is *named* where its own probe fails with its name, *found* where its probe fails with another, *missed*
otherwise. Any warn, fail or error on a healthy variant is a false alarm. Exit code 1 where a fault is missed, fewer
than 95 % are named, or a healthy variant raises anything.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

from parity.model.target.backends import isolate, parse_backend

torch.set_num_threads(1)
isolate(parse_backend("torch"))  # before anything imports transformers, as in tests/conftest.py

from rich.console import Console
from rich.progress import track

from parity.probes.query import query_probes
from parity.probes.subject import ExaminedAdapter
from parity.reports.record import Finding
from tests.faults import collect
from tests.faults.wiring import HealthyVariant, InjectedFault

ROOT = Path(__file__).resolve().parents[2]
SHIPPED = ROOT / "probes" / "matrix.json"
NAMED_AT_LEAST = 0.95


def examine(fault: InjectedFault) -> dict[str, object]:
    """One row: what each probe answered to an injected fault."""
    answers = query_probes(ExaminedAdapter(fault.build()))
    loud = {name: [f for f in answer.findings if f.outcome == "fail"] for name, answer in answers}
    own = loud.get(fault.probe, [])
    result = "missed"
    if own:
        result = "named" if fault.detection_only or own[0].fault == fault.deviation else "found"
    return {
        "trainer": fault.trainer,
        "fault": fault.name,
        "probe": fault.probe,
        "expected": fault.deviation,
        "result": result,
        "given": own[0].fault if own else None,
        "measured": own[0].sentence if own else None,
        "others": {name: found[0].fault for name, found in loud.items() if found and name != fault.probe},
        "broken": [f.sentence for _, answer in answers for f in answer.findings if f.outcome == "error"],
    }


def alarm(healthy: HealthyVariant) -> dict[str, object]:
    """One row: what was raised on a healthy variant, and which probes could not ask."""
    findings: list[Finding] = [
        f for _, answer in query_probes(ExaminedAdapter(healthy.build())) for f in answer.findings
    ]
    return {
        "trainer": healthy.trainer,
        "variant": healthy.name,
        "alarms": [f"{f.name}: {f.sentence}" for f in findings if f.outcome in ("warn", "fail", "error")],
        "skipped": [f.name for f in findings if f.outcome == "skipped"],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, default=SHIPPED)
    out, console, began = parser.parse_args().out, Console(stderr=True), time.monotonic()
    rows = [examine(fault) for fault in track(collect.list_faults(), "faults", console=console)]
    healthy = [alarm(each) for each in track(collect.list_variants(), "healthy variants", console=console)]
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True, check=False
    ).stdout.strip()
    made = {"commit": commit or None, "date": time.strftime("%Y-%m-%d"), "faults": rows, "healthy": healthy}
    temporary = out.with_name(out.name + ".writing")
    temporary.write_text(json.dumps(made, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    os.replace(temporary, out)
    counts = Counter(row["result"] for row in rows)
    alarms = [(row["variant"], row["alarms"]) for row in healthy if row["alarms"]]
    for row in rows:
        if row["result"] != "named":
            print(
                f"{row['result']}: {row['trainer']}, {row['fault']}: expected {row['expected']}, given {row['given']}"
            )
    for variant, raised in alarms:
        print(f"false alarm on {variant}: {raised}")
    minutes = (time.monotonic() - began) / 60
    print(
        f"{len(rows)} faults: {counts['named']} named, {counts['found']} found under another name, "
        f"{counts['missed']} missed; {len(healthy)} healthy variants: {len(alarms)} with alarms; {minutes:.1f} min"
    )
    good = rows and not counts["missed"] and counts["named"] >= NAMED_AT_LEAST * len(rows) and not alarms
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
