// The radix tree: slots in capsules, and the tokens of a query that stand above them.

// One KV slot: the token it holds, its slot id underneath. The same cell is free, private or tree-owned in its life.
function slot(s) {
  const has = s.token != null, o = s.owner;
  const border = o ? `stroke:${edgeOf(o)};` : has ? "stroke:var(--dim);" : "";
  const out = [rect(0, 0, s.w, s.h, "body",
    { rx: 7, style: border + dash(s) + (has && !o ? "fill:var(--held)" : "") })];
  out.push(...hatching(s, o, 3, 3, s.w - 6, s.h - 6, 4));
  if (has) out.push(text(s.w / 2, s.h / 2 - 1, s.token, "m l b c halo", halo(s)));
  out.push(text(s.w / 2, has ? s.h - 7 : s.h / 2 + 4.5, s.label, "m s d c halo", halo(s)));
  return out;
}

// A query token has no slot: it is only being compared. The sign under it says how the comparison went.
function query(s) {
  const differs = s.mark === "≠", border = differs ? "stroke:var(--no);" : s.mark ? "stroke:var(--accent);" : "";
  const out = [rect(0, 0, s.w, s.h, "body", { rx: s.h / 2, style: border + dash(s) })];
  out.push(text(s.w / 2, s.h / 2 + 5, s.token, "m l b c"));
  if (s.mark) out.push(text(s.w / 2, s.h + 17, s.mark, `b l c ${differs ? "nt" : "ac"}`));
  return out;
}

// A radix edge: the capsule around its slots.
function pill(s) {
  const out = [rect(0, 0, s.w, s.h, "cap", { rx: 13, style: dash(s) })];
  if (s.label) out.push(text(10, s.h + 16, s.label, "s d"));
  if (s.badge) out.push(...lock(s.w - 26, -9, s.badge));
  return out;
}

const root = () => [["circle", { cx: 0, cy: 0, r: 6, class: "body" }], text(0, 22, "root", "s d c")];
