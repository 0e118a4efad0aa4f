// Runs as they train: what is chosen is drawn, and asked for again where its file has grown.
// @ts-check
import { ask, byId, el, figure } from "/assets/studio.js";

const EVERY = 2000; // milliseconds between two looks at the files
const POINTS = 600; // of a curve; a closer look asks for as many of the part that is seen
const FIRST = 8; // runs that are chosen at the start
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

/** @typedef {{ name: string, training: boolean, changed: number, step: number, steps: number | null, tokens?: number, seconds?: number, loss?: number, validation_loss?: number }} Run */
/** @type {Run[]} */
let runs = [];
/** @type {Map<string, any>} */
const curves = new Map();
/** @type {Map<string, string>} */
const shownAs = new Map();
const given = new URLSearchParams(location.hash.slice(1));
/** @type {Set<string>} */
const chosen = new Set(given.getAll("run"));
let isFirst = !given.has("run");
/** @type {[number, number] | null} */
let range = null;
/** @type {any} */
let axes = {};
/** @type {any[]} */
let plots = [];

const axis = () => byId("axis").value || "tokens";
/** @param {any} found @param {string} name */
const positions = (found, name) => {
  if (name === "flops") return found.flops_per_step ? found.steps.map((/** @type {number} */ step) => step * found.flops_per_step) : [];
  if (name === "dollars") return found.usd_per_second ? found.seconds.map((/** @type {number} */ second) => second * found.usd_per_second) : [];
  return found[name];
};
/** The exponential moving average of what is known, corrected for its beginning. @param {(number | null)[]} values @param {number} weight */
const smoothed = (values, weight) => {
  if (!weight) return values;
  let sum = 0, all = 0;
  return values.map((value) => {
    if (value === null) return null;
    sum = weight * sum + (1 - weight) * value;
    all = weight * all + 1 - weight;
    return sum / all;
  });
};
/** @param {string} name */
const styleOf = (name) => {
  const place = [...chosen].indexOf(name);
  return { colour: COLOURS[place % COLOURS.length], dash: DASHES[Math.floor(place / COLOURS.length) % DASHES.length] };
};

const showList = () => {
  const wanted = byId("filter").value.toLowerCase();
  const rows = runs.filter(({ name }) => name.toLowerCase().includes(wanted)).map((run) => {
    const isChosen = chosen.has(run.name);
    const box = /** @type {HTMLInputElement} */ (el("input", { type: "checkbox" }));
    box.checked = isChosen;
    box.addEventListener("change", () => { if (box.checked) chosen.add(run.name); else chosen.delete(run.name); choose(); });
    const swatch = el("span", { class: "swatch" });
    swatch.style.background = isChosen ? `var(--${styleOf(run.name).colour})` : "transparent";
    const state = `step ${figure(run.step, "count")}${run.steps ? ` of ${figure(run.steps, "count")}` : ""}`;
    const loss = run.validation_loss !== undefined ? `, validation loss ${figure(run.validation_loss, "loss")}` : run.loss !== undefined ? `, loss ${figure(run.loss, "loss")}` : "";
    return el("li", {}, el("label", {}, box, swatch, el("span", { class: `name${run.training ? " live" : ""}` }, run.name),
      el("span", { class: "soft" }, `${state}${loss}${run.training ? ", training" : ""}`)));
  });
  byId("list").replaceChildren(...rows);
};

