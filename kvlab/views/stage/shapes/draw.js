// A kind is a pure function: shape -> primitives [tag, attributes, text]. These are the words it is written in.
const rect = (x, y, w, h, cls, more) =>
  ["rect", { x, y, width: Math.max(0, w), height: Math.max(0, h), class: cls, ...more }];
const text = (x, y, words, cls, more) => ["text", { x, y, class: cls, ...more }, String(words)];
const path = (d, cls, more) => ["path", { d, class: cls, ...more }];

// Hues repeat after seven owners, letters do not.
function hueName(owner) {
  let n = 0;
  for (const c of String(owner)) n = (n * 26 + c.codePointAt(0) + 6) % 7;   // A -> 1, Z -> 26, AA -> 27, modulo 7
  return "ABCDEFG"[(n + 6) % 7];
}
const hue = owner => `var(--${hueName(owner)})`;
// The yellow hue is too light for a border on white: it borrows the dim ink.
const edgeOf = owner => (hueName(owner) === "G" ? "var(--dim)"
  : `color-mix(in srgb,${hue(owner)} var(--rim),var(--ink))`);
const tint = (owner, share = "var(--mix)") => `fill:color-mix(in srgb,${hue(owner)} ${share},var(--ground))`;
const onHue = owner => (hueName(owner) === "A" ? "onA" : "on");

// Staged things are hatched and dashed, in proportion, so that becoming solid is continuous.
const halo = s => ({ "stroke-width": 5 * (s.hatch || 0) });
const dash = s => (s.hatch > .02 ? `stroke-dasharray:5 ${num(4 * s.hatch)};` : "");
const hatching = (s, owner, x, y, w, h, rx) => (s.hatch > .02
  ? [rect(x, y, w, h, "", { rx, style: `fill:url(#${s.uid}-${owner ? hueName(owner) : "n"});opacity:${num(s.hatch)}` })]
  : []);

function lock(x, y, count) {
  const bow = `M${num(x + 9.7)} ${num(y + 8)}v-1.6a2.3 2.3 0 0 1 4.6 0v1.6`;
  return [
    rect(x, y, 34, 18, "", { rx: 9, style: "fill:var(--ink)" }),
    rect(x + 8, y + 8, 8, 6, "", { rx: 1.5, style: "fill:var(--ground)" }),
    path(bow, "", { style: "fill:none;stroke:var(--ground);stroke-width:1.4" }),
    text(x + 23, y + 13.5, count, "m s b inv c"),
  ];
}

// A refusal never speaks by colour alone: a ring, and a cross where the ring turns.
function refusal(s, rx) {
  const at = -4.5 + rx * .293, a = num(at - 3), b = num(at + 3);
  return [
    rect(-4.5, -4.5, s.w + 9, s.h + 9, "ring", { rx }),
    ["circle", { cx: at, cy: at, r: 7.5, style: "fill:var(--no)" }],
    path(`M${a} ${a}L${b} ${b}M${b} ${a}L${a} ${b}`, "",
      { style: "fill:none;stroke:var(--ground);stroke-width:2;stroke-linecap:round" }),
  ];
}
