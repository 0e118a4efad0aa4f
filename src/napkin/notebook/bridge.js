// In the frame: what studio.js fetches is a message to the notebook, and its answer a message back.
let asked = 0;
const waiting = new Map();
window.addEventListener("message", ({ source, data }) => {
  const done = source === window.parent && "status" in data ? waiting.get(data.number) : undefined;
  if (!done) return;
  waiting.delete(data.number);
  const { status, content } = data, isJson = typeof content !== "string";
  done({ ok: status < 400, status, headers: new Headers({ "content-type": isJson ? "application/json" : "text/plain" }), json: async () => content, text: async () => content });
});
const fetch = (path, options = {}) => new Promise((done) => {
  waiting.set(++asked, done);
  window.parent.postMessage({ number: asked, path, body: options.body ?? null }, "*");
});
