"""tasks/shell.py: the promises of the task set, and oracle, nop and near misses in real sandboxes."""
import os
import random
import re
import subprocess
import sys
import tomllib
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from sandbox import Bubblewrap, environment
from tasks import shell


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return shell.generate(tmp_path_factory.mktemp("tasks") / "shell")


def snapshot(folder):
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): (path.stat().st_mode, path.read_bytes()) for path in files}


def test_the_same_tasks_in_every_process(folder, tmp_path):
    """Would catch a draw that depends on hash seeds, set order or the clock: machines would train on other tasks."""
    command = [sys.executable, ROOT / "tasks/shell.py", tmp_path / "out"]
    subprocess.run(command, check=True, env={**os.environ, "PYTHONHASHSEED": "12"}, stdout=subprocess.DEVNULL)
    assert snapshot(tmp_path / "out") == snapshot(folder)


def test_generating_again_changes_nothing_and_spares_strangers(folder, tmp_path):
    """Would catch a rewrite under a running training, old tasks left among the new, and a deleted home folder."""
    before = folder.stat().st_ino
    shell.generate(folder)
    assert folder.stat().st_ino == before
    old = tmp_path / "old"
    (old / "train/gone-00").mkdir(parents=True)
    (old / ".digest").write_text("another version")
    shell.generate(old)
    assert snapshot(old) == snapshot(folder) and not (old / "train/gone-00").exists()
    assert list(tmp_path.iterdir()) == [old]
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/thesis.tex").write_text("x")
    command = [sys.executable, ROOT / "tasks/shell.py", tmp_path / "mine"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 2 and "mine is not empty" in result.stderr and result.stderr.count("\n") == 1
    assert os.listdir(tmp_path / "mine") == ["thesis.tex"]


def test_counts(folder):
    """Would catch a kind that is missing from a split, or trained on although it is meant to be new."""
    counts = Counter(path.parent.name + " " + path.name.rpartition("-")[0] for path in folder.glob("*/*/"))
    expected = {f"{split} {kind}": n for split, n in (("train", 20), ("heldout", 6)) for kind in shell.TRAINED}
    assert counts == expected | {f"newkinds {kind}": 6 for kind in shell.NEW} and len(shell.TRAINED) >= 12


def test_no_two_tasks_of_a_kind_name_the_same(folder):
    """Would catch a held-out task that is a train task in other words: its solution would be the same."""
    for kind in [*shell.TRAINED, *shell.NEW]:
        solutions = [path.read_text() for path in folder.glob(f"*/{kind}-[0-9][0-9]/solution/solve.sh")]
        assert len(set(solutions)) == len(solutions), kind


def test_every_phrasing_names_the_same_slots():
    """Would catch a paraphrase that leaves out a file name: the task could not be solved from it."""
    for name, kind in (shell.TRAINED | shell.NEW).items():
        slots = [set(re.findall(r"{(\w+)}", text)) for text in (*kind.phrasings, kind.commands)]
        assert len(kind.phrasings) >= 2 and all(named == slots[0] for named in slots), name


def test_format(folder):
    """Would catch a task that other tools refuse, and one that is too long for a small model to copy from."""
    for task in folder.glob("*/*/"):
        config = tomllib.loads((task / "task.toml").read_text())
        assert config["version"] == "1.0" and config["verifier"]["timeout_sec"] and config["agent"]["timeout_sec"]
        dockerfile = (task / "environment/Dockerfile").read_text()
        assert dockerfile == "FROM debian:bookworm-slim\nWORKDIR /app\nCOPY files/ /app/\n"
        assert any((task / "environment/files").iterdir())
        assert len((task / "instruction.md").read_text().split()) <= 20
        shebang, *commands = (task / "solution/solve.sh").read_text().splitlines()
        assert shebang == "#!/bin/bash" and 1 <= len(commands) <= 2 and all(0 < len(line) <= 60 for line in commands)
        assert os.access(task / "solution/solve.sh", os.X_OK) and os.access(task / "tests/test.sh", os.X_OK)


def test_texts_tell_right_from_wrong():
    """Would catch a draw for which a wrong command is right: a sort of what is sorted, a grep that finds all lines."""
    draw = random.Random(0)
    for _ in range(300):
        slots = shell.draw_slots(draw)
        lines, numbers = slots["lines"], slots["numbers"]
        found = [line for line in lines if slots["x"] in line]
        results = [lines, lines[::-1], sorted(lines), sorted(lines)[::-1], sorted(set(lines)), found,
                   [line for line in lines if line not in found], lines[:slots["n"]], lines[-slots["n"]:]]
        assert all(results) and len({tuple(lines) for lines in results[:6]}) == 6 and slots["y"] not in slots["A"]
        assert len(lines) > slots["n"] and len(set(lines)) < len(lines) != len(slots["A"].split())
        assert len({tuple(n) for n in (numbers, sorted(numbers), sorted(numbers, key=int))}) == 3


# ---- in a sandbox ----

@pytest.fixture(scope="module")
def bubblewrap():
    if problem := Bubblewrap.problem():
        pytest.skip(problem)


def rewards(task, *attempts):
    """The reward after each of these command lines (None: the solution), all in fresh sandboxes."""
    def one(attempt):
        with Bubblewrap(environment(task, {"debian:bookworm-slim": "host"}), run_id="test", name=task.name) as box:
            box.put(task / "tests", "/tests")
            box.put(task / "solution", "/solution")
            result = box.exec(["bash", "-ec", attempt or "bash -e /solution/solve.sh"], timeout_s=20)
            assert result.exit_code == 0, result
            assert box.exec(["sh", "/tests/test.sh"], timeout_s=20).exit_code == 0
            box.get("/logs/verifier/reward.txt", path := Path(box.folder) / "reward")
            return int(path.read_text())
    return [one(attempt) for attempt in attempts]


def test_oracle_scores_1_and_nop_0(folder, bubblewrap):
    """Would catch a verifier that pays for nothing, or a solution that does not do what the instruction says."""
    tasks = [next(folder.glob(f"*/{kind}-01")) for kind in [*shell.TRAINED, *shell.NEW]]
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda task: rewards(task, None, "true"), tasks))
    assert not [(task.name, got) for task, got in zip(tasks, found) if got != [1, 0]]


