"""The READMEs hold what the committed rows generate, and the machinery that writes them."""

import re
import sys
from importlib import import_module
from pathlib import Path

import plotly.graph_objects as go
import pytest

from experiments import (
    attention_doses,
    campaign,
    combined_fault,
    grades,
    msign_rescue,
    router_fault,
)
from experiments.evidence import (
    NOT_RUN,
    VERDICTS,
    Config,
    anchor_of,
    main,
    texts,
    verdict_of,
    written,
)
from experiments.support import figures
from experiments.support.listed import EXPERIMENTS, Experiment
from experiments.support.moe import judged_settings
from experiments.support.recorded import rows_there, settings_row
from experiments.support.text_mixes import MIXES
from stabmon.runs.jsonl import read_jsonl

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "experiments" / "results"
WITH_ROWS = [x for x in EXPERIMENTS if (RESULTS / f"{x.name}.jsonl").exists()]
# Anything with `main`, rows, `tables` and `headline`, in a fraction of a second.
PROGRAM = """
import json, os, pathlib, sys

def tables(rows):
    return "| n |\\n|---|\\n" + "\\n".join(f"| {row['n']} |" for row in rows)

def headline(rows):
    return f"met: {sum(row['n'] for row in rows)}"

def figure(rows):
    import plotly.graph_objects as go
    return go.Figure(go.Bar(y=[row["n"] for row in rows]))

if __name__ == "__main__":
    path = pathlib.Path(sys.argv[1])
    if path.name == "broken.jsonl":
        sys.exit("broke")
    print("cores", len(os.sched_getaffinity(0)))
    with path.open("a") as file:
        file.write(json.dumps({"n": 3, "settings": {"seed": 0}}) + "\\n")
"""


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A project with two experiments that are quick."""
    (tmp_path / "quick_question.py").write_text(PROGRAM)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(figures, "find_spec", lambda _: None)
    (tmp_path / "experiments").mkdir()
    (tmp_path / "README.md").write_text("# P\n<!-- results -->\n<!-- /results -->\nend\n")
    book = "# E\n<!-- experiments -->\n<!-- /experiments -->\n## Quick: a question\nprose\n"
    book += "<!-- quick -->\ntyped 99\n<!-- /quick -->\n## After\n"
    book += "<!-- second -->\n<!-- /second -->\n"
    (tmp_path / "experiments" / "README.md").write_text(book)
    yield tmp_path
    sys.modules.pop("quick_question", None)


def listed(project, *names):
    argument = lambda name: str(project / "runs" / f"{name}.jsonl")
    return [
        Experiment(name, f"{name}?", 0.1, ((argument(name),),), module="quick_question")
        for name in names
    ]


def config_of(project, **options):
    return Config(root=project, runs=project / "runs", **options)


def test_both_readmes_are_what_the_committed_rows_generate():
    for path, text in texts(ROOT, EXPERIMENTS).items():
        assert path.read_text(encoding="utf-8") == text, (
            "run: python -m experiments.evidence tables"
        )


@pytest.mark.parametrize("experiment", WITH_ROWS, ids=lambda x: x.name)
def test_committed_rows_have_tables_and_a_headline_and_are_small(experiment):
    file = RESULTS / f"{experiment.name}.jsonl"
    tables, headline = written(experiment, read_jsonl(file))
    assert "|---" in tables
    assert re.search(r"\d", headline)
    assert len(headline) <= 260
    assert file.stat().st_size < 400_000
    image = ROOT / "experiments" / "figures" / f"{experiment.name}.svg"
    assert 1_000 < image.stat().st_size < 300_000
    assert import_module(experiment.program).figure(read_jsonl(file)).data


def test_committed_rows_are_those_that_todays_settings_would_find():
    """So an experiment that is started beside them measures none of them again."""
    doses, router, combined = (
        attention_doses.Config(),
        router_fault.Config(),
        combined_fault.Config(),
    )
    story, cases, rescues = grades.Config(), campaign.plan(campaign.Config()), msign_rescue.Config()
    parts = {"story": story.arms, "ranking": story.ranked, "mixes": MIXES}
    texts = {name: Path(name) for name in MIXES}

    def graded(part, name, seed):
        run = grades.train_config(story, part, name, seed, texts)
        return grades.row_settings(story, part, name, run)

    wanted = {
        "attention_doses": [
            attention_doses.settings_of(doses, arm, seed)
            for arm in doses.arms
            for seed in attention_doses.seeds_of(doses, arm)
        ],
        "router_fault": [
            *(judged_settings(router.moe, arm, s) for s in router.seeds for arm in router.arms),
            *(
                router_fault.growth_settings(router, branch, seed)
                for seed in router.seeds
                for branch in router.branches
            ),
        ],
        "combined_fault": [
            judged_settings(combined.moe, arm, s) for s in combined.seeds for arm in combined.arms
        ],
        "grades": [
            graded(part, name, seed)
            for part, names in parts.items()
            for seed in story.seeds
            for name in names
        ],
        "campaign": [settings_row(run) for runs in cases for _, run in runs],
        "msign_rescue": [
            settings_row(msign_rescue.settings_of(rescues, *where))
            for where in msign_rescue.plan(rescues)
        ],
    }
    for name, settings in wanted.items():
        assert len(rows_there(RESULTS / f"{name}.jsonl", settings)) == len(settings) > 0, name


def test_no_rows_lie_there_that_belong_to_no_experiment():
    names = {x.name for x in EXPERIMENTS}
    assert {x.stem for x in RESULTS.glob("*")} <= names


def test_the_results_in_the_readme_fit_a_screen_and_their_links_lead_somewhere():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    section = text.split("<!-- results -->\n")[1].split("<!-- /results -->")[0]
    assert len(section.splitlines()) <= 24
    inside = (ROOT / "experiments" / "README.md").read_text(encoding="utf-8")
    anchors = {
        anchor_of(heading + "\n<!-- x -->\n", "x")
        for heading in re.findall(r"^#+ .*$", inside, re.MULTILINE)
    }
    links = re.findall(r"\(experiments/README\.md#([^)]*)\)", text)
    assert len(links) >= len(WITH_ROWS)
    assert set(links) | set(re.findall(r"\]\(#([^)]*)\)", inside)) <= anchors


def test_run_measures_collects_and_writes_both_texts(project):
    result = main(config_of(project, cores=1), listed(project, "quick", "second"))
    assert result.failed == []
    assert set(result.minutes) == {"quick", "second"}
    assert "cores 1" in (project / "runs" / "quick.log").read_text()
    book = (project / "experiments" / "README.md").read_text()
    assert "prose\n<!-- quick -->\n| n |\n|---|\n| 3 |\n<!-- /quick -->\n## After" in book


def test_run_again_keeps_one_row_of_each_settings(project):
    for _ in range(2):
        main(config_of(project), listed(project, "quick"))
    assert len(read_jsonl(project / "runs" / "quick.jsonl")) == 2
    rows = read_jsonl(project / "experiments" / "results" / "quick.jsonl")
    assert rows == [{"n": 3, "settings": {"seed": 0}}]


def test_the_readme_gets_a_line_with_a_link_for_each_experiment(project):
    main(config_of(project), listed(project, "quick"))
    front = (project / "README.md").read_text()
    assert "| [quick?](experiments/README.md#quick-a-question) | met: 3 |" in front
    assert front.endswith("<!-- /results -->\nend\n")
    main(config_of(project, command="tables"), listed(project, "quick", "later"))
    assert f"| later? | {NOT_RUN} |" in (project / "README.md").read_text()


def test_images_are_drawn_from_the_rows_and_shown_above_the_tables(project, monkeypatch):
    it = listed(project, "quick")
    main(config_of(project), it)
    assert "![" not in (project / "experiments" / "README.md").read_text()
    monkeypatch.setattr(figures, "find_spec", lambda _: True)
    draw = lambda figure, path: path.write_text(str(figure.data[0].y))
    monkeypatch.setattr(go.Figure, "write_image", draw)
    main(config_of(project, command="figures"), it)
    assert (project / "experiments" / "figures" / "quick.svg").read_text() == "(3,)"
    book = (project / "experiments" / "README.md").read_text()
    assert "<!-- quick -->\n![quick?](figures/quick.svg)\n\n| n |" in book


def test_without_an_exporter_a_run_goes_on_and_figures_say_what_is_missing(project, capsys):
    main(config_of(project), listed(project, "quick"))
    assert "images are left as they were: images need Kaleido: pip" in capsys.readouterr().err
    assert "met: 3" in (project / "README.md").read_text()
    with pytest.raises(
        RuntimeError, match=r'images need Kaleido: pip install "stabmon\[figures\]"'
    ):
        main(config_of(project, command="figures"), listed(project, "quick"))


def test_command_lines_follow_each_other_until_one_fails(project):
    file = lambda name: str(project / "runs" / f"{name}.jsonl")
    for names, count in ((("quick", "quick"), 2), (("broken", "quick"), 2)):
        runs = tuple((file(name),) for name in names)
        it = Experiment("quick", "?", 0.1, runs, module="quick_question")
        result = main(config_of(project), [it])
        assert result.failed == (["quick"] if "broken" in names else [])
        assert len(read_jsonl(project / "runs" / "quick.jsonl")) == count


def test_one_that_fails_is_named_and_does_not_stop_the_others(project, capsys):
    result = main(config_of(project), listed(project, "broken", "quick"))
    assert result.failed == ["broken"]
    assert "broken failed: see" in capsys.readouterr().err
    assert "broke" in (project / "runs" / "broken.log").read_text()
    assert "met: 3" in (project / "README.md").read_text()


def test_rows_without_a_place_for_their_tables_are_refused(project):
    with pytest.raises(ValueError, match=r"expected the lines '<!-- other -->'.*once each"):
        main(config_of(project), listed(project, "quick", "other"))


def test_a_headline_without_a_verdict_is_refused(project, monkeypatch):
    monkeypatch.setattr("quick_question.headline", lambda rows: "it works: 3")
    with pytest.raises(ValueError, match="quick: a headline is one line that begins with one of"):
        written(listed(project, "quick")[0], [{"n": 1}])


def test_an_unknown_name_is_refused(project):
    with pytest.raises(ValueError, match=r"no experiment \['quack'\]; there are \['quick'\]"):
        main(config_of(project, only=("quack",)), listed(project, "quick"))


def test_a_verdict_is_found_whatever_word_it_ends_with():
    assert [verdict_of(f"{word}: 3") for word in VERDICTS] == list(VERDICTS)
    assert verdict_of("met, in 3 of 4") is None
