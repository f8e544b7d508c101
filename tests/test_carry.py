"""train.py --carry_over: rollouts that outlive updates, on a tiny random model with a real engine and sandboxes."""
import dataclasses
import threading
import time

import numpy as np
import pytest

from conftest import make_task
from test_train import train
import rollout
import tree

REWARD = "echo 0.$RANDOM > /logs/verifier/reward.txt"       # each group has rewards that differ
FLAGS = "--carry_over=0.5", "--priority_floor=1", "--lr=1e-3", "--lr_warmup_steps=1", "--no_checkpoint"


# What each of the agent's commands runs first (BASH_ENV): it takes time, and the second ends the agent. A random model
# never says DONE, and whoever runs out of turns gets no reward.
FIRST = "if [ $0 = bash ]; then sleep {}; echo >> n; [ $(wc -l < n) = 1 ] || kill -9 $PPID; fi"


@pytest.fixture(scope="module")
def tasks(tmp_path_factory, bubblewrap):
    """Four tasks, one of them slow: 2 commands of 8 s."""
    folder = tmp_path_factory.mktemp("tasks")
    for i in range(4):
        task = make_task(folder / f"task-{i}", instruction=f"Write {i} to out.txt.", test=REWARD,
                         dockerfile="ENV BASH_ENV=/app/first.sh")
        (task / "environment/files/first.sh").write_text(FIRST.format(0 if i else 8))
    return folder


def trained(out):
    """(record's path, step that trained it, its token versions) of each rollout in the files of trained tokens."""
    records, found = {}, []
    for path in (out / "rollouts").glob("step-*/*.jsonl"):
        r = tree.read(path)
        records[r.id, r.started_s] = path, sorted({v for c in r.calls for v, _ in c.versions}), r.outcome
    for file in sorted((out / "tokens").glob("*.npz")):
        with np.load(file) as t:
            for id, started_s in zip(t["id"], t["started_s"]):
                path, versions, _ = records[str(id), float(started_s)]
                found.append((path, int(file.stem[5:]), versions))
    return found, records


@pytest.fixture(scope="module")
def carried(tiny, tasks, tmp_path_factory):
    """-> run folder and RL rows of four steps."""
    out = tmp_path_factory.mktemp("carried") / "run"
    status, stderr, rows = train(tiny, tasks, out, *FLAGS, "--steps=4", "--max_staleness=3")
    assert status == 0, stderr[-3000:]
    return out, [r for r in rows if r["phase"] == "rl"]


def test_rollouts_that_span_updates_are_trained_once(carried):
    """Would catch a rollout that is lost between two steps, trained twice or without its tail, one that begins anew
    under the next weights, and a group torn apart: all that ran is trained, each once, whole groups in the step in
    which their last rollout had ended, by tokens of the versions from its start to that step's."""
    out, rows = carried
    found, records = trained(out)
    assert len(rows) == 4 and len(found) == len({path for path, _, _ in found}) == len(records)
    assert sum(r["groups/num"] for r in rows) * 4 == len(found) and rows[-1]["groups/unfinished"] == 0
    assert sum(r["calls/num"] for r in rows) == sum(len(tree.read(path).calls) for path, _, _ in found)
    steps, spans = {}, []
    for path, step, versions in found:                      # step s trains version s
        begun = int(path.parent.name[5:])
        assert begun <= versions[0] <= versions[-1] <= step, (path, step, versions)
        steps.setdefault((path.parent.name, path.name.split(".")[0]), set()).add(step)
        if versions[-1] > versions[0]: spans.append((versions, step))
    assert spans and all(len(s) == 1 for s in steps.values()), "each group in one step"
    assert all(r["groups/num"] >= 2 for r in rows)
    assert sum(r["groups/carried"] for r in rows) == sum(
        step > int(folder[5:]) for (folder, _), (step,) in steps.items()) > 0


def test_the_gate_judges_the_current_version_alone(carried):
    """Would catch older tokens in the gate (a large learning rate makes their gap large), older tokens that nobody
    reports, and keys of the old weights under tokens of the new: the gap of a version to its own weights is rounding."""
    rows = [r for r in carried[1] if r["fidelity/older_tokens"]]
    assert rows and max(r["fidelity/gap_mean"] for r in carried[1] if "fidelity/gap_mean" in r) < 1e-3
    for r in rows:
        assert r["fidelity/stale_gap_mean"] > 1e-2 and 0 < r["fidelity/versions_behind"] <= r["fidelity/versions_behind_max"] <= 3


def test_what_is_too_old_is_given_up(tiny, tasks, tmp_path):
    """Would catch a bound that only reports, a rollout given up that goes on sampling or is trained, and one that is
    not counted: with --max_staleness 0 nothing may outlive its step."""
    status, stderr, rows = train(tiny, tasks, tmp_path / "run", *FLAGS, "--steps=3", "--max_staleness=0")
    assert status == 0, stderr[-3000:]
    found, records = trained(tmp_path / "run")
    rl, outcomes = [r for r in rows if r["phase"] == "rl"], [outcome for _, _, outcome in records.values()]
    assert sum(r.get("outcome/stale", 0) for r in rl) == outcomes.count("stale") > 0
    assert len(found) == len(records) - outcomes.count("stale") and all(versions == [step] for _, step, versions in found)
    assert all(r["groups/unfinished"] == r["groups/carried"] == r.get("fidelity/older_tokens", 0) == 0 for r in rl)


def test_a_hold_costs_no_agent_its_time(scripted, tmp_path, bubblewrap):
    """Would catch a time limit that runs on while the policy is updated: the engine says nothing for longer than the
    agent may take; and a sandbox that starts meanwhile."""
    task = rollout.load_task(make_task(tmp_path / "task", toml="[agent]\ntimeout_sec = 4"), "task", {})
    runner, going = rollout.Runner(scripted, bubblewrap, "test-hold", num_parallel=2, num_warm=0), threading.Event()

    def script(call):
        going.set()
        return "DONE"
    first, = runner.begin([rollout.Job(task, "bash", 0, script)], tmp_path)
    scripted.sleep()
    assert going.wait(30)
    runner.hold()
    second, = runner.begin([rollout.Job(task, "bash", 1, script)], tmp_path)
    time.sleep(6)
    assert not first.done() and len(runner.boxes) == 1 + (not second.done())
    scripted.call(scripted.engine.resume_generation())
    runner.go_on()
    for done in (first.result(60), second.result(60)): assert done.outcome == "ok" and done.seconds["agent"] < 4, done
    runner.stop()