@pytest.mark.parametrize("kind, wrong", [
    ("copy", "{solve}; rm {a}"), ("copy", "ln -s {a} {b}"), ("copy", "ln {a} {b}"), ("copy", "mv {a} {b}"),
    ("copy", "{solve}; touch x"), ("copy", "echo >> {a}; {solve}"), ("delete", "rm *"), ("delete", "> {a}"),
    ("delete", "{solve}; mkdir x"), ("mkdir", "touch {d}"), ("sort_numbers", "sort {a} > {b}"), ("grep", "cp {a} {b}"),
    ("unique", "sort {a} > {b}"), ("grep", "> {b}"), ("head", "head {a} > {b}"), ("count_lines", "wc -l {a} > {b}"),
    ("count_lines", "echo 99 > {b}"), ("archive", "touch {b}"), ("archive", "tar -cf {b} {a}/*"),
    ("chmod", "chmod +x *"), ("chmod", "rm {a}; mkdir {a}"), ("move", "cp {a} {b}"), ("replace", "sed -i s/a/b/ {a}"),
    ("create", "touch {b}"), ("reverse", "sort -r {a} > {b}"), ("symlink", "cp {a} {b}"), ("symlink", "ln {a} {b}")])
def test_near_misses_score_0(folder, bubblewrap, kind, wrong):
    """Would catch a verifier that looks only at the named file, or only at its name or content, not its type."""
    task = next(folder.glob(f"*/{kind}-00"))
    solve, = (task / "solution/solve.sh").read_text().splitlines()[1:]
    nouns = [word for word in re.findall(r"[\w./]+", solve) if word.split(".")[0].split("/")[0] in shell.NOUNS]
    a, b = (nouns[::-1] if kind == "archive" else nouns * 2)[:2]
    assert rewards(task, wrong.format(solve=solve, a=a, b=b, d=a.split("/")[0])) == [0]
