"""A comparison as one HTML page: the table, and for every rung the cells over time. It needs no network."""

from __future__ import annotations

import json
from html import escape
from typing import Any

from .experiment import Comparison, Outcome
from .text import lines

__all__ = ["page"]

_KINDS = {
    "rollout": ("serves", "#7aa6cf", "#4f7fae"),
    "busy": ("micro-steps", "#2f8f57", "#3fa76a"),
    "optimiser": ("optimiser", "#174a2c", "#b7e3c6"),
    "train": ("training, idle", "#d9dfda", "#3a413c"),
    "switch": ("switches", "#d08a1d", "#e0a63c"),
    "down": ("down", "#c0392b", "#e05a4b"),
}
"""Meaning, colour on white, colour on black."""
_SWITCHES = {"draining", "to_train", "to_rollout"}

_PAGE = """<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>%(title)s</title>
<style>:root{color-scheme:light dark;%(light)s}@media(prefers-color-scheme:dark){:root{%(dark)s}}
body{font:14px/1.45 system-ui,sans-serif;margin:1.5em auto;padding:0 1.5em;max-width:1100px}
h1{font-size:1.4em}h2{font-size:1em;margin:1.2em 0 .2em}h2 span{font-weight:normal}
pre{overflow-x:auto;font-size:13px}canvas{width:100%%;display:block}output{display:block;min-height:1.45em}
.key span{white-space:nowrap;margin-right:1.1em}.key i{display:inline-block;width:.9em;height:.9em;margin-right:.35em;
vertical-align:-1px}.key i.line{width:0;border-left:2px solid;opacity:.55}
</style><h1>%(title)s</h1><pre>%(table)s</pre>
<p class="key">Cells over time, seed %(seed)s, the core on top. %(key)s</p>
%(charts)s<script>const rungs=%(data)s,kinds=%(kinds)s;
const GUTTER=44,AXIS=20,css=name=>getComputedStyle(document.documentElement).getPropertyValue('--'+name);
const work=what=>what=='busy'||what=='optimiser';
function draw(rung){
  const canvas=document.getElementById(rung.id),count=rung.cells.length,row=Math.max(3,Math.min(16,640/count));
  const width=canvas.clientWidth,height=row*count+AXIS,scale=devicePixelRatio,ink=getComputedStyle(canvas).color;
  canvas.style.height=height+'px';canvas.width=width*scale;canvas.height=height*scale;
  const g=canvas.getContext('2d'),x=hours=>GUTTER+hours/rung.longest*(width-GUTTER-8);
  g.scale(scale,scale);g.font='11px system-ui,sans-serif';g.textBaseline='middle';g.fillStyle=ink;
  const every=Math.ceil(12/row);
  rung.cells.forEach((name,i)=>{if(i%%every==0)g.fillText(i?name:'core',0,row*i+row/2)});
  for(const over of [false,true])for(const [cell,what,a,b] of rung.spans){
    if(work(what)!=over)continue;
    g.fillStyle=css(what);g.fillRect(x(a),cell*row,Math.max(what=='switch'?1.5:.5,x(b)-x(a)),row-Math.min(2,row/4))}
  g.fillStyle=ink;g.globalAlpha=.55;for(const at of rung.steps)g.fillRect(x(at)-.5,0,1,row*count);g.globalAlpha=1;
  const rough=rung.longest/8,unit=10**Math.floor(Math.log10(rough));
  const tick=unit*[1,2,5,10].find(n=>n*unit>=rough);
  for(let at=0,n=0;at<=rung.longest*1.0001;at=tick*++n){
    const text=+at.toPrecision(6)+(n?'':' h'),wide=g.measureText(text).width;
    g.fillRect(x(at),row*count,1,4);g.fillText(text,Math.min(x(at)-(n?wide/2:0),width-wide),row*count+12)}
  canvas.onmousemove=event=>{
    const hours=(event.offsetX-GUTTER)/(width-GUTTER-8)*rung.longest,cell=Math.floor(event.offsetY/row);
    const here=rung.spans.filter(([i,,a,b])=>i==cell&&a<=hours&&hours<b).map(span=>span[1]);
    const what=here.find(work)||here[0];
    canvas.nextElementSibling.value=what?rung.cells[cell]+' at '+hours.toFixed(2)+' h: '+kinds[what]:''}}
const all=()=>rungs.forEach(draw);
addEventListener('resize',all);matchMedia('(prefers-color-scheme:dark)').addEventListener('change',all);all();
document.documentElement.dataset.ready='yes'</script></html>
"""


def page(found: Comparison) -> str:
    """The whole page as text; charts share one time scale, and a line in them is a step that was applied."""
    longest = max(outcome.runs[0].hours for outcome in found.outcomes)
    charts = [_chart(outcome, number) for number, outcome in enumerate(found.outcomes)]
    data = [_data(outcome, number, longest) for number, outcome in enumerate(found.outcomes)]
    key = "".join(
        f'<span><i style="background:var(--{kind})"></i>{text}</span>' for kind, (text, _, _) in _KINDS.items()
    )
    return _PAGE % {
        "title": escape(found.title),
        "table": escape("\n".join(lines(found))),
        "seed": found.seeds[0],
        "light": "".join(f"--{kind}:{light};" for kind, (_, light, _) in _KINDS.items()),
        "dark": "".join(f"--{kind}:{dark};" for kind, (_, _, dark) in _KINDS.items()),
        "key": key + '<span><i class="line"></i>a step applied</span>',
        "charts": "\n".join(charts),
        "data": json.dumps(data, separators=(",", ":")).replace("<", "\\u003c"),
        "kinds": json.dumps({kind: text for kind, (text, _, _) in _KINDS.items()}),
    }


def _chart(outcome: Outcome, number: int) -> str:
    name, about = escape(outcome.rung.name), f"{escape(outcome.rung.about)} ({outcome.runs[0].hours:.2f} h)"
    return (
        f"<h2>{name} <span>{about}</span></h2>"
        f'<canvas id="r{number}" role="img" aria-label="{name}: {about}"></canvas><output></output>'
    )


def _data(outcome: Outcome, number: int, longest: float) -> dict[str, Any]:
    run, cells = outcome.runs[0], [f"c{i}" for i in range(outcome.rung.scenario.cells)]
    place = {cell: i for i, cell in enumerate(cells)}
    spans = [
        [
            place[s.cell],
            "switch" if s.what in _SWITCHES else s.what,
            round(s.start_s / 3600, 4),
            round(s.end_s / 3600, 4),
        ]
        for s in run.spans
    ]
    steps = [round(end_h, 3) for end_h in run.step_ends_h]
    return {"id": f"r{number}", "cells": cells, "longest": longest, "spans": spans, "steps": steps}
