// Puts the page together.

const COLORS = Array.from({ length: 9 }, (_, i) => `var(--c${i})`);
const data = JSON.parse(document.getElementById("run-data").textContent);

// The charts a reader asks for first; whatever else a run measured follows in a folded part.
// Values are US dollars where a name says usd; they are shown in cents.
function chartSpecs(series, references) {
  const used = new Set();
  const take = (name) => {
    used.add(name);
    return series[name];
  };
  const family = (pattern, label) =>
    Object.keys(series)
      .filter((name) => pattern.test(name))
      .map((name) => ({ name, label: label(name.match(pattern)[1]), values: take(name) }));
  const single = (title, name, options) => series[name] && { title, ...options, series: [{ label: title, values: take(name) }] };
  const number = { format: FORMAT.number, tick: tickText };
  const specs = [
    single("Loss on the traces", "sft/loss", number),
    ...family(/^sft\/(?!loss$)(.+)$/, (name) => capitalised(spaced(name))).map((s) => ({ title: s.label, ...number, series: [s] })),
    single("Reward", "reward/mean", number),
    single("Accuracy on training tasks", "outcome/accuracy", {
      format: FORMAT.share, tick: (x) => `${tickText(100 * x)}%`, max: 1, references: references.accuracy,
    }),
    single("Cost per task", "cost/mean_usd", {
      format: FORMAT.cents, tick: (x) => `${tickText(100 * x)}¢`, zero: true, references: references.cost,
    }),
    single("Latency per task", "latency/mean_s", { format: FORMAT.seconds, tick: (x) => `${tickText(x)} s`, zero: true }),
    stack("Tool calls per task", family(/^tools\/(.+)\/calls$/, String), number),
    stack("Dropped trajectories, by reason", family(/^rollouts\/dropped\/(.+)$/, spaced), number),
    single("Policy loss", "loss/policy", number),
    lines("Logprobs: sampler against trainer", family(/^mismatch\/logprob_(.+)$/, spaced), { ...number, log: true }),
    stack("Time per step", family(/^time\/(?!step_s|total_s|elapsed_s)(.+)_s$/, spaced), { format: FORMAT.seconds, tick: (x) => `${tickText(x)} s` }),
  ];
  const rest = Object.keys(series)
    .filter((name) => !used.has(name))
    .map((name) => single(name, name, number));
  return { main: specs.filter(Boolean), rest };
}

const spaced = (name) => name.replaceAll("_", " ");
const capitalised = (text) => text.charAt(0).toUpperCase() + text.slice(1);

function mean(values) {
  const known = values.filter((v) => v !== null);
  return known.length ? known.reduce((sum, v) => sum + v, 0) / known.length : 0;
}

// Largest at the bottom; beyond eight the small ones are taken together, so that colours stay apart.
function stack(title, series, options) {
  if (series.length === 0) return null;
  if (series.length === 1) return { title: `${title}: ${series[0].label}`, ...options, zero: true, series };
  const sorted = [...series].sort((a, b) => mean(b.values) - mean(a.values));
  const shown = sorted.length > 9 ? sorted.slice(0, 8) : sorted;
  const others = sorted.slice(shown.length);
  if (others.length) {
    const sum = others[0].values.map((_, i) => others.reduce((total, s) => total + (s.values[i] ?? 0), 0));
    shown.push({ label: `${others.length} others`, values: sum });
  }
  return { title, kind: "stack", ...options, series: shown };
}

function lines(title, series, options) {
  if (series.length === 0) return null;
  const positive = series.some((s) => s.values.some((v) => v !== null && v > 0));
  return { title, ...options, log: options.log && positive, series };
}

function hasValues(spec) {
  return spec.series.some((series) => series.values.some((value) => value !== null && (!spec.log || value > 0)));
}

function withColors(spec) {
  return { ...spec, series: spec.series.map((series, i) => ({ ...series, color: COLORS[i % COLORS.length] })) };
}

