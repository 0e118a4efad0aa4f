// A page in a frame of its own. What it asks goes to the kernel, and the answer back to it.
// @ts-check

/** @param {{ model: any, el: HTMLElement }} widget */
const render = ({ model, el }) => {
  const frame = document.createElement("iframe");
  // Scripts alone: the page reads nothing of the notebook.
  frame.setAttribute("sandbox", "allow-scripts");
  frame.title = model.get("title");
  frame.srcdoc = model.get("page");
  frame.style.cssText = `width: 100%; height: ${model.get("height")}px; border: 0`;
  const ask = (/** @type {MessageEvent} */ event) => { if (event.source === frame.contentWindow) model.send(event.data); };
  const answer = (/** @type {any} */ told) => frame.contentWindow?.postMessage(told, "*");
  window.addEventListener("message", ask);
  model.on("msg:custom", answer);
  el.append(frame);
  return () => { window.removeEventListener("message", ask); model.off("msg:custom", answer); };
};

export default { render };
