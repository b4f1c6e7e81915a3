// What is alive at the chosen instant, what executes there, and the bytes of each role.

function cell(kind, ...content) {
  return element("div", { role: "gridcell", class: kind }, ...content);
}

function bytesCell(value, kind = "bytes") {
  return cell(kind, element("data", { value, title: `${plain.format(value)} bytes` }, byteText(value)));
}

function badge(decision) {
  if (!decision) return "";
  const mark = element("i", { class: `mark ${decision.replace(" ", "-")}`, "aria-hidden": "true" });
  return element("span", { class: "badge" }, mark, decision);
}

// One line with everything that is known about a tensor.
function sentence(step, i) {
  const { tensors: t, n } = step;
  const born = t.birth[i] < 0 ? "there before the step" : `from op ${plain.format(t.birth[i])}`;
  const dies = t.death[i] >= n ? "kept after the step" : `to op ${plain.format(t.death[i])}`;
  const decided = [step.text("decision", i), step.text("reason", i)].filter(Boolean).join(": ");
  const parts = [
    step.text("name", i), step.text("role", i), `${plain.format(t.bytes[i])} bytes`,
    step.text("text", i), step.text("op", i), step.text("module", i), step.text("source", i),
    `${born} ${dies}`, decided, t.recompute_ns[i] ? `${timeText(t.recompute_ns[i])} to compute again` : "",
  ];
  return parts.filter(Boolean).join(" · ");
}

function aliveView(step, axis) {
  const host = byId("alive");
  let held = [];
  const list = virtualRows(host, {
    count: () => held.length,
    aria: () => ({}),
    cells: (index) => aliveCells(step, held[index]),
    chosen: (index) => (byId("alive-detail").textContent = sentence(step, held[index])),
  });
  const legend = roleTotals(step);
  const show = oncePerFrame(() => {
    const i = axis.instant;
    if (i < 0) return;
    held = alive(step, i);
    const sum = held.reduce((bytes, t) => bytes + step.tensors.bytes[t], 0);
    byId("alive-title").textContent = `Alive at op ${plain.format(i)}${i === step.peakAt ? ", the peak" : ""}`;
    const scratch = step.ops.scratch[i] ? `, and ${byteText(step.ops.scratch[i])} of scratch` : "";
    byId("alive-total").textContent = `${plain.format(held.length)} tensors, ${byteText(sum)}${scratch}`;
    byId("alive-detail").textContent = "";
    legend(i);
    showExecuted(step, i);
    describeSlider(step, i);
    host.dataset.instant = i;
    list.top();
  });
  let last = null;
  axis.listen(() => {
    if (axis.instant !== last) show();
    last = axis.instant;
  });
}

function aliveCells(step, i) {
  const { bytes } = step.tensors;
  const [name, role] = [step.text("name", i), step.text("role", i)];
  const [decision, reason] = [step.text("decision", i), step.text("reason", i)];
  return [
    cell("name", swatch(role), element("b", { title: name }, name), element("small", {}, role)),
    bytesCell(bytes[i]),
    cell("type", step.text("text", i)),
    cell("op", step.text("op", i)),
    cell("module", step.text("module", i)),
    cell("source", step.text("source", i)),
    cell("decision", badge(decision), element("span", { class: "reason", title: reason }, reason)),
  ];
}

// The legend: every role with its bytes at the instant.
function roleTotals(step) {
  const host = byId("roles");
  const values = new Map();
  for (const role of step.roles) {
    if (!step.curves.get(role).some((bytes) => bytes > 0)) continue;
    const value = element("data", { "data-role": role });
    values.set(role, value);
    host.append(element("li", {}, swatch(role), element("span", {}, role), value));
  }
  return (i) => {
    for (const [role, value] of values) {
      const bytes = step.curves.get(role)[i];
      value.value = String(bytes);
      value.textContent = byteText(bytes);
    }
  };
}

function showExecuted(step, i) {
  const time = step.ops.time_ns[i];
  const rows = [
    ["executes", step.op("name", i)],
    ["op", step.op("target", i)],
    ["phase", step.op("phase", i) + (step.ops.repeated[i] ? ", computed again" : "")],
    ["module", step.op("module", i)],
    ["source", step.op("source", i)],
    ["time", time ? `${timeText(time)}, predicted` : ""],
    ["scratch", step.ops.scratch[i] ? byteText(step.ops.scratch[i]) : ""],
  ];
  const shown = rows.filter(([, value]) => value).map(([label, value]) =>
    element("div", {}, element("dt", {}, label), element("dd", { title: value }, value)));
  byId("executes").replaceChildren(...shown);
}

function describeSlider(step, i) {
  const slider = byId("memory-chart");
  slider.setAttribute("aria-valuemax", step.n - 1);
  slider.setAttribute("aria-valuenow", i);
  slider.setAttribute("aria-valuetext", readout(step, i));
}
