// Memory over the step: areas by role, the eager step behind them, budget, phases, peak, the instant chosen.

const MARGIN = { top: 30, right: 10, bottom: 26, left: 54 };

function memoryView(step, axis) {
  const host = byId("memory-chart");
  const [base, over] = host.querySelectorAll("canvas");
  const peak = byId("peak-marker");
  const view = { step, axis, over, hover: -1, width: 0, height: 0, fullest: [] };

  const drawAll = oncePerFrame(() => {
    const [width, height] = [host.clientWidth, host.clientHeight];
    if (!width) return; // not laid out
    view.outer = [width, height];
    view.stamp = axis.stamp();
    view.width = width - MARGIN.left - MARGIN.right;
    view.height = height - MARGIN.top - MARGIN.bottom;
    view.fullest = columns(axis, step.total, view.width);
    const before = step.baseline ? Math.max(...step.baseline.curve, 0) : 0;
    view.most = Math.max(step.peak, step.budget_bytes ?? 0, before, 1) * 1.08;
    view.y = (bytes) => view.height * (1 - bytes / view.most);
    const context = sharp(base, width, height);
    context.translate(MARGIN.left, MARGIN.top);
    drawGrid(context, view);
    if (step.baseline) drawBaseline(context, view);
    drawAreas(context, view);
    drawPhases(context, view);
    drawBudget(context, view);
    placePeak(peak, view);
    drawOver(view);
  });
  const drawCursor = oncePerFrame(() => drawOver(view));

  new ResizeObserver(drawAll).observe(host);
  axis.listen(() => (view.stamp === axis.stamp() ? drawCursor() : drawAll()));
  listenToPointer(host, view, drawCursor);
  listenToKeys(host, step, axis);
  peak.addEventListener("click", () => axis.choose(step.peakAt));
  return drawAll;
}

// The instant that is drawn at a place of the canvas.
function instantAt(view, x) {
  const column = Math.min(Math.max(Math.floor(x), 0), view.fullest.length - 1);
  return view.fullest[column] ?? -1;
}

function drawGrid(context, { y, most, width, height, axis, step }) {
  context.font = `11px ${FONT}`;
  context.lineWidth = 1;
  context.textAlign = "right";
  context.textBaseline = "middle";
  for (const value of ticks(most, height / 60)) {
    const at = Math.round(y(value)) + 0.5;
    context.strokeStyle = value ? colours.line : colours.soft;
    context.beginPath();
    context.moveTo(0, at);
    context.lineTo(width, at);
    context.stroke();
    context.fillStyle = colours.soft;
    context.fillText(value ? rounded(byteText(value)) : "0", -8, at);
  }
  context.textBaseline = "top";
  context.textAlign = "center";
  for (const [value, label] of axisTicks(axis, step, width)) {
    const at = axis.x(value, width);
    if (at < 0 || at > width - 24) continue;
    context.fillRect(Math.round(at), height, 1, 4);
    context.fillText(label, Math.max(at, 4), height + 8);
  }
}

// [place on the axis, label] of its ticks; the first says the unit.
function axisTicks(axis, step, width) {
  const span = axis.to - axis.from;
  const gap = ticks(span, width / 90)[1] ?? span;
  const first = Math.ceil(axis.from / gap);
  const found = [];
  for (let k = first; k * gap <= axis.to; k++) {
    const value = k * gap;
    const label = axis.timed ? rounded(timeText(Math.round(value))) : plain.format(Math.round(value));
    found.push([value, k === first && !axis.timed ? `op ${label}` : label]);
  }
  return found;
}

function drawBaseline(context, { step, axis, width, y, height }) {
  const { curve } = step.baseline;
  const edges = baselineEdges(step.baseline, axis);
  const line = new Path2D();
  const fullest = columns({ ...axis, edges }, curve, width);
  line.moveTo(0, y(0));
  fullest.forEach((i, c) => {
    if (i < 0) return;
    line.lineTo(c, y(curve[i]));
    line.lineTo(c + 1, y(curve[i]));
  });
  line.lineTo(fullest.length, y(0));
  context.save();
  context.beginPath();
  context.rect(0, -MARGIN.top, width, height + MARGIN.top);
  context.clip();
  context.fillStyle = colours.before;
  context.fill(line);
  context.strokeStyle = colours["before-line"];
  context.lineWidth = 1.25;
  context.stroke(line);
  context.restore();
}

