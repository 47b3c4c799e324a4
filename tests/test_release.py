"""A release: its version stands in three files, its changelog has text, its workflows can run."""

import re
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml

import acmoe
import archives
import extras
import make_golden
import release
import try_extra

ROOT = Path(__file__).parents[1]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))
CHANGELOG = """# Changelog

## [0.2.0] - unreleased

- A thing.

## [0.1.0] - 2020-01-02

- The first.
"""


def test_the_changelog_has_a_section_of_this_version():
    number, _, development = acmoe.__version__.partition(".dev")
    date, text = release.sections((ROOT / "CHANGELOG.md").read_text())[number]
    assert text
    if development:
        assert date == release.OPEN
    else:
        assert re.fullmatch(r"\d{4}-\d\d-\d\d", date)


def test_the_citation_names_this_version_and_the_paper():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == acmoe.__version__
    assert citation["preferred-citation"]["title"] == "Tight Clusters Make Specialized Experts"


def test_a_section_ends_where_the_next_begins():
    assert release.sections(CHANGELOG) == {
        "0.2.0": ("unreleased", "- A thing."),
        "0.1.0": ("2020-01-02", "- The first."),
    }


def git(folder, *arguments):
    done = subprocess.run(
        ["git", *arguments], cwd=folder, check=True, capture_output=True, text=True
    )
    return done.stdout.strip()


@pytest.fixture
def repository(tmp_path, monkeypatch):
    for role in ("AUTHOR", "COMMITTER"):
        monkeypatch.setenv(f"GIT_{role}_NAME", "somebody")
        monkeypatch.setenv(f"GIT_{role}_EMAIL", "somebody@example.org")
    (tmp_path / "src/acmoe").mkdir(parents=True)
    (tmp_path / "src/acmoe/__init__.py").write_text('x = 1\n\n__version__ = "0.2.0.dev0"\n')
    (tmp_path / "CITATION.cff").write_text("cff-version: 1.2.0\nversion: 0.2.0.dev0\ntype: a\n")
    (tmp_path / "CHANGELOG.md").write_text(CHANGELOG)
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "--quiet", "--message", "begin")
    return tmp_path


def test_a_release_writes_three_files_and_tags_their_commit(repository):
    release.release("0.2.0", repository, day="2021-03-04")
    code, citation = (
        (repository / name).read_text() for name in ("src/acmoe/__init__.py", "CITATION.cff")
    )
    assert code == 'x = 1\n\n__version__ = "0.2.0"\n'
    assert citation == "cff-version: 1.2.0\nversion: 0.2.0\ndate-released: 2021-03-04\ntype: a\n"
    changelog = (repository / "CHANGELOG.md").read_text()
    assert changelog == CHANGELOG.replace("unreleased", "2021-03-04")
    assert git(repository, "status", "--porcelain") == ""
    assert git(repository, "rev-parse", "v0.2.0^{commit}") == git(repository, "rev-parse", "HEAD")
    assert release.in_citation(citation, "0.3.0", "2022-01-01").count("date-released") == 1
    with pytest.raises(SystemExit, match=r"the tag v0\.2\.0 is there already"):
        release.release("0.2.0", repository)


@pytest.mark.parametrize(
    ("version", "says"),
    [
        ("0.3.0", r"no text under '## \[0\.3\.0\]'"),
        ("0.1.0", "says that 0.1.0 is of 2020-01-02"),
        ("0.2", "VERSION='0.2' is no version"),
        ("", "VERSION='' is no version"),
    ],
)
def test_a_release_is_refused_and_changes_nothing(version, says, repository):
    with pytest.raises(SystemExit, match=says):
        release.release(version, repository)
    assert git(repository, "status", "--porcelain") == ""
    assert git(repository, "tag") == ""


def test_a_release_of_a_changed_tree_is_refused(repository):
    (repository / "note").write_text("not committed")
    with pytest.raises(SystemExit, match=r"the tree is not clean.*\n\?\? note"):
        release.release("0.2.0", repository)


