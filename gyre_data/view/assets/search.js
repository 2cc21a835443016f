// Search of texts and tool names, role by role, of the execution or of the whole run.

import { $, fill, h, marked } from "./dom.js";
import { many, short } from "./format.js";
import { allText, parseMessage } from "./message.js";
import { Execution } from "./model.js";
import { state, tell } from "./store.js";

const SHOWN = 200;
const ROLES = { "": "any role", system: "system", user: "user", assistant: "assistant", tool: "tool results", "tool name": "tool names" };
let hits = [];
let active = -1;
let run = 0;
let everywhere = false;
let searched = null; // what the hits are of: an execution as it was, or true for all of them

export function setUpSearch() {
  fill($("search-role"), Object.entries(ROLES).map(([value, title]) => h("option", { value }, title)));
  let waiting = 0;
  const soon = () => {
    clearTimeout(waiting);
    waiting = setTimeout(search, 120);
  };
  $("search").addEventListener("input", soon);
  $("search-role").addEventListener("change", search);
  $("search").addEventListener("focus", () => (searched === subject() ? hits.length && open(true) : search()));
  $("find").addEventListener("keydown", key);
  $("found").addEventListener("mousedown", (event) => event.preventDefault());
  $("search").addEventListener("blur", () => setTimeout(() => !$("find").contains(document.activeElement) && open(false), 100));
}

const subject = () => everywhere || state.execution;

const open = (yes) => {
  $("found").hidden = !yes;
  $("search").setAttribute("aria-expanded", String(yes));
};

async function search() {
  const mine = ++run;
  const wanted = $("search").value.trim();
  const role = $("search-role").value;
  hits = [];
  active = -1;
  searched = subject();
  if (wanted.length < 2 || !state.execution) {
    open(false);
    return;
  }
  const rows = everywhere ? state.run.executions.filter((one) => one.num_calls) : [{ execution_id: state.execution.id }];
  for (const [place, { execution_id: id }] of rows.entries()) {
    const e = id === state.execution.id ? state.execution : new Execution(await state.source.execution(id));
    const found = await within(e, wanted.toLowerCase(), role);
    if (mine !== run) return;
    hits.push(...found);
    active = hits.length ? 0 : -1;
    draw(wanted, place + 1 < rows.length ? `${place + 1} of ${many(rows.length, "execution")} searched` : null);
  }
}

/** The messages of one execution that say it. */
async function within(e, low, role) {
  const places = e.nodes.map((_, i) => i).filter((i) => e.blobs(i).length && (!role || role === "tool name" || e.nodes[i].message_role === role));
  const texts = await state.source.texts([...new Set(places.flatMap((i) => e.blobs(i)))]);
  const found = [];
  const cache = new Map();
  for (const i of places) {
    for (const id of e.blobs(i)) {
      if (!cache.has(id)) cache.set(id, spoken(texts.get(id), role));
      const text = cache.get(id);
      const at = text.toLowerCase().indexOf(low);
      if (at >= 0) found.push({ e, i, text, at });
    }
  }
  return found;
}

function spoken(text, role) {
  const message = parseMessage(text);
  if (role !== "tool name") return allText(message);
  return (message?.tool_calls || []).map((call) => call.name).join(" ");
}

function draw(wanted, progress) {
  const where = everywhere ? "the run" : "this execution";
  const count = hits.length ? `${many(hits.length, "message")} in ${where}${hits.length > SHOWN ? `, the first ${SHOWN} listed` : ""}` : `nothing found in ${where}`;
  fill($("found"),
    h("div.found-head.line", null, h("span", { role: "status" }, progress || count), h("span.grow"),
      state.run.executions.length > 1 ? h("button.flat", { "aria-pressed": everywhere, title: "Ctrl+Enter", onclick: widen }, "every execution") : null),
    hits.slice(0, SHOWN).map((hit, place) => {
      const node = hit.e.nodes[hit.i];
      const call = hit.e.callById.get(node.call_id);
      const from = Math.max(0, hit.at - 40);
      const snippet = (from ? "…" : "") + hit.text.slice(from, hit.at + wanted.length + 90).replace(/\s+/g, " ");
      return h("div.hit", { role: "option", id: `hit-${place}`, class: place === active ? "on" : "", "aria-selected": place === active, onclick: () => go(place) },
        everywhere ? h("code.dim", null, short(hit.e.id)) : null, h("code", null, call ? `c${call.number}` : "?"),
        h("span.tag", { class: `who-${node.message_role}` }, node.message_role || "?"), h("span.said", null, marked(snippet, wanted)));
    }));
  $("search").setAttribute("aria-activedescendant", active >= 0 ? `hit-${active}` : "");
  open(true);
}

/** Search the whole run, or the execution at hand. */
function widen() {
  everywhere = !everywhere;
  search();
}

function go(place) {
  const { e, i } = hits[place];
  active = place;
  tell("go", { execution: e.id, call: e.nodes[i].call_id, node: e.nodes[i].node_id });
  draw($("search").value.trim());
}

function key(event) {
  if (event.key === "Escape") {
    open(false);
    $("tree").focus();
  } else if (event.key === "Enter" && event.ctrlKey) widen();
  else if (event.key === "Enter" && active >= 0) {
    go(active);
    open(false);
    $("talk").focus();
  } else if ((event.key === "ArrowDown" || event.key === "ArrowUp") && event.target === $("search")) {
    active = Math.max(0, Math.min(Math.min(hits.length, SHOWN) - 1, active + (event.key === "ArrowDown" ? 1 : -1)));
    draw($("search").value.trim());
    $(`hit-${active}`)?.scrollIntoView({ block: "nearest" });
  } else return;
  event.preventDefault();
  event.stopPropagation();
}
