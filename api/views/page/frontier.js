// Budget against overhead: plans, the proven bound under them, the plan that was chosen.

const NS = "http://www.w3.org/2000/svg";

function svg(tag, attributes = {}, ...children) {
  const made = document.createElementNS(NS, tag);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

function frontierView(step) {
  const host = byId("frontier-chart");
  const points = [...step.frontier].sort((a, b) => a.budget_bytes - b.budget_bytes);
  new ResizeObserver(oncePerFrame(() => {
    host.replaceChildren(frontierPicture(step, points, Math.max(host.clientWidth, 240)));
  })).observe(host);
}

function frontierPicture(step, points, width) {
  const [left, right, top, bottom, height] = [52, 24, 24, 40, 340];
  const { plan, baseline, budget_bytes: budget } = step;
  const eager = baseline?.peak ?? (plan ? null : step.peak);
  const others = [budget ?? step.peak, plan?.least_peak_bytes, eager];
  const marks = [...points.map((p) => p.budget_bytes), ...others].filter((bytes) => bytes != null);
  const [low, high] = [Math.min(...marks), Math.max(...marks)];
  const pad = (high - low || high) * 0.06;
  const steepest = Math.max(...points.map((p) => p.overhead), plan?.overhead ?? 0, 1e-6) * 1.12;
  const x = (bytes) => left + ((bytes - low + pad) / (high - low + 2 * pad)) * (width - left - right);
  const y = (share) => height - bottom - (share / steepest) * (height - top - bottom);
  const place = { x, y, left, top, width, height, right, bottom };
  const picture = svg("svg", { width, height, viewBox: `0 0 ${width} ${height}`, "aria-hidden": "true" });
  drawFrontierGrid(picture, place, steepest, [low, high]);
  const path = (value) => points.map((p, i) => `${i ? "L" : "M"}${x(p.budget_bytes)},${y(value(p))}`).join("");
  picture.append(
    svg("path", { class: "bound", d: path((p) => p.lower_bound) }),
    svg("path", { class: "curve", d: path((p) => p.overhead) }),
    ...points.map((p) => svg("circle", { class: "point", cx: x(p.budget_bytes), cy: y(p.overhead), r: 3.5 })),
  );
  if (plan) {
    drawRule(picture, place, plan.least_peak_bytes, "least peak");
    drawChosen(picture, place, budget ?? step.peak, plan);
  }
  if (eager !== null) drawRule(picture, place, eager, "eager peak");
  return picture;
}

function drawFrontierGrid(picture, { x, y, left, width, right, height, bottom }, steepest, [low, high]) {
  for (const share of ticks(steepest, 5)) {
    picture.append(
      svg("line", { class: "grid", x1: left, x2: width - right, y1: y(share), y2: y(share) }),
      svg("text", { class: "tick end", x: left - 8, y: y(share) + 4 }, `${+(share * 100).toFixed(3)} %`),
    );
  }
  const gap = ticks(high - low || high, Math.max((width - left) / 110, 2))[1];
  for (let bytes = Math.ceil(low / gap) * gap; bytes <= high; bytes += gap) {
    const place = { class: "tick middle", x: x(bytes), y: height - bottom + 18 };
    picture.append(svg("text", place, rounded(byteText(bytes))));
  }
  picture.append(svg("text", { class: "tick end", x: width - right, y: height - 4 }, "budget →"));
}

function drawRule(picture, { x, top, height, bottom, width }, bytes, label) {
  const at = x(bytes);
  const beyond = at > width * 0.6;
  const line = beyond && width < 480 ? top + 16 : top; // below the other label where both do not fit
  const text = `${label} ${byteText(bytes)}`;
  picture.append(
    svg("line", { class: "rule", x1: at, x2: at, y1: top - 6, y2: height - bottom }),
    svg("text", { class: `tick ${beyond ? "end" : ""}`, x: at + (beyond ? -6 : 6), y: line }, text),
  );
}

function drawChosen(picture, { x, y, width }, budget, plan) {
  const at = x(budget);
  const beyond = at > width * 0.6;
  picture.append(
    svg("line", { class: "gap", x1: at, x2: at, y1: y(plan.overhead), y2: y(plan.lower_bound) }),
    svg("circle", { class: "chosen", cx: at, cy: y(plan.overhead), r: 7 }),
    svg("text", { class: `strong ${beyond ? "end" : ""}`, x: at + (beyond ? -14 : 14), y: y(plan.overhead) - 8 },
      `this plan: ${(plan.overhead * 100).toFixed(1)} %`),
  );
}
