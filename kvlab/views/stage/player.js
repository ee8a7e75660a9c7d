// The player: it owns time. It knows nothing about allocators; a recording is plain data.
let serial = 0;

function mount(host, recording, opt = {}) {
  const uid = "kvs" + ++serial, stage = el("section", "kvs"), picture = makePicture(uid), panel = makePanel(uid);
  const scroll = el("div", "scroll"), still = () => matchMedia("(prefers-reduced-motion:reduce)").matches;
  let frames = [], at = 0, raf = 0, timer = 0, playing = false, told = null;
  stage.setAttribute("aria-label", "Animated recording");
  stage.tabIndex = -1;
  scroll.append(picture.svg);
  stage.append(el("style", "", CSS), scroll, ...panel.parts);
  host.append(stage);
  const theme = watchTheme(stage);
  const last = () => frames.length - 1, resting = () => "rest" in stage.dataset;

  function after(ms, then) {
    clearTimeout(timer);
    timer = setTimeout(then, ms);
  }

  function halt() {
    clearTimeout(timer);
    cancelAnimationFrame(raf);
  }

  function glide(i, j, t0, t1, direct, done) {
    const length = MOVE / Math.max(1, panel.speed()) * Math.abs(t1 - t0), begin = performance.now(), end = t1 ? j : i;
    const rest = () => { picture.draw(end, end, 1); done(); };            // at rest a frame is only itself
    const tick = now => {
      const u = clamp((now - begin) / length, 0, 1);
      if (u >= 1) return rest();
      picture.draw(i, j, t0 + (t1 - t0) * u, direct);
      raf = requestAnimationFrame(tick);
    };
    if (still() || i === j || !length) rest(); else raf = requestAnimationFrame(tick);
  }

  function words() {
    panel.tell(frames, at);
    picture.say((frames[at].twin || []).join(" "));
    panel.say(frames[at].map.get(picture.picked())?.says || "");
  }

  function report() {                                                     // the host hears of frames at rest only
    if (playing || !resting() || told === at) return;
    told = at;
    opt.onFrame?.(at, frames[at]);
    opt.link?.set?.(at);
  }

  function settle(forward) {
    const f = frames[at];
    stage.dataset.rest = at;
    if (f.shake && forward && !still()) picture.shake(f.shake);
    if (playing && at < last()) after((900 + 26 * (f.title + f.why).length) / panel.speed(), () => go(at + 1));
    else if (playing) pause();
    report();
  }

  function go(target) {
    const was = at, to = clamp(Math.round(target) || 0, 0, last()), [i, j, t] = picture.pair();
    const low = Math.min(was, to), high = Math.max(was, to), done = () => settle(to > was);
    halt();
    delete stage.dataset.rest;
    at = to;
    theme();
    words();
    if (high - low === 1) {
      const here = i === low && j === high;                               // already in the middle of this motion
      glide(low, high, here ? t : +(to < was), +(to > was), false, done);
    } else if (low === high && i !== j && (i === to || j === to)) glide(i, j, t, +(j === to), false, done);
    else glide(was, to, 0, 1, true, done);
  }

  function seek(value) {                                                  // a fraction: scrubs the motion itself
    const v = clamp(+value || 0, 0, last()), i = Math.floor(v), near = Math.round(v);
    halt();
    delete stage.dataset.rest;
    if (v === near) picture.draw(near, near, 1); else picture.draw(i, i + 1, v - i);
    if (near !== at) {
      at = near;
      words();
    }
    if (v === near) stage.dataset.rest = at;
    panel.range.value = v;
  }

  function play() {
    if (!last()) return;
    playing = true;
    panel.playing(true);
    if (at === last()) go(0); else after(350, () => go(at + 1));
  }

  function pause() {
    playing = false;
    clearTimeout(timer);
    panel.playing(false);
    report();
  }

  function pick(key) {
    const s = frames[at].map.get(key);
    if (!s?.says) return;
    picture.mark(key);
    panel.say(s.says);
    opt.onPick?.(key, s);
  }

  function update(next, frame) {
    halt();
    playing = false;
    panel.playing(false);
    recording = next;
    frames = unfold(recording);
    const wanted = frame ?? opt.link?.get?.() ?? 0;
    at = clamp(Math.round(wanted) || 0, 0, last());
    told = frame ?? null;                                                 // who named the frame knows it already
    picture.show(recording, frames);
    panel.load(frames);
    theme();
    picture.draw(at, at, 1);
    words();
    settle(false);
  }

  const step = to => { pause(); go(to); };
  const controls = { step, go, seek, play, pause, pick, at: () => at, last, playing: () => playing };
  wirePointer(picture, panel, controls);
  wireKeys(stage, picture, panel, controls);
  update(recording, opt.frame);
  return { update, go: step, seek, play, pause, pick, frame: () => at,
    destroy() { halt(); playing = false; stage.remove(); } };
}

function wirePointer(picture, panel, { step, go, seek, play, pause, pick, at, playing }) {
  const { $, range } = panel, shape = e => e.target.closest(".k");
  $(".first").onclick = () => step(0);
  $(".back").onclick = () => step(at() - 1);
  $(".next").onclick = () => step(at() + 1);
  $(".play").onclick = () => (playing() ? pause() : play());
  $(".help").onclick = panel.help;
  $(".jump").onchange = e => step(+e.target.value);
  range.oninput = () => { if (playing()) pause(); seek(range.value); };
  range.onchange = () => go(range.value);
  picture.svg.onclick = e => shape(e) && pick(shape(e).dataset.key);
  picture.svg.addEventListener("focusin", e => shape(e) && picture.reach(shape(e).dataset.key));
}

function wireKeys(stage, picture, panel, { step, play, pause, pick, at, last, playing }) {
  const onShape = {
    ArrowDown: () => picture.walk(1, at()), ArrowUp: () => picture.walk(-1, at()), Enter: key => pick(key),
  };
  const onRange = { ArrowUp: () => step(at() + 1), ArrowDown: () => step(at() - 1) };
  const anywhere = {
    " ": () => (playing() ? pause() : play()),
    ArrowRight: () => step(at() + 1), ArrowLeft: () => step(at() - 1), Home: () => step(0), End: () => step(last()),
    "?": panel.help,
  };
  stage.onkeydown = e => {
    if (e.ctrlKey || e.metaKey || e.altKey || e.target.matches("select")) return;
    if (e.target.matches("button,summary") && (e.key === " " || e.key === "Enter")) return;   // they press themselves
    const shape = e.target.closest(".k");
    const act = (shape && onShape[e.key]) || (e.target === panel.range && onRange[e.key]) || anywhere[e.key]
      || (e.key === "Escape" && panel.helping() && panel.help);
    if (!act) return;
    e.preventDefault();
    e.stopPropagation();
    act(shape?.dataset.key);
  };
}

// Dark or light is what the host really painted, not what it is called. The ground's colour is a transition of a
// hidden probe, so that any theme switch reports itself.
function watchTheme(stage) {
  const probe = stage.appendChild(el("i", "probe")), canvas = document.createElement("canvas");
  const pen = canvas.getContext("2d", { willReadFrequently: true });
  function theme() {
    pen.fillStyle = getComputedStyle(probe).color;
    pen.fillRect(0, 0, 1, 1);
    const [r, g, b] = pen.getImageData(0, 0, 1, 1).data;
    stage.toggleAttribute("data-dark", r * .3 + g * .59 + b * .11 < 128);
  }
  probe.addEventListener("transitionend", theme);
  probe.addEventListener("transitioncancel", theme);                      // JupyterLab swaps its style sheets meanwhile
  return theme;
}
