// Connections and things that travel.

// Across, down, across, with round corners, so that trees read as trees.
function edge(s) {
  const dx = s.x2 - s.x, dy = s.y2 - s.y, mid = Math.min(18, dx / 2);
  const r = Math.max(0, Math.min(9, Math.abs(dy) / 2, mid)), turn = Math.sign(dy) * r;
  const [a, b, c, e] = [mid - r, dy - turn, mid + r, dy].map(num);
  const d = Math.abs(dy) < .01 ? `M0 0H${num(dx)}`
    : `M0 0H${a}Q${num(mid)} 0 ${num(mid)} ${num(turn)}V${b}Q${num(mid)} ${e} ${c} ${e}H${num(dx)}`;
  return [path(d, "tick", { style: "stroke-width:1.5" })];
}

function arrow(s) {
  const dx = s.x2 - s.x, dy = s.y2 - s.y, long = Math.hypot(dx, dy) || 1, ux = dx / long, uy = dy / long;
  const hx = dx - ux * 9, hy = dy - uy * 9;
  const [lx, ly, rx, ry] = [hx - uy * 5, hy + ux * 5, hx + uy * 5, hy - ux * 5].map(num);
  return [
    path(`M0 0L${num(hx)} ${num(hy)}`, "",
      { style: "fill:none;stroke:var(--accent);stroke-width:2;stroke-dasharray:5 4" }),
    path(`M${num(dx)} ${num(dy)}L${lx} ${ly}L${rx} ${ry}Z`, "ac"),
  ];
}

// K/V rows on their way from one block to another.
const rows = s => [rect(0, 0, s.w, s.h, "", { rx: 2, style: tint(s.owner, "70%") })];

// The mapped frontier of a slot: a kernel may run up to it and not one row further.
const gate = s => [
  path(`M0 -5V${num(s.h + 5)}`, "", { style: "fill:none;stroke:var(--accent);stroke-width:2.5;stroke-linecap:round" }),
  text(0, -10, s.label, "s b c ac halo", { "stroke-width": 4 }),
];

const kernel = s => [
  path("M0 0l-7 12h14z", "", { style: `fill:var(--${s.refused ? "no" : "ink"})` }),
  text(12, 12, (s.refused ? "✕ " : "") + s.label, `s b${s.refused ? " nt" : ""}`),
];
