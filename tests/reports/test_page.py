"""The three pages in a real browser: silent, offline, drawn, usable by keyboard, and fit for a phone and for paper.

Needs the package playwright and the system's chromium; `make test` gets both where it can (tests/browser.sh).
Without them it is skipped, except in CI, where it fails: a page that nobody looked at is not tested.
"""

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from parity.reports import to_html
from parity.reports.record import Report

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
KINDS = ("check", "compare", "train")
VIEWS = [(kind, width, scheme) for kind in KINDS for width in (1200, 390) for scheme in ("light", "dark")]
MAX_BYTES = 3_000_000


def _missing() -> str:
    """Why no browser can be started; empty where one can."""
    try:
        import playwright.sync_api  # noqa: F401
    except ImportError:
        return "the package playwright is not installed: pip install -c constraints.txt playwright"
    return "" if CHROMIUM else "no chromium on this machine: apt-get install chromium fonts-dejavu-core"


@pytest.fixture(scope="module")
def browser() -> "Iterator[Browser]":
    why = _missing()
    if why and os.environ.get("CI", "").lower() in ("1", "true", "yes"):
        pytest.fail(f"{why}; CI installs both")
    if why:
        pytest.skip(why)
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory, page_reports: dict[str, Report]) -> dict[str, Path]:
    """Each kind of page, written once."""
    folder, written = tmp_path_factory.mktemp("pages"), {}
    for kind, report in page_reports.items():
        written[kind] = folder / f"{kind}.html"
        written[kind].write_text(to_html.paint(report), encoding="utf-8")
    return written


@dataclass
class Opened:
    """A page, and everything it said or asked for."""

    page: "Page"
    said: list[str] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)


@pytest.fixture
def view(browser: "Browser", files: dict[str, Path]) -> Iterator[Any]:
    """Opens a page of a kind at a width and colour scheme, and waits until its charts are drawn."""
    contexts = []

    def open_page(kind: str, width: int = 1200, scheme: str = "light") -> Opened:
        context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)  # type: ignore[arg-type]
        contexts.append(context)
        opened = Opened(context.new_page())
        opened.page.on("console", lambda message: opened.said.append(f"{message.type}: {message.text}"))
        opened.page.on("pageerror", lambda error: opened.said.append(str(error)))
        opened.page.on("request", lambda request: opened.asked.append(request.url))
        opened.page.goto(files[kind].as_uri())
        count = opened.page.locator("[data-chart]").count()
        opened.page.wait_for_function(f"Number(document.body.dataset.drawn || 0) === {count}", timeout=60_000)
        return opened

    yield open_page
    for context in contexts:
        context.close()


@pytest.mark.parametrize(("kind", "width", "scheme"), VIEWS)
def test_silent_offline_and_drawn(
    view: Any, files: dict[str, Path], kind: str, width: int, scheme: str
) -> None:
    opened = view(kind, width, scheme)
    page = opened.page
    assert opened.said == []
    assert opened.asked == [files[kind].as_uri()]
    charts = page.locator("[data-chart]")
    assert charts.count() > 1
    for index in range(charts.count()):
        assert (
            charts.nth(index)
            .locator("svg .mark-rule, svg .mark-rect, svg .mark-line, svg .mark-symbol")
            .count()
        )
    assert (
        page.evaluate("document.documentElement.scrollWidth") == width
    )  # wide parts scroll inside themselves
    assert page.locator(".broken:visible").count() == 0
    light = page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(250, 249, 247)"
    assert light == (scheme == "light")
    assert files[kind].stat().st_size < MAX_BYTES


def test_the_console_is_heard(browser: "Browser", tmp_path: Path) -> None:
    """That the lists above stay empty means something: a page that errs and asks fills them."""
    (tmp_path / "bad.html").write_text(
        "<script>console.error('x'); fetch('file:///none'); throw Error('y')</script>"
    )
    page = browser.new_page()
    said: list[str] = []
    asked: list[str] = []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("request", lambda request: asked.append(request.url))
    page.goto((tmp_path / "bad.html").as_uri())
    page.wait_for_timeout(200)
    assert "x" in said and any("y" in text for text in said) and len(asked) == 2
    page.close()


def test_the_pointer_shows_the_tokens_text(view: Any, page_reports: dict[str, Report]) -> None:
    page = view("compare").page
    cell = page.locator(".chart.heatmap svg .mark-rect.role-mark path").nth(700)
    cell.scroll_into_view_if_needed()
    cell.hover()
    tip = page.locator("#tip")
    shown = tip.inner_text()
    layer, token = (int(shown.split(f"{name}\n")[1].split("\n")[0]) for name in ("layer", "token (position)"))
    rows = {row[:2]: row for row in page_reports["compare"].table("compare.tokens").rows}
    assert f'text\n"{rows[layer, token][2]}"' in shown, shown


