// Small drawings: elements of SVG, scales, axes.
// @ts-check

/**
 * An element of SVG with attributes and children; text is text and never markup.
 * @param {string} name @param {Record<string, any>} [attributes] @param {...(Node | string)} children
 * @returns {SVGElement}
 */
export const svg = (name, attributes = {}, ...children) => {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else made.setAttribute(key, String(value));
  }
  made.append(...children);
  return made;
};

/**
 * A scale from values to places; a logarithmic one for values above 0.
 * @typedef {{ (value: number): number, ticks: number[] }} Scale
 * @param {[number, number]} values @param {[number, number]} places @param {{ log?: boolean, n?: number }} [how]
 * @returns {Scale}
 */
export const scale = ([low, high], [begin, end], { log = false, n = 5 } = {}) => {
  const form = log ? Math.log10 : (/** @type {number} */ value) => value;
  const width = form(high) - form(low) || 1;
  const found = /** @type {any} */ ((/** @type {number} */ value) => begin + (form(value) - form(low)) / width * (end - begin));
  found.ticks = log ? powersWithin(low, high) : stepsWithin(low, high, n);
  return found;
};
/** Round numbers within a range, `n` of them or so. @param {number} low @param {number} high @param {number} n */
const stepsWithin = (low, high, n) => {
  const rough = (high - low) / n || 1, ten = 10 ** Math.floor(Math.log10(rough));
  const step = ten * ([1, 2, 5].find((each) => each * ten >= rough) ?? 10);
  const found = [];
  for (let place = Math.ceil(low / step); place * step <= high * (1 + 1e-12); place++) found.push(place * step);
  return found;
};
/** Powers of ten within a range, with 2 and 5 of each where they are few. @param {number} low @param {number} high */
const powersWithin = (low, high) => {
  const powers = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power++) powers.push(power);
  const digits = powers.length < 4 ? [1, 2, 5] : [1];
  return powers.flatMap((power) => digits.map((digit) => digit * 10 ** power)).filter((value) => value >= low && value <= high);
};

/**
 * The axes of a chart: lines at ticks, their texts, and what the axes are.
 * @param {{ x: Scale, y: Scale, width: number, height: number, margin: { left: number, right: number, top: number, bottom: number },
 *   xText: (value: number) => string, yText: (value: number) => string, xLabel: string, yLabel: string }} chart
 * @returns {SVGElement[]}
 */
export const axes = ({ x, y, width, height, margin, xText, yText, xLabel, yLabel }) => {
  const below = height - margin.bottom, after = width - margin.right;
  return [
    ...x.ticks.map((value) => svg("line", { class: "grid", x1: x(value), x2: x(value), y1: margin.top, y2: below })),
    ...y.ticks.map((value) => svg("line", { class: "grid", x1: margin.left, x2: after, y1: y(value), y2: y(value) })),
    ...x.ticks.map((value) => svg("text", { class: "tick", x: x(value), y: below + 16, "text-anchor": "middle" }, xText(value))),
    ...y.ticks.map((value) => svg("text", { class: "tick", x: margin.left - 6, y: y(value) + 4, "text-anchor": "end" }, yText(value))),
    svg("text", { class: "tick", x: after, y: height - 4, "text-anchor": "end" }, xLabel),
    svg("text", { class: "tick", x: 0, y: 12 }, yLabel),
  ];
};
