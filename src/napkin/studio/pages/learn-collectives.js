// A collective on a ring: a row per rank, a box per part of the tensor, step by step.
// @ts-check
import { svg } from "/assets/drawing.js";
import { ask, byId, el, figure } from "/assets/studio.js";
import { canvas, keys, legend, powers, study, whole, word } from "/assets/learn.js";

const { devices } = await ask("/api/planner/catalogue");

/** @param {any} answer @param {any} state @param {number} width */
const ring = ({ steps }, { step, ranks, operation }, width) => {
  const now = steps[Math.min(step, steps.length - 1)], left = 56, gap = 6, row = 46;
  const box = Math.min(120, (width - left - gap * ranks) / ranks), root = canvas(width, row * ranks + 22, "What each rank holds");
  for (let part = 0; part < ranks; part++) root.append(word(left + part * (box + gap) + box / 2, 12, `part ${part}`, { "text-anchor": "middle" }));
  now.held.forEach((/** @type {number[][]} */ parts, /** @type {number} */ rank) => {
    const y = 18 + row * rank;
    root.append(word(0, y + 24, `rank ${rank}`));
    parts.forEach((numbers, part) => {
      const x = left + part * (box + gap), came = now.sent.some((/** @type {[number, number]} */ [from, sent]) => (from + 1) % ranks === rank && sent === part);
      const whole = numbers.length === ranks || (operation === "all_gather" && numbers.length > 0);
      root.append(svg("rect", { class: "empty", x, y, width: box, height: row - 8 }),
        svg("rect", { class: whole ? "f2" : "f0", x, y, width: box * (operation === "all_gather" ? Number(numbers.length > 0) : numbers.length / ranks), height: row - 8 }, svg("title", {}, `of ranks ${numbers.join(", ")}`)));
      if (came) root.append(svg("rect", { x: x + 1, y: y + 1, width: box - 2, height: row - 10, fill: "none", class: "s3", "stroke-width": 3 }));
      if (numbers.length && box > 40) root.append(word(x + box / 2, y + 23, operation === "all_gather" ? "whole" : `${numbers.length} of ${ranks}`, { "text-anchor": "middle", class: whole || numbers.length / ranks > 0.6 ? "on" : "strong" }));
    });
  });
  return root;
};

study("collectives", {
  first: { operation: "all_reduce", ranks: 4, step: 0, bytes: 1e9, device: "H100-SXM-80GB", devices: 8 },
  controls: [
    { name: "operation", label: "Collective", names: () => ["all_reduce", "reduce_scatter", "all_gather"], also: { step: 0 } },
    { name: "ranks", label: "Ranks drawn", values: whole(2, 8), also: { step: 0 } },
    { name: "step", label: "Step", values: whole(0, 14), local: true },
    { name: "bytes", label: "Tensor", values: [1e4, 1e5, 1e6, 1e7, 1e8, 3e8, 1e9, 3e9, 1e10], unit: "bytes" },
    { name: "device", label: "Device", names: () => Object.keys(devices) },
    { name: "devices", label: "Devices", values: powers(2, 4096) },
  ],
  draw: (answer, state, width) => {
    const last = answer.steps.length - 1, step = Math.min(state.step, last);
    byId("control-step").max = String(last);
    byId("verdict").textContent = step === 0 ? `Before the first of ${last} steps`
      : `After step ${step} of ${last}, in which each rank ${answer.steps[step].adds ? "adds what came to its own" : "keeps what came"}${step === last ? ": done" : ""}`;
    byId("picture").replaceChildren(ring(answer, { ...state, step }, width),
      legend(state.operation === "all_gather" ? [["k2", "held"], ["k3", "came in this step"]] : [["k0", "part of the sum"], ["k2", "the whole sum"], ["k3", "came in this step"]]),
      el("p", { class: "soft" }, `In each step every rank sends ${figure(answer.bytes_per_step, "bytes")} to the next one; over each link go ${figure(answer.bytes_per_link, "bytes")} in all.`));
    keys([
      ["by rule", figure(answer.rule, "seconds"), "bytes alone"],
      ["as planned", figure(answer.seconds, "seconds"), "with starts, hops and what links reach"],
      ["bandwidth", answer.bandwidth === null ? "–" : `${figure(answer.bandwidth, "bytes")}/s`, `${state.device}: ${answer.nodes === null ? "no link in the datasheet" : answer.nodes > 1 ? `${answer.nodes} nodes` : "in one node"}`],
    ]);
  },
});
