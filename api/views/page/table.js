// Table of tensors with what becomes of them; the same tensor of all layers is one row that opens.

const DECISIONS = ["saved", "recomputed", "not needed", ""];

function tensorTable(step) {
  const host = byId("tensor-grid");
  const shown = new Set(DECISIONS.slice(0, 3));
  const state = { words: [], decisions: shown, sort: "bytes", down: true, open: new Set() };
  let lines = [];
  const list = virtualRows(host, {
    count: () => lines.length,
    aria: (index) => tableAria(lines[index], state),
    cells: (index) => tableCells(step, lines[index]),
    toggle(index) {
      const { group, tensor } = lines[index];
      if (tensor !== undefined) return false;
      if (!state.open.delete(group.key)) state.open.add(group.key);
      lines = layTable(groups, state);
      return true;
    },
    chosen: (index) => (byId("tensor-detail").textContent = describe(step, lines[index])),
  });
  let groups = [];
  const haystack = lazily(() => Array.from({ length: step.count }, (_, i) => sentence(step, i).toLowerCase()));
  const find = () => {
    const found = [];
    for (let i = 0; i < step.count; i++) {
      if (!state.decisions.has(step.text("decision", i))) continue;
      if (state.words.every((word) => haystack()[i].includes(word))) found.push(i);
    }
    groups = sortGroups(step, tableGroups(step, found), state);
    lines = layTable(groups, state);
    const bytes = found.reduce((sum, i) => sum + step.tensors.bytes[i], 0);
    const counts = [found.length, step.count, groups.length].map((count) => plain.format(count));
    byId("tensor-count").textContent =
      `${counts[0]} of ${counts[1]} tensors, ${byteText(bytes)} in all, in ${counts[2]} rows`;
    byId("tensor-detail").textContent = "";
    list.top();
  };
  listenToTable(step, host, state, oncePerFrame(find));
  find();
}

function lazily(make) {
  let made;
  return () => (made ??= make());
}

function listenToTable(step, host, state, find) {
  byId("tensor-filter").addEventListener("input", (event) => {
    state.words = event.target.value.toLowerCase().split(/\s+/).filter(Boolean);
    find();
  });
  const counts = new Map(DECISIONS.map((decision) => [decision, 0]));
  for (let i = 0; i < step.count; i++) {
    const decision = step.text("decision", i);
    counts.set(decision, (counts.get(decision) ?? 0) + 1);
  }
  for (const button of byId("tensor-decisions").querySelectorAll("button")) {
    button.append(element("small", {}, ` ${plain.format(counts.get(button.value) ?? 0)}`));
    button.addEventListener("click", () => {
      const shown = !state.decisions.delete(button.value);
      if (shown) state.decisions.add(button.value);
      button.setAttribute("aria-pressed", String(shown));
      find();
    });
  }
  const heads = [...host.querySelectorAll("[data-sort]")];
  for (const head of heads) {
    head.querySelector("button").addEventListener("click", () => {
      state.down = state.sort === head.dataset.sort ? !state.down : head.dataset.sort !== "name";
      state.sort = head.dataset.sort;
      for (const each of heads) {
        each.setAttribute("aria-sort", each !== head ? "none" : state.down ? "descending" : "ascending");
      }
      find();
    });
  }
}

// Tensors that are alike, as `groups` in Python has it; first executions and repetitions are apart.
function tableGroups(step, found) {
  const groups = new Map();
  for (const i of found) {
    const made = step.text("op", i);
    const module = folded(step.text("module", i));
    const place = made ? module : folded(step.text("name", i));
    const same = ["role", "op", "source", "text", "decision"].map((column) => step.tensors[column][i]);
    const key = `${place}/${step.repeated(i)}/${same}`;
    if (!groups.has(key)) groups.set(key, { key, module, members: [], bytes: 0, cost: 0 });
    const group = groups.get(key);
    group.members.push(i);
    group.bytes += step.tensors.bytes[i];
    group.cost += step.tensors.recompute_ns[i];
  }
  return [...groups.values()];
}

function sortGroups(step, groups, { sort, down }) {
  const sign = down ? -1 : 1;
  const name = (i) => step.text("name", i);
  const compare = {
    name: (a, b) => sign * name(a.members[0]).localeCompare(name(b.members[0]), "en", { numeric: true }),
    bytes: (a, b) => sign * (a.bytes - b.bytes),
    cost: (a, b) => sign * (a.cost - b.cost),
  }[sort];
  return groups.sort((a, b) => compare(a, b) || a.members[0] - b.members[0]);
}

function layTable(groups, { open }) {
  return groups.flatMap((group) => {
    if (group.members.length === 1) return [{ group, tensor: group.members[0], level: 1 }];
    const members = open.has(group.key) ? group.members : [];
    return [{ group }, ...members.map((tensor) => ({ group, tensor, level: 2 }))];
  });
}

function tableAria({ group, tensor, level }, { open }) {
  if (tensor !== undefined) return { "aria-level": level };
  return { "aria-level": 1, "aria-expanded": String(open.has(group.key)) };
}

// What all members are called, numbers of layers left out; the op if they have nothing in common.
function sharedName(step, members) {
  const name = (i) => step.text("name", i);
  if (members.length === 1) return name(members[0]);
  const made = step.text("op", members[0]);
  const names = new Set(members.map((i) => (made ? stem(name(i)) : folded(name(i)))));
  return names.size === 1 ? [...names][0] : made;
}

function tableCells(step, { group, tensor }) {
  const members = tensor === undefined ? group.members : [tensor];
  const [first] = members;
  const name = sharedName(step, members);
  const module = tensor === undefined && members.length > 1 ? group.module : step.text("module", first);
  const reason = sharedReason(step, members);
  const bytes = tensor === undefined ? group.bytes : step.tensors.bytes[tensor];
  const cost = tensor === undefined ? group.cost : step.tensors.recompute_ns[tensor];
  const count = members.length > 1 ? element("small", { class: "times" }, `×${members.length}`) : "";
  return [
    cell("name", swatch(step.text("role", first)), element("b", { title: name }, name), count),
    bytesCell(bytes),
    cell("type", step.text("text", first)),
    cell("module", module),
    cell("decision", badge(step.text("decision", first))),
    cell("reason", element("span", { title: reason }, reason)),
    cell("cost", cost ? timeText(cost) : ""),
  ];
}

// The first reason, without the numbers of layers, and how many others there are.
function sharedReason(step, members) {
  const reasons = new Set(members.map((i) => step.text("reason", i)));
  if (reasons.size === 1) return [...reasons][0];
  const [first, ...others] = new Set([...reasons].map(foldedNames));
  if (!others.length) return first;
  return `${first}; ${others.length} other reason${others.length > 1 ? "s" : ""}`;
}

function describe(step, { group, tensor }) {
  if (tensor !== undefined) return sentence(step, tensor);
  const [count, bytes] = [plain.format(group.members.length), plain.format(group.bytes)];
  return `${count} tensors, ${bytes} bytes in all; the first: ${sentence(step, group.members[0])}`;
}
