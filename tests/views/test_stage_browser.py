"""The stage in a real browser: keys, motion, words, hosts; and a still equals the stage at rest, mark by mark."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kvlab.views.stage import source
from tests.browser import browser_page, serve
from tests.views.sample import gallery, story
from tests.views.stage_page import CLASHES, LIST, PAGE, same

pytestmark = pytest.mark.browser

RECORDINGS = {"story": story(), "gallery": gallery()}
LAST = len(RECORDINGS["story"].frames) - 1


@pytest.fixture(scope="module")
def site() -> Iterator[tuple[Any, str, dict[str, str]]]:
    pages = {"index.html": PAGE, "stage.js": source()}
    pages |= {f"{name}.json": json.dumps(r.to_dict()) for name, r in RECORDINGS.items()}
    with serve(pages) as base, browser_page(1280, 800) as page:
        page.set_default_timeout(10_000)
        yield page, base, pages


@pytest.fixture
def show(site: tuple[Any, str, dict[str, str]]) -> Iterator[Callable[..., Any]]:
    page, base, _ = site

    def open_at(recording: str = "story", frame: int = 0, theme: str = "light", query: str = "") -> Any:
        page.goto("about:blank")
        page.goto(f"{base}/?r={recording}&theme={theme}{query}#{frame}")
        page.wait_for_function("window.ready")
        return page

    yield open_at
    page.emulate_media(reduced_motion="null")


def rest(page: Any, frame: int) -> None:
    page.wait_for_selector(f".kvs[data-rest='{frame}']")


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_resting_picture_equals_the_still_for_every_kind(site, show, theme: str) -> None:
    page, base, pages = site
    live = show("gallery", 0, theme).evaluate(LIST)
    assert len(live) > 200 and {p["tag"] for p in live} >= {"rect", "circle", "path", "text"}
    pages["still.svg"] = RECORDINGS["gallery"].frame(0).svg(theme)
    page.goto(f"{base}/still.svg")
    same(live, page.evaluate(LIST))


def test_resting_picture_equals_the_still_in_every_frame(show) -> None:
    page = show()
    for i in range(LAST + 1):
        page.evaluate("i => stage.seek(i)", i)
        live = page.evaluate(LIST)
        still = RECORDINGS["story"].frame(i).svg()
        page.evaluate("svg => { document.body.insertAdjacentHTML('afterbegin', `<p id=still>${svg}</p>`); }", still)
        same(live, page.evaluate(LIST), f"frame {i}")
        page.evaluate("document.querySelector('#still').remove()")


def test_nothing_overlaps_or_is_cut_off(show) -> None:
    page = show()
    for i in range(LAST + 1):
        page.evaluate("i => stage.seek(i)", i)
        assert page.evaluate(CLASHES) == [], f"frame {i}"
    assert page.evaluate("document.documentElement.scrollHeight") <= 800


def test_jump_equals_step_and_back_equals_forward(show) -> None:
    page, forward = show(), []
    page.locator(".speed").select_option("2")
    page.evaluate("document.querySelector('[data-key=b0]').mark = 1")
    for i in range(LAST + 1):
        page.evaluate("i => stage.go(i)", i)
        rest(page, i)
        forward.append(page.evaluate(LIST))
    for i in reversed(range(LAST)):
        page.evaluate("i => stage.go(i)", i)
        rest(page, i)
        assert page.evaluate(LIST) == forward[i], f"back at frame {i}"
    assert page.evaluate("document.querySelector('[data-key=b0]').mark") == 1, "the node of a key lives on"
    for i in (LAST, 2, 5):
        page.locator(".jump").select_option(str(i))
        rest(page, i)
        assert page.evaluate(LIST) == forward[i], f"jump to frame {i}"


def test_keyboard(show) -> None:
    page = show("story", 2)
    page.locator(".next").focus()
    for key, frame in (("ArrowRight", 3), ("ArrowLeft", 2), ("End", LAST), ("ArrowRight", LAST), ("Home", 0)):
        page.keyboard.press(key)
        rest(page, frame)
    assert page.evaluate("document.activeElement.className") == "next", "the focus stays"
    assert page.url.endswith("#0")
    page.locator("input[type=range]").focus()
    page.keyboard.press("ArrowUp")
    rest(page, 1)
    assert page.get_attribute("input[type=range]", "aria-valuetext") == f"2 of {LAST + 1}: Fork A into D, committed"
    page.keyboard.press("?")
    assert page.locator(".keys").is_visible()
    page.keyboard.press("Escape")
    assert not page.locator(".keys").is_visible()


def test_shapes_are_walked_and_picked_by_keyboard_and_pointer(show) -> None:
    page = show("story", 1)
    page.locator(".k[tabindex='0']").focus()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    page.locator("[data-key=b2]").click()
    assert page.evaluate("picks") == ["b4", "b2"], "the walk is in reading order"
    assert page.locator(".said").text_content() == "block 2 of A and D, 2 of 4 rows valid"
    assert page.locator(".k.picked").count() == 1
    assert page.get_attribute("[data-key=b2]", "aria-label") == "block 2 of A and D, 2 of 4 rows valid"


def test_focus_survives_a_shape_that_leaves(show) -> None:
    page = show("story", 6)
    page.locator("[data-key=b5]").focus()
    page.keyboard.press("ArrowRight")
    rest(page, 7)
    page.keyboard.press("ArrowLeft")
    rest(page, 6)


def test_play_pauses_and_the_host_hears_only_of_rests(site, show) -> None:
    show()
    page = site[0].context.browser.new_page()
    page.clock.install()
    page.goto(f"{site[1]}/?r=story&theme=light#0")
    page.wait_for_function("window.ready")
    page.clock.pause_at(page.evaluate("Date.now()") + 1000)
    heard = "heard.splice(0)"
    page.evaluate(heard)
    page.locator(".play").focus()
    page.keyboard.press("Space")
    assert page.get_attribute(".play", "aria-label") == "Pause"
    page.clock.run_for(350 + 500)
    assert page.evaluate("[stage.frame(), heard.length]") == [1, 0]
    page.clock.run_for(8000)
    playing = page.evaluate("stage.frame()")
    assert playing > 1 and page.evaluate("heard") == []
    page.evaluate("stage.pause()")
    page.clock.run_for(20_000)
    assert page.evaluate("stage.frame()") == playing and page.evaluate(heard) == [playing]
    page.evaluate("stage.play()")
    page.clock.run_for(90_000)
    assert page.evaluate("[stage.frame(), heard]") == [LAST, [LAST]]
    assert page.get_attribute(".play", "aria-label") == "Play"
    page.close()


def test_scrub_shows_the_middle_of_a_move_and_settles_on_a_frame(show) -> None:
    page = show("story", 6)
    box = page.locator("input[type=range]").bounding_box()
    at = [box["x"] + 8 + (box["width"] - 16) * f / LAST for f in (6, 6.5)]
    page.mouse.move(at[0], box["y"] + 17)
    page.mouse.down()
    page.evaluate("heard.splice(0)")
    page.mouse.move(at[1], box["y"] + 17, steps=5)
    x = page.evaluate("+document.querySelector('[data-key=b5]').getAttribute('transform').match(/[\\d.]+/)[0]")
    assert 400 + 20 < x < 531 - 20, "half way from its place to the pile"
    assert page.evaluate("heard") == []
    page.mouse.move(at[0] + 4, box["y"] + 17)
    page.mouse.up()
    rest(page, 6)


def test_a_shape_that_leaves_glides_to_the_pile_and_back(show) -> None:
    page = show("story", 6)
    where = """v => {
      stage.seek(v);
      const n = document.querySelector('[data-key=b5]');
      return n && [+n.getAttribute('transform').match(/[\\d.]+/)[0], +(n.style.opacity || 1)];
    }"""
    there = [page.evaluate(where, v) for v in (6.25, 6.5, 6.75, 6.999)]
    assert [opacity for _, opacity in there[:3]] == [1, 1, 1] and there[3][1] < 0.05
    assert sorted(x for x, _ in there) == [x for x, _ in there] and there[3][0] == pytest.approx(531, abs=0.1)
    assert page.evaluate(where, 7) is None
    assert [page.evaluate(where, v) for v in (6.999, 6.75, 6.5, 6.25)] == there[::-1]


def test_reduced_motion_rests_in_the_same_turn(site, show) -> None:
    site[0].emulate_media(reduced_motion="reduce")
    page = show("story", 2)
    assert page.evaluate("(stage.go(3), document.querySelector('.kvs').dataset.rest)") == "3"
    assert page.locator(".shake").count() == 0
    assert page.locator(".ring").count() == 1, "the ring stays"


def test_refusal_has_a_ring_a_cross_a_reason_and_one_shake_forwards(show) -> None:
    page = show("story", 2)
    page.evaluate("stage.go(3)")
    rest(page, 3)
    assert page.get_attribute("[data-key=b3] .in", "class") == "in shake"
    assert page.locator("[data-key=b3] .ring + circle + path").count() == 1
    assert page.locator("[data-key=why] text").text_content() == "✕ fault_after_partial_reservation"
    assert page.locator("[data-key=digest] text").last.text_content() == "unchanged"
    assert page.locator(".kind").text_content() == "✕ refused"
    assert page.locator(".track u.refused").count() == 1
    page.evaluate("document.querySelector('.shake').classList.remove('shake'); stage.go(4)")
    rest(page, 4)
    page.evaluate("stage.go(3)")
    rest(page, 3)
    assert page.locator(".shake").count() == 0


def test_words_of_a_prompt_never_run(show) -> None:
    page = show("gallery")
    label = "<img src=x onerror=window.pwned=1>"
    hostile = """label => {
      const f = rec.frames[0], words = ['label', 'sub', 'says', 'tag', 'token', 'note', 'cls', 'mark'];
      for (const s of f.shapes) for (const k of words) if (k in s) s[k] = label;
      Object.assign(f, { title: label, why: label, kind: label, twin: [label] });
      f.board = [{ label, value: label, unit: label }];
      f.shapes.push({ ...f.shapes.find(s => s.kind === 'block'), key: label, owners: [label],
        uid: label, hatch: 1 });
      f.shapes.push({ key: 'odd', kind: label, x: 0, y: 0 }, { key: 'odder', kind: 'constructor', x: 0, y: 0 });
      stage.update({ ...rec, title: label });
      return document.querySelectorAll('.kvs img').length;
    }"""
    assert page.evaluate(hostile, label) == 0
    links = page.evaluate("[...document.querySelectorAll('.st [style*=url]')].map(n => n.getAttribute('style'))")
    assert len(links) > 5 and all(re.match(r"fill:url\(#kvs\d+-[nA-G]\);", style) for style in links)
    page.locator("summary").click()
    page.wait_for_timeout(50)
    assert page.evaluate("window.pwned") is None
    assert page.locator(".caption h3").text_content().startswith(label)
    assert label in page.locator(".foot li").all_text_contents()


def test_one_frame_is_a_recording_too(show) -> None:
    page = show("gallery")
    assert page.get_attribute(".play", "aria-disabled") == "true"
    page.locator(".play").click(force=True)
    page.locator(".kvs").press("ArrowRight")
    rest(page, 0)
    assert page.locator(".jumpto span").text_content() == "1 / 1"
    assert page.locator(".ticks u").evaluate("u => u.style.left") == "calc(0% + 8px)"
    assert page.get_attribute(".play", "aria-label") == "Play"


def test_scoreboard_shows_what_changed(show) -> None:
    page = show("story", 5)
    cells = page.locator(".score > div").all_text_contents()
    assert cells == ["free blocks7 −1", "K/V copied0.5 KiB"]


def test_theme_follows_the_ground_that_the_host_paints(show) -> None:
    page = show("story", 0, "dark")
    assert page.get_attribute(".kvs", "data-dark") == ""
    page.evaluate("document.documentElement.dataset.theme = 'light'")
    page.wait_for_selector(".kvs:not([data-dark])")
    cut_short = """() => {
      const main = document.querySelector('main'), probe = document.querySelector('.probe');
      const colour = () => getComputedStyle(probe).color;
      document.documentElement.dataset.theme = 'dark';
      const during = colour();
      main.style.display = 'none';
      const after = colour();
      main.style.display = '';
      return [during, after];
    }"""
    assert page.evaluate(cut_short)[1] == "rgb(14, 17, 23)"
    page.wait_for_selector(".kvs[data-dark]")
    page.evaluate("document.documentElement.dataset.theme = 'light'")
    page.wait_for_selector(".kvs:not([data-dark])")
    page.evaluate(
        "document.documentElement.style.setProperty('--st-background-color', 'color-mix(in srgb, black, navy)')"
    )
    page.wait_for_selector(".kvs[data-dark]")


def test_anywidget_host(show) -> None:
    page = show(query="&bare=1")
    page.evaluate("""async () => {
      const traits = { recording: rec, frame: 2, picked: null }, on = {};
      window.sent = [];
      window.listeners = on;
      window.push = (k, v) => { traits[k] = v; on['change:' + k](); };
      const model = { get: k => traits[k], set: (k, v) => { traits[k] = v; sent.push([k, v]); }, save_changes() {},
        on: (e, f) => { on[e] = f; }, off: e => { delete on[e]; } };
      window.leave = host().render({ model, el: document.querySelector('main') });
    }""")
    rest(page, 2)
    assert page.evaluate("sent") == []
    page.evaluate("push('frame', 4)")
    rest(page, 4)
    page.locator(".back").click()
    rest(page, 3)
    page.locator("[data-key=b0]").click()
    assert page.evaluate("sent.splice(0)") == [["frame", 4], ["frame", 3], ["picked", "b0"]]
    page.evaluate("async () => push('recording', await load('gallery'))")
    rest(page, 0)
    assert page.evaluate("sent") == [["frame", 0]], "a frame that the new recording lacks"
    page.evaluate("leave()")
    assert page.locator(".kvs").count() == 0 and page.evaluate("Object.keys(listeners)") == []


def test_streamlit_host(show) -> None:
    page = show(query="&bare=1")
    page.evaluate("""() => {
      window.sent = [];
      const parentElement = document.querySelector('main').attachShadow({ mode: 'open' });
      const list = d => [d.recording, d.frame, d.report, d.seek];
      window.run = d => host({ parentElement, data: list(d), setStateValue: (k, v) => sent.push([k, v]) });
      window.node = () => parentElement.querySelector('.kvs');
      run({ recording: rec, frame: 1, report: false });
      window.born = node();
    }""")
    rest(page, 1)
    page.locator(".next").click()
    rest(page, 2)
    page.locator("[data-key=b0]").click()
    assert page.evaluate("sent.splice(0)") == [["picked", "b0"]], "frames are reported only on request"
    page.evaluate("void run({ recording: rec, frame: 5, report: true })")
    page.wait_for_timeout(50)
    rest(page, 2)
    page.locator(".next").click()
    rest(page, 3)
    assert page.evaluate("sent.splice(0)") == [["frame", 3]]
    page.evaluate("void run({ recording: rec, frame: 5, report: true, seek: 'a' })")
    rest(page, 5)
    page.evaluate("void run({ recording: rec, frame: 0, report: true, seek: 'a' })")
    page.wait_for_timeout(50)
    rest(page, 5)
    assert page.evaluate("node() === born"), "a rerun keeps the stage"
    page.evaluate("async () => { window.end = run({ recording: await load('gallery'), frame: 0 }); }")
    rest(page, 0)
    assert page.locator(".caption h3").text_content().startswith("Every kind")
    assert page.evaluate("(end(), node())") is None
