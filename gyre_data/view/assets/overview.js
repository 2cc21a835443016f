// The execution as a whole: what is trained of it and why not the rest, its verdicts, its group.

import { $, fill, h } from "./dom.js";
import { day, int, many, words } from "./format.js";
import { longText } from "./message.js";
import { on, state, tell } from "./store.js";

export function setUpOverview() {
  on("tab execution refreshed figures", () => state.tab === "overview" && draw());
}

function draw() {
  const e = state.execution;
  if (!e) {
    fill($("talk"), h("p.empty", null, "No call was recorded yet."));
    return;
  }
  const admission = state.figures?.admission[e.id];
  const group = state.figures?.groups.find((one) => one.group_id === e.info.group_id);
  const opened = new Set([...$("talk").querySelectorAll("details[open]")].map((el) => el.dataset.reason));
  fill($("talk"), h("div.overview", null,
    section("Training", admitted(admission, group)),
    section(`Kept trajectories (J_max ${e.raw.j_max ?? "none"})`, trajectories(e)),
    section("Left out", excluded(e, opened)),
    section("Verdicts", verdicts(e)),
    section("Workspace states", table(["state", "kind", "digest", "captured"], e.raw.environments.map((one) => [one.state_id, one.kind, one.digest, day(one.captured_at)]))),
    section("Launch", launch(e))));
}

const section = (title, body) => (body ? h("section", null, h("h3", null, title), body) : null);

function admitted(admission, group) {
  if (!admission) return h("p.dim", null, state.figures ? `not judged: ${state.figures.not_judged || "it holds no call"}` : "being counted …");
  if (!admission.admitted) return h("p.bad", null, `not admitted: ${words(admission.reason)}. ${admission.detail}`);
  return h("p", null, `admitted with ${int(admission.owned_tokens)} tokens, reward ${number(admission.reward)}, advantage ${number(admission.advantage)}`,
    group ? `; group ${group.group_id}: mean ${number(group.mean)}, std ${number(group.std)} over ${group.num_valid} of ${group.num_executions}` : "");
}

const number = (x) => (x === null || x === undefined ? "–" : Number(x).toFixed(3));

function trajectories(e) {
  return table(["", "role", "owned tokens", "messages", "ends at"], e.raw.trajectories.map((t) => {
    const call = e.callOfOutput.get(t.leaf);
    return [h("span.tok", { class: `own own-${t.index % 6}` }, ` ${t.index} `), words(t.role), int(t.owned_tokens), int(t.path.filter((id) => e.isMessage(e.index.get(id))).length),
      call ? h("button.flat", { onclick: () => tell("path", call.number) }, `c${call.number}: read the path`) : ""];
  }));
}

function excluded(e, opened) {
  const by = new Map();
  for (const one of e.raw.excluded) by.set(one.reason, [...(by.get(one.reason) || []), one]);
  return by.size ? h("div", null, [...by].map(([reason, rows]) => h("details", { open: opened.has(reason), data: { reason } },
    h("summary", null, `${words(reason)}: ${many(rows.length, "time")}`),
    h("div.brief-list", null, rows.map((one) => {
      const call = one.call_id ? e.callById.get(one.call_id) : e.callOfOutput.get(one.node_id);
      return h("button.brief", { onclick: () => call && tell("select", { call: call.number }) }, h("code", null, call ? `c${call.number}` : ""), h("span.said", null, one.detail));
    }))))) : h("p.dim", null, "nothing");
}

function verdicts(e) {
  return e.raw.scores.length ? table(["evaluator", "status", "value", "at", "detail"], e.raw.scores.map((row) => [
    row.evaluator + (row.evaluator_version ? `@${row.evaluator_version}` : ""), h("span", { class: row.status === "failed" ? "bad" : "" }, row.status),
    row.value === null ? "–" : `${row.value}${row.partial ? " partial" : ""}`, day(row.at), row.detail ? longText(row.detail) : ""])) : h("p.dim", null, "no evaluator has judged it yet");
}

function launch(e) {
  const { info } = e;
  const rows = ["execution_id", "group_id", "task_id", "sample_index", "harness", "harness_version", "dispatch_policy_id", "dispatch_version", "started_at", "ended_at", "end_reason", "launcher", "attributes"]
    .filter((name) => info[name] !== null && info[name] !== undefined).map((name) => [words(name), h("code", null, longText(String(info[name])))]);
  return table(["", ""], rows);
}

function table(heads, rows) {
  if (!rows.length) return null;
  return h("table.plain", null, heads.some(Boolean) ? h("thead", null, h("tr", null, heads.map((head) => h("th", null, head)))) : null,
    h("tbody", null, rows.map((row) => h("tr", null, row.map((value) => h("td", null, value))))));
}
