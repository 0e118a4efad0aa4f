// A service over its requests in flight: throughput against latency by degree of tensor parallelism, and limits.
// @ts-check
import { POWERS, TENS, buildControls, linkOf, stateOf } from "/assets/controls.js";
import { axes, scale, svg } from "/assets/drawing.js";
import { Refused, ask, byId, el, figure } from "/assets/studio.js";

const PAUSE = 250; // milliseconds without a change before curves are asked for
const COLOURS = ["blue", "vermilion", "green", "purple", "orange", "sky", "grey"];
/** Latencies, by the field of a point. @type {Record<string, string>} */
const LATENCIES = { tpot: "time per output token", ttft: "time to first token", request_seconds: "time of a request" };
const catalogue = await ask("/api/services/catalogue");

/** @typedef {import("./controls.js").State} State */
/** @typedef {import("./controls.js").Control} Control */
/** @type {Record<string, Control[]>} */
const GROUPS = {
  Service: [
    { name: "preset", label: "Published model", names: () => catalogue.models },
    { name: "device", label: "Device", names: () => Object.keys(catalogue.devices) },
    { name: "n", label: "Devices", values: POWERS(1, 64).filter((each) => Number.isInteger(Math.log2(each))) },
    { name: "server", label: "Server", names: () => catalogue.servers },
    { name: "weights", label: "Weights", names: () => catalogue.weights },
    { name: "kv", label: "KV cache", names: () => ["as the weights", ...catalogue.kv] },
    { name: "usd_per_hour", label: "$ per device hour", values: TENS(0.01, 100), isFraction: true },
  ],
  Requests: [
    { name: "input_tokens", label: "Prompt tokens", values: POWERS(16, 131072) },
    { name: "output_tokens", label: "Answer tokens", values: POWERS(2, 32768) },
    { name: "shortest", label: "Shortest, of it", values: [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1], isFraction: true, unit: "share" },
  ],
  "What users bear (0 is any)": [
    { name: "ttft", label: "First token, s", values: [0, ...TENS(0.01, 100)], isFraction: true },
    { name: "tpot", label: "Each token, ms", values: [0, ...TENS(1, 1000)], isFraction: true },
  ],
};
const CONTROLS = Object.values(GROUPS).flat();
const LIMITS = ["ttft", "tpot"]; // what needs no new curve
/** @type {State} */
const FIRST = {
  preset: "llama-3-8b", device: "H100-SXM-80GB", n: 8, server: "vllm", weights: "bf16", kv: "as the weights",
  usd_per_hour: catalogue.devices["H100-SXM-80GB"], input_tokens: 1024, output_tokens: 256, shortest: 0.8, ttft: 0, tpot: 0,
};
/** @param {State} state @param {string} name @param {any} value @returns {State} */
const changed = (state, name, value) => ({ ...state, [name]: value, ...(name === "device" ? { usd_per_hour: catalogue.devices[value] } : {}) });

let state = stateOf(CONTROLS, location.hash.slice(1), FIRST, changed);
/** @type {any} */
let found = null;
let refusal = "", asked = 0;
/** @type {number | undefined} */
let timer;

const requestOf = () => {
  const { preset, device, n, kv, ttft, tpot, usd_per_hour, ...others } = state;
  return { preset, on: `${n}x${device}`, kv: kv === "as the weights" ? null : kv, usd_per_hour: usd_per_hour || null, ...others };
};
/** @param {any} point */
const isWithin = (point) => (!state.ttft || point.ttft <= state.ttft) && (!state.tpot || point.tpot <= state.tpot / 1000);
const allPoints = () => found.curves.flatMap((/** @type {any} */ curve) => curve.points.map((/** @type {any} */ point) => ({ ...point, tensor: curve.tensor, isKnee: point.concurrency === curve.knee })));
/** The point of most tokens per second: among those that users bear, or among the knees where no limit is set. */
const chosenPoint = () => {
  const possible = allPoints().filter((/** @type {any} */ point) => state.ttft || state.tpot ? isWithin(point) : point.isKnee);
  return possible.sort((/** @type {any} */ one, /** @type {any} */ other) => other.tokens_per_second - one.tokens_per_second)[0];
};
const colourOf = (/** @type {number} */ tensor) => COLOURS[found.curves.findIndex((/** @type {any} */ curve) => curve.tensor === tensor) % COLOURS.length];
/** @param {any} point */
const wordsOf = (point) => `tensor ${point.tensor}, ${point.concurrency} in flight: ${figure(point.tokens_per_second, "tokens/s")}, first token ${figure(point.ttft, "seconds")}, each token ${figure(point.tpot, "seconds")}`;

