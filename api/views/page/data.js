// The step as columns of numbers: unpacked, with its curves, and what is alive when.

const ROLES = [
  "parameter", "buffer", "optimizer state", "generator state", "input", "gradient",
  "tangent", "output", "activation", "temporary", "workspace", "scratch",
]; // from the bottom of the stack to its top

async function unpack(element) {
  if (typeof DecompressionStream === "undefined") {
    throw new Error(
      "This browser cannot unpack the data of this report, because it has no DecompressionStream. " +
        "Chrome and Edge 80, Firefox 113, Safari 16.4 and all later ones have it. " +
        "The figures and notes on this page are complete, the pictures are missing.",
    );
  }
  const packed = Uint8Array.from(atob(element.textContent.trim()), (c) => c.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(stream).json();
}

// One step: `ops` and `tensors` are objects of columns; columns of text are numbers in `strings`.
function makeStep(data) {
  const { ops, tensors, strings } = data;
  const n = ops.name.length;
  const count = tensors.name.length;
  const curves = curvesByRole(tensors, strings, n);
  curves.set("scratch", Float64Array.from(ops.scratch));
  const known = ROLES.filter((role) => curves.has(role) && role !== "scratch");
  const others = [...curves.keys()].filter((role) => !ROLES.includes(role));
  const roles = [...known, ...others, "scratch"];
  const total = new Float64Array(n);
  for (const curve of curves.values()) for (let i = 0; i < n; i++) total[i] += curve[i];
  const peakAt = total.reduce((best, value, i) => (value > total[best] ? i : best), 0);
  return {
    ...data,
    n,
    count,
    roles,
    curves,
    total,
    peakAt: n ? peakAt : -1,
    peak: n ? total[peakAt] : 0,
    phases: n ? phasesOf((i) => strings[ops.phase[i]], n) : [],
    op: (column, i) => strings[ops[column][i]],
    text: (column, i) => strings[tensors[column][i]],
    repeated: (i) => tensors.birth[i] >= 0 && tensors.birth[i] < n && ops.repeated[tensors.birth[i]],
    first: (i) => Math.max(tensors.birth[i], 0),
    last: (i) => Math.min(tensors.death[i], n - 1),
  };
}

function curvesByRole(tensors, strings, n) {
  const curves = new Map();
  for (let i = 0; i < tensors.name.length; i++) {
    const role = strings[tensors.role[i]];
    if (!curves.has(role)) curves.set(role, new Float64Array(n + 1));
    const steps = curves.get(role);
    steps[Math.max(tensors.birth[i], 0)] += tensors.bytes[i];
    steps[Math.min(tensors.death[i], n - 1) + 1] -= tensors.bytes[i];
  }
  for (const [role, steps] of curves) {
    for (let i = 1; i < n; i++) steps[i] += steps[i - 1];
    curves.set(role, steps.subarray(0, n));
  }
  return curves;
}

// Runs of the same phase: [{ name, from, to }], `to` is past the last.
function phasesOf(phaseAt, n) {
  const phases = [];
  for (let i = 0; i < n; i++) {
    const name = phaseAt(i);
    const last = phases.at(-1);
    if (last && last.name === name) last.to = i + 1;
    else phases.push({ name, from: i, to: i + 1 });
  }
  return phases;
}

// Numbers of the tensors that are held at an instant, the largest first.
function alive(step, instant) {
  const { birth, death, bytes } = step.tensors;
  const held = [];
  for (let i = 0; i < step.count; i++) {
    if (birth[i] <= instant && instant <= death[i] && bytes[i]) held.push(i);
  }
  return held.sort((a, b) => bytes[b] - bytes[a] || a - b);
}

// "transformer.h.3.attn" -> "transformer.h.*.attn": the same for all layers, as `fold` in Python.
function folded(path) {
  return path.replace(/(?<![^._])\d+(?=[._]|$)/g, "*");
}

// "mul_3_again.1" -> "mul_3.1": the value that is computed again.
function baseName(name) {
  return name.replace(/_again(_\d+)?(?=\.\d+$|$)/, "");
}

// "mul_3_again" -> "mul_again": what an op's results in all layers are called.
function stem(name) {
  return name.replace(/_\d+(?=$|\.|_again)/, "");
}

// "made again for addmm_12" -> "made again for addmm_*": names of ops in a sentence.
function foldedNames(text) {
  return text.replace(/(?<=[A-Za-z_])_\d+/g, "_*");
}

const plain = new Intl.NumberFormat("en-GB");

// As `in_units` in Python.
function byteText(value) {
  for (const [unit, size] of [["TB", 1e12], ["GB", 1e9], ["MB", 1e6], ["kB", 1e3]]) {
    if (Math.abs(value) >= size) return `${(value / size).toFixed(2)} ${unit}`;
  }
  return `${value} B`;
}

// "250.00 MB" -> "250 MB", for ticks.
function rounded(text) {
  return text.replace(/(\.\d*?)0+ /, "$1 ").replace(". ", " ");
}

function timeText(ns) {
  if (ns < 1000) return `${ns} ns`;
  if (ns < 1e6) return `${(ns / 1e3).toFixed(1)} µs`;
  if (ns < 1e9) return `${(ns / 1e6).toFixed(1)} ms`;
  return `${(ns / 1e9).toFixed(2)} s`;
}
