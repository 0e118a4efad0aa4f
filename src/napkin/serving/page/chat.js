// The chat page. Whatever comes from the model or the user becomes text, never markup: textContent only.

const byId = (id) => document.getElementById(id);
const messages = byId("messages"), text = byId("text"), tip = byId("alternatives");
const NUMBERS = ["temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_tokens", "seed"];
const ALTERNATIVES = 5;

let model = null;
let said = []; // {role, content}
let running = null; // AbortController of the answer that is being written

function element(name, className, content) {
  const made = document.createElement(name);
  made.className = className;
  if (content !== undefined) made.textContent = content;
  return made;
}

function headers() {
  const key = byId("key").value;
  return { "Content-Type": "application/json", ...(key ? { Authorization: `Bearer ${key}` } : {}) };
}

async function refusal(response) {
  if (response.status === 401) byId("key-label").hidden = false;
  try {
    return (await response.json()).error.message;
  } catch {
    return `status ${response.status}`;
  }
}

async function loadModel() {
  const response = await fetch("v1/models", { headers: headers() });
  if (!response.ok) return showError(await refusal(response));
  model = (await response.json()).data[0];
  const parameters = Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 3 });
  byId("model").textContent = `${model.id}, ${parameters.format(model.parameters)} parameters, `
    + `context of ${model.context_length.toLocaleString("en")} tokens`;
  document.title = `${model.id} · napkin`;
  byId("max_tokens").value = Math.max(1, Math.min(256, Math.floor(model.context_length / 4)));
  byId("mode").value = model.has_chat_template ? "chat" : "text";
  changeMode();
}

// What is asked

function isChat() {
  return byId("mode").value === "chat";
}

function request() {
  const asked = { model: model.id, stream: true, stream_options: { include_usage: true } };
  for (const name of NUMBERS) {
    const value = byId(name).valueAsNumber;
    if (Number.isFinite(value)) asked[name] = value;
  }
  if (!isChat()) {
    const prompt = said.map((each) => each.content).join("");
    return ["v1/completions", { ...asked, prompt, logprobs: ALTERNATIVES }];
  }
  const system = byId("system").value.trim();
  asked.messages = [...(system ? [{ role: "system", content: system }] : []), ...said];
  return ["v1/chat/completions", { ...asked, logprobs: true, top_logprobs: ALTERNATIVES }];
}

async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      if (part === "data: [DONE]") return;
      if (part.startsWith("data: ")) yield JSON.parse(part.slice(6));
    }
  }
}

async function answer() {
  const conversation = said, body = addMessage("assistant", "");
  body.classList.add("writing");
  const writer = new Writer(body), meter = new Meter();
  const controller = running = new AbortController();
  showRunning();
  try {
    const [path, asked] = request();
    const sent = { method: "POST", headers: headers(), body: JSON.stringify(asked), signal: controller.signal };
    const response = await fetch(path, sent);
    if (!response.ok) throw new Error(await refusal(response));
    for await (const event of events(response)) {
      if (event.error) throw new Error(event.error.message);
      const [choice] = event.choices;
      if (choice) {
        const tokens = told(choice.logprobs);
        follow(() => writer.add(choice.delta ? choice.delta.content ?? "" : choice.text, tokens));
        meter.count(tokens.length || 1);
      } else {
        meter.end(event);
      }
    }
  } catch (error) {
    if (error.name !== "AbortError") showError(error.message || String(error));
  }
  writer.end();
  body.classList.remove("writing");
  // A new conversation may have begun.
  if (writer.content) conversation.push({ role: "assistant", content: writer.content });
  else body.remove();
  if (running === controller) running = null;
  showRunning();
}

// Tokens of both interfaces in one form: bytes, log-probability, likeliest ones as [text, log-probability].
function told(logprobs) {
  if (!logprobs) return [];
  if (logprobs.content) {
    return logprobs.content.map((each) => ({
      bytes: each.bytes, logprob: each.logprob, top: each.top_logprobs.map((top) => [top.token, top.logprob]), shown: each.token,
    }));
  }
  return logprobs.tokens.map((token, i) => ({
    bytes: bytesOf(token), logprob: logprobs.token_logprobs[i], top: Object.entries(logprobs.top_logprobs[i] ?? {}), shown: token,
  }));
}

function bytesOf(token) {
  if (!/^bytes:(\\x[0-9a-f]{2})+$/.test(token)) return [...new TextEncoder().encode(token)];
  return token.slice(6).match(/[0-9a-f]{2}/g).map((pair) => parseInt(pair, 16));
}

// Writes an answer: plain text, or a span per token. The text is what counts: a token is shown as far as it is in it.
class Writer {
  constructor(body) {
    this.body = body;
    this.content = "";
    this.shown = 0;
    this.waiting = [];
    this.decoder = new TextDecoder();
  }

  add(piece, tokens) {
    this.content += piece;
    for (const token of tokens) {
      this.waiting.push({ ...token, text: this.decoder.decode(new Uint8Array(token.bytes), { stream: true }) });
    }
    if (this.waiting.length) this.settle(false);
    else this.plain(this.content.length);
  }

  settle(all) {
    while (this.waiting.length) {
      const token = this.waiting[0], end = this.shown + token.text.length;
      if (end > this.content.length && !all) return;
      this.waiting.shift();
      const text = this.content.slice(this.shown, end);
      this.shown = Math.min(end, this.content.length);
      if (text) this.body.append(tokenSpan(text, token, this.body.childElementCount === 0));
    }
  }

  plain(end) {
    if (end > this.shown) this.body.append(this.content.slice(this.shown, end));
    this.shown = end;
  }

  end() {
    this.settle(true);
    this.plain(this.content.length);
  }
}

