// What a compaction did: the note it wrote, what was dropped, what was carried over, and how large it was before.

import { h } from "./dom.js";
import { amount, int, many } from "./format.js";
import { messageBody, parseMessage } from "./message.js";
import { state, tell } from "./store.js";

/** A card that stands where a conversation goes on from a summary of itself. */
export function compactionCard(execution, call) {
  const told = execution.compactionOf.get(call.call_id);
  const { dropped, carried } = difference(execution, call);
  const summary = told.summary_call ? execution.callById.get(told.summary_call) : null;
  const lost = dropped.reduce((n, i) => n + execution.nodes[i].num_tokens, 0);
  const kept = carried.reduce((n, i) => n + execution.nodes[i].num_tokens, 0);
  return h("section.boundary", { "aria-label": "Compaction" },
    h("div.line", null, h("span.tag.cut", null, "compaction"),
      h("b", null, `${amount(told.tokens_before)} → ${amount(told.tokens_after)} tokens`),
      h("span.dim", null, `summary ${amount(told.summary_tokens)}, copied turns ${amount(told.copied_tokens)}`),
      h("span.grow"),
      summary ? h("button.flat", { onclick: () => tell("select", { call: summary.number }) }, `c${summary.number} wrote the summary`) : null),
    summary ? note(execution, summary) : h("div.dim", null, "the call that wrote the summary is not known"),
    list(execution, `dropped: ${many(dropped.length, "message")}, ${int(lost)} tokens`, dropped),
    list(execution, `carried over: ${many(carried.length, "message")}, ${int(kept)} tokens`, carried));
}

/** Messages of the path before that the path after no longer holds, and those it does. */
function difference(execution, call) {
  const before = previous(execution, call);
  const now = new Set(execution.pathOfCall(call));
  const copied = new Set([...now].map((i) => execution.nodes[i].copy_of).filter(Boolean));
  const texts = new Set([...now].flatMap((i) => execution.nodes[i].messages || []));
  const dropped = [];
  const carried = [];
  for (const i of before ? execution.pathOfCall(before) : []) {
    if (!execution.isMessage(i)) continue;
    const node = execution.nodes[i];
    const same = (node.messages || []).length > 0 && node.messages.every((m) => texts.has(m));
    (now.has(i) || copied.has(node.node_id) || same ? carried : dropped).push(i);
  }
  return { dropped, carried };
}

/** The last call of the same lane before, that was no summary. */
function previous(execution, call) {
  const numbers = execution.siblings(call).filter((n) => n < call.number).reverse();
  return numbers.map((n) => execution.call(n)).find((one) => !one.agent_role.endsWith("summary") && one.prompt_node) || null;
}

function note(execution, summary) {
  const box = h("details.note", null, h("summary", null, "the full note"));
  box.addEventListener("toggle", async () => {
    if (!box.open || box.children.length > 1) return;
    const ids = summary.output_node ? execution.blobs(execution.index.get(summary.output_node)) : [];
    const texts = await state.source.texts(ids);
    const messages = ids.map((id) => parseMessage(texts.get(id))).filter(Boolean);
    box.append(h("div.card-body", null, messages.length ? messages.map((message) => messageBody(message)) : h("div.dim", null, "its text was not recorded")));
  });
  return box;
}

function list(execution, title, places) {
  const box = h("details", null, h("summary", null, title));
  box.addEventListener("toggle", () => {
    if (!box.open || box.children.length > 1) return;
    box.append(h("div.brief-list", null, places.map((i) => {
      const said = execution.preview(i);
      const call = execution.callById.get(execution.nodes[i].call_id);
      return h("button.brief", { onclick: () => call && tell("select", { call: call.number, node: i }) },
        h("span.tag", { class: `who-${execution.nodes[i].message_role}` }, execution.nodes[i].message_role || "?"),
        said?.tools.map((name) => h("span.tool", null, name)), h("span.said", null, said?.line || ""), h("span.num", null, amount(execution.nodes[i].num_tokens)));
    })));
  });
  return box;
}
