// One message: who said it, what was said, which tools were called. Long ones open in full on demand.

import { h } from "./dom.js";
import { clip, int, many, words } from "./format.js";

const LINES = 24;
const CHARS = 2400;

/** A parsed message of `text`; a text that is no JSON is shown as it is. */
export function parseMessage(text) {
  if (text === null || text === undefined) return null;
  try {
    const value = JSON.parse(text);
    if (value && typeof value === "object" && !Array.isArray(value)) return value;
  } catch { /* shown as it is */ }
  return { role: "", content: text };
}

/** What a message says, as one text: content, reasoning, tool names and arguments. For search and comparison. */
export function allText(message) {
  if (!message) return "";
  const calls = (message.tool_calls || []).map((call) => `${call.name} ${argumentText(call.arguments)}`);
  return [contentText(message.reasoning), contentText(message.content), ...calls].filter(Boolean).join("\n");
}

export function contentText(content) {
  if (content === null || content === undefined) return "";
  if (typeof content === "string") return content;
  if (Array.isArray(content)) return content.map((block) => (typeof block === "string" ? block : block?.text ?? `[${block?.type ?? "block"}] ${JSON.stringify(block)}`)).join("\n");
  return JSON.stringify(content, null, 2);
}

export const argumentText = (value) => (typeof value === "string" ? value : JSON.stringify(value ?? {}, null, 1));

/** The body of a message. `more(call, place)` gives extra elements for a tool call. */
export function messageBody(message, more) {
  const out = [];
  const reasoning = contentText(message.reasoning);
  const content = contentText(message.content);
  if (reasoning) out.push(h("div.reasoning", null, h("span.tag", null, "reasoning"), longText(reasoning)));
  if (content) out.push(h("div.content", { class: message.role === "tool" ? "mono" : "" }, longText(content)));
  (message.tool_calls || []).forEach((call, place) => out.push(toolCall(call, more ? more(call, place) : null)));
  const rest = Object.keys(message).filter((key) => !["role", "content", "reasoning", "tool_calls", "tool_call_id", "name", "node_hint"].includes(key));
  for (const key of rest) {
    out.push(h("details.rest", null, h("summary", null, words(key)), h("pre", null, longText(JSON.stringify(message[key], null, 1)))));
  }
  if (!out.length) out.push(h("div.dim", null, "empty"));
  return out;
}

function toolCall(call, extra) {
  const args = call.arguments;
  const known = args && typeof args === "object" && !Array.isArray(args);
  return h("div.toolcall", null,
    h("div.line", null, h("span.tool", null, call.name || "tool"), call.id ? h("code.dim", null, clip(String(call.id), 40)) : null, h("span.grow"), extra),
    known ? h("dl", null, Object.entries(args).map(([name, value]) => argument(name, value)))
      : h("pre", null, longText(argumentText(args))));
}

function argument(name, value) {
  const text = typeof value === "string" ? value : JSON.stringify(value, null, 1);
  return [h("dt", null, name), h("dd", { class: text.includes("\n") || text.length > 100 ? "block" : "" }, longText(text))];
}

/** A text whose beginning is shown, with a way to the whole. */
export function longText(text) {
  const lines = text.split("\n");
  if (lines.length <= LINES + 6 && text.length <= CHARS + 600) return text;
  const start = lines.slice(0, LINES).join("\n").slice(0, CHARS);
  const box = h("span", null, start);
  const button = h("button.more", {
    onclick: (event) => {
      event.stopPropagation();
      box.replaceChildren(text);
    },
  }, `show all ${many(lines.length, "line")}, ${int(text.length)} characters`);
  box.append("\n", button);
  return box;
}
