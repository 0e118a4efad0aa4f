// Runs as they train: what is chosen is drawn, and asked for again where its file has grown.
// @ts-check
import { ask, byId, el, figure } from "/assets/studio.js";
import { chart, nearest } from "/assets/lines.js";

const EVERY = 2000; // milliseconds between two looks at the files, or more where drawing takes long
const POINTS = 600; // of a curve; of many curves each has fewer
const ALL_POINTS = 60_000;
const TOGETHER = 250; // runs of one request
const FIRST = 8; // runs that are chosen at the start
const RESTS = 300; // milliseconds without a move after which finer curves are asked for
const LISTED = 500;
const GRID = 200; // positions at which a group has a mean
const COLOURS = ["blue", "vermilion", "green", "purple", "orange", "sky", "grey"];
const DASHES = [[], [6, 3], [2, 3]];
/** Curves that every run may have, with their units; further figures are numbers. @type {Record<string, [string, string]>} */
const CURVES = {
  loss: ["training loss, nats per token", "loss"],
  validation_loss: ["validation loss, nats per token", "loss"],
  learning_rate: ["learning rate", "number"],
  gradient_norm: ["gradient norm before clipping", "number"],
  tokens_per_second: ["tokens per second", "tokens/s"],
  mfu: ["MFU", "share"],
  bytes: ["memory of the process", "bytes"],
};

/** @typedef {{ name: string, training: boolean, sampled: boolean, changed: number, step: number, steps: number | null, tokens?: number, seconds?: number, loss?: number, validation_loss?: number }} Run */
/** @typedef {import("./lines.js").Line} Line */
/** @typedef {import("./lines.js").Range} Range */
/** @typedef {{ place: HTMLElement, plot: ReturnType<typeof chart> | null, isOld: boolean, runs: Map<string, { x: Float64Array, y: Float64Array }> }} Shown */
/** @type {Run[]} */
let runs = [];
/** @type {Map<string, Run>} */
let known = new Map();
/** The charts by the names of their curves. @type {Map<string, Shown>} */
const shown = new Map();
/** What of each run is drawn. @type {Map<string, string>} */
const drawn = new Map();
const given = new URLSearchParams(location.hash.slice(1));
/** @type {Set<string>} */
const chosen = new Set(given.getAll("run"));
let isFirst = !given.has("run");
/** The part of the axis that is looked at; null is all. @type {Range | null} */
let range = null;
/** @type {Record<string, { name: string, unit: string }>} */
let axes = {};
/** The value of the grouping field of each run. @type {Map<string, string> | null} */
let groups = null;
let turn = 0, isBusy = false, took = 0, settling = 0;

const axis = () => byId("axis").value || "tokens";
const isGrouped = () => groups !== null;
const stateOf = (/** @type {Run} */ run) => `${run.changed} ${run.step} ${run.sampled}`;
/** The exponential moving average, corrected for its beginning. @param {Float64Array} values @param {number} weight */
const smoothed = (values, weight) => {
  let sum = 0, all = 0;
  return weight ? values.map((value) => {
    sum = weight * sum + (1 - weight) * value;
    all = weight * all + 1 - weight;
    return sum / all;
  }) : values;
};
/** @param {string} name */
const groupOf = (name) => groups?.get(name) ?? "–";
const labels = () => [...new Set([...chosen].map((name) => isGrouped() ? groupOf(name) : name))];
/** Colour and dash by the place among the chosen runs or groups. */
const styles = () => new Map(labels().map((label, place) => [label, { colour: COLOURS[place % COLOURS.length], dash: DASHES[Math.floor(place / COLOURS.length) % DASHES.length] }]));

const showList = () => {
  const wanted = byId("filter").value.toLowerCase(), colours = styles();
  const found = runs.filter(({ name }) => name.toLowerCase().includes(wanted));
  const rows = found.slice(0, LISTED).map((run) => {
    const box = /** @type {HTMLInputElement} */ (el("input", { type: "checkbox" }));
    box.checked = chosen.has(run.name);
    box.addEventListener("change", () => { if (box.checked) chosen.add(run.name); else chosen.delete(run.name); choose(); });
    const swatch = el("span", { class: "swatch" });
    const style = colours.get(isGrouped() ? groupOf(run.name) : run.name);
    swatch.style.background = box.checked && style ? `var(--${style.colour})` : "transparent";
    const state = `step ${figure(run.step, "count")}${run.steps ? ` of ${figure(run.steps, "count")}` : ""}`;
    const loss = run.validation_loss !== undefined ? `, validation loss ${figure(run.validation_loss, "loss")}` : run.loss !== undefined ? `, loss ${figure(run.loss, "loss")}` : "";
    return el("li", {}, el("label", {}, box, swatch, el("span", { class: `name${run.training ? " live" : ""}` }, run.name),
      el("span", { class: "soft" }, `${state}${loss}${run.training ? ", training" : ""}`)));
  });
  byId("list").replaceChildren(...rows);
  byId("more").textContent = found.length > LISTED ? `The ${LISTED} newest of ${found.length.toLocaleString("en-US")}: filter by name to see others.` : "";
};

