// The two hosts: JupyterLab through anywidget, Streamlit through components v2. Both see frames at rest only.

// anywidget: traits recording, frame, picked.
function render({ model, el: host }) {
  const send = (name, value) => { model.set(name, value); model.save_changes(); };
  const view = mount(host, model.get("recording"), {
    frame: model.get("frame"), onFrame: i => send("frame", i), onPick: key => send("picked", key),
  });
  const onRecording = () => view.update(model.get("recording"), model.get("frame"));
  const onFrame = () => { if (view.frame() !== model.get("frame")) view.go(model.get("frame")); };
  model.on("change:recording", onRecording);
  model.on("change:frame", onFrame);
  return () => {
    model.off("change:recording", onRecording);
    model.off("change:frame", onFrame);
    view.destroy();
  };
}

// Streamlit calls again on every rerun with the same parent: what is already playing goes on playing.
const mounted = new WeakMap();

function streamlit({ parentElement, data: [recording, frame, report, seek], setStateValue }) {
  const data = { recording, frame, report, seek };
  const had = mounted.get(parentElement);
  if (had && parentElement.querySelector(".kvs")) rerun(had, data, setStateValue);
  else mounted.set(parentElement, first(parentElement, data, setStateValue));
  return () => {
    mounted.get(parentElement)?.view.destroy();
    mounted.delete(parentElement);
  };
}

function first(parent, data, set) {
  const seat = { data, set };
  seat.view = mount(parent, data.recording, {
    frame: data.frame,
    onPick: key => seat.set("picked", key),
    onFrame: i => { if (seat.data.report) seat.set("frame", i); },        // report: Python reruns on every frame
  });
  return seat;
}

function rerun(seat, data, set) {
  const before = seat.data;
  Object.assign(seat, { data, set });
  if (before.recording.id !== data.recording.id) seat.view.update(data.recording, data.frame ?? 0);
  else if (data.seek != null && before.seek !== data.seek) seat.view.go(data.frame ?? 0);
}

export { mount };
export default arg => (arg && arg.parentElement ? streamlit(arg) : { render });
