// Elements, canvases, colours: what all views draw with.

// An element with attributes (functions are listeners) and children; text is never read as HTML.
function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [key, value] of Object.entries(attributes)) {
    if (typeof value === "function") made.addEventListener(key, value);
    else if (value !== undefined && value !== false) made.setAttribute(key, value);
  }
  made.append(...children);
  return made;
}

const byId = (id) => document.getElementById(id);

// Calls `draw` once before the next frame, however often it is asked to.
function oncePerFrame(draw) {
  let asked = false;
  return () => {
    if (asked) return;
    asked = true;
    requestAnimationFrame(() => {
      asked = false;
      draw();
    });
  };
}

// A canvas cleared and scaled to device pixels; its context is in CSS pixels.
function sharp(canvas, width, height) {
  const ratio = window.devicePixelRatio || 1;
  const [w, h] = [Math.round(width * ratio), Math.round(height * ratio)];
  if (canvas.width !== w || canvas.height !== h) {
    canvas.width = w;
    canvas.height = h;
    canvas.style.width = `${width}px`;
    canvas.style.height = `${height}px`;
  }
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  return context;
}

// Roles with a hatch share the colour of the role that they go with.
const LOOKS = {
  parameter: ["parameter", false],
  buffer: ["parameter", true],
  "optimizer state": ["state", false],
  "generator state": ["state", true],
  input: ["other", false],
  gradient: ["gradient", false],
  tangent: ["gradient", true],
  output: ["activation", true],
  activation: ["activation", false],
  temporary: ["temporary", false],
  workspace: ["other", true],
  scratch: ["temporary", true],
};

function look(role) {
  const [name, hatched] = LOOKS[role] ?? ["other", true];
  return { name, hatched };
}

const colours = {};

// Reads the colours of the theme from the style sheet.
function readColours() {
  const style = getComputedStyle(document.documentElement);
  for (const name of ["paper", "ink", "soft", "faint", "line", "before", "before-line", "focus",
    "parameter", "state", "other", "gradient", "activation", "temporary", "hatch"]) {
    colours[name] = style.getPropertyValue(`--${name}`).trim();
  }
  hatches.clear();
}

const hatches = new Map();

// A colour under diagonal lines.
function hatch(context, colour) {
  const ratio = window.devicePixelRatio || 1;
  const key = `${colour} ${ratio}`;
  if (hatches.has(key)) return hatches.get(key);
  const side = Math.round(6 * ratio);
  const tile = element("canvas", { width: side, height: side });
  const pen = tile.getContext("2d");
  pen.fillStyle = colour;
  pen.fillRect(0, 0, side, side);
  pen.strokeStyle = colours.hatch;
  pen.lineWidth = 1.4 * ratio;
  for (const shift of [-side, 0, side]) {
    pen.moveTo(shift - 1, side + 1);
    pen.lineTo(shift + side + 1, -1);
  }
  pen.stroke();
  const pattern = context.createPattern(tile, "repeat");
  pattern.setTransform(new DOMMatrix().scale(1 / ratio));
  hatches.set(key, pattern);
  return pattern;
}

function paint(context, role, hatched) {
  const { name, hatched: own } = look(role);
  return hatched ?? own ? hatch(context, colours[name]) : colours[name];
}

function swatch(role) {
  const { name, hatched } = look(role);
  return element("i", { class: `swatch ${name}${hatched ? " hatched" : ""}`, "aria-hidden": "true" });
}

// Text with a border in the colour of the paper, to be read on areas.
function halo(context, text, x, y) {
  context.lineWidth = 4;
  context.lineJoin = "round";
  context.strokeStyle = colours.paper;
  context.strokeText(text, x, y);
  context.fillText(text, x, y);
}

const FONT = '"Inter", system-ui, -apple-system, "Segoe UI", Roboto, sans-serif';

// Round numbers from 0 to `most`, about `wanted` of them.
function ticks(most, wanted) {
  const raw = most / Math.max(wanted, 1);
  const power = 10 ** Math.floor(Math.log10(raw || 1));
  const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= raw) ?? power;
  return Array.from({ length: Math.floor(most / step) + 1 }, (_, i) => i * step);
}

// One of a few: buttons of which one is pressed. `choose` gets its value.
function choice(host, choose) {
  const buttons = [...host.querySelectorAll("button")];
  for (const button of buttons) {
    button.addEventListener("click", () => {
      for (const each of buttons) each.setAttribute("aria-pressed", String(each === button));
      choose(button.value);
    });
  }
}
