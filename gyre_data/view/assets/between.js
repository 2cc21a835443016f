// What stands between two calls: how a conversation began, a compaction, a fork, a retry.

import { compactionCard } from "./boundary.js";
import { h } from "./dom.js";
import { amount, int, words } from "./format.js";
import { tell } from "./store.js";

/** A card before the first message that `call` added; null when it simply went on. `brief` leaves out what is plain. */
export function boundaryBefore(execution, call, brief) {
  if (execution.compactionOf.has(call.call_id)) return compactionCard(execution, call);
  const out = [];
  const jump = (number, text) => h("button.jump", { onclick: () => tell("select", { call: number }) }, text);
  const lane = execution.laneOf.get(call.number);
  const first = lane?.segments[0]?.calls[0] === call.number;
  if (lane?.kind === "sub_agent" && first) {
    out.push(h("section.boundary", null, h("div.line", null, h("span.tag", null, "sub-agent"), h("b", null, lane.agent_id ?? ""),
      h("span.dim", null, lane.title || ""), h("span.grow"),
      lane.spawned_at ? jump(lane.spawned_at, `← started by c${lane.spawned_at}`) : h("span.dim", null, "what started it is not known"))));
  }
  const event = execution.eventOf.get(call.number);
  if (event?.taken_over_by) {
    out.push(h("section.boundary.lost", null, h("div.line", null, h("span.tag.badtag", null, "tried again"), h("span", null, call.error || call.delivery || call.status), h("span.grow"), jump(event.taken_over_by, `c${event.taken_over_by} took over`))));
  }
  const how = execution.segmentOf.get(call.number)?.opening;
  const opens = execution.segmentOf.get(call.number)?.calls[0] === call.number;
  if (how && opens && how.kind === "fork") out.push(fork(how, jump));
  if (!brief && call.branch_reason === "retry" && call.continues_from) {
    const source = execution.callById.get(call.continues_from);
    if (source) out.push(h("section.boundary", null, h("div.line", null, h("span.tag", null, "retry"), h("span.grow"), jump(source.number, `of c${source.number}`))));
  }
  return out;
}

function fork(how, jump) {
  return h("section.boundary", { class: how.false ? "lost" : "" },
    h("div.line", null,
      h("span.tag", { class: how.false ? "badtag" : "" }, how.false ? "FALSE fork" : "fork"),
      h("b", null, how.false ? how.check : how.reason ? words(how.reason) : ""),
      how.first_difference_message !== null ? h("span.dim", null, `first different message ${int(how.first_difference_message)}`) : null,
      how.tokens_lost ? h("span.dim", null, `${amount(how.tokens_lost)} tokens not reused`) : null,
      h("span.grow"), how.at ? jump(how.at, `leaves after c${how.at}`) : null),
    how.echo_difference ? h("div.dim", null, how.echo_difference) : null);
}
