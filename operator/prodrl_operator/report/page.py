"""One page in two forms: live (polls loopback) and a self-contained report file. Pure text building."""

from __future__ import annotations

import html
import json
from typing import Any

from plotly.offline import get_plotlyjs

from prodrl_operator.report.figures import all_figures
from prodrl_operator.report.snapshot import Snapshot
from prodrl_operator.report.summary import summary

STYLE = """
body{font:15px/1.5 system-ui,sans-serif;margin:0;color:#222;background:#fafafa}
header{background:#1d2b3a;color:#fff;padding:18px 28px}header h1{margin:0;font-size:22px}
main{padding:18px 28px;max-width:1300px;margin:auto}
.cards{display:flex;flex-wrap:wrap;gap:14px;margin-bottom:18px}
.card{background:#fff;border:1px solid #e2e2e2;border-radius:8px;padding:10px 16px;min-width:130px}
.card b{display:block;font-size:22px}.card span{color:#666;font-size:13px}
.grid{display:grid;grid-template-columns:repeat(auto-fit,minmax(460px,1fr));gap:14px}
.figure{min-width:0;overflow:hidden;background:#fff;border:1px solid #e2e2e2;border-radius:8px}
table{border-collapse:collapse;width:100%;background:#fff;margin:14px 0}
td,th{border:1px solid #e2e2e2;padding:5px 9px;text-align:left;vertical-align:top;font-size:14px}
.Promoted{color:#2f9e63;font-weight:600}.Blocked,.Failed{color:#c8452f;font-weight:600}
"""

SCRIPT = """
function draw(data){
  document.getElementById('body').innerHTML=data.body;
  const grid=document.getElementById('grid');
  data.figures.forEach((_,i)=>{ if(document.getElementById('f'+i))return;
    const d=document.createElement('div');d.className='figure';d.id='f'+i;grid.appendChild(d);});
  data.figures.forEach((f,i)=>Plotly.react('f'+i,f.data,f.layout,{displaylogo:false,responsive:true,
    displayModeBar:false}));
}
async function poll(){try{draw(await (await fetch('data.json')).json());}catch(e){
  document.title='(stopped) '+document.title.replace('(stopped) ','');}
  setTimeout(poll,3000);}
"""


def _cards(facts: dict[str, Any], snapshot: Snapshot) -> str:
    stable, current = facts["stable"], snapshot.run.status.current_round
    requests = facts["requests"]
    cards = [
        ("state", facts["state"]),
        ("round", str(current.number) if current else "-"),
        ("step", current.step if current else "-"),
        ("stable policy", f"round {stable['round']}" if stable else "none yet"),
        ("canary weight", f"{snapshot.run.status.canary_weight} %"),
        ("requests answered", f"{requests['answered']}"),
        ("requests failed", f"{requests['failed']}"),
    ]
    body = "".join(f"<div class=card><b>{html.escape(v)}</b><span>{html.escape(k)}</span></div>" for k, v in cards)
    return f"<div class=cards>{body}</div>"


def _rounds(facts: dict[str, Any]) -> str:
    rows = []
    for item in facts["rounds"]:
        cells = [
            str(item["number"]),
            f"<span class={item['phase']}>{item['phase']}</span>",
            f"<code>{(item['sourcePolicyDigest'] or '-')[:19]}</code>",
            f"<code>{(item['newDigest'] or '-')[:19]}</code>",
            str(item["trajectories"]),
            "-" if item["rewardMean"] is None else f"{item['rewardMean']:.3f}",
            str(item["steps"]),
            item["verdict"] or "-",
            html.escape(item["message"] or item["reason"] or ""),
        ]
        rows.append("<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>")
    heads = ("round", "phase", "trained on", "made", "trajectories", "reward", "steps", "verdict", "why")
    return f"<table><tr>{''.join(f'<th>{h}</th>' for h in heads)}</tr>{''.join(rows)}</table>"


def _conditions(facts: dict[str, Any]) -> str:
    rows = "".join(
        f"<tr><td>{c['type']}</td><td>{c['status']}</td><td>{c['reason']}</td><td>{html.escape(c['message'])}</td></tr>"
        for c in facts["conditions"]
    )
    return f"<table><tr><th>condition</th><th>status</th><th>reason</th><th>message</th></tr>{rows}</table>"


def _equation(snapshot: Snapshot) -> str:
    equation = (snapshot.audit or {}).get("equation")
    return f"<p><b>Audit:</b> <code>{html.escape(equation)}</code></p>" if equation else ""


def page_data(snapshot: Snapshot, state: str) -> dict[str, Any]:
    """What the page draws: the body's HTML and the figures."""
    facts = summary(snapshot, state)
    versions = ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
    body = _cards(facts, snapshot) + _rounds(facts) + _equation(snapshot) + _conditions(facts)
    return {"body": body + f"<p style='color:#777'>{versions}</p>", "figures": all_figures(snapshot)}


def _document(title: str, plotly: str, start: str) -> str:
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{html.escape(title)}</title><style>{STYLE}</style>"
        f"{plotly}<header><h1>{html.escape(title)}</h1></header><main><div id=body></div><div class=grid id=grid></div>"
        f"</main><script>{SCRIPT}{start}</script></html>"
    )


def live_page(name: str) -> str:
    """The page that polls ``data.json``."""
    return _document(f"prodrl: {name} (live)", "<script src=plotly.js></script>", "poll();")


def report_page(snapshot: Snapshot, state: str) -> str:
    """A file that needs nothing else."""
    data = json.dumps(page_data(snapshot, state)).replace("</", "<\\/")
    name = snapshot.run.metadata["name"]
    return _document(f"prodrl: {name}", f"<script>{get_plotlyjs()}</script>", f"draw({data});")