/** One curve of some runs: asked for, and kept beside the others. @param {string} curve @param {string[]} names */
const load = async (curve, names) => {
  const means = Number(byId("smoothing").value) > 0 || isGrouped();
  const points = Math.round(Math.max(60, Math.min(POINTS, ALL_POINTS / chosen.size)));
  const part = range ? { begin: range[0], end: range[1] } : {};
  const found = [], figures = [];
  for (let from = 0; from < names.length; from += TOGETHER) {
    const content = await ask("/api/runs/curves", { body: { runs: names.slice(from, from + TOGETHER), curve, axis: axis(), points, means, ...part } });
    const length = new DataView(content).getUint32(0, true);
    const told = JSON.parse(new TextDecoder().decode(new Uint8Array(content, 4, length)));
    let at = 4 + length;
    for (const { name, n } of told.runs) {
      found.push({ name, x: new Float64Array(content, at, n), y: new Float64Array(content, at + 8 * n, n) });
      at += 16 * n;
    }
    figures.push(...told.figures);
  }
  return { found, figures };
};

/** The mean of a group's runs at positions that all share, with their range. @param {{ x: Float64Array, y: Float64Array }[]} members */
const meanOf = (members) => {
  const begin = Math.min(...members.map(({ x }) => x[0])), end = Math.max(...members.map(({ x }) => x[x.length - 1]));
  /** @type {{ x: number[], y: number[], low: number[], high: number[] }} */
  const made = { x: [], y: [], low: [], high: [] };
  for (let place = 0; place < GRID; place++) {
    const at = begin + (end - begin) * place / (GRID - 1);
    const values = members.filter(({ x }) => x[0] <= at && at <= x[x.length - 1]).map(({ x, y }) => {
      const index = nearest(x, at), other = Math.max(0, Math.min(x.length - 1, x[index] < at ? index + 1 : index - 1));
      return x[other] === x[index] ? y[index] : y[index] + (y[other] - y[index]) * (at - x[index]) / (x[other] - x[index]);
    });
    if (!values.length) continue;
    made.x.push(at);
    made.y.push(values.reduce((sum, value) => sum + value, 0) / values.length);
    made.low.push(Math.min(...values));
    made.high.push(Math.max(...values));
  }
  return made;
};

/** @param {Shown} on @returns {Line[]} */
const linesOf = (on) => {
  const weight = Number(byId("smoothing").value), colours = styles();
  const own = [...chosen].flatMap((name) => {
    const found = on.runs.get(name);
    return found?.x.length ? [{ name, x: found.x, y: smoothed(found.y, weight) }] : [];
  });
  if (!isGrouped()) return own.map(({ name, x, y }) => ({ label: name, ...colours.get(name) ?? { colour: "grey", dash: [] }, x, y }));
  return [...colours].flatMap(([label, style]) => {
    const members = own.filter(({ name }) => groupOf(name) === label);
    if (!members.length) return [];
    const { x, y, low, high } = meanOf(members);
    return [{ label: `${label} (${members.length === 1 ? "1 run" : `${members.length} runs`})`, ...style, x, y, band: { low, high } }];
  });
};

/** What all charts show of the axis. @returns {Range} */
const whole = () => {
  let low = Infinity, high = 0;
  for (const { runs: each } of shown.values()) for (const [name, { x }] of each) if (chosen.has(name) && x.length) { low = Math.min(low, x[0]); high = Math.max(high, x[x.length - 1]); }
  return low < high ? [low, high] : [0, 1];
};
/** @returns {Range} */
const part = () => {
  const [low, high] = range ?? whole();
  return byId("logarithmic-x").checked && low <= 0 ? [high / 1e6, high] : [low, high];
};

/** @param {string} curve */
const draw = (curve) => {
  const on = /** @type {Shown} */ (shown.get(curve)), [title, unit] = CURVES[curve] ?? [curve.replaceAll("_", " "), "number"];
  const lines = linesOf(on);
  on.place.hidden = !lines.length;
  if (on.plot && (on.isOld || !lines.length)) { on.plot.destroy(); on.plot = null; }
  on.isOld = false;
  if (!lines.length) return;
  const isLog = byId("logarithmic").checked && lines.some(({ y }) => Array.prototype.some.call(y, (value) => value > 0));
  if (on.plot) on.plot.show(lines, part());
  else on.plot = chart(on.place, lines, { unit, axisUnit: axes[axis()].unit, range: part(), logX: byId("logarithmic-x").checked, logY: isLog, height: curve === "loss" ? 300 : 190, select: closer, pan });
  const ends = lines.slice(0, 12).map(({ label, y }) => `${label} from ${figure(y[0], unit)} to ${figure(y[y.length - 1], unit)}`);
  on.place.setAttribute("aria-label", `${title}: ${ends.join("; ")}${lines.length > 12 ? `; and ${lines.length - 12} more` : ""}. Arrow keys move along, plus and minus change how much is seen, 0 shows all.`);
};

