"""The style sheet of the status page: no file, no font, no picture from elsewhere."""

from __future__ import annotations

STYLE = """
:root { color-scheme: light dark; --bg: #fff; --text: #1c2227; --soft: #5b6670; --line: #d5dbe0;
  --card: #f5f7f9; --good: #17692f; --warn: #8a5300; --bad: #b3261e; --mark: #0b5cad; }
@media (prefers-color-scheme: dark) {
  :root { --bg: #14181c; --text: #e4e9ed; --soft: #9aa6b1; --line: #343c44; --card: #1d2329;
    --good: #6fd08c; --warn: #f0b35a; --bad: #ff8a80; --mark: #7fbcff; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1rem 1.25rem 3rem; max-width: 90rem; background: var(--bg);
  color: var(--text); font: 15px/1.45 system-ui, sans-serif; overflow-wrap: break-word; }
h1 { font-size: 1.35rem; margin: 0; }
h2 { font-size: 1.1rem; margin: 2rem 0 .6rem; border-bottom: 1px solid var(--line); }
h3 { font-size: 1rem; margin: 1.2rem 0 .3rem; }
p { margin: .3rem 0; }
.soft, caption { color: var(--soft); }
.good { color: var(--good); } .warn { color: var(--warn); } .bad { color: var(--bad); }
.mark { color: var(--mark); }
.tag { border: 1px solid currentColor; border-radius: .7em; padding: 0 .5em; font-size: .85em;
  font-weight: 600; white-space: nowrap; }
.counts { display: flex; flex-wrap: wrap; gap: .3rem 1.2rem; padding: 0; margin: .5rem 0;
  list-style: none; }
.cpus { display: grid; grid-template-columns: repeat(auto-fill, minmax(15rem, 1fr)); gap: .7rem;
  padding: 0; margin: 0; list-style: none; }
.cpus > li { border: 1px solid var(--line); border-radius: .4rem; background: var(--card);
  padding: .5rem .7rem; min-width: 0; }
.cpus ul { list-style: none; margin: .3rem 0 0; padding: 0; font-size: .92em; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: .92em; margin: .3rem 0 .8rem; }
caption { text-align: left; padding: .2rem 0; }
th, td { text-align: left; vertical-align: top; padding: .2rem .7rem .2rem 0;
  border-bottom: 1px solid var(--line); font-variant-numeric: tabular-nums; }
th { color: var(--soft); font-weight: 600; white-space: nowrap; }
td { min-width: 3.5em; max-width: 40rem; overflow-wrap: break-word; }
h3 small { font-weight: normal; }
"""
