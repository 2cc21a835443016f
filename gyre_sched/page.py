"""A comparison as one HTML page: the table, and for every rung the cells over time. It needs no network."""

from __future__ import annotations

import json
from html import escape
from typing import Any

from .experiment import Comparison
from .text import lines

__all__ = ["page"]

_COLOURS = {
    "rollout": "#8ab4d8",
    "busy": "#3f8f5b",
    "optimiser": "#1d5c36",
    "train": "#dfe8e1",
    "draining": "#d9a441",
    "to_train": "#d9a441",
    "to_rollout": "#d9a441",
    "down": "#c0392b",
}
_MEANING = {
    "rollout": "serves",
    "busy": "micro-steps",
    "optimiser": "optimiser",
    "train": "training, idle",
    "to_train": "switches",
    "down": "down",
}

_PAGE = """<!doctype html><html lang="en"><meta charset="utf-8"><title>%(title)s</title>
<style>body{font:14px system-ui,sans-serif;margin:2em;max-width:1100px}pre{overflow-x:auto}canvas{width:100%%;
display:block;margin:.3em 0 1.2em}.k i{display:inline-block;width:1em;
height:1em;margin:0 .3em 0 1em;vertical-align:-2px}
</style><h1>%(title)s</h1><pre>%(table)s</pre><p class="k">Cells over time, seed %(seed)s; core on top:%(key)s</p>
%(charts)s<script>const data=%(data)s,colours=%(colours)s;
for(const c of data){const el=document.getElementById(c.id),w=el.clientWidth*devicePixelRatio,row=16*devicePixelRatio;
el.width=w;el.height=row*c.cells.length;el.style.height=16*c.cells.length+'px';const g=el.getContext('2d');
for(const layer of [0,1])for(const [cell,what,a,b] of c.spans){
if((what=='busy'||what=='optimiser')!=(layer==1))continue;
g.fillStyle=colours[what];g.fillRect(a/c.longest*w,cell*row,Math.max(.5,(b-a)/c.longest*w),row-2)}
el.onmousemove=e=>{const h=e.offsetX/el.clientWidth*c.longest,i=Math.floor(e.offsetY/16);
el.title=c.cells[i]+' at '+h.toFixed(2)+' h'}}</script></html>
"""


def page(found: Comparison) -> str:
    """The whole page as text; charts share one time scale."""
    longest = max(outcome.runs[0].hours for outcome in found.outcomes)
    data: list[dict[str, Any]] = []
    charts = []
    for number, outcome in enumerate(found.outcomes):
        run = outcome.runs[0]
        cells = [f"c{i}" for i in range(outcome.rung.scenario.cells)]
        place = {cell: i for i, cell in enumerate(cells)}
        spans = [[place[s.cell], s.what, round(s.start_s / 3600, 3), round(s.end_s / 3600, 3)] for s in run.spans]
        data.append({"id": f"r{number}", "cells": cells, "longest": longest, "spans": spans})
        about = f"{outcome.rung.name}: {outcome.rung.about} ({run.hours:.2f} h)"
        charts.append(
            f'<div>{escape(about)}</div><canvas id="r{number}" role="img" aria-label="{escape(about)}"></canvas>'
        )
    key = "".join(f'<i style="background:{_COLOURS[what]}"></i>{text}' for what, text in _MEANING.items())
    return _PAGE % {
        "title": escape(found.title),
        "table": escape("\n".join(lines(found))),
        "seed": found.seeds[0],
        "key": key,
        "charts": "\n".join(charts),
        "data": json.dumps(data, separators=(",", ":")).replace("<", "\\u003c"),
        "colours": json.dumps(_COLOURS),
    }
