// What is selected, and who wants to know. The address carries it, so that a link leads to the same place.

const listeners = new Map();

export const state = {
  run: null, // what the source says of the run
  figures: null,
  execution: null, // an Execution
  call: null, // number of the selected call
  node: null, // place of the selected node
  row: null, // key of the selected row of the tree, when it is no call
  tab: "talk", // talk | diff | plots | overview | steps
  training: null, // what the source says of training beside the run; null without
  step: null, // the chosen step of training
  folded: false, // whether the figures of training are folded away
  tokens: false,
  colour: "mask",
  side: false,
  mark: null, // {execution, call, id}: what a comparison is made with, its number and its id
  source: null,
};

/** Run `listener` whenever one of `topics` is told. */
export function on(topics, listener) {
  for (const topic of topics.split(" ")) listeners.set(topic, [...(listeners.get(topic) || []), listener]);
}

/** Tell that something changed. */
export function tell(topic, value) {
  for (const listener of listeners.get(topic) || []) listener(value);
}

/** Ids in the address: stable when the run is read again. */
export function writeAddress() {
  const parts = [];
  if (state.execution) parts.push(`e=${encodeURIComponent(state.execution.id)}`);
  if (state.call) parts.push(`c=${encodeURIComponent(state.execution.call(state.call).call_id)}`);
  if (state.node !== null && state.execution) parts.push(`n=${encodeURIComponent(state.execution.nodes[state.node].node_id)}`);
  if (state.tab !== "talk") parts.push(`v=${state.tab}`);
  if (state.step !== null) parts.push(`s=${state.step}`);
  if (state.tokens) parts.push(`t=${state.colour}`);
  history.replaceState(null, "", `#${parts.join("&")}`);
}

/** {e, c, n, v, s, t} of the address. */
export function readAddress() {
  const out = {};
  for (const part of location.hash.slice(1).split("&")) {
    const at = part.indexOf("=");
    if (at <= 0) continue;
    try {
      out[part.slice(0, at)] = decodeURIComponent(part.slice(at + 1));
    } catch { /* a broken escape names nothing */ }
  }
  return out;
}
