// Puts the page together: loads the run, reacts to what is chosen, follows what is recorded meanwhile.

import { setUpBar } from "./bar.js";
import { setUpDiff } from "./diff.js";
import { $, fill, h } from "./dom.js";
import { setUpExecutions, showExecutions } from "./executions.js";
import { setUpHead } from "./head.js";
import { setUpKeys } from "./keys.js";
import { setUpLanes, switchAxis } from "./lanes.js";
import { Execution } from "./model.js";
import { setUpOverview } from "./overview.js";
import { setUpPlots } from "./plots.js";
import { setUpSearch } from "./search.js";
import { setUpSide } from "./side.js";
import { openSource } from "./source.js";
import { setUpSteps } from "./steps.js";
import { on, readAddress, state, tell, writeAddress } from "./store.js";
import { readPath, setUpTalk, widen } from "./talk.js";
import { COLOURS } from "./tokens.js";
import { showTotals } from "./totals.js";
import { setUpTraining, stepsOf } from "./training.js";
import { foldAll, setUpTree } from "./tree.js";

const THEME = "gyre-view-theme";

async function start() {
  state.source = openSource();
  theme(stored());
  for (const setUp of [setUpTree, setUpLanes, setUpHead, setUpBar, setUpTalk, setUpDiff, setUpPlots, setUpOverview, setUpSide, setUpSearch, setUpTraining, setUpSteps, setUpKeys]) setUp();
  setUpExecutions((id) => openExecution(id));
  wire();
  const asked = readAddress();
  state.run = await state.source.run();
  state.training = await state.source.training();
  if (asked.s) state.step = Number(asked.s);
  tell("training");
  showWhere();
  showTotals();
  const withCalls = state.run.executions.filter((one) => one.num_calls);
  const first = state.run.executions.find((one) => one.execution_id === asked.e) || withCalls[withCalls.length - 1];
  if (narrow() || state.run.executions.length < 2) listShown(false);
  if (first) await openExecution(first.execution_id, asked);
  else {
    showExecutions();
    tell("call");
  }
  if (asked.v) tell("show", asked.v);
  document.documentElement.dataset.ready = "yes";
  counts();
  if (state.source.live) follow();
}

const narrow = () => innerWidth < 1000;

function showWhere() {
  const { path, info } = state.run;
  fill($("where"), h("code", { title: path }, h("bdi", null, path)), [info.mode, info.policy].filter(Boolean).map((fact) => h("span.dim", null, fact)));
}

async function counts() {
  const started = performance.now();
  state.figures = await state.source.figures();
  counts.took = performance.now() - started;
  showTotals();
  tell("figures");
}

/** What needs every tree is counted anew after a while, the longer the more it costs. */
function countSoon() {
  if (countSoon.waits) return;
  countSoon.waits = setTimeout(() => {
    countSoon.waits = null;
    counts().catch(failed);
  }, Math.max(2000, 10 * (counts.took || 0)));
}

let opening = 0; // an execution that is asked for later is the one to show
let rowsShown = null; // rows of the shown execution when it was asked for

const summaryOf = (id) => state.run.executions.find((one) => one.execution_id === id);

async function openExecution(id, asked = {}) {
  const told = summaryOf(id);
  if (!told) return;
  if (!told.num_calls) {
    note(`${id} has no call yet`);
    return;
  }
  const mine = ++opening;
  let found;
  try {
    found = await state.source.execution(id);
  } catch (error) { // one that contradicts itself: the others can still be looked at
    failed(error);
    return;
  }
  if (mine !== opening) return;
  const loaded = new Execution(found);
  take(loaded, told.num_rows);
  state.call = (loaded.callById.get(asked.c) || loaded.callOfOutput.get(asked.n))?.number ?? firstShown(loaded);
  state.node = loaded.index.get(asked.n) ?? null;
  state.row = null;
  if (asked.t) {
    state.tokens = true;
    if (asked.t in COLOURS) state.colour = asked.t;
  }
  if (narrow()) listShown(false);
  showExecutions();
  tell("execution");
  tell("call");
  writeAddress();
  renew().catch(failed); // the run may have moved on meanwhile
}