// Dashed lines in the training curves: what the most accurate single tool does on the held-out tasks.
function referencesFrom(policies) {
  const experts = policies.filter((p) => p.name.startsWith("always:") && p.estimates.accuracy.value !== null);
  if (experts.length === 0) return {};
  const best = experts.reduce((a, b) => (b.estimates.accuracy.value > a.estimates.accuracy.value ? b : a));
  const label = `${best.label}, held-out tasks`;
  const cost = best.estimates.cost_usd.value;
  return {
    accuracy: [{ value: best.estimates.accuracy.value, label }],
    cost: cost === null ? [] : [{ value: cost, label }],
  };
}

function drawPhase(section, title, lead, curves, references) {
  const { main, rest } = chartSpecs(curves.series, references);
  const crosshair = makeCrosshair();
  const cards = (specs) => specs.filter(hasValues).map((spec) => curveChart(withColors(spec), curves.steps, crosshair));
  section.append(el("h2", {}, title), el("p", { class: "lead" }, lead));
  const grid = el("div", { class: "chart-grid" }, cards(main));
  if (main.length === 0) {
    grid.append(...cards(rest));
    section.append(grid);
    return;
  }
  section.append(grid);
  if (rest.length === 0) return;
  // Folded charts have no width to be drawn in, so they are made when the part is opened.
  const folded = el("div", { class: "chart-grid" });
  const details = el("details", { class: "more" }, el("summary", {}, `${rest.length} more metrics`), folded);
  details.addEventListener("toggle", () => folded.childElementCount || folded.append(...cards(rest)));
  section.append(details);
}

function drawCurveSections() {
  const anchor = document.getElementById("curves");
  const titles = { train: "Training by reinforcement", sft: "Supervised warm start" };
  const phases = Object.keys(data.curves).sort((a, b) => (b === "train") - (a === "train") || a.localeCompare(b));
  for (const phase of phases) {
    const curves = data.curves[phase];
    if (curves.steps.length === 0) continue;
    const window = smoothingWindow(curves.steps.length);
    const lead =
      (window > 1 ? `Thin lines are single steps; bold lines and areas the mean of ${window} steps. ` : "") +
      (curves.steps.length > 1 ? "Point at a step to see its values in all charts; otherwise the last step is shown." : "One step so far.");
    const section = phase === phases[0] ? anchor : el("section");
    if (section !== anchor) anchor.after(section);
    drawPhase(section, titles[phase] ?? phase, lead, curves, phase === "train" ? referencesFrom(data.policies) : {});
  }
  if (phases.length === 0) anchor.append(el("h2", {}, "Curves"), el("p", { class: "lead" }, "No step has been written yet."));
}

function makeSortable(table) {
  if (!table) return;
  const buttons = [...table.querySelectorAll(".sort")];
  buttons.forEach((button, i) =>
    button.addEventListener("click", () => {
      const firstUp = button.dataset.ascending === "1";
      const up = button.getAttribute("aria-pressed") === "true" ? !button.classList.contains("up") : firstUp;
      for (const other of buttons) other.setAttribute("aria-pressed", String(other === button));
      button.classList.toggle("up", up);
      const key = (row) => {
        const text = row.cells[i + 1].dataset.sort;
        return text === "" ? null : Number(text);
      };
      const rows = [...table.tBodies[0].rows].sort((a, b) => {
        const [x, y] = [key(a), key(b)];
        if (x === null || y === null) return (x === null) - (y === null); // unknown last, either way
        return up ? x - y : y - x;
      });
      table.tBodies[0].append(...rows);
    }),
  );
}

function makeThemeButton() {
  const button = document.getElementById("theme");
  const isDark = () =>
    (document.documentElement.dataset.theme ?? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";
  const name = () => {
    button.textContent = isDark() ? "Light" : "Dark";
  };
  button.hidden = false;
  button.addEventListener("click", () => {
    document.documentElement.dataset.theme = isDark() ? "light" : "dark";
    name();
  });
  name();
}

makeThemeButton();
makeSortable(document.querySelector("table.policies"));
const scatterFigure = document.getElementById("scatter");
if (scatterFigure) scatterChart(scatterFigure, data.policies);
drawCurveSections();
makeExplorer(document.getElementById("explorer"), data.trajectories);
document.documentElement.dataset.ready = "true";
