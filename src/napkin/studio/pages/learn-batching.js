// The slots of an engine over its steps: static batches beside continuous batching.
// @ts-check
import { svg } from "/assets/drawing.js";
import { ask, byId, el, figure } from "/assets/studio.js";
import { area, canvas, chart, inkOn, keys, legend, powers, study, table, whole, word } from "/assets/learn.js";

const { models } = await ask("/api/planner/catalogue");
const ordinary = Object.keys(models).filter((name) => models[name].rule.kv_lora_rank === undefined);
const COLOURS = 6;
const WIDEST = 16; // pixels of a box that has room for its number

/** @param {any} run @param {number} slots @param {number} longest @param {number} width @param {string} name */
const timeline = ({ spans, steps }, slots, longest, width, name) => {
  const left = 50, row = 26, root = canvas(width, row * slots + 4, `${name}: slots over ${steps} steps`);
  const x = (/** @type {number} */ step) => left + step / longest * (width - left - 4);
  for (let slot = 0; slot < slots; slot++) root.append(word(0, slot * row + 17, `slot ${slot}`), svg("rect", { class: "empty", x: left, y: slot * row, width: x(steps) - left, height: row - 4 }));
  for (const [slot, request, kind, from, to] of spans) {
    root.append(svg("rect", { class: kind === "prefill" ? "f6" : `f${request % COLOURS}`, x: x(from), y: slot * row, width: Math.max(1, x(to) - x(from) - 0.5), height: row - 4 },
      svg("title", {}, `request ${request}: ${kind}, steps ${from + 1} to ${to}`)));
    if (kind === "decode" && x(to) - x(from) > WIDEST) root.append(word((x(from) + x(to)) / 2, slot * row + 15, String(request), { "text-anchor": "middle", class: inkOn(`f${request % COLOURS}`) }));
  }
  return root;
};

/** @param {any} answer @param {any} state @param {number} width */
const cache = ({ static: one, continuous }, { blocks }, width) => {
  const longest = Math.max(one.steps, continuous.steps);
  const { root, x, y, left, right } = chart(width, 200, "Blocks of the cache in use over the steps",
    { from: 0, to: longest, label: "step", show: String }, { from: 0, to: blocks * 1.05, label: "blocks", show: String });
  for (const [run, style] of [[one, "f6 band"], [continuous, "f0 band"]]) {
    root.append(area(run.blocks.flatMap((/** @type {number} */ used, /** @type {number} */ step) => [[x(step), y(0), y(used)], [x(step + 1), y(0), y(used)]]), style));
  }
  root.append(svg("line", { class: "mark", x1: left, x2: right, y1: y(blocks), y2: y(blocks) }));
  return root;
};

study("batching", {
  first: { requests: "12+40 30+8 8+12 20+60 10+6 16+24 40+10 8+30 12+16 24+20", slots: 4, prefill_chunk: 16, blocks: 64, block_size: 4, preset: "llama-3-8b" },
  controls: [
    { name: "requests", label: "Requests: prompt + answer tokens", lines: 3 },
    { name: "slots", label: "Slots", values: whole(1, 16) },
    { name: "prefill_chunk", label: "Prompt tokens per step", values: powers(1, 512) },
    { name: "blocks", label: "Blocks of the cache", values: [8, 12, 16, 20, 24, 32, 40, 48, 64, 96, 128, 256, 512, 1024] },
    { name: "block_size", label: "Tokens per block", values: powers(1, 64) },
    { name: "preset", label: "Model", names: () => ordinary },
  ],
  draw: (answer, state, width) => {
    const { static: one, continuous, bytes_per_token: bytes } = answer, longest = Math.max(one.steps, continuous.steps);
    byId("verdict").textContent = `Continuous batching needs ${continuous.steps} steps, static batching ${one.steps}: ${figure(one.steps / continuous.steps, "number")} times as many.`;
    byId("picture").replaceChildren(el("h2", {}, "Static: a batch ends with its longest answer"), timeline(one, state.slots, longest, width, "Static"),
      el("h2", {}, "Continuous: a free slot is taken at once"), timeline(continuous, state.slots, longest, width, "Continuous"),
      legend([["k6", "a prompt is computed"], ["k0", "answers, a colour per request"], ["k-card", "empty"]]),
      el("h2", {}, "Blocks of the cache in use"), cache(answer, state, width), legend([["k0", "continuous"], ["k6", "static"]]));
    const most = Math.max(...continuous.blocks) * state.block_size * bytes;
    keys([
      ["slots busy", figure(continuous.busy, "share"), `static ${figure(one.busy, "share")}`],
      ["tokens per step", figure(continuous.tokens_per_step, "number"), `static ${figure(one.tokens_per_step, "number")}`],
      ["cache per token", figure(bytes, "bytes"), `${state.preset}, 16 bits`],
      ["cache at most", figure(most, "bytes"), `${Math.max(...continuous.blocks)} blocks of ${state.block_size} tokens`],
      ["gave back", String(continuous.preempted), "requests, for lack of blocks"],
    ]);
    table(["request", "prompt", "answer", "done, static", "done, continuous"], answer.requests.map((/** @type {number[]} */ [prompt, out], /** @type {number} */ number) =>
      [String(number), String(prompt), String(out), `step ${one.done_at[number]}`, `step ${continuous.done_at[number]}`]));
  },
});