const showVerdict = () => {
  const point = chosenPoint(), limits = [state.ttft && `first token within ${state.ttft} s`, state.tpot && `each token within ${state.tpot} ms`].filter(Boolean).join(", ");
  if (!point) {
    const why = found.curves.some((/** @type {any} */ curve) => curve.points.length) ? `No number of requests holds ${limits} on the average` : `It does not fit: ${found.curves.at(-1).reason}`;
    byId("verdict").replaceChildren(el("span", { class: "bad" }, why));
    byId("keys").replaceChildren();
    return;
  }
  byId("verdict").textContent = limits
    ? `With ${limits} on the average: tensor ${point.tensor}, ${point.concurrency} requests in flight`
    : `The knee of most tokens: tensor ${point.tensor}, ${point.concurrency} requests in flight`;
  const within = (/** @type {number} */ value, /** @type {number | undefined} */ factor) => factor ? `${figure(value / factor, "seconds")} to ${figure(value * factor, "seconds")} in nine cases of ten` : "";
  const [low, high] = point.tokens_per_second_interval ?? [];
  byId("keys").replaceChildren(...[
    ["tokens per second", figure(point.tokens_per_second, "tokens/s"), low ? `${figure(low, "tokens/s")} to ${figure(high, "tokens/s")}` : ""],
    ["first token", figure(point.ttft, "seconds"), within(point.ttft, point.interval?.ttft)],
    ["each token", figure(point.tpot, "seconds"), within(point.tpot, point.interval?.tpot)],
    ["$ per million tokens", figure(point.usd_per_million_tokens, "USD"), `${point.replicas} × tensor ${point.tensor}`],
  ].map(([name, value, note]) => el("div", {}, el("dt", {}, name), el("dd", {}, value, el("small", {}, note)))));
};

const showCurve = () => {
  const latency = byId("latency").value, points = allPoints();
  if (!points.length) { byId("curve").replaceChildren(); return; }
  const width = Math.max(320, Math.min(860, byId("curve").clientWidth)), height = 340;
  const margin = { left: 64, right: 14, top: 24, bottom: 40 };
  /** @param {string} name @returns {[number, number]} */
  const range = (name) => {
    const values = points.map((/** @type {any} */ point) => point[name]);
    return [Math.min(...values) / 1.1, Math.max(...values) * 1.1];
  };
  const x = scale(range(latency), [margin.left, width - margin.right], { log: true });
  const y = scale(range("tokens_per_second"), [height - margin.bottom, margin.top], { log: true });
  const best = chosenPoint();
  const lines = found.curves.filter((/** @type {any} */ curve) => curve.points.length).flatMap((/** @type {any} */ curve) => [
    svg("polyline", { class: `line ${colourOf(curve.tensor)}`, points: curve.points.map((/** @type {any} */ point) => `${x(point[latency])},${y(point.tokens_per_second)}`).join(" ") }),
    ...curve.points.map((/** @type {any} */ each) => {
      const point = { ...each, tensor: curve.tensor }, isKnee = each.concurrency === curve.knee;
      const isBest = best && best.tensor === curve.tensor && best.concurrency === each.concurrency;
      return svg("circle", { class: `point ${colourOf(curve.tensor)}${isKnee ? " knee" : ""}${isBest ? " best" : ""}${isWithin(each) ? "" : " out"}`, cx: x(each[latency]), cy: y(each.tokens_per_second), r: isKnee || isBest ? 6 : 3 }, svg("title", {}, wordsOf(point)));
    }),
  ]);
  const words = `Throughput against ${LATENCIES[latency]}. ${found.curves.map((/** @type {any} */ curve) => curve.knee ? `Knee of tensor ${curve.tensor} at ${curve.knee} requests in flight` : "").filter(Boolean).join(". ")}`;
  byId("curve").replaceChildren(svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": words }, ...axes({
    x, y, width, height, margin, xLabel: LATENCIES[latency], yLabel: "tokens per second, all devices",
    xText: (value) => figure(value, "seconds"), yText: (value) => figure(value, "count"),
  }), ...lines));
  byId("curve-legend").replaceChildren(...found.curves.map((/** @type {any} */ curve) => el("li", {}, el("span", { class: `swatch line ${colourOf(curve.tensor)}` }), `tensor ${curve.tensor}${curve.knee ? `, knee at ${curve.knee}` : ": does not fit"}`)));
};

