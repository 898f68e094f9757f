"""The page is whole in itself, executes nothing that a run wrote, and draws in a browser."""

import json
import shutil
import subprocess
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from stabmon.output.panels import Panel
from stabmon.output.report import write_report
from stabmon.runs.run import load_run
from stabmon.runs.runlog import RunLog

EVIL = "</script><img src=x onerror=alert(1)>\"'<script>alert(2)</script>&lt;"


class Page(HTMLParser):
    """Elements with their attributes, scripts' texts, and all other text."""

    def __init__(self, path):
        super().__init__()
        self.elements, self.scripts, self.text, self._inside = [], [], "", ""
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        self._inside = tag

    def handle_endtag(self, tag):
        self._inside = ""

    def handle_data(self, data):
        if self._inside == "script":
            self.scripts.append(data)
        elif self._inside != "style":
            self.text += data

    @property
    def figures(self):
        return json.loads(self.scripts[1])


@pytest.fixture(scope="module")
def page(demo_runs, tmp_path_factory):
    return Page(write_report(demo_runs, tmp_path_factory.mktemp("out")))


def test_the_page_is_one_file_that_asks_for_nothing(page):
    for tag, attributes in page.elements:
        for name in ("src", "href", "action", "data", "poster", "srcset"):
            assert attributes.get(name, "data:,").startswith("data:"), (tag, attributes)
    policy = next(a["content"] for t, a in page.elements if "http-equiv" in a)
    assert policy.startswith("default-src 'none';")
    assert "http" not in policy
    assert "plotly.js v" in page.scripts[0][:100]


def test_the_page_fits_a_phone(page):
    (viewport,) = [a["content"] for _, a in page.elements if a.get("name") == "viewport"]
    assert viewport == "width=device-width, initial-scale=1"


def test_the_verdict_stands_first_in_large_type(page):
    tags = [tag for tag, _ in page.elements]
    assert tags.index("h1") < tags.index("table") < tags.index("section")
    expected = (
        "faulty: first alarm at step 680 from Δ2 modes, lag 50, 380 steps after the fault set in "
        "and 1,100 steps before the loss."
    )
    assert expected in page.text


def test_every_chart_has_its_place(page):
    places = [a["id"] for _, a in page.elements if a.get("class") in ("plot", "map")]
    assert places == [figure["id"] for figure in page.figures]
    assert places == [f"plot{i}" for i in range(7)] + [f"map{i}" for i in range(6)]


def test_a_given_verdict_title_and_table_are_shown(demo_runs, tmp_path):
    table = [
        {
            "monitor": "Δ2",
            "first": 1670,
            "after": 370,
            "lead": 1100,
            "heads": 0.25,
            "key": "my/own/key",
            "lead_is_bound": True,
        },
        {"monitor": "‖W‖", "first": None, "after": None, "lead": None},
    ]
    out = tmp_path / "sub" / "page.html"
    assert write_report(demo_runs, out, title="Seed 7", verdict="All well", table=table) == out
    page = Page(out)
    for text in ("Seed 7", "All well", "Lead over the loss", "1,670", "≥ 1,100", "heads", "never"):
        assert text in page.text
    assert "my/own/key" in page.text
    assert "bound" not in page.text


def test_nothing_that_a_run_wrote_is_executed(tmp_path):
    key = f"delta50/global/{EVIL}/mean"
    with RunLog.open(tmp_path / "run", {EVIL: EVIL}) as log:
        log.fault(kind=EVIL, onset=0, end=None)
        log.sample(1, {key: 1.0, "symptoms/global/loss/value": float("nan")})
        log.sample(2, {key: 1.0, key.replace("global", "layer_00"): 2.0})
        log.event("alarm", 1, rule=EVIL, key=key, value=EVIL)
        log.event(EVIL, 2)
        log.event("diagnosis", 2, fault=EVIL, confidence=EVIL, evidence=[EVIL], parts=[EVIL])
        log.event("action", 2, action=EVIL, reason=EVIL, scale=EVIL, dry=False)
    run = replace(load_run(tmp_path / "run"), name=EVIL)
    table, panels = [{"monitor": EVIL, EVIL: EVIL}], [Panel(EVIL, key, worst_key=key, unit=EVIL)]
    given = {"title": EVIL, "verdict": EVIL, "table": table, "panels": panels}
    for name, more in {"own": {}, "given": given}.items():
        page = Page(write_report([run], tmp_path / f"{name}.html", **more))
        assert [t for t, _ in page.elements].count("script") == len(page.scripts) == 3
        assert not [t for t, _ in page.elements if t == "img"]
        assert not [a for _, a in page.elements for k in a if k.startswith("on")]
        assert [a["data-run"] for t, a in page.elements if t == "button"] == [EVIL]
        assert "alert(2)" in page.text
        shown = json.dumps([strip(figure) for figure in page.figures])
        assert "<script" not in shown
        assert "<img" not in shown