function drawAreas(context, { step, fullest, y }) {
  const below = new Float64Array(fullest.length);
  for (const role of step.roles) {
    const curve = step.curves.get(role);
    const path = new Path2D();
    const lower = below.slice();
    let any = false;
    path.moveTo(0, y(lower[0]));
    fullest.forEach((i, c) => {
      if (i >= 0) below[c] += curve[i];
      any ||= below[c] > lower[c];
      path.lineTo(c, y(below[c]));
      path.lineTo(c + 1, y(below[c]));
    });
    for (let c = fullest.length - 1; c >= 0; c--) {
      path.lineTo(c + 1, y(lower[c]));
      path.lineTo(c, y(lower[c]));
    }
    if (!any) continue;
    context.fillStyle = paint(context, role);
    context.fill(path);
  }
}

function drawPhases(context, { step, axis, width, height }) {
  context.textAlign = "left";
  context.textBaseline = "alphabetic";
  context.font = `600 12px ${FONT}`;
  for (const { name, from, to } of step.phases) {
    const left = Math.max(axis.x(axis.edges[from], width), 0);
    const right = Math.min(axis.x(axis.edges[to], width), width);
    if (right <= 0 || left >= width) continue;
    context.fillStyle = colours.soft;
    if (from && left > 0) context.fillRect(Math.round(left), -24, 1, height + 24);
    context.fillStyle = colours.ink;
    if (context.measureText(name).width + 12 < right - left) context.fillText(name, left + 6, -14);
  }
}

function drawBudget(context, { step, axis, width, y }) {
  context.font = `600 12px ${FONT}`;
  context.textAlign = "right";
  context.textBaseline = "bottom";
  if (step.baseline) {
    const { curve, peak_instant: at, peak } = step.baseline;
    const x = axis.x(baselineEdges(step.baseline, axis)[at], width);
    const close = Math.abs(y(peak) - y(step.peak)) < 36; // on the other side of the peak's label
    const leftward = close ? x <= width * 0.6 : x > width / 2;
    context.fillStyle = colours.soft;
    context.textAlign = leftward ? "right" : "left";
    if (curve.length && x >= 0 && x < width) {
      halo(context, `eager ${byteText(peak)}`, x + (leftward ? -9 : 9), y(peak) + 10);
    }
  }
  if (step.budget_bytes === null) return;
  const at = Math.round(y(step.budget_bytes)) + 0.5;
  context.strokeStyle = colours.ink;
  context.lineWidth = 1.25;
  context.setLineDash([5, 4]);
  context.beginPath();
  context.moveTo(0, at);
  context.lineTo(width, at);
  context.stroke();
  context.setLineDash([]);
  context.fillStyle = colours.ink;
  context.textAlign = "right";
  halo(context, `budget ${byteText(step.budget_bytes)}`, width - 4, at - 4);
}

function placePeak(marker, { step, axis, width, y }) {
  const x = axis.x(axis.middle(step.peakAt), width);
  marker.hidden = step.n === 0 || x < 0 || x > width;
  marker.classList.toggle("left", x > width * 0.6);
  marker.style.left = `${MARGIN.left + x}px`;
  marker.style.top = `${MARGIN.top + y(step.peak)}px`;
}

function drawOver({ over, outer, axis, width, height, hover, step, y }) {
  if (!outer) return;
  const context = sharp(over, ...outer);
  context.translate(MARGIN.left, MARGIN.top);
  for (const [instant, chosen] of [[hover, false], [axis.instant, true]]) {
    if (instant < 0) continue;
    const x = axis.x(axis.middle(instant), width);
    if (x < 0 || x > width) continue;
    context.fillStyle = chosen ? colours.ink : colours.soft;
    context.fillRect(x - (chosen ? 0.75 : 0.5), 0, chosen ? 1.5 : 1, height);
    context.beginPath();
    context.arc(x, y(step.total[instant]), chosen ? 3.5 : 2.5, 0, 7);
    context.fill();
  }
  byId("readout").textContent = readout(step, hover >= 0 ? hover : axis.instant);
}

function readout(step, i) {
  if (i < 0) return "";
  const place = `op ${plain.format(i)} of ${plain.format(step.n)}`;
  return [place, byteText(step.total[i]), step.op("phase", i), step.op("name", i)].join(" · ");
}
