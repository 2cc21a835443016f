// One tooltip for the page.

import { $, fill } from "./dom.js";

export function showTip(x, y, content) {
  const tip = $("tip");
  fill(tip, content);
  tip.hidden = false;
  const { offsetWidth: w, offsetHeight: t } = tip;
  tip.style.left = `${Math.max(4, Math.min(x + 12, innerWidth - w - 6))}px`;
  tip.style.top = `${y + 18 + t > innerHeight ? Math.max(4, y - t - 10) : y + 18}px`;
}

export function hideTip() {
  $("tip").hidden = true;
}
