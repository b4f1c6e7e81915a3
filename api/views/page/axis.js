// The x axis that the memory curve and the live ranges share: scale, zoom, the instant that is chosen.

function makeAxis(step) {
  const times = new Float64Array(step.n + 1);
  for (let i = 0; i < step.n; i++) times[i + 1] = times[i] + step.ops.time_ns[i];
  const counts = Float64Array.from({ length: step.n + 1 }, (_, i) => i);
  const listeners = [];
  const axis = {
    timed: false,
    hasTimes: times[step.n] > 0,
    edges: counts, // where each instant begins; one more for the end
    from: 0,
    to: step.n || 1,
    instant: step.peakAt,
    listen: (listener) => listeners.push(listener),
    tell: () => listeners.forEach((listener) => listener()),
    useTimes(timed) {
      axis.timed = timed;
      axis.edges = timed ? times : counts;
      axis.whole();
    },
    stamp: () => [axis.from, axis.to, axis.timed].join(), // the same as long as only the instant moves
    length: () => axis.edges[step.n] || 1,
    zoomed: () => axis.to - axis.from < axis.length() * 0.9999,
    whole() {
      axis.show(0, axis.length());
    },
    show(from, to) {
      const least = Math.min(axis.length(), axis.length() / Math.max(step.n, 1) * 12);
      const span = Math.min(Math.max(to - from, least), axis.length());
      axis.from = Math.min(Math.max(from, 0), axis.length() - span);
      axis.to = axis.from + span;
      axis.tell();
    },
    zoom(factor, centre = axis.middle(axis.instant)) {
      axis.show(centre - (centre - axis.from) * factor, centre + (axis.to - centre) * factor);
    },
    at(instant) { // a place on the axis, also between two borders
      const i = Math.min(Math.floor(instant), step.n - 1);
      return axis.edges[i] + (axis.edges[i + 1] - axis.edges[i]) * (instant - i);
    },
    middle: (i) => (axis.edges[Math.max(i, 0)] + axis.edges[Math.max(i, 0) + 1]) / 2 || 0,
    choose(instant) {
      axis.instant = Math.min(Math.max(instant, 0), step.n - 1);
      const span = axis.to - axis.from;
      const at = axis.middle(axis.instant);
      if (at < axis.from) axis.show(at - span * 0.1, at + span * 0.9);
      else if (at > axis.to) axis.show(at - span * 0.9, at + span * 0.1);
      else axis.tell();
    },
    x: (value, width) => ((value - axis.from) / (axis.to - axis.from)) * width,
    value: (x, width) => axis.from + (x / width) * (axis.to - axis.from),
  };
  return axis;
}

// For every pixel column the instant at which `curve` is largest there; -1 where there is none.
function columns(axis, curve, width) {
  const fullest = new Int32Array(Math.max(Math.round(width), 1)).fill(-1);
  const n = curve.length;
  for (let i = firstVisible(axis, n); i < n; i++) {
    if (axis.edges[i] >= axis.to && axis.to < axis.length()) break;
    if (axis.edges[i + 1] <= axis.from && axis.edges[i] < axis.from) continue;
    const left = axis.x(axis.edges[i], width);
    const begin = Math.min(Math.max(Math.floor(left), 0), fullest.length - 1);
    const end = Math.min(Math.ceil(axis.x(axis.edges[i + 1], width)), fullest.length);
    for (let c = begin; c < Math.max(end, begin + 1); c++) {
      if (fullest[c] < 0 || curve[i] > curve[fullest[c]]) fullest[c] = i;
    }
  }
  return fullest;
}

// First instant that ends after the left border: by bisection.
function firstVisible(axis, n) {
  let [low, high] = [0, n];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (axis.edges[middle + 1] < axis.from) low = middle + 1;
    else high = middle;
  }
  return low;
}

// Where the eager step's instants lie on the axis: each run evenly over the instants that it is laid over.
function baselineEdges(baseline, axis) {
  const edges = new Float64Array(baseline.curve.length + 1);
  for (const [start, stop, from, to] of baseline.runs) {
    const [begin, end] = [axis.at(from), axis.at(to)];
    for (let i = start; i <= stop; i++) edges[i] = begin + ((end - begin) * (i - start)) / (stop - start);
  }
  return edges;
}
