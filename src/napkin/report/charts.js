// Draws the charts of a page from the data in it, with uPlot. The axis that is chosen holds for all of them.
const content = JSON.parse(document.getElementById("chart-data").textContent);
const chooser = document.getElementById("axis"), root = document.documentElement;
const colour = (name) => getComputedStyle(root).getPropertyValue(`--${name}`).trim();
let plots = [];

// A table's positions on an axis: a list, or a number by which its steps are multiplied.
const positionsOf = (table, axis) => {
  const found = table.positions[axis];
  return typeof found === "number" ? table.positions.steps.map((step) => step * found) : found;
};

// uPlot wants one list of positions for all lines; null is a gap in a line, undefined is no point of it.
const columnsOf = (chart, axis) => {
  const known = content.tables.map((table) => table.positions[axis] !== undefined);
  const lines = chart.lines.filter((line) => known[line.table]).sort((one, other) => one.table - other.table);
  const used = [...new Set(lines.map((line) => line.table))];
  const tables = used.map((index) => [
    positionsOf(content.tables[index], axis),
    ...lines.filter((line) => line.table === index).map((line) => content.tables[index].curves[line.column]),
  ]);
  return { lines, columns: tables.length > 1 ? uPlot.join(tables) : tables[0] || [[]] };
};

const nearest = (columns, series, index) => {
  const values = columns[series], isKnown = (i) => values[i] !== null && values[i] !== undefined;
  for (let distance = 0; series && distance < values.length; distance++) {
    if (isKnown(index - distance)) return index - distance;
    if (isKnown(index + distance)) return index + distance;
  }
  return index;
};

const placeOf = (position, axis) => {
  const figure = FORMATS[axis.unit](position);
  return axis.name === "steps" ? `step ${figure}` : axis.unit === "count" ? `${figure} ${axis.name}` : figure;
};

// What the legend says of a line: its value at the cursor and, where its nearest point is not there, the place of it.
const describe = (plot, line, series, index, axis) => {
  const values = plot.data[series], format = FORMATS[line.unit];
  if (index === null || index === undefined) {
    for (index = values.length - 1; index > 0 && typeof values[index] !== "number";) index--;
    return typeof values[index] === "number" ? `${format(values[index])} at the end` : "–";
  }
  if (typeof values[index] !== "number") return "–";
  const here = plot.data[0][plot.cursor.idx ?? index], there = plot.data[0][index];
  const { min, max } = plot.scales.x;
  const isNear = Math.abs(there - here) <= 0.01 * (max - min) && line.style !== "points";
  return format(values[index]) + (isNear || there === here ? "" : ` at ${placeOf(there, axis)}`);
};

// Ticks of a logarithmic axis: round values, at most eight.
const logarithmicTicks = (low, high) => {
  for (const digits of [[1, 1.5, 2, 3, 4, 5, 6, 8], [1, 2, 3, 5], [1, 3], [1]]) {
    const ticks = [];
    for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power++) {
      ticks.push(...digits.map((digit) => digit * 10 ** power).filter((tick) => low <= tick && tick <= high));
    }
    if (ticks.length <= 8) return ticks;
  }
  return [];
};

const scaleOf = (chart, values) => {
  const finite = values.flat().filter((value) => typeof value === "number");
  const low = finite.reduce((one, other) => Math.min(one, other), Infinity);
  const high = finite.reduce((one, other) => Math.max(one, other), -Infinity);
  if (chart.from_zero) return { range: (plot, min, max) => [0, max > 0 ? 1.15 * max : 1] };
  if (low > 0 && high > 3 * low) {
    return { distr: 3, range: (plot, min, max) => min > 0 ? [min / 1.06, max * 1.06] : [low / 1.06, high * 1.06] };
  }
  return {
    range: (plot, min, max) => {
      if (min === null || max === null) return [0, 1];
      const margin = 0.06 * (max - min) || 0.1;
      return [min - margin, max + margin];
    },
  };
};

const seriesOf = (line, columns, index, axis) => {
  const isLone = columns[index].filter((value) => typeof value === "number").length === 1;
  const isDotted = line.style === "points" || isLone;
  return {
    label: line.label,
    scale: line.right ? "right" : "y",
    stroke: () => colour(line.colour),
    width: { faint: 1, bold: 2, points: 1.5 }[line.style] || 1.5,
    alpha: line.style === "faint" ? 0.45 : 1,
    dash: line.style === "dashed" ? [6, 4] : undefined,
    spanGaps: line.style === "points",
    points: { show: isDotted, size: 7, fill: () => colour(line.colour), stroke: () => colour("paper"), width: 1 },
    value: (plot, value, series, at) => describe(plot, line, series, at, axis),
  };
};

