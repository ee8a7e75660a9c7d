"""The page that the stage is tested on, and the scripts that read a picture back; it holds no test."""

from __future__ import annotations

from typing import Any

import pytest

# The page plays host: it sets the ground and the ink, in both themes, and hears what the stage reports.
PAGE = """<!doctype html><meta charset="utf-8"><title>stage</title><link rel="icon" href="data:,">
<style>
:root { --st-background-color: #fff; --st-text-color: #1b1f24 }
:root[data-theme=dark] { --st-background-color: #0e1117; --st-text-color: #f1f3f6 }
body { margin: 20px; background: var(--st-background-color) } main { width: 980px }
</style><main></main>
<script type="module">
import host, { mount } from "./stage.js";
const ask = new URLSearchParams(location.search), load = async name => (await fetch(name + ".json")).json();
document.documentElement.dataset.theme = ask.get("theme");
const link = { get: () => +location.hash.slice(1), set: i => history.replaceState(null, "", "#" + i) };
const heard = [], picks = [], rec = await load(ask.get("r"));
const told = { onFrame: i => heard.push(i), onPick: key => picks.push(key) };
const stage = ask.has("bare") ? null : mount(document.querySelector("main"), rec, { link, ...told });
Object.assign(window, { host, mount, load, heard, picks, rec, stage, ready: true });
</script>"""

# Everything the picture paints at rest, in drawing order: tag, geometry, resolved paint, text.
LIST = """() => {
  const svg = document.querySelector('#still svg, svg.st') || document.documentElement;
  const numbers = v => (v.match(/-?[\\d.]+/g) || []).map(Number);
  const colour = v => {
    if (v.startsWith('url(')) return 'hatch ' + v.match(/-(\\w)["']?\\)/)[1];
    return v === 'none' ? v : numbers(v.replace('srgb', '')).map(c => v.startsWith('color') ? c * 255 : c);
  };
  const paint = css => {
    const inked = css.stroke !== 'none' && parseFloat(css.strokeWidth) > 0;
    const line = () => [colour(css.stroke), parseFloat(css.strokeWidth), css.strokeDasharray, css.strokeLinecap];
    return { fill: colour(css.fill), stroke: inked ? line() : [], opacity: [+css.opacity, +css.fillOpacity] };
  };
  const words = (n, css) => n.tagName !== 'text' ? null : [n.textContent, css.fontSize, css.fontWeight, css.fontFamily,
    css.textAnchor, css.stroke === 'none' || css.strokeWidth === '0px' ? '' : css.paintOrder + css.strokeLinejoin];
  const out = [];
  for (const g of svg.querySelectorAll('g[transform]')) for (const n of g.querySelectorAll('rect,circle,path,text')) {
    if (n.classList.contains('hit')) continue;
    const geometry = ['x', 'y', 'width', 'height', 'rx', 'cx', 'cy', 'r'].map(a => +(n.getAttribute(a) || 0));
    const d = n.getAttribute('d') || '', css = getComputedStyle(n);
    if ((n.tagName === 'rect' && !(geometry[2] && geometry[3])) || (n.tagName === 'path' && !d)) continue;
    out.push({ at: numbers(g.getAttribute('transform')), tag: n.tagName, geometry, d: numbers(d),
      verbs: d.replace(/[^A-Za-z]/g, ''), text: words(n, css), ...paint(css) });
  }
  for (const p of svg.querySelectorAll('pattern path')) {
    const owner = p.parentNode.id.slice(-1);
    if (out.some(o => o.fill === 'hatch ' + owner)) out.push({ tag: owner, ...paint(getComputedStyle(p)) });
  }
  return out;
}"""

# Text against text, text against the edge of the picture, text that spills out of its own body.
CLASHES = """() => {
  const svg = document.querySelector('svg.st'), all = svg.getBoundingClientRect(), bad = [];
  const texts = [...svg.querySelectorAll('text')].map(t => [t, t.getBoundingClientRect()]);
  texts.forEach(([t, a], i) => {
    if (a.left < all.left - .5 || a.right > all.right + .5 || a.top < all.top - .5 || a.bottom > all.bottom + .5) {
      bad.push('outside: ' + t.textContent);
    }
    for (const [u, b] of texts.slice(i + 1)) {
      const wide = a.left < b.right - 1 && b.left < a.right - 1;
      const high = a.top + 2.5 < b.bottom - 2.5 && b.top + 2.5 < a.bottom - 2.5;
      if (wide && high) bad.push(t.textContent + ' over ' + u.textContent);
    }
    const q = t.closest('.k').querySelector('.body')?.getBoundingClientRect();
    const spills = q && a.top > q.top && a.bottom < q.bottom && (a.left < q.left || a.right > q.right);
    if (spills) bad.push('spills: ' + t.textContent);
  });
  return bad;
}"""


def same(live: Any, still: Any, path: str = "") -> None:
    """Equal up to a rounding of 0.02 px, and of one step of 255 in a colour."""
    assert type(live) is type(still) or {type(live), type(still)} == {int, float}, (path, live, still)
    if isinstance(live, dict | list):
        assert len(live) == len(still), (path, live, still)
        for k in live if isinstance(live, dict) else range(len(live)):
            same(live[k], still[k], f"{path}.{k}")
    elif isinstance(live, int | float):
        assert live == pytest.approx(still, abs=0.6 if ".fill" in path or ".stroke.0" in path else 0.02), path
    else:
        assert live == still, path