/** Keep an execution as the one shown; `rows` is how many rows told of it when it was asked for. */
function take(loaded, rows) {
  rowsShown = rows;
  loaded.versions = [...new Set(loaded.nodes.flatMap((node) => (node.versions || []).map(([name]) => name)))];
  state.execution = loaded;
}

/** The newest call of the main agent, else the newest of all. */
function firstShown(e) {
  const main = [...e.calls].reverse().find((call) => call.agent_role === "main" && call.output_node && !e.bad(call));
  return (main || e.calls[e.calls.length - 1])?.number ?? null;
}

function wire() {
  on("select", ({ call, node = null, row = null }) => {
    if (state.tab !== "talk" && state.tab !== "diff") show("talk");
    Object.assign(state, { call, node, row });
    tell("call");
    writeAddress();
  });
  on("go", async ({ execution, call, node }) => {
    const e = state.execution;
    if (execution !== e?.id) await openExecution(execution, { c: call, n: node });
    else tell("select", { call: (e.callById.get(call) || e.callOfOutput.get(node))?.number ?? state.call, node: e.index.get(node) });
    if (state.tab !== "talk") show("talk");
  });
  on("show", show);
  on("fold-training", () => {
    state.folded = !state.folded;
    tell("step");
  });
  on("choose-step", ({ step: chosen, open }) => {
    state.step = chosen;
    if (open && state.tab !== "steps") show("steps");
    tell("step");
    writeAddress();
  });
  on("step-by", (by) => {
    const steps = stepsOf();
    const at = steps.indexOf(state.step);
    const next = steps[Math.max(0, Math.min(steps.length - 1, (at < 0 ? steps.length - 1 : at) + by))];
    if (next !== undefined) tell("choose-step", { step: next, open: state.tab === "steps" });
  });
  on("list-executions", () => listShown(true));
  on("path", (call) => {
    Object.assign(state, { call, node: null, row: null });
    show("talk");
    tell("call");
    readPath();
  });
  on("switch-tokens", () => tokens(!state.tokens));
  on("colour", (name) => {
    state.colour = name;
    tokens(true);
  });
  on("next-colour", () => {
    const names = Object.keys(COLOURS);
    if (state.tokens) state.colour = names[(names.indexOf(state.colour) + 1) % names.length];
    tokens(true);
  });
  on("switch-side", () => {
    state.side = !state.side;
    tell("side");
  });
  on("compare", compare);
  on("compare-with", (mark) => {
    state.mark = mark;
    show("diff");
  });
  on("unmark", () => {
    state.mark = null;
    tell("mark");
  });
  on("step", step);
  on("execution-step", (by) => {
    const rows = state.run.executions;
    const at = rows.findIndex((one) => one.execution_id === state.execution?.id) + by;
    if (rows[at]) openExecution(rows[at].execution_id);
  });
  on("fold", (closed) => foldAll(closed));
  on("widen", widen);
  on("to-tree", () => $("tree").focus());
  on("newest", () => state.execution?.calls.length && tell("select", { call: state.execution.calls.length }));
  on("search", () => $("search").select());
  on("switch-axis", switchAxis);
  on("switch-executions", () => listShown($("executions").hidden));
  on("switch-theme", () => theme(dark() ? "light" : "dark", true));
  on("help", () => $("help").showModal());
  $("b-executions").onclick = () => tell("switch-executions");
  $("b-theme").onclick = () => tell("switch-theme");
  $("b-help").onclick = () => tell("help");
  $("b-plots").onclick = () => tell("show", state.tab === "plots" ? "talk" : "plots");
}

