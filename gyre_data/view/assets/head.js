// The line about the execution: which task, which harness, how it ended, what it scored, what is trained of it.

import { $, fill, h } from "./dom.js";
import { amount, int, many, seconds, took, words } from "./format.js";
import { on, state, tell } from "./store.js";

export function setUpHead() {
  on("execution refreshed run figures training", draw);
}

function draw() {
  const e = state.execution;
  if (!e) return;
  const { info, raw } = e;
  const counts = raw.counts;
  const admission = state.figures?.admission[e.id];
  const bad = [[counts.calls_failed, "failed"], [counts.calls_aborted, "aborted"], [counts.calls_undelivered, "undelivered"]].filter(([n]) => n);
  const step = state.training?.consumed[e.id];
  const lasted = seconds(info.started_at, info.ended_at);
  const stopped = state.run.executions.find((one) => one.execution_id === e.id)?.state === "interrupted";
  const ended = info.end_reason && info.end_reason !== "finished";
  fill($("head"),
    h("h2", { title: info.execution_id }, info.task_id ? `${info.task_id}${info.sample_index === null ? "" : ` #${info.sample_index}`}` : info.execution_id),
    scores(raw.scores),
    raw.running ? h(stopped ? "span.bad" : "span.good", null, stopped ? "interrupted" : "running") : h("span", { class: ended ? "warn" : "dim" }, words(info.end_reason)),
    lasted !== null ? h("span.dim", null, took(lasted)) : null,
    step === undefined ? null : h("button.jump", { title: "The step that consumed it", onclick: () => tell("choose-step", { step, open: true }) }, `in step ${int(step)}`),
    h("span", null, many(counts.calls, "call"), bad.map(([n, what]) => h("span.bad", null, ` ${int(n)} ${what}`))),
    h("span", { title: `${int(counts.occurrences)} if every trajectory were expanded` }, `${int(counts.message_nodes)} nodes`),
    h("span", null, `${amount(counts.distinct_tokens)} tokens`),
    admission && !admission.admitted
      ? h("span", { class: admission.reason.endsWith("running") ? "dim" : "bad", title: admission.detail }, `not admitted (${amount(counts.kept_tokens)} trainable)`)
      : h("span.trained", null, `${amount(counts.kept_tokens)} ${admission ? "trained" : "trainable"}`),
    h("span.dim", { title: "trajectories kept of those there are" }, `${int(raw.trajectories.length)} of ${many(counts.trajectories, "path")}`),
    info.harness ? h("span", null, [info.harness, info.harness_version].filter(Boolean).join(" ")) : null,
    h("code.dim", null, info.execution_id));
}

function scores(rows) {
  const newest = new Map(rows.map((row) => [row.evaluator, row]));
  return [...newest.values()].map((row) => (row.status === "scored"
    ? h("span.score", { class: row.value >= 0.995 ? "high" : row.value > 0.005 ? "mid" : "low", title: row.evaluator }, `${row.value.toFixed(2)}${row.partial ? " partial" : ""}`, h("span.dim", null, ` ${row.evaluator}`))
    : h("span", { class: row.status === "failed" ? "bad" : "dim" }, `${row.evaluator} ${row.status}`)));
}
