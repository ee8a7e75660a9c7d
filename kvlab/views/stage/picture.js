// The svg: it keeps one node a key, so that motion moves nodes and never rebuilds the picture.
function makePicture(uid) {
  const svg = svgEl("svg", { class: "st", role: "group", "aria-roledescription": "stage",
    "aria-labelledby": `${uid}t`, "aria-describedby": `${uid}d` });
  const desc = svg.appendChild(svgEl("desc", { id: `${uid}d` })), nodes = new Map();
  svg.append(hatches(uid));
  const layers = Array.from({ length: LAYERS }, () => svg.appendChild(svgEl("g")));
  let frames = [], pair = [0, 0, 1], picked = null, rove = null;

  function node(s) {
    let n = nodes.get(s.key);
    if (!n) {
      n = svgEl("g");
      n.dataset.key = s.key;
      n.append(svgEl("g", { class: "in" }));
      nodes.set(s.key, n);
    }
    const home = layers[layerOf(s)];
    if (n.parentNode !== home) home.insertBefore(n, [...home.children].find(o => o.dataset.key > s.key) || null);
    return n;
  }

  function put(s) {
    if (s.alpha <= 0 || !KINDS.has(s.kind)) return drop(s.key);
    const n = node(s), list = primitives({ ...s, uid });
    n.setAttribute("transform", `translate(${num(s.x || 0)},${num(s.y || 0)})`);
    n.style.opacity = s.alpha < 1 ? s.alpha : "";
    n.setAttribute("class", "k" + (s.key === picked ? " picked" : ""));
    if (s.says) list.unshift(rect(-5, -5, s.w + 10, s.h + 10, "hit", { rx: 11, "pointer-events": "all" }));
    const reach = s.says ? { role: "button", "aria-label": s.says, tabindex: s.key === rove ? 0 : -1 } : {};
    for (const name of ["role", "aria-label", "tabindex"]) {
      if (name in reach) n.setAttribute(name, reach[name]); else n.removeAttribute(name);
    }
    patch(n.lastChild, list);
  }

  function drop(key) {
    const n = nodes.get(key);
    if (!n) return;
    const focused = n === n.getRootNode().activeElement;
    if (focused) n.closest(".kvs")?.focus({ preventScroll: true });       // the keys must go on working
    n.remove();
    nodes.delete(key);
  }

  // Frames i -> j at progress t. `direct` is a jump over other frames: then `from` and `leave` do not count.
  function draw(i, j, t, direct = false) {
    const before = frames[i].map, { map: after, leave } = frames[j];
    pair = [i, j, t];
    if (!after.get(rove)?.says) rove = speakers(after)[0];
    for (const key of new Set([...before.keys(), ...after.keys()])) {
      const a = before.get(key), b = after.get(key);
      if ((!b && t >= 1) || (!a && t <= 0)) drop(key);
      else put(between(a, b, i === j ? 1 : t, direct ? {} : { from: b?.from, leave: leave.get(key) }));
    }
    for (const key of nodes.keys()) if (!before.has(key) && !after.has(key)) drop(key);
  }

  function show(recording, unfolded) {
    frames = unfolded;
    svg.setAttribute("viewBox", `0 0 ${recording.view[0]} ${recording.view[1]}`);
    for (const key of [...nodes.keys()]) drop(key);
    picked = rove = null;
  }

  function mark(key) {
    nodes.get(picked)?.classList.remove("picked");
    picked = rove = key;
    nodes.get(key)?.classList.add("picked");
  }

  function shake(key) {
    const n = nodes.get(key)?.lastChild;
    if (!n) return;
    n.classList.remove("shake");
    n.getBoundingClientRect();                                            // a restarted animation needs a layout
    n.classList.add("shake");
  }

  // From one shape that has something to say to the next.
  function walk(step, at) {
    const keys = speakers(frames[at].map);
    if (!keys.length) return;
    rove = keys[(keys.indexOf(rove) + step + keys.length) % keys.length];
    draw(...pair);
    nodes.get(rove)?.focus();
  }

  const reach = key => { rove = key; };
  return { svg, show, draw, mark, shake, walk, reach, pair: () => pair, picked: () => picked,
    say: words => { desc.textContent = words; } };
}

// The keys of the shapes that have something to say, row by row.
function speakers(shapes) {
  const able = [...shapes.values()].filter(s => s.says);
  return able.sort((a, b) => a.y - b.y || a.x - b.x).map(s => s.key);
}

// Reuses child nodes by position.
function patch(group, list) {
  list.forEach(([tag, attrs, words], i) => {
    let n = group.childNodes[i];
    if (!n || n.nodeName !== tag) {
      const fresh = svgEl(tag);
      if (n) group.replaceChild(fresh, n); else group.append(fresh);
      n = fresh;
    }
    for (const old of [...n.attributes]) if (!(old.name in attrs)) n.removeAttribute(old.name);
    for (const name in attrs) {
      const value = String(typeof attrs[name] === "number" ? num(attrs[name]) : attrs[name]);
      if (n.getAttribute(name) !== value) n.setAttribute(name, value);
    }
    if (tag === "text" && n.textContent !== words) n.textContent = words;
  });
  while (group.childNodes.length > list.length) group.lastChild.remove();
}

function hatches(uid) {
  const defs = svgEl("defs");
  for (const o of ["n", ..."ABCDEFG"]) {
    const pattern = defs.appendChild(svgEl("pattern", { id: `${uid}-${o}`, width: 7, height: 7,
      patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" }));
    const stroke = o === "n" ? "stroke:var(--line);opacity:.45" : `stroke:var(--${o});opacity:.75`;
    pattern.append(svgEl("path", { d: "M0 0V7", style: `${stroke};stroke-width:2.4` }));
  }
  return defs;
}
