// Advantages of a group of completions, and what a token of each weighs.
// @ts-check
import { svg } from "/assets/drawing.js";
import { byId, el, figure } from "/assets/studio.js";
import { canvas, keys, legend, powers, study, table, word } from "/assets/learn.js";

const signed = (/** @type {number} */ value) => `${value > 0 ? "+" : value < 0 ? "−" : ""}${Math.abs(value).toFixed(2)}`;

/** Bars up and down from a line. @param {number[]} values @param {number} width @param {string} label @param {(value: number) => string} show */
const bars = (values, width, label, show) => {
  const height = 170, step = width / values.length, room = 20;
  const highest = Math.max(...values, 0), lowest = Math.min(...values, 0), scale = (height - 2 * room) / (highest - lowest || 1), middle = room + highest * scale;
  const root = canvas(width, height + 16, label);
  root.append(svg("line", { class: "grid", x1: 0, x2: width, y1: middle, y2: middle }));
  values.forEach((value, index) => {
    const size = Math.abs(value) * scale, x = index * step + step * 0.15;
    root.append(svg("rect", { class: value < 0 ? "f3" : "f2", x, y: value < 0 ? middle : middle - size, width: step * 0.7, height: size }),
      word(index * step + step / 2, value < 0 ? middle + size + 14 : middle - size - 5, show(value), { "text-anchor": "middle" }),
      word(index * step + step / 2, height + 12, String(index + 1), { "text-anchor": "middle" }));
  });
  return root;
};

study("advantages", {
  first: { rewards: "1, 0, 0, 1, 0, 0, 0, 0", lengths: "40, 120, 60, 80, 100, 30, 150, 110", algorithm: "grpo", max_answer: 128 },
  controls: [
    { name: "rewards", label: "Rewards of the group", lines: 1 },
    { name: "lengths", label: "Tokens of each answer", lines: 1 },
    { name: "algorithm", label: "Algorithm", names: () => ["grpo", "dr-grpo", "dapo", "maxrl", "rloo", "reinforce", "cispo", "gspo", "expert-iteration"] },
    { name: "max_answer", label: "Longest answer", values: powers(16, 8192) },
  ],
  draw: (answer, state, width) => {
    const { completions, parts, mean, compared, equal } = answer;
    const percent = (/** @type {number} */ value) => value === 0 ? "0" : figure(value * 100, "number");
    byId("verdict").textContent = equal ? "All rewards are equal: the group teaches nothing beside its own mean." : `The mean reward is ${figure(mean, "number")}; answers above it become more likely.`;
    byId("picture").replaceChildren(
      el("h2", {}, "Advantage of each answer"), bars(completions.map((/** @type {any} */ each) => each.trained_on ? each.advantage : 0), width, "Advantages", signed),
      el("h2", {}, "Pull of a token: its weight in the loss times the advantage, in percent"),
      bars(completions.map((/** @type {any} */ each) => each.token_weight * each.advantage), width, "Pull of a token", percent),
      el("h2", {}, "Pull of a whole answer, in percent"), bars(completions.map((/** @type {any} */ each) => each.pull), width, "Pull of an answer", percent),
      legend([["k2", "more likely"], ["k3", "less likely"]]));
    keys([["advantage", parts.advantage], ["terms divided by", parts.normalisation === "token" ? "tokens" : parts.normalisation === "sequence" ? "length · answers" : "constant · answers"], ["clip", parts.clip]]);
    table(["advantages by", ...completions.map((/** @type {any} */ _, /** @type {number} */ index) => String(index + 1))], compared.map((/** @type {any} */ each) =>
      each.error ? [each.name, each.error, ...completions.slice(1).map(() => "")] : [each.name, ...each.advantages.map(signed)]));
  },
});
