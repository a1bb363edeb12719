// Cost (log scale) against accuracy of all policies, with intervals, labels that keep clear of each other, the
// Pareto front, and arrows from the warm start to the trained policy.

function scatterChart(figure, policies) {
  const points = policies
    .map((policy) => ({ ...policy, cost: policy.estimates.cost_usd, accuracy: policy.estimates.accuracy }))
    .filter((point) => point.cost.value !== null && point.accuracy.value !== null && point.cost.value >= 0);
  if (points.length === 0) {
    figure.append(el("p", { class: "empty" }, "No policy has both a cost and an accuracy."));
    return;
  }
  const plot = el("div");
  const tooltip = el("div", { class: "tooltip", hidden: true });
  figure.append(plot, tooltip);
  drawOnResize(figure, (width) => {
    tooltip.hidden = true;
    plot.replaceChildren(drawScatter(points, width, figure, tooltip));
  });
}

function drawScatter(points, width, figure, tooltip) {
  const height = width < 560 ? 440 : 460;
  const box = { left: 46, right: width - 12, top: 14, bottom: height - 46 };
  const axes = scatterAxes(points, box);
  const node = svg("svg", {
    class: "chart",
    viewBox: `0 0 ${width} ${height}`,
    height,
    role: "group",
    "aria-label": "Cost per task against accuracy of all policies",
  });
  drawScatterAxes(node, axes, box, height);
  for (const point of points) {
    point.x = axes.x(point.cost.value);
    point.y = axes.y(point.accuracy.value);
    point.whiskers = whiskersOf(point, axes);
  }
  const lines = [...drawFront(node, points, box), ...drawArrows(node, points)];
  const labels = placeLabels(points, lines, box, width);
  for (const label of labels) {
    if (label.leader) node.append(svg("line", { class: "leader", ...label.leader }));
  }
  for (const point of points) node.append(pointMark(point));
  for (const label of labels) {
    node.append(svg("text", { class: `point-label halo ${label.point.kind}`, x: label.x, y: label.y + label.h - 4 }, label.text));
  }
  for (const point of points) node.append(hitArea(point, figure, tooltip));
  return node;
}

// A free policy has no place on a log scale: it stands in a column of its own at the left.
function scatterAxes(points, box) {
  const costs = points.flatMap(({ cost }) => [cost.value, cost.low, cost.high]).filter((c) => c !== null && c > 0);
  const hasFree = points.some(({ cost }) => cost.value === 0);
  const plotLeft = hasFree ? box.left + Math.min(64, (box.right - box.left) * 0.14) : box.left;
  const [low, high] = costs.length ? [Math.min(...costs), Math.max(...costs)] : [0.001, 0.1];
  const room = Math.max(0.12, Math.log10(high / low) * 0.07);
  const domain = [Math.log10(low) - room, Math.log10(high) + room];
  const logX = (cost) => plotLeft + ((Math.log10(cost) - domain[0]) / (domain[1] - domain[0])) * (box.right - plotLeft);
  const shares = points.flatMap(({ accuracy }) => [accuracy.value, accuracy.low, accuracy.high]).filter((s) => s !== null);
  const lowest = Math.min(...shares);
  const yLow = lowest < 0.15 ? 0 : Math.max(0, Math.floor((lowest - 0.03) * 20) / 20);
  const yHigh = Math.min(1, Math.ceil((Math.max(...shares) + 0.02) * 20) / 20);
  return {
    hasFree,
    plotLeft,
    freeX: (box.left + plotLeft) / 2,
    xDomain: domain.map((e) => 10 ** e),
    yDomain: [yLow, Math.max(yHigh, yLow + 0.05)],
    x(cost) {
      return cost > 0 ? Math.max(plotLeft, logX(cost)) : hasFree ? this.freeX : plotLeft;
    },
    y(share) {
      const [from, to] = this.yDomain;
      return box.bottom - ((share - from) / (to - from)) * (box.bottom - box.top);
    },
  };
}

