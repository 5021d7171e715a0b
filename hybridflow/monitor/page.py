"""The report's HTML shell: one file, its style inline, nothing fetched, nothing run."""

import html
import re

# Control characters and lone surrogates have no place in HTML; line feed and tab stay.
_UNPRINTABLE = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff]")


def escape(text: object) -> str:
    """The text as HTML that shows it and does nothing else."""
    return html.escape(_UNPRINTABLE.sub("\ufffd", str(text)), quote=True)


def page(title: str, body: str) -> str:
    """The whole document. Its policy lets a browser load nothing, scripts included."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta http-equiv="Content-Security-Policy" '
        "content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head>\n"
        f"<body><main>{body}</main></body></html>\n"
    )


def _palette(dark: bool) -> str:
    names = ("bg", "card", "ink", "muted", "grid", "good", "bad")
    light_tones = ("#f6f7f9", "#ffffff", "#18202c", "#5d6878", "#e3e7ed", "#15803d", "#b91c1c")
    dark_tones = ("#12161d", "#1a2029", "#e6eaf0", "#97a3b4", "#2b3441", "#4ade80", "#f87171")
    light_lines = "#2563eb #ea580c #059669 #9333ea #ca8a04 #db2777 #0891b2 #64748b"
    dark_lines = "#60a5fa #fb923c #34d399 #c084fc #facc15 #f472b6 #22d3ee #94a3b8"
    tones = zip(names, dark_tones if dark else light_tones, strict=True)
    lines = enumerate((dark_lines if dark else light_lines).split())
    return "".join([f"--{n}:{v};" for n, v in tones] + [f"--c{i}:{v};" for i, v in lines])


_COLOURS = "".join(f".c{index}{{--c:var(--c{index})}}" for index in range(8))

STYLE = (
    f":root{{{_palette(dark=False)}}}"
    f"@media(prefers-color-scheme:dark){{:root{{{_palette(dark=True)}}}}}"
    + _COLOURS
    + """
*{box-sizing:border-box}
body{margin:0;background:var(--bg);color:var(--ink);
 font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"DejaVu Sans",sans-serif}
main{max-width:1240px;margin:0 auto;padding:28px 20px 60px}
h1{font-size:26px;line-height:1.2;margin:0 0 4px;overflow-wrap:anywhere}
h2{font-size:18px;margin:36px 0 12px}
h3{font-size:14px;margin:0;font-weight:600}
.muted{color:var(--muted)}
.badge{display:inline-block;padding:1px 9px;border-radius:99px;font-size:12px;font-weight:600;
 border:1px solid currentColor;white-space:nowrap}
.good{color:var(--good)}.bad{color:var(--bad)}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(150px,1fr));gap:12px;margin:20px 0}
.card,.tile{background:var(--card);border:1px solid var(--grid);border-radius:10px}
.tile{padding:12px 14px}
.tile b{display:block;font-size:19px;white-space:nowrap;
 line-height:1.3;font-variant-numeric:tabular-nums}
.tile span{font-size:12.5px;color:var(--muted)}
.charts{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(340px,100%),1fr));gap:14px}
.card{padding:12px 14px 8px;min-width:0}
.head{display:flex;flex-wrap:wrap;gap:2px 12px;align-items:baseline;margin-bottom:6px}
.legend{font-size:12.5px;color:var(--muted);font-variant-numeric:tabular-nums}
.key{display:inline-block;width:10px;height:10px;border-radius:3px;background:var(--c);
 margin-right:5px}
svg{display:block;width:100%;height:auto;overflow:visible}
svg text{font-size:10.5px;fill:var(--muted);font-variant-numeric:tabular-nums}
.end{text-anchor:end}.middle{text-anchor:middle}
.grid,.axis{stroke:var(--grid);fill:none;stroke-width:1}.axis{stroke:var(--muted)}
.line{fill:none;stroke:var(--c);stroke-width:2;stroke-linejoin:round;stroke-linecap:round}
.raw{stroke-width:1;opacity:.35}
.band{fill:var(--c);opacity:.14}.dot,.fill{fill:var(--c)}
.hit rect{fill:transparent}.hit path{stroke:var(--muted);stroke-width:1;opacity:0}
.hit:hover path{opacity:.8}
.wide{display:grid;grid-template-columns:minmax(0,1.2fr) minmax(0,1fr);gap:14px}
.scroll{overflow-x:auto}
table{border-collapse:collapse;width:100%;font-size:14px;font-variant-numeric:tabular-nums}
th,td{padding:5px 8px;border-bottom:1px solid var(--grid);text-align:right;vertical-align:top}
th{color:var(--muted);font-weight:500;font-size:12.5px}
th:first-child,td:first-child{text-align:left}
tr:last-child td{border-bottom:0}
.meter{display:inline-block;width:64px;height:8px;border-radius:4px;background:var(--grid);
 margin-left:8px;overflow:hidden;vertical-align:middle}
.meter i{display:block;height:100%;background:var(--c)}
.texts td,.texts th{text-align:left;white-space:nowrap}
.texts td:last-child{width:100%;min-width:200px;white-space:normal;overflow-wrap:anywhere}
.rollouts{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(380px,100%),1fr));gap:14px}
pre{margin:6px 0;padding:9px 11px;background:var(--bg);border-radius:7px;white-space:pre-wrap;
 overflow-wrap:anywhere;max-height:340px;overflow-y:auto;
 font:13px/1.45 ui-monospace,"SF Mono",Menlo,Consolas,"DejaVu Sans Mono",monospace}
pre.prompt{color:var(--muted)}
details{margin-top:14px}summary{cursor:pointer;font-weight:600}
details>.charts,details>.card{margin-top:12px}
@media(min-width:761px){.wide svg text{font-size:7.5px}}
@media(max-width:760px){main{padding:18px 12px 40px}.wide{grid-template-columns:minmax(0,1fr)}
 td{white-space:nowrap}.meter{display:none}
 .tiles{grid-template-columns:repeat(2,minmax(0,1fr))}.tile b{font-size:18px}}
@media print{.card,.tile{break-inside:avoid}pre{max-height:none}}
"""
)
