// One execution, indexed: calls by number, nodes by place, who owns which output, what hangs under what.

import { seconds } from "./format.js";

/** What the server or the report says of one execution, with the links that the page walks. */
export class Execution {
  constructor(raw) {
    this.raw = raw;
    this.id = raw.execution.execution_id;
    this.info = raw.execution;
    this.calls = raw.calls;
    this.nodes = raw.nodes;
    this.lanes = raw.lanes;
    this.index = new Map(this.nodes.map((node, i) => [node.node_id, i]));
    this.parent = this.nodes.map((node) => (node.parent_id === null ? -1 : this.index.get(node.parent_id)));
    this.callById = new Map(this.calls.map((call) => [call.call_id, call]));
    this.nodesOfCall = new Map(this.calls.map((call) => [call.call_id, []]));
    this.nodes.forEach((node, i) => this.nodesOfCall.get(node.call_id)?.push(i));
    this.callOfOutput = new Map();
    for (const call of this.calls) {
      if (call.output_node !== null && !this.callOfOutput.has(call.output_node)) this.callOfOutput.set(call.output_node, call);
    }
    this.ownerOf = new Map();
    raw.trajectories.forEach((t) => t.owned.forEach((id) => this.ownerOf.set(id, t.index)));
    this.pathsThrough = new Map();
    raw.trajectories.forEach((t) => t.path.forEach((id) => this.pathsThrough.set(id, (this.pathsThrough.get(id) || 0) + 1)));
    this.excludedCall = new Map(raw.excluded.filter((x) => x.call_id).map((x) => [x.call_id, x]));
    this.compactionOf = new Map(raw.compactions.map((c) => [c.call_id, c]));
    this.place();
  }

  /** Note for each call its lane and segment, and for each call the agents that it started. */
  place() {
    this.laneOf = new Map();
    this.segmentOf = new Map();
    this.eventOf = new Map();
    this.started = new Map();
    this.everyLane = [];
    const walk = (lane, parent) => {
      lane.parent = parent;
      this.everyLane.push(lane);
      for (const segment of lane.segments) {
        for (const n of callsOf(segment)) {
          this.laneOf.set(n, lane);
          this.segmentOf.set(n, segment);
        }
        for (const event of segment.events) this.eventOf.set(event.call, event);
        for (const agent of segment.agents) walk(agent, lane);
      }
      if (lane.spawned_at) this.started.set(lane.spawned_at, [...(this.started.get(lane.spawned_at) || []), lane]);
    };
    this.lanes.forEach((lane) => walk(lane, null));
  }

  call(number) { return this.calls[number - 1]; }

  /** Node places from the root to `i`. */
  path(i) {
    const out = [];
    for (let at = i; at >= 0; at = this.parent[at]) out.push(at);
    return out.reverse();
  }

  /** The deepest node of a call; -1 when it was never rendered. */
  leaf(call) {
    const id = call.output_node ?? call.prompt_node;
    return id === null || id === undefined ? -1 : this.index.get(id);
  }

  pathOfCall(call) {
    const leaf = this.leaf(call);
    return leaf < 0 ? [] : this.path(leaf);
  }

  /** First line of what a node says. */
  preview(i) {
    const found = (this.nodes[i].messages || []).map((n) => this.raw.lines[n]).filter(Boolean);
    return found.length ? { ...found[0], tools: found.flatMap((p) => p.tools) } : null;
  }

  blobs(i) { return (this.nodes[i].messages || []).map((n) => this.raw.blobs[n]); }

  /** Whether a node renders a message: generation prompts and what a template adds are not shown as such. */
  isMessage(i) {
    const node = this.nodes[i];
    return node.kind === "output" || (node.kind === "prompt" && node.author !== "template");
  }

  context(call) {
    return call.prompt_tokens === null ? null : call.prompt_tokens + (call.output_tokens || 0);
  }

  start(call) { return Date.parse(call.started_at); }

  end(call) { return call.ended_at ? Date.parse(call.ended_at) : Date.parse(call.started_at); }

  took(call) { return seconds(call.started_at, call.ended_at); }

  bad(call) {
    return call.status !== "ok" || call.delivery === "undelivered" || call.delivery === "abandoned";
  }

  /** What went wrong with a call, in words; null when nothing did. */
  fault(call) {
    if (call.status !== "ok") return call.error || call.status;
    return call.delivery === "undelivered" || call.delivery === "abandoned" ? call.delivery : null;
  }

  /** The calls of the same lane, in order. */
  siblings(call) {
    const lane = this.laneOf.get(call.number);
    return lane ? lane.segments.flatMap((segment) => callsOf(segment)).sort((a, b) => a - b) : [call.number];
  }
}

/** Numbers of all calls of a segment, tried again and lost ones too. */
export function callsOf(segment) {
  return [...new Set([...segment.calls, ...segment.events.map((event) => event.call)])].sort((a, b) => a - b);
}

export const laneName = (lane) =>
  lane.kind === "sub_agent" ? `sub-agent ${agentName(lane.agent_id)}`.trim()
    : { main: "main", side: "side calls", unknown: "unknown role" }[lane.kind] || lane.kind;

/** A client's own name of an agent, or the last signs of a long id. */
export const agentName = (id) => (!id ? "" : id.length > 14 ? `…${id.slice(-8)}` : id);
