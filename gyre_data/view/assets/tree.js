// The tree of calls: agents, runs of calls, what happened between them. Any part folds into its totals.

import { $, fill, h } from "./dom.js";
import { amount, clip, int, many, took, words } from "./format.js";
import { callsOf, laneName } from "./model.js";
import { on, state, tell } from "./store.js";
import { VirtualList } from "./virtual.js";

const ROW = 26;
const folded = new Map(); // execution id -> Map of row key -> folded?
let list = null;
let rows = [];

export function setUpTree() {
  const box = $("tree");
  list = new VirtualList(box, ROW, element);
  fill($("tree-head"), h("span.grow", null, "Calls"), h("span.num", { title: "distinct tokens added" }, "tokens"),
    h("span.num", { title: "of these, trained" }, "trained"), h("span.num", { title: "time spent in calls" }, "time"));
  box.addEventListener("keydown", key);
  on("execution", () => { list.box.scrollTop = 0; draw(true); });
  on("refreshed", () => draw(false));
  on("call", () => draw(true));
}

const marks = () => {
  const id = state.execution.id;
  if (!folded.has(id)) folded.set(id, new Map());
  return folded.get(id);
};

function isFolded(row) {
  const told = marks().get(row.key);
  return told === undefined ? row.foldAtFirst : told;
}

/** Every row in order, folded parts left out. */
function build() {
  const e = state.execution;
  const out = [];
  const visit = (row, level, parent) => {
    row.level = level;
    row.parent = parent;
    out.push(row);
    if (row.children.length && !isFolded(row)) row.children.forEach((child) => visit(child, level + 1, row));
  };
  e.lanes.forEach((lane) => visit(laneRow(e, lane), 1, null));
  return out;
}

function laneRow(e, lane) {
  const segments = lane.segments.map((segment) => segmentRow(e, lane, segment));
  const only = segments.length === 1 && !lane.segments[0].opening;
  return parentRow(`lane:${lane.kind}:${lane.agent_id}`, "lane", { lane }, only ? segments[0].children : segments,
    lane.kind === "sub_agent" && callsOfLane(lane) > 8);
}

const callsOfLane = (lane) => lane.num_calls;

function segmentRow(e, lane, segment) {
  const children = callsOf(segment).map((n) => callRow(e, n));
  const placed = new Set(callsOf(segment));
  for (const agent of segment.agents) {
    const host = placed.has(agent.spawned_at) ? children.find((row) => row.call === agent.spawned_at) : null;
    const row = laneRow(e, agent);
    if (host) children.splice(children.indexOf(host) + 1 + trailing(children, host), 0, row);
    else children.push(row);
  }
  return parentRow(`segment:${lane.kind}:${lane.agent_id}:${segment.number}`, "segment", { lane, segment }, children, false);
}

/** Agents already put behind a call: another goes after them. */
function trailing(children, host) {
  let n = 0;
  for (let at = children.indexOf(host) + 1; at < children.length && children[at].kind === "lane"; at++) n++;
  return n;
}

function callRow(e, n) {
  const call = e.call(n);
  const nodes = (e.nodesOfCall.get(call.call_id) || []).filter((i) => e.isMessage(i)).map((i) => ({
    key: `node:${e.nodes[i].node_id}`, kind: "node", node: i, call: n, children: [], foldAtFirst: false,
    total: { calls: 0, tokens: e.nodes[i].num_tokens, trained: e.ownerOf.has(e.nodes[i].node_id) ? e.nodes[i].num_tokens : 0, seconds: null },
  }));
  return {
    key: `call:${call.call_id}`, kind: "call", call: n, children: nodes, foldAtFirst: true,
    total: { calls: 1, tokens: call.distinct_tokens, trained: call.trained_tokens, seconds: e.took(call) },
  };
}

function parentRow(key, kind, more, children, foldAtFirst) {
  const total = { calls: 0, tokens: 0, trained: 0, seconds: 0, rows: 0 };
  for (const child of children) {
    total.calls += child.total.calls;
    total.tokens += child.total.tokens;
    total.trained += child.total.trained;
    total.seconds += child.total.seconds || 0;
  }
  return { key, kind, children, foldAtFirst, total, ...more };
}

/** Draw the rows; `follow` brings the selected one into view, out of what hides it when it is a call. */
function draw(follow) {
  if (!state.execution) return;
  if (follow && !/^(lane|segment):/.test(state.row || "")) openTo(state.call, state.node);
  rows = build();
  const active = rows.findIndex(isActive);
  list.set(rows, active);
  const box = list.box;
  box.setAttribute("aria-activedescendant", active >= 0 ? `row-${active}` : "");
  if (follow && active >= 0) list.reveal(active);
}

function isActive(row) {
  if (state.row) return row.key === state.row;
  return row.kind === "call" && row.call === state.call;
}

/** Unfold what hides the selected call. */
function openTo(number, node) {
  if (!number) return;
  const e = state.execution;
  for (let lane = e.laneOf.get(number), n = number; lane; n = lane.spawned_at, lane = lane.parent) {
    marks().set(`lane:${lane.kind}:${lane.agent_id}`, false);
    const segment = e.segmentOf.get(n);
    if (segment) marks().set(`segment:${lane.kind}:${lane.agent_id}:${segment.number}`, false);
  }
  if (node !== null && state.row?.startsWith("node:")) marks().set(`call:${e.call(number).call_id}`, false);
}

