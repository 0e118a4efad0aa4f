// Sweeps as lines across their fields, and laws with their runs and intervals.
// @ts-check
import { ask, byId, el, figure } from "/assets/studio.js";
import { scale, svg } from "/assets/drawing.js";
import { chart } from "/assets/lines.js";
import { sortedTable } from "/assets/sorted.js";

const HEIGHT = 300, MARGIN = { left: 70, right: 70, top: 30, bottom: 24 };
const COLOURS = ["blue", "vermilion", "green", "purple", "orange", "sky", "grey"];
/** @typedef {{ run: string, values: any[], failed: string | null, loss: number | null, step: number, steps: number | null, training: boolean }} Run */
/** @typedef {{ name: string, place: (value: any) => number | null, value: (at: number) => number, ticks: [number, string][], isNumber: boolean }} Axis */
/** @type {{ fields: string[], runs: Run[] }} */
let sweep = { fields: [], runs: [] };
/** The part of an axis that chooses runs, in pixels. @type {Map<string, [number, number]>} */
const brushes = new Map();
/** @type {ReturnType<typeof chart> | null} */
let plot = null;

const valueOf = (/** @type {Run} */ run, /** @type {string} */ field) => field === "loss" ? run.loss : run.values[sweep.fields.indexOf(field)];
const names = () => [...sweep.fields, "loss"];
const short = (/** @type {any} */ value) => {
  if (typeof value !== "number") return String(value ?? "–");
  const rounded = Number(value.toPrecision(4));
  return Math.abs(rounded) >= 1e6 ? rounded.toExponential().replace("e+", "e") : String(rounded);
};

/** An axis of numbers, logarithmic where they span a factor of 20, or of names. @param {string} name @returns {Axis} */
const axisOf = (name) => {
  const values = [...new Set(sweep.runs.map((run) => valueOf(run, name)).filter((value) => value !== null && value !== undefined))];
  const ends = /** @type {[number, number]} */ ([HEIGHT - MARGIN.bottom, MARGIN.top]);
  if (values.length && values.every((value) => typeof value === "number")) {
    const low = Math.min(...values), high = Math.max(...values), log = low > 0 && high / low >= 20;
    const at = low === high ? () => (ends[0] + ends[1]) / 2 : scale([low, high], ends, { log });
    const ticks = values.length <= 7 ? values : low === high ? [low] : [low, .../** @type {any} */ (at).ticks, high].filter((tick, index, all) => all.slice(0, index).every((other) => Math.abs(at(other) - at(tick)) > 14));
    const share = (/** @type {number} */ y) => (y - ends[0]) / (ends[1] - ends[0]);
    return { name, isNumber: true, place: (value) => typeof value === "number" ? at(value) : null, value: (y) => log ? low * (high / low) ** share(y) : low + (high - low) * share(y), ticks: ticks.map((tick) => [at(tick), short(tick)]) };
  }
  const texts = values.map(String).sort();
  const at = (/** @type {any} */ value) => { const place = texts.indexOf(String(value)); return place < 0 ? null : ends[0] + (ends[1] - ends[0]) * (texts.length > 1 ? place / (texts.length - 1) : 0.5); };
  return { name, isNumber: false, place: at, value: () => NaN, ticks: texts.map((text) => [/** @type {number} */ (at(text)), text]) };
};

/** @param {Axis[]} axes @param {Run} run */
const isChosen = (axes, run) => axes.every(({ name, place }) => {
  const brush = brushes.get(name), at = place(valueOf(run, name));
  return !brush || (at !== null && at >= brush[0] - 0.5 && at <= brush[1] + 0.5);
});

