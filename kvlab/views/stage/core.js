// Numbers and nodes that every part needs.
const NS = "http://www.w3.org/2000/svg";
const MOVE = 400;                                                // milliseconds of one motion at normal speed

const clamp = (v, low, high) => Math.min(high, Math.max(low, v));
const ease = t => (t < .5 ? 2 * t * t : 1 - 2 * (1 - t) * (1 - t));       // slow in, slow out: the eye can follow
const span = (t, a, b) => clamp((t - a) / (b - a), 0, 1);                 // a sub-interval of the motion
const num = v => +(+v).toFixed(2);

// Words of a recording come from prompts: they only ever travel as text, never as markup.
function el(tag, cls, words) {
  const node = document.createElement(tag);
  if (cls) node.className = cls;
  if (words != null) node.textContent = words;
  return node;
}

function svgEl(tag, attrs = {}) {
  const node = document.createElementNS(NS, tag);
  for (const name in attrs) node.setAttribute(name, attrs[name]);
  return node;
}
