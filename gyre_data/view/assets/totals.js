// The line that answers first: how much there is, and in red what is wrong with it.

import { $, fill, h } from "./dom.js";
import { amount, dollars, int, many, words } from "./format.js";
import { state } from "./store.js";

export function showTotals() {
  const { run, figures } = state;
  const of = (test) => run.executions.filter(test).length;
  const scored = of((e) => e.score !== null);
  const failed = of((e) => e.score === null && e.score_status === "failed");
  const running = of((e) => e.state === "running");
  const interrupted = of((e) => e.state === "interrupted");
  const unscored = run.executions.length - scored - failed - of((e) => e.score === null && e.score_status !== "failed" && e.state !== "ended");
  const { status, role } = run.calls;
  const sum = (name) => run.executions.reduce((n, e) => n + (e[name] || 0), 0);
  const priced = run.executions.filter((e) => e.cost !== null);
  const stats = figures?.stats;
  const unknown = (role.unknown || 0) + (role.unknown_value || 0);
  fill($("totals"),
    part("executions", int(run.executions.length),
      scored ? `${int(scored)} scored` : null, running ? h("span.good", null, `${int(running)} running`) : null,
      bad(failed, "evaluator failed"), bad(interrupted, "interrupted"), stats ? bad(stats.inconsistent, "inconsistent") : null, unscored > 0 ? `${int(unscored)} without score` : null),
    part("calls", int(run.calls.total),
      ...Object.entries(status).filter(([name]) => name !== "ok").map(([name, n]) => bad(n, words(name))),
      stats ? bad(stats.calls_undelivered, "undelivered") : null, bad(unknown, "unknown role")),
    part("tokens", amount(sum("num_tokens")), `${amount(sum("num_sampled_tokens"))} sampled`),
    part("nodes", stats ? int(stats.message_nodes) : "…",
      stats ? `${int(stats.occurrences)} expanded` : null,
      stats && stats.sharing ? `${stats.sharing.toFixed(2)}x` : null,
      stats ? bad(stats.false_forks, stats.false_forks === 1 ? "FALSE fork" : "FALSE forks") : null),
    part("trainable", stats ? amount(stats.kept_tokens) : "…",
      stats ? `${int(stats.trajectories_kept)} of ${many(stats.trajectories, "path")}` : null),
    priced.length ? part("list price", dollars(priced.reduce((n, e) => n + e.cost, 0))) : null);
}

const bad = (n, what) => (n ? h("span.bad", null, `${int(n)} ${what}`) : null);

function part(name, value, ...notes) {
  return h("span.total", null, h("span.dim", null, name), h("b", null, value), notes.filter(Boolean).map((note) => h("span.note", null, note)));
}