const placeOf = (/** @type {string} */ curve) => {
  const place = el("div", { class: "chart", "data-curve": curve, role: "img", tabindex: "0" }, el("h2", {}, CURVES[curve]?.[0] ?? curve.replaceAll("_", " ")));
  place.hidden = true;
  place.addEventListener("keydown", (event) => {
    const by = { ArrowLeft: -0.1, ArrowRight: 0.1 }[event.key], [low, high] = part(), quarter = (high - low) / 4;
    if (by) pan(by);
    else if (event.key === "+" || event.key === "=") closer(low + quarter, high - quarter);
    else if (event.key === "-") closer(low - 2 * quarter, high + 2 * quarter);
    else if (event.key === "0") closer(-Infinity, Infinity);
    else return;
    event.preventDefault();
  });
  byId("charts").append(place);
  shown.set(curve, { place, plot: null, isOld: false, runs: new Map() });
};

/** Ask for what is missing or has changed, and draw chart after chart, those in sight first. @param {boolean} all */
const refresh = async (all) => {
  const mine = ++turn, begin = performance.now();
  const names = [...chosen].filter((name) => { const run = known.get(name); return run && (all || drawn.get(name) !== stateOf(run)); });
  const states = names.map((name) => stateOf(/** @type {Run} */ (known.get(name))));
  if (!names.length && !all) return;
  isBusy = true;
  const isSeen = (/** @type {string} */ curve) => { const box = shown.get(curve)?.place.getBoundingClientRect(); return box && box.height > 0 && box.bottom > 0 && box.top < innerHeight; };
  const curves = [...shown.keys()].sort((one, other) => Number(isSeen(other) || false) - Number(isSeen(one) || false));
  try {
    for (const curve of curves) {
      const { found, figures } = await load(curve, names);
      // Something else was chosen meanwhile, and is asked for.
      if (mine !== turn) return;
      const on = /** @type {Shown} */ (shown.get(curve));
      if (all) on.runs.clear();
      for (const { name, x, y } of found) on.runs.set(name, { x, y });
      for (const name of figures) if (!shown.has(name)) { placeOf(name); curves.push(name); }
      draw(curve);
      await new Promise(requestAnimationFrame);
      if (mine !== turn) return;
    }
  } finally {
    if (mine === turn) isBusy = false;
  }
  names.forEach((name, index) => drawn.set(name, states[index]));
  took = performance.now() - begin;
  await showTable();
  if (mine !== turn) return;
  document.body.dataset.drawn = String([...shown.values()].filter(({ place }) => !place.hidden).length);
};

/** Draw all charts anew by other settings, each when its curves are there. */
const redraw = () => {
  for (const on of shown.values()) on.isOld = true;
  byId("empty").hidden = chosen.size > 0;
  delete document.body.dataset.drawn;
  return refresh(true);
};

/** Draw what is there in other colours or another width. */
const restyle = () => { for (const [curve, on] of shown) { on.isOld = true; draw(curve); } };

/** Look at a part between two positions. @param {number} from @param {number} to */
const closer = (from, to) => {
  range = Number.isFinite(from) && Number.isFinite(to) ? [from, to] : null;
  refresh(true);
};
/** Move what all charts show by a share of its width; finer curves are asked for when it rests. @param {number} share */
const pan = (share) => {
  const [low, high] = part();
  range = byId("logarithmic-x").checked ? [low * (high / low) ** share, high * (high / low) ** share] : [low + share * (high - low), high + share * (high - low)];
  // Looked for before anything is moved: a look in between would have the page laid out again.
  const seen = [...shown.values()].filter(({ place }) => { const box = place.getBoundingClientRect(); return box.bottom > 0 && box.top < innerHeight; });
  for (const { plot } of seen) plot?.move(range);
  // What is being asked for would be of another part.
  turn++;
  isBusy = true;
  clearTimeout(settling);
  settling = setTimeout(() => refresh(true), RESTS);
};