const head = (/** @type {string[]} */ names) => el("thead", {}, el("tr", {}, ...names.map((each) => el("th", { scope: "col" }, each))));
const showTables = () => {
  const select = byId("tensor"), before = Number(select.value);
  const possible = found.curves.filter((/** @type {any} */ curve) => curve.points.length);
  select.replaceChildren(...possible.map((/** @type {any} */ curve) => el("option", { value: String(curve.tensor) }, String(curve.tensor))));
  const tensor = possible.some((/** @type {any} */ curve) => curve.tensor === before) ? before : chosenPoint()?.tensor ?? possible[0]?.tensor;
  select.value = String(tensor ?? "");
  const curve = possible.find((/** @type {any} */ each) => each.tensor === tensor);
  const note = (/** @type {any} */ point) => point.concurrency === curve.knee ? "knee" : point.waits ? "some wait for room" : "";
  byId("points").replaceChildren(...(curve ? [head(["in flight", "tokens/s", "first token", "99%", "each token", "99%", "request", "$/M tokens", ""]), el("tbody", {}, ...curve.points.map((/** @type {any} */ point) => el("tr", { class: isWithin(point) ? "" : "soft" },
    el("th", { scope: "row" }, String(point.concurrency)), ...[
      figure(point.tokens_per_second, "tokens/s"), figure(point.ttft, "seconds"), figure(point.ttft_percentiles[99], "seconds"),
      figure(point.tpot, "seconds"), figure(point.tpot_percentiles[99], "seconds"), figure(point.request_seconds, "seconds"),
      figure(point.usd_per_million_tokens, "USD"), note(point),
    ].map((each) => el("td", {}, each)))))] : []));
  byId("degrees").replaceChildren(head(["tensor", "replicas", "weights", "left for the KV cache", "sequences of a replica", ""]), el("tbody", {}, ...found.curves.map((/** @type {any} */ each) => {
    const [point] = each.points;
    return el("tr", {}, el("th", { scope: "row" }, String(each.tensor)), ...(point
      ? [String(point.replicas), figure(point.weight_bytes, "bytes"), figure(point.kv_pool_bytes, "bytes"), figure(point.sequences, "count"), ""]
      : ["", "", "", "", each.reason]).map((text) => el("td", {}, text)));
  })));
};

const show = () => {
  refresh();
  document.body.dataset.ready = found ? "curves" : refusal ? "refused" : "asking";
  byId("said").textContent = refusal || (found ? (found.notes.join("; ") || "Steps are priced by a server's measured constants, their schedule is simulated") : "The schedules are simulated …");
  const { preset, n, device, server, weights, kv, input_tokens, output_tokens, shortest } = state;
  byId("command").textContent = `napkin plan service --curve --preset ${preset} --on ${n}x${device} --server ${server} --weights ${weights}${kv === "as the weights" ? "" : ` --kv ${kv}`} --input-tokens ${input_tokens} --output-tokens ${output_tokens} --shortest ${shortest}`;
  if (refusal) byId("verdict").replaceChildren(el("span", { class: "bad" }, "Not planned"));
  if (!found) return;
  showVerdict();
  showCurve();
  showTables();
};
/** @param {number} number */
const plan = async (number) => {
  try {
    const answer = await ask("/api/services/curves", { body: requestOf() });
    if (number !== asked) return;
    found = answer;
  } catch (error) {
    if (number !== asked) return;
    if (error instanceof Refused && error.status === 409) {
      timer = window.setTimeout(() => plan(number), 4 * PAUSE);
      return;
    }
    refusal = /** @type {Error} */ (error).message;
  }
  show();
};
const update = () => {
  found = null;
  refusal = "";
  asked += 1;
  history.replaceState(null, "", `#${linkOf(CONTROLS, state, FIRST)}`);
  show();
  clearTimeout(timer);
  timer = window.setTimeout(() => plan(asked), PAUSE);
};
/** @param {string} name @param {any} value */
const set = (name, value) => {
  state = changed(state, name, value);
  if (!LIMITS.includes(name) || !found) return update();
  history.replaceState(null, "", `#${linkOf(CONTROLS, state, FIRST)}`);
  show();
};
const refresh = buildControls(byId("controls"), GROUPS, { state: () => state, set });
byId("latency").append(...Object.entries(LATENCIES).map(([name, says]) => el("option", { value: name }, says)));
byId("latency").addEventListener("change", () => found && showCurve());
byId("tensor").addEventListener("change", () => found && showTables());
byId("link").addEventListener("click", async () => {
  await navigator.clipboard.writeText(location.href);
  byId("copied").textContent = "copied";
});
addEventListener("resize", () => found && showCurve());
addEventListener("hashchange", () => { state = stateOf(CONTROLS, location.hash.slice(1), FIRST, changed); update(); });
update();