function element(row, place) {
  const on = place === list.active;
  const isFold = row.children.length > 0;
  return h("div.row", {
    id: `row-${place}`, role: "treeitem", class: `${row.kind}${on ? " on" : ""}`,
    "aria-level": row.level, "aria-selected": on, "aria-expanded": isFold ? !isFolded(row) : null,
    onclick: (event) => {
      if (event.target.closest(".fold")) fold(row, !isFolded(row));
      else {
        pick(row);
        if (row.call && innerWidth <= 600) $("detail").scrollIntoView(); // below the tree on a phone
      }
    },
    style: { "--level": row.level - 1 },
  },
  h("span.fold", { "aria-hidden": "true" }, isFold ? (isFolded(row) ? "▸" : "▾") : ""),
  label(row),
  h("span.num", { title: int(row.total.tokens) }, amount(row.total.tokens)),
  h("span.num.trained", { title: int(row.total.trained) }, row.total.trained ? amount(row.total.trained) : ""),
  h("span.num", null, row.total.seconds === null ? "" : took(row.total.seconds)));
}

function label(row) {
  const e = state.execution;
  if (row.kind === "lane") {
    const never = row.lane.kind === "side" || row.lane.kind === "unknown";
    return h("span.label", null, h("span.dot", { class: `role-${row.lane.kind}` }), h(row.lane.kind === "unknown" ? "b.bad" : "b", null, laneName(row.lane)),
      h("span.dim", null, many(row.total.calls, "call")), never ? h("span.dim", null, "never trained") : null,
      row.lane.title ? h("span.said", { title: row.lane.title }, row.lane.title) : null);
  }
  if (row.kind === "segment") return h("span.label", null, ...opening(row.segment, row.total));
  if (row.kind === "node") {
    const said = e.preview(row.node);
    const node = e.nodes[row.node];
    return h("span.label", null, h("span.tag", { class: `who-${node.message_role}` }, node.message_role || node.kind), said ? says(said) : h("span.dim", null, many(node.num_tokens, "token")));
  }
  const call = e.call(row.call);
  const event = e.eventOf.get(row.call);
  const output = call.output_node === null ? null : e.preview(e.index.get(call.output_node));
  const fault = e.fault(call);
  return h("span.label", null,
    h("code", { class: event?.kind === "retry" ? "gone" : "" }, `c${row.call}`),
    fault ? h("span.bad", null, clip(fault, 40)) : null,
    event?.taken_over_by ? h("span.dim", null, `c${event.taken_over_by} took over`) : null,
    call.agent_role.endsWith("summary") ? h("span.tag.cut", null, "summary") : null,
    output ? says(output) : null);
}

function says(said) {
  const tools = said.tools.length ? said.tools.map((name) => h("span.tool", null, name)) : [];
  return [tools, h("span.said", { title: said.line }, said.line)];
}

/** What began a run of calls, in words. */
export function opening(segment, total) {
  const numbers = callsOf(segment);
  const span = `c${numbers[0]}${numbers.length > 1 ? `–c${numbers[numbers.length - 1]}` : ""}`;
  const how = segment.opening;
  const count = h("span.dim", null, total ? many(total.calls, "call") : "");
  if (!how) return [h("b", null, span), count];
  if (how.kind === "compaction") {
    return [h("span.tag.cut", null, "compaction"), h("span", null, `${amount(how.tokens_before)} → ${amount(how.tokens_after)}`), h("b", null, span), count];
  }
  if (how.kind === "summary") return [h("span.tag.cut", null, "summary"), h("b", null, span), count];
  if (how.kind === "conversation") return [h("span.tag", null, "conversation"), h("b", null, span), count];
  const what = how.false ? h("span.tag.badtag", null, "FALSE fork") : h("span.tag", null, `fork${how.at ? ` @c${how.at}` : ""}`);
  const why = how.false ? how.check : how.reason ? words(how.reason) : "";
  return [what, h("b", null, span), h("span", null, why), how.tokens_lost ? h("span.dim", null, `${amount(how.tokens_lost)} not reused`) : null, count];
}

function pick(row) {
  state.row = row.key;
  if (row.kind === "call") tell("select", { call: row.call, row: row.key });
  else if (row.kind === "node") tell("select", { call: row.call, node: row.node, row: row.key });
  else draw(true);
}

function fold(row, closed) {
  marks().set(row.key, closed);
  draw(false);
}

/** Fold or unfold everything. */
export function foldAll(closed) {
  if (!state.execution) return;
  const visit = (row) => {
    if (row.children.length) marks().set(row.key, closed && row.kind !== "call" ? row.level !== 0 : row.kind === "call" || closed);
    row.children.forEach(visit);
  };
  state.execution.lanes.forEach((lane) => visit(laneRow(state.execution, lane)));
  draw(false);
}

/** The keys of an ARIA tree. */
function key(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || !rows.length) return;
  const at = Math.max(0, rows.findIndex(isActive));
  const row = rows[at];
  const page = Math.max(1, Math.floor(list.box.clientHeight / ROW) - 1);
  const to = { ArrowDown: at + 1, ArrowUp: at - 1, Home: 0, End: rows.length - 1, PageDown: at + page, PageUp: at - page }[event.key];
  if (to !== undefined) pick(rows[Math.min(rows.length - 1, Math.max(0, to))]);
  else if (event.key === "ArrowRight" && row.children.length) {
    if (isFolded(row)) fold(row, false);
    else pick(rows[at + 1]);
  } else if (event.key === "ArrowLeft") {
    if (row.children.length && !isFolded(row)) fold(row, true);
    else if (row.parent) pick(row.parent);
  } else if (event.key === "Enter" || event.key === " ") {
    if (row.kind === "call" || row.kind === "node") $("talk").focus();
    else fold(row, !isFolded(row));
  } else return;
  event.preventDefault();
  event.stopPropagation();
}
