// Numbers and times for people. What is not known is "-", never a zero.

export const DASH = "–";

/** 1347 -> 1,347 */
export const int = (n) => (n === null || n === undefined ? DASH : Math.round(n).toLocaleString("en-US"));

/** Three figures at most: 940, 6.8k, 121k, 1.4M */
export function amount(n) {
  if (n === null || n === undefined) return DASH;
  let size = Math.abs(n);
  let unit = "";
  for (unit of ["", "k", "M", "G"]) {
    if (size < 999.5 || unit === "G") break;
    size /= 1000;
  }
  return (n < 0 ? "-" : "") + (unit && size < 9.95 ? size.toFixed(1) : String(Math.round(size))) + unit;
}

/** 340 ms, 4.2 s, 3m12, 1h31 */
export function took(seconds) {
  if (seconds === null || seconds === undefined || Number.isNaN(seconds)) return DASH;
  if (seconds < 1) return `${Math.round(seconds * 1000)} ms`;
  if (seconds < 60) return `${seconds < 9.95 ? seconds.toFixed(1) : Math.round(seconds)} s`;
  const whole = Math.round(seconds);
  const pad = (n) => String(n).padStart(2, "0");
  if (whole < 3600) return `${Math.floor(whole / 60)}m${pad(whole % 60)}`;
  return `${Math.floor(whole / 3600)}h${pad(Math.floor(whole / 60) % 60)}`;
}

export function dollars(n) {
  if (n === null || n === undefined) return DASH;
  if (n >= 9.995) return `$${int(n)}`;
  return n >= 0.0995 || n === 0 ? `$${n.toFixed(2)}` : `$${n.toPrecision(2)}`;
}

/** 12:03:44 of an ISO time, in UTC as recorded. */
export const clock = (iso) => (iso ? new Date(iso).toISOString().slice(11, 19) : DASH);

export const day = (iso) => (iso ? new Date(iso).toISOString().slice(0, 16).replace("T", " ") + " UTC" : DASH);

export const seconds = (a, b) => (a && b ? (Date.parse(b) - Date.parse(a)) / 1000 : null);

export const many = (n, one, more) => `${int(n)} ${n === 1 ? one : more || one + "s"}`;

/** harness_timeout -> harness timeout */
export const words = (name) => (name ? String(name).replaceAll("_", " ") : DASH);

/** The id without its prefix, shortened for a line; the whole id goes into a title. */
export const short = (id) => (id ? id.replace(/^[a-z]_/, "").slice(0, 6) : DASH);

export const clip = (text, n) => (text.length > n ? `${text.slice(0, n - 1)}…` : text);