/** @param {string} name @param {string} unit @param {string} title */
const draw = (name, unit, title) => {
  const over = axis(), weight = Number(byId("smoothing").value);
  const lines = [...chosen].filter((run) => curves.get(run)?.curves[name] && positions(curves.get(run), over).length);
  if (!lines.length) return null;
  const place = el("div", { class: "chart", "data-curve": name }, el("h2", {}, title));
  byId("charts").append(place);
  const at = el("p", { class: "at" }, "");
  const data = uPlot.join(lines.map((run) => [positions(curves.get(run), over), smoothed(curves.get(run).curves[name], weight)]));
  const values = data.slice(1).flat().filter((/** @type {any} */ value) => typeof value === "number");
  const isLogarithmic = byId("logarithmic").checked && values.length && values.every((/** @type {number} */ value) => value > 0);
  const colour = (/** @type {string} */ each) => getComputedStyle(document.documentElement).getPropertyValue(`--${each}`).trim();
  const font = `12px ${getComputedStyle(document.body).fontFamily}`;
  const common = { font, stroke: () => colour("soft"), ticks: { show: false }, grid: { stroke: () => colour("rule"), width: 1 } };
  const isSparse = name === "validation_loss" || lines.some((run) => curves.get(run).curves[name].filter((/** @type {any} */ v) => v !== null).length < 20);
  const plot = new uPlot({
    width: Math.max(200, place.clientWidth), height: name === "loss" ? 300 : 190,
    legend: { show: false },
    scales: { x: { time: false }, y: isLogarithmic ? { distr: 3 } : {} },
    series: [{}, ...lines.map((run) => ({
      label: run, stroke: () => colour(styleOf(run).colour), dash: styleOf(run).dash, width: 1.5, spanGaps: true, points: { show: isSparse, size: 5 },
    }))],
    axes: [
      { ...common, values: (/** @type {any} */ _, /** @type {number[]} */ ticks) => ticks.map((tick) => figure(tick, axes[over].unit)) },
      { ...common, size: 64, values: (/** @type {any} */ _, /** @type {number[]} */ ticks) => tickLabels(ticks.map((tick) => tick ?? 0), unit).map((label, index) => ticks[index] === null ? "" : label) },
    ],
    cursor: { y: false, sync: { key: "runs", scales: ["x", null] }, drag: { x: true, y: false, setScale: false } },
    hooks: {
      setCursor: [(/** @type {any} */ self) => {
        const index = self.cursor.idx;
        if (index === null || index === undefined) { at.textContent = ""; return; }
        const here = self.data[0][index];
        const told = lines.map((run, series) => {
          let near = index;
          for (let far = 0; far < 200 && typeof self.data[series + 1][near] !== "number"; far++) near = index + (far % 2 ? (far + 1) / 2 : -far / 2);
          return typeof self.data[series + 1][near] === "number" ? `${run} ${figure(self.data[series + 1][near], unit)}` : null;
        }).filter((each) => each !== null);
        at.textContent = `${figure(here, axes[over].unit)}: ${told.slice(0, 12).join(" · ")}`;
      }],
      setSelect: [(/** @type {any} */ self) => {
        const { left, width } = self.select;
        if (width < 4) return;
        closer(self.posToVal(left, "x"), self.posToVal(left + width, "x"));
      }],
    },
  }, data, place);
  plot.over.addEventListener("dblclick", () => closer(null, null));
  place.append(at);
  place.setAttribute("role", "img");
  place.setAttribute("aria-label", `${title}: ${lines.map((run) => { const known = curves.get(run).curves[name].filter((/** @type {any} */ v) => v !== null); return `${run} from ${figure(known[0], unit)} to ${figure(known.at(-1), unit)}`; }).join("; ")}`);
  return plot;
};

const showCharts = () => {
  for (const plot of plots) plot.destroy();
  byId("charts").replaceChildren();
  byId("empty").hidden = chosen.size > 0;
  const names = new Set([...Object.keys(CURVES), ...[...chosen].flatMap((run) => Object.keys(curves.get(run)?.curves ?? {}))]);
  plots = [...names].map((name) => draw(name, CURVES[name]?.[1] ?? "number", CURVES[name]?.[0] ?? name.replaceAll("_", " "))).filter((plot) => plot !== null);
  document.body.dataset.drawn = String(plots.length);
};

