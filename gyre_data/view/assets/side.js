// Where a call comes from: every recorded fact of it, asked for and used side by side, down to the raw request.

import { $, fill, h } from "./dom.js";
import { clock, day, int, seconds, took, words } from "./format.js";
import { longText } from "./message.js";
import { on, state, tell } from "./store.js";

let drawn = null; // what the drawing rests on

export function setUpSide() {
  on("call side", draw);
  on("refreshed", () => drawn !== restsOn() && draw());
}

/** What the execution says of the selected call, as text: what was opened stays open until that changes. */
function restsOn() {
  const e = state.execution;
  const call = state.call && e?.call(state.call);
  if (!call) return null;
  const output = call.output_node && e.nodes[e.index.get(call.output_node)];
  return JSON.stringify([call, output?.versions, e.excludedCall.get(call.call_id), e.raw.environments, e.raw.scores]);
}

function draw() {
  drawn = restsOn();
  const box = $("side");
  box.hidden = !state.side;
  document.body.classList.toggle("with-side", state.side);
  const e = state.execution;
  const call = state.call && e?.call(state.call);
  if (!call) fill(box);
  if (!state.side || !call) return;
  const output = call.output_node ? e.nodes[e.index.get(call.output_node)] : null;
  const excluded = e.excludedCall.get(call.call_id);
  fill(box,
    h("div.pane-head", null, h("span.grow", null, `Provenance of c${call.number}`), h("button.icon", { "aria-label": "Close", onclick: () => tell("switch-side") }, "×")),
    facts("Call", [
      ["id", h("code", null, call.call_id)], ["role", `${call.agent_role} (known by ${call.role_source})`],
      ["agent", call.agent_id], ["parent agent", call.parent_agent_id],
      ["wire", call.wire], ["client", call.client], ["path", call.request_path],
      ["went on as", [call.extension, call.branch_reason].filter(Boolean).join(", ")], ["check", call.fork_check], ["note", call.note],
      ["continues", link(e, call.continues_from)], ["status", call.error ? `${call.status}: ${call.error}` : call.status],
      ["delivery", call.delivery || "unknown"],
    ]),
    facts("Time", [
      ["started", day(call.started_at)], ["first token", call.first_token_at && `${clock(call.first_token_at)}  after ${took(seconds(call.started_at, call.first_token_at))}`],
      ["ended", call.ended_at && `${clock(call.ended_at)}  after ${took(e.took(call))}`],
    ]),
    facts("Tokens", [
      ["prompt", int(call.prompt_tokens)], ["from prefix cache", call.cached_tokens], ["output", int(call.output_tokens)],
      ["trained", int(call.trained_tokens)], ["why not", excluded && `${words(excluded.reason)}: ${excluded.detail}`],
      ["finish", [call.finish_reason, call.stop_reason].filter(Boolean).join(", told as ")],
    ]),
    sampling(call),
    facts("Weights and engines", [
      ...(output?.versions || []).map(([name, start, end]) => [name, `tokens ${int(start)} to ${int(end)}`]),
      ...call.attempts.map((a) => [a.engine, `tokens ${int(a.start)} to ${int(a.end)}${a.rollout_precision ? `, ${a.rollout_precision}` : ""}${a.error ? `; ${a.error}` : ""}`]),
      ["log-probs", call.logprob_convention], ["upstream", call.upstream], ["served model", call.served_model],
      ["HTTP status", call.http_status], ["provider's id", call.provider_request_id],
    ]),
    json("Provider usage", call.provider_usage),
    environment(e, call),
    scores(e),
    json("Headers (allow-listed)", call.request_headers),
    lazy("Raw request", call.request_blobs, e, true), lazy("Tools", call.tools_blob === undefined ? null : [call.tools_blob], e, true), lazy("Raw reply", call.response_blobs, e, true));
}

function link(e, id) {
  const call = id && e.callById.get(id);
  return call ? h("button.flat", { onclick: () => tell("select", { call: call.number }) }, `c${call.number}`) : id;
}

function facts(title, rows) {
  const known = rows.filter(([, value]) => value !== null && value !== undefined && value !== "" && value !== false);
  return known.length ? h("section", null, h("h3", null, title), h("dl.facts", null, known.map(([name, value]) => [h("dt", null, name), h("dd", null, value)]))) : null;
}

/** What the client asked for beside what was used. */
function sampling(call) {
  const asked = parsed(call.sampling_asked);
  const used = parsed(call.sampling_used);
  const names = [...new Set([...Object.keys(asked), ...Object.keys(used)])].sort();
  if (!names.length) return null;
  const text = (value) => (value === undefined ? "–" : typeof value === "string" ? value : JSON.stringify(value));
  return h("section", null, h("h3", null, "Sampling"), h("table.asked", null,
    h("thead", null, h("tr", null, h("th", null, ""), h("th", null, "asked"), h("th", null, "used"))),
    h("tbody", null, names.map((name) => h("tr", { class: name in asked && name in used && text(asked[name]) !== text(used[name]) ? "differs" : "" },
      h("th", null, name), h("td", null, text(asked[name])), h("td", null, text(used[name])))))));
}

function parsed(text) {
  try {
    const value = JSON.parse(text || "{}");
    return value && typeof value === "object" ? value : {};
  } catch {
    return {};
  }
}

function environment(e, call) {
  const found = e.raw.environments.find((one) => one.state_id === call.environment_state_id);
  if (!call.environment_state_id) return null;
  return facts("Workspace before it", [["state", h("code", null, call.environment_state_id)], ["kind", found?.kind], ["digest", found && h("code", null, found.digest)], ["captured", found && day(found.captured_at)], ["lies at", found?.location]]);
}

function scores(e) {
  return facts("Scores of the execution", e.raw.scores.map((row) => [
    row.evaluator + (row.evaluator_version ? `@${row.evaluator_version}` : ""),
    [row.status === "scored" ? `${row.value}${row.partial ? " partial" : ""}` : h("span", { class: row.status === "failed" ? "bad" : "" }, row.status), row.detail ? h("div.dim", null, longText(row.detail)) : null]]));
}

function json(title, text) {
  if (!text) return null;
  return h("details", null, h("summary", null, title), h("pre", null, longText(pretty(text))));
}

/** The text of blobs, fetched when opened: pieces end to end are the exact bytes. */
function lazy(title, numbers, e, isJson) {
  if (!numbers || !numbers.length) return null;
  const box = h("details", null, h("summary", null, title));
  box.addEventListener("toggle", async () => {
    if (!box.open || box.children.length > 1) return;
    const ids = numbers.map((n) => e.raw.blobs[n]);
    const texts = await state.source.texts(ids);
    const missing = ids.filter((id) => texts.get(id) === null);
    const whole = ids.map((id) => texts.get(id) ?? "").join("");
    box.append(h("div.line", null, h("span.dim", null, `${int(whole.length)} characters as received`), missing.length ? h("span.bad", null, `${int(missing.length)} pieces cannot be read`) : null,
      h("button.flat", { onclick: () => navigator.clipboard?.writeText(whole) }, "Copy")), h("pre", null, longText(isJson ? pretty(whole) : whole)));
  });
  return box;
}

function pretty(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 1);
  } catch {
    return text;
  }
}
