// Keyed differences -> one map of shapes a frame. A field set to null is removed.
function unfold(recording) {
  let shapes = new Map();
  return recording.frames.map(frame => {
    shapes = frame.shapes ? new Map(frame.shapes.map(s => [s.key, s])) : follow(shapes, frame);
    return { ...frame, map: shapes, leave: new Map(Object.entries(frame.leave || {})) };
  });
}

function follow(before, frame) {
  const shapes = new Map(before);
  for (const key of frame.del || []) shapes.delete(key);
  for (const [key, change] of Object.entries(frame.set || {})) {
    const s = { ...shapes.get(key), ...change, key };
    for (const field in s) if (s[field] === null) delete s[field];
    shapes.set(key, s);
  }
  return shapes;
}
