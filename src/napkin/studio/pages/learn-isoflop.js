// IsoFLOP curves: the runs of each budget, their best sizes, and the size of a larger budget.
// @ts-check
import { svg } from "/assets/drawing.js";
import { byId, el, figure } from "/assets/studio.js";
import { area, chart, compact as count, keys, legend, line, power, span, study, table, whole } from "/assets/learn.js";

const COLOURS = 6;
const BUDGETS = [1e21, 2e21, 5e21, 1e22, 5e22, 1e23, 5.76e23, 1e24, 1e25, 1e26];

/** @param {any} answer @param {number} width */
const curves = ({ budgets, best }, width) => {
  const sizes = budgets.flatMap((/** @type {any} */ { runs }) => runs.map((/** @type {number[]} */ [size]) => size));
  const losses = budgets.flatMap((/** @type {any} */ { runs }) => runs.map((/** @type {number[]} */ [, loss]) => loss));
  const { root, x, y } = chart(width, 360, "Loss over parameters, a curve per budget",
    { from: Math.min(...sizes) * 0.8, to: Math.max(...sizes) * 1.25, log: true, label: "parameters", show: count },
    { from: Math.min(...losses) - 0.05, to: Math.max(...losses) + 0.05, label: "loss", show: (value) => value.toFixed(2) });
  budgets.forEach((/** @type {any} */ { flops, runs, curve }, /** @type {number} */ index) => {
    const colour = index % COLOURS;
    root.append(line(curve.map((/** @type {number[]} */ [size, loss]) => [x(size), y(loss)]), `s${colour}`));
    for (const [size, loss] of runs) root.append(svg("circle", { class: `f${colour}`, cx: x(size), cy: y(loss), r: 3 }, svg("title", {}, `${power(flops)} FLOPs, ${count(size)} parameters: loss ${loss.toFixed(3)}`)));
  });
  for (const each of best) {
    if (!each.at_edge) root.append(svg("path", { class: "s-ink", fill: "none", "stroke-width": 2, d: `M${x(each.parameters) - 6} ${y(each.loss)}h12m-6 -6v12` }));
  }
  return root;
};

/** @param {any} answer @param {number} flops @param {number} width */
const bestSizes = ({ best, parameters, line: points }, flops, width) => {
  const budgets = [...points.map((/** @type {number[]} */ [budget]) => budget), flops], sizes = [...best.map((/** @type {any} */ each) => each.parameters), ...points.flatMap((/** @type {number[]} */ [, , low, high]) => [low, high])];
  const { root, x, y } = chart(width, 280, "Best size over FLOPs",
    { from: Math.min(...budgets) / 1.5, to: Math.max(...budgets) * 1.5, log: true, label: "FLOPs", show: power },
    { from: Math.min(...sizes) / 1.5, to: Math.max(...sizes) * 1.5, log: true, label: "parameters", show: count });
  root.append(area(points.map((/** @type {number[]} */ [budget, , low, high]) => [x(budget), y(low), y(high)]), "f0 band"));
  root.append(line(points.map((/** @type {number[]} */ [budget, size]) => [x(budget), y(size)]), "s0"));
  for (const each of best) root.append(svg("circle", { class: each.at_edge ? "f6" : "f2", cx: x(each.flops), cy: y(each.parameters), r: 4 }));
  root.append(svg("line", { class: "s3", "stroke-width": 2, x1: x(flops), x2: x(flops), y1: y(parameters.low), y2: y(parameters.high) }), svg("circle", { class: "f3", cx: x(flops), cy: y(parameters.estimate), r: 5 }));
  return root;
};

study("isoflop", {
  first: { drop_highest: 5, largest: 1e22, flops: 5.76e23 },
  controls: [
    { name: "flops", label: "Budget in FLOPs", values: BUDGETS },
    { name: "largest", label: "Runs up to FLOPs", values: [1e20, 2e20, 5e20, 1e21, 3e21, 1e22] },
    { name: "drop_highest", label: "Highest losses left out", values: whole(0, 20) },
  ],
  draw: (answer, { flops }, width) => {
    const { parameters, tokens, loss, exponents } = answer;
    byId("verdict").textContent = `For ${power(flops)} FLOPs: ${count(parameters.estimate)} parameters and ${count(tokens.estimate)} tokens, ${figure(tokens.estimate / parameters.estimate, "number")} tokens per parameter.`;
    byId("picture").replaceChildren(curves(answer, width), el("h2", {}, "The best sizes, and the line through them"), bestSizes(answer, flops, width),
      legend([["k2", "minimum of a parabola"], ["k6", "minimum outside of the sizes that ran: left out"], ["k3", "asked for, with its 90% interval"]]));
    keys([
      ["parameters", count(parameters.estimate), span(parameters, count)], ["tokens", count(tokens.estimate), span(tokens, count)],
      ["exponent of size", figure(exponents.parameters.estimate, "number"), span(exponents.parameters, (value) => figure(value, "number"))],
      ...(loss ? [/** @type {[string, string, string]} */ (["loss", loss.estimate.toFixed(3), span(loss, (value) => value.toFixed(3))])] : []),
    ]);
    table(["FLOPs", "runs", "best size", "tokens", "loss"], answer.best.map((/** @type {any} */ each) =>
      [power(each.flops), String(each.runs), each.at_edge ? "outside" : count(each.parameters), each.at_edge ? "–" : count(each.tokens), each.loss.toFixed(3)]));
  },
});
