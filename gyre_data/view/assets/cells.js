// Cells by time: a row for each, coloured by what it did; lines where the optimiser made a version.

import { h, s } from "./dom.js";
import { int, took } from "./format.js";
import { hideTip, showTip } from "./tip.js";

const WIDTH = 1000;
const NAMES = { rollout: "serves", draining: "drains", to_train: "switches to training", train: "trains, idle", busy: "micro-steps", to_rollout: "switches to serving", down: "down" };

/** The tile of a scheduler's ledger; `problem` says why it cannot be read. */
export function cells(told, problem) {
  if (problem) return h("div.tile", { tabindex: "0" }, head(null), h("p.bad.tile-plot", null, problem));
  const count = told.names.length;
  if (!count || !told.length) return h("div.tile", { tabindex: "0" }, head(null), h("div.tile-plot.dim", null, "no cell has moved yet"));
  const svg = s("svg", { viewBox: `0 0 ${WIDTH} ${count}`, preserveAspectRatio: "none", "aria-hidden": "true", class: "cells" });
  for (let i = 0; i < count; i++) svg.append(s("rect", { x: 0, y: i, width: WIDTH, height: 0.92, class: "cell-rollout" }));
  for (const over of [false, true]) {
    for (const [cell, what, from, to] of told.spans) {
      if ((what === "busy") === over) svg.append(s("rect", { x: (from / told.length) * WIDTH, y: cell, width: Math.max(0.5, ((to - from) / told.length) * WIDTH), height: 0.92, class: `cell-${what}` }));
    }
  }
  for (const [at] of told.steps) svg.append(s("line", { x1: (at / told.length) * WIDTH, x2: (at / told.length) * WIDTH, y1: 0, y2: count, class: "made" }));
  const tip = (event) => {
    const box = svg.getBoundingClientRect();
    const at = ((event.clientX - box.left) / box.width) * told.length;
    const cell = Math.min(count - 1, Math.floor(((event.clientY - box.top) / box.height) * count));
    const here = told.spans.filter(([i, , from, to]) => i === cell && from <= at && at < to).map(([, what]) => what);
    const what = here.includes("busy") ? "busy" : here[0] || "rollout";
    const made = told.steps.filter(([when]) => when <= at).at(-1);
    showTip(event.clientX, event.clientY, [h("b", null, told.names[cell] || ""), ` ${NAMES[what] || what}, ${took(Math.max(0, at))} after the start${made ? `, version ${made[1]}` : ""}`]);
  };
  return h("div.tile", { tabindex: "0", role: "img", "aria-label": `Cells by time: ${summary(told)}`, onpointermove: tip, onpointerleave: hideTip },
    head(told), h("div.tile-plot", null, svg), h("div.cell-key", null, key(told)));
}

const head = (told) => [h("div.tile-head", null, "Cells by time"), h("div.values", null, told ? [h("b", null, int(told.names.length)), ` over ${took(told.length)}`] : null)];

/** What the cells do now, in words. */
export function summary(told) {
  const last = new Map(told.names.map((_, i) => [i, "rollout"]));
  for (const [cell, what, , to] of told.spans) if (what !== "busy" && to >= told.length - 0.01) last.set(cell, what);
  const counts = new Map();
  for (const what of last.values()) counts.set(what, (counts.get(what) || 0) + 1);
  return [...counts].map(([what, n]) => `${int(n)} ${NAMES[what] || what}`).join(", ");
}

function key(told) {
  const used = new Set(["rollout", ...told.spans.map(([, what]) => what)]);
  const groups = [["serves", ["rollout"]], ["trains", ["train"]], ["micro-steps", ["busy"]], ["switches", ["draining", "to_train", "to_rollout"]], ["down", ["down"]]];
  return groups.filter(([, names]) => names.some((name) => used.has(name))).map(([title, names]) => h("span", null, h(`i.key-${names[0]}`), title));
}
