// Elements and numbers. Nothing here, or anywhere else in the page's script, parses markup: texts from a run
// become text nodes and attribute values only.

const SVG_NS = "http://www.w3.org/2000/svg";

function setAttributes(node, attributes) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : value);
  }
}

function append(node, children) {
  for (const child of children.flat()) {
    if (child === null || child === undefined || child === false) continue;
    node.append(child); // a string becomes a text node
  }
  return node;
}

function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  setAttributes(node, attributes);
  return append(node, children);
}

function svg(tag, attributes = {}, ...children) {
  const node = document.createElementNS(SVG_NS, tag);
  setAttributes(node, attributes);
  return append(node, children);
}

// Three significant digits (two below 0.1) without an exponent: 5.50, 0.423, 0.042, 1234.
function significant(x, digits = 3) {
  if (x === 0 || !Number.isFinite(x)) return String(x);
  if (Math.abs(x) < 0.1) digits = Math.min(digits, 2);
  const decimals = digits - 1 - Math.floor(Math.log10(Math.abs(x)));
  return x.toFixed(Math.min(Math.max(decimals, 0), 8));
}

// For axes: the shortest way to write a round number.
function tickText(x) {
  if (x !== 0 && (Math.abs(x) >= 1e5 || Math.abs(x) < 1e-4)) return x.toExponential(0).replace("e+", "e");
  return String(Number(x.toPrecision(4)));
}

const FORMAT = {
  number: (x) => (x !== 0 && Math.abs(x) < 1e-3 ? x.toExponential(1) : significant(x)),
  share: (x) => `${(100 * x).toFixed(1)}%`,
  cents: (x) => `${significant(100 * x)}¢`,
  seconds: (x) => `${significant(x)} s`,
};

// Round ticks covering [low, high], about `count` of them.
function linearTicks(low, high, count) {
  const rough = (high - low) / Math.max(1, count);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((m) => m * power).find((s) => s >= rough * 0.999);
  const ticks = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) ticks.push(i * step);
  return ticks;
}

// Powers of ten in [low, high] and, where they are few, 2 and 5 times them.
function logTicks(low, high, multiples) {
  const ticks = [];
  for (let e = Math.floor(Math.log10(low)); e <= Math.ceil(Math.log10(high)); e++) {
    for (const m of multiples) {
      const tick = m * 10 ** e;
      if (tick >= low * 0.999 && tick <= high * 1.001) ticks.push(tick);
    }
  }
  return ticks;
}

const measureContext = document.createElement("canvas").getContext("2d");

function textWidth(text, font) {
  measureContext.font = font;
  return measureContext.measureText(text).width;
}

function fontOf(size, weight = 400) {
  return `${weight} ${size}px ${getComputedStyle(document.documentElement).getPropertyValue("--sans")}`;
}

// Calls draw(width) now and whenever the width of the box changes.
function drawOnResize(box, draw) {
  let drawn = 0;
  const check = () => {
    const width = Math.floor(box.clientWidth - parseFloat(getComputedStyle(box).paddingLeft) * 2);
    if (width > 0 && width !== drawn) {
      drawn = width;
      draw(width);
    }
  };
  new ResizeObserver(check).observe(box);
  check();
}
