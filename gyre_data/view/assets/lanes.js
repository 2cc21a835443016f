// Lanes over time: per agent the size of its context as a curve, its calls as blocks, compactions as cuts.

import { $, fill, h, s } from "./dom.js";
import { amount, int, took } from "./format.js";
import { callsOf, laneName } from "./model.js";
import { on, state, tell } from "./store.js";
import { hideTip, showTip } from "./tip.js";

let gutter = 140; // room for names
const TALL = 74;
const LOW = 34;
const LEAST = 24; // of lanes that are never trained
const AXIS = 18;
let byTime = true;

export function setUpLanes() {
  on("execution refreshed call", draw);
  new ResizeObserver(draw).observe($("lanes"));
}

/** Switch between time and the number of calls as the horizontal axis. */
export function switchAxis() {
  byTime = !byTime;
  draw();
}

function draw() {
  const e = state.execution;
  const box = $("lanes");
  const width = box.clientWidth;
  if (!e || !width) return;
  if (!e.calls.length) {
    fill(box, h("p.empty", null, "no call yet"));
    return;
  }
  gutter = width < 500 ? 114 : 140;
  const scale = makeScale(e, width);
  const top = Math.max(1, ...e.calls.map((call) => e.context(call) || 0));
  const tops = new Map();
  let y = 2;
  for (const lane of e.everyLane) {
    const height = lane.kind === "main" || e.everyLane.length === 1 ? TALL : lane.kind === "sub_agent" ? LOW : LEAST;
    tops.set(lane, { y, height });
    y += height + 4;
  }
  const svg = s("svg", { width, height: y + AXIS, role: "img", "aria-label": `${e.everyLane.length} lanes; the tree lists the same calls` });
  axis(svg, scale, width, y);
  for (const lane of e.everyLane) drawLane(svg, e, lane, tops.get(lane), scale, top);
  links(svg, e, tops, scale);
  selection(svg, e, tops, scale);
  svg.addEventListener("mousemove", (event) => hover(event, e, tops, scale));
  svg.addEventListener("mouseleave", hideTip);
  svg.addEventListener("click", (event) => {
    const call = at(event, e, tops, scale);
    if (call) tell("select", { call: call.number });
  });
  const kept = box.scrollTop;
  fill(box, svg, h("button.flat.axis", { title: "Time or number of calls", onclick: switchAxis }, byTime ? "by time" : "by call"));
  box.scrollTop = kept;
}

/** Horizontal place of a call's start and end. */
function makeScale(e, width) {
  const room = width - gutter - 16;
  if (!byTime) {
    const each = room / Math.max(1, e.calls.length);
    return { byTime, each, start: (call) => gutter + (call.number - 1) * each, end: (call) => gutter + call.number * each };
  }
  const t0 = Math.min(...e.calls.map((call) => e.start(call)));
  const t1 = Math.max(t0 + 1, ...e.calls.map((call) => e.end(call)));
  const x = (t) => gutter + ((t - t0) / (t1 - t0)) * room;
  return { byTime, t0, t1, x, start: (call) => x(e.start(call)), end: (call) => x(e.end(call)) };
}

function axis(svg, scale, width, y) {
  if (!scale.byTime) {
    svg.append(s("text", { x: gutter, y: y + 12, class: "tick" }, "calls in order of their start"));
    return;
  }
  const span = (scale.t1 - scale.t0) / 1000;
  const steps = [0.1, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 43200, 86400];
  const step = steps.find((one) => span / one <= Math.max(2, (width - gutter) / 110)) || steps[steps.length - 1];
  for (let t = 0; t <= span; t += step) {
    const x = scale.x(scale.t0 + t * 1000);
    svg.append(s("line", { x1: x, x2: x, y1: 2, y2: y, class: "grid" }), s("text", { x: x + 3, y: y + 12, class: "tick" }, t ? took(t) : "0"));
  }
}