def strip(figure):
    """A figure without what Plotly never renders: the names by which the legend finds traces."""
    data = [{k: v for k, v in trace.items() if k != "run"} for trace in figure["data"]]
    words = [
        {k: v for k, v in word.items() if k != "name"} for word in figure["layout"]["annotations"]
    ]
    return {"data": data, "layout": figure["layout"] | {"annotations": words}}


def test_values_that_are_not_finite_are_said_and_leave_a_gap(tmp_path):
    with RunLog.open(tmp_path / "nan", {}) as log:
        for step in range(6):
            log.sample(step, {"symptoms/global/loss/value": float("nan" if step > 3 else step)})
    page = Page(write_report([tmp_path / "nan"], tmp_path))
    assert "nan: 2 samples not finite, first at step 4" in page.text
    assert page.figures[0]["data"][0]["y"] == [0, 1, 2, 3, None, None]


def test_a_run_without_samples_has_a_page(tmp_path):
    RunLog.open(tmp_path / "new", {"seed": 3}).close()
    page = Page(write_report([tmp_path / "new"], tmp_path))
    assert "No alarm." in page.text
    assert "No samples to show yet." in page.text
    assert page.figures == []


def test_one_lag_of_a_metric_is_mapped_by_layer(tmp_path):
    with RunLog.open(tmp_path / "lags", {}) as log:
        stems = [f"delta{lag}/{{}}/delta2/modes/mean" for lag in (50, 200)]
        values = {s.format(scope): 1.0 for s in stems for scope in ("global", "layer_00")}
        log.sample(1, values)
    page = Page(write_report([tmp_path / "lags"], tmp_path))
    assert [figure["id"] for figure in page.figures] == ["plot0", "plot1", "map0"]
    assert "Δ2 modes, lag 50 · lags" in page.text


def test_runs_of_one_name_are_told_apart(tmp_path):
    for seed in ("a", "b"):
        with RunLog.open(tmp_path / seed / "clean", {}) as log:
            log.sample(1, {"symptoms/global/loss/value": 1.0})
    page = Page(write_report([tmp_path / s / "clean" for s in "ab"], tmp_path))
    names = [a["data-run"] for t, a in page.elements if t == "button"]
    assert names == ["a/clean", "b/clean"]


def test_no_runs_are_refused(tmp_path):
    with pytest.raises(ValueError, match="no runs to report on: give at least one folder"):
        write_report([], tmp_path)


def test_a_folder_that_is_no_run_is_refused(tmp_path):
    with pytest.raises(ValueError, match="is a folder with nothing: expected a run's folder"):
        write_report([tmp_path], tmp_path)


def test_without_plotly_it_says_what_to_install(demo_runs, tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "plotly.offline", None)
    with pytest.raises(ImportError, match=r'pip install "stabmon\[cli\]"'):
        write_report(demo_runs, tmp_path)


@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs chromium")
def test_the_page_draws_in_a_browser_without_an_error(demo_runs, tmp_path):
    path = write_report(demo_runs, tmp_path)
    command = [
        *"chromium --headless --no-sandbox --disable-gpu --no-first-run --disable-sync".split(),
        *"--disable-background-networking --disable-component-update".split(),
        *"--virtual-time-budget=5000 --enable-logging=stderr --v=0 --dump-dom".split(),
        f"--user-data-dir={tmp_path / 'profile'}",
        path.as_uri(),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert "CONSOLE" not in done.stderr
    drawn = done.stdout.partition("<script")[0]
    assert drawn.count("js-line") > 30
    assert drawn.count("heatmaplayer") >= 6
