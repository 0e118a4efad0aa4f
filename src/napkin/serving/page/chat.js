// The chat page. Whatever comes from the model or the user becomes text, never markup: textContent only.
import { Writer, element, events, letLookCloser, letTabReach, told } from "./tokens.js";

const byId = (id) => document.getElementById(id);
const messages = byId("messages"), text = byId("text");
const NUMBERS = ["temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_tokens", "seed"];
const ALTERNATIVES = 5;

let model = null;
let said = []; // {role, content}
let running = null; // AbortController of the answer that is being written

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

async function answer() {
  const conversation = said, body = addMessage("assistant", "");
  body.classList.add("writing");
  const writer = new Writer(body, byId("coloured").checked), meter = new Meter();
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
  running?.abort();
});
byId("stop").addEventListener("click", () => running?.abort());
byId("new").addEventListener("click", startAgain);
byId("mode").addEventListener("change", changeMode);
byId("key").addEventListener("change", loadModel);
byId("coloured").addEventListener("change", (event) => {
  letTabReach(messages, event.target.checked);
  byId("scale").hidden = !event.target.checked;
});
byId("show-settings").addEventListener("click", (event) => {
  const shown = document.body.classList.toggle("settings-shown");
  event.target.setAttribute("aria-expanded", String(shown));
});
letLookCloser(messages, byId("alternatives"));

loadModel();