function drawLane(svg, e, lane, { y, height }, scale, top) {
  const bottom = y + height - 8;
  const level = (tokens) => bottom - ((tokens || 0) / top) * (height - 16);
  svg.append(s("line", { x1: gutter, x2: "100%", y1: bottom, y2: bottom, class: "base" }));
  const name = s("text", { x: 10, y: y + 13, class: `lane-name${lane.kind === "unknown" ? " bad" : ""}` }, laneName(lane));
  name.append(s("title", null, `${laneName(lane)}${lane.title ? `: ${lane.title}` : ""}`));
  const peak = Math.max(0, ...lane.segments.flatMap(callsOf).map((n) => e.context(e.call(n)) || 0));
  svg.append(name, height === LEAST ? "" : s("text", { x: 10, y: y + 26, class: "tick" }, `${int(lane.num_calls)} calls, ${amount(peak)}`));
  const blocks = { good: "", bad: "", summary: "" };
  lane.segments.forEach((segment) => {
    const numbers = callsOf(segment);
    let area = "";
    let last = null;
    for (const n of numbers) {
      const call = e.call(n);
      const [x0, x1] = [scale.start(call), Math.max(scale.end(call), scale.start(call) + 1.5)];
      const kind = e.bad(call) ? "bad" : call.agent_role.endsWith("summary") ? "summary" : "good";
      blocks[kind] += `M${x0.toFixed(1)} ${bottom + 1}H${x1.toFixed(1)}V${bottom + 6}H${x0.toFixed(1)}Z`;
      if (call.prompt_tokens === null) continue;
      const [before, after] = [level(call.prompt_tokens), level(e.context(call))];
      area += last === null ? `M${x0.toFixed(1)} ${bottom}V${before.toFixed(1)}` : `L${x0.toFixed(1)} ${before.toFixed(1)}`;
      area += `L${x1.toFixed(1)} ${after.toFixed(1)}`;
      last = x1;
    }
    if (last !== null) svg.append(s("path", { d: `${area}V${bottom}Z`, class: `area role-${lane.kind}` }));
    cut(svg, e, segment, { y, bottom, level }, scale);
  });
  for (const [kind, d] of Object.entries(blocks)) if (d) svg.append(s("path", { d, class: `blocks ${kind}` }));
}

/** A line where a compaction, or another break, began this run of calls. */
function cut(svg, e, segment, { y, bottom, level }, scale) {
  const how = segment.opening;
  if (!how || how.kind === "conversation" || how.kind === "summary") return;
  const x = scale.start(e.call(callsOf(segment)[0]));
  const kind = how.kind === "compaction" ? "compaction" : how.false ? "false" : "fork";
  const line = s("line", { x1: x, x2: x, y1: kind === "compaction" ? Math.min(y, level(how.tokens_before)) : bottom - 8, y2: bottom + 6, class: `cut ${kind}` });
  svg.append(line);
  if (kind === "compaction" && bottom - y > 40) {
    const late = x > Number(svg.getAttribute("width")) - 160; // right of it there is no room, or the button
    svg.append(s("text", { x: late ? x - 4 : x + 4, y: y + 9, class: "cut-text", "text-anchor": late ? "end" : "start" }, `${amount(how.tokens_before)} → ${amount(how.tokens_after)}`));
  }
}

/** From a task call to the lane of the agent that it started. */
function links(svg, e, tops, scale) {
  for (const lane of e.everyLane) {
    const first = lane.segments[0] && callsOf(lane.segments[0])[0];
    if (!lane.spawned_at || !first || !e.laneOf.get(lane.spawned_at)) continue;
    const from = tops.get(e.laneOf.get(lane.spawned_at));
    const to = tops.get(lane);
    const [x0, x1] = [scale.end(e.call(lane.spawned_at)), scale.start(e.call(first))];
    const [y0, y1] = [from.y + from.height - 2, to.y + to.height - 8];
    svg.append(s("path", { d: `M${x0} ${y0}C${x0} ${y1},${x1 - 12} ${y1},${x1} ${y1}`, class: "spawn" }));
  }
}

function selection(svg, e, tops, scale) {
  const call = state.call && e.call(state.call);
  const lane = call && tops.get(e.laneOf.get(call.number));
  if (!lane) return;
  const [x0, x1] = [scale.start(call), scale.end(call)];
  svg.append(s("rect", { x: x0 - 1, y: lane.y - 2, width: Math.max(3, x1 - x0 + 2), height: lane.height + 2, class: "selected", rx: 2 }));
}

/** The call under the pointer: the nearest of its lane. */
function at(event, e, tops, scale) {
  const box = $("lanes").querySelector("svg").getBoundingClientRect();
  const [x, y] = [event.clientX - box.left, event.clientY - box.top];
  const lane = e.everyLane.find((one) => y >= tops.get(one).y - 3 && y < tops.get(one).y + tops.get(one).height + 3);
  if (!lane) return null;
  let best = null;
  let far = Infinity;
  for (const n of lane.segments.flatMap(callsOf)) {
    const call = e.call(n);
    const distance = Math.max(scale.start(call) - x, x - scale.end(call), 0);
    if (distance < far) [best, far] = [call, distance];
  }
  return best;
}

function hover(event, e, tops, scale) {
  const call = at(event, e, tops, scale);
  if (!call) {
    hideTip();
    return;
  }
  const said = call.output_node && e.preview(e.index.get(call.output_node));
  showTip(event.clientX, event.clientY, [
    h("b", null, `c${call.number} ${call.agent_role}`),
    h("div", null, `context ${int(call.prompt_tokens)} + ${int(call.output_tokens)} tokens, ${took(e.took(call))}`),
    e.fault(call) ? h("div.bad", null, e.fault(call)) : null,
    said ? h("div.dim", null, [...said.tools, said.line].join(" ").slice(0, 120)) : null,
  ]);
}
