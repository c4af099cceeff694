"""Units, their merging and keeping: one report whatever the number of ranks, threads and interruptions."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import parity.comparison.units
from parity.comparison.records import Comparison
from parity.comparison.traces import compare_traces
from parity.comparison.units import UNIT_ROWS, TapPart, decode_parts, encode, kept_columns, quantile, units_of
from parity.diagnosis.report import comparison_report
from parity.errors import ParityError
from parity.kernel.sums import BLOCK_ROWS
from parity.reports import to_json
from parity.tracing.trace import Trace

WriteTrace = Callable[..., Trace]
ROOT = Path(__file__).resolve().parents[3]
ROWS = (700, 3 * UNIT_ROWS + 100, 40, 900, 300, 1500)
"""More units than ranks, long requests and short ones."""


@pytest.mark.parametrize(
    "rows", [(1,), (UNIT_ROWS,), (UNIT_ROWS + 1,), ROWS, (5,) * 3000, (0, 5, 0), (10 * UNIT_ROWS,)]
)
def test_units_cover_every_row_once(rows: tuple[int, ...]) -> None:
    units, seen = units_of(rows), [0] * len(rows)
    assert [unit.number for unit in units] == list(range(len(units)))
    covered = 0
    for unit in units:
        assert unit.first_row == covered and 0 < unit.rows < 2 * UNIT_ROWS
        assert unit.rows >= UNIT_ROWS or unit is units[-1]
        for segment in unit.segments:
            assert segment.start == seen[segment.request] and segment.start % BLOCK_ROWS == 0
            assert sum(rows[: segment.request]) + segment.start == covered
            seen[segment.request], covered = segment.stop, covered + segment.stop - segment.start
    assert seen == list(rows)


def test_units_depend_on_the_rows_alone_and_are_few_for_many_short_requests() -> None:
    assert units_of(ROWS) == units_of(list(ROWS))
    assert len(units_of((100,) * 5000)) == 455  # 11 requests of 100 rows reach 1,024


def test_parts_travel_without_losing_a_bit() -> None:
    rng = np.random.default_rng(0)
    parts = [
        TapPart(
            columns=rng.standard_normal((3, 7)).astype(np.float32),
            totals=np.array([1e-300, np.inf, np.nan] + [0.1] * 12),
            channels=rng.standard_normal((3, 5)),
            zeros=np.array([1, 2, 3]),
            ulp=None if index == 1 else np.arange(6) << 40,
            controls={"rolled by one token": rng.standard_normal((2, 4)).astype(np.float32)} if index else {},
        )
        for index in range(12)
    ]
    for part, back in zip(parts, decode_parts(encode(parts)), strict=True):
        for name in ("columns", "totals", "channels", "zeros"):
            assert getattr(back, name).tobytes() == getattr(part, name).tobytes(), name
        assert (back.ulp is None) == (part.ulp is None) and back.controls.keys() == part.controls.keys()
        assert all(back.controls[name].tobytes() == part.controls[name].tobytes() for name in part.controls)


def test_quantile_is_that_of_sorted_values() -> None:
    rng = np.random.default_rng(1)
    for values in (
        rng.random(1),
        rng.random(2),
        np.zeros(9),
        10.0 ** rng.uniform(-30, 3, 5000),
        np.repeat([1e-9, 1, np.inf], 40),
    ):
        kept = values.astype(np.float32)
        for share in (0.0, 0.01, 0.5, 0.99, 1.0):
            ordered = np.sort(kept).astype(np.float64)
            place = share * (kept.size - 1)
            low, high = ordered[int(place)], ordered[min(int(place) + 1, kept.size - 1)]
            expected = low if low == high else low + (high - low) * (place - int(place))
            assert quantile(kept, share) == pytest.approx(expected, rel=1e-12)


def test_many_columns_lie_in_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    small = kept_columns(2, 3, 100)
    assert not isinstance(small, np.memmap)
    monkeypatch.setattr(parity.comparison.units, "SPILL", 1000)
    large = kept_columns(2, 3, 100)
    assert isinstance(large, np.memmap) and large.shape == (2, 3, 100) and not large.any()
    large[1, 2, 99] = 7
    assert large[1][2][99] == 7
    monkeypatch.setattr(os, "posix_fallocate", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left")))
    with pytest.raises(ParityError, match="No space left"):
        kept_columns(2, 3, 100)


@pytest.fixture
def pair(write_trace: WriteTrace) -> tuple[Trace, Trace]:
    """Two traces of ROWS, bf16, with noise, a wrong token far in, and an outlier that the first request hides."""
    generator, sides = torch.Generator().manual_seed(0), ({}, {})  # type: ignore[var-annotated]
    for request, rows in enumerate(ROWS):
        for side in sides:
            side[f"r{request}"] = {}
        for tap in range(3):
            base = torch.randn(rows, 48, generator=generator)
            base[:, 7] *= 100 if tap == 0 or (tap == 1 and request) else 1
            noisy = base * (1 + 0.004 * torch.randn(rows, 48, generator=generator))
            if (request, tap) == (3, 2):
                noisy[800] = 1.0
            sides[0][f"r{request}"][f"layer.{tap}.out"] = noisy.bfloat16()
            sides[1][f"r{request}"][f"layer.{tap}.out"] = base.bfloat16()
    return write_trace("a", sides[0]), write_trace("b", sides[1])


def text_of(found: Comparison) -> str:
    """The report without what differs from run to run, and all that a report leaves out."""
    report = json.loads(to_json.paint(comparison_report(found, "compare", created="now")))
    arrays = [(tap.token_errors.tobytes().hex(), tap.channel_errors.tobytes().hex()) for tap in found.taps]
    return json.dumps([report | {"seconds": 0}, repr(found.taps), arrays])


def test_a_unit_at_a_time_and_in_threads(pair: tuple[Trace, Trace]) -> None:
    alone = compare_traces(*pair)
    assert alone.first_bad is not None and (alone.first_bad.request, alone.first_bad.token) == ("r3", 800)
    assert [tap.recomputed for tap in alone.taps] == [False, True, False]
    assert text_of(compare_traces(*pair, threads=3)) == text_of(alone)


class Interrupted(Exception):
    """Stands for the power cut."""


def test_goes_on_where_it_was_interrupted(
    pair: tuple[Trace, Trace], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second run computes only what the first had not finished, a damaged part included; the result is the same."""
    work, made = tmp_path / "work", list[int]()

    def counted(parts: list[TapPart]) -> bytes:
        made.append(parts[0].columns.shape[1])
        return encode(parts)

    monkeypatch.setattr(parity.comparison.units, "encode", counted)

    def stop(done: int, total: int, what: str) -> None:
        if done > 3 * UNIT_ROWS:
            raise Interrupted(f"{done} of {total}, {what}")

    with pytest.raises(Interrupted):
        compare_traces(*pair, work=work, progress=stop)
    files = sorted(work.iterdir())
    units = units_of(ROWS)
    assert len(made) == len(files) == 3 < len(units)
    files[1].write_bytes(files[1].read_bytes()[:-9])
    stranger = work / "unit-0000000-0123456789abcdef.safetensors"
    stranger.write_bytes(b"of another comparison")
    made.clear()
    resumed = compare_traces(*pair, work=work)
    # the damaged one and the rest; then every unit again for the tap whose outliers were wrong
    assert made == [unit.rows for unit in (units[1], *units[3:], *units)]
    assert text_of(resumed) == text_of(compare_traces(*pair))
    assert sorted(work.iterdir()) == [stranger]


