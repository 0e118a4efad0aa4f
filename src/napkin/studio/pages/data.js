// The flow of a corpus, documents with the reason marked, and thresholds whose effect on the sample is seen while they move:
// the values of all rules are here, and the server confirms with the filter itself.
// @ts-check
import { ask, byId, el, figure } from "/assets/studio.js";

const PAUSE = 250; // milliseconds at rest before the filter itself is asked
const COLOURS = ["c4", "c5", "c3", "c2", "c1", "c6"];
/** @type {Record<string, (value: number, limit: number) => boolean>} */
const FAILS = { "<": (a, b) => a < b, "<=": (a, b) => a <= b, ">": (a, b) => a > b, ">=": (a, b) => a >= b };
/** @typedef {{ rule: string, how: string, limit: number, option: string | null, index: number | null }} Rule */
/** @typedef {{ identity: string, values: number[], weight: number, is_cut: boolean, before: string | null }} Sampled */

const corpus = () => byId("corpus").value;
/** @param {string} path @param {any} more */
const asked = (path, more = {}) => ask(`/api/data/${path}`, { body: { corpus: corpus(), ...more } });
/** @param {number} part @param {number} whole */
const share = (part, whole) => figure(whole ? part / whole : 0, "share");
/** @param {string} text @param {any} [title] */
const look = (text, title) => {
  byId("looked-title").textContent = title;
  byId("about").textContent = text;
  byId("limits").replaceChildren();
  byId("documents").replaceChildren();
};
/** @param {unknown} error */
const complain = (error) => { byId("about").replaceChildren(el("span", { class: "bad", role: "alert" }, /** @type {Error} */ (error).message)); };
/** @param {Element} button */
const press = (button) => {
  for (const each of document.querySelectorAll(".rules [aria-pressed]")) each.setAttribute("aria-pressed", String(each === button));
  if (matchMedia("(max-width: 62rem)").matches) byId("looked").scrollIntoView();
};
/** @param {[string, boolean][]} parts */
const reading = (parts) => el("pre", { class: "reading", tabindex: "0" }, ...parts.map(([text, is]) => is ? el("mark", {}, text) : text));

// The flow

/** A bar of what entered a stage: what remained, and what each rule dropped. @param {any} stage @param {number} read @param {string} measure */
const bar = (stage, read, measure) => {
  const parts = [["remain", stage.remained[measure]], ...stage.dropped.map((/** @type {any} */ each, /** @type {number} */ index) => [COLOURS[index % COLOURS.length], each[measure]])];
  const spans = parts.map(([name, amount]) => {
    const span = el("span", { class: String(name) });
    span.style.width = `${100 * Number(amount) / (read || 1)}%`;
    return span;
  });
  return el("div", { class: "stack", "aria-hidden": "true" }, el("div", { class: "parts" }, ...spans));
};

/** @param {any} stage @param {number} number @param {any} found */
const stageRow = (stage, number, found) => {
  const measure = byId("measure").value, unit = measure === "bytes" ? "bytes" : "count";
  /** @type {[string, () => Promise<void>][]} */
  const choices = [];
  if (stage.has_thresholds) choices.push(["move thresholds", () => showThresholds(number, stage.name)]);
  const buttons = stage.dropped.map((/** @type {any} */ each, /** @type {number} */ index) => el("button", { type: "button", "aria-pressed": "false", onclick: (/** @type {any} */ { currentTarget }) => { press(currentTarget); showDocuments(number, each.rule, `${stage.name}: ${each.rule}`, `${figure(each.documents, "count")} documents, ${share(each.documents, stage.entered.documents)} of those that entered the stage, ${figure(each.bytes, "bytes")}`); } },
    el("span", { class: `swatch ${COLOURS[index % COLOURS.length]}` }), `${each.rule} `, `−${figure(each[measure], unit)}`));
  const moves = choices.map(([label, show]) => el("button", { type: "button", "aria-pressed": "false", onclick: (/** @type {any} */ { currentTarget }) => { press(currentTarget); show(); } }, label));
  const time = stage.seconds === null ? "" : `, ${figure(stage.seconds, "seconds")}`;
  return el("li", {}, el("h3", {}, `${number + 1}. ${stage.name}`, el("span", { class: "soft" }, `${figure(stage.remained[measure], unit)} of ${figure(stage.entered[measure], unit)} remain, ${share(stage.remained[measure], stage.entered[measure])}${time}`)),
    bar(stage, found.read[measure], measure), el("ul", { class: "rules" }, ...[...buttons, ...moves].map((each) => el("li", {}, each))));
};

