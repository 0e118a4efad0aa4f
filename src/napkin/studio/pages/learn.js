// What the pages of ideas share: controls, whose values stand in the address, the server's answer, and drawing.
// @ts-check
import { buildControls, linkOf, stateOf } from "/assets/controls.js";
import { axes, scale, svg } from "/assets/drawing.js";
import { Refused, ask, byId, el, figure } from "/assets/studio.js";

/** @typedef {import("./controls.js").State} State */
/**
 * A control that may set more than its own value, or that chooses what is drawn of an answer and is not asked for.
 * @typedef {import("./controls.js").Control & { also?: State, local?: boolean }} Control
 * @typedef {{ controls: Control[], first: State, draw: (answer: any, state: State, width: number) => void }} Study
 */

/** @param {number} low @param {number} high */
export const whole = (low, high) => Array.from({ length: high - low + 1 }, (_, index) => low + index);
/** Powers of two. @param {number} low @param {number} high */
export const powers = (low, high) => {
  const found = [];
  for (let power = low; power <= high; power *= 2) found.push(power);
  return found;
};

/**
 * A page of an idea: its controls are drawn, and each change is asked of the server; while an answer is waited for, only
 * the newest question is kept. Returns what changes the state from elsewhere on the page.
 * @param {string} name the idea
 * @param {Study} study
 * @returns {(change: State) => void}
 */
export const study = (name, { controls, first, draw }) => {
  let state = stateOf(controls, location.hash.slice(1), first, (before, key, value) => ({ ...before, [key]: value }));
  let waits = false, newer = false, drawn = 0;
  /** @type {any} */
  let answer = null;
  const local = new Set(controls.filter((each) => each.local).map((each) => each.name));
  const refresh = buildControls(byId("controls"), { Change: controls }, {
    state: () => state,
    set: (key, value) => change({ [key]: value, ...controls.find((each) => each.name === key)?.also }),
  });

  const redraw = () => {
    if (answer !== null) draw(answer, state, Math.max(280, byId("picture").clientWidth));
    document.body.dataset.drawn = String(++drawn);
  };
  const question = async () => {
    if (waits) { newer = true; return; }
    waits = true;
    byId("verdict").classList.add("working");
    do {
      newer = false;
      try {
        answer = await ask(`/api/learn/${name}`, { body: Object.fromEntries(Object.entries(state).filter(([key]) => !local.has(key))) });
        byId("refused").textContent = "";
        redraw();
      } catch (error) {
        byId("refused").textContent = error instanceof Refused ? error.message : `the studio does not answer: ${/** @type {Error} */ (error).message}`;
        document.body.dataset.drawn = String(++drawn);
      }
    } while (newer);
    waits = false;
    byId("verdict").classList.remove("working");
  };
  const change = (/** @type {State} */ given) => {
    state = { ...state, ...given };
    const link = linkOf(controls, state, first);
    history.replaceState(null, "", link ? `#${link}` : location.pathname);
    refresh();
    if (Object.keys(given).every((key) => local.has(key))) redraw(); else question();
  };
  refresh();
  let before = 0;
  new ResizeObserver(([entry]) => {
    const width = Math.round(entry.contentRect.width);
    if (width !== before && before) redraw();
    before = width;
  }).observe(byId("picture"));
  question();
  return change;
};

/** A count in few characters: 65.7 B. @param {number} value */
export const compact = (value) => figure(value, "tokens/s");
/** A large number as a power of ten: 5.76e23. @param {number} value */
export const power = (value) => Number(value.toPrecision(3)).toExponential().replace("+", "");
/** A number without zeros at its end. @param {number} value */
export const short = (value) => String(Number(value.toPrecision(3)));
/** An interval. @param {{ low: number, high: number }} each @param {(value: number) => string} show */
export const span = ({ low, high }, show) => `${show(low)} to ${show(high)}`;

/** The page's figures: a name, the figure, and a line below it. @param {[string, string, string?][]} figures */
export const keys = (figures) => byId("keys").replaceChildren(...figures.map(([name, value, below]) =>
  el("div", {}, el("dt", {}, name), el("dd", {}, value, below ? el("small", {}, below) : null))));

/** @param {string[]} headings @param {(string | Node)[][]} rows @param {number} [chosen] the row that is marked */
export const table = (headings, rows, chosen) => byId("table").replaceChildren(
  el("thead", {}, el("tr", {}, ...headings.map((each) => el("th", { scope: "col" }, each)))),
  el("tbody", {}, ...rows.map(([head, ...cells], index) =>
    el("tr", { class: index === chosen ? "chosen" : "" }, el("th", { scope: "row" }, head), ...cells.map((each) => el("td", {}, each))))));

/** @param {[string, string][]} entries class of the colour, text */
export const legend = (entries) => el("ul", { class: "legend" }, ...entries.map(([colour, text]) => el("li", {}, el("span", { class: `swatch ${colour}` }), text)));

/** A picture of its own size, with a text in its place for those who do not see it. @param {number} width @param {number} height @param {string} label */
export const canvas = (width, height, label) => svg("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label });

const LIGHT = new Set(["f1", "f4"]);
/** The class of a text on a box of this colour. @param {string} style */
export const inkOn = (style) => LIGHT.has(style) ? "on-light" : style === "empty" ? "" : "on";

/** A text in a picture. @param {number} x @param {number} y @param {string} text @param {Record<string, string | number>} [attributes] */
export const word = (x, y, text, attributes = {}) => svg("text", { x, y, ...attributes }, text);

/** Points as a line. @param {[number, number][]} points @param {string} style */
export const line = (points, style) => svg("polyline", { points: points.map(([x, y]) => `${x.toFixed(1)},${y.toFixed(1)}`).join(" "), class: `line ${style}` });

/** The area between two lines over the same places. @param {[number, number, number][]} points x, low, high @param {string} style */
export const area = (points, style) => svg("polygon", { class: style, points: [
  ...points.map(([x, low]) => `${x.toFixed(1)},${low.toFixed(1)}`),
  ...[...points].reverse().map(([x, , high]) => `${x.toFixed(1)},${high.toFixed(1)}`),
].join(" ") });

/**
 * One direction of a chart: from and to in its unit, in logarithms or not, and how ticks are written.
 * @typedef {{ from: number, to: number, log?: boolean, label: string, show: (value: number) => string }} Direction
 */

/**
 * An empty chart: the picture with its grid, functions from values to places in it, and its edges.
 * @param {number} width @param {number} height @param {string} label @param {Direction} across @param {Direction} up
 */
export const chart = (width, height, label, across, up) => {
  const margin = { left: 62, right: 14, top: 24, bottom: 36 }, root = canvas(width, height, label);
  const [left, right, top, bottom] = [margin.left, width - margin.right, margin.top, height - margin.bottom];
  const x = scale([across.from, across.to], [left, right], { log: across.log, n: Math.max(3, Math.floor(width / 110)) });
  const y = scale([up.from, up.to], [bottom, top], { log: up.log });
  root.append(...axes({ x, y, width, height, margin, xText: across.show, yText: up.show, xLabel: across.label, yLabel: up.label }));
  return { root, x, y, left, right, top, bottom };
};
