// Virtual memory: reserved addresses, and the bricks that are mapped behind them.

// Reserved virtual addresses: dotted, ruled, and backed by nothing.
function strip(s) {
  const out = [rect(0, 0, s.w, s.h, "dots", { rx: 8 }), path(ticks(s.of, s.w, 0, s.h - 6, 6), "tick")];
  if (s.label) out.push(text(s.w / 2, s.h / 2 + 4.5, s.label, "s d c"));
  return out;
}

// A physical page bundle: one brick, a cell per row. Valid rows carry the owner; grey rows are old bytes.
function brick(s) {
  const o = (s.owners || [])[0], wide = (s.w - 10) / s.of;
  const style = `stroke-width:2;stroke:${o ? edgeOf(o) : "var(--dim)"}`;
  const out = [rect(0, 0, s.w, s.h, "body", { rx: 6, style }), text(8, 16, s.label, "m s b")];
  if (s.note) out.push(text(s.w - 8, 16, s.note, "s d e"));
  for (let i = 0; i < s.of; i++) out.push(...cell(s, o, i, 6.5 + i * wide, wide - 3));
  return out;
}

function cell(s, o, i, x, w) {
  const valid = clamp((s.fill || 0) - i, 0, 1), old = clamp((s.grey || 0) - i, 0, 1), y = 23, h = s.h - 28;
  const out = [rect(x, y, w, h, "thin", { rx: 3 })];
  if (old > 0) {
    out.push(rect(x, y, w * old, h, "", { rx: 3, style: "fill:var(--grey)" }));
    out.push(rect(x, y, w * old, h, "", { rx: 3, style: `fill:url(#${s.uid}-n);opacity:.6` }));
  }
  if (valid > 0) {
    out.push(rect(x, y, w * valid, h, "", { rx: 3, style: tint(o || "A", "42%") }));
    out.push(rect(x, y + h - 4, w * valid, 4, "", { rx: 2, style: `fill:${hue(o || "A")}` }));
  }
  const tone = valid > 0 ? " b" : old > 0 ? "" : " d";
  if (s.base != null && w >= 19) out.push(text(x + w / 2, y + h / 2 + 3, s.base + i, "m s c" + tone));
  return out;
}
