// The list of executions: which went well, which did not, what they cost.

import { $, fill, h } from "./dom.js";
import { day, dollars, int, seconds, short, took, words } from "./format.js";
import { state } from "./store.js";
import { VirtualList } from "./virtual.js";

const ROW = 44;
const SHORT = { harness_timeout: "timeout", overall_timeout: "timed out", infra_fault: "fault" };
let list = null;
let choose = null;

/** Build the list; `onChoose(id)` opens an execution. */
export function setUpExecutions(onChoose) {
  choose = onChoose;
  const box = h("div.exec-rows", { role: "listbox", tabindex: "0", "aria-label": "Executions", id: "exec-rows" });
  fill($("executions"), h("div.pane-head", null, h("span", null, "Executions"), h("span.cols", null, "score · calls · cost or time")), box);
  list = new VirtualList(box, ROW, row);
  box.addEventListener("keydown", (event) => {
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (!step) return;
    event.preventDefault();
    const next = list.rows[Math.min(list.rows.length - 1, Math.max(0, list.active + step))];
    if (next) choose(next.execution_id);
  });
}

export function showExecutions() {
  const rows = state.run.executions;
  const active = rows.findIndex((one) => one.execution_id === state.execution?.id);
  const moved = active !== list.active;
  list.set(rows, active);
  list.box.setAttribute("aria-activedescendant", active >= 0 ? `exec-${active}` : "");
  if (active >= 0 && moved) list.reveal(active);
}

function row(one, place) {
  const name = one.task_id ? one.task_id + (one.sample_index === null ? "" : ` #${one.sample_index}`) : words(one.harness);
  const lasted = took(seconds(one.started_at, one.ended_at));
  return h("div.exec", {
    role: "option", id: `exec-${place}`, "aria-selected": place === list.active, class: place === list.active ? "on" : "",
    title: `${one.execution_id}\nstarted ${day(one.started_at)}`, onclick: () => choose(one.execution_id),
  },
  h("div.line", null, h("b", null, name), h("span.grow"), score(one)),
  h("div.line.dim", null,
    h("code", null, short(one.execution_id)), ended(one), h("span.grow"),
    h("span", { title: `${int(one.num_calls)} calls, ${int(one.num_tokens)} tokens` }, int(one.num_calls)),
    one.num_bad_calls ? h("span.bad", { title: `${int(one.num_bad_calls)} failed or aborted` }, `(${int(one.num_bad_calls)})`) : null,
    h("span.cost", null, one.cost === null ? lasted : dollars(one.cost))));
}

function ended(one) {
  if (one.state === "running") return h("span.state.good", null, "running");
  if (one.state === "interrupted") return h("span.state.bad", null, "interrupted");
  const bad = one.end_reason && one.end_reason !== "finished";
  return h(bad ? "span.state.warn" : "span.state", { title: words(one.end_reason) }, SHORT[one.end_reason] || words(one.end_reason));
}

/** The newest score as a chip; a failed evaluator is no zero. */
export function score(one) {
  if (one.score !== null) {
    const level = one.score >= 0.995 ? "high" : one.score > 0.005 ? "mid" : "low";
    return h("span.score", { class: level, title: `${one.evaluator}: ${one.score}` }, one.score.toFixed(2) + (one.partial ? " partial" : ""));
  }
  if (one.score_status === "failed") return h("span.bad", null, "evaluator failed");
  return h("span.dim", null, one.score_status || "no score");
}
