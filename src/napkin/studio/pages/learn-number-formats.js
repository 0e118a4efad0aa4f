// Number formats: the bits of a number, the numbers beside it, and the ranges of all formats.
// @ts-check
import { svg } from "/assets/drawing.js";
import { byId, el, figure } from "/assets/studio.js";
import { canvas, keys, legend, study, table, word } from "/assets/learn.js";

const FORMATS = ["fp64", "fp32", "tf32", "fp16", "bf16", "fp8-e4m3", "fp8-e5m2", "fp4", "int8", "int4"];
const COLOURS = /** @type {[string, string][]} */ ([["k3", "sign"], ["k0", "exponent"], ["k2", "fraction"]]);

/** @param {any} answer @param {number} width */
const beside = ({ beside: values, value, given, format }, width) => {
  const root = canvas(width, 92, `The numbers of ${format} around ${value.text}`);
  if (value.number === null || values.length < 2) return el("p", { class: "soft" }, `${value.text} has no neighbours.`);
  const low = values[0], high = values[values.length - 1], x = (/** @type {number} */ at) => 20 + (at - low) / (high - low) * (width - 40);
  root.append(svg("line", { class: "grid", x1: 10, x2: width - 10, y1: 46, y2: 46 }));
  for (const each of values) {
    const chosen = each === value.number;
    root.append(svg("line", { class: "mark", x1: x(each), x2: x(each), y1: chosen ? 26 : 38, y2: 54 }));
    if (chosen) root.append(word(x(each), 20, value.text, { "text-anchor": "middle", class: "strong" }));
  }
  root.append(word(10, 72, figure(low, "number")), word(width - 10, 72, figure(high, "number"), { "text-anchor": "end" }));
  if (given.number !== null && given.number >= low && given.number <= high) {
    root.append(svg("circle", { class: "f3", cx: x(given.number), cy: 46, r: 4 }), word(x(given.number), 88, "as typed", { "text-anchor": "middle" }));
  }
  return root;
};

/** @param {any} answer @param {number} width */
const ranges = ({ formats, format, given }, width) => {
  const rows = formats, height = 26 * rows.length + 40, left = 74, right = 20;
  const root = canvas(width, height, "From the smallest positive to the largest number of each format");
  const x = (/** @type {number} */ value) => left + (Math.log10(value) + 50) / 100 * (width - left - right);
  const inside = (/** @type {number} */ value) => Math.min(1e50, Math.max(1e-50, value));
  for (let power = -40; power <= 40; power += 20) {
    root.append(svg("line", { class: "grid", x1: x(10 ** power), x2: x(10 ** power), y1: 4, y2: height - 36 }), word(x(10 ** power), height - 20, power ? `1e${power}` : "1", { "text-anchor": "middle" }));
  }
  rows.forEach((/** @type {any} */ each, /** @type {number} */ index) => {
    const y = 8 + 26 * index, chosen = each.name === format;
    root.append(word(left - 8, y + 13, each.name, { "text-anchor": "end", class: chosen ? "strong" : "" }));
    const bar = (/** @type {number} */ from, /** @type {number} */ to, /** @type {string} */ style) =>
      svg("rect", { x: x(inside(from)), y, width: Math.max(1, x(inside(to)) - x(inside(from))), height: 16, class: style });
    if (each.smallest < each.smallest_normal) root.append(bar(each.smallest, each.smallest_normal, "f4"));
    root.append(bar(each.smallest_normal, each.largest, chosen ? "f0" : "f6"));
  });
  if (given.number) {
    const at = x(inside(Math.abs(given.number)));
    root.append(svg("line", { class: "s3", "stroke-width": 2, x1: at, x2: at, y1: 2, y2: height - 36 }));
  }
  root.append(word((left + width - right) / 2, height - 4, "size of the number; fp64 goes on to 1e±308", { "text-anchor": "middle" }));
  return root;
};

const change = study("number-formats", {
  first: { value: "0.1", format: "bf16", bits: "" },
  controls: [
    { name: "value", label: "A number", lines: 1, also: { bits: "" } },
    { name: "format", label: "Format", names: () => FORMATS, also: { bits: "" } },
    // The bits are turned over in the picture; the address holds them too.
    { name: "bits", label: "Bits", lines: 1, when: () => false },
  ],
  draw: (answer, state, width) => {
    const { fields, value, formats } = answer;
    const bits = fields.map((/** @type {any} */ { bit }) => bit);
    /** @type {number | null} */
    const held = document.activeElement instanceof HTMLElement && document.activeElement.dataset.bit ? Number(document.activeElement.dataset.bit) : null;
    const buttons = fields.map((/** @type {any} */ { bit, field }, /** @type {number} */ place) => {
      const begins = place > 0 && fields[place - 1].field !== field;
      const flipped = [...bits.slice(0, place), bit === "0" ? "1" : "0", ...bits.slice(place + 1)].join("");
      return el("button", {
        type: "button", class: `${field}${begins ? " gap" : ""}`, "data-bit": String(place), "aria-label": `bit ${fields.length - 1 - place}, ${field}: ${bit}`,
        onclick: () => change({ bits: flipped }),
      }, bit);
    });
    byId("verdict").textContent = answer.given.text === value.text ? `${value.text} is a number of ${answer.format}.` : `${answer.given.text} becomes ${value.text} in ${answer.format}.`;
    byId("picture").replaceChildren(
      el("h2", {}, "Its bits: choose one to turn it over"), el("div", { class: "bits", role: "group", "aria-label": "Bits" }, ...buttons), legend(COLOURS),
      el("h2", {}, "The numbers beside it"), beside(answer, width), el("h2", {}, "How far each format reaches"), ranges(answer, width),
      legend([["k0", "this format"], ["k4", "subnormal: fewer and fewer bits"], ["k3", "the number"]]));
    if (held !== null) buttons[held]?.focus();
    const row = formats.find((/** @type {any} */ each) => each.name === answer.format);
    keys([
      ["gap above", figure(answer.above, "number")], ["gap below", figure(answer.below, "number")],
      ["relative error", row.relative_error === null ? "–" : figure(row.relative_error, "share")],
      ["largest", figure(row.largest, "number")], ["step at 1", figure(row.resolution, "number")],
    ]);
    table(["format", "value", "relative error", "largest", "smallest normal", "smallest", "step at 1"], formats.map((/** @type {any} */ each) => [
      each.name, each.note ? `${each.value} (${each.note})` : each.value, each.relative_error === null ? "–" : figure(each.relative_error, "share"),
      ...[each.largest, each.smallest_normal, each.smallest, each.resolution].map((number) => figure(number, "number")),
    ]), formats.indexOf(row));
  },
});
