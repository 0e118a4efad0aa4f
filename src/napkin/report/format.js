// Figures as napkin.units and napkin.accounting.quantity_row print them.
const scaled = (value, units, base = 1000) => {
  let size = Math.abs(value), power = 0;
  while (size >= base - (size >= 999.5 ? 0.5 : 0) && power < units.length - 1) { size /= base; power++; }
  if (size >= 9999.5 || (size > 0 && size < 1e-3)) return `${exponential(value)} ${units[0]}`.trim();
  const text = size >= 999.5 || (Number.isInteger(size) && power === 0) ? size.toFixed(0) : size.toPrecision(3);
  return `${value < 0 ? "-" : ""}${text} ${units[power]}`.trim();
};
const exponential = (value) => value.toExponential(2).replace(/e([+-])(\d)$/, "e$10$2");
const threeDigits = (value) => {
  const size = Math.abs(value);
  if (size === 0 || (size >= 999.5 && size < 1e6)) return value.toFixed(0);
  return size < 1e-4 || size >= 1e6 ? exponential(value) : value.toPrecision(3);
};
const duration = (seconds) => {
  if (seconds < 59.95) return scaled(seconds * 1e9, ["ns", "µs", "ms", "s"]);
  const two = (number) => String(number).padStart(2, "0");
  const whole = Math.round(seconds), minutes = Math.round(seconds / 60);
  if (whole < 3600) return `${Math.floor(whole / 60)} min ${two(whole % 60)} s`;
  if (minutes < 48 * 60) return `${Math.floor(minutes / 60)} h ${two(minutes % 60)} min`;
  return `${(seconds / 86400).toFixed(1)} days`;
};
const PREFIXES = {
  count: ["", "k", "M", "B", "T"],
  bytes: ["B", "kB", "MB", "GB", "TB", "PB"],
  FLOP: ["FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP", "EFLOP", "ZFLOP"],
};
const FORMATS = {
  loss: (value) => value.toFixed(4),
  number: threeDigits,
  count: (value) => Number.isInteger(value) && Math.abs(value) < 1e12 ? value.toLocaleString("en-US") : scaled(value, PREFIXES.count),
  bytes: (value) => scaled(value, PREFIXES.bytes),
  FLOP: (value) => scaled(value, PREFIXES.FLOP),
  share: (value) => `${threeDigits(100 * value)}%`,
  seconds: duration,
  USD: (value) => `$${Math.abs(value) >= 1000 ? scaled(value, PREFIXES.count) : threeDigits(value)}`,
  "tokens/s": (value) => scaled(value, PREFIXES.count),
};
// The labels of an axis: all in one unit, without zeros at the end.
const tickLabels = (ticks, unit) => {
  const prefixes = PREFIXES[unit === "tokens/s" ? "count" : unit], largest = Math.max(...ticks.map(Math.abs));
  const short = (value) => String(Number(value.toPrecision(6)));
  if (unit === "share") return ticks.map((tick) => `${short(100 * tick)}%`);
  if (!prefixes || !(largest > 0)) return ticks.map(short);
  const power = Math.min(prefixes.length - 1, Math.max(0, Math.floor(Math.log10(largest) / 3 + 1e-9)));
  return ticks.map((tick) => `${short(tick / 1000 ** power)} ${tick ? prefixes[power] : ""}`.trim());
};