def test_parts_of_changed_traces_are_not_used(
    pair: tuple[Trace, Trace], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: object) -> None:
        raise Interrupted

    with pytest.raises(Interrupted):
        compare_traces(*pair, work=tmp_path / "work", progress=stop)
    shard = pair[0].path / pair[0].requests[0].shard
    os.utime(shard, ns=(1, 1))
    with pytest.raises(Interrupted):
        compare_traces(*pair, work=tmp_path / "work", progress=stop)
    assert len(list((tmp_path / "work").iterdir())) == 2


def test_a_full_disk_is_told_in_words(pair: tuple[Trace, Trace], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ParityError, match="finished parts of the comparison kept in"):
        compare_traces(*pair, work=tmp_path / "file" / "work")


def reports(pair: tuple[Trace, Trace], folder: Path) -> Iterator[dict[str, Any]]:
    """Of one, two and four processes under torchrun, without what names the run."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    for world in (1, 2, 4):
        out = folder / f"report-{world}"
        launcher = (
            ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world}"] if world > 1 else []
        )
        command = [sys.executable, *launcher, "-m", "parity", "compare", *(str(side.path) for side in pair)]
        done = subprocess.run(
            [*command, "--out", str(out)], env=environment, capture_output=True, text=True, timeout=240
        )
        assert done.returncode == 1, done.stderr  # the wrong token is found
        assert done.stdout.count("FAIL") > 0 and not (folder / f"report-{world}.partial").exists()
        report = json.loads((out / "report.json").read_text())
        yield {key: value for key, value in report.items() if key not in ("created", "command", "seconds")}


def test_one_two_and_four_ranks_give_one_report(pair: tuple[Trace, Trace], tmp_path: Path) -> None:
    one, two, four = (json.dumps(report) for report in reports(pair, tmp_path))
    assert one == two == four and "layer.2.out" in one
