// A list of rows of one height, of which only those in view exist: ten thousand cost what fifty do.

import { h } from "./dom.js";

/** Shows `rows` in `box`; `make(row, place)` gives the element of one. The selection is told to screen readers. */
export class VirtualList {
  constructor(box, height, make) {
    this.box = box;
    this.height = height;
    this.make = make;
    this.rows = [];
    this.active = -1;
    this.inner = h("div.virtual", { role: "presentation" });
    box.append(this.inner);
    box.addEventListener("scroll", () => this.draw(), { passive: true });
    new ResizeObserver(() => this.draw()).observe(box);
  }

  set(rows, active) {
    this.rows = rows;
    this.active = active;
    this.inner.style.height = `${rows.length * this.height}px`;
    this.draw(true);
  }

  /** Bring a row into view, with one row around it. */
  reveal(place) {
    const top = place * this.height;
    if (top < this.box.scrollTop + this.height) this.box.scrollTop = Math.max(0, top - this.height);
    else if (top + 2 * this.height > this.box.scrollTop + this.box.clientHeight) {
      this.box.scrollTop = top + 2 * this.height - this.box.clientHeight;
    }
    this.draw();
  }

  draw(anew) {
    const from = Math.max(0, Math.floor(this.box.scrollTop / this.height) - 8);
    const to = Math.min(this.rows.length, Math.ceil((this.box.scrollTop + this.box.clientHeight) / this.height) + 8);
    if (!anew && from === this.from && to === this.to) return;
    this.from = from;
    this.to = to;
    const shown = [];
    for (let place = from; place < to; place++) {
      const el = this.make(this.rows[place], place);
      el.style.top = `${place * this.height}px`;
      shown.push(el);
    }
    this.inner.replaceChildren(...shown);
  }
}
