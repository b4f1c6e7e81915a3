// Live ranges: a row for every layer kind with the bytes it holds, under it a row for every tensor.

// Groups of tensors with the same folded module; values that are computed again share a row.
function rangeGroups(step) {
  const groups = new Map();
  for (let i = 0; i < step.count; i++) {
    if (!step.tensors.bytes[i]) continue;
    const module = folded(step.text("module", i));
    const key = module || `(${step.text("role", i)})`;
    if (!groups.has(key)) groups.set(key, { key, rows: new Map(), modules: new Set() });
    const group = groups.get(key);
    group.modules.add(step.text("module", i));
    const name = baseName(step.text("name", i));
    if (!group.rows.has(name)) group.rows.set(name, { name, pieces: [] });
    group.rows.get(name).pieces.push(i);
  }
  return [...groups.values()].map(({ key, rows, modules }) => {
    const group = { key, modules, rows: [...rows.values()], open: false };
    group.curves = groupCurves(step, group);
    group.most = mostAtOnce(step, group);
    return group;
  });
}

// Bytes that a group holds at each instant: [{ role, again, curve }], in the order of the stack.
function groupCurves(step, group) {
  const found = new Map();
  for (const i of group.rows.flatMap((row) => row.pieces)) {
    const [role, again] = [step.text("role", i), Boolean(step.repeated(i))];
    const key = `${role}/${again}`;
    if (!found.has(key)) found.set(key, { role, again, curve: new Float64Array(step.n + 1) });
    const { curve } = found.get(key);
    curve[step.first(i)] += step.tensors.bytes[i];
    curve[step.last(i) + 1] -= step.tensors.bytes[i];
  }
  for (const { curve } of found.values()) {
    for (let i = 1; i < step.n; i++) curve[i] += curve[i - 1];
  }
  const place = ({ role, again }) => step.roles.indexOf(role) * 2 + Number(again);
  return [...found.values()].sort((a, b) => place(a) - place(b));
}

// Largest bytes that a group holds at one instant.
function mostAtOnce(step, { curves }) {
  let most = 0;
  for (let i = 0; i < step.n; i++) {
    let sum = 0;
    for (const { curve } of curves) sum += curve[i];
    if (sum > most) most = sum;
  }
  return most;
}

function sortRanges(step, axis, groups, by) {
  const { bytes, birth } = step.tensors;
  const time = (i) => axis.edges[step.last(i) + 1] - axis.edges[step.first(i)];
  const measures = {
    area: (pieces) => -pieces.reduce((sum, i) => sum + bytes[i] * time(i), 0),
    birth: (pieces) => Math.min(...pieces.map((i) => birth[i])),
    bytes: (pieces) => -Math.max(...pieces.map((i) => bytes[i])),
  };
  for (const group of groups) {
    for (const row of group.rows) row.rank = measures[by](row.pieces);
    group.rows.sort((a, b) => a.rank - b.rank);
    const ranks = group.rows.map((row) => row.rank);
    if (by === "area") group.rank = ranks.reduce((a, b) => a + b, 0);
    else group.rank = by === "birth" ? ranks[0] : -group.most;
  }
  groups.sort((a, b) => a.rank - b.rank);
}

function rangesView(step, axis) {
  const host = byId("ranges-grid");
  const groups = rangeGroups(step);
  let by = "area";
  let lines = [];
  const lay = () => {
    lines = groups.flatMap((group) => [{ group }, ...(group.open ? group.rows.map((row) => ({ group, row })) : [])]);
  };
  const painter = rangesPainter(step, axis, host, groups);
  const list = virtualRows(host, {
    count: () => lines.length,
    aria: (index) => rangeAria(lines[index]),
    cells: (index) => rangeCells(step, lines[index]),
    toggle(index) {
      const { group, row } = lines[index];
      if (row) return false;
      group.open = !group.open;
      lay();
      return true;
    },
    clicked(index, event) {
      const x = painter.place(event);
      if (x < 0) return false;
      axis.choose(painter.instantAt(x));
      showLine(lines[index]);
      return true;
    },
    chosen: (index) => showLine(lines[index]),
    drawn: (first, past, size) => painter.draw(lines, first, past, size),
  });
  const showLine = ({ group, row }) => {
    byId("ranges-detail").textContent = row
      ? row.pieces.map((i) => sentence(step, i)).join("  ⟶  ")
      : `${group.key}: ${plain.format(group.rows.length)} tensors in ${plain.format(group.modules.size)} modules`;
  };
  const sort = () => {
    sortRanges(step, axis, groups, by);
    lay();
    list.top();
  };
  choice(byId("ranges-sort"), (value) => {
    by = value;
    sort();
  });
  let { timed } = axis;
  axis.listen(() => {
    if (axis.timed !== timed) sort();
    timed = axis.timed;
    if (painter.state.stamp === axis.stamp()) painter.placeCursor();
    else list.draw();
  });
  zoomByWheel(host, axis, (event) => axis.value(painter.place(event), painter.state.width));
  sort();
  return list.draw;
}

function rangeAria({ group, row }) {
  if (row) return { "aria-level": 2 };
  return { "aria-level": 1, "aria-expanded": String(group.open) };
}

function rangeCells(step, { group, row }) {
  const { bytes } = step.tensors;
  if (!row) {
    const count = group.modules.size > 1 ? `×${group.modules.size}` : "";
    return [cell("label", tail(group.key), element("small", {}, count)), bytesCell(group.most)];
  }
  return [cell("label", tail(row.name)), bytesCell(bytes[row.pieces[0]])];
}

// Text that loses its beginning, not its end, where room is short: layers differ in the end.
function tail(text) {
  return element("span", { class: "tail", title: text }, element("bdi", {}, text));
}
