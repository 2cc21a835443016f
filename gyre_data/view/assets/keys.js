// Everything works from the keyboard. Single letters act unless one types into a field.

import { $, fill, h } from "./dom.js";
import { tell } from "./store.js";

const KEYS = [
  ["↑ ↓", "previous or next row of the tree", null],
  ["← →", "fold, unfold, to the parent or the first child", null],
  ["Enter", "from the tree into the conversation", null],
  ["j  k", "next or previous call of the same agent", { j: ["step", 1], k: ["step", -1] }],
  ["f  F", "fold or unfold everything", { f: ["fold", true], F: ["fold", false] }],
  ["w", "the whole path, or only its last earlier messages", { w: ["widen"] }],
  ["t", "texts or tokens", { t: ["switch-tokens"] }],
  ["c", "next colour of tokens", { c: ["next-colour"] }],
  ["d", "mark a call; again on another: compare", { d: ["compare"] }],
  ["i", "provenance of the call", { i: ["switch-side"] }],
  ["o  p  x", "execution, conversation, plots", { o: ["show", "overview"], p: ["show", "talk"], x: ["show", "plots"] }],
  ["s  S", "figures of training; its steps and what each consumed", { s: ["fold-training"], S: ["show", "steps"] }],
  ["[  ]", "step before, step after", { "[": ["step-by", -1], "]": ["step-by", 1] }],
  ["g  G", "into the tree; to the newest call", { g: ["to-tree"], G: ["newest"] }],
  ["n  N", "next or previous execution", { n: ["execution-step", 1], N: ["execution-step", -1] }],
  ["/", "search; Enter goes to the hit, Ctrl+Enter takes every execution, Esc leaves", { "/": ["search"] }],
  ["e", "list of executions", { e: ["switch-executions"] }],
  ["a", "lanes by time or by call", { a: ["switch-axis"] }],
  ["b", "light or dark", { b: ["switch-theme"] }],
  ["?", "these keys", { "?": ["help"] }],
];

const ACTIONS = new Map(KEYS.flatMap(([, , does]) => Object.entries(does || {})));

export function setUpKeys() {
  fill($("help"), h("h2", null, "Keys"), h("dl.keys", null, KEYS.map(([key, what]) => [h("dt", null, key.split(/\s+/).map((one) => h("kbd", null, one))), h("dd", null, what)])),
    h("form", { method: "dialog" }, h("button.flat", null, "Close")));
  addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const typing = event.target.closest("input, select, textarea, dialog");
    if (typing) return;
    const action = ACTIONS.get(event.key);
    if (!action) return;
    event.preventDefault();
    tell(action[0], action[1]);
  });
}
