// Mouse, touch and keys on the memory curve.

function listenToPointer(host, view, drawCursor) {
  const { axis } = view;
  let drag = null;
  const place = (event) => event.clientX - host.getBoundingClientRect().left - MARGIN.left;
  host.addEventListener("pointerdown", (event) => {
    if (event.button) return;
    drag = { x: place(event), from: axis.from, to: axis.to, moved: false };
    host.setPointerCapture(event.pointerId);
  });
  host.addEventListener("pointermove", (event) => {
    const x = place(event);
    view.hover = instantAt(view, x);
    if (!drag) return drawCursor();
    drag.moved ||= Math.abs(x - drag.x) > 4;
    if (!drag.moved) return undefined;
    if (!axis.zoomed()) return axis.choose(view.hover); // nothing to move: follow the finger
    const shift = ((drag.x - x) / view.width) * (drag.to - drag.from);
    return axis.show(drag.from + shift, drag.to + shift);
  });
  host.addEventListener("pointerup", (event) => {
    if (drag && !drag.moved) axis.choose(instantAt(view, place(event)));
    drag = null;
  });
  host.addEventListener("pointercancel", () => (drag = null));
  host.addEventListener("pointerleave", () => {
    view.hover = -1;
    drawCursor();
  });
  zoomByWheel(host, axis, (event) => axis.value(place(event), view.width));
}

// The wheel zooms with Ctrl (as a pinch does) and moves sideways; alone it scrolls the page.
function zoomByWheel(host, axis, valueAt) {
  host.addEventListener("wheel", (event) => {
    const span = axis.to - axis.from;
    const sideways = event.shiftKey ? event.deltaY : event.deltaX;
    if (event.ctrlKey || event.metaKey) axis.zoom(Math.exp(event.deltaY * 0.005), valueAt(event));
    else if (axis.zoomed() && Math.abs(sideways) > Math.abs(event.shiftKey ? 0 : event.deltaY)) {
      axis.show(axis.from + (sideways / 1000) * span, axis.to + (sideways / 1000) * span);
    } else return;
    event.preventDefault();
  }, { passive: false });
}

function listenToKeys(host, step, axis) {
  const leap = Math.max(Math.round(step.n / 50), 2);
  const moves = {
    ArrowLeft: (event) => axis.instant - (event.shiftKey ? leap : 1),
    ArrowRight: (event) => axis.instant + (event.shiftKey ? leap : 1),
    PageUp: () => axis.instant - leap,
    PageDown: () => axis.instant + leap,
    Home: () => 0,
    End: () => step.n - 1,
    p: () => step.peakAt,
    P: () => step.peakAt,
  };
  const zooms = { "+": 0.5, "=": 0.5, "-": 2 };
  host.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key in moves) axis.choose(moves[event.key](event));
    else if (event.key in zooms) axis.zoom(zooms[event.key]);
    else if (event.key === "0") axis.whole();
    else return;
    event.preventDefault();
  });
}
