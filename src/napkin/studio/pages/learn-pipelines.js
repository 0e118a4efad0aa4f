// A step of a pipeline: a row per rank, a box per action, gaps where a rank waits.
// @ts-check
import { svg } from "/assets/drawing.js";
import { byId, figure } from "/assets/studio.js";
import { canvas, inkOn, keys, legend, powers, short, study, table, whole, word } from "/assets/learn.js";

const KINDS = /** @type {Record<string, [string, string]>} */ ({
  forward: ["f0", "forward"], backward: ["f1", "backward"], backward_input: ["f1", "gradient of the input"], backward_weight: ["f2", "gradient of the weights"],
});
const WIDEST_NUMBERED = 12; // pixels of a box that has room for its number

/** @param {any} answer @param {number} width */
const timeline = ({ actions, seconds, idle }, width) => {
  const left = 56, right = 58, row = 30, root = canvas(width, row * actions.length + 14, "When each rank computes what");
  const x = (/** @type {number} */ at) => left + at / seconds * (width - left - right);
  root.append(word(width - 2, 11, "idle", { "text-anchor": "end" }));
  actions.forEach((/** @type {any[]} */ timed, /** @type {number} */ rank) => {
    const y = 14 + row * rank;
    root.append(word(0, y + 17, `rank ${rank}`), svg("rect", { class: "empty", x: left, y, width: width - left - right, height: row - 4 }));
    for (const [stage, kind, microBatch, start, end] of timed) {
      const box = svg("rect", { class: KINDS[kind][0], x: x(start), y, width: Math.max(0.5, x(end) - x(start) - 0.7), height: row - 4 },
        svg("title", {}, `${KINDS[kind][1]} of micro-batch ${microBatch}, stage ${stage}`));
      root.append(box);
      if (x(end) - x(start) >= WIDEST_NUMBERED) root.append(word((x(start) + x(end)) / 2, y + 17, String(microBatch), { "text-anchor": "middle", class: inkOn(KINDS[kind][0]) }));
    }
    root.append(word(width - 2, y + 17, figure(idle[rank] / seconds, "share"), { "text-anchor": "end" }));
  });
  return root;
};

study("pipelines", {
  first: { schedule: "1f1b", ranks: 4, micro_batches: 8, stages_per_rank: 2, backward: 2, send: 0 },
  controls: [
    { name: "schedule", label: "Schedule", names: () => ["gpipe", "1f1b", "interleaved-1f1b", "zb-h1", "zb-v"] },
    { name: "ranks", label: "Ranks", values: whole(1, 16) },
    { name: "micro_batches", label: "Micro-batches", values: whole(1, 64) },
    { name: "stages_per_rank", label: "Stages per rank", values: powers(1, 8), when: ({ schedule }) => ["interleaved-1f1b", "zb-h1"].includes(schedule) },
    { name: "backward", label: "Backward / forward", values: [0.5, 1, 1.5, 2, 2.5, 3, 4], isFraction: true },
    { name: "send", label: "Send / forward", values: [0, 0.05, 0.1, 0.2, 0.3, 0.5, 1], isFraction: true },
  ],
  draw: (answer, state, width) => {
    byId("verdict").textContent = `A rank waits ${figure(answer.bubble, "share")} of the time that it computes.`;
    const kinds = [...new Set(answer.actions.flat().map((/** @type {any[]} */ [, kind]) => kind))];
    byId("picture").replaceChildren(timeline(answer, width), legend(kinds.map((kind) => [KINDS[kind][0].replace("f", "k"), KINDS[kind][1]])));
    keys([
      ["bubble", figure(answer.bubble, "share"), answer.rule === null ? "no closed form here" : `by rule ${figure(answer.rule, "share")}`],
      ["step", short(answer.seconds), "forward passes of a rank"],
      ["activations", short(answer.in_flight), "micro-batches on the fullest rank"],
    ]);
    table(["schedule", "stages per rank", "bubble", "step", "micro-batches kept"], answer.schedules.map((/** @type {any} */ each) =>
      each.error ? [each.name, "–", each.error, "–", "–"]
        : [each.name, String(each.stages_per_rank), figure(each.bubble, "share"), short(each.seconds), short(each.in_flight)]),
    answer.schedules.findIndex((/** @type {any} */ each) => each.name === state.schedule));
  },
});
