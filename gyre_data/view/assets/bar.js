// The line above the conversation: which call this is, what went in and out, and what one can do with it.

import { $, fill, h } from "./dom.js";
import { amount, int, took, words } from "./format.js";
import { on, state, tell } from "./store.js";
import { COLOURS } from "./tokens.js";

let drawn = null; // what the drawing rests on

export function setUpBar() {
  on("call tab tokens side mark", draw);
  on("refreshed training", () => drawn !== restsOn() && draw());
}

/** What is told of the selected call, as text: a list that is open, or the focus, stays while the run goes on. */
function restsOn() {
  const e = state.execution;
  const call = state.call && e?.call(state.call);
  return JSON.stringify([call, call && fresh(e, call), state.mark, state.training !== null]);
}

function draw() {
  drawn = restsOn();
  const e = state.execution;
  if (!e && !state.training) return;
  const call = state.call && e?.call(state.call);
  fill($("bar"), call ? about(e, call) : null, h("div.line.tools", null, tabs(), h("span.grow"), call ? tools() : null));
  $("talk").hidden = false;
}

function about(e, call) {
  const reused = call.prompt_tokens === null ? null : call.prompt_tokens - fresh(e, call);
  const fault = e.fault(call);
  return h("div.line.about", null,
    h("h2", null, `c${call.number}`), h("span", { class: call.agent_role === "unknown" ? "bad" : "" }, words(call.agent_role)),
    fault ? h("span.bad.fault", { title: fault }, fault) : null,
    h("span", { title: `${int(call.prompt_tokens)} tokens in the prompt` }, h("b", null, amount(call.prompt_tokens)), " in"),
    reused !== null ? h("span.dim", null, `${amount(reused)} reused`) : null,
    h("span", null, h("b", null, amount(call.output_tokens)), " out"),
    h("span", { class: call.trained_tokens ? "trained" : "dim" }, call.trained_tokens ? `${amount(call.trained_tokens)} trained` : "not trained"),
    h("span.dim", null, took(e.took(call))), call.finish_reason ? h("span.dim", null, call.finish_reason) : null,
    h("span.dim", null, call.delivery || "delivery unknown"));
}

function fresh(e, call) {
  return (e.nodesOfCall.get(call.call_id) || []).filter((i) => e.nodes[i].node_id !== call.output_node).reduce((n, i) => n + e.nodes[i].num_tokens, 0);
}

const TABS = { talk: "Conversation", diff: "Compare", overview: "Execution", steps: "Steps" };

function tabs() {
  return h("div.tabs", { role: "tablist", "aria-label": "What to show" }, Object.entries(TABS).filter(([name]) => name !== "steps" || state.training).map(([name, title]) =>
    h("button", { role: "tab", "aria-selected": state.tab === name, class: state.tab === name ? "on" : "", onclick: () => tell("show", name) }, title)));
}

function tools() {
  const talk = state.tab === "talk";
  return [
    talk && state.tokens ? h("select", { "aria-label": "Colour of tokens", id: "colour", onchange: (event) => tell("colour", event.target.value) },
      Object.entries(COLOURS).map(([name, title]) => h("option", { value: name, selected: name === state.colour }, title))) : null,
    talk ? h("button.flat", { "aria-pressed": state.tokens, id: "b-tokens", title: "Texts or tokens (t)", onclick: () => tell("switch-tokens") }, "Tokens") : null,
    h("button.flat", { title: "Mark this call, then compare another with it (d)", onclick: () => tell("compare") }, state.mark ? `Compare with c${state.mark.call}` : "Mark"),
    h("button.flat", { "aria-pressed": state.side, id: "b-side", title: "Where this call comes from (i)", onclick: () => tell("switch-side") }, "Provenance"),
  ];
}
