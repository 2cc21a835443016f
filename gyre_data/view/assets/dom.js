// Elements without markup: every text goes in as text, so nothing that was recorded can become a tag or a script.

/** h("div.row", {title: "x", onclick: f}, "text", child): an element; null children are left out. */
export function h(spec, props, ...children) {
  const [tag, ...classes] = spec.split(".");
  const el = document.createElement(tag || "div");
  if (classes.length) el.className = classes.join(" ");
  for (const [name, value] of Object.entries(props || {})) {
    if (value === null || value === undefined) continue;
    if (value === false && !name.startsWith("aria-")) continue;
    if (name.startsWith("on")) el.addEventListener(name.slice(2), value);
    else if (name === "class") el.className += (el.className ? " " : "") + value;
    else if (name === "data") Object.assign(el.dataset, value);
    else if (name === "style") for (const [k, v] of Object.entries(value)) el.style.setProperty(k, v);
    else el.setAttribute(name, value === true && !name.startsWith("aria-") ? "" : String(value));
  }
  add(el, children);
  return el;
}

/** An SVG element. */
export function s(tag, props, ...children) {
  const el = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(props || {})) {
    if (value !== null && value !== undefined) el.setAttribute(name, String(value));
  }
  add(el, children);
  return el;
}

function add(el, children) {
  for (const child of children.flat(3)) {
    if (child === null || child === undefined || child === false) continue;
    el.append(child instanceof Node ? child : String(child));
  }
}

/** Give `el` these children and no others. */
export function fill(el, ...children) {
  el.replaceChildren();
  add(el, children);
  return el;
}

export const $ = (id) => document.getElementById(id);

/** `text` with every occurrence of `needle` marked. */
export function marked(text, needle) {
  if (!needle) return [text];
  const out = [];
  const lower = text.toLowerCase();
  const low = needle.toLowerCase();
  let from = 0;
  for (let at = lower.indexOf(low); at >= 0 && lower.length === text.length; at = lower.indexOf(low, from)) {
    if (at > from) out.push(text.slice(from, at));
    out.push(h("mark", null, text.slice(at, at + low.length)));
    from = at + low.length;
  }
  out.push(text.slice(from));
  return out;
}
