// What changed of a value, taken over; changes.py tells the form of a patch and makes them.

/** What `patch` makes of `old`. What did not change is the same object as before; `old` stays as it was. */
export function patched(old, patch) {
  if (Array.isArray(patch)) return patch[0];
  if (patch.parts) {
    const out = patch.parts.flatMap((part) => part.new || old.slice(...part.old));
    for (const [place, change] of Object.entries(patch.at)) out[place] = patched(out[place], change);
    return out;
  }
  const out = { ...old };
  for (const name of patch.gone) delete out[name];
  for (const [name, change] of Object.entries(patch.of)) out[name] = patched(old[name], change);
  return out;
}
