// The roofline: what a device can do, and where an operator of some shape stands under it.
// @ts-check
import { svg } from "/assets/drawing.js";
import { ask, byId, el, figure } from "/assets/studio.js";
import { chart, keys, legend, line, powers, study, table, word } from "/assets/learn.js";

const { devices } = await ask("/api/planner/catalogue");
const rate = (/** @type {number} */ value) => `${figure(value, "FLOP")}/s`;
const isProduct = (/** @type {any} */ state) => state.operator === "product";
const isAttention = (/** @type {any} */ state) => state.operator !== "product";

/** @param {any} answer @param {any} state @param {number} width */
const roof = ({ peak, bandwidth, ridge, intensity, flops, seconds, formats, reached }, { format }, width) => {
  const low = Math.min(0.25, intensity / 4), high = Math.max(4 * ridge, intensity * 4, 4096), top = Math.max(...Object.values(formats)) * 2;
  const { root, x, y, bottom } = chart(width, 380, "FLOP/s over FLOPs per byte",
    { from: low, to: high, log: true, label: "FLOPs per byte", show: (value) => figure(value, "number") },
    { from: low * bandwidth, to: top, log: true, label: "FLOP/s", show: (value) => figure(value, "FLOP").replace("FLOP", "") });
  // Formats of one peak share a line.
  for (const other of new Set(Object.values(formats))) {
    if (other === peak) continue;
    const names = Object.keys(formats).filter((name) => formats[name] === other);
    root.append(line([[x(other / bandwidth), y(other)], [x(high), y(other)]], "s6 dashed"), word(x(high) - 4, y(other) - 4, names.join(", "), { "text-anchor": "end" }));
  }
  root.append(line([[x(low), y(low * bandwidth)], [x(ridge), y(peak)], [x(high), y(peak)]], "s0"), word(x(high) - 4, y(peak) - 6, `${format}: ${rate(peak)}`, { "text-anchor": "end", class: "strong" }));
  const at = flops / seconds;
  root.append(svg("line", { class: "grid", x1: x(intensity), x2: x(intensity), y1: y(at), y2: bottom }), svg("circle", { class: "f3", cx: x(intensity), cy: y(at), r: 6 }));
  if (reached) root.append(svg("circle", { class: "s3", fill: "none", "stroke-width": 2, cx: x(intensity), cy: y(Math.min(reached, at)), r: 6 }));
  return root;
};

study("roofline", {
  first: { device: "H100-SXM-80GB", format: "bf16", operator: "product", m: 4096, k: 4096, n: 4096, batch: 8, heads: 32, kv_heads: 8, head_dim: 128, context: 4096 },
  controls: [
    { name: "device", label: "Device", names: () => Object.keys(devices) },
    { name: "format", label: "Format", names: () => ["fp64", "fp32", "tf32", "fp16", "bf16", "fp8", "fp4", "int8"] },
    { name: "operator", label: "Operator", names: () => ["product", "attention", "decoding"] },
    { name: "m", label: "Rows m (tokens)", values: powers(1, 65536), when: isProduct },
    { name: "k", label: "Inputs k", values: powers(16, 65536), when: isProduct },
    { name: "n", label: "Outputs n", values: powers(16, 65536), when: isProduct },
    { name: "batch", label: "Sequences", values: powers(1, 1024), when: isAttention },
    { name: "context", label: "Context", values: powers(16, 131072), when: isAttention },
    { name: "heads", label: "Heads", values: powers(1, 128), when: isAttention },
    { name: "kv_heads", label: "Key/value heads", values: powers(1, 128), when: isAttention },
    { name: "head_dim", label: "Head width", values: powers(32, 256), when: isAttention },
  ],
  draw: (answer, state, width) => {
    const { by_flops, by_bytes, intensity, ridge, reached, peak } = answer, bound = by_flops >= by_bytes;
    byId("verdict").textContent = bound
      ? `Bound by arithmetic: ${figure(intensity, "number")} FLOPs per byte, more than the device's ${figure(ridge, "number")}.`
      : `Bound by memory: ${figure(intensity, "number")} FLOPs per byte, the device has ${figure(ridge, "number")}.`;
    byId("picture").replaceChildren(roof(answer, state, width), legend([["k0", "the roof"], ["k3", "this operator, at best"], ...(reached ? [/** @type {[string, string]} */ (["k-card", "ring: what kernels reach of the peak for this shape"])] : [])]),
      el("p", { class: "soft" }, bound ? "More bandwidth would not make it faster." : `At best it reaches ${figure(intensity / ridge, "share")} of the peak.`));
    keys([
      ["least time", figure(answer.seconds, "seconds")], ["FLOPs", figure(answer.flops, "FLOP")], ["bytes", figure(answer.bytes, "bytes")],
      ["for arithmetic", figure(by_flops, "seconds")], ["for memory", figure(by_bytes, "seconds")],
      ...(reached ? [/** @type {[string, string, string]} */ (["kernels reach", figure(reached / peak, "share"), "of the peak, where arithmetic bounds"])] : []),
    ]);
    table(["format", "peak", "FLOPs per byte at the corner"], Object.entries(answer.formats).map(([name, value]) => [name, rate(Number(value)), figure(Number(value) / answer.bandwidth, "number")]), Object.keys(answer.formats).indexOf(state.format));
  },
});
