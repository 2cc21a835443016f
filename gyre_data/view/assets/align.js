// The shortest edit between two lists (Myers), and of two texts word by word.

const MOST = 4000; // edits beyond which the rest is taken as replaced: it is no longer the same text

/** [{a, b}] pairs of places in order: both set where equal, one null where only one side has it. */
export function align(a, b, same = (x, y) => x === y) {
  let start = 0;
  while (start < a.length && start < b.length && same(a[start], b[start])) start++;
  let tail = 0;
  while (tail < a.length - start && tail < b.length - start && same(a[a.length - 1 - tail], b[b.length - 1 - tail])) tail++;
  const out = [];
  for (let i = 0; i < start; i++) out.push({ a: i, b: i });
  out.push(...middle(a.slice(start, a.length - tail), b.slice(start, b.length - tail), same).map((p) => ({
    a: p.a === null ? null : p.a + start, b: p.b === null ? null : p.b + start,
  })));
  for (let i = tail; i > 0; i--) out.push({ a: a.length - i, b: b.length - i });
  return out;
}

function middle(a, b, same) {
  const n = a.length;
  const m = b.length;
  const most = Math.min(n + m, MOST);
  const trace = [];
  let v = new Map([[1, 0]]);
  for (let d = 0; d <= most; d++) {
    trace.push(new Map(v));
    for (let k = -d; k <= d; k += 2) {
      let x = k === -d || (k !== d && (v.get(k - 1) ?? -1) < (v.get(k + 1) ?? -1)) ? v.get(k + 1) ?? 0 : (v.get(k - 1) ?? 0) + 1;
      while (x < n && x - k < m && same(a[x], b[x - k])) x++;
      v.set(k, x);
      if (x >= n && x - k >= m) return back(trace, n, m);
    }
    if (trace.length * (2 * d + 1) > 4e6) break;
  }
  return [...a.map((_, i) => ({ a: i, b: null })), ...b.map((_, i) => ({ a: null, b: i }))];
}

function back(trace, n, m) {
  const out = [];
  let x = n;
  let y = m;
  for (let d = trace.length - 1; d >= 0; d--) {
    const v = trace[d];
    const k = x - y;
    const up = k === -d || (k !== d && (v.get(k - 1) ?? -1) < (v.get(k + 1) ?? -1));
    const px = d === 0 ? 0 : v.get(up ? k + 1 : k - 1) ?? 0;
    const py = d === 0 ? 0 : px - (up ? k + 1 : k - 1);
    while (x > px && y > py && x > 0 && y > 0) out.push({ a: --x, b: --y });
    if (d > 0) out.push(up ? { a: null, b: --y } : { a: --x, b: null });
  }
  return out.reverse();
}

/** Words of a text with the blanks behind them. */
export const wordsOf = (text) => text.match(/\s+|[\p{L}\p{N}_]+|[^\s\p{L}\p{N}_]/gu) || [];
