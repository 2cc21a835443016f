// Figures by step as small charts: one shared place on all of them, moved by mouse or by arrow keys.

import { h, s } from "./dom.js";
import { hideTip, showTip } from "./tip.js";

const WIDTH = 1000; // of the drawing; it is stretched to its place
const HEIGHT = 100;
const EDGE = 6;

/** Lowest and highest known value of these series; the same twice becomes a band around it. */
export function range(series) {
  let low = Infinity;
  let high = -Infinity;
  for (const values of series) {
    for (const value of values) {
      if (value === null || value === undefined) continue;
      if (value < low) low = value;
      if (value > high) high = value;
    }
  }
  if (low > high) return null;
  const spare = low === high ? Math.abs(low) * 0.1 || 1 : 0;
  return [low - spare, high + spare];
}

const across = (place, count) => (count > 1 ? EDGE + (place / (count - 1)) * (WIDTH - 2 * EDGE) : WIDTH / 2);

/** A line that breaks where a value is unknown; a value between two unknown ones is a dot. */
function path(values, [low, high], places, count) {
  const up = (value) => HEIGHT - EDGE - ((value - low) / (high - low)) * (HEIGHT - 2 * EDGE);
  let out = "";
  let drawn = 0; // points of the present stretch
  values.forEach((value, i) => {
    if (value === null || value === undefined) {
      if (drawn === 1) out += "h0";
      drawn = 0;
      return;
    }
    out += `${drawn ? "L" : "M"}${across(places ? places[i] : i, count).toFixed(1)} ${up(value).toFixed(1)}`;
    drawn++;
  });
  return drawn === 1 ? `${out}h0` : out;
}

/**
 * A chart of `lines` [{values, kind, places}], one value for each of `count` steps (or for each of `places`).
 * `chosen` is the place that is marked; `tip(place)` is told under the pointer; `choose(place, open)` hears of another.
 */
export function chart({ title, now, lines, count, chosen, show, tip, choose, say }) {
  const known = lines.filter((line) => line.values.some((value) => value !== null && value !== undefined));
  const bounds = range(known.map((line) => line.values));
  const svg = s("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", "aria-hidden": "true" });
  svg.append(s("line", { x1: 0, x2: WIDTH, y1: HEIGHT - 1, y2: HEIGHT - 1, class: "base" }));
  if (chosen !== null) svg.append(s("line", { x1: across(chosen, count), x2: across(chosen, count), y1: 0, y2: HEIGHT, class: "chosen" }));
  for (const line of known) svg.append(s("path", { d: path(line.values, bounds, line.places, count), class: `series ${line.kind}` }));
  const place = (event) => {
    const box = svg.getBoundingClientRect();
    const at = ((event.clientX - box.left) / box.width) * WIDTH;
    return Math.max(0, Math.min(count - 1, Math.round(((at - EDGE) / (WIDTH - 2 * EDGE)) * (count - 1))));
  };
  const keys = { ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10, Home: -Infinity, End: Infinity };
  return h("div.tile", {
    tabindex: "0", role: "slider", "aria-label": title, "aria-valuemin": 0, "aria-valuemax": count - 1, "aria-valuenow": chosen ?? count - 1,
    "aria-valuetext": say(chosen ?? count - 1), data: { chart: title },
    onpointermove: (event) => showTip(event.clientX, event.clientY, tip(place(event))),
    onpointerleave: hideTip,
    onclick: (event) => {
      hideTip();
      choose(place(event), true);
    },
    onkeydown: (event) => {
      if (event.key === "Enter") choose(chosen ?? count - 1, true);
      else if (event.key in keys) choose(Math.max(0, Math.min(count - 1, (chosen ?? count - 1) + keys[event.key])), false);
      else return;
      event.preventDefault();
    },
  },
  h("div.tile-head", null, title), h("div.values", null, now),
  bounds ? h("div.tile-plot", null, svg, h("span.tick", null, show(bounds[1])), h("span.tick.low", null, show(bounds[0])))
    : h("div.tile-plot.dim", null, "not recorded"));
}
