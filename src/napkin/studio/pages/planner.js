// The planner: the rule answers while a control is dragged, the server's count a moment later.
// @ts-check
import { POWERS, TENS, buildControls, linkOf, stateOf } from "/assets/controls.js";
import { run_rule, step_rule } from "/assets/rules.js";
import { Refused, ask, byId, el, figure, keep } from "/assets/studio.js";

const PAUSE = 250; // milliseconds without a change before the count is asked for
// A planner that is one file has the catalogue in it, and some counts in place of a server.
const embedded = document.getElementById("catalogue");
const catalogue = embedded ? JSON.parse(embedded.textContent ?? "") : await ask("/api/planner/catalogue");

/** @typedef {import("./controls.js").State} State */
/** @typedef {import("./controls.js").Control} Control */
/** @type {Record<string, Control[]>} */
const GROUPS = {
  Model: [
    { name: "preset", label: "Published model", names: () => Object.keys(catalogue.models) },
    { name: "d_model", label: "Width", values: POWERS(64, 65536) },
    { name: "n_layers", label: "Layers", values: POWERS(1, 256) },
    { name: "n_heads", label: "Heads", values: POWERS(1, 256) },
    { name: "n_kv_heads", label: "Key/value heads", values: POWERS(1, 256), when: (s) => s.kv_lora_rank === undefined },
    { name: "d_ff", label: "Feed-forward width", values: POWERS(64, 262144) },
    { name: "n_experts", label: "Experts", values: [0, ...POWERS(2, 512)] },
    { name: "experts_per_token", label: "Experts per token", values: POWERS(1, 64), when: (s) => s.n_experts > 0 },
    { name: "d_expert", label: "Expert width", values: POWERS(64, 65536), when: (s) => s.n_experts > 0 },
    { name: "vocab_size", label: "Vocabulary", values: POWERS(256, 524288) },
    { name: "context_length", label: "Context", values: POWERS(128, 1048576) },
    { name: "tied", label: "Tied embeddings" },
  ],
  Training: [
    { name: "tokens", label: "Tokens", values: TENS(1e6, 1e14), unit: "count" },
    { name: "batch_size", label: "Sequences per step", values: POWERS(1, 65536) },
    { name: "micro_batch_size", label: "Micro-batch", values: POWERS(1, 1024) },
    { name: "recompute", label: "Recompute", names: () => ["none", "selective", "full"] },
    { name: "loss_chunk_size", label: "Logits at a time", values: POWERS(128, 131072) },
    { name: "precision", label: "Precision", names: () => Object.keys(catalogue.formats) },
    { name: "optimizer", label: "Optimizer", names: () => Object.keys(catalogue.optimizers) },
  ],
  Devices: [
    { name: "device", label: "Device", names: () => Object.keys(catalogue.devices) },
    { name: "n", label: "Devices", values: POWERS(1, 65536) },
    { name: "sharing", label: "Weights and state", names: () => ["copies", "copies, shared state", "shards in a node", "shards"] },
    { name: "tensor", label: "Tensor ranks", values: POWERS(1, 64) },
    { name: "pipeline", label: "Pipeline ranks", values: POWERS(1, 128) },
    { name: "context", label: "Context ranks", values: POWERS(1, 64) },
    { name: "expert", label: "Expert ranks", values: POWERS(1, 256), when: (s) => s.n_experts > 0 },
    { name: "efficiency", label: "Efficiency (rule)", values: Array.from({ length: 19 }, (_, i) => (i + 1) / 20), isFraction: true },
    { name: "usd_per_hour", label: "$ per device hour", values: TENS(0.01, 100), isFraction: true },
  ],
};
const CONTROLS = Object.values(GROUPS).flat();
const MODEL_FIELDS = ["d_model", "n_layers", "n_heads", "n_kv_heads", "d_ff", "n_experts", "experts_per_token", "d_expert", "vocab_size", "context_length", "tied"];
const RECIPE_NAMES = { tied: "tie_embeddings" };

/** The sizes of a published model, and a context that is not longer than most runs train on. @param {string} name @returns {State} */
const modelState = (name) => {
  const { rule } = catalogue.models[name];
  return { n_experts: 0, experts_per_token: 1, d_expert: rule.d_ff, ...rule, context_length: Math.min(catalogue.longest_context, rule.context_length), preset: name };
};
/** @returns {State} */
const first = () => ({
  ...catalogue.first, ...modelState(catalogue.first.preset),
  usd_per_hour: catalogue.devices[catalogue.first.device].usd_per_hour ?? 0,
});

