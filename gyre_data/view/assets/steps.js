// Steps of training: what each consumed, and from there to any execution and call.

import { $, fill, h } from "./dom.js";
import { int, many, took, words } from "./format.js";
import { on, state, tell } from "./store.js";
import { figure, stepsOf, waitsAt } from "./training.js";

const FIRST = 100; // rows of the list of steps before one asks for more
let shown = FIRST;
let loaded = null; // {step, rows} of the chosen step
let unknown = false; // whether it consumed what the page has not heard of yet
let turn = 0; // a later drawing stops an earlier one

export function setUpSteps() {
  on("tab step", () => state.tab === "steps" && draw());
  on("run", () => state.tab === "steps" && unknown && draw());
  on("training", () => {
    loaded = null; // its ledger may have come since, or it was taken again
    if (state.tab === "steps") draw();
  });
}

/** The chosen step, else the newest. */
function wanted() {
  const steps = stepsOf();
  return steps.includes(state.step) ? state.step : steps[steps.length - 1];
}

async function draw() {
  const mine = ++turn;
  const steps = stepsOf();
  if (!steps.length) {
    fill($("talk"), h("p.empty", null, state.training ? "No step has been taken yet." : "No training lies beside this run; name one with --training FOLDER."));
    return;
  }
  const step = wanted();
  if (loaded?.step !== step) {
    const found = await state.source.step(step);
    if (state.tab !== "steps" || mine !== turn) return;
    loaded = found;
  }
  unknown = loaded.executions.some((row) => row.here && !executionOf(row));
  const scroll = $("talk").scrollTop;
  fill($("talk"), h("div.overview", null, one(loaded, steps), evaluation(step), every(steps, step)));
  $("talk").scrollTop = scroll;
}

function one(told, steps) {
  const { columns, versions } = state.training;
  const place = steps.indexOf(told.step);
  const go = (by) => steps[place + by] !== undefined && tell("choose-step", { step: steps[place + by], open: true });
  const known = ["loss", "reward_mean", "grad_norm", "lr", "trained_tokens", "trained_tokens_per_s", "sharing", "mismatch_mean", "mismatch_max", "staleness_mean", "age_mean", "age_max", "clip_fraction", "cap_fraction", "entropy"];
  const value = (name) => columns[name]?.[place];
  return h("section", null,
    h("div.line.step-head", null, h("h2", null, `Step ${int(told.step)}`), h("code", null, versions[place]),
      h("button.flat", { disabled: place === 0, "aria-label": "Step before", onclick: () => go(-1) }, "←"), h("button.flat", { disabled: place === steps.length - 1, "aria-label": "Step after", onclick: () => go(1) }, "→")),
    h("dl.figures", null, known.filter((name) => value(name) !== null && value(name) !== undefined).map((name) => h("div", null, h("dt", null, words(name)), h("dd", null, figure(value(name)))))),
    h("p.line.step-waits", null, h("span", null, `computed for ${took(value("seconds"))}`), waitsAt(columns, place).map(([who, seconds]) => h("span.dim", null, `${who} ${took(seconds)}`))),
    h("h3", null, `Consumed: ${many(told.executions.length, "execution")}`),
    told.executions.length ? table(["execution", "task", "reward", "advantage", "tokens trained", "trajectories"], told.executions.map(consumed), "consumed") : h("p.dim", null, "the ledger of this step is not there"));
}

const executionOf = (row) => state.run.executions.find((e) => e.execution_id === row.execution_id);

function consumed(row) {
  const known = row.here && executionOf(row);
  const task = known?.task_id ? `${known.task_id}${known.sample_index === null ? "" : ` #${known.sample_index}`}` : row.group_id || "–";
  const name = h("code", null, row.execution_id.length > 18 ? `${row.execution_id.slice(0, 17)}…` : row.execution_id);
  const open = (leaf) => tell("go", { execution: row.execution_id, node: leaf });
  return [
    known ? h("button.jump", { title: row.execution_id, onclick: () => open(null) }, name) : h("span.dim", { title: `gyre view ${row.run} ${row.execution_id}` }, name, row.here ? "" : ` in ${row.run.split("/").at(-1)}`),
    task, figure(row.reward), h("span", { class: row.advantage > 0 ? "good" : row.advantage < 0 ? "bad-number" : "dim" }, figure(row.advantage)), int(row.owned_tokens),
    row.trajectories.map((t) => (known ? h("button.flat", { title: `ends at ${t.leaf}`, onclick: () => open(t.leaf) }, `${t.index}: ${int(t.tokens)}`) : h("span.dim", null, `${t.index}: ${int(t.tokens)} `))),
  ];
}

/** The pass over held-out tasks that was made after this step, if one was. */
function evaluation(step) {
  const found = state.training.evals.find((e) => e.step === step);
  if (!found) return null;
  const tasks = Object.entries(found.by_task);
  return h("section", null, h("h3", null, "Held-out tasks after it"),
    h("p", null, found.score === null ? h("span.bad", null, "nothing was scored") : `mean ${figure(found.score)} over ${many(tasks.length, "task")}`, found.unscored ? h("span.bad", null, ` ${int(found.unscored)} without a score`) : null),
    tasks.length ? h("details", null, h("summary", null, "by task"), table(["task", "score"], tasks.map(([task, score]) => [task, figure(score)]))) : null);
}

function every(steps, chosen) {
  const { columns, versions, evals } = state.training;
  const judged = new Map(evals.map((e) => [e.step, e.score]));
  const at = (name, i) => figure(columns[name]?.[i]);
  const places = steps.map((_, i) => i).reverse().slice(0, shown);
  return h("section", null, h("h3", null, many(steps.length, "step")),
    table(["step", "version", "reward", "held out", "loss", "mismatch", "staleness", "tok/s"], places.map((i) => [
      h("button.jump", { "aria-current": steps[i] === chosen ? "true" : null, onclick: () => tell("choose-step", { step: steps[i], open: true }) }, int(steps[i])), h("code", null, versions[i]),
      at("reward_mean", i), judged.has(steps[i]) ? figure(judged.get(steps[i])) : "", at("loss", i), at("mismatch_mean", i), at(columns.staleness_mean ? "staleness_mean" : "age_mean", i), at("trained_tokens_per_s", i)]), "every-step"),
    steps.length > shown ? h("button.more", { onclick: () => {
      shown *= 4;
      draw();
    } }, `${int(steps.length - shown)} earlier steps`) : null);
}

function table(heads, rows, kind = "") {
  return h("div", { class: kind }, h("table.plain", null, h("thead", null, h("tr", null, heads.map((head) => h("th", null, head)))),
    h("tbody", null, rows.map((row) => h("tr", null, row.map((value) => h("td", null, value)))))));
}
