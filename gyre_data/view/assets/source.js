// Where the data comes from: the server that made this page, or the chunks inside it. Both answer the same questions.

import { patched } from "./changes.js";

const RUN = "/api/run?";
const TRAINING = "/api/training?";
const STEPS_TOGETHER = 50; // of a report, as report.py packs them
const MOST_KEPT = 8; // executions looked at, so that coming back to one asks for what changed

/** The source of this page. */
export function openSource() {
  return document.documentElement.dataset.source === "served" ? new Served() : new Report();
}

/** A self-contained report: deflated chunks in script elements, inflated when first asked for. */
class Report {
  constructor() {
    this.live = false;
    this.kept = new Map();
  }

  async bytes(name) {
    const el = document.getElementById(`data:${name}`);
    if (!el) throw new Error(`the report holds no ${name}; write it anew with gyre view -o`);
    const packed = unbase64(el.textContent);
    const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate-raw"));
    return new Uint8Array(await new Response(stream).arrayBuffer());
  }

  once(name, make) {
    if (!this.kept.has(name)) this.kept.set(name, make());
    return this.kept.get(name);
  }

  json(name) {
    return this.once(name, async () => JSON.parse(new TextDecoder().decode(await this.bytes(name))));
  }

  run() { return this.json("run"); }

  figures() { return this.json("figures"); }

  /** What is told of training beside the run; null when there is none. */
  training() { return this.json("training"); }

  async step(step) {
    const place = (await this.training()).columns.step.indexOf(step);
    return (await this.json(`steps:${Math.floor(place / STEPS_TOGETHER)}`))[place % STEPS_TOGETHER];
  }

  async execution(id) {
    const run = await this.run();
    const found = await this.json(`execution:${run.executions.findIndex((e) => e.execution_id === id)}`);
    if (found.problem) throw new Error(found.problem);
    return found;
  }

  async texts(ids) {
    const place = await this.json("bundles");
    const out = new Map();
    const wanted = new Set(ids.map((id) => place[id]).filter((n) => n !== undefined));
    const bundles = new Map(await Promise.all([...wanted].map(async (n) => [n, await this.json(`texts:${n}`)])));
    for (const id of ids) out.set(id, bundles.get(place[id])?.[id] ?? null);
    return out;
  }

  /** Token arrays by node id for these nodes of `execution`. */
  async tokens(execution, nodes) {
    const run = await this.run();
    const number = run.executions.findIndex((e) => e.execution_id === execution.id);
    const every = await this.once(`tokens:${number}`, async () => {
      const ids = new Int32Array((await this.bytes(`ids:${number}`)).buffer);
      const planes = await this.bytes(`logprobs:${number}`);
      return cut(execution.nodes, ids, new Float32Array(unplane(planes).buffer));
    });
    return new Map(nodes.map((node) => [node.node_id, every.get(node.node_id)]));
  }

  vocabulary() { return this.json("vocabulary"); }

  follow() {}
}

/** The server of `gyre view`: asks by HTTP, keeps what never changes, and hears of news. */
class Served {
  constructor() {
    this.live = true;
    this.asked = 0;
    this.toldOf = new Map(); // address -> the value, its version, and when it was asked for
    this.textOf = new Map();
    this.tokensOf = new Map();
    this.wordOf = {};
    this.problem = null;
  }

  async get(path, body) {
    const options = body && { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) };
    const answer = await fetch(path, options || {});
    if (!answer.ok) throw new Error(await answer.text());
    return answer;
  }

  /** What the server tells at `path`: whole at first, then what changed since. */
  async moving(path) {
    const asked = ++this.asked;
    const known = this.toldOf.get(path);
    const answer = await this.get(known ? `${path}since=${known.version}` : path);
    const { version, whole, steps } = await answer.json();
    const value = steps ? steps.reduce(patched, known.value) : whole;
    const later = this.toldOf.get(path);
    if (later && later.asked > asked) return later.value; // it came before this one
    this.toldOf.delete(path);
    this.toldOf.set(path, { version, value, asked });
    if (this.toldOf.size > MOST_KEPT) this.toldOf.delete(this.toldOf.keys().next().value);
    return value;
  }

  run() { return this.moving(RUN); }

  /** Version of the run that was told last. */
  get version() { return this.toldOf.get(RUN)?.version; }

  async figures() { return (await this.get("/api/figures")).json(); }

  training() { return this.moving(TRAINING); }

  async step(step) { return (await this.get(`/api/step?n=${step}`)).json(); }

  execution(id) { return this.moving(`/api/execution?id=${encodeURIComponent(id)}&`); }

  async texts(ids) {
    const missing = ids.filter((id) => !this.textOf.has(id));
    for (let at = 0; at < missing.length; at += 2000) {
      const found = await (await this.get("/api/texts", { ids: missing.slice(at, at + 2000) })).json();
      for (const [id, text] of Object.entries(found)) this.textOf.set(id, text);
    }
    return new Map(ids.map((id) => [id, this.textOf.get(id) ?? null]));
  }

  async tokens(execution, nodes) {
    const missing = nodes.filter((node) => !this.tokensOf.has(node.node_id));
    if (missing.length) {
      const body = { execution: execution.id, nodes: missing.map((node) => node.node_id) };
      const data = await (await this.get("/api/tokens", body)).arrayBuffer();
      const numIds = missing.reduce((n, node) => n + (node.counted ? 0 : node.num_tokens), 0);
      const found = cut(missing, new Int32Array(data, 0, numIds), new Float32Array(data, 4 * numIds));
      for (const [id, arrays] of found) this.tokensOf.set(id, arrays);
    }
    return new Map(nodes.map((node) => [node.node_id, this.tokensOf.get(node.node_id)]));
  }

  async vocabulary(ids) {
    const missing = [...new Set(ids)].filter((id) => !(id in this.wordOf));
    if (missing.length && !this.problem) {
      const found = await (await this.get("/api/vocabulary", { ids: missing })).json();
      this.problem = found.problem;
      Object.assign(this.wordOf, found.texts);
    }
    return { problem: this.problem, texts: this.wordOf };
  }

  /** Call `changed` with the version whenever the run has another, `trained` when training went on; `state` hears whether the server is there. */
  follow(changed, trained, state) {
    const events = new EventSource("/api/events");
    events.onmessage = (event) => changed(Number(event.data));
    events.addEventListener("training", (event) => Number(event.data) !== this.toldOf.get(TRAINING)?.version && trained());
    events.onopen = () => state(true);
    events.onerror = () => state(false);
  }
}

/** Ids and log-probs of these nodes, which lie end to end. */
function cut(nodes, ids, logprobs) {
  const out = new Map();
  let i = 0;
  let p = 0;
  for (const node of nodes) {
    const n = node.counted ? 0 : node.num_tokens;
    out.set(node.node_id, {
      ids: ids.subarray(i, i + n),
      logprobs: node.has_logprobs ? logprobs.subarray(p, p + n) : null,
    });
    i += n;
    if (node.has_logprobs) p += n;
  }
  return out;
}

function unbase64(text) {
  const raw = atob(text.trim());
  const out = new Uint8Array(raw.length);
  for (let i = 0; i < raw.length; i++) out[i] = raw.charCodeAt(i);
  return out;
}

/** Bytes that lie in four planes, put together again. */
function unplane(planes) {
  const n = planes.length / 4;
  const out = new Uint8Array(planes.length);
  for (let byte = 0; byte < 4; byte++) for (let i = 0; i < n; i++) out[4 * i + byte] = planes[byte * n + i];
  return out;
}