def test_only_a_released_version_gets_a_golden_folder_and_only_once(repository):
    with pytest.raises(SystemExit, match=r"'0.2.0.dev0' is not released: check out its tag"):
        make_golden.golden_folder(repository)
    release.release("0.2.0", repository)
    folder = make_golden.golden_folder(repository)
    assert folder == repository / "tests" / "golden" / "0.2.0"
    folder.mkdir(parents=True)
    with pytest.raises(SystemExit, match="golden folders never change"):
        make_golden.golden_folder(repository)


@pytest.mark.parametrize("file", WORKFLOWS, ids=lambda file: file.stem)
def test_a_workflow_calls_targets_that_the_makefile_has(file):
    workflow = yaml.safe_load(file.read_text())
    # YAML 1.1 reads the key `on` as true.
    assert workflow[True] and workflow["permissions"] == {"contents": "read"}
    targets = set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    called = set()
    for job in workflow["jobs"].values():
        assert job["runs-on"] and job["steps"]
        for step in job["steps"]:
            assert ("run" in step) != ("uses" in step)
            words = step.get("run", "").split()
            if words[:1] == ["make"]:
                called |= {word for word in words[1:] if re.fullmatch(r"[a-z-]+", word)}
        called |= set(job.get("strategy", {}).get("matrix", {}).get("target", []))
    assert called and called <= targets


def test_the_tests_run_on_every_python_that_the_package_names():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = {line.split(" :: ")[-1] for line in project["classifiers"] if "Python :: 3." in line}
    (file,) = (one for one in WORKFLOWS if one.stem == "test")
    jobs = yaml.safe_load(file.read_text())["jobs"]
    assert set(jobs["test"]["strategy"]["matrix"]["python"]) == named


def test_only_the_job_that_publishes_may_ask_for_a_token():
    (file,) = (one for one in WORKFLOWS if one.stem == "release")
    jobs = yaml.safe_load(file.read_text())["jobs"]
    assert {name: job.get("permissions") for name, job in jobs.items()} == {
        "build": None,
        "pypi": {"id-token": "write"},
        "github": {"contents": "write"},
    }
    assert jobs["pypi"]["needs"] == "build" and jobs["github"]["needs"] == "pypi"


@pytest.mark.parametrize("file", FORMS, ids=lambda file: file.stem)
def test_an_issue_form_has_a_name_and_fields_with_ids(file):
    form = yaml.safe_load(file.read_text())
    if file.stem == "config":
        assert form == {"blank_issues_enabled": True}
        return
    assert form["name"] and form["description"]
    ids = [field["id"] for field in form["body"]]
    assert len(set(ids)) == len(ids) >= 3
    assert all(field["attributes"]["label"] for field in form["body"])


def test_every_extra_is_tried():
    assert all(callable(getattr(try_extra, one)) for one in (extras.NONE, *extras.extras()))


def test_an_archive_with_other_files_or_too_many_bytes_is_refused(tmp_path):
    file = tmp_path / "a.whl"
    file.write_bytes(bytes(archives.MOST_BYTES + 1))
    assert archives.compare(file, {"a", "data"}, {"a", "b"}) == [
        "a.whl holds data: 1 files too many",
        "a.whl lacks b: 1 files",
        "a.whl has 3,000,001 bytes, more than 3,000,000",
    ]


@pytest.mark.parametrize(
    ("said", "name"),
    [
        (
            "ERROR: No matching distribution found for torchtitan<0.4,>=0.3\n",
            "torchtitan<0.4,>=0.3",
        ),
        ("ERROR: ResolutionImpossible: for help visit\n", None),
        (None, None),  # the extra was installed, and its use failed
    ],
)
def test_an_extra_that_the_registry_does_not_have_is_told_from_one_that_fails(said, name):
    error = subprocess.CalledProcessError(1, ["pip"], stderr=said)
    assert extras.absent(error) == name
