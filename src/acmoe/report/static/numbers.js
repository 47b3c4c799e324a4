// Numbers as people read them; a missing one is a dash.

const MINUS = "\u2212";

const withMinus = (text) => text.replace(/^-/, MINUS);

/** At most `digits` significant digits, without exponents where that stays short. */
const short = (value, digits = 4) => {
  if (value === null || value === undefined || !Number.isFinite(value)) return "\u2013";
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-4 || size >= 1e7)) return withMinus(value.toExponential(digits - 2));
  return withMinus(Number(value.toPrecision(digits)).toLocaleString("en", {
    maximumFractionDigits: 6,
  }));
};

/** A fixed number of decimals, so that a column lines up. */
const fixed = (value, decimals) =>
  value === null || value === undefined ? "\u2013" : withMinus(value.toFixed(decimals));

const signed = (value, decimals) => (value > 0 ? "+" : "") + fixed(value, decimals);

const whole = (value) =>
  value === null || value === undefined ? "\u2013" : Math.round(value).toLocaleString("en");

const duration = (seconds) => {
  if (seconds === null || seconds === undefined) return "\u2013";
  if (seconds < 90) return `${seconds.toFixed(0)} s`;
  if (seconds < 5400) return `${(seconds / 60).toFixed(0)} min`;
  return `${(seconds / 3600).toFixed(1)} h`;
};

const words = (key) => key.replaceAll("_", " ");
