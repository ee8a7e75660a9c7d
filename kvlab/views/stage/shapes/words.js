// Everything that is said in the picture: rows, labels, rules, chips and the digest.

// A row of the page: who, and what they hold.
function lane(s) {
  const x = s.owner ? 38 : 0, out = [];
  if (s.owner) {
    out.push(rect(0, 0, 28, 28, "", { rx: 7, style: `fill:${hue(s.owner)}` }));
    out.push(text(14, 19.5, s.owner, `b l c ${onHue(s.owner)}`));
  }
  out.push(text(x, 12, s.label, "b"));
  if (s.sub) out.push(text(x, 28, s.sub, "s d"));
  return out;
}

const LABEL_WORDS = new Set(["m", "b", "s", "l", "d", "ac", "nt", "e", "c"]);
function label(s) {
  const cls = String(s.cls || "").split(" ").filter(w => LABEL_WORDS.has(w)).join(" ");
  return [text(0, 0, s.label, cls + " halo", { "stroke-width": 4 })];
}

function rule(s) {
  const out = [path(`M0 0H${num(s.w)}`, "thin")];
  if (s.label) out.push(text(s.w, -6, s.label, "s d e"));
  return out;
}

// Anything said beside the picture: a reason for refusal, a fault, a note.
function chip(s) {
  const no = s.tone === "no", words = no ? "✕ " + s.label : s.label;
  return [
    rect(0, 0, s.w, s.h, "body", { rx: s.h / 2, style: `stroke:var(--${no ? "no" : "line"});` + dash(s) }),
    text(s.w / 2, s.h / 2 + 4.5, words, `c${s.mono ? " m s" : ""}${no ? " nt b" : ""}`),
  ];
}

// The committed state as a fingerprint: before, = or →, after. One look says whether anything changed.
function digest(s) {
  const out = [text(-14, 17, s.label, "s d e"), ...print(s.prev || s.value, 0, !!s.prev)];
  if (!s.prev) return out;
  const same = s.prev === s.value;
  out.push(text(141, 17.5, same ? "=" : "→", `l b c${same ? " ac" : ""}`));
  out.push(...print(s.value, 162, false));
  out.push(text(292, 17, same ? "unchanged" : "new state", same ? "s ac b" : "s d"));
  return out;
}

function print(hex, x, old) {
  const bars = [...hex.slice(0, 12)].map((c, i) => {
    const h = 3 + parseInt(c, 16) * .95;
    return rect(x + i * 5, 18 - h, 3.5, h, "", { style: `fill:var(--${old ? "line" : "ink"})` });
  });
  return [...bars, text(x + 66, 17, hex.slice(0, 6), `m ${old ? "d" : "b"}`)];
}
