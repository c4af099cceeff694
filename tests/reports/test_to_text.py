"""The text painter: exact text at 80 columns, narrow and wide, hostile texts, parts that break."""

from collections.abc import Callable
from dataclasses import replace

import pytest
from rich.cells import cell_len

from parity.reports.record import Column, Finding, Report, Table
from parity.reports.to_text import paint

EXPECTED = """\
ERROR    parity check: tiny target
         1 probe broke or had no power, so there is no verdict. 1 finding fails
         beside it.
         1 error, 1 fail, 1 warn, 1 skipped, 1 pass
         model = embedded tiny hybrid · layers = 12 · dtype = float32, bfloat16
         $ parity check --out report
         2026-01-02T03:04:05Z, 41.2 s

Findings ───────────────────────────────────────────────────────────────────────
ERROR    golden
         The worker broke.
         exit status = -11
         stderr:
           | Traceback:
           |   line 1
           | Segmentation fault
         next: Report this with the lines above.

FAIL     dispatch  fault: wrong-backend
         fla-interpreted was asked for, but layer 3 ran torch's fallback in 6 of
         6 calls.
         layers asked for = 9 · layers proven = 8
         callee = transformers.models.x
         next: Install flash-linear-attention, or ask for --backend torch.
         see: layers.fp32

WARN     floor
         The noise floor is one run only.
         next: Run again with --reruns 3.

SKIPPED  backends.cuda
         No CUDA device, so fla's own kernels did not run.
         next: Run this on the evaluation machine.
PASS     loading
         AutoModel and AutoModelForCausalLM load the same weights.

Error per layer, fp32 ──────────────────────────────────────────────────────────
                   local
                   error
               (relative  minimum
layer  kind          L2)   cosine
─────  ──────  ─────────  ───────
    0  linear    2.31e-7  0.99984
    1  linear     1.9e-7        1
    2  full            0        1
    3  linear        nan  1-2e-16
torch against fla-interpreted, 160 tokens.

More tables in the page and the JSON (1 row): tokens.fp32

Notes ──────────────────────────────────────────────────────────────────────────
  The fp64 pass covered 4 of 12 layers.

Suspicions: 1 found, 1 ruled out, 1 not tested ─────────────────────────────────
suspicion             verdict     because
────────────────────  ──────────  ──────────────────────────────────────────────
the kernels differ    found       Layer 3 ran the wrong kernel.
the loader loads      ruled out   148 of 148 parameters are equal in AutoModel
something else                    and AutoModelForCausalLM.
the machine differs   not tested  No second machine's manifest.
"""


def test_small_report_at_80_columns(small: Report) -> None:
    assert paint(small) == EXPECTED


@pytest.mark.parametrize("width", [40, 60, 80, 120])
def test_no_line_is_wider_than_asked(big: Report, small: Report, width: int) -> None:
    for report in (big, small):
        assert max(cell_len(line) for line in paint(report, width=width).splitlines()) <= width


def test_colour_is_asked_for_not_guessed(small: Report, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "33")
    assert paint(small) == EXPECTED
    monkeypatch.setenv("NO_COLOR", "1")
    coloured = paint(small, colour=True)
    assert "\x1b[" in coloured and "ERROR" in coloured


def test_wide_table_is_split_and_repeats_its_first_columns(report_of: Callable[..., Report]) -> None:
    columns = [Column(key="layer", title="layer", kind="int")]
    columns += [Column(key=f"c{n}", title=f"quantity{n}", kind="float") for n in range(12)]
    rows = tuple((layer, *(1.5e-7 * (n + 1) for n in range(12))) for layer in range(2))
    text = paint(report_of(tables=(Table(name="t", title="wide", columns=tuple(columns), rows=rows),)))
    assert text.count("layer") == 2
    assert all(f"quantity{n}" in text for n in range(12))
    assert "1.65e-6" in text and " 1.5e-7" in text


def test_detail_is_named_and_not_shown(big: Report) -> None:
    text = paint(big)
    assert "More tables in the page and the JSON" in text and "tokens.bf16" in text
    assert "position" not in text


def test_long_table_is_cut_and_says_so(report_of: Callable[..., Report]) -> None:
    table = Table(name="t", title="t", columns=(Column(key="n", title="n", kind="int"),), rows=((1,),) * 1000)
    assert "... 800 more rows, in the JSON and HTML reports" in paint(report_of(tables=(table,)))


def test_empty_table_and_empty_report(report_of: Callable[..., Report]) -> None:
    table = Table(name="t", title="t", columns=(Column(key="n", title="n"),), rows=())
    assert "(no rows)" in paint(report_of(tables=(table,)))
    assert "Nothing was compared, and that is not a pass." in paint(report_of())


def test_hostile_texts_cannot_drive_a_terminal(report_of: Callable[..., Report], hostile: str) -> None:
    finding = Finding(
        name=hostile, outcome="fail", sentence=hostile, evidence=((hostile, hostile),), next_step=hostile
    )
    text = paint(report_of(title=hostile, findings=(finding,), notes=(hostile,)))
    assert "\\x1b[31m" in text and "\\u202e" in text
    assert not any(character in text for character in "\x1b\x00\u202e")
    assert "[a](http://b)" in text  # no markup of rich's is read


def test_part_that_breaks_is_named_and_the_rest_painted(small: Report) -> None:
    broken = replace(small, findings=(None, *small.findings), suspicions=small.suspicions)  # type: ignore[arg-type]
    text = paint(broken)
    assert "findings: not painted (AttributeError" in text
    assert "Error per layer, fp32" in text and "the kernels differ" in text


def test_odd_values_are_painted(small: Report) -> None:
    odd = Finding(
        name="odd",
        outcome="error",
        sentence="",
        next_step="x",
        evidence=(("list", [1]), ("none", None)),  # type: ignore[arg-type]
    )
    text = paint(replace(small, findings=(odd, *small.findings)))
    assert "list = [1] · none = -" in text and "PASS     loading" in text


def test_environment_is_shown_where_it_was_asked_for(small: Report) -> None:
    assert "TRITON_INTERPRET" not in paint(small)
    assert "TRITON_INTERPRET" in paint(replace(small, kind="env"))
