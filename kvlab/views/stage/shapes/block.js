// A physical block: owner stripes with letters, fill from the left to its valid rows, row ticks, handle id@generation.
function block(s) {
  const owners = s.owners || [], n = owners.length, low = s.h - 13, room = s.w - 27, blank = n || s.fill ? "" : " d";
  const border = n === 1 ? `stroke:${edgeOf(owners[0])};` : n ? "stroke:var(--dim);" : "";
  const out = [rect(0, 0, s.w, s.h, "body", { rx: 8, style: border + dash(s) })];
  out.push(...hatching(s, owners[0], 4, 4, s.w - 8, s.h - 8, 5));
  owners.forEach((owner, i) => out.push(...band(s, owner, i, n, room)));
  out.push(path(ticks(s.of, room, 23, s.h - 8, 4), "tick"));
  out.push(text(28, 23, s.label, `m l b halo${n ? "" : " d"}`, halo(s)));
  out.push(text(28, low, n || s.fill ? `${Math.round(s.fill)}/${s.of}` : "free", `s halo${blank}`, halo(s)));
  if (s.refs != null) out.push(text(s.w - 9, low, `ref ${s.refs}`, `s e halo${s.refs > 1 ? " b" : ""}`, halo(s)));
  if (s.tag) out.push(rect(22, s.h + 3, 46, 16, "thin", { rx: 3 }), text(45, s.h + 15, "#" + s.tag, "m s d c"));
  if (s.badge) out.push(...lock(s.w - 26, -9, s.badge));
  return out;
}

// One owner's band of a block. Bands follow the rows of the page, so a shared body stands in both of them.
function band(s, owner, i, n, room) {
  const top = i ? i * s.lane + 1 : 4, bottom = Math.min(i < n - 1 ? (i + 1) * s.lane - 1 : s.h - 4, s.h - 4);
  const h = bottom - top, solid = 1 - (s.hatch || 0);
  if (h <= 0) return [];
  const out = [
    rect(23, top, room * s.fill / s.of, h, "", { rx: 2, style: tint(owner) }),
    rect(4, top, 16, h, "", { rx: 4, style: `fill:${hue(owner)};fill-opacity:${num(solid)}` }),
  ];
  if (h > 14) {
    out.push(solid > .5 ? text(12, top + h / 2 + 4.5, owner, `b c ${onHue(owner)}`)
      : text(12, top + h / 2 + 4.5, owner, "b c halo", { "stroke-width": 4 }));
  }
  return out;
}

// At most sixteen ticks: a block of 256 rows still shows its sixteenths.
function ticks(of, room, x, y, long) {
  const step = Math.ceil(of / 16);
  let d = "";
  for (let i = step; i < of; i += step) d += `M${num(x + room * i / of)} ${num(y)}v${long}`;
  return d;
}

// An empty logical place, or the place a staged block still holds in the committed state.
function well(s) {
  const out = [rect(1, 1, s.w - 2, s.h - 2, "dots", { rx: 7 })];
  if (s.label) out.push(text(s.w / 2, s.h / 2 + 4.5, s.label, "m s d c"));
  return out;
}

// A card that stands for many blocks that the picture does not show one by one.
function pile(s) {
  const w = s.w - 8, h = s.h - 8, style = s.owner ? `stroke:${edgeOf(s.owner)}` : "", left = s.owner ? 20 : 0;
  const out = [[8, 0], [4, 4], [0, 8]].map(([x, y]) => rect(x, y, w, h, "body", { rx: 8, style }));
  if (s.owner) out.push(...stripe(s.owner, 4, 12, h - 8));
  out.push(text(left + (w - left) / 2, 8 + h / 2 + 4.5, s.label, `s c${s.owner ? "" : " d"}`));
  return out;
}

// The same body seen from a row that is not next to it: one body, and here its handle.
function link(s) {
  return [
    rect(0, 0, s.w, s.h, "body", { rx: 6, style: `stroke:${edgeOf(s.owner)};` + dash(s) }),
    ...hatching(s, s.owner, 21, 3, s.w - 24, s.h - 6, 3),
    ...stripe(s.owner, 3, 3, s.h - 6),
    text(25, s.h / 2 + 4.5, s.label, "m s halo", halo(s)),
  ];
}

const stripe = (owner, x, y, h) => [
  rect(x, y, 16, h, "", { rx: 4, style: `fill:${hue(owner)}` }),
  text(x + 8, y + h / 2 + 4.5, owner, `b c ${onHue(owner)}`),
];
