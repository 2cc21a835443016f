// The selected call as a conversation: what it shares with earlier calls is grey and folded, only the new part is open.

import { boundaryBefore } from "./between.js";
import { $, fill, h } from "./dom.js";
import { amount, int, many } from "./format.js";
import { messageBody, parseMessage } from "./message.js";
import { on, state, tell } from "./store.js";
import { legend, tokenBlock } from "./tokens.js";

const TAIL = 3; // earlier messages that stay in sight above the new part
let opened = new Map(); // node id -> opened or closed by hand
let wide = false; // all earlier messages are listed
let shownCall = null;
let turn = 0; // a later drawing stops an earlier one
let drawn = null; // what the drawing rests on

export function setUpTalk() {
  on("call", () => draw(true));
  on("tokens", () => draw(false));
  on("refreshed", () => drawn !== restsOn() && draw(false));
}

/** What the execution says of the selected call's path, as text: only when it changes is the conversation drawn anew. */
function restsOn() {
  const e = state.execution;
  const call = state.call && e?.call(state.call);
  if (!call) return `${e?.calls.length ?? 0}`;
  const calls = new Set();
  const nodes = e.pathOfCall(call).map((i) => {
    const node = e.nodes[i];
    const from = e.callById.get(node.call_id);
    if (from) calls.add(from);
    return [node, e.ownerOf.get(node.node_id), e.excludedCall.get(node.call_id), (e.pathsThrough.get(node.node_id) || 0) > 1];
  });
  const told = [...calls.add(call)].map((one) => {
    const lane = e.laneOf.get(one.number);
    const agents = (e.started.get(one.number) || []).map(({ agent_id: id, num_calls: count, segments }) => [id, count, segments[0]?.calls[0]]);
    return [one, e.eventOf.get(one.number), e.compactionOf.get(one.call_id), e.segmentOf.get(one.number)?.opening, lane?.title, lane?.spawned_at, agents];
  });
  const meaning = state.tokens && [e.raw.trajectories.map((t) => [t.index, t.role]), e.nodes.some((node) => node.teachers), e.versions];
  return JSON.stringify([nodes, told, e.siblings(call).find((n) => n > call.number), meaning]);
}

/** List all earlier messages, or only the last few. */
export function widen() {
  wide = !wide;
  draw(false);
}

/** Read the path from its first message on. */
export function readPath() {
  wide = true;
  draw(true).then(() => {
    $("talk").scrollTop = 0;
  });
}

/** Draw the conversation of the selected call. */
async function draw(fresh) {
  if (state.tab !== "talk") return;
  const mine = ++turn;
  drawn = restsOn();
  const e = state.execution;
  const box = $("talk");
  const call = state.call && e?.call(state.call);
  if (!call) {
    fill(box, h("p.empty", null, e?.calls.length ? "Choose a call." : "No call was recorded yet. Calls appear here as they are recorded."));
    return;
  }
  if (shownCall !== call.call_id) {
    shownCall = call.call_id;
    opened = new Map();
  }
  const path = e.pathOfCall(call);
  const first = firstNew(e, call, path);
  const parts = await content(e, call, path, first, mine);
  if (mine !== turn || state.tab !== "talk") return; // another part of the page is shown by now
  const kept = box.scrollTop;
  const focused = box.contains(document.activeElement) && document.activeElement.closest("[data-node]")?.dataset.node;
  fill(box, parts);
  if (focused) box.querySelector(`[data-node="${CSS.escape(focused)}"] .card-head`)?.focus({ preventScroll: true });
  box.scrollTop = fresh ? 0 : kept;
  if (fresh) show(box);
}

/** Bring the new part, or the node that was asked for, into view. */
function show(box) {
  const wanted = state.node !== null ? box.querySelector(`[data-node="${CSS.escape(state.execution.nodes[state.node].node_id)}"]`) : null;
  const el = wanted || box.querySelector(".new-from");
  if (el) box.scrollTop = Math.max(0, el.offsetTop - box.offsetTop - (wanted ? 40 : 120));
}

