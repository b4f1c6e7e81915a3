// Long lists of which only the visible rows exist: scrolled, moved through and opened by mouse and keys.

// `list`: count(), cells(index) -> nodes, aria(index) -> attributes, toggle(index), chosen(index).
// The rows have the height that the style sheet gives as --row; `drawn` is called with [first, last].
function virtualRows(host, list) {
  const body = host.querySelector(".body");
  const rows = new Map();
  let active = -1;
  const height = () => parseFloat(getComputedStyle(host).getPropertyValue("--row"));
  const head = () => body.offsetTop;

  const make = (index, size) => {
    const row = element("div", {
      role: "row",
      class: "row",
      id: `${host.id}-${index}`,
      "aria-rowindex": index + 2,
      ...list.aria(index),
    }, ...list.cells(index));
    row.addEventListener("click", (event) => choose(index, event));
    row.style.top = `${index * size}px`;
    return row;
  };

  const draw = () => {
    const size = height();
    const first = Math.max(Math.floor(host.scrollTop / size) - 4, 0);
    const past = Math.min(Math.ceil((host.scrollTop + host.clientHeight) / size) + 4, list.count());
    for (const [index, row] of rows) {
      if (index >= first && index < past) continue;
      row.remove();
      rows.delete(index);
    }
    const fresh = [];
    for (let i = first; i < past; i++) {
      if (rows.has(i)) continue;
      rows.set(i, make(i, size));
      fresh.push(rows.get(i));
    }
    body.append(...fresh);
    for (const [index, row] of rows) row.classList.toggle("active", index === active);
    if (rows.has(active)) host.setAttribute("aria-activedescendant", `${host.id}-${active}`);
    else host.removeAttribute("aria-activedescendant");
    list.drawn?.(first, past, size);
  };
  const later = oncePerFrame(draw);

  const refresh = () => {
    for (const row of rows.values()) row.remove();
    rows.clear();
    active = Math.min(active, list.count() - 1);
    body.style.height = `${list.count() * height()}px`;
    host.setAttribute("aria-rowcount", list.count() + 1);
    draw();
  };

  const activate = (index) => {
    active = Math.min(Math.max(index, 0), list.count() - 1);
    if (active < 0) return;
    const [top, size] = [active * height(), height()];
    const room = host.clientHeight - head();
    if (top < host.scrollTop) host.scrollTop = top;
    else if (top + size > host.scrollTop + room) host.scrollTop = top + size - room;
    draw();
    list.chosen?.(active);
  };

  const choose = (index, event) => {
    active = index;
    if (list.clicked?.(index, event)) return draw();
    if (list.toggle?.(index)) refresh();
    else draw();
    return list.chosen?.(index);
  };

  host.addEventListener("scroll", later, { passive: true });
  const parts = { host, list, activate, refresh, active: () => active, height };
  host.addEventListener("keydown", (event) => moveByKey(event, parts));
  new ResizeObserver(refresh).observe(host);
  return { refresh, draw: later, top: () => { active = -1; host.scrollTop = 0; refresh(); } };
}

function moveByKey(event, { host, list, activate, refresh, active, height }) {
  if (event.target !== host || event.ctrlKey || event.metaKey || event.altKey) return;
  const page = Math.max(Math.floor(host.clientHeight / height()) - 2, 1);
  const moves = {
    ArrowDown: active() + 1, ArrowUp: active() - 1,
    PageDown: active() + page, PageUp: active() - page, Home: 0, End: list.count() - 1,
  };
  const open = active() >= 0 ? list.aria(active())["aria-expanded"] : undefined;
  const wanted = { ArrowRight: "false", ArrowLeft: "true", Enter: open, " ": open }[event.key];
  if (event.key in moves) activate(moves[event.key]);
  else if (wanted !== undefined && wanted === open && active() >= 0) {
    if (list.toggle?.(active())) refresh();
  } else return;
  event.preventDefault();
}
