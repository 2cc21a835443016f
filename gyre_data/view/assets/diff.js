// Two paths side by side: what both hold, where they part, how they ended. Of one execution or of two of a task.

import { align, wordsOf } from "./align.js";
import { $, fill, h } from "./dom.js";
import { amount, int, many, words } from "./format.js";
import { allText, longText, parseMessage } from "./message.js";
import { Execution } from "./model.js";
import { on, state, tell } from "./store.js";

const LONG = 6000; // words beyond which two texts are compared line by line
let drawing = 0; // a later drawing stops an earlier one
let drawn = []; // what the drawing rests on

export function setUpDiff() {
  on("call mark tab", () => state.tab === "diff" && draw());
  on("refreshed run", () => state.tab === "diff" && restsOn().some((one, i) => one !== drawn[i]) && draw());
}

/** The execution at hand and what is known of the marked one, or of all that could be compared with. */
function restsOn() {
  const { executions } = state.run;
  return [state.execution?.raw, state.mark ? executions.find((one) => one.execution_id === state.mark.execution)?.num_rows : executions];
}

async function draw() {
  const mine = ++drawing;
  drawn = restsOn();
  const box = $("talk");
  if (!state.call) return fill(box, h("p.empty", null, "Choose a call."));
  if (!state.mark) {
    return fill(box, h("div.empty", null, h("p", null, "Mark one call (d), go to another, of any execution, and press d again: their paths are compared message by message."), suggestions()));
  }
  const e = state.execution;
  const other = state.mark.execution === e.id ? e : new Execution(await state.source.execution(state.mark.execution));
  if (mine !== drawing) return undefined;
  const left = await side(other, other.callById.get(state.mark.id));
  const right = await side(e, e.call(state.call));
  if (mine !== drawing || state.tab !== "diff") return undefined;
  const pairs = align(left.keys, right.keys);
  const common = pairs.filter((p) => p.a !== null && p.b !== null).length;
  const kept = box.scrollTop;
  fill(box,
    h("div.two.heads", null, head(left), head(right)),
    h("div.line.dim", null, `${many(common, "message")} in both, ${int(left.keys.length - common)} only on the left, ${int(right.keys.length - common)} only on the right`,
      h("span.grow"), h("button.flat", { onclick: () => tell("unmark") }, "Clear the mark")),
    rows(left, right, pairs));
  box.scrollTop = kept;
  return box;
}

/** Other leaves of this execution, and other executions of the task: what a person would compare with. */
function suggestions() {
  const e = state.execution;
  const mine = e.raw.trajectories.map((t) => e.callOfOutput.get(t.leaf)).filter((call) => call && call.number !== state.call);
  const rest = state.run.executions.filter((one) => one.execution_id !== e.id && one.num_calls && one.task_id === e.info.task_id && e.info.task_id !== null);
  return h("div.line", null,
    mine.map((call) => h("button.flat", { onclick: () => tell("compare-with", { execution: e.id, call: call.number, id: call.call_id }) }, `with trajectory ending at c${call.number}`)),
    rest.slice(0, 16).map((one) => h("button.flat", {
      onclick: async () => {
        const loaded = new Execution(await state.source.execution(one.execution_id));
        const last = [...loaded.calls].reverse().find((call) => call.agent_role === "main" && call.output_node) || loaded.calls[loaded.calls.length - 1];
        tell("compare-with", { execution: one.execution_id, call: last.number, id: last.call_id });
      },
    }, `with #${one.sample_index ?? one.execution_id}${one.score === null ? "" : ` (${one.score.toFixed(2)})`}`)));
}

async function side(e, call) {
  const path = e.pathOfCall(call).filter((i) => e.isMessage(i));
  const texts = await state.source.texts(path.flatMap((i) => e.blobs(i)));
  const keys = path.map((i) => (e.blobs(i).length ? e.blobs(i).join() : e.nodes[i].node_id));
  const said = path.map((i) => e.blobs(i).map((id) => allText(parseMessage(texts.get(id)))).join("\n"));
  return { e, call, path, keys, said };
}