function drawScatterAxes(node, axes, box, height) {
  for (const tick of linearTicks(...axes.yDomain, 5)) {
    node.append(svg("line", { class: "grid", x1: box.left, x2: box.right, y1: axes.y(tick), y2: axes.y(tick) }));
    node.append(svg("text", { x: box.left - 8, y: axes.y(tick) + 4, "text-anchor": "end" }, `${tickText(100 * tick)}%`));
  }
  const [low, high] = axes.xDomain.map((usd) => 100 * usd);
  const decades = Math.log10(high / low);
  const multiples = decades > 3 || (box.right - axes.plotLeft) / decades < 110 ? [1] : decades > 1.5 ? [1, 3] : [1, 2, 5];
  for (const cents of logTicks(low, high, multiples)) {
    const at = axes.x(cents / 100);
    node.append(svg("line", { class: "grid", x1: at, x2: at, y1: box.top, y2: box.bottom }));
    node.append(svg("text", { x: at, y: box.bottom + 18, "text-anchor": at > box.right - 12 ? "end" : "middle" }, `${tickText(cents)}¢`));
  }
  if (axes.hasFree) {
    node.append(svg("line", { class: "reference", x1: axes.plotLeft, x2: axes.plotLeft, y1: box.top, y2: box.bottom }));
    node.append(svg("text", { x: axes.freeX, y: box.bottom + 18, "text-anchor": "middle" }, "free"));
  }
  node.append(svg("line", { class: "axis", x1: box.left, x2: box.right, y1: box.bottom, y2: box.bottom }));
  node.append(svg("text", { x: box.right, y: height - 8, "text-anchor": "end" }, "cost per task, log scale →"));
  node.append(svg("text", { class: "halo", x: box.left + 4, y: box.top + 2 }, "↑ accuracy"));
}

function whiskersOf(point, axes) {
  const { cost, accuracy, x, y } = point;
  const lines = [];
  if (accuracy.low !== null && accuracy.high !== null)
    lines.push({ x1: x, x2: x, y1: axes.y(accuracy.low), y2: axes.y(accuracy.high) });
  if (cost.value > 0 && cost.low !== null && cost.high !== null)
    lines.push({ x1: axes.x(Math.max(cost.low, axes.xDomain[0])), x2: axes.x(cost.high), y1: y, y2: y });
  return lines;
}

// Policies that no other one beats in cost without losing accuracy. The oracle is no policy one could have.
function paretoFront(points) {
  const byCost = points
    .filter((point) => point.kind !== "oracle")
    .sort((a, b) => a.cost.value - b.cost.value || b.accuracy.value - a.accuracy.value);
  const front = [];
  for (const point of byCost) {
    if (front.length === 0 || point.accuracy.value > front[front.length - 1].accuracy.value) front.push(point);
  }
  return front;
}

// Returns the segments of the line, for the labels to keep off.
function drawFront(node, points, box) {
  const front = paretoFront(points);
  if (front.length === 0) return [];
  const corners = [[front[0].x, box.bottom]];
  front.forEach((point, i) => {
    if (i > 0) corners.push([point.x, front[i - 1].y]);
    corners.push([point.x, point.y]);
  });
  corners.push([box.right, front[front.length - 1].y]);
  const path = `M${corners.join("L")}`;
  node.append(svg("path", { class: "front-area", d: `${path}V${box.bottom}Z` }), svg("path", { class: "front", d: path }));
  return corners.slice(1).map(([x2, y2], i) => ({ x1: corners[i][0], y1: corners[i][1], x2, y2 }));
}

// Returns pieces of the arrows, as drawFront does.
function drawArrows(node, points) {
  const byName = Object.fromEntries(points.map((point) => [point.name, point]));
  const pairs = [["warm_start", "trained"], ["warm_start:greedy", "trained:greedy"]];
  return pairs.flatMap(([from, to]) => (byName[from] && byName[to] ? drawArrow(node, byName[from], byName[to]) : []));
}