def test_the_moment_of_drift_is_marked(view: Any) -> None:
    page = view("train").page
    timelines = page.locator(".chart.timeline")
    assert timelines.count() > 5
    for index in range(timelines.count()):
        assert "noise-on-labels +1" in timelines.nth(index).locator("svg").inner_html()
    assert "step 300: noise-on-labels, conformance-changed" in page.locator("figcaption").all_inner_texts()[0]
    matrix = page.locator("[data-chart]", has=page.locator("svg")).filter(has_text="layer 61").first
    assert "0.81" in matrix.inner_text()  # a small matrix is read: each cell holds its number


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("width", [1200, 390])
def test_charts_fill_their_place_and_nothing_is_cut(view: Any, kind: str, width: int) -> None:
    """Long legends and labels must not press the plot together, nor hang over the picture's edge."""
    page = view(kind, width).page
    charts = page.evaluate(
        """() => [...document.querySelectorAll(".chart svg")].map(svg => {
            const whole = svg.getBoundingClientRect();
            const box = svg.querySelector(".mark-group.role-frame.root > g > path.background");
            const frame = box.getBoundingClientRect();
            const texts = [...svg.querySelectorAll("text")].filter(t => getComputedStyle(t).opacity > 0);
            const over = texts.map(t => [t.textContent, t.getBoundingClientRect().right - whole.right])
                .filter(([text, right]) => text && right > 1);
            return [svg.closest(".chart").dataset.chart, frame.width / whole.width, over];
        })"""
    )
    assert charts
    assert [name for name, share, _ in charts if share < 0.5] == []
    assert [(name, over) for name, _, over in charts if over] == []


@pytest.mark.parametrize("width", [1200, 390])
def test_names_of_evidence_keep_to_their_column(view: Any, width: int) -> None:
    page = view("train", width).page
    wide = page.evaluate(
        "[...document.querySelectorAll('dt, dd')].filter(e => e.scrollWidth > e.clientWidth + 1).length"
    )
    assert wide == 0


def test_by_keyboard(view: Any) -> None:
    page = view("train").page
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "main"
    closed = page.locator("details.finding:not([open]) > summary").first
    closed.focus()
    page.keyboard.press("Enter")
    assert page.locator("details.finding:not([open])").count() == 0
    table = page.locator("section.table", has_text="Every tensor of the step, step 1000")
    table.locator("input[type=search]").focus()
    page.keyboard.type("layer.3 FLOAT32")
    assert table.locator("tbody tr:visible").count() == 1
    assert table.locator("[role=status]").inner_text() == "1 of 36 rows"
    page.keyboard.press("Control+A")
    page.keyboard.press("Delete")
    table.locator("thead button", has_text="std").focus()
    page.keyboard.press("Enter")
    page.keyboard.press("Enter")
    assert table.locator("th[aria-sort=descending]").inner_text().strip().endswith("std")
    numbers = [float(text) for text in table.locator("tbody td:nth-child(7)").all_inner_texts()]
    assert len(numbers) == 36 and numbers == sorted(numbers, reverse=True)
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"  # focus is seen


@pytest.mark.parametrize("kind", KINDS)
def test_for_a_screen_reader(view: Any, kind: str) -> None:
    """Landmarks, headings, names: what the accessibility tree says without any picture."""
    page = view(kind).page
    tree = page.locator("body").aria_snapshot()
    for part in ("- banner:", "- navigation ", "- main", "- contentinfo:", "[level=1]"):
        assert part in tree, part
    assert tree.index("[level=1]") < tree.index("- main")
    images = page.get_by_role("img")
    assert images.count() == page.locator("[data-chart]").count()
    for index in range(images.count()):
        assert (images.nth(index).get_attribute("aria-label") or "").endswith(
            "The table below it holds the numbers."
        )
    unnamed = page.evaluate(
        "[...document.querySelectorAll('button, input, [role=region]')].filter(e => !(e.textContent || e.labels?.length"
        " || e.getAttribute('aria-label'))).length"
    )
    assert unnamed == 0


def test_numbers_stand_under_their_headings(view: Any) -> None:
    """Also in the first column, which is a row's heading."""
    page = view("train").page
    edges = page.evaluate(
        """() => [...document.querySelectorAll("table.data thead th.n")].filter(h => h.offsetParent).map(heading => {
            const row = heading.closest("table").tBodies[0].rows[0].cells[heading.cellIndex];
            const range = document.createRange(); range.selectNodeContents(row);
            const title = document.createRange(); title.selectNodeContents(heading.querySelector("button"));
            return [heading.cellIndex, range.getBoundingClientRect().right - title.getBoundingClientRect().right];
        })"""
    )
    assert any(index == 0 for index, _ in edges)
    assert [pair for pair in edges if abs(pair[1]) > 1] == []


def test_on_paper(view: Any, tmp_path: Path) -> None:
    page = view("train").page
    page.emulate_media(media="print")
    assert not page.locator("nav").is_visible() and not page.locator(".search").first.is_visible()
    page.pdf(path=tmp_path / "page.pdf", format="A4")
    assert (tmp_path / "page.pdf").read_bytes()[:5] == b"%PDF-"
    assert page.locator("details.finding:not([open])").count() == 0  # printing opens the findings
    # nothing is cut at the right edge of 180 mm
    page.set_viewport_size({"width": 680, "height": 900})
    assert page.evaluate("document.documentElement.scrollWidth") <= 680
