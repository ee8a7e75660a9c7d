// The vocabulary: every kind a shape may have, the layer it lies on, and how a refusal goes round it.
const KINDS = new Map(Object.entries({
  block, well, pile, link, lane, label, rule, chip, digest, edge, arrow, rows, gate, kernel,
  slot, query, pill, root, strip, brick,
}));
const LAYERS = 7;
const LAYER = new Map(Object.entries({
  rule: 0, strip: 0, well: 1, edge: 1, pill: 2, lane: 2, root: 2, label: 3,
  block: 4, slot: 4, brick: 4, pile: 4, link: 4, arrow: 5,
}));
const layerOf = s => LAYER.get(s.kind) ?? LAYERS - 1;
const RING = new Map(Object.entries({
  block: 11, well: 11, pile: 11, strip: 11, link: 9, slot: 9, pill: 16, brick: 10,
}));

function primitives(s) {
  const out = KINDS.get(s.kind)(s);
  const ring = s.refused && s.kind !== "kernel" && s.w && s.h;
  return ring ? [...out, ...refusal(s, RING.get(s.kind) ?? s.h / 2 + 4.5)] : out;
}
