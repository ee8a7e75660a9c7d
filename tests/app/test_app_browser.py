"""The app as a person sees it: a real server, a real browser, blocks that really move."""

from __future__ import annotations

import re
import sys

import pytest

from tests.browser import browser_page, free_port, running_server
from tests.support import ROOT

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    where = f"http://127.0.0.1:{(port := free_port())}"
    command = [sys.executable, "-m", "streamlit", "run", "app", "--server.headless=true", f"--server.port={port}",
               "--server.address=127.0.0.1", "--server.fileWatcherType=none", "--browser.gatherUsageStats=false"]
    with running_server(command, f"{where}/_stcore/health", ROOT, tmp_path_factory.mktemp("app") / "log"):
        yield where


def at_rest(page, frame):
    page.wait_for_selector(f".kvs[data-rest='{frame}']", timeout=60_000)


def place(page, key):
    transform = page.locator(f'[data-key="{key}"]').get_attribute("transform")
    return tuple(float(n) for n in re.findall(r"-?[\d.]+", transform))


def staged_block(page):
    """A block that stands hatched in the staged lane, by its key."""
    keys = page.eval_on_selector_all("svg.st [data-key^='b.']", """nodes => nodes
        .filter(n => (n.getAttribute('aria-label') || '').includes('staged')).map(n => n.dataset.key)""")
    assert keys
    return keys[0]


def test_step_forward_and_back_moves_a_block_between_rows(address):
    with browser_page(1440, 1000, strict=False) as page:
        page.goto(address)
        page.wait_for_selector(".kvs[data-rest]", timeout=60_000)
        first = int(page.get_attribute(".kvs", "data-rest"))
        key = staged_block(page)
        staged = place(page, key)
        page.locator(".kvs .next").click()
        at_rest(page, first + 1)
        page.locator(".kvs .next").click()
        at_rest(page, first + 2)
        published = place(page, key)
        assert published[1] > staged[1] + 50
        page.locator(".kvs .back").click()
        at_rest(page, first + 1)
        assert place(page, key) == staged
        (ROOT / "tests" / "out").mkdir(exist_ok=True)
        page.screenshot(path=ROOT / "tests" / "out" / "app.png")


def test_the_address_follows_the_frame_and_reopens_it(address):
    with browser_page(1440, 1000, strict=False) as page:
        page.goto(address)
        page.wait_for_selector(".kvs[data-rest]", timeout=60_000)
        page.locator(".kvs .jump").select_option("12")
        at_rest(page, 12)
        page.wait_for_function("location.search.includes('f=13')", timeout=30_000)
        link = page.url
        page.goto("about:blank")
        page.goto(link)
        at_rest(page, 12)


def test_downloads_are_the_recording_and_the_very_frame(address):
    with browser_page(1440, 1000, strict=False) as page:
        page.goto(address)
        page.wait_for_selector(".kvs[data-rest]", timeout=60_000)
        with page.expect_download() as svg:
            page.get_by_role("button", name="Frame as SVG").click()
        text = svg.value.path().read_text()
        assert text.startswith("<svg") and "var(" not in text
        with page.expect_download() as recording:
            page.get_by_role("button", name="Recording as JSON").click()
        assert '"frames"' in recording.value.path().read_text()


def test_running_shows_progress_and_then_the_new_recording(address):
    with browser_page(1440, 1000, strict=False) as page:
        page.goto(address)
        page.wait_for_selector(".kvs[data-rest]", timeout=60_000)
        page.get_by_label("Prompt A").fill("She was in love with him, and thought so <b>bold</b>")
        page.get_by_role("button", name="Run the model").click()
        page.get_by_role("progressbar").first.wait_for(timeout=60_000)
        page.wait_for_selector(".kvs[data-rest='0']", timeout=120_000)
        assert page.locator(".kvs b", has_text="bold").count() == 0


def test_a_click_on_a_row_follows_that_token(address):
    """Addresses: the scalar is chosen on the stage, and the sidebar follows."""
    with browser_page(1280, 1000, strict=False) as page:
        page.goto(f"{address}/addresses")
        page.wait_for_selector(".kvs[data-rest='12']", timeout=60_000)
        for key, label, value in (("row/9", "Token", "25"), ("entry/0", "Token", "0"),
                                  ("axis/kv_head_local", "Head", "0")):
            page.locator(f'svg.st [data-key="{key}"]').click()
            page.wait_for_function(
                "([label, value]) => document.querySelector(`input[aria-label='${label}']`)?.value === value",
                arg=[label, value], timeout=30_000)
        at_rest(page, 12)


@pytest.mark.parametrize("word", ["identity-gate", "ledgers", "addresses", "ownership", "prefix-chain", "radix-tree"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_page_opens_on_a_stage_that_steps(address, word, scheme):
    with browser_page(1280, 1000, color_scheme=scheme) as page:
        page.goto(f"{address}/{word}")
        page.wait_for_selector(".kvs[data-rest]", timeout=60_000)
        rest = int(page.get_attribute(".kvs", "data-rest"))
        page.locator(".kvs .back" if rest else ".kvs .next").click()
        at_rest(page, rest - 1 if rest else 1)
        assert page.locator("[data-testid=stException]").count() == 0
        assert page.locator("svg.st").bounding_box()["width"] > 600
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_replay_page_shows_figures_charts_and_what_if(address, scheme):
    with browser_page(1280, 1000, color_scheme=scheme) as page:
        page.goto(f"{address}/replay?size=512&n=4")
        page.get_by_text("best evictions of this pool").wait_for(timeout=60_000)
        page.wait_for_selector("[data-testid=stVegaLiteChart] :is(canvas, svg)", timeout=60_000)
        page.get_by_role("button", name="What if the pool").click()
        page.get_by_text("pool, GiB", exact=True).first.wait_for(timeout=120_000)
        assert page.locator("[data-testid=stVegaLiteChart]").count() == 2
        assert page.locator("[data-testid=stException]").count() == 0
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        assert "…" not in "".join(page.locator("[data-testid=stMetricValue]").all_inner_texts())
