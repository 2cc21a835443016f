// Search of texts and tool names of the execution, role by role, with the place that each hit was said at.

import { $, fill, h, marked } from "./dom.js";
import { many } from "./format.js";
import { allText, parseMessage } from "./message.js";
import { state, tell } from "./store.js";

const SHOWN = 200;
const ROLES = { "": "any role", system: "system", user: "user", assistant: "assistant", tool: "tool results", "tool name": "tool names" };
let hits = [];
let active = -1;
let run = 0;

export function setUpSearch() {
  fill($("search-role"), Object.entries(ROLES).map(([value, title]) => h("option", { value }, title)));
  let waiting = 0;
  const soon = () => {
    clearTimeout(waiting);
    waiting = setTimeout(search, 120);
  };
  $("search").addEventListener("input", soon);
  $("search-role").addEventListener("change", search);
  $("search").addEventListener("focus", () => hits.length && open(true));
  $("find").addEventListener("keydown", key);
  $("found").addEventListener("mousedown", (event) => event.preventDefault());
  $("search").addEventListener("blur", () => setTimeout(() => !$("find").contains(document.activeElement) && open(false), 100));
}

const open = (yes) => {
  $("found").hidden = !yes;
  $("search").setAttribute("aria-expanded", String(yes));
};

async function search() {
  const mine = ++run;
  const wanted = $("search").value.trim();
  const role = $("search-role").value;
  if (wanted.length < 2) {
    open(false);
    hits = [];
    return;
  }
  const e = state.execution;
  const places = e.nodes.map((_, i) => i).filter((i) => e.blobs(i).length && (!role || role === "tool name" || e.nodes[i].message_role === role));
  const texts = await state.source.texts([...new Set(places.flatMap((i) => e.blobs(i)))]);
  if (mine !== run) return;
  hits = [];
  const low = wanted.toLowerCase();
  const cache = new Map();
  for (const i of places) {
    for (const id of e.blobs(i)) {
      if (!cache.has(id)) cache.set(id, spoken(texts.get(id), role));
      const text = cache.get(id);
      const at = text.toLowerCase().indexOf(low);
      if (at >= 0) hits.push({ i, text, at });
    }
  }
  active = hits.length ? 0 : -1;
  draw(wanted);
}

function spoken(text, role) {
  const message = parseMessage(text);
  if (role !== "tool name") return allText(message);
  return (message?.tool_calls || []).map((call) => call.name).join(" ");
}

function draw(wanted) {
  const e = state.execution;
  fill($("found"),
    h("div.found-head", { role: "status" }, hits.length ? `${many(hits.length, "message")} in this execution${hits.length > SHOWN ? `, the first ${SHOWN} listed` : ""}` : "nothing found in this execution"),
    hits.slice(0, SHOWN).map((hit, place) => {
      const node = e.nodes[hit.i];
      const call = e.callById.get(node.call_id);
      const from = Math.max(0, hit.at - 40);
      const snippet = (from ? "…" : "") + hit.text.slice(from, hit.at + wanted.length + 90).replace(/\s+/g, " ");
      return h("div.hit", { role: "option", id: `hit-${place}`, class: place === active ? "on" : "", "aria-selected": place === active, onclick: () => go(place) },
        h("code", null, call ? `c${call.number}` : "?"), h("span.tag", { class: `who-${node.message_role}` }, node.message_role || "?"), h("span.said", null, marked(snippet, wanted)));
    }));
  $("search").setAttribute("aria-activedescendant", active >= 0 ? `hit-${active}` : "");
  open(true);
}

function go(place) {
  const hit = hits[place];
  const call = state.execution.callById.get(state.execution.nodes[hit.i].call_id);
  active = place;
  if (call) tell("select", { call: call.number, node: hit.i });
  draw($("search").value.trim());
}

function key(event) {
  if (event.key === "Escape") {
    open(false);
    $("tree").focus();
  } else if (event.key === "Enter" && active >= 0) {
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
