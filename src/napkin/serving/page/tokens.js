// Answers of a model as they come: tokens of the stream, spans that are coloured by their probability, and what else was
// likely. Whatever comes from the model becomes text, never markup.
// @ts-check

/**
 * A token of an answer: its bytes, its log-probability, the likeliest ones as [text, log-probability], and its own text.
 * @typedef {{ bytes: number[], logprob: number, top: [string, number][], shown: string }} Token
 */

/** @param {string} name @param {string} className @param {string} [content] */
export function element(name, className, content) {
  const made = document.createElement(name);
  made.className = className;
  if (content !== undefined) made.textContent = content;
  return made;
}

/** The objects of a stream of server-sent events. @param {Response} response @returns {AsyncGenerator<any>} */
export async function* events(response) {
  const reader = /** @type {any} */ (response.body).pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop() ?? "";
    for (const part of parts) {
      if (part === "data: [DONE]") return;
      if (part.startsWith("data: ")) yield JSON.parse(part.slice(6));
    }
  }
}

/** The tokens of both interfaces in one form. @param {any} logprobs @returns {Token[]} */
export function told(logprobs) {
  if (!logprobs) return [];
  if (logprobs.content) {
    return logprobs.content.map((/** @type {any} */ each) => ({
      bytes: each.bytes, logprob: each.logprob, shown: textOf(each.bytes),
      top: each.top_logprobs.map((/** @type {any} */ top) => [textOf(top.bytes), top.logprob]),
    }));
  }
  return logprobs.tokens.map((/** @type {string} */ token, /** @type {number} */ i) => ({
    bytes: bytesOf(token), logprob: logprobs.token_logprobs[i], top: Object.entries(logprobs.top_logprobs[i] ?? {}), shown: token,
  }));
}

/** The text of a token; of a part of a character its bytes, as completions have it. @param {number[]} bytes */
function textOf(bytes) {
  try {
    return new TextDecoder("utf-8", { fatal: true, ignoreBOM: true }).decode(new Uint8Array(bytes));
  } catch {
    return `bytes:${bytes.map((byte) => `\\x${byte.toString(16).padStart(2, "0")}`).join("")}`;
  }
}

/** @param {string} token */
function bytesOf(token) {
  if (!/^bytes:(\\x[0-9a-f]{2})+$/.test(token)) return [...new TextEncoder().encode(token)];
  return (token.slice(6).match(/[0-9a-f]{2}/g) ?? []).map((pair) => parseInt(pair, 16));
}

/** Writes an answer: plain text, or a span per token. The text is what counts: a token is shown as far as it is in it. */
export class Writer {
  /** @param {HTMLElement} body @param {boolean} coloured */
  constructor(body, coloured) {
    this.body = body;
    this.coloured = coloured;
    this.content = "";
    this.shown = 0;
    /** @type {(Token & { text: string })[]} */
    this.waiting = [];
    this.decoder = new TextDecoder();
  }

  /** @param {string} piece @param {Token[]} tokens */
  add(piece, tokens) {
    this.content += piece;
    for (const token of tokens) {
      this.waiting.push({ ...token, text: this.decoder.decode(new Uint8Array(token.bytes), { stream: true }) });
    }
    if (this.waiting.length) this.settle(false);
    else this.plain(this.content.length);
  }

  /** @param {boolean} all */
  settle(all) {
    while (this.waiting.length) {
      const token = this.waiting[0], end = this.shown + token.text.length;
      if (end > this.content.length && !all) return;
      this.waiting.shift();
      const text = this.content.slice(this.shown, end);
      this.shown = Math.min(end, this.content.length);
      if (text) this.body.append(tokenSpan(text, token, this.coloured && this.body.childElementCount === 0));
    }
  }

  /** @param {number} end */
  plain(end) {
    if (end > this.shown) this.body.append(this.content.slice(this.shown, end));
    this.shown = end;
  }

  end() {
    this.settle(true);
    this.plain(this.content.length);
  }
}

/** @type {WeakMap<EventTarget, Token>} */
const TOKENS = new WeakMap();

/** @param {string} text @param {Token} token @param {boolean} first */
function tokenSpan(text, token, first) {
  const probability = Math.exp(token.logprob);
  const span = element("span", `token p${Math.min(9, Math.floor(10 * probability))}`, text);
  // Tab leads to an answer, arrows from token to token.
  span.tabIndex = first ? 0 : -1;
  TOKENS.set(span, token);
  return span;
}

/** Whether Tab leads to the first token of each answer. @param {HTMLElement} within @param {boolean} coloured */
export function letTabReach(within, coloured) {
  within.classList.toggle("coloured", coloured);
  for (const span of within.querySelectorAll(".token:first-child")) /** @type {HTMLElement} */ (span).tabIndex = coloured ? 0 : -1;
}

/**
 * Shows in `tip` what else was likely where a token has the focus or the pointer is over it, while tokens are coloured.
 * @param {HTMLElement} within
 * @param {HTMLElement} tip
 */
export function letLookCloser(within, tip) {
  /** @param {Event} event */
  const look = ({ target }) => {
    const token = target && TOKENS.get(target);
    if (token && within.classList.contains("coloured")) showAlternatives(/** @type {HTMLElement} */ (target), token, tip);
  };
  const hide = () => { tip.hidden = true; };
  for (const kind of ["mouseover", "focusin"]) within.addEventListener(kind, look);
  for (const kind of ["mouseout", "focusout"]) within.addEventListener(kind, hide);
  addEventListener("keydown", ({ key }) => { if (key === "Escape") hide(); });
  within.addEventListener("keydown", ({ key, target }) => {
    if (!target || !TOKENS.has(target)) return;
    const span = /** @type {HTMLElement} */ (target);
    const next = key === "ArrowLeft" ? span.previousElementSibling : key === "ArrowRight" ? span.nextElementSibling : null;
    if (next) /** @type {HTMLElement} */ (next).focus();
  });
}

/** @param {HTMLElement} span @param {Token} token @param {HTMLElement} tip */
function showAlternatives(span, { logprob, top, shown }, tip) {
  const others = top.filter(([other]) => other !== shown);
  /** @type {[string, number, string][]} */
  const rows = [[shown, logprob, "drawn"], ...others.map(([text, value]) => /** @type {[string, number, string]} */ ([text, value, ""]))];
  tip.replaceChildren(...rows.sort((a, b) => b[1] - a[1]).map(([text, value, className]) => {
    const row = element("div", className), bar = document.createElement("meter");
    bar.value = Math.exp(value);
    row.append(element("code", "", visible(text)), bar, element("output", "", percent(Math.exp(value))));
    return row;
  }));
  tip.hidden = false;
  const box = span.getBoundingClientRect(), own = tip.getBoundingClientRect();
  tip.style.left = `${Math.max(4, Math.min(box.left, innerWidth - own.width - 4))}px`;
  tip.style.top = `${box.bottom + own.height + 8 < innerHeight ? box.bottom + 4 : Math.max(4, box.top - own.height - 4)}px`;
}

/** Line breaks, control characters and those that turn the direction of writing as escapes. @param {string} token */
function visible(token) {
  if (token.startsWith("bytes:")) return token.slice(6);
  const escape = (/** @type {string} */ each) => `\\u${each.charCodeAt(0).toString(16).padStart(4, "0")}`;
  return JSON.stringify(token).slice(1, -1).replace(/[\u007f-\u009f\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]/g, escape);
}

/** @param {number} value */
function percent(value) {
  return value >= 0.001 ? `${(100 * value).toFixed(1)}%` : "< 0.1%";
}