const show = () => {
  const axes = names().map(axisOf), width = Math.max(320, byId("lines").clientWidth, 150 * axes.length);
  const x = (/** @type {number} */ place) => MARGIN.left + (width - MARGIN.left - MARGIN.right) * (axes.length > 1 ? place / (axes.length - 1) : 0.5);
  const losses = sweep.runs.map(({ loss }) => loss).filter((loss) => loss !== null), best = Math.min(...losses);
  const chosen = sweep.runs.filter((run) => isChosen(axes, run));
  const path = (/** @type {Run} */ run) => axes.flatMap(({ place }, index) => { const at = place(valueOf(run, names()[index])); return at === null ? [] : [[x(index), at]]; }).map(([px, py], index) => `${index ? "L" : "M"}${px.toFixed(1)} ${py.toFixed(1)}`).join("");
  const picture = svg("svg", { viewBox: `0 0 ${width} ${HEIGHT}`, width, height: HEIGHT, role: "img", "aria-label": `${sweep.runs.length} runs across ${names().join(", ")}; ${chosen.length} are chosen${losses.length ? `; the lowest loss is ${figure(best, "loss")}` : ""}` },
    ...sweep.runs.filter((run) => !chosen.includes(run)).map((run) => svg("path", { class: "line grey out", d: path(run) })),
    ...chosen.map((run) => svg("path", { class: `line ${run.loss === best ? "vermilion best" : "blue"}`, d: path(run) }, svg("title", {}, `${run.run}: ${figure(run.loss, "loss")}`))),
    ...axes.flatMap((axis, index) => {
      const brush = brushes.get(axis.name);
      const title = axis.name.split(".").pop() ?? axis.name;
      return [
        svg("line", { class: "axis", x1: x(index), x2: x(index), y1: MARGIN.top, y2: HEIGHT - MARGIN.bottom }),
        svg("text", { class: "tick name", x: x(index), y: 14, "text-anchor": "middle" }, title),
        ...axis.ticks.map(([at, text]) => svg("text", { class: "tick", x: x(index) + 6, y: at + 4 }, text.length > 14 ? `${text.slice(0, 13)}…` : text)),
        ...brush ? [svg("rect", { class: "brush", x: x(index) - 9, width: 18, y: brush[0], height: Math.max(2, brush[1] - brush[0]) })] : [],
        svg("rect", { class: "grip", "data-axis": axis.name, x: x(index) - 14, width: 28, y: MARGIN.top - 12, height: HEIGHT - MARGIN.top - MARGIN.bottom + 24, onpointerdown: (/** @type {PointerEvent} */ event) => drag(axis, event) }),
      ];
    }));
  byId("lines").replaceChildren(picture);
  byId("count").textContent = `${chosen.length} of ${sweep.runs.length} runs`;
  byId("draw").href = `/runs#${new URLSearchParams(chosen.slice(0, 100).map(({ run }) => ["run", run]))}`;
  sortedTable(byId("runs"), [
    { title: "run", of: (run) => run.run, shown: (run) => el("a", { href: `/run#${new URLSearchParams({ run: run.run })}` }, run.run.split("/").pop() ?? run.run) },
    ...sweep.fields.map((field) => ({ title: field, of: (/** @type {Run} */ run) => valueOf(run, field), shown: (/** @type {Run} */ run) => short(valueOf(run, field)) })),
    { title: "loss", of: (run) => run.loss, shown: (run) => figure(run.loss, "loss") },
    { title: "state", of: (run) => stateOf(run) },
  ], chosen, sweep.fields.length + 1);
};
const stateOf = (/** @type {Run} */ run) => run.failed ? `failed: ${run.failed}` : run.training ? "training" : !run.step ? "not begun" : run.steps && run.step >= run.steps ? "finished" : `step ${figure(run.step, "count")}`;

/** Choose by dragging along an axis. @param {Axis} axis @param {PointerEvent} event */
const drag = (axis, event) => {
  const box = byId("lines").querySelector("svg").getBoundingClientRect(), at = (/** @type {PointerEvent} */ each) => Math.max(MARGIN.top, Math.min(HEIGHT - MARGIN.bottom, (each.clientY - box.top) * HEIGHT / box.height));
  const begin = at(event);
  event.preventDefault();
  const move = (/** @type {PointerEvent} */ each) => {
    brushes.set(axis.name, [Math.min(begin, at(each)), Math.max(begin, at(each))]);
    show();
  };
  const end = (/** @type {PointerEvent} */ each) => {
    removeEventListener("pointermove", move);
    if (Math.abs(at(each) - begin) < 3) { brushes.delete(axis.name); show(); }
  };
  brushes.delete(axis.name);
  addEventListener("pointermove", move);
  addEventListener("pointerup", end, { once: true });
  show();
};
/** Choose by the fields for numbers or a name, as the keyboard does. */
const chooseByFields = () => {
  const axis = axisOf(byId("field").value), [from, to] = [byId("from").value.trim(), byId("to").value.trim()];
  const at = (/** @type {string} */ text, /** @type {number} */ otherwise) => text ? axis.place(axis.isNumber ? Number(text) : text) ?? otherwise : otherwise;
  const ends = [at(from, HEIGHT), at(to || (axis.isNumber ? "" : from), 0)];
  if (!from && !to) brushes.delete(axis.name);
  else brushes.set(axis.name, [Math.min(...ends), Math.max(...ends)]);
  show();
};