const showTable = async () => {
  const names = [...chosen].filter((name) => known.has(name)), columns = names.slice(0, 24);
  const rows = columns.map((name) => /** @type {Run} */ (known.get(name)));
  const differences = columns.length > 1 ? await ask("/api/runs/differences", { body: { runs: columns } }) : [];
  /** @type {[string, (run: Run) => string][]} */
  const figures = [
    ["step", (run) => figure(run.step, "count")], ["tokens", (run) => figure(run.tokens, "count")], ["time", (run) => figure(run.seconds, "seconds")],
    ["training loss", (run) => figure(run.loss, "loss")], ["validation loss", (run) => figure(run.validation_loss, "loss")],
  ];
  byId("compared").hidden = !columns.length;
  byId("left-out").textContent = names.length > columns.length ? `The first ${columns.length} of ${names.length.toLocaleString("en-US")} runs.` : "";
  byId("table").replaceChildren(
    el("thead", {}, el("tr", {}, el("th", { scope: "col" }, ""), ...columns.map((name) => el("th", { scope: "col" }, el("a", { href: `/run#${new URLSearchParams({ run: name })}` }, name))))),
    el("tbody", {}, ...figures.map(([title, of]) => el("tr", {}, el("th", { scope: "row" }, title), ...rows.map((run) => el("td", {}, of(run))))),
      ...differences.map((/** @type {{ field: string, values: string[] }} */ { field, values }) => el("tr", {}, el("th", { scope: "row" }, el("code", {}, field)), ...values.map((value) => el("td", {}, value))))));
};

/** The fields in which the chosen runs differ, to group by. */
const showGroups = async () => {
  const names = [...chosen].filter((name) => known.has(name)), before = byId("group").value;
  const fields = names.length > 1 ? await ask("/api/runs/differences", { body: { runs: names.slice(0, 1000) } }) : [];
  const folders = names.map((name) => name.split("/").slice(0, -1).join("/") || "–");
  if (new Set(folders).size > 1) fields.unshift({ field: "folder", values: folders });
  byId("group").replaceChildren(el("option", { value: "" }, "each run"), ...fields.map((/** @type {{ field: string }} */ { field }) => el("option", { value: field }, field)));
  const found = fields.find((/** @type {{ field: string }} */ { field }) => field === before);
  byId("group").value = found ? before : "";
  groups = found ? new Map(names.map((name, index) => [name, found.values[index] ?? "–"])) : null;
};

const choose = async () => {
  history.replaceState(null, "", `#${new URLSearchParams([...chosen].slice(0, 100).map((name) => ["run", name]))}`);
  range = null;
  turn++;
  await showGroups();
  showList();
  await redraw();
};

const look = async () => {
  try {
    const told = await ask("/api/runs"), before = JSON.stringify(runs);
    runs = told.runs;
    known = new Map(runs.map((run) => [run.name, run]));
    if (!byId("axis").options.length) {
      axes = told.axes;
      byId("axis").replaceChildren(...Object.entries(axes).map(([name, each]) => el("option", { value: name }, each.name)));
      byId("axis").value = "tokens";
    }
    byId("where").textContent = `${runs.length.toLocaleString("en-US")} below ${told.folder}`;
    byId("actions").hidden = !told.allow_actions;
    const training = runs.filter((run) => run.training).length;
    byId("live").textContent = `${training || "none"} in training${told.waiting ? `; ${told.waiting} are sampled, and being read whole` : ""}`;
    if (isFirst) {
      for (const run of runs.slice(0, FIRST)) chosen.add(run.name);
      isFirst = false;
      await showGroups();
    }
    if (JSON.stringify(runs) !== before) showList();
    if (!isBusy) await refresh(false);
    byId("empty").hidden = chosen.size > 0;
  } catch (error) {
    byId("live").textContent = `the studio does not answer: ${/** @type {Error} */ (error).message}`;
  }
  document.body.dataset.ready = "runs";
  setTimeout(look, Math.max(document.hidden ? 5 * EVERY : EVERY, 10 * took));
};

for (const curve of Object.keys(CURVES)) placeOf(curve);
byId("filter").addEventListener("input", showList);
byId("all").addEventListener("click", () => { for (const run of runs) if (run.name.toLowerCase().includes(byId("filter").value.toLowerCase())) chosen.add(run.name); choose(); });
byId("none").addEventListener("click", () => { chosen.clear(); choose(); });
byId("whole").addEventListener("click", () => closer(-Infinity, Infinity));
byId("group").addEventListener("input", async () => { await showGroups(); showList(); await redraw(); });
byId("axis").addEventListener("input", () => { range = null; for (const { runs: each } of shown.values()) each.clear(); redraw(); });
for (const id of ["smoothing", "logarithmic", "logarithmic-x"]) byId(id).addEventListener("input", redraw);
let width = document.documentElement.clientWidth;
new ResizeObserver(() => { if (document.documentElement.clientWidth !== width) { width = document.documentElement.clientWidth; restyle(); } }).observe(document.documentElement);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", restyle);
look();
