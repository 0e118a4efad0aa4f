// A chart of many lines, each with positions of its own. uPlot draws the axes and takes the pointer; the lines are on a
// canvas of their own, which is moved as a whole while the chart is panned, and drawn again when it rests.
// @ts-check
import { el, figure } from "/assets/studio.js";
import { scale } from "/assets/drawing.js";

/** @typedef {{ low: ArrayLike<number>, high: ArrayLike<number> }} Band */
/** @typedef {{ label: string, colour: string, dash: number[], x: ArrayLike<number>, y: ArrayLike<number>, band?: Band, isDots?: boolean, names?: string[] }} Line */
/** @typedef {[number, number]} Range */
/** @typedef {{ unit: string, axisUnit: string, range: Range, logX: boolean, logY: boolean, height: number, select: (from: number, to: number) => void, pan: (share: number) => void }} Options */

const FEW = 20; // points of a line that are also dots
const MANY = 60; // lines that are thin and without dashes
const TOLD = 12; // lines that are named under the pointer
const INSETS = { left: 64, right: 28 };

export const colourOf = (/** @type {string} */ name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

/** The lowest and highest value of lines within a range, with a margin. @param {Line[]} lines @param {Range} range @param {boolean} isLog @returns {Range} */
const extent = (lines, [from, to], isLog) => {
  let low = Infinity, high = -Infinity;
  for (const { x, y, band } of lines) {
    for (const values of band ? [band.low, band.high] : [y]) {
      for (let index = 0; index < x.length; index++) {
        const value = values[index];
        // A line's neighbours beyond the frame do not stretch it.
        if (x[index] < from || x[index] > to || !Number.isFinite(value) || (isLog && value <= 0)) continue;
        if (value < low) low = value;
        if (value > high) high = value;
      }
    }
  }
  if (low > high) return isLog ? [0.1, 1] : [0, 1];
  if (isLog) return [low / 1.06, high * 1.06];
  const margin = 0.06 * (high - low) || 0.05 * Math.abs(high) || 0.1;
  return [low - margin, high + margin];
};

/** The point of a line that is nearest to a position. @param {ArrayLike<number>} x @param {number} at */
export const nearest = (x, at) => {
  let low = 0, high = x.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (x[middle] < at) low = middle + 1; else high = middle;
  }
  return low > 0 && at - x[low - 1] < x[low] - at ? low - 1 : low;
};

/**
 * Draw a chart into an element; the answer moves it, draws other lines into it, and removes it.
 * @param {HTMLElement} place
 * @param {Line[]} lines
 * @param {Options} options
 */
