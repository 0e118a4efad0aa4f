// A text by several tokenizers, side by side; a token that is chosen is built merge by merge.
// @ts-check
import { Refused, ask, byId, el, figure } from "/assets/studio.js";

const PAUSE = 150; // milliseconds without a key before the text is encoded
const FIRST = 3; // tokenizers that are chosen at the start
const COLOURS = 4;
/** @type {string[]} */
const names = await ask("/api/tokenizers");
/** @type {Set<string>} */
const chosen = new Set(names.slice(0, FIRST));
let asked = 0;

/** @param {string[]} shown */
const coloured = (shown) => shown.map((token, index) => el("span", { class: `token t${index % COLOURS}` }, token));

/** The pieces of text around a token: what stands between white space. @param {any[]} tokens @param {number} index */
const wordAround = (tokens, index) => {
  const isStart = (/** @type {number} */ place) => place === 0 || /^[ \u21b5\u2192]/.test(tokens[place][2]);
  let from = index, to = index + 1;
  while (!isStart(from)) from--;
  while (to < tokens.length && !isStart(to)) to++;
  const bytes = tokens.slice(from, to).flatMap(([, hex]) => hex.split(" ").map((/** @type {string} */ byte) => parseInt(byte, 16)));
  return new TextDecoder().decode(new Uint8Array(bytes));
};

/** @param {string} name @param {string} word */
const build = async (name, word) => {
  byId("piece").textContent = `${name}: ${word}`;
  try {
    const pieces = await ask("/api/tokenizers/merges", { body: { text: word, name } });
    byId("merges").replaceChildren(...pieces.flatMap((/** @type {any} */ { piece, steps }) => [
      el("h3", {}, piece),
      ...steps.map((/** @type {any} */ { merge, joins, tokens }) => el("div", { class: "step" },
        el("span", { class: "soft" }, merge === null ? "" : `merge ${figure(merge, "count")}`),
        el("code", {}, joins.join(" + ")), el("span", {}, ...coloured(tokens)))),
    ]));
  } catch (error) {
    byId("merges").replaceChildren(el("p", { class: "bad" }, /** @type {Error} */ (error).message));
  }
};

/** @param {any} found */
const show = (found) => {
  if (found.error) return el("div", {}, el("h2", {}, found.name), el("p", { class: "bad" }, found.error));
  const tokens = found.tokens.map((/** @type {any[]} */ [id, hex, text], /** @type {number} */ index) => {
    const about = { class: `token t${index % COLOURS}`, title: `id ${id}, bytes ${hex}` };
    return found.has_merges
      ? el("button", { type: "button", ...about, onclick: () => build(found.name, wordAround(found.tokens, index)) }, text)
      : el("span", about, text);
  });
  const ids = found.tokens.map((/** @type {any[]} */ [id]) => id).join(" ");
  return el("div", { "data-tokenizer": found.name }, el("h2", {}, found.name),
    el("p", { class: "soft" }, `${found.kind}, ${figure(found.vocab_size, "count")} ids: ${figure(found.tokens.length, "count")} tokens, ${figure(found.bytes_per_token, "number")} bytes per token`),
    el("div", { class: "tokens" }, ...tokens),
    el("details", {}, el("summary", {}, "ids"), el("code", {}, ids)));
};

const encode = async () => {
  const number = ++asked;
  try {
    const found = await ask("/api/tokenizers/encode", { body: { text: byId("text").value, names: [...chosen] } });
    if (number !== asked) return;
    byId("encoded").replaceChildren(...found.map(show));
    byId("said").textContent = names.length > 1 ? "" : "There is no other tokenizer below this folder: `napkin tokenizer train` makes one.";
  } catch (error) {
    if (number === asked) byId("said").textContent = error instanceof Refused ? error.message : `the studio does not answer: ${/** @type {Error} */ (error).message}`;
  }
  document.body.dataset.encoded = String(number);
};

byId("choice").append(...names.map((name) => {
  const box = /** @type {HTMLInputElement} */ (el("input", { type: "checkbox" }));
  box.checked = chosen.has(name);
  box.addEventListener("change", () => { if (box.checked) chosen.add(name); else chosen.delete(name); encode(); });
  return el("label", {}, box, ` ${name}`);
}));
/** @type {number | undefined} */
let timer;
byId("text").addEventListener("input", () => { clearTimeout(timer); timer = window.setTimeout(encode, PAUSE); });
encode();