const showFlow = async () => {
  try {
    const found = await asked("flow"), measure = byId("measure").value;
    byId("verdict").textContent = `${figure(found.documents, "count")} of ${figure(found.read.documents, "count")} documents remain, ${figure(found.bytes, "bytes")} of text`;
    const all = { remained: found.read, dropped: [] };
    const kept = el("button", { type: "button", "aria-pressed": "false", onclick: (/** @type {any} */ { currentTarget }) => { press(currentTarget); showDocuments(-1, "", "What remained", `${figure(found.samples, "count")} of ${figure(found.documents, "count")} documents; what was masked in them is marked`); } }, "read some of what remained");
    byId("flow").replaceChildren(
      el("li", {}, el("h3", {}, "Read", el("span", { class: "soft" }, `${figure(found.read.documents, "count")} documents, ${figure(found.read.bytes, "bytes")}, of ${figure(found.files, "count")} ${found.files === 1 ? "file" : "files"}`)), bar(all, found.read[measure], measure)),
      ...found.stages.map((/** @type {any} */ stage, /** @type {number} */ number) => stageRow(stage, number, found)),
      el("li", {}, el("ul", { class: "rules" }, el("li", {}, kept))));
    const aside = Object.entries(found.set_aside).map(([reason, count]) => `${reason} ${figure(count, "count")}`);
    byId("aside").textContent = aside.length ? `Set aside: ${aside.join(", ")}.` : "";
  } catch (error) {
    byId("verdict").textContent = /** @type {Error} */ (error).message;
    byId("flow").replaceChildren();
  }
};

// Documents

/** @param {number} stage @param {string} rule @param {string} title @param {string} about */
const showDocuments = async (stage, rule, title, about) => {
  look(about, title);
  try {
    const found = await asked("documents", { stage, rule });
    byId("documents").replaceChildren(...found.map((/** @type {any} */ each) => {
      const told = el("p", { class: "soft" }, [each.why, each.address].filter((text) => text).join(" · "));
      const way = el("button", { type: "button", onclick: async () => {
        try {
          const story = await asked("story", { identity: each.identity });
          way.replaceWith(el("p", { class: "soft" }, [`byte ${figure(story.offset, "count")} of ${story.source}`, ...story.trace.map((/** @type {any} */ { stage: name, note }) => `${name}: ${note || "went on"}`), story.ending].join(" → ")));
        } catch (error) {
          way.replaceWith(el("p", { class: "bad" }, /** @type {Error} */ (error).message));
        }
      } }, "its way through the pipeline");
      return el("article", {}, el("h3", {}, each.identity), told, reading(each.parts), each.more ? el("p", { class: "soft" }, `and ${figure(each.more, "count")} more characters`) : null, way);
    }));
  } catch (error) {
    complain(error);
  }
};

// Thresholds

/** @param {Sampled} document @param {Rule[]} rules @param {number[]} limits */
const dropping = ({ values }, rules, limits) => rules.find(({ how }, index) => FAILS[how](values[index], limits[index]))?.rule ?? null;
/** @param {(string | null)[]} fates @param {Sampled[]} documents */
const weighed = (fates, documents) => documents.reduce((sum, { weight }, index) => sum + (fates[index] === null ? 0 : weight), 0);

