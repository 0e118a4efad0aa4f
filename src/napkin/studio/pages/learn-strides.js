// Strides and views: a tensor as boxes, and the places of the storage that it reads.
// @ts-check
import { svg } from "/assets/drawing.js";
import { byId, el } from "/assets/studio.js";
import { canvas, inkOn, keys, legend, study, table, whole, word } from "/assets/learn.js";

const STEPS = ["x.T", "x[1:]", "x[:, 1:]", "x[::2]", "x[:, ::2]", "x[0]", "x[:, 0]", "x.expand(3, ...)", "x.unfold(-1, 2, 1)", "x.view(-1)", "x.reshape(-1)", "x.contiguous()"];
const MOST = 6; // steps
const COLOURS = 6;

/** Boxes of a row of numbers. @param {SVGElement} root @param {number} left @param {number} top @param {number} size @param {number[]} values @param {(place: number) => string} style */
const boxes = (root, left, top, size, values, style) => values.forEach((value, place) => {
  root.append(svg("rect", { class: style(place), x: left + place * size, y: top, width: size - 2, height: size - 2 }),
    word(left + place * size + size / 2 - 1, top + size / 2 + 4, String(value), { "text-anchor": "middle", class: inkOn(style(place)) }));
});

/** The tensor: its last two dimensions as a grid, one for each index before them. @param {any} answer @param {number} width */
const tensor = ({ shape, values, places }, width) => {
  const columns = shape.at(-1) ?? 1, rows = shape.length > 1 ? shape.at(-2) : 1, grids = columns * rows ? values.length / (columns * rows) : 0;
  const size = Math.min(40, Math.max(18, Math.floor(width / (columns + 1)))), gap = 14;
  const perRow = Math.max(1, Math.floor((width + gap) / (columns * size + gap))), lines = Math.ceil(grids / perRow);
  const root = canvas(width, Math.max(20, lines * (rows * size + gap)), `The tensor of shape ${shape.join(" by ")}`);
  for (let grid = 0; grid < grids; grid++) {
    const left = (grid % perRow) * (columns * size + gap), top = Math.floor(grid / perRow) * (rows * size + gap);
    for (let row = 0; row < rows; row++) {
      const first = (grid * rows + row) * columns;
      boxes(root, left, top + row * size, size, values.slice(first, first + columns), () => `f${row % COLOURS}`);
    }
  }
  if (!values.length) root.append(word(0, 14, "no elements"));
  return { root, rowOf: new Map(places.map((/** @type {number} */ place, /** @type {number} */ at) => [place, Math.floor(at / columns) % rows])) };
};

/** @param {any} answer @param {number} width @param {Map<number, number>} rowOf the row that reads a place */
const storage = ({ storage: numbers }, width, rowOf) => {
  const size = Math.min(40, Math.max(22, Math.floor(width / Math.min(16, numbers.length)))), perLine = Math.max(1, Math.floor(width / size));
  const lines = Math.ceil(numbers.length / perLine), root = canvas(width, lines * (size + 16), "The storage");
  for (let at = 0; at < lines; at++) {
    const top = at * (size + 16);
    boxes(root, 0, top, size, numbers.slice(at * perLine, (at + 1) * perLine), (place) => rowOf.has(at * perLine + place) ? `f${(rowOf.get(at * perLine + place) ?? 0) % COLOURS}` : "empty");
    for (let place = 0; place < Math.min(perLine, numbers.length - at * perLine); place++) root.append(word(place * size + size / 2 - 1, top + size + 10, String(at * perLine + place), { "text-anchor": "middle" }));
  }
  return root;
};

const change = study("strides", {
  first: { rows: 3, columns: 4, steps: "x.T" },
  controls: [
    { name: "rows", label: "Rows", values: whole(1, 8) },
    { name: "columns", label: "Columns", values: whole(1, 8) },
    // Buttons below add to them; the address holds them too.
    { name: "steps", label: "Steps", lines: 1, when: () => false },
  ],
  draw: (answer, state, width) => {
    steps = state.steps.split(";").filter((/** @type {string} */ step) => step);
    const { tensors, refused } = answer, last = tensors.at(-1), copied = last.storage > 1;
    const drawn = tensor(answer, width);
    byId("verdict").textContent = refused ?? (copied ? "The last tensor is a copy: it has a storage of its own." : tensors.length > 1 ? "A view: it reads the storage of x, and nothing was copied." : "x itself, row after row.");
    byId("picture").replaceChildren(
      el("h2", {}, `${last.name}, shape (${last.shape.join(", ")})`), drawn.root,
      el("h2", {}, "Its storage, and the rows that read each place"), storage(answer, width, drawn.rowOf),
      legend([["k0", "row 0"], ["k1", "row 1"], ["k2", "row 2, and so on"], ["k-card", "not read"]]));
    keys([
      ["strides", `(${last.strides.join(", ")})`, "steps in the storage per index"], ["offset", String(last.offset)],
      ["contiguous", last.contiguous ? "yes" : "no"], [".view(-1)", last.obstacle === null ? "works" : "fails", last.obstacle ?? ""],
    ]);
    table(["tensor", "shape", "strides", "offset", "contiguous", "storage"], tensors.map((/** @type {any} */ each) =>
      [each.name, `(${each.shape.join(", ")})`, `(${each.strides.join(", ")})`, String(each.offset), each.contiguous ? "yes" : "no", String(each.storage)]), tensors.length - 1);
  },
});

/** @type {string[]} */
let steps = ["x.T"];
byId("controls").append(el("fieldset", {}, el("legend", {}, "Do"), el("div", { class: "row" },
  ...STEPS.map((step) => el("button", { type: "button", "data-step": step, onclick: () => change({ steps: [...steps, step].slice(0, MOST).join(";") }) }, el("code", {}, step)))),
el("div", { class: "row" }, el("button", { type: "button", id: "undo", onclick: () => change({ steps: steps.slice(0, -1).join(";") }) }, "Undo"),
  el("button", { type: "button", id: "anew", onclick: () => change({ steps: "" }) }, "Back to x"))));
