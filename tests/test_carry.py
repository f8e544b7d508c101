"""train.py --carry_over: rollouts that outlive updates, on a tiny random model with a real engine and sandboxes."""
import dataclasses
import os
import sys
import threading
import time
import types

import numpy as np
import psutil
import pytest
import torch

from conftest import ROOT, make_task, until
from test_proxy import ask, hand_over, sampled, trainer
from test_train import alive, command, forked, train
import rollout
import train as loop
import tree

REWARD = "echo 0.$RANDOM > /logs/verifier/reward.txt"       # each group has rewards that differ
FLAGS = "--carry_over=0.5", "--priority_floor=1", "--lr=1e-3", "--lr_warmup_steps=1", "--no_checkpoint"


# What each of the agent's commands runs first (BASH_ENV): the first takes time, and the second ends the agent. A random
# model never says DONE, and whoever runs out of turns gets no reward.
FIRST = "if [ $0 = bash ]; then [ -s n ] || sleep {}; echo >> n; [ $(wc -l < n) = 1 ] || kill -9 $PPID; fi"


@pytest.fixture(scope="module")
def tasks(tmp_path_factory, bubblewrap):
    """Four tasks, one of them slow: its first command takes 30 s."""
    folder = tmp_path_factory.mktemp("tasks")
    for i in range(4):
        task = make_task(folder / f"task-{i}", instruction=f"Write {i} to out.txt.", test=REWARD,
                         dockerfile="ENV BASH_ENV=/app/first.sh COMMAND_TIMEOUT_S=100")
        (task / "environment/files/first.sh").write_text(FIRST.format(0 if i else 30))
    return folder


def trained(out):
    """-> (record's path, step that trained it, its token versions) of each rollout in the files of trained tokens; and
    of each record by id and start: path, versions, outcome."""
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
        assert r["fidelity/stale_gap_mean"] > 1e-2
        assert 0 < r["fidelity/versions_behind"] <= r["fidelity/versions_behind_max"] <= 3


def test_what_is_too_old_is_given_up(tiny, tasks, tmp_path):
    """Would catch a bound that only reports, a rollout given up that goes on sampling or is trained, and one that is
    not counted: with --max_staleness 0 nothing may outlive its step."""
    status, stderr, rows = train(tiny, tasks, tmp_path / "run", *FLAGS, "--steps=3", "--max_staleness=0")
    assert status == 0, stderr[-3000:]
    found, records = trained(tmp_path / "run")
    rl, outcomes = [r for r in rows if r["phase"] == "rl"], [outcome for _, _, outcome in records.values()]
    assert sum(r.get("outcome/stale", 0) for r in rl) == outcomes.count("stale") > 0
    assert len(found) == len(records) - outcomes.count("stale")
    assert all(versions == [step] for _, step, versions in found)
    assert all(r["groups/unfinished"] == r["groups/carried"] == r.get("fidelity/older_tokens", 0) == 0 for r in rl)


@pytest.mark.slow
def test_two_ranks_carry_over(tiny, tasks, tmp_path):
    """Would catch ranks that disagree about which groups have ended or who runs the next (one would wait for ever, or
    train another batch), and a group that two ranks run."""
    launcher = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    status, stderr, rows = train(tiny, tasks, tmp_path / "run", *FLAGS, "--steps=4", "--max_staleness=3",
                                 launcher=launcher)
    assert status == 0, stderr[-3000:]
    found, records = trained(tmp_path / "run")
    rl = [r for r in rows if r["phase"] == "rl"]
    assert len(rl) == 4 and len(found) == len({path for path, _, _ in found}) == len(records)
    assert sum(r["groups/num"] for r in rl) * 4 == len(found) and rl[-1]["groups/unfinished"] == 0
    assert sum(r["groups/carried"] for r in rl) > 0
    assert max(r["fidelity/gap_mean"] for r in rl if "fidelity/gap_mean" in r) < 1e-3


def test_what_a_resumed_group_takes_over():
    """Would catch a group of rollouts that were paid by two definitions, after flags changed between kill and resume,
    and calls of later weights than the state's or of before the group began."""
    r = forked(1., [[7, 8], [9], [10]])
    for c, versions in zip(r.calls, ([[2, 2]], [[3, 1]], [])): c.versions = versions
    r = dataclasses.replace(r, more={"weights_id": "weights" + "flags"})
    kept = lambda *args: [c.id for c in loop.still_good(r, *args)]
    assert kept("flags", 2, 3) == [0, 1, 2] and kept("flags", 2, 2) == [0, 2] and kept("flags", 3, 3) == [1, 2]
    assert kept("other", 2, 3) == [] == loop.still_good(dataclasses.replace(r, more={}), "flags", 2, 3)


def test_a_carried_task_that_is_gone_is_named():
    """Would catch a group without rollouts, which has ended at once and ends the run where its state is saved."""
    task, cfg = types.SimpleNamespace(id="here"), loop.Config(group_size=2, tp=2)
    saved = [["here", "bash", "step-0001", 4], ["here", "bash", "step-0002", 5]]
    groups = loop.take_up(saved, [task], 2, cfg)
    assert [(g.jobs[1].id, g.folder, g.born, g.rank) for g in groups] == [
        ("here.bash.1", "step-0001", 4, 0), ("here.bash.1", "step-0002", 5, 2)]
    with pytest.raises(AssertionError, match="--tasks .* gone .*no such task"):
        loop.take_up([*saved, ["gone", "bash", "step-0002", 5]], [task], 2, cfg)