/** @param {number} stage @param {string} name */
const showThresholds = async (stage, name) => {
  look("", `${name}: thresholds`);
  try {
    const { rules, documents, entered, longest } = /** @type {{ rules: Rule[], documents: Sampled[], entered: number, longest: number }} */ (await asked("thresholds", { stage }));
    const limits = rules.map(({ limit }) => limit);
    const before = documents.map((each) => dropping(each, rules, limits));
    const cut = documents.filter(({ is_cut }) => is_cut).length;
    byId("about").textContent = `${figure(documents.length, "count")} sampled documents that entered the stage, with the text that they left the pipeline with${cut ? `; of ${figure(cut, "count")} longer ones the first ${figure(longest, "count")} characters` : ""}. Each stands for the documents that its rule dropped: estimates are of all ${figure(entered, "count")}.`;
    const fate = el("p", { class: "fate", role: "status" }), confirmed = el("p", { class: "soft" }), list = el("ul", { class: "changed" }), text = el("div", { class: "documents" });
    /** @type {number | undefined} */
    let timer;
    /** @param {(string | null)[]} fates */
    const confirm = async (fates) => {
      try {
        const told = await asked("try", { stage, options: optionsOf(rules, limits) });
        const same = told.every((/** @type {string | null} */ rule, /** @type {number} */ index) => rule === fates[index]);
        confirmed.textContent = same ? "The filter itself says the same of each document." : "The filter itself says otherwise: its answer is shown.";
        if (!same) show(told);
      } catch (error) {
        confirmed.textContent = /** @type {Error} */ (error).message;
      }
      confirmed.dataset.confirmed = String(fates.length);
    };
    /** @param {(string | null)[]} fates */
    const show = (fates) => {
      const was = weighed(before, documents), is = weighed(fates, documents);
      fate.textContent = `drops ${fates.filter((each) => each !== null).length} of ${documents.length} in the sample (${before.filter((each) => each !== null).length} before): about ${share(is, entered)} of all documents that enter (${share(was, entered)} before)`;
      const changed = documents.map((each, index) => ({ each, index })).filter(({ index }) => fates[index] !== before[index]);
      list.replaceChildren(...changed.map(({ each, index }) => {
        const rule = fates[index] ?? before[index] ?? "", place = rules.findIndex((other) => other.rule === rule);
        return el("li", {}, el("button", { type: "button", onclick: () => read(each, rule) }, `${fates[index] === null ? "stays now" : "dropped now"}: ${each.identity} (${rule}, ${figure(each.values[place], Number.isInteger(each.values[place]) ? "count" : "number")})`));
      }));
      for (const [index, output] of outputs.entries()) output.textContent = String(fates.filter((each) => each === rules[index].rule).length);
    };
    /** @param {Sampled} each @param {string} rule */
    const read = async (each, rule) => {
      try {
        const { parts } = await asked("text", { stage, identity: each.identity, rule });
        text.replaceChildren(el("article", {}, el("h3", {}, each.identity), reading(parts)));
      } catch (error) {
        complain(error);
      }
    };
    const move = () => {
      const fates = documents.map((each) => dropping(each, rules, limits));
      show(fates);
      confirmed.textContent = "";
      delete confirmed.dataset.confirmed;
      clearTimeout(timer);
      timer = window.setTimeout(() => confirm(fates), PAUSE);
    };
    /** @type {HTMLElement[]} */
    const outputs = [];
    /** @type {(() => void)[]} */
    const refresh = [];
    const rows = rules.map(({ rule, how, limit, option }, index) => {
      const values = documents.map((each) => each.values[index]);
      const low = Math.min(0, limit, ...values), high = Math.max(limit, ...values), isWhole = Number.isInteger(limit) && values.every(Number.isInteger);
      const step = isWhole ? 1 : 10 ** Math.floor(Math.log10((high - low || 1) / 200));
      const about = { min: String(low), max: String(high), step: String(step), "aria-label": `${rule}: dropped where the value is ${how} this` };
      const slider = /** @type {HTMLInputElement} */ (el("input", { type: "range", ...about })), number = /** @type {HTMLInputElement} */ (el("input", { type: "number", ...about, step: "any" }));
      const output = el("output", { title: "documents of the sample that this rule drops" });
      outputs.push(output);
      slider.disabled = number.disabled = option === null;
      refresh.push(() => { slider.value = number.value = String(limits[index]); });
      for (const input of [slider, number]) {
        input.addEventListener("input", () => {
          if (!Number.isFinite(input.valueAsNumber)) return;
          // Rules of one option have one limit.
          rules.forEach((other, place) => { if (other.option === option && other.index === rules[index].index) limits[place] = isWhole ? Math.round(input.valueAsNumber) : input.valueAsNumber; });
          for (const each of refresh) each();
          move();
        });
      }
      return el("div", { class: "limit-row" }, el("span", {}, `${rule} ${how}`), slider, number, output);
    });
    const back = el("button", { type: "button", onclick: () => {
      rules.forEach(({ limit }, index) => { limits[index] = limit; });
      for (const each of refresh) each();
      move();
    } }, "back to the pipeline's");
    byId("limits").replaceChildren(...rows, back, fate, confirmed, list, text);
    for (const each of refresh) each();
    move();
  } catch (error) {
    complain(error);
  }
};

/** The options of limits that were moved. @param {Rule[]} rules @param {number[]} limits */
const optionsOf = (rules, limits) => {
  /** @type {Record<string, any>} */
  const options = {};
  rules.forEach(({ option, index }, place) => {
    if (option === null) return;
    if (index === null) options[option] = limits[place];
    else (options[option] ??= [])[index] = limits[place];
  });
  return options;
};

const { folder, corpora } = await ask("/api/data/corpora");
byId("corpus").append(...corpora.map((/** @type {string} */ name) => el("option", { value: name }, name)));
byId("corpus").addEventListener("change", () => { look("", "Documents"); showFlow(); });
byId("measure").addEventListener("change", showFlow);
if (corpora.length) await showFlow();
else byId("verdict").textContent = `There is no corpus below ${folder}: napkin data run makes one.`;
look("Choose a rule to read what it dropped, or move the thresholds of a stage.", "Documents");
document.body.dataset.ready = "";
