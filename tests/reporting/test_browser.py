"""The page in a real browser: it opens from disk without an error, drawings show and move, links and tables work.

Needs chromium (Debian's package will do; another is named by CHROMIUM) and playwright from PyPI; without them it is skipped.
"""

import os
import shutil

import pytest
import torch
from torch import nn

from torchgraft import zoo
from torchgraft.reporting import report

CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium; install it, or name it with CHROMIUM=path"),
]


@pytest.fixture(scope="module")
def browser():
    playwright = pytest.importorskip(
        "playwright.sync_api", reason="playwright is not installed: pip install playwright"
    )
    with playwright.sync_playwright() as driver:
        started = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield started
        started.close()


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x):
        return x + self.second(torch.relu(self.first(x)))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    torch.manual_seed(0)
    place = tmp_path_factory.mktemp("reports") / "blocks"
    model = nn.Sequential(*[Block() for _ in range(3)]).eval()
    report(model, torch.randn(2, 16), folder=place, name="three blocks")
    return place


@pytest.fixture
def page(browser, folder):
    context = browser.new_context(viewport={"width": 1400, "height": 900}, offline=True, color_scheme="light")
    opened = context.new_page()
    problems = []
    opened.on("console", lambda message: problems.append(message.text))
    opened.on("pageerror", lambda error: problems.append(str(error)))
    opened.on("requestfailed", lambda request: problems.append(request.url))
    opened.goto((folder / "index.html").as_uri())
    yield opened
    assert problems == []
    context.close()


def test_opens(page):
    assert page.title() == "three blocks · torchgraft"
    assert page.locator("main > section").count() == 13
    assert page.locator(".facts li").count() == 5


def test_every_drawing_shows(page):
    for level in ("module", "function", "aten", "core_aten", "joint"):
        stage = page.locator(f"#level-{level} .stage")
        stage.scroll_into_view_if_needed()
        page.wait_for_function(f"document.querySelector('#level-{level} .stage svg')")
        boxes = stage.locator("svg g.b[id]")
        assert boxes.count() >= 7
        # It has colours of the page's own style sheet, and a size on the screen.
        first = boxes.first.locator("rect").first
        assert first.bounding_box()["width"] > 5
        assert first.evaluate("box => getComputedStyle(box).fill") not in ("rgb(0, 0, 0)", "none")


def test_drawing_moves_zooms_and_is_searched(page):
    page.locator("#level-module .stage").scroll_into_view_if_needed()
    page.wait_for_function("document.querySelector('#level-module .stage svg')")
    view = lambda: [float(part) for part in page.locator("#level-module .stage svg").get_attribute("viewBox").split()]
    start = view()
    page.click("#level-module [data-do=in]")
    assert view()[2] == pytest.approx(start[2] / 1.3)
    page.click("#level-module [data-do=out]")
    place = page.locator("#level-module .stage").bounding_box()
    page.mouse.move(place["x"] + 200, place["y"] + 150)
    page.mouse.down()
    page.mouse.move(place["x"] + 100, place["y"] + 100, steps=4)
    page.mouse.up()
    assert view()[0] > start[0] + 50 and view()[1] > start[1] + 25
    page.keyboard.down("Control")
    page.mouse.wheel(0, -200)
    page.keyboard.up("Control")
    page.wait_for_function(
        f"document.querySelector('#level-module .stage svg').viewBox.baseVal.width < {start[2] * 0.9}"
    )
    page.click("#level-module [data-do=fit]")
    page.select_option("#level-module .viewer select", label="every node")
    page.fill("#level-module .viewer .find input", "2.second")
    assert page.locator("#level-module .found").count() >= 1
    assert "of" in page.locator("#level-module output").inner_text()


def test_links_work(page, folder):
    for link in page.locator("nav a[href^='#']").all():
        link.click()
        target = link.get_attribute("href")
        page.wait_for_function(
            "target => Math.abs(document.querySelector(target).getBoundingClientRect().top - innerHeight / 2) <= innerHeight / 2",
            arg=target,
        )
    files = {link.get_attribute("href") for link in page.locator("main a").all()} - {None}
    files = {name for name in files if not name.startswith("#")}
    assert len(files) > 30 and all((folder / name).is_file() for name in files)
    with page.expect_navigation():
        page.locator("#level-module .viewer .bar > a").click()
    assert page.url.endswith(".svg") and page.locator("svg").count() == 1
    page.go_back()


def test_tabs_tables_tree_and_texts(page):
    page.click("#tab-module-1")
    assert page.locator("#panel-module-1").is_visible() and not page.locator("#panel-module-0").is_visible()
    assert "def forward" in page.locator("#code-module").inner_text()
    calls = page.locator("#panel-call-logs-0")
    assert calls.locator("tbody tr:visible").count() == 12
    calls.locator(".find input").fill("relu")
    assert calls.locator("tbody tr:visible").count() == 3
    calls.locator(".find input").fill("")
    calls.locator("th", has_text="time").click()
    calls.locator("th", has_text="time").click()
    seconds = [float(cell.get_attribute("data-value")) for cell in calls.locator("tbody tr td:nth-child(5)").all()]
    assert seconds == sorted(seconds, reverse=True)
    page.click("[data-tree=close]")
    assert page.locator(".tree tbody tr:visible").count() == 4
    page.click("[data-tree=open]")
    assert page.locator(".tree tbody tr:visible").count() == 10
    left, right = page.locator(".pane code").all()
    assert "def forward" in left.inner_text() and "aten::linear" in right.inner_text()


def test_sections_close_and_dark_is_dark(page):
    page.click("#summary summary")
    assert not page.locator("#summary .tree").is_visible()
    colour = lambda: page.evaluate("getComputedStyle(document.body).backgroundColor")
    before = colour()
    page.click("#theme")
    assert colour() != before and page.evaluate("document.documentElement.dataset.theme") == "dark"
    page.locator("#level-aten .stage").scroll_into_view_if_needed()
    page.wait_for_function("document.querySelector('#level-aten .stage svg')")
    paper = page.locator("#level-aten .stage .paper").evaluate("box => getComputedStyle(box).fill")
    assert paper == "rgb(15, 23, 42)"


def test_narrow_window_does_not_scroll_sideways(page):
    page.set_viewport_size({"width": 420, "height": 800})
    assert page.evaluate("document.documentElement.scrollWidth") <= 420


@pytest.mark.slow
@pytest.mark.zoo
def test_resnet50(browser, tmp_path):
    report(zoo.create("resnet50").eval(), zoo.example_inputs("resnet50"), folder=tmp_path / "out", name="zoo:resnet50")
    page, problems = browser.new_page(), []
    page.on("console", lambda message: problems.append(message.text))
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.goto((tmp_path / "out" / "index.html").as_uri())
    page.locator("#level-joint .stage").scroll_into_view_if_needed()
    page.wait_for_function("document.querySelectorAll('#level-joint .stage g.b').length > 500")
    assert problems == []
