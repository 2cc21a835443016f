// Training on the first screen: what it does and waits for now, what is in flight, and its figures by step.

import { cells } from "./cells.js";
import { chart } from "./chart.js";
import { $, fill, h } from "./dom.js";
import { amount, int, many, took } from "./format.js";
import { on, state, tell } from "./store.js";

const MOST_IN_FLIGHT = 4;

export function setUpTraining() {
  on("training step refreshed execution run", draw);
  setInterval(since, 1000);
}

/** A figure with as many digits as it has to say something. */
export const figure = (x) => (x === null || x === undefined ? "–" : Math.abs(x) >= 1000 ? amount(x) : Number(x.toPrecision(3)).toString());

const brief = (x) => (Math.abs(x) >= 1000 ? amount(x) : Number(x.toPrecision(2)).toString());

export const stepsOf = () => state.training?.columns.step || [];

/** Place of the chosen step among the steps; null when none is chosen. */
const chosen = () => {
  const place = stepsOf().indexOf(state.step);
  return place < 0 ? null : place;
};

function draw() {
  const told = state.training;
  const box = $("training");
  box.hidden = !told;
  if (!told) return;
  const focus = document.activeElement?.closest?.("#training [data-chart]")?.dataset.chart;
  fill(box, h("div.training-head", null,
    h("button.fold-training", { "aria-expanded": !state.folded, title: "Figures by step (s)", onclick: () => tell("fold-training") }, state.folded ? "▸" : "▾", h("b", null, " Training")),
    progress(told), waits(told), inFlight(), h("button.flat", { id: "b-steps", title: "Steps and what they consumed (S)", onclick: () => tell("show", state.tab === "steps" ? "talk" : "steps") }, "Steps")),
  state.folded ? null : h("div.tiles", null, stepsOf().length ? tiles(told) : h("p.dim.none-yet", null, "no step has been taken yet"), told.cells || told.problem ? cells(told.cells, told.problem) : null));
  if (focus) box.querySelector(`[data-chart="${focus}"]`)?.focus();
}

function progress(told) {
  const steps = stepsOf();
  const last = steps.length ? steps[steps.length - 1] : 0;
  return [
    h("span", null, `step ${int(last)}`, told.total ? h("span.dim", null, ` of ${int(Math.max(told.total, last))}`) : null),
    h("code.dim", { title: `${told.path}, from ${told.base || "unknown weights"}` }, told.versions[told.versions.length - 1] || told.base || ""),
    told.elsewhere.length ? h("span.dim", { title: told.elsewhere.join("\n") }, `trains on ${many(told.elsewhere.length, "other run")} too`) : null,
  ];
}

/** Who waits for whom, in the trainer's and the proxy's own words. */
function waits(told) {
  const doing = told.doing;
  const lost = !told.running && doing && !doing.text.startsWith("ended");
  const out = [];
  if (told.running && doing) {
    out.push(h("span.wait", { class: doing.waiting ? "warn" : "good" }, `trainer: ${doing.text} `, h("span.dim.since", { data: { since: doing.since } }, ago(doing.since))));
  } else if (told.running) out.push(h("span.good", null, "trainer: at work"));
  else if (lost) out.push(h("span.bad", null, `the trainer is gone; it said last: ${doing.text}`), h("span.dim", null, "the same gyre train goes on from its last checkpoint"));
  else out.push(h("span.dim", null, doing ? `training ${doing.text}` : "no trainer is at work"));
  if (told.proxy) out.push(h("span.wait", null, told.proxy));
  return out;
}

const ago = (epoch) => `for ${took(Math.max(0, Date.now() / 1000 - epoch))}`;

function since() {
  if (!state.source?.live) return;
  for (const el of document.querySelectorAll("#training .since")) el.textContent = ago(Number(el.dataset.since));
}

