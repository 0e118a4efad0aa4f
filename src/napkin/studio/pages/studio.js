// What the pages share: elements, answers of the server, figures.
// @ts-check

/**
 * An element with attributes and children; text is text and never markup.
 * @param {string} name
 * @param {Record<string, any>} [attributes]
 * @param {...(Node | string | number | null)} children
 * @returns {HTMLElement}
 */
export const el = (name, attributes = {}, ...children) => {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else if (key in made && typeof value !== "string") /** @type {any} */ (made)[key] = value;
    else if (value !== null) made.setAttribute(key, value);
  }
  made.append(...children.filter((each) => each !== null).map(asNode));
  return made;
};
/** @param {any} child */
const asNode = (child) => child instanceof Node ? child : String(child);

/** @param {string} id @returns {any} */
export const byId = (id) => document.getElementById(id);

/** What the server refuses is an error with its reason. */
export class Refused extends Error {
  /** @param {string} message @param {number} status */
  constructor(message, status) { super(message); this.status = status; }
}

/**
 * The answer of the server: an object for JSON, bytes as a buffer, otherwise text.
 * @param {string} path
 * @param {Omit<RequestInit, "body"> & { body?: any }} [options]
 */
export const ask = async (path, options = {}) => {
  const body = options.body === undefined ? {} : { method: "POST", body: JSON.stringify(options.body) };
  const answer = await fetch(path, { ...options, ...body });
  const isJson = (answer.headers.get("content-type") || "").includes("json");
  const isBinary = (answer.headers.get("content-type") || "").includes("octet-stream");
  const content = isJson ? await answer.json() : isBinary ? await answer.arrayBuffer() : await answer.text();
  if (!answer.ok) throw new Refused(isJson ? content.error : content, answer.status);
  return content;
};

/**
 * Figures as format.js writes them; a dash where there is none.
 * @param {number | null | undefined} value
 * @param {string} unit
 */
export const figure = (value, unit) =>
  value === null || value === undefined || !Number.isFinite(value) ? "–" : FORMATS[unit](value);

/** @param {Record<string, any>} values */
export const keep = (values) => Object.fromEntries(Object.entries(values).filter(([, value]) => value !== undefined));
