"""Draws examples/grafana_dashboard.json by what a Prometheus answers that scrapes a job: are its queries right?

    ringrun --nproc-per-node 3 --metrics-dir DIR --metrics-port 9400 train.py      a job that runs for a minute or so
    python -m benchmarks dashboard --port 9400 --seconds 30                        meanwhile; writes dashboard.svg

Starts the program `prometheus` (Debian's package, or the PATH's) in a folder of its own, asks it each panel's query as
Grafana does, and draws the panels where the dashboard has them. Exit code 1 if a query fails or has no answer. Needs
matplotlib: pip install -r requirements/plots.txt
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

from benchmarks.lib.plots import pyplot
from benchmarks.lib.ranks import ROOT, Failed, Unavailable, start, stop_all

DASHBOARD = ROOT / "examples/grafana_dashboard.json"
_CONFIG = """\
global: {{scrape_interval: 1s}}
scrape_configs:
  - job_name: ringdp
    static_configs: [{{targets: ["127.0.0.1:{port}"]}}]
"""


def scrape(port: int, own_port: int, seconds: float) -> dict[str, list[dict[str, Any]]]:
    """By expression of the dashboard, what Prometheus answers for the last `seconds`, one entry for each series."""
    program = shutil.which("prometheus")
    if program is None:
        raise Unavailable("the program prometheus is missing: install the package prometheus")
    dashboard = json.loads(DASHBOARD.read_text())
    with tempfile.TemporaryDirectory(prefix="ringdp-prometheus-") as folder:
        config = Path(folder, "prometheus.yml")
        config.write_text(_CONFIG.format(port=port))
        words = [program, f"--config.file={config}", f"--storage.tsdb.path={folder}/data"]
        words.append(f"--web.listen-address=127.0.0.1:{own_port}")
        with open(Path(folder, "log"), "w") as log:
            server = start(words, stdout=log, stderr=log)
        try:
            time.sleep(seconds + 3)
            expressions = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
            return {expression: _ask(own_port, expression, seconds) for expression in expressions}
        finally:
            stop_all([server])


def _ask(port: int, expression: str, seconds: float) -> list[dict[str, Any]]:
    now = time.time()
    query = urllib.parse.urlencode({"query": expression, "start": now - seconds, "end": now, "step": 1})
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/api/v1/query_range?{query}", timeout=10) as answer:
            return list(json.load(answer)["data"]["result"])
    except urllib.error.URLError as error:
        raise Failed(f"Prometheus refuses {expression}: {error}") from error


def draw(answers: dict[str, list[dict[str, Any]]], path: str) -> None:
    panels = json.loads(DASHBOARD.read_text())["panels"]
    height = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in panels)
    figure = pyplot().figure(figsize=(14, height * 0.4))
    for panel in panels:
        at = panel["gridPos"]
        bottom = 1 - (at["y"] + at["h"]) / height
        axes = figure.add_axes((at["x"] / 24 + 0.04, bottom + 0.035, at["w"] / 24 - 0.06, at["h"] / height - 0.075))
        for target in panel["targets"]:
            for series in answers[target["expr"]]:
                name = _named(target["legendFormat"], series["metric"])
                begin = float(series["values"][0][0])
                points = [(float(when) - begin, float(value)) for when, value in series["values"]]
                axes.plot(*zip(*points, strict=True), label=name)
        unit = panel["fieldConfig"]["defaults"].get("unit", "")
        axes.set_title(f"{panel['title']}{f' ({unit})' if unit else ''}", fontsize=9, loc="left")
        axes.tick_params(labelsize=7)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=6, ncols=2, loc="upper right")
    figure.savefig(path)


def _named(pattern: str, labels: dict[str, str]) -> str:
    return re.sub(r"\{\{(\w+)\}\}", lambda found: labels.get(found[1], ""), pattern)


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--port", type=int, required=True, help="of ringrun --metrics-port")
    parser.add_argument("--own-port", type=int, default=9490, help="for Prometheus (default 9490)")
    parser.add_argument("--seconds", type=float, default=30.0, help="of the job that are shown (default 30)")
    parser.add_argument("--output", default="dashboard.svg", metavar="FILE", help="(default dashboard.svg)")


def measure(args: argparse.Namespace) -> dict[str, Any]:
    answers = scrape(args.port, args.own_port, args.seconds)
    draw(answers, args.output)
    return {"benchmark": "dashboard", "answers": answers, "failed": not all(answers.values())}


def report(result: dict[str, Any]) -> str:
    return "\n".join(f"{len(series):3d} series of {expression}" for expression, series in result["answers"].items())
