// Trajectories to read: a filtered list, and one of them as a conversation.

const PAGE_SIZE = 100;

function makeExplorer(section, trajectories) {
  if (trajectories.length === 0) return;
  const state = { source: "", outcome: "", tool: "", query: "", shown: PAGE_SIZE, selected: null };
  const list = el("div", { class: "card list", role: "list" });
  const detail = el("div", { class: "card detail" });
  const panes = el("div", { class: "panes" }, list, detail);

  const select = (index, scroll) => {
    state.selected = index;
    panes.classList.toggle("reading", index !== null);
    detail.replaceChildren(...conversation(trajectories, index, select));
    for (const item of list.querySelectorAll(".item")) item.setAttribute("aria-current", item.dataset.index === String(index));
    if (index !== null) history.replaceState(null, "", `#trajectory=${index}`);
    if (scroll && panes.getBoundingClientRect().top < 0) panes.scrollIntoView();
  };
  const refresh = () => renderList(list, trajectories, state, (index) => select(index, true), refresh);
  const change = (key) => (event) => {
    state[key] = event.target.value;
    state.shown = PAGE_SIZE;
    refresh();
  };
  section.append(filterBar(trajectories, change), panes);
  refresh();
  const linked = location.hash.match(/^#trajectory=(\d+)$/);
  if (linked && Number(linked[1]) < trajectories.length) select(Number(linked[1]), false);
  else if (window.innerWidth > 860) showFirst(detail, list, trajectories, select, panes);
  list.addEventListener("keydown", moveWithArrows);
}

// On a wide page something should be there to read; the address bar stays as it is.
function showFirst(detail, list, trajectories, select, panes) {
  const first = Math.max(0, trajectories.findIndex((t) => t.policy === "trained" && !t.is_training));
  panes.classList.add("reading");
  detail.replaceChildren(...conversation(trajectories, first, select));
  list.querySelector(`[data-index="${first}"]`)?.setAttribute("aria-current", "true");
}

function moveWithArrows(event) {
  const step = { ArrowDown: "nextElementSibling", ArrowUp: "previousElementSibling" }[event.key];
  const next = step && document.activeElement?.[step];
  if (next?.classList.contains("item")) {
    event.preventDefault();
    next.focus();
    next.click();
  }
}

function filterBar(trajectories, change) {
  const sources = (training) => countBy(trajectories.filter((t) => t.is_training === training).map((t) => t.source));
  const tools = countBy(trajectories.flatMap((t) => Object.keys(t.tool_counts)));
  const option = ([value, count]) => el("option", { value }, `${value} (${count})`);
  const optgroup = (label, entries) => (entries.length ? el("optgroup", { label }, entries.map(option)) : null);
  const choice = (label, key, ...options) =>
    el("select", { "aria-label": label, onchange: change(key) }, el("option", { value: "" }, label), ...options);
  return el(
    "div",
    { class: "filters" },
    choice("Any policy or step", "source", optgroup("Evaluation", sources(false)), optgroup("Training", sources(true))),
    choice(
      "Any outcome",
      "outcome",
      ["right", "wrong", "partly right", "dropped"].map((name) => el("option", { value: name }, name)),
    ),
    tools.length ? choice("Any tool", "tool", tools.map(option)) : null,
    el("input", { type: "search", placeholder: "Search in text", "aria-label": "Search in text", oninput: change("query") }),
  );
}

function countBy(values) {
  const counts = new Map();
  for (const value of values) counts.set(value, (counts.get(value) ?? 0) + 1);
  return [...counts];
}

function outcomeOf(trajectory) {
  if (trajectory.outcome === null) return { name: "unknown", mark: "?", style: "other" };
  if (trajectory.outcome >= 1) return { name: "right", mark: "✓", style: "right" };
  if (trajectory.outcome <= 0) return { name: "wrong", mark: "✗", style: "wrong" };
  return { name: "partly right", mark: "◐", style: "other" };
}

function matches(trajectory, state) {
  if (state.source && trajectory.source !== state.source) return false;
  if (state.tool && !Object.hasOwn(trajectory.tool_counts, state.tool)) return false;
  if (state.outcome === "dropped" && !trajectory.dropped) return false;
  if (state.outcome && state.outcome !== "dropped" && outcomeOf(trajectory).name !== state.outcome) return false;
  const query = state.query.trim().toLowerCase();
  if (!query) return true;
  return [trajectory.prompt, trajectory.task_id, ...trajectory.turns.map((turn) => turn.text)].some((text) =>
    text.toLowerCase().includes(query),
  );
}

function renderList(list, trajectories, state, select, refresh) {
  const found = trajectories.map((_, i) => i).filter((i) => matches(trajectories[i], state));
  const items = found.slice(0, state.shown).map((i) => listItem(trajectories[i], i, i === state.selected, select));
  const more =
    found.length > state.shown &&
    el(
      "button",
      {
        type: "button",
        class: "show-more",
        onclick: () => {
          state.shown += PAGE_SIZE;
          refresh();
        },
      },
      `Show ${Math.min(PAGE_SIZE, found.length - state.shown)} more`,
    );
  list.replaceChildren(el("div", { class: "list-count" }, `${found.length} of ${trajectories.length}`), ...items);
  if (more) list.append(more);
}

function listItem(trajectory, index, selected, select) {
  const { mark, name, style } = outcomeOf(trajectory);
  const tools = Object.entries(trajectory.tool_counts).map(([tool, n]) => (n === 1 ? tool : `${tool} ×${n}`));
  const numbers = [
    trajectory.cost_usd !== null ? FORMAT.cents(trajectory.cost_usd) : null,
    trajectory.latency_s !== null ? FORMAT.seconds(trajectory.latency_s) : null,
    trajectory.advantage !== null ? `advantage ${trajectory.advantage.toFixed(2)}` : null,
  ].filter((part) => part !== null);
  return el(
    "button",
    { type: "button", class: "item", "data-index": index, "aria-current": selected ? "true" : "false", onclick: () => select(index) },
    el("span", { class: "item-question" }, el("span", { class: `outcome ${style}`, title: name }, `${mark} `), questionOf(trajectory)),
    el("div", { class: "item-meta" }, [trajectory.source, ...tools].join(" · ")),
    el("div", { class: "item-meta" }, numbers.join(" · "), trajectory.dropped ? ` · dropped: ${trajectory.dropped}` : ""),
  );
}

// What was asked: the user's part of a ChatML prompt, else the end of the prompt.
function questionOf(trajectory) {
  const user = trajectory.prompt.split("<|im_start|>user\n").at(-1).split("<|im_end|>")[0].trim();
  const text = user || trajectory.prompt.trim() || trajectory.task_id || "(no prompt)";
  return text.length > 240 ? `…${text.slice(-240)}` : text;
}

function conversation(trajectories, index, select) {
  if (index === null) return [];
  const trajectory = trajectories[index];
  const hasTokens = trajectory.turns.some((turn) => turn.tokens);
  const body = el("div");
  const note = el("p", { class: "token-note" });
  const draw = (shaded) => {
    body.replaceChildren(...turnsOf(trajectory, shaded, note));
    note.hidden = !shaded;
    note.replaceChildren("likely", el("span", { class: "scale" }), "surprising to the policy. Point at a token for its logprob.");
  };
  draw(false);
  const shading = hasTokens
    ? el("label", { class: "group" }, el("input", { type: "checkbox", onchange: (event) => draw(event.target.checked) }), "shade tokens by logprob")
    : null;
  return [
    el("button", { type: "button", class: "quiet back", onclick: () => select(null, true) }, "← All trajectories"),
    detailHead(trajectory),
    groupStrip(trajectories, index, select),
    shading,
    note,
    promptBlock(trajectory.prompt),
    body,
  ].filter((node) => node !== null);
}

function detailHead(trajectory) {
  const { mark, name, style } = outcomeOf(trajectory);
  const outcome = trajectory.outcome !== null && style === "other" ? `${name} (${significant(trajectory.outcome)})` : name;
  const facts = [
    ["reward", trajectory.reward, (x) => x.toFixed(3)],
    ["advantage", trajectory.advantage, (x) => x.toFixed(3)],
    ["cost", trajectory.cost_usd, FORMAT.cents],
    ["latency", trajectory.latency_s, FORMAT.seconds],
    ["ended by", trajectory.end_reason || null, String],
    ["dropped", trajectory.dropped || null, String],
    [trajectory.is_training ? "training" : "policy", trajectory.source, String],
    ["task", trajectory.task_id || null, String],
  ].filter(([, value]) => value !== null);
  return el(
    "dl",
    { class: "detail-head" },
    el("div", {}, el("dd", { class: `outcome ${style}` }, `${mark} ${outcome}`)),
    facts.map(([label, value, format]) => el("div", {}, el("dt", {}, label), el("dd", {}, format(value)))),
  );
}

function groupStrip(trajectories, index, select) {
  const own = trajectories[index];
  const members = trajectories
    .map((trajectory, i) => [trajectory, i])
    .filter(([t]) => t.source === own.source && t.group === own.group && t.task_id === own.task_id);
  if (members.length < 2) return null;
  return el(
    "div",
    { class: "group" },
    own.is_training ? "group" : "same task",
    members.map(([member, i]) => {
      const { mark, style } = outcomeOf(member);
      const number = member.reward ?? member.cost_usd;
      return el(
        "button",
        { type: "button", "aria-current": i === index ? "true" : "false", onclick: () => select(i, false), title: member.dropped ? `dropped: ${member.dropped}` : "" },
        el("span", { class: `outcome ${style}` }, mark),
        number === null ? "" : member.reward !== null ? ` ${number.toFixed(2)}` : ` ${FORMAT.cents(number)}`,
      );
    }),
  );
}

function promptBlock(prompt) {
  if (!prompt) return null;
  const toggle = el("button", { type: "button", class: "quiet" }, "whole");
  const block = el(
    "div",
    { class: "turn prompt" },
    el("div", { class: "turn-head" }, el("b", {}, "prompt"), toggle),
    el("p", { class: "text" }, prompt),
  );
  toggle.addEventListener("click", () => {
    toggle.textContent = block.classList.toggle("open") ? "less" : "whole";
  });
  return block;
}

function turnsOf(trajectory, shaded, note) {
  if (trajectory.turns.length === 0) return [el("p", { class: "empty" }, "This trajectory has no turns.")];
  let spentUsd = 0;
  let passedS = 0;
  return trajectory.turns.map((turn, i) => {
    spentUsd += turn.cost_usd ?? 0;
    passedS += turn.latency_s ?? 0;
    const numbers = [
      turn.num_tokens !== null ? `${turn.num_tokens} tokens` : null,
      turn.logprob_mean !== null ? `mean logprob ${turn.logprob_mean.toFixed(3)}` : null,
      turn.cost_usd ? `+${FORMAT.cents(turn.cost_usd)}` : null,
      turn.latency_s ? `+${FORMAT.seconds(turn.latency_s)}` : null,
      turn.cost_usd || turn.latency_s ? `so far ${FORMAT.cents(spentUsd)}, ${FORMAT.seconds(passedS)}` : null,
    ].filter((part) => part !== null);
    const role = { assistant: "policy", tool: "tool", user: "user" }[turn.role] ?? turn.role;
    const nearby = turn.text + (trajectory.turns[i + 1]?.text ?? "");
    return el(
      "div",
      { class: turn.role === "tool" || turn.role === "assistant" ? `turn ${turn.role}` : "turn" },
      el("div", { class: "turn-head" }, el("b", {}, role), el("span", {}, numbers.join(" · "))),
      el("p", { class: "text" }, shaded && turn.tokens ? shadedTokens(turn, note) : markedText(turn.text)),
      turn.calls.map((call) => callCard(call, nearby)),
    );
  });
}

// Reasoning dimmed and calls coloured; every character is kept.
function markedText(text) {
  const parts = [];
  let within = "";
  for (const piece of text.split(/(<\/?think>|<\/?tool_call>)/)) {
    if (/^<\/?(think|tool_call)>$/.test(piece)) {
      within = piece.startsWith("</") ? "" : piece === "<think>" ? "reasoning" : "call";
      parts.push(el("span", { class: "tag" }, piece));
    } else if (piece) parts.push(within ? el("span", { class: within }, piece) : piece);
  }
  return parts.length ? parts : [el("span", { class: "empty" }, "(empty)")];
}

function shadedTokens(turn, note) {
  return turn.tokens.map((token, i) => {
    const logprob = turn.logprobs[i];
    const says = logprob === null ? "no logprob" : `logprob ${logprob.toFixed(3)}, probability ${(100 * Math.exp(logprob)).toFixed(1)}%`;
    const tell = () => note.replaceChildren(`${JSON.stringify(token)}: ${says}`);
    const node = el("span", { class: "token", title: says, onpointerenter: tell, onpointerdown: tell }, token);
    const strength = Math.min(1, -(logprob ?? 0) / 4); // e^-4 = 2% or less: full shade
    node.style.background = `color-mix(in srgb, var(--shade) ${(100 * Math.max(0, strength)).toFixed(0)}%, transparent)`;
    return node;
  });
}

function callCard(call, nearby) {
  const numbers = [
    call.cost_usd !== null ? FORMAT.cents(call.cost_usd) : null,
    call.latency_s !== null ? FORMAT.seconds(call.latency_s) : null,
    call.input_tokens || call.output_tokens ? `${call.input_tokens ?? 0} tokens in, ${call.output_tokens ?? 0} out` : null,
    call.attempts > 1 ? `${call.attempts} attempts` : null,
    call.truncated_chars ? `${call.truncated_chars} characters cut` : null,
    call.source || null,
  ].filter((part) => part !== null);
  return el(
    "div",
    { class: "call-card" },
    el("b", {}, call.tool || "(no tool)"),
    call.status === "error" ? el("span", { class: "error" }, ` ${call.error_type || "error"}`) : null,
    ` ${numbers.join(" · ")}`,
    call.arguments ? el("p", { class: "text" }, call.arguments) : null,
    call.text && !nearby.includes(call.text) ? el("p", { class: "text" }, "→ ", call.text) : null,
  );
}