function head({ e, call }) {
  const { info, raw } = e;
  const scored = raw.scores.filter((row) => row.status === "scored");
  return h("div.card", null, h("div.line", null, h("b", null, `${info.task_id ?? info.execution_id}${info.sample_index === null ? "" : ` #${info.sample_index}`} c${call.number}`), h("code.dim", null, info.execution_id)),
    h("div.line", null, h("span", null, raw.running ? "running" : words(info.end_reason)),
      scored.map((row) => h("span.score.mid", null, `${row.value.toFixed(2)} ${row.evaluator}${row.partial ? " partial" : ""}`)), scored.length ? null : h("span.dim", null, "no score"),
      h("span.dim", null, `context ${amount(e.context(call))}, ${words(call.agent_role)}`)));
}

/** Runs of equal messages fold; messages of one role that face each other are compared word by word. */
function rows(left, right, pairs) {
  const out = [];
  for (let at = 0; at < pairs.length;) {
    let to = at;
    const equal = pairs[at].a !== null && pairs[at].b !== null;
    while (to < pairs.length && (pairs[to].a !== null && pairs[to].b !== null) === equal) to++;
    const run = pairs.slice(at, to);
    if (equal) out.push(same(left, run));
    else out.push(...facing(left, right, run.filter((p) => p.a !== null).map((p) => p.a), run.filter((p) => p.b !== null).map((p) => p.b)));
    at = to;
  }
  return out;
}

function same(left, run) {
  const tokens = run.reduce((n, p) => n + left.e.nodes[left.path[p.a]].num_tokens, 0);
  const box = h("details.same", null, h("summary", null, `${many(run.length, "equal message")}, ${amount(tokens)} tokens`));
  box.addEventListener("toggle", () => {
    if (box.open && box.children.length === 1) box.append(...run.map((p) => brief(left, p.a)));
  });
  return box;
}

function brief(one, place) {
  const i = one.path[place];
  const said = one.e.preview(i);
  return h("div.brief", null, h("span.tag", { class: `who-${one.e.nodes[i].message_role}` }, one.e.nodes[i].message_role), said?.tools.map((name) => h("span.tool", null, name)), h("span.said", null, said?.line));
}

function facing(left, right, a, b) {
  const out = [];
  for (let k = 0; k < Math.max(a.length, b.length); k++) {
    const [l, r] = [a[k], b[k]];
    const both = l !== undefined && r !== undefined && role(left, l) === role(right, r);
    const marks = both ? compare(left.said[l], right.said[r]) : [null, null];
    out.push(h("div.two", null, cell(left, l, marks[0]), cell(right, r, marks[1])));
  }
  return out;
}

const role = (one, place) => one.e.nodes[one.path[place]].message_role;

function cell(one, place, marks) {
  if (place === undefined) return h("div.card.none");
  const node = one.e.nodes[one.path[place]];
  const call = one.e.callById.get(node.call_id);
  return h("div.card", { class: `by-${node.message_role}` },
    h("div.line", null, h("span.tag", { class: `who-${node.message_role}` }, node.message_role), h("code.dim", null, call ? `c${call.number}` : ""), h("span.grow"), h("span.num", null, `${int(node.num_tokens)} tok`)),
    h("div.card-body.mono", null, marks || longText(one.said[place] || "no text was recorded")));
}

/** Both texts with what only one of them has marked. */
function compare(a, b) {
  const split = Math.max(a.length, b.length) > 4 * LONG ? (text) => text.match(/[^\n]*\n|[^\n]+$/g) || [] : wordsOf;
  const [x, y] = [split(a), split(b)];
  const outs = [[], []];
  const push = (side, text, changed) => {
    const last = outs[side][outs[side].length - 1];
    if (last && last.changed === changed) last.text += text;
    else outs[side].push({ text, changed });
  };
  for (const pair of align(x, y)) {
    const equal = pair.a !== null && pair.b !== null;
    if (pair.a !== null) push(0, x[pair.a], !equal);
    if (pair.b !== null) push(1, y[pair.b], !equal);
  }
  return outs.map((parts, which) => parts.map(({ text, changed }) => (changed ? h(which ? "ins" : "del", null, text) : context(text))));
}

/** Equal text between changes, its middle folded when it is long. */
const context = (text) => (text.length > 700 ? [text.slice(0, 300), h("button.more", { onclick: (event) => event.target.replaceWith(text.slice(300, -300)) }, `… ${int(text.length - 600)} equal characters …`), text.slice(-300)] : text);