@pytest.mark.slow
def test_a_killed_run_takes_its_carried_rollouts_up_again(tiny, tasks, tmp_path):
    """Would catch carried rollouts that a kill loses, or that sample again what the weights of before the kill had
    said: killed right after the first state that knows of a carried group, the same command goes on."""
    out, flags = tmp_path / "run", (*FLAGS, "--steps=3", "--save_every=1", "--resume")
    marker = f"HARNESS_RL_TEST_{os.getpid()}_carry"
    with open(tmp_path / "stdout", "w") as f:
        process = psutil.Popen(command(tiny, tasks, out, *flags), cwd=ROOT, stdout=f, stderr=f,
                               env={**os.environ, marker: "1"})
    saved, deadline = out / "saved" / "step-0001", time.monotonic() + 300
    while not saved.exists() and process.is_running() and time.monotonic() < deadline: time.sleep(0.02)
    process.kill()
    process.wait(30)
    assert saved.exists(), (tmp_path / "stdout").read_text()[-3000:]
    while alive(marker) and time.monotonic() < deadline: time.sleep(0.1)
    first = {path: tree.read(path) for path in (out / "rollouts/step-0000").glob("*.jsonl")}
    cut = {path: r for path, r in first.items() if not r.outcome and r.calls}
    assert len(cut) == 4, "the slow group is between its first command and its second call"
    status, stderr, rows = train(tiny, tasks, out, *flags)
    assert status == 0, stderr[-3000:]
    found, records = trained(out)
    assert len(found) == len({path for path, _, _ in found}) == len(records) and len(rows) == 4, rows
    for path, before in cut.items():
        after = tree.read(path)
        assert after.outcome == "harness_error" and [v for c in after.calls for v, _ in c.versions][0] == 0
        assert after.calls[0].sampled_ids == before.calls[0].sampled_ids and len(after.calls) == 2
        assert after.calls[0].logp_rollout == before.calls[0].logp_rollout


def test_a_call_over_an_update_is_each_version_s_own(real, connect, endless, tiny):
    """Would catch tokens sampled while the engine is held, a call that begins anew under the next weights, tokens that
    carry the wrong version, and new tokens that look at keys of the old weights: held in the middle of a reply, with a
    second call that arrives meanwhile; each version's tokens agree with its own weights, and with no others."""
    session, other, version, old = connect(real), connect(real), real.engine.version, trainer(tiny)
    with torch.random.fork_rng():
        torch.manual_seed(7)
        new = {n: p + 0.3 * torch.randn_like(p) * p.std() if p.dim() > 1 else p for n, p in old.named_parameters()}
    long = {"max_tokens": 900, "ignore_eos": True}
    first = threading.Thread(target=ask, args=(connect.client(session),), kwargs=long)
    second = threading.Thread(target=ask, args=(connect.client(other),), kwargs={"max_tokens": 50})
    first.start()
    until(lambda: sampled(session) > 20)
    real.sleep()
    held = sampled(session)
    second.start()
    until(lambda: other.seen)
    time.sleep(1)
    assert sampled(session) == held and not session.calls and not other.calls
    hand_over(real, new, version + 1)
    first.join(300), second.join(300)
    hand_over(real, dict(old.named_parameters()), version + 2)
    call, = tree.read(session.record).calls
    assert [v for v, _ in call.versions] == [version, version + 1] and len(call.sampled_ids) == 900
    assert [v for c in tree.read(other.record).calls for v, _ in c.versions] == [version + 1]
    t = tree.build(tree.read(session.record))
    forest, engine, of = tree.pack(t.paths, t.trained), torch.tensor(t.logp_rollout[0]), torch.tensor(t.version[0])
    with torch.no_grad():
        by = [tree.logprobs(m, forest)[forest.where[0]] for m in (old, trainer(tiny, new))]
    for v, own, wrong in ((version, *by), (version + 1, *by[::-1])):
        assert (own - engine)[of == v].abs().max() < 0.01 < 0.05 < (wrong - engine)[of == v].abs().mean(), v


def test_a_hold_costs_no_agent_its_time(scripted, tmp_path, bubblewrap):
    """Would catch a time limit that runs on while the policy is updated: the engine says nothing for longer than the
    agent may take; and a sandbox that starts meanwhile."""
    task = rollout.load_task(make_task(tmp_path / "task", toml="[agent]\ntimeout_sec = 15"), "task", {})
    runner = rollout.Runner(scripted, bubblewrap, "test-hold", num_parallel=2, num_warm=0)
    first, = runner.begin([rollout.Job(task, "bash", 0, ("DONE",))], tmp_path)
    scripted.sleep()
    until(lambda: any(s.seen for s in list(scripted.sessions.values())))
    runner.hold()
    second, = runner.begin([rollout.Job(task, "bash", 1, ("DONE",))], tmp_path)
    time.sleep(17)
    assert not first.done() and not second.done() and runner.boxes[0].folder and not runner.boxes[1].folder
    scripted.wait_for(scripted.engine.resume_generation())
    runner.go_on()
    for done in (f.result(300) for f in (first, second)):
        assert done.outcome == "ok" and done.seconds["agent"] < 15, done
    runner.stop()
