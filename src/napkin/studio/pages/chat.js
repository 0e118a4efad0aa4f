// A conversation with one model, or with two whose names are told after the vote; tokens by probability, what the template
// makes of the messages, what would be learned of them, and the models' ranking by votes.
// @ts-check
import { ask, byId, el, figure } from "/assets/studio.js";
import { Writer, events, letLookCloser, letTabReach, told } from "/assets/tokens.js";

const NUMBERS = ["temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_tokens", "seed"];
const ALTERNATIVES = 5;
const VERDICTS = [["a", "A is better"], ["b", "B is better"], ["tie", "Tie"], ["both bad", "Both bad"]];
const ENDS = { stop: "ended", length: "at the limit of tokens" };
/** @typedef {{ role: string, content: string }} Message */
/** @typedef {{ box: HTMLElement, title: HTMLElement, text: string, finish: string | null }} Side */

/** @type {Message[]} */
let said = [];
/** @type {AbortController | null} */
let running = null;
let canVote = false;
/** Ends the choice between the last two answers, once the conversation goes on. */
let settle = () => {};

const isChat = () => byId("mode").value === "chat";
/** @param {string} message */
const complaint = (message) => el("p", { class: "bad", role: "alert" }, message);

// Models

/** @param {any} model */
const aboutModel = (model) => [
  `${model.id}: ${figure(model.parameters, "count")} parameters${model.step ? `, step ${figure(model.step, "count")}` : ""}, context of ${figure(model.context_length, "count")} tokens, ${model.weights} on ${model.device}, ${figure(model.bytes, "bytes")}`
  + (model.has_chat_template ? "" : "; no chat template: messages become lines that begin with their role"),
  ...model.messages,
];

/** Open what is chosen, one after the other: the second may need the room of a third. */
const openModels = async () => {
  const names = chosen();
  byId("about").replaceChildren(...names.map((name) => el("p", {}, `opening ${name} …`)));
  const lines = [];
  for (const name of names) {
    try {
      lines.push(...aboutModel(await ask("/api/chat/open", { body: { name } })).map((line) => el("p", {}, line)));
    } catch (error) {
      lines.push(complaint(/** @type {Error} */ (error).message));
    }
  }
  if (names.join("\n") === chosen().join("\n")) byId("about").replaceChildren(...lines);
  showLearned();
};
const chosen = () => [byId("first").value, byId("second").value].filter((name) => name);

/** The other list offers what the first does not have. @param {any[]} models */
const offer = (models) => {
  const others = models.filter(({ name }) => name !== byId("first").value);
  const kept = byId("second").value;
  byId("second").replaceChildren(el("option", { value: "" }, "none"), ...others.map(({ name, kind }) => el("option", { value: name }, `${name} (${kind})`)));
  byId("second").value = others.some(({ name }) => name === kept) ? kept : "";
};

// Rounds

const prompt = () => {
  /** @type {Record<string, any>} */
  const asked = {};
  for (const name of NUMBERS) if (Number.isFinite(byId(name).valueAsNumber)) asked[name] = byId(name).valueAsNumber;
  if (!isChat()) return { text: { ...asked, prompt: said.map(({ content }) => content).join(""), logprobs: ALTERNATIVES } };
  return { chat: { ...asked, messages: messages(), logprobs: true, top_logprobs: ALTERNATIVES } };
};
const messages = () => {
  const system = byId("system").value.trim();
  return [...(system ? [{ role: "system", content: system }] : []), ...said];
};

/** Reads an answer as it comes. @param {string} round @param {number} number @param {Side} side @param {AbortSignal} signal */
const read = async (round, number, side, signal) => {
  const body = el("p", { class: "body writing" }), meter = el("p", { class: "soft" });
  side.box.append(body, meter);
  const writer = new Writer(body, byId("coloured").checked);
  try {
    const response = await fetch("/api/chat/answer", { method: "POST", body: JSON.stringify({ round, side: number }), signal });
    if (!response.ok) throw new Error((await response.json()).error);
    for await (const event of events(response)) {
      if (event.error) throw new Error(event.error.message);
      const [choice] = event.choices;
      if (choice) {
        writer.add(choice.delta ? choice.delta.content ?? "" : choice.text, told(choice.logprobs));
        side.finish = choice.finish_reason ?? side.finish;
      } else {
        const { usage, timings } = event, per = timings.seconds_per_token;
        meter.textContent = `${figure(usage.prompt_tokens, "count")} + ${figure(usage.completion_tokens, "count")} tokens`
          + `${per ? `, ${figure(1 / per, "number")} per second` : ""}, ${ENDS[/** @type {"stop"} */ (side.finish)] ?? side.finish}`;
      }
    }
  } catch (error) {
    if (/** @type {Error} */ (error).name === "AbortError") meter.textContent = "stopped";
    else side.box.append(complaint(/** @type {Error} */ (error).message));
  }
  writer.end();
  body.classList.remove("writing");
  side.text = writer.content;
};

