// Evaluations of models: their scores as dots with 95% intervals, and a table that is sorted by its columns.
// @ts-check
import { ask, byId, el, figure } from "/assets/studio.js";
import { scale, svg } from "/assets/drawing.js";
import { sortedTable } from "/assets/sorted.js";

/** @typedef {{ file: string, model: string, task: string, score: string, leads: boolean, plain: boolean, mean: number, standard_error: number, low: number, high: number, items: number }} Row */
const ALL = "all tasks", ROW = 26, WIDTH = 760, MARGIN = { left: 8, right: 16, top: 8, bottom: 26 };
/** @type {Row[]} */
let rows = [];

const shown = (/** @type {Row} */ row, /** @type {number} */ value) => row.plain ? value.toFixed(4) : `${(100 * value).toFixed(1)}%`;
const isChosen = (/** @type {Row} */ row) => (byId("task").value === ALL || row.task === byId("task").value) && (row.leads || !byId("leading").checked);

/** Dots with intervals: a line for each model. @param {string} title @param {Row[]} group */
const chart = (title, group) => {
  const ordered = [...group].sort((one, other) => one.plain ? one.mean - other.mean : other.mean - one.mean);
  const finite = ordered.flatMap(({ mean, low, high }) => [mean, low, high]).filter(Number.isFinite);
  const margin = 0.05 * (Math.max(...finite) - Math.min(...finite)) || 0.05;
  const height = MARGIN.top + MARGIN.bottom + ROW * ordered.length, name = 230;
  const x = scale([Math.min(...finite) - margin, Math.max(...finite) + margin], [MARGIN.left + name, WIDTH - MARGIN.right]);
  const picture = svg("svg", { viewBox: `0 0 ${WIDTH} ${height}`, role: "img", "aria-label": `${title}: ${ordered.map((row) => `${row.model} ${shown(row, row.mean)} ± ${shown(row, row.standard_error)}`).join("; ")}` },
    ...x.ticks.map((tick) => svg("line", { class: "grid", x1: x(tick), x2: x(tick), y1: MARGIN.top, y2: height - MARGIN.bottom })),
    ...x.ticks.map((tick) => svg("text", { class: "tick", x: x(tick), y: height - 8, "text-anchor": "middle" }, group[0].plain ? String(Number(tick.toPrecision(4))) : `${Number((100 * tick).toPrecision(4))}%`)),
    ...ordered.flatMap((row, place) => {
      const y = MARGIN.top + ROW * (place + 0.5);
      return [
        svg("text", { class: "tick", x: MARGIN.left + name - 10, y: y + 4, "text-anchor": "end" }, row.model.length > 34 ? `…${row.model.slice(-33)}` : row.model),
        svg("line", { class: "line blue", x1: x(row.low), x2: x(row.high), y1: y, y2: y }),
        svg("circle", { class: "point blue", cx: x(row.mean), cy: y, r: 5 }, svg("title", {}, `${row.model}: ${shown(row, row.mean)} ± ${shown(row, row.standard_error)}, 95% from ${shown(row, row.low)} to ${shown(row, row.high)}, ${figure(row.items, "count")} items`)),
      ];
    }));
  return el("section", { class: "dots" }, el("h2", {}, title), el("p", { class: "soft" }, `${group[0].plain ? "Less is better. " : ""}Dots with 95% intervals; the best is above.`), el("div", { class: "drawing" }, picture));
};

const show = () => {
  const chosen = rows.filter(isChosen);
  /** @type {Map<string, Row[]>} */
  const groups = new Map();
  for (const row of chosen) groups.set(`${row.task}: ${row.score}`, [...groups.get(`${row.task}: ${row.score}`) ?? [], row]);
  byId("charts").replaceChildren(...[...groups].map(([title, group]) => chart(title, group)));
  byId("table-part").hidden = !chosen.length;
  sortedTable(byId("table"), [
    { title: "task", of: (row) => row.task }, { title: "model", of: (row) => row.model }, { title: "score", of: (row) => row.score },
    { title: "mean", of: (row) => row.mean, shown: (row) => shown(row, row.mean) },
    { title: "± s.e.", of: (row) => row.standard_error, shown: (row) => shown(row, row.standard_error) },
    { title: "95% from", of: (row) => row.low, shown: (row) => shown(row, row.low) }, { title: "to", of: (row) => row.high, shown: (row) => shown(row, row.high) },
    { title: "items", of: (row) => row.items, shown: (row) => figure(row.items, "count") }, { title: "file", of: (row) => row.file },
  ], chosen);
};

const begin = async () => {
  try {
    const told = await ask("/api/studies");
    rows = told.evaluations;
    byId("none").hidden = rows.length > 0;
    byId("controls").hidden = !rows.length;
    byId("task").replaceChildren(...[ALL, ...new Set(rows.map(({ task }) => task))].map((task) => el("option", { value: task }, task)));
    byId("problems").replaceChildren(...told.problems.map((/** @type {string} */ problem) => el("li", {}, problem)));
    show();
  } catch (error) {
    byId("refused").textContent = /** @type {Error} */ (error).message;
  }
  document.body.dataset.ready = "evaluations";
};
for (const id of ["task", "leading"]) byId(id).addEventListener("input", show);
begin();
