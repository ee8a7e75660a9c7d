// One shape at progress t of a motion between two frames. Back is the same motion reversed: t runs from 1 to 0.
const MOVES = ["x", "y", "w", "h", "x2", "y2", "fill", "grey", "hatch"];

// `way` is {from, leave}: where the motion starts if not where the shape was, and where a shape goes that is no more.
function between(a, b, t, way = {}) {
  if (!a) return arriving(b, t, way.from);
  if (!b) return leaving(a, t, way.leave);
  const start = { ...a, ...way.from }, s = { ...(t < .5 ? a : b), alpha: b.transient ? 0 : 1 };
  for (const field of MOVES) {
    const u = start[field] ?? (field in b ? 0 : undefined), v = b[field] ?? 0;
    if (u !== undefined) s[field] = u + (v - u) * ease(t);
  }
  const had = a.owners?.length || 0, has = b.owners?.length || 0;
  if (t < 1 && had !== has && had && has) s.owners = had > has ? a.owners : b.owners;   // both bands while one retracts
  return s;
}

// New words wait for the last 55 %; a thing with a `from` comes from there; a transient one dissolves where it lands.
function arriving(b, t, from) {
  if (b.transient) return { ...b, ...ride(from, b, t), alpha: from && t < 1 ? 1 - span(t, .8, 1) : 0 };
  return { ...b, ...ride(from, b, t), alpha: from ? 1 : span(t, .45, 1) };
}

// Gone things fade in the first 40 %; a thing with a place to go glides there and is gone only at rest.
function leaving(a, t, leave) {
  if (a.transient) return { ...a, alpha: 0 };
  if (!leave) return { ...a, alpha: 1 - span(t, 0, .4) };
  return { ...a, ...ride(a, leave, t), alpha: 1 - span(t, .85, 1) };
}

function ride(start, end, t) {
  const s = {};
  for (const field of MOVES) {
    if (start && field in start && field in end) s[field] = start[field] + (end[field] - start[field]) * ease(t);
  }
  return s;
}
