// Everything that is not the picture: transport, caption, scoreboard, the frame in words.
const ICONS = { first: "M3 3h2v10H3zM13 3v10L6 8z", back: "M11 3v10L4 8z", play: "M4 2.5v11l9-5.5z",
  pause: "M4 3h3v10H4zM9 3h3v10H9z", next: "M5 3v10l7-5z" };
const KIND_WORDS = { committed: "committed", staged: "staged, not visible yet", refused: "refused", start: "start",
  read: "read, nothing changes" };
const KEY_WORDS = [[["Space"], "play or pause"], [["←", "→"], "step"], [["Home", "End"], "ends"],
  [["↑", "↓"], "walk the shapes"], [["Enter"], "pick"], [["?"], "these keys"]];

function icon(name) {
  const svg = svgEl("svg", { viewBox: "0 0 16 16", "aria-hidden": "true" });
  svg.append(svgEl("path", { d: ICONS[name] }));
  return svg;
}

function button(cls, name, title, inside) {
  const b = el("button", cls);
  b.type = "button";
  b.setAttribute("aria-label", name);
  b.title = title;
  b.append(inside);
  return b;
}

const option = (value, words) => Object.assign(el("option", "", words), { value });

function makeBar() {
  const bar = el("div", "bar"), track = el("div", "track"), range = el("input"), jumpto = el("label", "jumpto");
  const ticks = el("span", "ticks"), jump = el("select", "jump"), speed = el("select", "speed");
  Object.assign(range, { type: "range", min: 0, step: .01 });
  range.setAttribute("aria-label", "Timeline");
  ticks.setAttribute("aria-hidden", "true");
  jump.setAttribute("aria-label", "Jump to frame");
  speed.setAttribute("aria-label", "Speed");
  speed.append(option(.5, "0.5×"), option(1, "1×"), option(2, "2×"));
  speed.value = 1;
  track.append(el("i"), el("i", "done"), ticks, range);
  jumpto.append(el("span"), jump);
  bar.append(
    button("first", "First frame", "First (Home)", icon("first")),
    button("back", "Step back", "Back (←)", icon("back")),
    button("play", "Play", "Play or pause (Space)", icon("play")),
    button("next", "Step forward", "Step (→)", icon("next")),
    track, jumpto, speed, button("help", "Keys", "Keys (?)", "?"));
  bar.querySelector(".help").setAttribute("aria-expanded", "false");
  return bar;
}

function makeKeys() {
  const keys = el("div", "keys");
  keys.hidden = true;
  for (const [names, words] of KEY_WORDS) {
    const row = keys.appendChild(el("div"));
    for (const name of names) row.append(el("kbd", "", name), " ");
    row.append(words);
  }
  return keys;
}

function makePanel(uid) {
  const under = el("div", "under"), bar = makeBar(), keys = makeKeys(), caption = el("div", "caption");
  const title = el("h3"), why = el("p"), score = el("div", "score"), foot = el("div", "foot");
  const details = el("details"), list = el("ul"), said = el("p", "said");
  const $ = q => bar.querySelector(q), range = $("input");
  title.id = `${uid}t`;
  caption.append(title, why);
  caption.setAttribute("aria-live", "polite");
  score.setAttribute("role", "list");
  score.setAttribute("aria-label", "Scoreboard");
  details.append(el("summary", "", "This frame in words"), list);
  said.setAttribute("aria-live", "polite");
  foot.append(details, said);
  under.append(bar, keys);

  function load(frames) {
    const last = frames.length - 1, place = i => `calc(8px + (100% - 16px) * ${last ? i / last : 0})`;
    range.max = last;
    $(".track").classList.toggle("dense", last > 80);
    $(".ticks").replaceChildren(...frames.map((f, i) => {
      const tick = el("u", f.kind);
      tick.style.left = place(i);
      return tick;
    }));
    $(".jump").replaceChildren(...frames.map((f, i) => option(i, `${i + 1} / ${last + 1}  ${f.title}`)));
    $(".play").setAttribute("aria-disabled", !last);
  }

  function tell(frames, at) {
    const f = frames[at], last = frames.length - 1;
    const kind = (f.kind === "refused" ? "✕ " : "") + KIND_WORDS[f.kind];
    title.replaceChildren(f.title, el("span", "kind " + f.kind, kind));
    why.textContent = f.why;
    score.replaceChildren(...(f.board || []).map(c => scoreCell(c, frames[at - 1]?.board)));
    list.replaceChildren(...(f.twin || []).map(sentence => el("li", "", sentence)));
    range.value = at;
    range.setAttribute("aria-valuetext", `${at + 1} of ${last + 1}: ${f.title}, ${f.kind}`);
    $(".done").style.width = `calc((100% - 16px) * ${last ? at / last : 0})`;
    $(".jump").value = at;
    $(".jumpto span").textContent = `${at + 1} / ${last + 1}`;
    for (const [q, off] of [[".first", !at], [".back", !at], [".next", at === last]]) {
      $(q).setAttribute("aria-disabled", off);                            // not `disabled`: the focus must stay
    }
  }

  function playing(on) {
    $(".play").replaceChildren(icon(on ? "pause" : "play"));
    $(".play").setAttribute("aria-label", on ? "Pause" : "Play");
    caption.setAttribute("aria-live", on ? "off" : "polite");
  }

  function help() {
    keys.hidden = !keys.hidden;
    $(".help").setAttribute("aria-expanded", String(!keys.hidden));
  }

  return { parts: [under, caption, score, foot], $, range, load, tell, playing, help, helping: () => !keys.hidden,
    speed: () => +$(".speed").value, say: words => { said.textContent = words; } };
}

function scoreCell(c, before) {
  const box = el("div"), value = el("strong"), was = before?.find(o => o.label === c.label)?.value;
  const figure = v => (typeof v === "number" ? v.toLocaleString("en") : String(v));
  const change = typeof was === "number" && typeof c.value === "number" ? c.value - was : 0;
  box.setAttribute("role", "listitem");
  value.append(figure(c.value) + " ");
  if (c.unit) value.append(el("small", "", c.unit));
  if (change) value.append(el("b", "", (change > 0 ? "+" : "−") + figure(Math.abs(change))));
  box.append(el("span", "", c.label), value);
  return box;
}