/**
 * Buttons below two answers, until one of them is what the conversation goes on with; `start` is where it was before.
 * @param {string} round
 * @param {Side[]} sides
 * @param {number} start
 */
const choose = (round, sides, start) => {
  const row = el("div", { class: "verdict-row", role: "group", "aria-label": "Which answer is better?" });
  const answer = said[said.length - 1];
  /** @param {number} index */
  const goOnWith = (index) => {
    answer.content = sides[index].text;
    sides.forEach(({ box }, each) => box.classList.toggle("goes-on", each === index));
    showLearned();
  };
  /** @param {string} path @param {any} body @param {number} index */
  const tell = async (path, body, index) => {
    try {
      const { names } = await ask(path, { body });
      sides.forEach(({ title }, each) => { title.textContent = `${"AB"[each]}: ${names[each]}`; });
      if (body.verdict === "both bad") {
        said.splice(start);
        showLearned();
      } else {
        goOnWith(index);
      }
      const others = sides.map((_, each) => el("button", { type: "button", onclick: () => goOnWith(each) }, `Go on with ${"AB"[each]}`));
      row.replaceChildren(...(body.verdict ? [el("span", { class: "soft" }, `your vote: ${body.verdict}`)] : others));
      if (body.verdict) showRanking();
    } catch (error) {
      row.append(complaint(/** @type {Error} */ (error).message));
    }
  };
  const whole = sides.every(({ finish }) => finish && finish in ENDS);
  const votes = VERDICTS.map(([verdict, label]) => el("button", { type: "button", "data-verdict": verdict, onclick: () => tell("/api/chat/vote", { round, verdict }, verdict === "b" ? 1 : 0) }, label));
  row.append(...(canVote && whole ? votes : []), el("button", { type: "button", onclick: () => tell("/api/chat/names", { round }, 0) }, canVote && whole ? "Show the names, without a vote" : "Show the names"));
  settle = () => { row.remove(); };
  return row;
};

const send = async () => {
  const content = byId("text").value;
  if (running || (isChat() && !content.trim())) return;
  settle();
  settle = () => {};
  const start = said.length;
  if (content) {
    said.push({ role: "user", content });
    byId("messages").append(el("p", { class: isChat() ? "said" : "said continued" }, content));
  }
  byId("text").value = "";
  const mine = running = new AbortController(), conversation = said, names = chosen();
  showRunning();
  try {
    const { round, sides: count } = await ask("/api/chat/ask", { body: { models: names, ...prompt() } });
    /** @type {Side[]} */
    const sides = [...Array(count)].map((_, index) => {
      const title = el("h2", {}, count > 1 ? `Answer ${"AB"[index]}` : names[0]);
      return { title, box: el("article", { class: "answer" }, title), text: "", finish: null };
    });
    const columns = el("div", { class: "answers" }, ...sides.map(({ box }) => box));
    byId("messages").append(columns);
    columns.scrollIntoView({ block: "nearest" });
    await Promise.all(sides.map((side, index) => read(round, index, side, mine.signal)));
    // A new conversation may have begun.
    if (conversation === said && sides[0].text + sides[sides.length - 1].text) {
      said.push({ role: "assistant", content: sides[0].text });
      if (count > 1) byId("messages").append(choose(round, sides, start));
    }
  } catch (error) {
    byId("messages").append(complaint(/** @type {Error} */ (error).message));
    if (conversation === said) said.splice(start);
    byId("text").value = content;
  }
  if (running === mine) running = null;
  showRunning();
  showLearned();
};

const showRunning = () => {
  byId("send").hidden = running !== null;
  byId("stop").hidden = running === null;
};
const startAgain = () => {
  running?.abort();
  running = null;
  said = [];
  settle = () => {};
  byId("messages").replaceChildren();
  byId("system-label").hidden = !isChat();
  byId("learned").hidden = !isChat();
  showRunning();
  showLearned();
};

// What would be learned, and the votes

