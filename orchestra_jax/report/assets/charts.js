// Curves over steps. The charts of one phase share a crosshair: pointing at a step in one of them shows the values
// of that step in all.

const CHART_HEIGHT = 190;

function makeCrosshair() {
  const listeners = [];
  return {
    listen: (listener) => listeners.push(listener),
    show: (index) => listeners.forEach((listener) => listener(index)),
  };
}

// spec: {title, note, kind: "lines" | "stack", format, log, zero, series: [{label, values, color}], references}
function curveChart(spec, steps, crosshair) {
  const readout = el("div", { class: "readout" });
  const legend = el("div", { class: "legend" });
  const plot = el("div");
  const card = el(
    "figure",
    { class: "card" },
    el("div", { class: "chart-head" }, el("h3", {}, spec.title), readout),
    spec.note ? el("div", { class: "chart-note" }, spec.note) : null,
    spec.series.length > 1 ? legend : null,
    plot,
  );
  const last = steps.length - 1;
  let moveCrosshair = () => {};
  const show = (index) => {
    const at = index ?? last;
    writeReadout(spec, steps, at, readout, legend);
    moveCrosshair(index);
  };
  crosshair.listen(show);
  requestAnimationFrame(() =>
    drawOnResize(card, (width) => {
      const drawn = drawCurves(spec, steps, width, crosshair);
      moveCrosshair = drawn.moveCrosshair;
      plot.replaceChildren(drawn.node);
    }),
  );
  show(null);
  return card;
}

function writeReadout(spec, steps, at, readout, legend) {
  const missing = spec.kind === "stack" ? spec.format(0) : "–";
  const value = (series) => (series.values[at] === null ? missing : spec.format(series.values[at]));
  if (spec.series.length === 1) {
    readout.replaceChildren(`step ${tickText(steps[at])}  `, el("b", {}, value(spec.series[0])));
    return;
  }
  readout.replaceChildren(`step ${tickText(steps[at])}`);
  legend.replaceChildren(
    ...spec.series.map((series) => {
      const swatch = el("i");
      swatch.style.background = series.color;
      return el("span", {}, swatch, `${series.label} `, el("b", {}, value(series)));
    }),
  );
}

// Bands of a stack, from the bottom: each value becomes [from, to]; a missing value counts 0. Averaged like the
// bold lines, since a stack of noisy bands cannot be read.
function stackBands(series) {
  const top = series[0].values.map(() => 0);
  const window = smoothingWindow(top.length);
  return series.map(({ values }) =>
    movingAverage(values.map((v) => v ?? 0), window).map((v, i) => [top[i], (top[i] += v)]),
  );
}

function valueRange(spec, bands) {
  const values = (bands ? bands[bands.length - 1].map((band) => band[1]) : spec.series.flatMap((s) => s.values))
    .concat((spec.references ?? []).map((reference) => reference.value))
    .filter((v) => v !== null && (!spec.log || v > 0));
  let low = Math.min(...values);
  let high = Math.max(...values);
  if (spec.log) return low === high ? [low / 2, high * 2] : [low, high];
  if (bands || (spec.zero && low >= 0)) low = 0;
  if (low === high) [low, high] = low === 0 ? [0, 1] : [low - Math.abs(low) / 2, high + Math.abs(high) / 2];
  const room = (high - low) * 0.06;
  return [low === 0 ? 0 : low - room, spec.max !== undefined ? Math.min(spec.max, high + room) : high + room];
}

function drawCurves(spec, steps, width, crosshair) {
  const bands = spec.kind === "stack" ? stackBands(spec.series) : null;
  const [low, high] = valueRange(spec, bands);
  const scaleValue = spec.log ? Math.log : (v) => v;
  const yTicks = spec.log ? pickLogTicks(low, high) : linearTicks(low, high, 4);
  const yLabels = yTicks.map((tick) => (spec.log && low < 1e-3 ? tick.toExponential(0) : spec.tick(tick)));
  const left = Math.ceil(Math.max(...yLabels.map((label) => textWidth(label, fontOf(11.5))))) + 8;
  const box = { left, right: width - 10, top: 10, bottom: CHART_HEIGHT - 22 };
  const [first, last] = [steps[0], steps[steps.length - 1]];
  const x = (step) =>
    first === last ? (box.left + box.right) / 2 : box.left + ((step - first) / (last - first)) * (box.right - box.left);
  const y = (value) =>
    box.bottom -
    ((scaleValue(value) - scaleValue(low)) / (scaleValue(high) - scaleValue(low))) * (box.bottom - box.top);

  const node = svg("svg", {
    class: "chart",
    viewBox: `0 0 ${width} ${CHART_HEIGHT}`,
    height: CHART_HEIGHT,
    role: "img",
    "aria-label": `${spec.title} over steps ${first} to ${last}`,
  });
  yTicks.forEach((tick, i) => {
    node.append(svg("line", { class: "grid", x1: box.left, x2: box.right, y1: y(tick), y2: y(tick) }));
    node.append(svg("text", { x: box.left - 6, y: y(tick) + 4, "text-anchor": "end" }, yLabels[i]));
  });
  for (const tick of stepTicks(first, last, width)) {
    const anchor = x(tick) > box.right - 14 ? "end" : "middle";
    node.append(svg("text", { x: anchor === "end" ? box.right : x(tick), y: CHART_HEIGHT - 6, "text-anchor": anchor }, tickText(tick)));
  }
  node.append(svg("line", { class: "axis", x1: box.left, x2: box.right, y1: box.bottom, y2: box.bottom }));

  if (bands) bands.forEach((band, i) => node.append(bandPath(band, steps, x, y, spec.series[i].color)));
  else for (const series of spec.series) node.append(...linePaths(series, steps, x, y, spec.log));
  for (const reference of spec.references ?? []) node.append(...referenceLine(reference, spec.series[0].values, box, y));

  const cursor = svg("line", { class: "crosshair", y1: box.top, y2: box.bottom, visibility: "hidden" });
  const dots = bands ? [] : spec.series.map((series) => svg("circle", { r: 3.5, fill: series.color, visibility: "hidden" }));
  node.append(cursor, ...dots);
  const moveCrosshair = (index) => {
    const visible = index !== null && index !== undefined;
    cursor.setAttribute("visibility", visible ? "visible" : "hidden");
    if (visible) setAttributes(cursor, { x1: x(steps[index]), x2: x(steps[index]) });
    dots.forEach((dot, i) => {
      const value = visible ? spec.series[i].values[index] : null;
      const drawable = value !== null && value !== undefined && (!spec.log || value > 0);
      dot.setAttribute("visibility", drawable ? "visible" : "hidden");
      if (drawable) setAttributes(dot, { cx: x(steps[index]), cy: y(value) });
    });
  };
  followPointer(node, steps, x, width, crosshair);
  return { node, moveCrosshair };
}

