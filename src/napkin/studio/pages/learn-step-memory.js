// A step's memory over time by use, for each kind of recomputation.
// @ts-check
import { byId, el, figure } from "/assets/studio.js";
import { area, chart, keys, legend, line, powers, study, table, whole } from "/assets/learn.js";

const MODES = ["none", "selective", "full"];
const STYLES = /** @type {Record<string, string>} */ ({ none: "s3", selective: "s5", full: "s-ink" });
const COLOURS = ["f0", "f2", "f5", "f1", "f6"];

/** @param {any} answer @param {string} mode @param {number} width */
const overTime = (answer, mode, width) => {
  const longest = Math.max(...MODES.map((each) => answer[each].step_seconds)), most = Math.max(...MODES.map((each) => answer[each].peak));
  const { root, x, y } = chart(width, 360, `Bytes in tensors over a step, recomputation ${mode}`,
    { from: 0, to: longest, label: "time of the step on an H100, by rooflines", show: (value) => figure(value, "seconds") },
    { from: 0, to: most * 1.08, label: "bytes", show: (value) => figure(value, "bytes") });
  const { seconds, uses } = answer[mode];
  let low = seconds.map(() => 0);
  Object.values(uses).forEach((bytes, index) => {
    const high = low.map((/** @type {number} */ below, /** @type {number} */ at) => below + bytes[at]);
    root.append(area(seconds.map((/** @type {number} */ at, /** @type {number} */ place) => [x(at), y(low[place]), y(high[place])]), COLOURS[index]));
    low = high;
  });
  for (const each of MODES) {
    if (each === mode) continue;
    const other = answer[each], sums = other.seconds.map((/** @type {any} */ _, /** @type {number} */ place) => Object.values(other.uses).reduce((sum, bytes) => sum + bytes[place], 0));
    root.append(line(sums.map((/** @type {number} */ sum, /** @type {number} */ place) => [x(other.seconds[place]), y(sum)]), `${STYLES[each]} dashed`));
  }
  return root;
};

study("step-memory", {
  first: { recompute: "none", n_layers: 4, d_model: 512, context_length: 512, batch_size: 8, vocab_size: 4096, optimizer: "adamw", precision: "bf16" },
  controls: [
    { name: "recompute", label: "Recompute", names: () => MODES, local: true },
    { name: "n_layers", label: "Layers", values: whole(1, 8) },
    { name: "d_model", label: "Width", values: [64, 128, 256, 512, 768, 1024, 1536, 2048] },
    { name: "context_length", label: "Context", values: powers(64, 4096) },
    { name: "batch_size", label: "Sequences", values: powers(1, 64) },
    { name: "vocab_size", label: "Vocabulary", values: powers(256, 65536) },
    { name: "optimizer", label: "Optimizer", names: () => ["adamw", "muon", "sgd"] },
    { name: "precision", label: "Precision", names: () => ["bf16", "fp32"] },
  ],
  draw: (answer, { recompute }, width) => {
    const chosen = answer[recompute], plain = answer.none;
    const less = 1 - chosen.peak / plain.peak, longer = chosen.step_seconds / plain.step_seconds - 1;
    byId("verdict").textContent = recompute === "none"
      ? `The peak is ${figure(chosen.peak, "bytes")}; full recomputation would take ${figure(1 - answer.full.peak / plain.peak, "share")} less.`
      : `Recomputation takes ${figure(less, "share")} less memory at the peak, and ${figure(longer, "share")} more time.`;
    const others = MODES.filter((each) => each !== recompute);
    byId("picture").replaceChildren(overTime(answer, recompute, width),
      legend(/** @type {[string, string][]} */ (Object.keys(chosen.uses).map((use, index) => [COLOURS[index].replace("f", "k"), use]))),
      el("p", { class: "soft" }, `Dashed: all bytes with recomputation ${others.map((each) => `“${each}”`).join(" and ")}.`));
    keys([["peak", figure(chosen.peak, "bytes")], ["step", figure(chosen.step_seconds, "seconds"), "by rooflines of an H100"], ["parameters", figure(chosen.parameters, "count")]]);
    table(["recompute", "peak", "beside none", "step", "beside none"], MODES.map((each) => [
      each, figure(answer[each].peak, "bytes"), figure(answer[each].peak / plain.peak, "share"), figure(answer[each].step_seconds, "seconds"), figure(answer[each].step_seconds / plain.step_seconds, "share"),
    ]), MODES.indexOf(recompute));
  },
});