function drawArrow(node, from, to) {
  const [dx, dy] = [to.x - from.x, to.y - from.y];
  const length = Math.hypot(dx, dy);
  if (length < 30) return [];
  // A gentle bow, so that the two arrows and the whiskers can be told apart.
  const middle = { x: (from.x + to.x) / 2 + dy * 0.12, y: (from.y + to.y) / 2 - dx * 0.12 };
  const start = towards(from, middle, 9);
  const tip = towards(to, middle, 9);
  const base = towards(to, middle, 17);
  const [ux, uy] = [(tip.x - base.x) / 8, (tip.y - base.y) / 8];
  node.append(
    svg("path", { class: "arrow", d: `M${start.x},${start.y}Q${middle.x},${middle.y} ${base.x},${base.y}` }),
    svg("path", {
      class: "arrow-head",
      d: `M${tip.x},${tip.y}L${base.x - uy * 4},${base.y + ux * 4}L${base.x + uy * 4},${base.y - ux * 4}Z`,
    }),
  );
  const at = (t) => ({
    x: (1 - t) ** 2 * start.x + 2 * t * (1 - t) * middle.x + t * t * base.x,
    y: (1 - t) ** 2 * start.y + 2 * t * (1 - t) * middle.y + t * t * base.y,
  });
  return Array.from({ length: 8 }, (_, i) => ({ x1: at(i / 8).x, y1: at(i / 8).y, x2: at((i + 1) / 8).x, y2: at((i + 1) / 8).y }));
}

function towards(from, to, distance) {
  const length = Math.hypot(to.x - from.x, to.y - from.y);
  return { x: from.x + ((to.x - from.x) / length) * distance, y: from.y + ((to.y - from.y) / length) * distance };
}

function pointMark(point) {
  const mark =
    point.kind === "oracle"
      ? svg("path", { class: "mark", d: `M${point.x},${point.y - 6.5}l6.5,6.5l-6.5,6.5l-6.5,-6.5Z` })
      : svg("circle", { class: "mark", cx: point.x, cy: point.y, r: point.kind === "baseline" ? 5 : 6 });
  return svg("g", { class: point.kind }, ...point.whiskers.map((line) => svg("line", { class: "whisker", ...line })), mark);
}

// --- Labels: each takes the cheapest of some places around its point, given the others; a few rounds settle it. ---

function placeLabels(points, lines, box, width) {
  const labels = points.map((point) => {
    const text = point.name.startsWith("always:") ? point.name.slice("always:".length) : point.label;
    return { point, text, w: textWidth(text, fontOf(12, point.kind === "trained" ? 680 : 400)) + 4, h: 16, x: 0, y: 0 };
  });
  const rank = { trained: 0, start: 1, oracle: 2, baseline: 3 };
  labels.sort((a, b) => rank[a.point.kind] - rank[b.point.kind]);
  const bounds = { x0: box.left + 2, x1: width - 4, y0: 2, y1: box.bottom - 2 };
  for (let round = 0; round < 4; round++) {
    labels.forEach((label, i) => {
      const others = labels.filter((_, j) => j !== i && (round > 0 || j < i));
      const place = bestPlace(label, points, lines, others, bounds);
      Object.assign(label, place);
    });
  }
  for (const label of labels) label.leader = label.gap > 14 ? leaderLine(label) : null;
  return labels;
}