/** Executions that run now; their trees grow where they are opened. */
function inFlight() {
  const running = (state.run?.executions || []).filter((one) => one.state === "running");
  if (!running.length) return null;
  const name = (one) => (one.task_id ? `${one.task_id}${one.sample_index === null ? "" : ` #${one.sample_index}`}` : one.execution_id.slice(0, 8));
  return h("span.in-flight", null, h("span.good", null, `${int(running.length)} in flight`),
    running.slice(-MOST_IN_FLIGHT).map((one) => h("button.jump", { title: one.execution_id, disabled: !one.num_calls, onclick: () => tell("go", { execution: one.execution_id }) }, name(one), h("span.dim", null, ` ${many(one.num_calls, "call")}`))),
    running.length > MOST_IN_FLIGHT ? h("button.more", { onclick: () => tell("list-executions") }, `all ${int(running.length)}`) : null);
}

function tiles(told) {
  const { columns, evals } = told;
  const steps = columns.step;
  const places = evals.map((one) => nearest(steps, one.step));
  const held = evals.map((one) => one.score);
  const waited = steps.map((_, i) => sum(waitsAt(columns, i).map(([, seconds]) => seconds)));
  const stale = columns.staleness_mean ? "staleness" : "age";
  return [
    tile("Reward", [columns.reward_mean, "train"], [held, "held-out", places]),
    tile("Loss", [columns.loss, "train"]),
    tile("Mismatch", [columns.mismatch_mean, "train"]),
    tile("Staleness", [columns[`${stale}_mean`], "train"], [columns[`${stale}_max`], "most"]),
    tile("Gradient tokens/s", [columns.trained_tokens_per_s, "train"]),
    tile("Seconds a step", [columns.seconds, "train"], [waited, "waited"]),
  ];
}

function tile(title, ...series) {
  const steps = stepsOf();
  const lines = series.filter(([values]) => values).map(([values, kind, places]) => ({ values, kind, places }));
  const at = (place) => lines.map(({ values, kind, places }) => [LABELS[kind], values[places ? places.lastIndexOf(place) : place]]).filter(([, value]) => value !== null && value !== undefined);
  const now = lines.map(({ values, kind }) => [LABELS[kind], values.findLast((value) => value !== null && value !== undefined), kind]).filter(([, value]) => value !== undefined && value !== null);
  const legend = now.map(([label, value, kind]) => h("span", { class: `value ${kind}` }, label ? `${label} ` : "", h("b", null, figure(value))));
  const words = (pairs) => pairs.map(([label, value]) => `${label ? `${label} ` : ""}${figure(value)}`).join(", ");
  return chart({
    title, lines, count: steps.length, chosen: chosen(), show: brief, now: legend,
    say: (place) => `step ${steps[place]}: ${words(at(place)) || "not recorded"}`,
    tip: (place) => [h("b", null, `step ${steps[place]} `), words(at(place)) || "not recorded", title === "Seconds a step" ? waitsAt(state.training.columns, place).map(([who, seconds]) => h("div.dim", null, `${who} ${took(seconds)}`)) : null],
    choose: (place, open) => tell("choose-step", { step: steps[place], open }),
  });
}

const LABELS = { train: "", "held-out": "held out", most: "max", waited: "waited" };

const WAITS = { rollout: "waited for rollouts", evaluate: "waited for an evaluation", plan: "laid out", save: "saved (step before)", publish: "published (step before)" };

/** What the trainer waited for in the step at `place`: [words, seconds], longest first. */
export function waitsAt(columns, place) {
  return Object.keys(columns).filter((name) => name.endsWith("_seconds")).map((name) => [WAITS[name.slice(0, -8)] || name.slice(0, -8), columns[name][place]])
    .filter(([, seconds]) => seconds).sort((a, b) => b[1] - a[1]);
}

const sum = (values) => values.reduce((a, b) => a + b, 0);

/** Place of the newest step up to `step`: an evaluation stands where the weights were that it judged. */
function nearest(steps, step) {
  let place = 0;
  while (place + 1 < steps.length && steps[place + 1] <= step) place++;
  return place;
}