export const chart = (place, lines, options) => {
  const { unit, axisUnit, logX, logY, height } = options;
  let range = options.range, drawn = range, pending = 0, isDragged = false;
  const at = el("p", { class: "at" }, "");
  const canvas = /** @type {HTMLCanvasElement} */ (el("canvas")), marked = /** @type {HTMLCanvasElement} */ (el("canvas"));
  const layer = el("div", { class: "lines" }, canvas, marked);
  const ink = () => ({ font: `12px ${getComputedStyle(document.body).fontFamily}`, stroke: () => colourOf("soft"), ticks: { show: false }, grid: { stroke: () => colourOf("rule"), width: 1 } });
  /** Ticks of a logarithmic axis: powers of ten, with 2 and 5 of each where they are few, as many as there is room for. @param {number} room */
  const powers = (room) => ({
    splits: (/** @type {any} */ self, /** @type {number} */ axis, /** @type {number} */ low, /** @type {number} */ high) => {
      const found = scale([low, high], [0, 1], { log: true }).ticks, ticks = found.length > 3 ? found : scale([low, high], [0, 1]).ticks;
      const every = Math.ceil(ticks.length * room / (axis ? self.over.clientHeight || height : self.over.clientWidth || place.clientWidth));
      return ticks.filter((_, index) => index % every === 0);
    },
    filter: (/** @type {any} */ _, /** @type {number[]} */ ticks) => ticks,
  });
  const yRange = () => extent(lines, range, logY);
  /** @param {Range} values @param {boolean} isLog */
  const map = ([low, high], isLog) => isLog ? (/** @type {number} */ value) => Math.log(value / low) / Math.log(high / low) : (/** @type {number} */ value) => (value - low) / (high - low);
  let vertical = yRange();
  /** What the colours' names are now. @type {Map<string, string>} */
  let colours = new Map();

  const plot = new uPlot({
    width: Math.max(200, place.clientWidth), height,
    legend: { show: false },
    scales: {
      x: { time: false, distr: logX ? 3 : 1, range: () => range },
      y: { distr: logY ? 3 : 1, range: () => vertical },
    },
    series: [{}, { stroke: "transparent" }],
    axes: [
      { ...ink(), ...logX ? powers(80) : {}, size: 30, values: (/** @type {any} */ _, /** @type {number[]} */ ticks) => ticks.map((tick) => tick === null ? "" : figure(tick, axisUnit)) },
      { ...ink(), ...logY ? powers(24) : {}, size: INSETS.left, values: (/** @type {any} */ _, /** @type {number[]} */ ticks) => tickLabels(ticks.map((tick) => tick ?? 0), unit).map((label, index) => ticks[index] === null ? "" : label) },
    ],
    padding: [8, INSETS.right, 0, 0],
    cursor: { y: false, points: { show: false }, sync: { key: "runs", scales: ["x", null] }, drag: { x: true, y: false, setScale: false } },
    hooks: {
      ready: [() => draw()],
      setCursor: [() => { if (!pending) pending = requestAnimationFrame(tell); }],
      setSelect: [(/** @type {any} */ self) => {
        const { left, width } = self.select;
        const isOwn = isDragged;
        isDragged = false;
        if (!width) return;
        self.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
        if (isOwn && width >= 4) options.select(self.posToVal(left, "x"), self.posToVal(left + width, "x"));
      }],
    },
  }, [range, [null, null]], place);
  plot.over.before(layer);
  place.append(at);

  /** @param {HTMLCanvasElement} on @returns {[CanvasRenderingContext2D, number, number]} */
  const cleared = (on) => {
    const { offsetLeft, offsetTop, clientWidth, clientHeight } = plot.over, scale = devicePixelRatio;
    Object.assign(layer.style, { left: `${offsetLeft}px`, top: `${offsetTop}px`, width: `${clientWidth}px`, height: `${clientHeight}px` });
    on.width = Math.round(clientWidth * scale);
    on.height = Math.round(clientHeight * scale);
    const context = /** @type {CanvasRenderingContext2D} */ (on.getContext("2d"));
    context.scale(scale, scale);
    return [context, clientWidth, clientHeight];
  };
  /** @param {CanvasRenderingContext2D} context @param {Line} line @param {number} width @param {number} tall @param {number} thick */
  const stroke = (context, { x, y, band, colour, dash, isDots }, width, tall, thick) => {
    const along = map(drawn, logX), up = map(vertical, logY);
    const px = (/** @type {number} */ value) => width * along(value), py = (/** @type {number} */ value) => tall * (1 - up(value));
    const isShown = (/** @type {number} */ index) => (!logX || x[index] > 0) && Number.isFinite(y[index]) && (!logY || y[index] > 0);
    context.strokeStyle = context.fillStyle = colours.get(colour) ?? "";
    context.lineWidth = thick;
    // Dashes take long to draw, and tell nothing among so many.
    context.setLineDash(lines.length > MANY ? [] : dash);
    if (band) {
      context.globalAlpha = 0.18;
      context.beginPath();
      for (let index = 0; index < x.length; index++) if (isShown(index)) context.lineTo(px(x[index]), py(band.high[index]));
      for (let index = x.length; index--;) if (isShown(index)) context.lineTo(px(x[index]), py(logY ? Math.max(band.low[index], vertical[0]) : band.low[index]));
      context.fill();
      context.globalAlpha = 1;
    }
    context.beginPath();
    for (let index = 0; index < x.length; index++) if (isShown(index)) context.lineTo(px(x[index]), py(y[index]));
    if (!isDots) context.stroke();
    if (x.length >= FEW && !isDots) return;
    context.beginPath();
    for (let index = 0; index < x.length; index++) if (isShown(index)) { context.moveTo(px(x[index]), py(y[index])); context.arc(px(x[index]), py(y[index]), isDots ? 4 : 2.5, 0, 7); }
    context.fill();
  };
  const draw = () => {
    drawn = range;
    layer.style.setProperty("--moved", "0px");
    const [context, width, tall] = cleared(canvas);
    cleared(marked);
    context.lineJoin = lines.length > MANY ? "bevel" : "round";
    colours = new Map(lines.map(({ colour }) => [colour, ""]));
    for (const colour of colours.keys()) colours.set(colour, colourOf(colour));
    for (const line of lines) stroke(context, line, width, tall, lines.length > MANY ? 1 : 1.5);
  };
  /** Say what the lines nearest to the pointer are, and mark the nearest. */
  const tell = () => {
    pending = 0;
    const { left, top } = plot.cursor;
    const [context, width, tall] = cleared(marked);
    if (!(left >= 0)) { at.textContent = ""; return; }
    // Charts that follow the pointer of another one name lines in their order, and mark none.
    const here = plot.posToVal(left, "x"), up = map(vertical, logY), isOver = plot.over.matches(":hover");
    const found = lines.filter(({ x }) => x.length && here >= x[0] - (range[1] - range[0]) / 50 && here <= x[x.length - 1] + (range[1] - range[0]) / 50)
      .map((line) => { const index = nearest(line.x, here); return { line, index, away: isOver ? Math.abs(tall * (1 - up(line.y[index])) - top) : 0 }; })
      .sort((one, other) => one.away - other.away);
    if (found.length > 1 && isOver) stroke(context, found[0].line, width, tall, 3);
    const more = found.length > TOLD ? ` and ${found.length - TOLD} more` : "";
    at.textContent = `${figure(here, axisUnit)}: ${found.slice(0, TOLD).map(({ line, index }) => line.names?.[index] ?? `${line.label} ${figure(line.y[index], unit)}`).join(" · ")}${more}`;
  };
  // Others that follow the pointer are told of a selection too.
  plot.over.addEventListener("mousedown", () => { isDragged = true; });
  plot.over.addEventListener("dblclick", () => options.select(-Infinity, Infinity));
  plot.over.addEventListener("wheel", (/** @type {WheelEvent} */ event) => {
    const by = Math.abs(event.deltaX) > Math.abs(event.deltaY) ? event.deltaX : event.shiftKey ? event.deltaY : 0;
    if (!by) return;
    event.preventDefault();
    options.pan(by / plot.over.clientWidth);
  }, { passive: false });

  return {
    /** Show another part at once, with the lines as they were drawn. @param {Range} to */
    move: (to) => {
      range = to;
      plot.setScale("x", { min: to[0], max: to[1] });
      layer.style.setProperty("--moved", `${plot.bbox.width / devicePixelRatio * map(to, logX)(drawn[0])}px`);
    },
    /** @param {Line[]} others @param {Range} to */
    show: (others, to) => {
      lines = others;
      range = to;
      vertical = yRange();
      plot.setData([range, [null, null]]);
      draw();
    },
    destroy: () => { cancelAnimationFrame(pending); plot.destroy(); at.remove(); },
  };
};
