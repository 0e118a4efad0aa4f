// A scaling law: the runs that it saw, those that it did not, and what it says of them.
// @ts-check
import { svg } from "/assets/drawing.js";
import { byId, el, figure } from "/assets/studio.js";
import { area, chart, compact as count, keys, legend, line, power, span, study, table, whole } from "/assets/learn.js";


/** @param {any} answer @param {number} flops @param {number} width */
const overBudgets = ({ seen, later, best, optimum }, flops, width) => {
  const shown = best.filter((/** @type {number[]} */ [budget]) => budget <= Math.max(flops * 3, 3e22)), computes = [...seen, ...later].map(([compute]) => compute);
  const losses = [...seen, ...later].map(([, loss]) => loss), lows = shown.map((/** @type {number[]} */ [, , low]) => low);
  const { root, x, y } = chart(width, 380, "Loss over FLOPs: runs, and the law's best loss",
    { from: Math.min(...computes) * 0.8, to: Math.max(shown.at(-1)[0], flops * 1.5, ...computes), log: true, label: "FLOPs", show: power },
    { from: Math.min(...lows, ...losses) - 0.05, to: Math.max(...losses) + 0.05, label: "loss", show: (value) => value.toFixed(1) });
  root.append(area(shown.map((/** @type {number[]} */ [budget, , low, high]) => [x(budget), y(low), y(high)]), "f0 band"));
  root.append(line(shown.map((/** @type {number[]} */ [budget, loss]) => [x(budget), y(loss)]), "s0"));
  for (const [compute, loss] of seen) root.append(svg("circle", { class: "f6", cx: x(compute), cy: y(loss), r: 2.5 }));
  for (const [compute, loss, , low, high] of later) {
    const isInside = low <= loss && loss <= high;
    root.append(svg("circle", { class: isInside ? "f2" : "f3", cx: x(compute), cy: y(loss), r: 3.5 }, svg("title", {}, `loss ${loss.toFixed(3)}, expected ${low.toFixed(3)} to ${high.toFixed(3)}`)));
  }
  const { loss } = optimum;
  root.append(svg("line", { class: "s-ink", "stroke-width": 2, x1: x(flops), x2: x(flops), y1: y(loss.low), y2: y(loss.high) }), svg("circle", { class: "f-ink", cx: x(flops), cy: y(loss.estimate), r: 4 }));
  return root;
};

study("scaling-law", {
  first: { law: "chinchilla", drop_highest: 5, largest: 1e20, flops: 5.76e23 },
  controls: [
    { name: "largest", label: "Fit runs up to FLOPs", values: [3e19, 1e20, 3e20, 1e21, 1e22] },
    { name: "flops", label: "Budget in FLOPs", values: [1e21, 2e21, 5e21, 1e22, 5e22, 1e23, 5.76e23, 1e24, 1e25, 1e26] },
    { name: "law", label: "Law", names: () => ["chinchilla", "gadre", "kaplan"] },
    { name: "drop_highest", label: "Highest losses left out", values: whole(0, 20) },
  ],
  draw: (answer, { flops }, width) => {
    const { later, inside, optimum, coefficients, extrapolation } = answer, { parameters, tokens, loss } = optimum;
    byId("verdict").textContent = later.length
      ? `Of ${later.length} larger runs that the law did not see, ${inside} are inside of their 90% interval.`
      : "The law has seen all runs: hide the larger ones to test it.";
    byId("picture").replaceChildren(overBudgets(answer, flops, width), legend([["k6", "runs that the law saw"], ["k2", "larger run, inside of its interval"], ["k3", "larger run, outside"], ["k0", "best loss of each budget, with 90%"]]),
      el("p", { class: "soft" }, `loss = ${answer.formula}`));
    keys([
      ["loss", loss.estimate.toFixed(3), span(loss, (value) => value.toFixed(3))], ["parameters", count(parameters.estimate), span(parameters, count)],
      ["tokens", count(tokens.estimate), span(tokens, count)], ["beyond its runs", `${figure(extrapolation, "number")}×`, "FLOPs of the largest that it saw"],
    ]);
    table(["coefficient", "estimate", "90%"], Object.entries(coefficients).map(([name, each]) => [name, figure(each.estimate, "number"), span(each, (value) => figure(value, "number"))]));
  },
});