/** Where on the path the part begins that no earlier call had. */
function firstNew(e, call, path) {
  const own = path.findIndex((i) => e.nodes[i].call_id === call.call_id && e.nodes[i].kind === "prompt");
  if (own >= 0) return own;
  for (let at = path.length - 2; at >= 0; at--) if (e.nodes[path[at]].kind === "output") return at + 1;
  return 0;
}

/** What the conversation is made of; null when another drawing began while its texts were fetched. */
async function content(e, call, path, first, mine) {
  const show = path.map((i, at) => ({ i, at })).filter(({ i }) => state.tokens || e.isMessage(i));
  const earlier = show.filter(({ at }) => at < first);
  const fresh = show.filter(({ at }) => at >= first);
  const hidden = wide ? [] : earlier.slice(0, Math.max(0, earlier.length - TAIL));
  const shown = earlier.slice(hidden.length);
  const isOpen = ({ i, at }) => opened.get(e.nodes[i].node_id) ?? (i === state.node || at >= first);
  const need = [...shown, ...fresh].filter(isOpen).map(({ i }) => i);
  const ready = await load(e, need);
  if (mine !== turn) return null;
  const reused = path.slice(0, first).reduce((n, i) => n + e.nodes[i].num_tokens, 0);
  const context = { e, call, ready, isOpen };
  return [
    state.tokens ? h("div.legend", null, legend(e), ready.words?.problem && e.nodes.some((node) => !node.counted) ? h("span.dim", null, `ids without text: ${ready.words.problem}`) : null) : null,
    earlier.length ? h("button.earlier", { onclick: widen, "aria-expanded": wide },
      wide ? "▾ " : "▸ ", `${many(earlier.length, "earlier message")}, ${int(reused)} tokens shared with earlier calls`,
      h("span.dim", null, wide ? " · grey: on other kept trajectories too" : hidden.length ? ` · show ${int(hidden.length)} more` : "")) : null,
    withBoundaries(context, shown, hidden.length ? hidden[hidden.length - 1].i : null),
    h("div.new-from", null, h("span", null, newPart(e, call, path, first))),
    boundaryBefore(e, call),
    fresh.map((item) => card(context, item, false)),
    call.output_node === null ? h("div.nothing.bad", null, `nothing was sampled: ${call.error || call.status}`) : null,
    after(e, call),
  ];
}

function newPart(e, call, path, first) {
  const added = path.slice(first).filter((i) => i !== (call.output_node ? e.index.get(call.output_node) : -1)).reduce((n, i) => n + e.nodes[i].num_tokens, 0);
  return `new in c${call.number}: ${amount(added)} in, ${amount(call.output_tokens)} out`;
}

/** Cards with a line wherever another call begins. */
function withBoundaries(context, items, before) {
  const { e } = context;
  const out = [];
  let last = before === null ? null : e.nodes[before].call_id;
  for (const item of items) {
    const id = e.nodes[item.i].call_id;
    if (id !== last) {
      const call = e.callById.get(id);
      if (call) {
        out.push(h("button.call-line", { onclick: () => tell("select", { call: call.number }), title: "Go to this call" },
          h("code", null, `c${call.number}`), h("span", null, `${call.agent_role}  ${amount(call.prompt_tokens)} in, ${amount(call.output_tokens)} out`)));
        out.push(boundaryBefore(e, call, true));
      }
    }
    last = id;
    out.push(card(context, item, !wide || (e.pathsThrough.get(e.nodes[item.i].node_id) || 0) > 1));
  }
  return out;
}

/** One message: a line when folded, whole when open. */
function card(context, item, shared) {
  const { e, isOpen } = context;
  const node = e.nodes[item.i];
  const open = isOpen(item);
  const said = e.preview(item.i);
  const head = h("button.card-head", {
    "aria-expanded": open,
    onclick: () => {
      opened.set(node.node_id, !open);
      draw(false);
    },
  },
  h("span.tag", { class: `who-${node.message_role}` }, node.kind === "generation_prompt" ? "template" : node.message_role || node.author),
  ...badges(e, node),
  open ? null : [said?.tools.map((name) => h("span.tool", null, name)), h("span.said", null, said?.line ?? "")],
  h("span.grow"), h("span.num", null, `${int(node.num_tokens)} tok`));
  return h("article.card", { data: { node: node.node_id }, class: `by-${node.message_role}${shared ? " shared" : ""}${open ? " open" : ""}${item.i === state.node ? " target" : ""}` },
    head, open ? h("div.card-body", null, body(context, item)) : null);
}

