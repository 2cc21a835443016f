// Tokens one by one, coloured by what training would do with them, or by how likely, how old, whose, or how far off.

import { h } from "./dom.js";
import { int, many } from "./format.js";
import { state } from "./store.js";
import { hideTip, showTip } from "./tip.js";

const CHUNK = 1500; // tokens drawn together, when they come into view

export const COLOURS = {
  mask: "mask, owner",
  logprob: "log-prob",
  version: "version",
  role: "role",
  gap: "recomputed",
};

/** A block of the tokens of one node; drawn chunk by chunk as it scrolls into view. */
export function tokenBlock(execution, place, arrays, words) {
  const node = execution.nodes[place];
  if (node.counted) return h("div.dim", null, `${many(node.num_tokens, "token")}, counted: ids are not known`);
  const view = new TokenView(execution, node, arrays, words);
  const box = h("div.tokens", { tabindex: "0", role: "group", "aria-label": `${arrays.ids.length} tokens; arrow keys walk` });
  for (let from = 0; from < arrays.ids.length; from += CHUNK) {
    const to = Math.min(arrays.ids.length, from + CHUNK);
    const part = h("div.chunk");
    part.style.minHeight = `${Math.ceil((to - from) / 22) * 20}px`;
    part.draw = () => {
      if (part.firstChild) return;
      part.style.minHeight = "";
      view.draw(part, from, to);
    };
    box.append(part);
    if (from === 0) part.draw();
    else whenSeen(part);
  }
  box.addEventListener("mousemove", (event) => {
    const el = event.target.closest(".tok");
    if (el) showTip(event.clientX, event.clientY, view.tell(el.place));
    else hideTip();
  });
  box.addEventListener("mouseleave", hideTip);
  box.addEventListener("blur", hideTip);
  box.addEventListener("keydown", (event) => walk(event, box, view));
  return box;
}

let seen = null;

function whenSeen(el) {
  seen = seen || new IntersectionObserver((entries) => {
    for (const entry of entries) {
      if (!entry.isIntersecting) continue;
      seen.unobserve(entry.target);
      entry.target.draw();
    }
  }, { rootMargin: "600px" });
  seen.observe(el);
}

function walk(event, box, view) {
  const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  if (!step) return;
  event.preventDefault();
  event.stopPropagation();
  const now = box.querySelector(".tok.cursor");
  const next = Math.min(view.ids.length - 1, Math.max(0, now ? now.place + step : 0));
  const part = box.children[Math.floor(next / CHUNK)];
  part.draw();
  now?.classList.remove("cursor");
  const el = part.children[next % CHUNK];
  el.classList.add("cursor");
  el.scrollIntoView({ block: "nearest" });
  const at = el.getBoundingClientRect();
  showTip(at.left, at.top, view.tell(next));
}

/** Colours and facts of the tokens of a node. */
class TokenView {
  constructor(execution, node, arrays, words) {
    this.node = node;
    this.ids = arrays.ids;
    this.logprobs = arrays.logprobs;
    this.words = words.texts;
    this.owner = execution.ownerOf.get(node.node_id);
    this.excluded = execution.excludedCall.get(node.call_id);
    this.teacher = node.teachers?.[0] || null;
    this.versions = execution.versions;
  }

  draw(part, from, to) {
    for (let i = from; i < to; i++) {
      const word = this.words[this.ids[i]];
      const el = document.createElement("span");
      el.className = `tok ${this.colour(i)}`;
      el.textContent = word === undefined ? `${this.ids[i]} ` : visible(word);
      el.place = i;
      part.append(el);
      if (word !== undefined && word.includes("\n")) part.lastChild.classList.add("br");
    }
  }

  version(i) {
    const span = (this.node.versions || []).find(([, start, end]) => i >= start && i < end);
    return span ? span[0] : null;
  }

  colour(i) {
    switch (state.colour) {
      case "mask":
        if (this.owner !== undefined) return `own own-${this.owner % 6}`;
        return this.node.kind === "output" ? "unowned" : "";
      case "logprob":
        return this.logprobs ? `heat heat-${level(-this.logprobs[i], [0.02, 0.1, 0.4, 1, 2, 4, 7])}` : "";
      case "version": {
        const version = this.version(i);
        return version === null ? "" : `ver ver-${this.versions.indexOf(version) % 6}`;
      }
      case "role":
        return `is-${this.node.message_role || "none"}`;
      case "gap": {
        const gap = this.gap(i);
        return gap === null ? "" : `heat heat-${level(Math.abs(gap), [0.002, 0.01, 0.03, 0.1, 0.3, 1, 3])}`;
      }
      default:
        return "";
    }
  }

  gap(i) {
    return this.teacher && this.logprobs ? this.teacher.logprobs[i] - this.logprobs[i] : null;
  }

  /** Everything known of token i. */
  tell(i) {
    const word = this.words[this.ids[i]];
    const rows = [["token", `${int(i + 1)} of ${int(this.ids.length)}, position ${int(this.node.start_pos + i)}`], ["id", String(this.ids[i])]];
    if (word !== undefined) rows.push(["text", JSON.stringify(word)]);
    if (this.logprobs) rows.push(["log-prob", `${this.logprobs[i].toFixed(4)}  (p ${Math.exp(this.logprobs[i]).toFixed(4)})`]);
    if (this.gap(i) !== null) rows.push([this.teacher.teacher, `${this.teacher.logprobs[i].toFixed(4)}  (gap ${this.gap(i).toFixed(4)})`]);
    if (this.version(i) !== null) rows.push(["version", this.version(i)]);
    rows.push(["author", this.node.author]);
    if (this.node.kind === "output") {
      rows.push(["loss", this.owner !== undefined ? `trained in trajectory ${this.owner}` : `not trained: ${this.excluded ? this.excluded.reason : "no trajectory owns it"}`]);
    } else rows.push(["loss", "context, not trained"]);
    return h("table", null, rows.map(([name, value]) => h("tr", null, h("th", null, name), h("td", null, value))));
  }
}

const visible = (word) => word.replaceAll("\n", "↵\n").replaceAll("\t", "→\t") || "∅";

function level(value, cuts) {
  const found = cuts.findIndex((cut) => value < cut);
  return found < 0 ? cuts.length : found;
}

/** What the colours mean, for the execution at hand. */
export function legend(execution) {
  const chip = (kind, text) => h("span.chip", null, h("span.tok", { class: kind }, "  "), text);
  switch (state.colour) {
    case "mask":
      return [...execution.raw.trajectories.map((t) => chip(`own own-${t.index % 6}`, `trajectory ${t.index} (${t.role})`)), chip("unowned", "sampled, not trained"), chip("", "context")];
    case "logprob":
      return [chip("heat heat-0", "> −0.02"), chip("heat heat-2", "−0.4"), chip("heat heat-4", "−2"), chip("heat heat-7", "< −7"), chip("", "not sampled")];
    case "version":
      return execution.versions.length ? execution.versions.map((name, i) => chip(`ver ver-${i % 6}`, name)) : ["no version recorded"];
    case "role":
      return ["system", "user", "assistant", "tool"].map((name) => chip(`is-${name}`, name));
    case "gap": {
      const known = execution.nodes.some((node) => node.teachers);
      return known ? [chip("heat heat-0", "< 0.002"), chip("heat heat-3", "0.1"), chip("heat heat-7", "> 3")]
        : ["no recomputed log-probs in this run (table teacher_logprobs)"];
    }
    default:
      return [];
  }
}
