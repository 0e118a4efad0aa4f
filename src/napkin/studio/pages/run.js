// One run in words: its state, what stands out, its log, answers and samples; and, where the studio allows it, the
// buttons that stop and resume it.
// @ts-check
import { ask, byId, el, figure, Refused } from "/assets/studio.js";

const EVERY = 3000; // milliseconds between two looks
const MOST_ANSWERS = 64;
const name = new URLSearchParams(location.hash.slice(1)).get("run") ?? "";
const query = new URLSearchParams({ run: name });
/** What was shown last, so that nothing is read again that has not changed. */
let before = "";

/** @param {string} id @param {string} text */
const text = (id, text) => {
  byId(`${id}-part`).hidden = !text;
  if (byId(id).textContent !== text) byId(id).textContent = text;
};

/** @typedef {{ messages: { role: string, content: string }[], reward: number, tokens: number, ending: string, failure?: string | null }} Answered */
/** @param {{ step: number, answered: Answered[] } | null} answers */
const showAnswers = (answers) => {
  byId("answers-part").hidden = !answers;
  if (!answers) return;
  const best = answers.answered.slice(0, MOST_ANSWERS);
  byId("answers-what").textContent = `Step ${figure(answers.step, "count")}: ${best.length} of ${answers.answered.length} answers, the reward of each first.`;
  byId("answers").replaceChildren(...best.map(({ messages, reward, tokens, ending, failure }) => el("details", {},
    el("summary", {}, el("b", {}, figure(reward, "number")), ` ${messages[0]?.content.slice(0, 120) ?? ""} `, el("span", { class: "soft" }, `${figure(tokens, "count")} tokens, ${ending}${failure ? `, not judged: ${failure}` : ""}`)),
    ...messages.map(({ role, content }) => el("p", { class: "message" }, el("b", {}, role), el("span", {}, content))))));
};

/** @param {any} run */
const show = (run) => {
  byId("status").textContent = run.status;
  byId("said").replaceChildren(...[...run.verdict, ...run.warnings].map((sentence) => el("li", {}, sentence)));
  byId("figures").replaceChildren(...run.figures.map((/** @type {{ label: string, value: string, detail: string }} */ { label, value, detail }) => el("div", {}, el("dt", {}, label), el("dd", {}, value, el("small", {}, detail)))));
  text("samples", run.samples);
  text("recipe", run.recipe);
  showAnswers(run.answers);
};

const look = async () => {
  try {
    const told = await ask("/api/runs"), own = told.runs.find((/** @type {{ name: string }} */ run) => run.name === name);
    byId("stop").hidden = !(told.allow_actions && own?.training);
    byId("resume").hidden = !(told.allow_actions && own && !own.training && told.started[name] !== "runs");
    for (const id of ["curves", "report"]) byId(id).hidden = !own;
    const state = JSON.stringify(own ?? null);
    if (own && state !== before) { show(await ask(`/api/runs/one?${query}`)); before = state; }
    if (!own) byId("status").textContent = told.started[name] ? `It ${told.started[name] === "runs" ? "is being prepared" : told.started[name]}: the folder of the run is not there yet.` : "There is no run of this name.";
    if (own || told.started[name]) {
      const { log, state } = await ask(`/api/runs/log?${query}`), isAtEnd = byId("log").scrollHeight - byId("log").scrollTop - byId("log").clientHeight < 30;
      byId("state").textContent = state ? `The process that this studio has started ${state}.` : "Of processes that a studio has started.";
      text("log", log);
      if (isAtEnd) byId("log").scrollTop = byId("log").scrollHeight;
    }
  } catch (error) {
    byId("status").textContent = error instanceof Refused ? error.message : `The studio does not answer: ${/** @type {Error} */ (error).message}`;
  }
  document.body.dataset.ready = "run";
  setTimeout(look, EVERY);
};

/** Ask once whether it is meant, then do it. @param {string} what @param {string} title @param {string} then */
const confirmed = (what, title, then) => {
  byId("sure-title").textContent = title;
  byId("sure-what").textContent = then;
  byId("yes").textContent = title.split(" ")[0];
  byId("yes").onclick = async () => {
    byId("sure").close();
    byId("refused").textContent = "";
    try { await ask(`/api/runs/${what}`, { body: { name } }); } catch (error) { byId("refused").textContent = /** @type {Error} */ (error).message; }
    before = "";
  };
  byId("sure").showModal();
};

byId("name").textContent = name || "Run";
document.title = `${name} · napkin`;
byId("curves").href = `/runs#${query}`;
byId("report").href = `/runs/report?${query}`;
byId("no").addEventListener("click", () => byId("sure").close());
byId("stop").addEventListener("click", () => confirmed("stop", "Stop the run?", `The step of ${name} ends, a checkpoint is written, and its process exits. It can be resumed.`));
byId("resume").addEventListener("click", () => confirmed("resume", "Resume the run?", `${name} goes on from its newest checkpoint, in a process that the end of the studio does not end.`));
addEventListener("hashchange", () => location.reload());
look();
