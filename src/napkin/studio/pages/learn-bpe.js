// Byte-pair encoding: a text after so many merges, the pairs that are frequent then, and how the text gets shorter.
// @ts-check
import { svg } from "/assets/drawing.js";
import { byId, el, figure } from "/assets/studio.js";
import { chart, keys, line, study, table, whole } from "/assets/learn.js";

const COLOURS = 4;
const SHOWN = 12; // merges of the table, the last ones

/** @param {any} answer @param {number} width */
const curve = ({ sizes, merges }, width) => {
  const { root, x, y, bottom } = chart(width, 220, "Tokens of the text after each merge",
    { from: 0, to: Math.max(1, sizes.length - 1), label: "merges", show: String },
    { from: 0, to: sizes[0] * 1.05, label: "tokens", show: String });
  root.append(line(sizes.map((/** @type {number} */ size, /** @type {number} */ at) => [x(at), y(size)]), "s0"),
    svg("line", { class: "grid", x1: x(merges), x2: x(merges), y1: y(sizes[merges]), y2: bottom }), svg("circle", { class: "f3", cx: x(merges), cy: y(sizes[merges]), r: 5 }));
  return root;
};

/** A space that is seen. @param {string} token */
const seen = (token) => token.replaceAll(" ", "␣");
let colour = 0;
const pieces = (/** @type {string[][]} */ words) => {
  colour = 0;
  return words.flat().map((token) => el("span", { class: `token t${colour++ % COLOURS}` }, token));
};

study("bpe", {
  first: {
    text: "low low low low low lower lower newest newest newest newest newest newest widest widest widest. The newest of the lower rows is the widest; the lowest is the slowest.",
    merges: 4,
  },
  controls: [
    { name: "text", label: "A text", lines: 5 },
    { name: "merges", label: "Merges", values: whole(0, 150) },
  ],
  draw: (answer, state, width) => {
    const { merges, most, sizes, candidates, learned, bytes } = answer;
    byId("control-merges").max = String(most);
    const next = candidates.find((/** @type {any} */ each) => each.next);
    byId("verdict").textContent = next
      ? `After ${merges} merges the most frequent pair is “${seen(next.pair[0])}” and “${seen(next.pair[1])}”: ${next.count} times.`
      : `After ${merges} merges there is no pair left within a word.`;
    byId("picture").replaceChildren(
      el("div", { class: "tokens", role: "group", "aria-label": "The text as tokens" }, ...pieces(answer.pieces)),
      el("h2", {}, "Tokens of the text after each merge"), curve(answer, width),
      el("h2", {}, "The most frequent pairs now"),
      el("ul", { class: "pairs" }, ...candidates.map((/** @type {any} */ each) => el("li", { class: each.next ? "next" : "" }, el("code", {}, each.pair.map(seen).join(" + ")), ` ${each.count}`))));
    keys([
      ["tokens", figure(sizes[merges], "count"), `of ${figure(bytes, "count")} bytes`],
      ["bytes per token", figure(bytes / sizes[merges], "number")],
      ["vocabulary", figure(256 + merges, "count"), "256 bytes and the merges"],
    ]);
    table(["merge", "joins", "makes"], learned.slice(-SHOWN).reverse().map((/** @type {any} */ each) => [String(each.number + 1), el("code", {}, each.joins.map(seen).join(" + ")), el("code", {}, seen(each.makes))]));
  },
});