function show(tab) {
  if (!["talk", "diff", "overview", "plots", "steps"].includes(tab)) return;
  state.tab = tab;
  tell("tab");
  if (tab === "talk") tell("call");
  else $("talk").scrollTop = 0;
  writeAddress();
}

function tokens(yes) {
  state.tokens = yes;
  if (state.tab !== "talk") show("talk");
  tell("tokens");
  writeAddress();
}

function compare() {
  if (!state.call) return;
  const here = { execution: state.execution.id, call: state.call, id: state.execution.call(state.call).call_id };
  const same = state.mark && state.mark.execution === here.execution && state.mark.call === here.call;
  if (!state.mark || same) {
    state.mark = same ? null : here;
    note(same ? "the mark is gone" : `c${here.call} is marked: go to another call and press d`);
    tell("mark");
  } else show("diff");
}

function step(by) {
  const e = state.execution;
  if (!e || !state.call) return;
  const numbers = e.siblings(e.call(state.call));
  const next = numbers[numbers.indexOf(state.call) + by];
  if (next) tell("select", { call: next });
}

function listShown(yes) {
  $("executions").hidden = !yes;
  $("b-executions").setAttribute("aria-expanded", String(yes));
}

/** A line for a moment, told to screen readers. */
function note(text) {
  fill($("live"), h("span.note", null, text));
  clearTimeout(note.later);
  note.later = setTimeout(() => fill($("live"), standing), 4000);
}

const failed = (error) => note(String(error.message || error));

let standing = null;

/** Take over what was recorded meanwhile; selection and scroll stay where they are. */
function follow() {
  let busy = false;
  let again = false;
  const more = async (version) => {
    if (version === state.source.version) return;
    if (busy) {
      again = true;
      return;
    }
    busy = true;
    do {
      again = false;
      try {
        await refresh();
      } catch (error) {
        failed(error);
      }
    } while (again);
    busy = false;
  };
  const trained = async () => {
    state.training = await state.source.training();
    tell("training");
  };
  state.source.follow(more, () => trained().catch(failed), (there) => {
    standing = there ? h("span.good", null, "● following") : h("span.bad", null, "○ the server is gone");
    fill($("live"), standing);
  });
}

async function refresh() {
  state.run = await state.source.run();
  showWhere();
  showTotals();
  showExecutions();
  tell("run");
  countSoon();
  if (state.execution) await renew();
  else {
    const first = state.run.executions.find((one) => one.num_calls);
    if (first) await openExecution(first.execution_id);
    if (state.run.executions.length > 1 && !narrow()) listShown(true);
  }
}

/** Load the shown execution again when more is known of it. Calls are numbered by their start, so numbers may move. */
async function renew() {
  const { id } = state.execution;
  const rows = summaryOf(id)?.num_rows;
  if (rows === undefined || rows === rowsShown) return;
  const loaded = new Execution(await state.source.execution(id));
  const e = state.execution;
  if (e.id !== id) return;
  const call = state.call && e.call(state.call).call_id;
  const node = state.node === null ? null : e.nodes[state.node].node_id;
  take(loaded, rows);
  state.call = loaded.callById.get(call)?.number ?? null;
  state.node = node === null ? null : loaded.index.get(node) ?? null;
  if (state.mark?.execution === id) state.mark.call = loaded.callById.get(state.mark.id)?.number ?? state.mark.call;
  tell("refreshed");
}

function stored() {
  try {
    return localStorage.getItem(THEME);
  } catch {
    return null; // a page from a file may keep nothing
  }
}

const dark = () => (document.documentElement.dataset.theme || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";

function theme(name, keep) {
  if (name === "light" || name === "dark") document.documentElement.dataset.theme = name;
  if (!keep) return;
  try {
    localStorage.setItem(THEME, name);
  } catch { /* a page from a file may keep nothing */ }
}

start().catch((error) => {
  fill($("talk"), h("p.bad.empty", null, `The page could not load its data: ${error.message || error}`));
  document.documentElement.dataset.ready = "failed";
});
