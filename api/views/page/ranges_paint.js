// Draws the rows of the live ranges that are visible.

function rangesPainter(step, axis, host, groups) {
  const canvas = host.querySelector("canvas");
  const cursor = host.querySelector(".cursor");
  const state = { fullest: [], stamp: "", left: 0, width: 0, height: 0 }; // of the last drawing
  const most = Math.max(...groups.map((group) => group.most), 1);
  const placeCursor = () => {
    const x = axis.x(axis.middle(axis.instant), state.width);
    cursor.hidden = x < 0 || x > state.width;
    cursor.style.left = `${state.left + x - 0.75}px`;
    cursor.style.height = `${state.height - 28}px`;
  };
  const draw = (lines, first, past, size) => {
    const [left, height] = [canvas.offsetLeft, host.clientHeight];
    const width = host.clientWidth - left;
    if (width <= 0) return; // not laid out
    if (state.stamp !== axis.stamp() || state.width !== width) {
      for (const group of groups) group.paths = null;
      const fullest = columns(axis, step.total, width);
      Object.assign(state, { stamp: axis.stamp(), fullest, left, width });
    }
    state.height = height;
    const context = sharp(canvas, width, height);
    const top = host.querySelector(".head").offsetHeight;
    context.save();
    context.beginPath();
    context.rect(0, top, width, height);
    context.clip();
    for (let i = first; i < past; i++) {
      const y = top + i * size - host.scrollTop;
      const { group, row } = lines[i];
      if (row) drawPieces(context, { step, axis, width }, row.pieces, y, size);
      else drawGroup(context, { step, axis, width, most }, group, y, size);
    }
    context.restore();
    drawRangesFrame(context, { step, axis, width, height, top });
    placeCursor();
  };
  const place = (event) => event.clientX - host.getBoundingClientRect().left - state.left;
  return { state, place, placeCursor, draw, instantAt: (x) => instantAt(state, x) };
}

function drawGroup(context, { step, axis, width, most }, group, y, size) {
  group.paths ??= groupPaths(step, axis, width, most, group, size);
  context.save();
  context.translate(0, y);
  for (const { role, again, path } of group.paths) {
    context.fillStyle = paint(context, role, again);
    context.fill(path);
  }
  context.restore();
}

// The stacked areas of a group, one for each role, in a row whose upper border is at 0.
function groupPaths(step, axis, width, most, group, size) {
  // A row is linear, and rows that hold more are taller, by the square root: small ones stay visible.
  const room = Math.max((size - 5) * Math.sqrt(group.most / most), 4);
  const below = new Float64Array(Math.round(width));
  return group.curves.map(({ role, again, curve }) => {
    const fullest = columns(axis, curve.subarray(0, step.n), width);
    const path = new Path2D();
    const height = (c) => (fullest[c] < 0 ? 0 : curve[fullest[c]]);
    for (let c = 0; c < below.length; ) {
      const [bytes, base] = [height(c), below[c]];
      let end = c + 1; // runs of equal height in one rectangle
      while (end < below.length && height(end) === bytes && below[end] === base) end++;
      const tall = bytes ? Math.max((bytes / group.most) * room, 1.25) : 0;
      if (tall) path.rect(c, size - 2 - base - tall, end - c, tall);
      below.fill(base + tall, c, end);
      c = end;
    }
    return { role, again, path };
  });
}

function drawPieces(context, { step, axis, width }, pieces, y, size) {
  const [top, tall] = [y + size * 0.28, size * 0.44];
  let last = null;
  for (const i of pieces) {
    const from = axis.x(axis.edges[step.first(i)], width);
    const to = Math.max(axis.x(axis.edges[step.last(i) + 1], width), from + 1.5);
    if (last !== null && from > last) {
      context.fillStyle = colours.faint;
      context.fillRect(last, top + tall / 2 - 0.5, from - last, 1);
    }
    last = to;
    if (to < 0 || from > width) continue;
    context.fillStyle = paint(context, step.text("role", i), Boolean(step.repeated(i)));
    context.beginPath();
    context.roundRect(Math.max(from, -4), top, Math.min(to, width + 4) - Math.max(from, -4), tall, 2);
    context.fill();
  }
}

function drawRangesFrame(context, { step, axis, width, height, top }) {
  context.font = `600 12px ${FONT}`;
  context.textAlign = "left";
  context.textBaseline = "middle";
  for (const { name, from, to } of step.phases) {
    const left = Math.max(axis.x(axis.edges[from], width), 0);
    const right = Math.min(axis.x(axis.edges[to], width), width);
    if (right <= 0 || left >= width) continue;
    context.fillStyle = colours.faint;
    if (left > 0) context.fillRect(Math.round(left), 6, 1, height);
    context.fillStyle = colours.ink;
    if (context.measureText(name).width + 12 < right - left) context.fillText(name, left + 6, top / 2);
  }
}