const showTable = async () => {
  const names = [...chosen].filter((name) => runs.some((run) => run.name === name)).slice(0, 24);
  const rows = names.map((name) => /** @type {Run} */ (runs.find((run) => run.name === name)));
  const differences = names.length > 1 ? await ask(`/api/runs/differences?${new URLSearchParams(names.map((name) => ["run", name]))}`) : [];
  /** @type {[string, (run: Run) => string][]} */
  const figures = [
    ["step", (run) => figure(run.step, "count")], ["tokens", (run) => figure(run.tokens, "count")], ["time", (run) => figure(run.seconds, "seconds")],
    ["training loss", (run) => figure(run.loss, "loss")], ["validation loss", (run) => figure(run.validation_loss, "loss")],
  ];
  byId("compared").hidden = !names.length;
  byId("table").replaceChildren(
    el("thead", {}, el("tr", {}, el("th", { scope: "col" }, ""), ...names.map((name) => el("th", { scope: "col" }, el("a", { href: `/runs/report?${new URLSearchParams({ run: name })}` }, name))))),
    el("tbody", {}, ...figures.map(([title, of]) => el("tr", {}, el("th", { scope: "row" }, title), ...rows.map((run) => el("td", {}, of(run))))),
      ...differences.map((/** @type {{ field: string, values: string[] }} */ { field, values }) => el("tr", {}, el("th", { scope: "row" }, el("code", {}, field)), ...values.map((value) => el("td", {}, value))))));
};

/** Ask for what has changed of the chosen runs, and draw if anything has. @param {boolean} all */
const refresh = async (all) => {
  const asked = [...chosen].filter((name) => {
    const run = runs.find((each) => each.name === name);
    return run && (all || shownAs.get(name) !== `${run.changed} ${run.step}`);
  });
  /** @type {Record<string, string>} */
  const part = range ? { from: String(range[0]), to: String(range[1]) } : {};
  const wanted = range;
  await Promise.all(asked.map(async (name) => {
    const found = await ask(`/api/runs/curves?${new URLSearchParams({ run: name, points: String(POINTS), ...part })}`);
    // Another part was chosen meanwhile, and is asked for.
    if (range !== wanted) return;
    curves.set(name, found);
    const run = runs.find((each) => each.name === name);
    shownAs.set(name, run ? `${run.changed} ${run.step}` : "");
  }));
  if (asked.length || all) { showCharts(); await showTable(); }
};

/** The part between two positions of the axis; null is all. @param {number | null} from @param {number | null} to */
const closer = async (from, to) => {
  if (from === null || to === null) range = null;
  else {
    const steps = [...chosen].flatMap((name) => {
      const found = curves.get(name), along = found ? positions(found, axis()) : [];
      return found ? found.steps.filter((/** @type {number} */ _, /** @type {number} */ index) => along[index] >= from && along[index] <= to) : [];
    });
    if (!steps.length) return;
    range = [steps.reduce((one, other) => Math.min(one, other)), steps.reduce((one, other) => Math.max(one, other))];
  }
  await refresh(true);
};

const choose = async () => {
  history.replaceState(null, "", `#${new URLSearchParams([...chosen].map((name) => ["run", name]))}`);
  showList();
  await refresh(true);
};

const look = async () => {
  try {
    const told = await ask("/api/runs");
    runs = told.runs;
    if (!byId("axis").options.length) {
      axes = told.axes;
      byId("axis").replaceChildren(...Object.entries(axes).map(([name, each]) => el("option", { value: name }, /** @type {any} */ (each).name)));
      byId("axis").value = "tokens";
    }
    if (isFirst) { for (const run of runs.slice(0, FIRST)) chosen.add(run.name); isFirst = false; }
    byId("where").textContent = `${runs.length} below ${told.folder}`;
    const training = runs.filter((run) => run.training).length;
    byId("live").textContent = training ? `${training} in training` : "none in training";
    showList();
    await refresh(false);
    byId("empty").hidden = chosen.size > 0;
  } catch (error) {
    byId("live").textContent = `the studio does not answer: ${/** @type {Error} */ (error).message}`;
  }
  document.body.dataset.ready = "runs";
  setTimeout(look, document.hidden ? 5 * EVERY : EVERY);
};

byId("filter").addEventListener("input", showList);
byId("all").addEventListener("click", () => { for (const run of runs) if (run.name.toLowerCase().includes(byId("filter").value.toLowerCase())) chosen.add(run.name); choose(); });
byId("none").addEventListener("click", () => { chosen.clear(); choose(); });
byId("whole").addEventListener("click", () => closer(null, null));
for (const id of ["axis", "smoothing", "logarithmic"]) byId(id).addEventListener("input", showCharts);
let width = document.documentElement.clientWidth;
new ResizeObserver(() => { if (document.documentElement.clientWidth !== width) { width = document.documentElement.clientWidth; showCharts(); } }).observe(document.documentElement);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", showCharts);
look();