const draw = (place) => {
  const name = chooser.value, axis = content.axes[name], chart = content.charts[place.dataset.chart];
  const { lines, columns } = columnsOf(chart, name);
  if (!lines.length) return null;
  const steps = name !== "steps" && content.tables.length === 1 ? content.tables[0].positions.steps : null;
  const font = `12px ${getComputedStyle(document.body).fontFamily}`;
  const common = { font, labelFont: font, stroke: () => colour("soft"), ticks: { show: false } };
  const vertical = (scale, side) => {
    const own = lines.find((line) => line.right === (scale === "right"));
    const splits = scales[scale].distr === 3 ? { splits: (plot, index, low, high) => logarithmicTicks(low, high), filter: (plot, ticks) => ticks } : {};
    const grid = scale === "right" ? { show: false } : { stroke: () => colour("rule"), width: 1 };
    return { ...common, ...splits, scale, side, grid, size: 58, values: (plot, ticks) => tickLabels(ticks, own.unit) };
  };
  const isOf = (scale) => (column, index) => lines[index].right === (scale === "right");
  const scales = { x: { time: false, range: (plot, low, high) => [low === columns[0][0] ? 0 : low, high || 1] } };
  for (const scale of ["y", "right"]) {
    if (lines.some((line) => line.right === (scale === "right"))) scales[scale] = scaleOf(chart, columns.slice(1).filter(isOf(scale)));
  }
  const at = (plot, position, series, index) => {
    if (index === null || index === undefined) return "move over the chart";
    return FORMATS[axis.unit](position) + (steps ? `, step ${FORMATS.count(steps[index])}` : "");
  };
  return new uPlot({
    width: place.clientWidth,
    height: chart.height,
    scales,
    series: [{ label: axis.name, value: at }, ...lines.map((line, index) => seriesOf(line, columns, index + 1, axis))],
    axes: [
      { ...common, label: axis.label, size: 30, gap: 4, labelSize: 18, labelGap: 0, grid: { show: false }, values: (plot, ticks) => ticks.map((tick) => String(Number((tick / axis.scale).toPrecision(6)))), incrs: increments(axis.scale) },
      ...["y", "right"].filter((scale) => scales[scale]).map((scale) => vertical(scale, scale === "right" ? 1 : 3)),
    ],
    cursor: {
      y: false,
      dataIdx: (plot, series, index) => nearest(plot.data, series, index),
      sync: { key: "page", scales: ["x", null] },
    },
    legend: { markers: { width: 0, fill: (plot, series) => series ? `var(--${lines[series - 1].colour})` : "none" } },
  }, columns, place);
};

// Ticks are at round numbers of the unit in which the axis is labelled, and at whole steps.
const increments = (scale) => {
  const found = [];
  for (let power = -6; power <= 6; power++) found.push(...[1, 2, 2.5, 5].map((digit) => digit * 10 ** power * scale));
  return found.filter((increment) => scale !== 1 || chooser.value === "dollars" || chooser.value === "seconds" || Number.isInteger(increment));
};

const places = [...document.querySelectorAll("[data-chart]")];
const drawAll = () => {
  for (const plot of plots) plot?.destroy();
  plots = places.map(draw);
};
const resize = (width) => plots.forEach((plot, index) => plot?.setSize({ width: width || places[index].clientWidth, height: content.charts[places[index].dataset.chart].height }));
const recolour = () => plots.forEach((plot) => plot?.redraw(false, true));

// The choice lasts while a live page is loaded anew. A browser may refuse to keep it.
const kept = (work) => { try { return work(); } catch { return null; } };
const before = kept(() => sessionStorage.getItem("napkin-axis"));
chooser.value = content.axes[before] ? before : content.axis;
chooser.addEventListener("change", () => { kept(() => sessionStorage.setItem("napkin-axis", chooser.value)); drawAll(); });
document.getElementById("axis-choice").hidden = false;
drawAll();
let width = root.clientWidth;
new ResizeObserver(() => { if (root.clientWidth !== width) { width = root.clientWidth; resize(); } }).observe(root);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", recolour);
addEventListener("beforeprint", () => { root.classList.add("print"); resize(680); recolour(); });
addEventListener("afterprint", () => { root.classList.remove("print"); resize(); recolour(); });