function badges(e, node) {
  const out = [];
  if (node.copy_of) {
    const source = e.index.get(node.copy_of);
    const from = source === undefined ? null : e.callById.get(e.nodes[source].call_id);
    out.push(h("span.tag.cut", { title: "a copy of a sampled turn: context only" }, `copy${from ? ` of c${from.number}` : ""}`));
  }
  if (node.redacted) out.push(h("span.tag.badtag", null, `redacted: ${node.redacted.join(", ")}`));
  if (node.counted) out.push(h("span.tag", { title: "a local count; ids are not known" }, "counted"));
  const owner = e.ownerOf.get(node.node_id);
  if (owner !== undefined) out.push(h("span.tag", { class: `own own-${owner % 6}`, title: "trained in this trajectory" }, `trained ${owner}`));
  else if (node.kind === "output") {
    const why = e.excludedCall.get(node.call_id);
    out.push(h("span.tag", { title: why?.detail || "no kept trajectory owns it" }, `not trained${why ? `: ${why.reason.replaceAll("_", " ")}` : ""}`));
  }
  return out;
}

function body({ e, ready }, { i }) {
  if (state.tokens) return tokenBlock(e, i, ready.tokens.get(e.nodes[i].node_id), ready.words);
  const ids = e.blobs(i);
  if (!ids.length) return h("div.dim", null, `${many(e.nodes[i].num_tokens, "token")}; no text was recorded for it (tokens: t)`);
  const agents = e.nodes[i].kind === "output" ? startedBy(e, e.nodes[i]) : [];
  return ids.map((id) => {
    const message = parseMessage(ready.texts.get(id));
    if (!message) return h("div.bad", null, `text ${id.slice(0, 8)} cannot be read; see gyre verify`);
    return messageBody(message, (tool, place) => childLink(e, tool, place, agents, message.tool_calls.length));
  });
}

function startedBy(e, node) {
  const call = e.callOfOutput.get(node.node_id);
  return call ? e.started.get(call.number) || [] : [];
}

/** From a task call to the agent that it started. */
function childLink(e, tool, place, agents, numTools) {
  const mine = agents.filter((lane) => {
    const wanted = e.raw.sub_agents.find((one) => one.agent_id === lane.agent_id)?.spawned_by_tool_call;
    return wanted ? wanted === tool.id : agents.length === numTools ? agents.indexOf(lane) === place : place === 0;
  });
  return mine.map((lane) => h("button.jump", { onclick: () => tell("select", { call: lane.segments[0].calls[0] }) },
    `→ sub-agent ${lane.agent_id ?? ""}: ${many(lane.num_calls, "call")}`));
}

/** What went on from here. */
function after(e, call) {
  const lane = e.laneOf.get(call.number);
  const next = e.siblings(call).find((n) => n > call.number);
  const agents = (e.started.get(call.number) || []).filter((one) => one.segments.length);
  return h("div.after", null,
    agents.map((one) => h("button.jump", { onclick: () => tell("select", { call: one.segments[0].calls[0] }) }, `→ sub-agent ${one.agent_id ?? ""}: ${many(one.num_calls, "call")}`)),
    lane && next ? h("button.flat", { onclick: () => tell("select", { call: next }) }, `next: c${next} ›`) : null);
}

async function load(e, places) {
  if (!state.tokens) return { texts: await state.source.texts(places.flatMap((i) => e.blobs(i))) };
  const tokens = await state.source.tokens(e, places.map((i) => e.nodes[i]));
  const ids = new Set();
  for (const { ids: some } of tokens.values()) for (const id of some) ids.add(id);
  return { tokens, words: await state.source.vocabulary([...ids]) };
}
