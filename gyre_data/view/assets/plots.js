// Distributions over the run: how long contexts and outputs are, how long calls and executions take, what they score.

import { $, fill, h, s } from "./dom.js";
import { amount, int, took, words } from "./format.js";
import { on, state } from "./store.js";

const WIDTH = 340;
const HEIGHT = 120;
const SCORE_BINS = 20;

export function setUpPlots() {
  on("tab figures", () => state.tab === "plots" && draw());
}

const TITLES = {
  trajectory_tokens: "Tokens of a trajectory",
  execution_tokens: "Tokens of an execution",
  execution_calls: "Calls of an execution",
  call_prompt_tokens: "Prompt of a call",
  call_output_tokens: "Output of a call",
  execution_s: "Time of an execution",
  call_s: "Time of a call",
  call_first_token_s: "Time to the first token",
};

function draw() {
  const told = state.figures?.stats.distributions;
  if (!told) {
    fill($("talk"), h("p.empty", null, "being counted …"));
    return;
  }
  const known = Object.keys(told).filter((name) => told[name] && Array.isArray(told[name].histogram));
  fill($("talk"), h("div.plots", null, scores(), known.map((name) => histogram(TITLES[name] || words(name), told[name]))));
}

/** The newest score of each execution; what was not scored is told, never counted as 0. */
function scores() {
  const values = state.run.executions.map((e) => e.score).filter((x) => x !== null).sort((a, b) => a - b);
  const [low, high] = [Math.min(0, values[0] ?? 0), Math.max(1, values[values.length - 1] ?? 1)];
  const step = (high - low) / SCORE_BINS;
  const bins = new Array(SCORE_BINS).fill(0);
  for (const value of values) bins[Math.min(SCORE_BINS - 1, Math.floor((value - low) / step))]++;
  const at = (q) => values[Math.min(values.length - 1, Math.floor(q * values.length))];
  return histogram("Score of an execution", {
    unit: "score", count: values.length, unknown: state.run.executions.length - values.length,
    edges: bins.map((_, k) => low + k * step), histogram: bins, minimum: values[0] ?? null, maximum: values[values.length - 1] ?? null,
    quantiles: values.length ? { p50: at(0.5), p95: at(0.95) } : {},
  }, "newest scored row of each");
}

const SHOW = { tokens: amount, seconds: took, calls: int, score: (x) => x.toFixed(2) };

/** One bar a bin, empty bins at both ends left out. */
function histogram(title, told, note) {
  const show = SHOW[told.unit] || amount;
  const figure = h("figure.plot", null, h("figcaption", null, h("b", null, title), h("span.dim", null, note)));
  const from = told.histogram.findIndex((n) => n > 0);
  if (from < 0) {
    figure.append(h("p.empty", null, "nothing to show"));
    return figure;
  }
  const to = told.histogram.length - [...told.histogram].reverse().findIndex((n) => n > 0);
  const most = Math.max(...told.histogram);
  const each = WIDTH / Math.max(6, to - from);
  const svg = s("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT + 18}`, role: "img", "aria-label": `${title}: median ${show(told.quantiles.p50)}, largest ${show(told.maximum)}` });
  for (let k = from; k < to; k++) {
    const count = told.histogram[k];
    const tall = count ? Math.max(2, (count / most) * (HEIGHT - 14)) : 0;
    const x = (k - from) * each;
    const until = k + 1 < told.edges.length ? `${show(told.edges[k])} to ${show(told.edges[k + 1])}` : `${show(told.edges[k])} and more`;
    const bar = s("rect", { x: x + 1, y: HEIGHT - tall, width: Math.max(1, each - 2), height: tall, class: "bar", rx: 2 });
    bar.append(s("title", null, `${until}: ${int(count)}`));
    svg.append(bar, s("text", { x: x + each / 2, y: HEIGHT - tall - 3, class: "tick", "text-anchor": "middle" }, count && each > 16 ? int(count) : ""));
    if (each > 26 || (k - from) % 3 === 0) svg.append(s("text", { x: x + 1, y: HEIGHT + 14, class: "tick" }, show(told.edges[k])));
  }
  svg.append(s("line", { x1: 0, x2: WIDTH, y1: HEIGHT, y2: HEIGHT, class: "base" }));
  const quantiles = Object.entries(told.quantiles).filter(([name]) => ["p50", "p95", "p99"].includes(name));
  figure.append(svg, h("div.line.dim", null, `n ${int(told.count)}`, quantiles.map(([name, x]) => h("span", null, `${name} ${show(x)}`)), h("span", null, `max ${show(told.maximum)}`),
    told.unknown ? h("span.warn", null, `${int(told.unknown)} unknown`) : null));
  return figure;
}