/** What a control's new value brings with it. @param {State} state @param {string} name @param {any} value @returns {State} */
const changed = (state, name, value) => {
  if (name === "preset") {
    const before = Object.fromEntries(["kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "n_shared_experts", "n_dense_layers"].map((each) => [each, undefined]));
    return { ...state, ...before, ...modelState(value) };
  }
  const next = { ...state, [name]: value }, { derived } = catalogue.models[state.preset];
  if (name === "device") next.usd_per_hour = catalogue.devices[value].usd_per_hour ?? 0;
  if (derived.includes("head_dim") && (name === "d_model" || name === "n_heads")) next.head_dim = next.v_head_dim = next.d_model / next.n_heads;
  if (derived.includes("n_kv_heads") && name === "n_heads") next.n_kv_heads = value;
  return next;
};

/** Ranks by what they divide; `data` is what the others leave. @param {State} s */
const ranksOf = (s) => {
  const rest = s.n / (s.tensor * s.pipeline * s.context), perNode = catalogue.devices[s.device].per_node;
  const inNode = Math.max(1, Math.min(rest, perNode / Math.min(perNode, s.tensor * s.context)));
  const shard = s.sharing === "shards" ? rest : s.sharing === "shards in a node" ? inNode : 1;
  return { data: rest / shard, shard, tensor: s.tensor, pipeline: s.pipeline, context: s.context, expert: s.expert };
};

/** Why the rule cannot answer, or null. @param {State} s */
const obstacle = (s) => {
  const { data, shard } = ranksOf(s), rows = data * shard * s.micro_batch_size;
  if (!Number.isInteger(data * shard)) return `${s.n} devices do not divide into tensor ${s.tensor} × pipeline ${s.pipeline} × context ${s.context}`;
  if (!Number.isInteger(data)) return `${data * shard} ranks do not divide into nodes`;
  if (!Number.isInteger(s.batch_size / rows)) return `${s.batch_size} sequences do not divide among ${data * shard} ranks of ${s.micro_batch_size}: use a multiple of ${rows}`;
  if (s.d_model % s.n_heads && catalogue.models[s.preset].derived.includes("head_dim")) return `a width of ${s.d_model} does not divide among ${s.n_heads} heads`;
  if (s.n_heads % s.n_kv_heads) return `${s.n_heads} heads do not divide among ${s.n_kv_heads} heads of keys and values`;
  if (s.n_layers < s.pipeline) return `${s.n_layers} layers do not divide among ${s.pipeline} ranks of a pipeline`;
  if (peakOf(s) === undefined) return `${s.device} has no ${s.precision} products`;
  return null;
};
/** @param {State} s @returns {number | undefined} */
const peakOf = (s) => catalogue.devices[s.device].peaks[s.precision === "bf16-pure" ? "bf16" : s.precision];

/** @param {State} s */
const byRule = (s) => {
  const device = catalogue.devices[s.device];
  const rule = catalogue.models[s.preset].rule;
  const names = [...Object.keys(rule), "n_experts", "experts_per_token", "d_expert"];
  const model = Object.fromEntries(names.map((name) => [name, s[name] ?? rule[name]]));
  const step = step_rule(keep({
    ...model, batch_size: s.batch_size, micro_batch_size: s.micro_batch_size, loss_chunk_size: s.loss_chunk_size,
    recompute: s.recompute, ...catalogue.formats[s.precision], state_bytes: catalogue.optimizers[s.optimizer],
    ...ranksOf(s), shard_optimizer: s.sharing === "copies, shared state", peak: peakOf(s), efficiency: s.efficiency,
  }));
  const steps = Math.ceil(s.tokens / step.tokens);
  const run = run_rule(keep({
    steps, seconds: step.seconds, devices: s.n, parameters: step.all_parameters, usd_per_hour: s.usd_per_hour,
    watts: device.watts ?? 0, host_bandwidth: device.host_bandwidth ?? undefined,
  }));
  return { step, run, steps };
};

/** What the server is asked. @param {State} s */
const requestOf = (s) => {
  const before = modelState(s.preset), { rule } = catalogue.models[s.preset], ranks = ranksOf(s);
  const model = Object.fromEntries(MODEL_FIELDS
    .filter((name) => s[name] !== (name === "context_length" ? rule[name] : before[name]))
    .filter((name) => !(["experts_per_token", "d_expert"].includes(name) && !s.n_experts))
    .map((name) => [/** @type {any} */ (RECIPE_NAMES)[name] ?? name, s[name]]));
  return {
    on: `${s.n}x${s.device}`, tokens: s.tokens, preset: s.preset, model,
    optimizer: { name: s.optimizer },
    training: {
      batch_size: s.batch_size, micro_batch_size: s.micro_batch_size, recompute: s.recompute,
      loss_chunk_size: s.loss_chunk_size, precision: s.precision,
      parallelism: ranks.shard > 1 ? "fsdp" : "ddp",
    },
    parallelism: { ...ranks, shard_optimizer: s.sharing === "copies, shared state" && ranks.data > 1 },
  };
};

/** What is as at first is left out of a link, with the sizes of the model's preset; the model is always said. @param {State} s */
const linkTo = (s) => {
  const base = { ...first(), ...modelState(s.preset), usd_per_hour: catalogue.devices[s.device].usd_per_hour ?? 0 };
  return linkOf(CONTROLS, s, { ...base, preset: undefined });
};

let state = stateOf(CONTROLS, location.hash.slice(1), first(), changed);
/** @type {{ state: State, rule: any, count: any } | null} */
let besides = null;
/** @type {any} */
let count = null;
/** @type {string} */
let refusal = "";
let asked = 0;

// What is shown.
const USES = { parameters: "c0", gradients: "c1", optimizer_state: "c2", weight_copies: "c3", activations: "c4", logits: "c5", buffers: "c6" };
/** The count's uses by the rule's names. */
const COUNTED = { "optimizer state": "optimizer_state", "gathered parameters": "weight_copies", "working memory": "logits" };
const LABELS = { optimizer_state: "optimizer state", weight_copies: "copies of weights", logits: "logits and working memory" };
const KINDS = ["forward", "backward_input", "backward_weight", "recompute", "bubble", "update"];

/** @param {{ label: string, parts: [string, number][], limit: number, total: string, most: number }} bar */
const bar = ({ label, parts, limit, total, most }) => {
  const text = `${label}: ${total}. ${parts.map(([name, value]) => `${/** @type {any} */ (LABELS)[name] ?? name} ${figure(value, "bytes")}`).join(", ")}`;
  const spans = parts.map(([name, value]) => {
    const span = el("span", { class: /** @type {any} */ (USES)[name] ?? "c6", title: `${/** @type {any} */ (LABELS)[name] ?? name}: ${figure(value, "bytes")}` });
    span.style.width = `${100 * value / most}%`;
    return span;
  });
  const line = el("span", { class: "limit", title: `for a step: ${figure(limit, "bytes")}` });
  line.style.left = `${Math.min(100, 100 * limit / most)}%`;
  return [el("span", {}, label), el("div", { class: "stack", role: "img", "aria-label": text }, el("div", { class: "parts" }, ...spans), line), el("span", {}, total)];
};

/** @param {any} rule @param {any} found */
const showMemory = (rule, found) => {
  const limit = catalogue.devices[state.device].step_bytes;
  const bars = [{ label: "rule", parts: Object.keys(USES).filter((use) => rule.step[use] > 0).map((use) => [use, rule.step[use]]), bytes: rule.step.bytes }];
  if (found) {
    const parts = Object.entries(found.bytes_by_use).map(([use, value]) => [/** @type {any} */ (COUNTED)[use] ?? use, value]).filter(([, value]) => value > 0);
    bars.push({ label: "count", parts, bytes: found.peak_bytes });
  }
  const most = 1.02 * Math.max(limit, ...bars.map((each) => each.bytes));
  byId("memory").replaceChildren(...bars.flatMap(({ label, parts, bytes }) => bar({ label, parts: /** @type {any} */ (parts), limit, total: figure(bytes, "bytes"), most })));
  byId("memory-legend").replaceChildren(...Object.entries(USES).map(([use, colour]) =>
    el("li", {}, el("span", { class: `swatch ${colour}` }), /** @type {any} */ (LABELS)[use] ?? use)));
};

/** @param {any} found */
const showTime = (found) => {
  const kinds = found ? Object.entries(found.seconds_by_kind) : [];
  const all = kinds.reduce((sum, [, value]) => sum + /** @type {number} */ (value), 0);
  const colours = kinds.map(([kind]) => KINDS.includes(kind) ? `c${KINDS.indexOf(kind)}` : "c6");
  const name = (/** @type {string} */ kind) => kind.replace("_", " of the ").replace("backward of the", "backward,");
  const spans = kinds.map(([kind, value], index) => {
    const span = el("span", { class: colours[index], title: `${name(kind)}: ${figure(/** @type {number} */ (value), "seconds")}` });
    span.style.width = `${100 * /** @type {number} */ (value) / all}%`;
    return span;
  });
  const text = kinds.map(([kind, value]) => `${name(kind)} ${figure(/** @type {number} */ (value), "seconds")}`).join(", ");
  byId("time").replaceChildren(...(found ? [el("span", {}, "count"), el("div", { class: "stack", role: "img", "aria-label": `A step: ${text}` }, el("div", { class: "parts" }, ...spans)), el("span", {}, figure(all, "seconds"))] : [el("span", { class: "soft" }, "counted in a moment")]));
  byId("time-legend").replaceChildren(...kinds.map(([kind, value], index) =>
    el("li", {}, el("span", { class: `swatch ${colours[index]}` }), `${name(kind)} ${figure(/** @type {number} */ (value), "seconds")}`)));
};

/** Plans that differ in one control, by rule. */
const alternatives = () => {
  /** @type {[string, State][]} */
  const found = [];
  const add = (/** @type {string} */ says, /** @type {Record<string, any>} */ fields) => found.push([says, { ...state, ...fields }]);
  for (const recompute of ["none", "full"]) if (recompute !== state.recompute) add(`recompute ${recompute}`, { recompute });
  if (state.micro_batch_size > 1) add(`micro-batch ${Math.floor(state.micro_batch_size / 2)}`, { micro_batch_size: Math.floor(state.micro_batch_size / 2) });
  add(`micro-batch ${2 * state.micro_batch_size}`, { micro_batch_size: 2 * state.micro_batch_size });
  for (const sharing of ["shards", "copies, shared state"]) if (sharing !== state.sharing && state.n > 1) add(sharing === "shards" ? "weights and state in shards" : "optimizer state shared", { sharing });
  for (const name of ["tensor", "pipeline", "context"]) {
    add(`${name} ${2 * state[name]}`, { [name]: 2 * state[name] });
    if (state[name] > 1) add(`${name} ${state[name] / 2}`, { [name]: state[name] / 2 });
  }
  if (state.loss_chunk_size > 512) add("512 logits at a time", { loss_chunk_size: 512 });
  if (state.precision !== "bf16-pure") add("weights in bf16", { precision: "bf16-pure" });
  add(`${2 * state.n} devices`, { n: 2 * state.n });
  if (state.context_length > 256) add(`context ${state.context_length / 2}`, { context_length: state.context_length / 2 });
  return found.filter(([, other]) => obstacle(other) === null);
};

/** @param {any} rule */
const showChanges = (rule) => {
  const limit = catalogue.devices[state.device].step_bytes;
  const rows = alternatives().map(([says, other]) => ({ says, other, found: byRule(other) }))
    .filter(({ found }) => Math.abs(found.step.bytes / rule.step.bytes - 1) > 0.005 || Math.abs(found.run.seconds / rule.run.seconds - 1) > 0.005)
    .sort((one, another) => one.found.step.bytes - another.found.step.bytes);
  const signed = (/** @type {number} */ change) => `${change > 0 ? "+" : change < 0 ? "−" : ""}${figure(Math.abs(change), "share")}`;
  byId("changes").replaceChildren(
    el("thead", {}, el("tr", {}, ...["one change", "memory, by rule", "", "time of the run", ""].map((each) => el("th", { scope: "col" }, each)))),
    el("tbody", {}, ...rows.map(({ says, other, found }) => el("tr", {},
      el("th", { scope: "row" }, says),
      el("td", {}, `${figure(found.step.bytes, "bytes")} (${signed(found.step.bytes / rule.step.bytes - 1)})`),
      el("td", { class: found.step.bytes <= limit ? "good" : "bad" }, found.step.bytes <= limit ? "fits" : "does not fit"),
      el("td", {}, `${figure(found.run.seconds, "seconds")} (${signed(found.run.seconds / rule.run.seconds - 1)})`),
      el("td", {}, el("button", { type: "button", "aria-label": `Take ${says}`, onclick: () => { state = other; update(); } }, "Take"))))));
};

/** Names, units, and how rule and count say each figure. @type {[string, string, (rule: any) => any, (found: any, s: State) => any][]} */
const FIGURES = [
  ["parameters", "count", (rule) => rule.step.all_parameters, () => undefined],
  ["parameters that a token is multiplied with", "count", (rule) => rule.step.multiplying, () => undefined],
  ["steps", "count", (rule) => rule.steps, (found) => found.steps],
  ["tokens per step", "count", (rule) => rule.step.tokens, (found) => found.tokens_per_step],
  ["FLOPs per step", "FLOP", (rule) => rule.step.flops, (found) => found.model_flops],
  ["memory of the fullest device", "bytes", (rule) => rule.step.bytes, (found) => found.peak_bytes],
  ["seconds per step", "seconds", (rule) => rule.step.seconds, (found) => found.seconds_per_step],
  ["MFU", "share", (rule) => rule.step.mfu, (found) => found.mfu],
  ["tokens per second", "tokens/s", (rule) => rule.step.tokens / rule.step.seconds, (found) => found.tokens_per_second],
  ["time of the run", "seconds", (rule) => rule.run.seconds, (found) => found.run_seconds],
  ["dollars", "USD", (rule) => rule.run.dollars, (found, s) => s.n * found.run_seconds / 3600 * s.usd_per_hour],
  ["kilowatt-hours", "count", (rule) => Math.round(rule.run.kilowatt_hours), (found, s) => Math.round(s.n * found.run_seconds / 3.6e6 * (catalogue.devices[s.device].watts ?? 0))],
  ["failures", "number", (rule) => rule.run.failures, () => undefined],
  ["best checkpoint interval", "seconds", (rule) => rule.run.checkpoint_interval, () => undefined],
  ["useful part of the time", "share", (rule) => rule.run.goodput, () => undefined],
  ["KV cache of a sequence, 16 bits", "bytes", (rule) => rule.step.cache_bytes, () => undefined],
];

/** @param {any} rule @param {any} found */
const showFigures = (rule, found) => {
  const columns = ["rule", "count", ...(besides ? ["beside: rule", "beside: count"] : [])];
  const cell = (/** @type {any} */ value, /** @type {string} */ unit) => el("td", {}, value === undefined ? "" : figure(value, unit));
  byId("figures").replaceChildren(
    el("thead", {}, el("tr", {}, el("th", { scope: "col" }, ""), ...columns.map((each) => el("th", { scope: "col" }, each)))),
    el("tbody", {}, ...FIGURES.map(([name, unit, ofRule, ofCount]) => el("tr", {}, el("th", { scope: "row" }, name),
      cell(ofRule(rule), unit), cell(found ? ofCount(found, state) : undefined, unit),
      ...(besides ? [cell(ofRule(besides.rule), unit), cell(besides.count ? ofCount(besides.count, besides.state) : undefined, unit)] : [])))));
};

/** A number in three digits. @param {number} value */
const short = (value) => figure(value + 0.5, "count");
/** @param {any} rule @param {any} found */
const showVerdict = (rule, found) => {
  const limit = catalogue.devices[state.device].step_bytes;
  const bytes = found ? found.peak_bytes : rule.step.bytes, isFit = found ? found.fits : bytes <= limit;
  const says = `${isFit ? "It fits" : "It does not fit"}: ${figure(bytes, "bytes")} ${found ? "by count" : "by rule"}, ${figure(limit, "bytes")} for a step on each ${state.device}`;
  byId("verdict").replaceChildren(el("span", { class: isFit ? "good" : "bad" }, says));
  const seconds = found ? found.run_seconds : rule.run.seconds;
  const dollars = state.n * seconds / 3600 * state.usd_per_hour;
  const factor = found ? ` within a factor of ${found.factor.toFixed(2)} in nine cases of ten` : "";
  const keys = [
    ["time", figure(seconds, "seconds"), `${found ? "by count" : "by rule"}${factor}`],
    ["price", figure(dollars, "USD"), catalogue.devices[state.device].price ?? "no price in the catalogue"],
    ["MFU", figure(found ? found.mfu : rule.step.mfu, "share"), found ? "by count" : "by rule"],
    ["parameters", short(rule.step.all_parameters), rule.step.multiplying < 0.9 * rule.step.all_parameters ? `${short(rule.step.multiplying)} multiply a token` : ""],
  ];
  byId("keys").replaceChildren(...keys.map(([name, value, note]) => el("div", {}, el("dt", {}, name), el("dd", {}, value, el("small", {}, note)))));
};

const show = () => {
  const why = obstacle(state);
  refresh();
  document.body.dataset.ready = count ? "count" : why || refusal ? "refused" : "rule";
  if (why !== null) {
    byId("verdict").replaceChildren(el("span", { class: "bad" }, why));
    return;
  }
  const rule = byRule(state);
  showVerdict(rule, count);
  showMemory(rule, count);
  showChanges(rule);
  showTime(count);
  showFigures(rule, count);
  byId("counted").textContent = count ? `Counted, part by part, on ${state.n} × ${state.device}; rule and count are beside each other below.` : refusal || "By rule; the count comes in a moment";
};

/** @type {number | undefined} */
let timer;
const update = () => {
  count = null;
  refusal = "";
  history.replaceState(null, "", `#${linkTo(state)}`);
  show();
  asked += 1;
  clearTimeout(timer);
  if (obstacle(state) === null) timer = window.setTimeout(() => countNow(asked), PAUSE);
};
/** A count of the file: figures by the file's names. @param {any[] | undefined} row */
const unpacked = (row) => {
  if (row === undefined) return undefined;
  const byName = (/** @type {number[]} */ parts) => Object.fromEntries(Array.from({ length: parts.length / 2 }, (_, place) => [catalogue.names[parts[2 * place]], parts[2 * place + 1]]));
  const found = Object.fromEntries(row.map((value, place) => [catalogue.shown[place], Array.isArray(value) ? byName(value) : value]));
  return /** @type {any} */ (found);
};
/** @param {number} number */
const countNow = async (number) => {
  if (embedded) {
    const { preset, n, device, ...others } = Object.fromEntries(new URLSearchParams(linkTo(state)));
    const found = Object.keys(others).length ? undefined : unpacked(catalogue.counts[`${state.preset} ${state.n}x${state.device}`]);
    const { step, steps } = byRule(state);
    count = found === undefined ? null : {
      ...found, steps, tokens_per_step: step.tokens, model_flops: step.flops,
      tokens_per_second: step.tokens / found.seconds_per_step, run_seconds: steps * found.seconds_per_step,
    };
    refusal = count ? "" : "Not counted: this file has the counts of some plans, `napkin studio` counts any; the figures are by rule";
    show();
    return;
  }
  const request = requestOf(state);
  try {
    const found = await ask("/api/planner/plan", { body: request });
    if (number !== asked) return;
    count = found;
  } catch (error) {
    if (number !== asked) return;
    if (error instanceof Refused && error.status === 409) {
      // Another page has asked for a plan meanwhile.
      timer = window.setTimeout(() => countNow(number), 4 * PAUSE);
      return;
    }
    refusal = `Not counted: ${/** @type {Error} */ (error).message}`;
  }
  show();
  if (byId("recipe").open) await showRecipe();
};
/** @param {string} name @param {any} value */
const set = (name, value) => { state = changed(state, name, value); update(); };
const refresh = buildControls(byId("controls"), GROUPS, { state: () => state, set });

const showRecipe = async () => {
  if (embedded) return;
  try {
    byId("toml").value = await ask("/api/planner/recipe", { body: requestOf(state) });
  } catch (error) {
    byId("toml").value = `# ${/** @type {Error} */ (error).message}`;
  }
};
byId("recipe").addEventListener("toggle", showRecipe);
byId("recipe").hidden = embedded !== null;
byId("beside").addEventListener("click", () => {
  besides = besides ? null : { state, rule: byRule(state), count };
  byId("beside").textContent = besides ? "Leave the plan beside out" : "Keep this plan beside the next";
  show();
});
byId("link").addEventListener("click", async () => {
  // Without the token: whoever opens the link has a studio of their own.
  await navigator.clipboard.writeText(`${location.href.split("#")[0]}#${linkTo(state)}`);
  byId("said").textContent = "copied";
});
addEventListener("hashchange", () => { state = stateOf(CONTROLS, location.hash.slice(1), first(), changed); update(); });
update();