function bestPlace(label, points, lines, others, bounds) {
  const { point, w, h } = label;
  let best = null;
  for (const gap of [8, 14, 24, 38, 56]) {
    for (const [ax, ay, cost] of [[1, 0, 0], [-1, 0, 1], [0.7, -0.7, 1], [0.7, 0.7, 1], [-0.7, -0.7, 2], [-0.7, 0.7, 2], [0, -1, 1.5], [0, 1, 1.5]]) {
      const x = point.x + ax * gap + (ax > 0 ? 0 : ax < 0 ? -w : -w / 2);
      const y = point.y + ay * gap + (ay > 0.9 ? 0 : ay < -0.9 ? -h : ay === 0 ? -h / 2 : ay > 0 ? -h * 0.25 : -h * 0.75);
      const score = cost + gap * 0.25 + crowding({ x, y, w, h }, label, points, lines, others, bounds);
      if (best === null || score < best.score) best = { x, y, gap, score };
    }
  }
  return best;
}

function crowding(area, label, points, lines, others, bounds) {
  let score = 0;
  if (area.x < bounds.x0 || area.x + area.w > bounds.x1 || area.y < bounds.y0 || area.y + area.h > bounds.y1) score += 1000;
  for (const other of others) if (overlaps(area, other)) score += 200;
  for (const line of lines) if (overlaps(area, areaOf(line))) score += 6;
  for (const point of points) {
    const r = 8;
    if (overlaps(area, { x: point.x - r, y: point.y - r, w: 2 * r, h: 2 * r })) score += point === label.point ? 40 : 120;
    for (const line of point.whiskers) {
      if (overlaps(area, areaOf(line))) score += point === label.point ? 3 : 6;
    }
  }
  return score;
}

function areaOf({ x1, y1, x2, y2 }) {
  return { x: Math.min(x1, x2), y: Math.min(y1, y2), w: Math.abs(x2 - x1), h: Math.abs(y2 - y1) };
}

function overlaps(a, b) {
  return a.x < b.x + b.w && b.x < a.x + a.w && a.y < b.y + b.h && b.y < a.y + a.h;
}

function leaderLine({ point, x, y, w, h }) {
  const end = { x: Math.min(Math.max(point.x, x), x + w), y: Math.min(Math.max(point.y, y + 2), y + h - 2) };
  const start = towards(point, end, 7);
  return { x1: start.x, y1: start.y, x2: end.x, y2: end.y };
}

function hitArea(point, figure, tooltip) {
  const show = () => {
    tooltip.replaceChildren(...tooltipContent(point));
    tooltip.hidden = false;
    const room = figure.clientWidth - tooltip.offsetWidth - 8;
    tooltip.style.left = `${Math.max(8, Math.min(room, point.x + 24))}px`;
    const above = point.y - tooltip.offsetHeight - 4;
    tooltip.style.top = `${above > 0 ? above : point.y + 34}px`;
  };
  const hide = () => {
    tooltip.hidden = true;
  };
  return svg("circle", {
    class: "hit",
    cx: point.x,
    cy: point.y,
    r: 14,
    tabindex: 0,
    role: "img",
    "aria-label": `${point.label}: ${FORMAT.share(point.accuracy.value)} at ${FORMAT.cents(point.cost.value)}`,
    onpointerenter: show,
    onpointerdown: show,
    onfocus: show,
    onpointerleave: hide,
    onblur: hide,
  });
}

function tooltipContent(point) {
  const row = (title, estimate, format) => {
    if (estimate.value === null) return null;
    const high = estimate.high === null ? "∞" : format(estimate.high);
    const interval = estimate.low === null ? "" : `${format(estimate.low)} to ${high}`;
    return el("tr", {}, el("td", {}, title), el("td", {}, el("b", {}, format(estimate.value))), el("td", {}, interval));
  };
  const { accuracy, cost_usd, cost_per_solved_usd, latency_s, preference } = point.estimates;
  return [
    el("strong", {}, point.label),
    el(
      "table",
      {},
      row("accuracy", accuracy, FORMAT.share),
      row("cost", cost_usd, FORMAT.cents),
      row("per solved", cost_per_solved_usd, FORMAT.cents),
      row("latency", latency_s, FORMAT.seconds),
      row("preference", preference, FORMAT.number),
    ),
  ];
}
