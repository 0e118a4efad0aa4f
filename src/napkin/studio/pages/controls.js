// Controls of a page's state: sliders with a number beside them, lists to choose from, boxes.
// @ts-check
import { el, figure } from "/assets/studio.js";

/** The state of a page, by the names of its controls. @typedef {Record<string, any>} State */
/**
 * A control: its name in the state, a label, and its values for a slider, the names to choose from, or the lines of a
 * text; none of them is a box. A slider whose numbers need not be whole, or which may also be empty, says so.
 * @typedef {{
 *   name: string, label: string, values?: number[], names?: () => string[], when?: (s: State) => boolean,
 *   isFraction?: boolean, unit?: string, lines?: number
 * }} Control
 */

/** Powers of two from low to high, and what is half-way between them. @param {number} low @param {number} high */
export const POWERS = (low, high) => {
  const found = [];
  for (let power = 1; power <= high; power *= 2) {
    if (power >= low) found.push(power);
    if (power >= 2 && power * 1.5 >= low && power * 1.5 <= high) found.push(power * 1.5);
  }
  return found;
};
/** Seven numbers for each power of ten from low to high. @param {number} low @param {number} high */
export const TENS = (low, high) => {
  const found = [];
  for (let ten = low; ten <= high; ten *= 10) found.push(...[1, 1.5, 2, 3, 4, 5, 7].map((digit) => digit * ten).filter((each) => each <= high));
  return found;
};

/** A number as people type it: 8192, 1.5T, 3e6. @param {string} text */
export const parse = (text) => {
  const found = /^\s*([0-9]*\.?[0-9]+(?:e[+-]?[0-9]+)?)\s*([kmbt]?)\s*$/i.exec(text.replaceAll(",", ""));
  return found ? Number(found[1]) * { "": 1, k: 1e3, m: 1e6, b: 1e9, t: 1e12 }[/** @type {""} */ (found[2].toLowerCase())] : NaN;
};
/** @param {Control} control @param {number} value */
const shown = ({ unit }, value) => {
  const short = Number(value.toPrecision(6));
  return unit ? figure(value, unit) : short < 1e15 ? String(short) : short.toExponential().replace("+", "");
};

/**
 * Controls in groups, drawn into a form. `state` says what they show, `set` takes what people choose.
 * @param {HTMLElement} form
 * @param {Record<string, Control[]>} groups
 * @param {{ state: () => State, set: (name: string, value: any) => void }} page
 * @returns {() => void} shows the state anew
 */
export const buildControls = (form, groups, { state, set }) => {
  /** @type {(() => void)[]} */
  const refreshers = [];
  /** @param {Control} control */
  const build = (control) => {
    const { name, label, values, names, when, isFraction, lines } = control;
    const id = `control-${name}`;
    const row = el("div", { class: lines ? "control wide" : "control" }, el("label", { for: id }, label));
    if (names) {
      const select = /** @type {HTMLSelectElement} */ (el("select", { id, onchange: () => set(name, select.value) }, ...names().map((each) => el("option", { value: each }, each))));
      refreshers.push(() => { select.value = state()[name]; });
      row.append(select);
    } else if (values) {
      const slider = /** @type {HTMLInputElement} */ (el("input", { id, type: "range", min: "0", max: String(values.length - 1), step: "1" }));
      slider.addEventListener("input", () => set(name, values[Number(slider.value)]));
      const text = /** @type {HTMLInputElement} */ (el("input", { type: "text", inputmode: "decimal", "aria-label": `${label}, as a number` }));
      text.addEventListener("change", () => {
        const value = parse(text.value);
        const isValid = (value > 0 || value === values[0]) && (Number.isInteger(value) || isFraction);
        text.setAttribute("aria-invalid", String(!isValid));
        if (isValid) set(name, value);
      });
      refreshers.push(() => {
        const value = state()[name] ?? values[0];
        const place = values.findIndex((each) => each >= value);
        slider.value = String(place < 0 ? values.length - 1 : place);
        slider.setAttribute("aria-valuetext", shown(control, value));
        if (document.activeElement !== text) text.value = shown(control, value);
      });
      row.append(slider, text);
    } else if (lines) {
      const text = /** @type {HTMLInputElement | HTMLTextAreaElement} */ (lines > 1
        ? el("textarea", { id, rows: String(lines), spellcheck: "false" })
        : el("input", { id, type: "text", spellcheck: "false", autocomplete: "off" }));
      text.addEventListener("input", () => set(name, text.value));
      refreshers.push(() => { if (text.value !== state()[name]) text.value = state()[name]; });
      row.append(text);
    } else {
      const box = /** @type {HTMLInputElement} */ (el("input", { id, type: "checkbox" }));
      box.addEventListener("change", () => set(name, box.checked));
      refreshers.push(() => { box.checked = state()[name]; });
      row.append(box);
    }
    if (when) refreshers.push(() => { row.hidden = !when(state()); });
    return row;
  };
  form.append(...Object.entries(groups).map(([title, controls]) => el("fieldset", {}, el("legend", {}, title), ...controls.map(build))));
  form.addEventListener("submit", (event) => event.preventDefault());
  return () => { for (const refresh of refreshers) refresh(); };
};

/**
 * The part of a state that is not as at first, as the query of a link.
 * @param {Control[]} controls @param {State} state @param {State} base
 */
export const linkOf = (controls, state, base) => {
  const given = controls.filter(({ name }) => state[name] !== undefined && state[name] !== base[name]);
  return new URLSearchParams(given.map(({ name }) => [name, String(state[name])])).toString();
};
/**
 * The state of a link. Values that no control has are left out: a link comes from anywhere.
 * @param {Control[]} controls @param {string} link @param {State} first
 * @param {(state: State, name: string, value: any) => State} changed what a control's new value brings with it
 */
export const stateOf = (controls, link, first, changed) => {
  const given = new URLSearchParams(link);
  let state = first;
  for (const { name, values, names, lines } of controls) {
    const text = given.get(name);
    if (text === null) continue;
    if (names ? names().includes(text) : values ? Number(text) > 0 || Number(text) === values[0] : true) {
      state = changed(state, name, names || lines ? text : values ? Number(text) : text === "true");
    }
  }
  return state;
};
