"""Files of results that are older than their code are found by the imports of their recipe."""

import subprocess

import pytest
from experiments.stale import code, dependencies, programs

from experiments import stale

pytestmark = pytest.mark.long


def test_the_programs_of_a_command():
    assert programs("bilens reproduce fig3 --write") == ["experiments.fig3"]
    assert programs("python -m benchmarks.coverage --write") == ["benchmarks.coverage"]
    assert programs("bilens reproduce nothing; the calls of a page") == []


def test_the_code_of_a_recipe_is_what_it_imports():
    paths = dependencies(["experiments.fig3"])
    assert {"experiments/fig3.py", "experiments/curves.py"} <= paths
    # Through packages that pass names on, down to the layers that are trained.
    assert {"src/bilens/nn/classifier.py", "src/bilens/train/classifier.py"} <= paths
    assert not [path for path in paths if "explore" in path or path == "experiments/fig5.py"]


def test_only_code_is_a_change():
    before = 'def f(x):\n    """Return x."""\n    return x\n'
    assert code(before) == code("def f(x):\n    # The same.\n    return x\n")
    assert code(before) != code(before.replace("return x\n", "return -x\n"))


def test_files_older_than_their_code_are_printed(capsys, monkeypatch):
    new, lost = ({"command": f"bilens reproduce {x}", "commit": "now"} for x in ("fig3", "nothing"))
    old = new | {"commit": "0123abcd"}
    files = {"old": old, "new": new, "lost": lost, "story": old}
    monkeypatch.setattr(stale, "load_results", lambda: files)
    monkeypatch.setattr(stale, "has_changed", lambda path, of: of is old and "fig3" in path)
    stale.main()
    assert capsys.readouterr().out.splitlines() == [
        "README, story.json (0123abcd): experiments/fig3.py",
        "lost.json (now): no recipe or benchmark measures it",
        "old.json (0123abcd): experiments/fig3.py",
    ]


def test_a_file_has_changed_if_its_code_is_another(tmp_path, monkeypatch):
    def git(*arguments):
        someone = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
        command = ["git", "-C", str(tmp_path), *someone, *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    git("init", "--quiet")
    for name in ("code", "comment", "same"):
        (tmp_path / f"{name}.py").write_text("x = 1\n", encoding="utf-8")
    git("add", ".")
    git("commit", "--quiet", "--message", "first")
    result = {"commit": git("rev-parse", "HEAD")}
    (tmp_path / "code.py").write_text("x = 2\n", encoding="utf-8")
    (tmp_path / "comment.py").write_text("x = 1  # one\n", encoding="utf-8")
    (tmp_path / "new.py").write_text("x = 1\n", encoding="utf-8")
    git("add", ".")
    monkeypatch.setattr(stale, "ROOT", tmp_path)
    names = ("code", "comment", "same", "new")
    assert [name for name in names if stale.has_changed(f"{name}.py", result)] == ["code", "new"]
    assert stale.has_changed("same.py", {"commit": "0" * 40}), "no such commit"
