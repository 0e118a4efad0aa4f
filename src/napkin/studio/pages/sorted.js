// A table whose rows are sorted by the column whose head is pressed.
// @ts-check
import { el } from "/assets/studio.js";

/**
 * @template Row
 * @typedef {{ title: string, of: (row: Row) => any, shown?: (row: Row) => string | Node }} Column
 */

/** Numbers before texts, what is missing last. @param {any} one @param {any} other */
const compared = (one, other) => {
  const missing = (/** @type {any} */ value) => value === null || value === undefined || Number.isNaN(value);
  if (missing(one) || missing(other)) return Number(missing(one)) - Number(missing(other));
  if (typeof one === "number" && typeof other === "number") return one - other;
  return String(one).localeCompare(String(other), "en", { numeric: true });
};

/**
 * Fill a table; the head that is pressed sorts its rows, once more the other way round.
 * @template Row
 * @param {HTMLElement} table @param {Column<Row>[]} columns @param {Row[]} rows @param {number} [first] the column that sorts at the start
 */
export const sortedTable = (table, columns, rows, first) => {
  const kept = Number(table.dataset.by ?? first ?? -1), isDown = table.dataset.down === "true";
  const ordered = kept >= 0 && kept < columns.length ? [...rows].sort((one, other) => (isDown ? -1 : 1) * compared(columns[kept].of(one), columns[kept].of(other))) : rows;
  const heads = columns.map(({ title }, place) => {
    const press = () => {
      table.dataset.down = String(kept === place && !isDown);
      table.dataset.by = String(place);
      sortedTable(table, columns, rows);
      /** @type {HTMLElement | undefined} */ (table.querySelectorAll("thead button")[place])?.focus();
    };
    const sort = kept === place ? { "aria-sort": isDown ? "descending" : "ascending" } : {};
    return el("th", { scope: "col", ...sort }, el("button", { type: "button", class: "head", onclick: press }, title, kept === place ? (isDown ? " ↓" : " ↑") : ""));
  });
  table.replaceChildren(el("thead", {}, el("tr", {}, ...heads)), el("tbody", {}, ...ordered.map((row) => el("tr", {}, ...columns.map(({ of, shown }) => el("td", {}, shown ? shown(row) : String(of(row) ?? "–")))))));
};