function followPointer(node, steps, x, width, crosshair) {
  const nearest = (event) => {
    const bounds = node.getBoundingClientRect();
    const px = ((event.clientX - bounds.left) / bounds.width) * width;
    let best = 0;
    for (let i = 1; i < steps.length; i++) if (Math.abs(x(steps[i]) - px) < Math.abs(x(steps[best]) - px)) best = i;
    return best;
  };
  node.addEventListener("pointermove", (event) => crosshair.show(nearest(event)));
  node.addEventListener("pointerdown", (event) => crosshair.show(nearest(event)));
  node.addEventListener("pointerleave", () => crosshair.show(null));
}

function pickLogTicks(low, high) {
  const decades = logTicks(low, high, [1]);
  if (decades.length > 5) return decades.filter((_, i) => i % Math.ceil(decades.length / 5) === 0);
  if (decades.length >= 3) return decades;
  const fine = logTicks(low, high, [1, 2, 5]);
  return fine.length >= 2 ? fine : [low, high];
}

function stepTicks(first, last, width) {
  if (first === last) return [first];
  return linearTicks(first, last, Math.max(2, Math.floor(width / 90))).filter(Number.isInteger);
}

function bandPath(band, steps, x, y, color) {
  if (band.length === 1) {
    const [from, to] = band[0];
    return svg("rect", { x: x(steps[0]) - 12, width: 24, y: y(to), height: Math.max(0, y(from) - y(to)), fill: color });
  }
  const top = band.map(([, to], i) => `${x(steps[i]).toFixed(1)},${y(to).toFixed(1)}`);
  const bottom = band.map(([from], i) => `${x(steps[i]).toFixed(1)},${y(from).toFixed(1)}`).reverse();
  return svg("path", { d: `M${top.concat(bottom).join("L")}Z`, fill: color, "fill-opacity": 0.85 });
}

// The values thin and, where there are many, their moving average on top.
function linePaths(series, steps, x, y, log) {
  const window = smoothingWindow(steps.length);
  const raw = pathOf(series.values, steps, x, y, log);
  if (window === 1) return [svg("path", { d: raw, fill: "none", stroke: series.color, "stroke-width": 1.75, "stroke-linejoin": "round", "stroke-linecap": "round" })];
  return [
    svg("path", { d: raw, fill: "none", stroke: series.color, "stroke-width": 1, "stroke-opacity": 0.35, "stroke-linecap": "round" }),
    svg("path", { d: pathOf(movingAverage(series.values, window), steps, x, y, log), fill: "none", stroke: series.color, "stroke-width": 2, "stroke-linejoin": "round" }),
  ];
}

function smoothingWindow(numSteps) {
  return numSteps < 30 ? 1 : 2 * Math.round(numSteps / 50) + 1;
}

function movingAverage(values, window) {
  const half = (window - 1) / 2;
  return values.map((value, i) => {
    if (value === null) return null;
    const near = values.slice(Math.max(0, i - half), i + half + 1).filter((v) => v !== null);
    return near.reduce((sum, v) => sum + v, 0) / near.length;
  });
}

function pathOf(values, steps, x, y, log) {
  let path = "";
  let pen = "M";
  values.forEach((value, i) => {
    if (value === null || (log && value <= 0)) {
      pen = "M";
      return;
    }
    const point = `${x(steps[i]).toFixed(1)},${y(value).toFixed(1)}`;
    // A lone value between two gaps is a line of no length, which round caps make a dot.
    path += pen === "M" ? `M${point}L${point}` : `L${point}`;
    pen = "L";
  });
  return path;
}

// The label stands at the end of the line where the curve is farther away.
function referenceLine(reference, values, box, y) {
  const at = y(reference.value);
  const labelAt = at - 5 < box.top + 6 ? at + 14 : at - 5;
  const known = values.filter((v) => v !== null);
  const distance = (value) => Math.abs(value - reference.value);
  const atLeft = distance(known[0]) > distance(known[known.length - 1]);
  return [
    svg("line", { class: "reference", x1: box.left, x2: box.right, y1: at, y2: at }),
    svg("text", { class: "halo", x: atLeft ? box.left + 4 : box.right, y: labelAt, "text-anchor": atLeft ? "start" : "end" }, reference.label),
  ];
}