const showLearned = async () => {
  if (!byId("learned").open || !isChat()) return;
  const model = byId("first").value, shown = messages();
  try {
    if (!shown.length) throw new Error("Nothing has been said yet.");
    const found = await ask("/api/chat/learned", { body: { model, messages: shown, learned: byId("train-on").value } });
    byId("counts").textContent = `${figure(found.tokens, "count")} tokens, of which ${figure(found.learned, "count")} would be learned`
      + `${found.is_own ? "" : "; the built-in template, as this model has none"}${found.ends_answers ? "" : "; it ends answers with no special token"}`;
    byId("written").replaceChildren(...found.parts.map((/** @type {[string, boolean, boolean]} */ [text, learned, special]) =>
      el("span", { class: `${learned ? "learned" : ""} ${special ? "special" : ""}`.trim() }, text.replaceAll("↵", "↵\n"))));
    byId("template").textContent = found.template;
  } catch (error) {
    byId("counts").textContent = /** @type {Error} */ (error).message;
    byId("written").replaceChildren();
  }
};

/** A rating with its interval on the scale of all. @param {any} model @param {number} low @param {number} high */
const interval = (model, low, high) => {
  const space = "http://www.w3.org/2000/svg";
  const at = (/** @type {number} */ value) => String(4 + 152 * (value - low) / (high - low || 1));
  const make = (/** @type {string} */ name, /** @type {Record<string, string>} */ attributes) => {
    const made = document.createElementNS(space, name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    return made;
  };
  const picture = make("svg", { class: "interval", viewBox: "0 0 160 16", "aria-hidden": "true" });
  picture.append(make("line", { x1: at(model.low), x2: at(model.high), y1: "8", y2: "8" }), make("circle", { cx: at(model.rating), cy: "8", r: "4" }));
  return picture;
};

const showRanking = async () => {
  const { file, votes, models, because, can_vote } = await ask("/api/chat/votes");
  canVote = can_vote;
  const kept = votes ? `${figure(votes, "count")} ${votes > 1 ? "votes" : "vote"} in ${file}, which napkin evaluate votes and napkin tune preference read` : `Votes between two answers are kept in ${file}`;
  byId("votes").textContent = `${kept}${can_vote ? "" : "; this studio keeps none: start it with --allow-actions"}.${because ? ` No ranking yet: ${because}.` : ""}`;
  const low = Math.min(...models.map((/** @type {any} */ each) => each.low)), high = Math.max(...models.map((/** @type {any} */ each) => each.high));
  const rows = models.map((/** @type {any} */ each) => el("tr", {}, el("th", { scope: "row" }, each.model), el("td", {}, interval(each, low, high)),
    ...[each.rating.toFixed(0), `${each.low.toFixed(0)} to ${each.high.toFixed(0)}`, each.elo.toFixed(0), figure(each.votes, "count"), `${(100 * each.wins / each.votes).toFixed(0)}%`].map((text) => el("td", {}, text))));
  const head = el("tr", {}, ...["Model", "", "Rating", "95%", "Elo", "Votes", "Won"].map((text) => text ? el("th", { scope: "col" }, text) : el("td", {})));
  byId("ranking").replaceChildren(...(rows.length ? [el("table", {}, el("thead", {}, head), el("tbody", {}, ...rows))] : []));
};

// What the user does

byId("settings").addEventListener("submit", (/** @type {Event} */ event) => event.preventDefault());
byId("composer").addEventListener("submit", (/** @type {Event} */ event) => { event.preventDefault(); send(); });
byId("text").addEventListener("keydown", (/** @type {KeyboardEvent} */ event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  send();
});
addEventListener("keydown", ({ key }) => { if (key === "Escape") running?.abort(); });
byId("stop").addEventListener("click", () => running?.abort());
byId("new").addEventListener("click", startAgain);
byId("mode").addEventListener("change", startAgain);
byId("system").addEventListener("change", showLearned);
byId("learned").addEventListener("toggle", showLearned);
byId("train-on").addEventListener("change", showLearned);
byId("coloured").addEventListener("change", (/** @type {any} */ { target }) => {
  letTabReach(byId("messages"), target.checked);
  byId("scale").hidden = !target.checked;
});
letLookCloser(byId("messages"), byId("alternatives"));

byId("sampling").open = matchMedia("(min-width: 62rem)").matches;
const { folder, models } = await ask("/api/chat/models");
byId("first").append(...models.map((/** @type {any} */ { name, kind }) => el("option", { value: name }, `${name} (${kind})`)));
byId("first").addEventListener("change", () => { offer(models); startAgain(); openModels(); });
byId("second").addEventListener("change", () => { startAgain(); openModels(); });
offer(models);
byId("send").disabled = !models.length;
byId("about").textContent = models.length ? "A model is opened when it is chosen, or first asked." : `There is no model below ${folder}: napkin train makes one, and folders of Hugging Face's and GGUF files are models too.`;
await showRanking();
document.body.dataset.ready = "";