const openSweep = async () => {
  sweep = await ask(`/api/studies/sweep?${new URLSearchParams({ name: byId("sweep").value })}`);
  brushes.clear();
  byId("field").replaceChildren(...names().map((name) => el("option", { value: name }, name)));
  show();
};

/** @typedef {{ group: string, flops: number[], loss: number[], low: number[], high: number[] }} Curve */
const openLaw = async () => {
  const law = await ask(`/api/studies/law?${new URLSearchParams({ name: byId("law").value })}`);
  byId("formula").textContent = `${law.law}: ${law.formula} (${law.source}), by ${law.runs_fitted} runs.`;
  const percent = `${Math.round(100 * law.level)}%`, points = [...law.points].sort((one, other) => one.flops - other.flops);
  /** @type {import("./lines.js").Line[]} */
  const lines = law.curves.filter((/** @type {Curve} */ curve) => curve.flops.length).map((/** @type {Curve} */ curve, /** @type {number} */ place) => ({
    label: `best loss${curve.group ? `, ${curve.group}` : ""}, ${percent} interval`, colour: COLOURS[place % COLOURS.length], dash: [], x: curve.flops, y: curve.loss, band: { low: curve.low, high: curve.high },
  }));
  if (points.length) lines.push({ label: "runs", colour: "vermilion", dash: [], x: points.map(({ flops }) => flops), y: points.map(({ loss }) => loss), isDots: true, names: points.map(({ name, loss }) => `${name}: ${figure(loss, "loss")}`) });
  plot?.destroy();
  plot = null;
  const ends = lines.flatMap(({ x }) => [x[0], x[x.length - 1]]);
  byId("law-chart").hidden = !lines.length;
  if (lines.length) plot = chart(byId("law-chart"), lines, { unit: "loss", axisUnit: "FLOP", range: [Math.min(...ends) / 1.2, Math.max(...ends) * 1.2], logX: true, logY: true, height: 340, select: () => {}, pan: () => {} });
  byId("law-chart").setAttribute("aria-label", lines.map(({ label, y }) => `${label} from ${figure(y[0], "loss")} to ${figure(y[y.length - 1], "loss")}`).join("; "));
  sortedTable(byId("coefficients"), [
    { title: "coefficient", of: (row) => row.group ? `${row.name}, ${row.group}` : row.name },
    .../** @type {["estimate", "low", "high"]} */ (["estimate", "low", "high"]).map((name) => ({ title: name === "estimate" ? name : `${percent} ${name === "low" ? "from" : "to"}`, of: (/** @type {any} */ row) => row[name], shown: (/** @type {any} */ row) => short(row[name]) })),
  ], law.coefficients);
  byId("notes").replaceChildren(...law.notes.map((/** @type {string} */ note) => el("li", {}, note)));
};

const tried = (/** @type {() => Promise<void>} */ work) => async () => {
  byId("refused").textContent = "";
  try { await work(); } catch (error) { byId("refused").textContent = /** @type {Error} */ (error).message; }
};
const begin = async () => {
  const found = await ask("/api/studies");
  byId("none").hidden = found.sweeps.length + found.laws.length > 0;
  for (const [id, listed, open] of /** @type {[string, string[], () => Promise<void>][]} */ ([["sweep", found.sweeps, openSweep], ["law", found.laws, openLaw]])) {
    byId(`${id}-part`).hidden = !listed.length;
    byId(id).replaceChildren(...listed.map((name) => el("option", { value: name }, name)));
    if (listed.length) await tried(open)();
    byId(id).addEventListener("input", tried(open));
  }
};
for (const id of ["from", "to"]) byId(id).addEventListener("input", chooseByFields);
byId("field").addEventListener("input", () => { byId("from").value = byId("to").value = ""; });
byId("clear").addEventListener("click", () => { brushes.clear(); byId("from").value = byId("to").value = ""; show(); });
let width = document.documentElement.clientWidth;
new ResizeObserver(() => { if (document.documentElement.clientWidth !== width) { width = document.documentElement.clientWidth; if (sweep.runs.length) show(); if (plot) tried(openLaw)(); } }).observe(document.documentElement);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { if (plot) tried(openLaw)(); });
tried(begin)().then(() => { document.body.dataset.ready = "scaling"; });
