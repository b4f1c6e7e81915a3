// Starts the views, and what the whole page shares: theme, zoom buttons, the switch of the axis.

// The theme of the system, until it is switched; `redraws` are called after every change.
function listenToTheme(redraws) {
  const root = document.documentElement;
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const apply = (theme) => {
    root.dataset.theme = theme;
    byId("theme").setAttribute("aria-pressed", String(theme === "dark"));
    readColours();
    for (const redraw of redraws) redraw();
  };
  byId("theme").addEventListener("click", () => apply(root.dataset.theme === "dark" ? "light" : "dark"));
  dark.addEventListener("change", () => apply(dark.matches ? "dark" : "light"));
  apply(dark.matches ? "dark" : "light");
}

function listenToZoom(step, axis) {
  const actions = {
    in: () => axis.zoom(0.5), out: () => axis.zoom(2), whole: axis.whole,
    peak: () => axis.choose(step.peakAt),
  };
  for (const button of document.querySelectorAll("[data-zoom]")) {
    button.addEventListener("click", actions[button.dataset.zoom]);
  }
  const chooser = byId("axis-choice");
  chooser.hidden = !axis.hasTimes;
  choice(chooser, (value) => axis.useTimes(value === "time"));
}

function start(data, redraws) {
  const step = makeStep(data);
  const axis = makeAxis(step);
  if (step.n) {
    redraws.push(memoryView(step, axis), rangesView(step, axis));
    aliveView(step, axis);
    listenToZoom(step, axis);
  } else {
    byId("memory").hidden = byId("ranges").hidden = true;
  }
  tensorTable(step);
  if (step.frontier.length) frontierView(step);
  axis.tell();
}

const redraws = [];
listenToTheme(redraws);
try {
  start(await unpack(byId("data")), redraws);
  document.body.dataset.ready = "true";
} catch (error) {
  const message = byId("failed");
  message.hidden = false;
  message.textContent = error.message;
  document.body.dataset.ready = "failed";
}
