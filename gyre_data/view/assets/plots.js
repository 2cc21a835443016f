// Distributions over the run: how long contexts and outputs are, how long calls and executions take, what they score.

import { $, fill, h, s } from "./dom.js";
import { amount, int, seconds, took } from "./format.js";
import { on, state } from "./store.js";

const WIDTH = 340;
const HEIGHT = 120;

export function setUpPlots() {
  on("tab run", () => state.tab === "plots" && draw());
}

function draw() {
  const { spread, executions } = state.run;
  const lasted = executions.map((e) => seconds(e.started_at, e.ended_at));
  const few = spread.every > 1 ? `every ${int(spread.every)}th call` : "every call";
  fill($("talk"), h("div.plots", null,
    histogram("Context of a call, tokens", spread.context, { log: true, show: amount, note: few }),
    histogram("Output of a call, tokens", spread.output, { log: true, show: amount, note: few }),
    histogram("Time of a call", spread.seconds, { log: true, show: took, note: few }),
    histogram("Tokens of an execution", executions.map((e) => e.num_tokens || null), { log: true, show: amount }),
    histogram("Calls of an execution", executions.map((e) => e.num_calls || null), { log: true, show: int }),
    histogram("Time of an execution", lasted, { log: true, show: took }),
    histogram("Score", executions.map((e) => e.score), { log: false, show: (x) => x.toFixed(2), note: "newest scored row" })));
}

/** Bars over equal steps, of the logarithm where values span sizes; null values are told, never counted as 0. */
function histogram(title, values, { log, show, note }) {
  const known = values.filter((v) => v !== null && v !== undefined && (!log || v > 0)).sort((a, b) => a - b);
  const missing = values.length - known.length;
  const figure = h("figure.plot", null, h("figcaption", null, h("b", null, title), h("span.dim", null, [note, missing ? `${int(missing)} unknown` : null].filter(Boolean).join(", "))));
  if (!known.length) {
    figure.append(h("p.empty", null, "nothing to show"));
    return figure;
  }
  const f = log ? Math.log2 : (x) => x;
  const g = log ? (x) => 2 ** x : (x) => x;
  const [low, high] = [f(known[0]), f(known[known.length - 1])];
  const bins = Math.max(1, Math.min(24, Math.ceil(2 * Math.sqrt(known.length))));
  const step = (high - low) / bins || 1;
  const counts = new Array(bins).fill(0);
  for (const value of known) counts[Math.min(bins - 1, Math.floor((f(value) - low) / step))]++;
  const most = Math.max(...counts);
  const each = WIDTH / bins;
  const at = (q) => known[Math.min(known.length - 1, Math.floor(q * known.length))];
  const svg = s("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT + 18}`, role: "img", "aria-label": `${title}: median ${show(at(0.5))}, 90th percentile ${show(at(0.9))}, largest ${show(known[known.length - 1])}` });
  counts.forEach((count, k) => {
    const tall = count ? Math.max(2, (count / most) * (HEIGHT - 12)) : 0;
    const bar = s("rect", { x: k * each + 1, y: HEIGHT - tall, width: Math.max(1, each - 2), height: tall, class: "bar" });
    bar.append(s("title", null, `${show(g(low + k * step))} to ${show(g(low + (k + 1) * step))}: ${int(count)}`));
    svg.append(bar);
  });
  svg.append(s("line", { x1: 0, x2: WIDTH, y1: HEIGHT, y2: HEIGHT, class: "base" }),
    s("text", { x: 0, y: HEIGHT + 14, class: "tick" }, show(known[0])),
    s("text", { x: WIDTH, y: HEIGHT + 14, class: "tick", "text-anchor": "end" }, show(known[known.length - 1])));
  figure.append(svg, h("div.line.dim", null, `n ${int(known.length)}`, h("span", null, `median ${show(at(0.5))}`), h("span", null, `p90 ${show(at(0.9))}`), h("span", null, `p99 ${show(at(0.99))}`)));
  return figure;
}