function tokenSpan(text, token, first) {
  const probability = Math.exp(token.logprob);
  const span = element("span", `token p${Math.min(9, Math.floor(10 * probability))}`, text);
  // Tab leads to an answer, arrows from token to token.
  span.tabIndex = first && byId("coloured").checked ? 0 : -1;
  span.token = token;
  return span;
}

// What is shown beside

class Meter {
  constructor() {
    this.begin = performance.now();
    this.first = null;
    this.n = 0;
  }

  count(n) {
    const now = performance.now();
    this.n += n;
    if (this.first === null) {
      this.first = now;
      byId("first").textContent = seconds((now - this.begin) / 1000);
    } else {
      byId("speed").textContent = ((1000 * (this.n - 1)) / Math.max(1, now - this.first)).toFixed(1);
    }
    byId("tokens").textContent = this.n.toLocaleString("en");
  }

  // The server's own figures take the place of those seen from here.
  end({ usage, timings }) {
    if (timings.seconds_to_first_token !== null) byId("first").textContent = seconds(timings.seconds_to_first_token);
    if (timings.seconds_per_token) byId("speed").textContent = (1 / timings.seconds_per_token).toFixed(1);
    byId("tokens").textContent = `${usage.prompt_tokens.toLocaleString("en")} + ${usage.completion_tokens.toLocaleString("en")}`;
    byId("cache").textContent = bytes(usage.total_tokens * model.kv_bytes_per_token);
  }
}

function seconds(value) {
  return value < 1 ? `${(1000 * value).toFixed(0)} ms` : `${value.toFixed(2)} s`;
}

function bytes(value) {
  const units = ["B", "kB", "MB", "GB"];
  const power = Math.min(3, Math.floor(Math.log10(Math.max(1, value)) / 3));
  return `${(value / 1000 ** power).toPrecision(3)} ${units[power]}`;
}

function showAlternatives(span) {
  if (!byId("coloured").checked || !span.token) return;
  const { logprob, top, shown } = span.token;
  const others = top.filter(([other]) => other !== shown);
  const rows = [[shown, logprob, "drawn"], ...others.map((each) => [...each, ""])].sort((a, b) => b[1] - a[1]);
  tip.replaceChildren(...rows.map(([token, value, className]) => {
    const row = element("div", className), bar = document.createElement("meter");
    bar.value = Math.exp(value);
    row.append(element("code", "", visible(token)), bar, element("output", "", percent(Math.exp(value))));
    return row;
  }));
  tip.hidden = false;
  const box = span.getBoundingClientRect(), own = tip.getBoundingClientRect();
  tip.style.left = `${Math.max(4, Math.min(box.left, innerWidth - own.width - 4))}px`;
  tip.style.top = `${box.bottom + own.height + 8 < innerHeight ? box.bottom + 4 : Math.max(4, box.top - own.height - 4)}px`;
}

// Line breaks and control characters as escapes.
function visible(token) {
  return token.startsWith("bytes:") ? token.slice(6) : JSON.stringify(token).slice(1, -1);
}

function percent(value) {
  return value >= 0.001 ? `${(100 * value).toFixed(1)}%` : "< 0.1%";
}

function follow(change) {
  const atEnd = messages.scrollHeight - messages.scrollTop - messages.clientHeight < 40;
  change();
  if (atEnd) messages.scrollTop = messages.scrollHeight;
}

function addMessage(role, content) {
  const body = element("div", `message ${role}${isChat() ? "" : " text"}`, content);
  messages.append(body);
  messages.scrollTop = messages.scrollHeight;
  return body;
}

function showError(message) {
  const line = element("p", "message error", message);
  line.setAttribute("role", "alert");
  messages.append(line);
  messages.scrollTop = messages.scrollHeight;
}

function showRunning() {
  byId("send").hidden = running !== null;
  byId("stop").hidden = running === null;
}

function changeMode() {
  byId("system-label").hidden = !isChat();
  startAgain();
}

function startAgain() {
  running?.abort();
  running = null;
  said = [];
  messages.replaceChildren();
  showRunning();
  text.focus();
}

async function send() {
  const content = text.value;
  if (running || (isChat() && !content.trim())) return;
  if (!model) await loadModel();
  if (!model) return;
  text.value = "";
  if (content) {
    said.push({ role: "user", content });
    addMessage("user", content);
  }
  await answer();
}

// What the user does

byId("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
text.addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  send();
});
addEventListener("keydown", (event) => {
  if (event.key !== "Escape") return;
  tip.hidden = true;
  running?.abort();
});
byId("stop").addEventListener("click", () => running?.abort());
byId("new").addEventListener("click", startAgain);
byId("mode").addEventListener("change", changeMode);
byId("key").addEventListener("change", loadModel);
byId("coloured").addEventListener("change", (event) => {
  messages.classList.toggle("coloured", event.target.checked);
  byId("scale").hidden = !event.target.checked;
  for (const span of messages.querySelectorAll(".token:first-child")) span.tabIndex = event.target.checked ? 0 : -1;
});
byId("show-settings").addEventListener("click", (event) => {
  const shown = document.body.classList.toggle("settings-shown");
  event.target.setAttribute("aria-expanded", String(shown));
});
for (const kind of ["mouseover", "focusin"]) messages.addEventListener(kind, (event) => showAlternatives(event.target));
for (const kind of ["mouseout", "focusout"]) messages.addEventListener(kind, () => { tip.hidden = true; });
messages.addEventListener("keydown", (event) => {
  const step = { ArrowLeft: "previousElementSibling", ArrowRight: "nextElementSibling" }[event.key];
  if (step && event.target.classList.contains("token")) event.target[step]?.focus();
});

loadModel();
