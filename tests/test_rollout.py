"""rollout.py: real sandboxes, every shell task by oracle and nop, outcomes, and the commands with bad input."""
import contextlib
import importlib
import itertools
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
from docker.errors import APIError

from conftest import ENGINE, ROOT, make_task, until
import rollout
import sandbox
import tree
from rollout import Job, Runner, load_task, load_tasks, make_jobs

BASE = {"debian:bookworm-slim": "harness-rl/base"}      # for Docker; bubblewrap takes the host's /usr
REWARD, JSON = "> /logs/verifier/reward.txt", "/logs/verifier/reward.json"


def kind_of(task):
    return task.id.rpartition("/")[2].rpartition("-")[0]


def remains(run_id):
    return [p.name for p in Path(tempfile.gettempdir()).glob(f"harness-rl_{run_id}_*")]


# ---- the task set ----

@pytest.mark.parametrize("harness, reward", [("oracle", 1), ("nop", 0)])
def test_every_task_under_bubblewrap(shell_tasks, bubblewrap, tmp_path, harness, reward):
    """Would catch a task whose solution does not solve it or whose verifier pays for nothing, and a rollout that
    loses the workspace between agent and verifier: the whole generated set, in the sandboxes that training uses.
    nop: each 4th training task."""
    tasks = load_tasks(shell_tasks)
    if harness == "nop": tasks = [t for i, t in enumerate(tasks) if "train/" not in t.id or i % 4 == 0]
    runner = Runner(None, bubblewrap, "test-all", num_parallel=6)
    done = runner.run_all(make_jobs(tasks, [harness], 1), tmp_path, harness, quiet=True)
    assert len(done) == len(tasks) and [r.task for r in done] == [t.id for t in tasks]
    assert not [(r.task, r.outcome, r.reward, r.detail) for r in done if (r.outcome, r.reward) != ("ok", reward)]
    assert not remains("test-all")


def test_two_of_each_kind_under_docker(shell_tasks, docker, tmp_path):
    """Would catch a task that works with the host's tools only: here they are the base image's, and the user is
    root."""
    found = defaultdict(list)
    for task in load_tasks(shell_tasks, BASE): found[kind_of(task)].append(task)
    found = found.values()
    jobs = [job for oracle, nop, *_ in found for job in (Job(oracle, "oracle"), Job(nop, "nop"))]
    done = Runner(None, docker, "test-docker", num_parallel=6).run_all(jobs, tmp_path, "", quiet=True)
    assert len(done) == 60
    wrong = [r for r in done if (r.outcome, r.reward) != ("ok", r.harness == "oracle")]
    assert not wrong


@pytest.mark.parametrize("where", ["bubblewrap", "docker"])
def test_the_bash_harness_solves_tasks_end_to_end(shell_tasks, scripted, tokenizer, tmp_path, where, request):
    """Would catch any break between model and verifier: each solution, said by a scripted policy through the real
    server, socket, forwarder and agent, must score 1; and the record must hold exactly what was said, in one chain
    without a fork."""
    kind = request.getfixturevalue(where)
    first = {}
    for task in load_tasks(shell_tasks, BASE if where == "docker" else {}): first.setdefault(kind_of(task), task)
    tasks = list(first.values())[::1 if where == "bubblewrap" else 6]
    jobs = make_jobs(tasks, ["bash"], 1, "solution")
    runner = Runner(scripted, kind, f"test-{where}", model="tiny", num_parallel=6)
    done = runner.run_all(jobs, tmp_path, "", quiet=True)
    assert not [(r.task, r.outcome, r.reward, r.detail) for r in done if (r.outcome, r.reward) != ("ok", 1)]
    for r, job in zip(done, jobs):
        assert [tokenizer.decode(c.sampled_ids[:-1]) for c in r.calls] == [*job.task.solution(), "DONE"]
        assert all(c.cause is None and c.finish == "stop" and c.template_ids == c.prompt_ids for c in r.calls)
        assert job.task.instruction in tokenizer.decode(r.calls[0].prompt_ids)
        assert "exit 0" in tokenizer.decode(r.calls[-1].prompt_ids)
        t = tree.build(r)
        assert len(t.paths) == 1 and t.num_trained == sum(len(c.sampled_ids) for c in r.calls)
        assert (r.sandbox, r.verify, r.temperature) == (kind, "strict", 1.0)
        assert set(r.seconds) == {"start", "agent", "verify"}
    assert not remains(f"test-{where}") and not scripted.sessions


# ---- outcomes ----

@pytest.fixture
def run(tmp_path, bubblewrap):
    """run(task options...) -> its rollout, by the oracle, or by the bash harness over a scripted proxy."""
    def run(proxy=None, script=None, **options):
        folder = make_task(tmp_path / f"task{len(list(tmp_path.iterdir()))}", **options)
        job = Job(load_task(folder, folder.name, {}), "oracle" if proxy is None else "bash", script=script)
        return Runner(proxy, bubblewrap, "test-outcome", verify="strict").run(job, tmp_path)
    return run


def test_outcome_of():
    """Would catch an outcome that goes by the exit status where the session knows better, or a wrong order of them."""
    def outcome(code=0, timed_out=False, overlong_exit=None, spent=False, refused="", final=False, session=True):
        told = SimpleNamespace(is_spent=spent, refused=refused, has_final_answer=lambda: final)
        return rollout.outcome_of(sandbox.Result(code, timed_out, ""), SimpleNamespace(overlong_exit=overlong_exit),
                                  told if session else None)
    assert [outcome(), outcome(session=False), outcome(1, final=True)] == ["ok"] * 3
    assert [outcome(1), outcome(0, refused="500"), outcome(1, refused="500", final=True)] == ["harness_error"] * 3
    assert [outcome(4, overlong_exit=4, refused="403"), outcome(137, True, spent=True)] == ["overlong"] * 2
    assert outcome(137, True, overlong_exit=137) == outcome(137, True, final=True) == "timeout"


def test_harness_error(run):
    """Would catch an agent's exit status that becomes the reward, or a crash that ends the run."""
    done = run(solution="exit 7")
    assert (done.outcome, done.reward) == ("harness_error", 1) and "exit status 7" in done.detail


def test_timeout_ends_in_time_and_is_verified(run):
    """Would catch a hang that holds the run, or that throws away what stood when the time was over."""
    test, toml = f"[ -e f ] && echo 0.5 {REWARD}", "[agent]\ntimeout_sec = 5"
    done = run(solution="echo done > f; sleep 1000", test=test, toml=toml)
    assert (done.outcome, done.reward) == ("timeout", 0.5) and 4.5 < done.seconds["agent"] < 300


def test_strict_verification_sees_the_workspace_and_nothing_else(run):
    """Would catch an agent that cheats: a reward of its own, a changed test, a process that lives on, a file
    outside the workspace."""
    cheat = f"""mkdir -p /logs/verifier /tests; echo 1 {REWARD}; echo 'echo 1 {REWARD}' > /tests/test.sh
        touch /tmp/mark inside; rm here.txt; (while :; do echo 1 {REWARD}; sleep 0.01; done) &"""
    test = f"""[ -e inside ] || echo 7 {REWARD}
        [ ! -e /tmp/mark ] && [ ! -e here.txt ] && [ ! -e /solution/solve.sh ] || echo 8 {REWARD}
        [ -e /logs/verifier/reward.txt ] || echo 0 {REWARD}"""
    done = run(solution=cheat, test=test)
    assert (done.outcome, done.reward) == ("ok", 0), done


def test_a_used_up_budget_is_overlong(scripted, bubblewrap, tmp_path):
    """Would catch a rollout that the run itself cut off and that counts as the harness's failure, or is paid."""
    task = load_task(make_task(tmp_path / "long"), "long", {})
    runner = Runner(scripted, bubblewrap, "test-budget", max_calls=1)
    done = runner.run(Job(task, "bash", script=("true", "DONE")), tmp_path)
    assert (done.outcome, done.reward, len(done.calls)) == ("overlong", 0, 1)


def test_tests_and_solution_are_hidden_from_a_harness(run, scripted):
    """Would catch a verifier or a solution that the agent can read."""
    script = ("ls /tests /solution > seen 2>&1; cat /tests/test.sh >> seen", "DONE")
    done = run(scripted, script, test=f"grep -q verifier seen || echo 1 {REWARD}")
    assert (done.outcome, done.reward) == ("ok", 1)


@pytest.mark.parametrize("test, says", [
    ("true", "ended with status 0 and wrote no"), ("echo oh no; exit 3", "oh no"), ("sleep 100", "ran out of time"),
    (f"echo good {REWARD}", "'good'"), (f"echo inf {REWARD}", "'inf'"), (f"echo nan {REWARD}", "'nan'"), (REWARD, "''"),
    (f"echo '{{\"score\": 1}}' > {JSON}", "score"), ("ln -s /etc/passwd /logs/verifier/reward.txt", "wrote no"),
    ("mkdir -p /logs/verifier/reward.txt/x", "wrote no")])
def test_verifier_error(run, test, says):
    """Would catch a broken verifier that counts as failure (or success!) of the policy: nothing, nonsense or inf is
    no reward."""
    done = run(test=test, toml=f"[verifier]\ntimeout_sec = {1.5 if 'sleep' in test else 60}")
    assert (done.outcome, done.reward) == ("verifier_error", None) and says in done.detail


@pytest.mark.parametrize("test, reward", [
    (f"echo ' 0.25' {REWARD}", 0.25), (f"echo '{{\"reward\": 1, \"x\": 0}}' > {JSON}", 1)])
def test_rewards(run, tmp_path, test, reward):
    """Would catch a fraction that is rounded, Harbor's reward.json not being read, and a place in the log that is not
    where the verifier's words begin."""
    done = run(solution="echo; echo === verifier; echo I solved it.", test=f"echo I; {test}")
    log, = tmp_path.glob("*.log")
    assert done.reward == reward and log.read_bytes()[done.more["verifier_at"]:].startswith(b"=== verifier\nI\n")


def test_rewards_by_call(run, scripted):
    """Would catch rewards given to other calls than the verifier named, a verifier that is not told what the calls
    were, the reward of the rollout lost beside them, and calls that are paid though the rollout never ended."""
    test = f"""grep -q '"id": 0, "kind": "main", "finish": "stop", "text": "true' /logs/agent/calls.json || exit 1
        grep -q '"id": 1, .*"text": "DONE' /logs/agent/calls.json || exit 1
        echo '{{"reward": 0.25, "call_1": -2, "steps": 7}}' > {JSON}"""
    done = run(scripted, ("true", "DONE"), test=test)
    assert (done.outcome, done.reward, done.call_rewards) == ("ok", 0.25, [0., -2.])
    paid = f"""echo '{{"reward": 1, "call_0": 0.5}}' > {JSON}"""
    assert run(test=paid).call_rewards is None, "the oracle has no calls"
    done = run(scripted, ("true",) * 9, test=paid)
    assert (done.outcome, done.reward, done.call_rewards) == ("overlong", 0, None)


@pytest.mark.parametrize("pair, says", [
    ('"call_2": 1', "paid call_2; the rollout has 2 calls"), ('"call_-1": 1', "paid call_-1"),
    ('"call_01": 1', "call_01"), ('"call_1": "1"', "paid call_1 '1'"), ('"call_0": NaN', "'nan'"),
    ('"call_0": true', "'True'"), ('"call_0": 1e400', "'inf'"), ('"call_0": [1]', "'[1]'; a number within")])
def test_a_call_paid_in_nonsense_is_a_verifier_error(run, scripted, pair, says):
    """Would catch a misspelt call that is silently paid nothing, and values that become NaN in the loss."""
    done = run(scripted, ("true", "DONE"), test=f"""echo '{{"reward": 1, {pair}}}' > {JSON}""")
    assert (done.outcome, done.reward, done.call_rewards) == ("verifier_error", None, None) and says in done.detail


def test_a_harness_without_a_call_is_loud(run, scripted, capsys):
    """Would catch a harness that silently never reaches the model: its rollout must not count as a failure of the
    policy."""
    done = run(scripted, ("DONE",), dockerfile="ENV MAX_TOKENS=lots")       # the agent crashes before its first call
    assert (done.outcome, done.reward) == ("no_calls", None)
    assert "never reached the model" in capsys.readouterr().err


def test_a_harness_whose_model_fails(run, scripted, tmp_path):
    """Would catch a refused call that hangs the harness or hides that it failed; what it did before still counts."""
    done = run(scripted, ("touch solved",), test=f"[ -e solved ] && echo 1 {REWARD}")
    assert (done.outcome, done.reward, len(done.calls)) == ("harness_error", 1, 1)
    assert "the script of session" in next(tmp_path.glob("*.log")).read_text()


def test_out_of_turns(run, scripted):
    """Would catch a rollout without a final answer that is rewarded: the policy would learn never to stop."""
    done = run(scripted, ("true",) * 9)
    assert (done.outcome, done.reward) == ("overlong", 0) and len(done.calls) == 3
    done = run(scripted, ("true",) * 9, test="exit 3")
    assert (done.outcome, done.reward) == ("verifier_error", 0), "a broken verifier is no way out"


def test_a_session_that_does_not_end_is_an_infra_error(scripted, bubblewrap, tmp_path):
    """Would catch an engine that answers too late when one rollout's session is closed, and that ends the whole run."""
    class Slow:                                         # the proxy, but for its answer to one session's end
        def __getattr__(self, name): return getattr(scripted, name)
        def close_session(self, session):
            scripted.close_session(session)
            if ".1" in str(session.id): raise TimeoutError("the engine did not answer close_session in 10 s")
    task = load_task(make_task(tmp_path / "t"), "t", {})
    jobs = [Job(task, "bash", i, script=("true", "DONE")) for i in range(2)]
    done = Runner(Slow(), bubblewrap, "test-slow").run_all(jobs, tmp_path / "out", "", quiet=True)
    assert [(r.outcome, r.reward) for r in done] == [("ok", 1), ("infra_error", None)], done
    assert "did not answer" in done[1].detail


def test_a_failure_of_the_engine_is_an_infra_error(run, scripted):
    """Would catch a harness that gave up since the engine failed, told as its own error and paid 0."""
    core = scripted.engine.engine_core

    class Failing(type(core)):
        async def add_request_async(self, request): raise RuntimeError("no memory")
    core.__class__ = Failing
    try: done = run(scripted, ("true", "DONE"), test=f"echo 0 {REWARD}")
    finally: core.__class__ = Failing.__bases__[0]
    assert (done.outcome, done.reward) == ("infra_error", None) and "engine failed" in done.detail, done


def test_a_task_that_vanishes_is_an_infra_error(bubblewrap, tmp_path):
    """Would catch a fault of the host while the verifier's sandbox is made, taken for an agent that deleted its
    workspace, which pays 0."""
    folder = make_task(tmp_path / "t", dockerfile="COPY files/here.txt /app/too.txt")

    class Vanishing(Runner):
        def run_agent(self, *args):
            (folder / "environment/files/here.txt").unlink()
            return super().run_agent(*args)
    done = Vanishing(None, bubblewrap, "test-vanish", verify="strict").run(Job(load_task(folder, "t", {}), "nop"),
                                                                          tmp_path)
    assert (done.outcome, done.reward) == ("infra_error", None) and "here.txt" in done.detail, done


def test_a_task_is_hashed_once(bubblewrap, tmp_path, monkeypatch):
    """Would catch every rollout reading the whole of its task's folder, once or twice."""
    task, num = load_task(make_task(tmp_path / "t"), "t", {}), Counter()
    read = Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda path: num.update([path.name]) or read(path))
    runner = Runner(None, bubblewrap, "test-hash", num_parallel=1, num_warm=0)      # two at once may both read it
    done = runner.run_all([Job(task, "nop", i) for i in range(3)], tmp_path / "out", "", quiet=True)
    assert len(done) == 3 and num["here.txt"] == 1, num


def test_infra_error(run):
    """Would catch a sandbox that cannot start and is counted against the policy."""
    done = run(dockerfile="RUN apt-get install everything")
    assert (done.outcome, done.reward) == ("infra_error", None) and "--sandbox docker" in done.detail


def test_a_workspace_that_cannot_be_carried_over(docker, tmp_path):
    """Would catch an agent that deletes its workspace to escape the verdict: an infra_error would leave loss and
    statistics."""
    folder = make_task(tmp_path / "task", solution="cd /; rm -rf /app; ln -s /etc /app")
    job = Job(load_task(folder, "task", BASE), "oracle")
    done = Runner(None, docker, "test-gone", verify="strict").run(job, tmp_path)
    assert (done.outcome, done.reward) == ("ok", 0) and "carried" in done.detail


def test_a_fault_stops_the_others_at_once(bubblewrap, tmp_path):
    """Would catch an interrupt that waits for hanging agents, starts what was queued, or leaves sandboxes and a
    false outcome behind."""
    task = load_task(make_task(tmp_path / "task", solution="sleep 300"), "task", {})
    class Interrupted(Runner):                          # Ctrl-C in the main thread, as far as run_all can tell
        def run(self, job, out, replay=None):
            if job.sample < 3: return super().run(job, out)
            until(lambda: len(self.agents) == 3)
            time.sleep(0.5)
            raise KeyboardInterrupt
    runner = Interrupted(None, bubblewrap, "test-stop", num_parallel=4)
    with pytest.raises(KeyboardInterrupt):
        runner.run_all([Job(task, "oracle", i) for i in range(9)], tmp_path / "out", "", quiet=True)
    assert not remains("test-stop")
    records = list((tmp_path / "out").glob("*.jsonl"))
    assert len(records) == 3 and all(tree.read(r).outcome is None for r in records)


# ---- tasks as public sets have them ----

def test_settings_of_both_schemas(tmp_path, monkeypatch):
    """Would catch a setting of a task that is read from the other schema's key, in another unit, or not at all."""
    monkeypatch.setenv("HRL_TEST", "from the host")
    old = load_task(make_task(tmp_path / "old", toml="""[agent]
timeout_sec = 7
[verifier]
timeout_sec = 8.5
[environment]
build_timeout_sec = 9
cpus = 2
memory = "1.5G"
storage = "512M"
"""), "old", {})
    assert (old.agent_timeout_s, old.verifier_timeout_s, old.env.build_timeout_s) == (7, 8.5, 9)
    assert old.limits == {"cpus": 2, "memory_mb": 1536, "disk_mb": 512} and not old.env.internet
    folder = make_task(tmp_path / "new")
    (folder / "task.toml").write_text("""schema_version = "1.2"
artifacts = ["/app/a", { source = "/app/b" }]
[metadata]
verify = "compat"
[agent]
user = "me"
[verifier]
env = { KEY = "${HRL_TEST}", OTHER = "${NOT_SET_HERE:-default} x" }
[solution]
env = { S = "1" }
[environment]
docker_image = "image:1"
memory_mb = 100
storage_mb = 200
network_mode = "public"
workdir = "/work"
env = { E = "2" }
""")
    (folder / "environment/Dockerfile").unlink()
    new = load_task(folder, "new", {"image:1": "local"}, internet="on")
    assert (new.env.base, new.env.workdir, new.env.env, new.env.internet) == ("local", "/work", {"E": "2"}, True)
    assert new.limits == {"cpus": 1, "memory_mb": 100, "disk_mb": 200} and new.artifacts == ("/app/a", "/app/b")
    assert new.envs == {"verifier": {"KEY": "from the host", "OTHER": "default x"}, "solution": {"S": "1"}}
    assert (new.verify, new.users) == ("compat", {"agent": "me", "verifier": ""})
    assert not load_task(folder, "new", {}, internet="off").env.internet


@pytest.mark.parametrize("toml, by_flag", [      # by_flag: --internet refuse, off, on -> has it a network, or what is said
    ("", {"refuse": False, "off": False, "on": True}),                              # Harbor's default
    ("[environment]\nallow_internet = false", {"refuse": False, "off": False, "on": False}),
    ("[environment]\nnetwork_mode = 'public'", {"refuse": "--internet", "off": False, "on": True}),
    ("[environment]\nnetwork_mode = 'public'\n[agent]\nnetwork_mode = 'no-network'",
     {"refuse": "[agent] network_mode", "off": False, "on": "[agent] network_mode"}),
    ("[environment]\nallow_internet = false\n[verifier]\nnetwork_mode = 'public'",
     {"refuse": "[verifier] network_mode", "off": False, "on": "[verifier] network_mode"}),
    ("[agent]\nnetwork_mode = 'allowlist'", dict.fromkeys(("refuse", "off", "on"), "'allowlist'")),
    ("[environment]\nnetwork_mode = 'none'", dict.fromkeys(("refuse", "off", "on"), "'none'"))])
def test_who_gets_a_network(tmp_path, toml, by_flag):
    """Would catch an agent with a network that its task denies it, and a task of a public set, which says nothing since
    it relies on Harbor's default, that never gets any."""
    folder = make_task(tmp_path / "t", toml=toml)
    for flag, expected in by_flag.items():
        if isinstance(expected, str):
            with pytest.raises(ValueError) as error: load_task(folder, "t", {}, flag)
            assert expected in str(error.value)
        else: assert load_task(folder, "t", {}, flag).env.internet == expected


@pytest.mark.parametrize("text, told", [
    ("<!-- a canary GUID 1 -->\n# CANARY 2\n\n# Do it.\nNow.", "# Do it.\nNow."), ("# Do it.\n# canary", "# Do it.\n# canary"),
    ("Kill the canary.", "Kill the canary."), ("<!-- no bird -->\nx", "<!-- no bird -->\nx")])
def test_canaries_are_not_instructions(tmp_path, text, told):
    """Would catch the mark by which task sets find themselves in training data told to the agent, and a text cut."""
    assert load_task(make_task(tmp_path / "t", instruction=text), "t", {}).instruction == told


def test_keys_that_mean_nothing_are_told(tmp_path, capsys):
    """Would catch a limit or a ban that is misspelt and so is none, and a task refused for its author's own notes."""
    notes = "[metadata]\nanything = 1\n[task]\nname = 'a/b'\n"
    for i in range(2): make_task(tmp_path / f"set/t{i}", toml=f"""enviroment = {{}}\n{notes}[agent]\ntimeout_secs = 9
[environment]\nalow_internet = false\nskills_dir = "/x"\n""")
    make_task(tmp_path / "set/u", toml=f"""source = 'x'\nsteps = []\n{notes}[verifier]\ntimeout_sec = 9
allowed_hosts = []\ncollect = []\n[agent]\nallowed_hosts = []
[environment]\ncpus = 2\nmcp_servers = []\nallowed_hosts = []""")     # Harbor writes empty lists out
    assert len(load_tasks(tmp_path / "set")) == 3
    told = capsys.readouterr().err
    assert all(x in told for x in ("timeout_secs (is it timeout_sec?)", "alow_internet (is it allow_internet?)",
                                   "enviroment (is it environment?)", "[environment] skills_dir in task.toml"))
    assert told.count("\n") == 4 and told.count("2 tasks, first set/t0") == 4


def test_public_sets_as_they_are(tmp_path, bubblewrap, monkeypatch, capsys):
    """Would catch what only tasks of others meet: scripts in another language, a guard's reward.txt before the tests'
    reward.json, a version of the author's own, folders of logs that are taken for granted, a task within a task, one
    without a solution or that is refused and stops all others, and a nop that is verified before the oracle has found
    how."""
    monkeypatch.setenv("HARNESS_RL_CACHE", str(tmp_path / "cache"))
    root, python = tmp_path / "set", "#!/usr/bin/env python3\n"
    one = make_task(root / "one", toml='artifacts = ["/logs/artifacts"]', solution=(
        "echo mine > /logs/artifacts/mine; touch /home/x /logs/agent/x && touch done"), test=(
        f"[ -d /logs/artifacts ] && [ -e done ] || exit 1; echo 0 {REWARD}; [ -e /home/x ] || exit 1; echo '{{\"reward\": 1}}' > {JSON}"), dockerfile='CMD ["bash"]\nLABEL a="b c"\n')
    (one / "task.toml").write_text((one / "task.toml").read_text().replace("1.0", "2.0"))
    (one / "environment/files/task.toml").write_text("name = 'no task'")
    two = make_task(root / "two")
    (two / "solution/solve.sh").write_text(python + "open('done', 'w').close()")
    (two / "tests/test.sh").write_text(python + "import os\nopen('/logs/verifier/reward.txt', 'w').write(str(int(os.path.exists('done'))))")
    shutil.rmtree(make_task(root / "unsolved") / "solution")
    make_task(root / "gpu", toml="[environment]\ngpus = 1")
    make_task(root / "future", toml='schema_version = "2.0"')
    options = ("--tasks", root, "--harness", "nop,oracle", "--out", tmp_path / "out", "--sandbox", "bubblewrap")
    with pytest.raises(ValueError) as error: load_tasks(root)
    assert all(word in str(error.value) for word in ("gpus", "2.0", "2 of 5 tasks are refused; --skip_refused"))
    status, output, errors = in_process(capsys, *options, "--skip_refused")
    assert "2 of 5 tasks are left out" in errors and "no solution/solve.sh: set/unsolved" in errors
    done = {r.id: r for r in map(tree.read, tree.records(tmp_path / "out"))}
    assert {id: r.reward for id, r in done.items() if "oracle" in id} == {"set/one.oracle.0": 1, "set/two.oracle.0": 1}, output
    assert done["set/one.nop.0"].verify == done["set/one.oracle.0"].verify == "compat"
    assert (tmp_path / "out/set-one.oracle.0.artifacts/logs-artifacts/mine").read_text() == "mine\n"


@pytest.mark.parametrize("test, reward", [
    (f"echo 0 {REWARD}; echo '{{\"reward\": 1}}' > {JSON}", 1),                       # a guard, then the tests
    (f"echo '{{\"reward\": 1}}' > {JSON}; sleep 0.05; echo 0 {REWARD}", 0),                       # the agent's code, then the tests
    (f"echo '{{\"reward\": 1}}' > {JSON}; touch -d 2100-01-01 {JSON}; echo 0 {REWARD}", 0),
    (f"echo 1 {REWARD}; touch -d 2100-01-01 /logs/verifier/reward.txt; echo '{{\"reward\": 0}}' > {JSON}", 0),
    (f"echo 1 {REWARD}; echo '{{\"seconds\": 9}}' > {JSON}", 1)])
def test_the_reward_that_was_written_last_counts(run, test, reward):
    """Would catch a guard's 0 that pays for ever, and a reward.json by what the tests import that beats their own 0."""
    assert run(test=test).reward == reward


def test_artifacts_are_bounded(tmp_path, bubblewrap, monkeypatch):
    """Would catch an agent that fills the host's disk by a thousand names of one file, artifacts of an earlier mode or
    run beside those of this one, and half of what was refused."""
    monkeypatch.setattr(sandbox, "GET_BYTES", 4 << 20)
    folder = make_task(tmp_path / "t", toml='artifacts = ["/app/big", "/app/small"]', solution=(
        "mkdir big small; truncate -s 1M big/a; for i in 1 2 3 4 5; do ln big/a big/$i; done; echo 1 > small/a; ln small/a small/b"))
    out = tmp_path / "out/t.oracle.0.artifacts"
    out.mkdir(parents=True)
    (out / "old").touch()
    done = Runner(None, bubblewrap, "test-artifacts", verify="compat").run(Job(load_task(folder, "t", BASE), "oracle"), out.parent)
    assert done.reward == 1 and [p.name for p in out.iterdir()] == ["app-small"] and "more than 4 MB" in str(done.more["artifacts"])
    assert {p.name: p.read_text() for p in (out / "app-small").iterdir()} == {"a": "1\n", "b": "1\n"}


@pytest.mark.parametrize("mode", ["strict", "compat"])
@pytest.mark.parametrize("agent", ["rm -rf /logs; : > /logs", "rm -rf /tests; : > /tests", "rm -rf /logs; ln -s logs /logs",
                                   "rm -rf /srv; : > /srv", "rm -rf /srv; ln -s srv /srv"])
def test_a_file_in_a_folder_s_place_is_reward_0(tmp_path, docker, mode, agent):
    """Would catch an agent that turns a reward of 0 into none: the daemon answers such paths with a fault of its own."""
    folder = make_task(tmp_path / "t", solution=agent, toml='artifacts = ["/logs/artifacts"]', test=f"echo 0 {REWARD}")
    (folder / "environment/Dockerfile").write_text("FROM debian:bookworm-slim\nWORKDIR /srv/app\nCOPY files/ /srv/app/\n")
    done = Runner(None, docker, "test-places", verify=mode).run(Job(load_task(folder, "t", BASE), "oracle"), tmp_path)
    assert done.reward == 0, done


def test_settings_reach_the_sandbox(docker, tmp_path):
    """Would catch a user, variable, folder or artifact that is read and then forgotten."""
    test = f'[ "$V" = v ] && [ "$(stat -c %U s)" = nobody ] && [ "$(id -un)" = daemon ] && echo 1 {REWARD}'
    toml = """artifacts = ["/work/here"]
[agent]
user = "nobody"
[solution]
env = { S = "s" }
[verifier]
env = { V = "v" }
[environment]
workdir = "/work"
env = { E = "e" }"""
    folder = make_task(tmp_path / "t", solution="touch $S /logs/agent/x && echo $PWD $E > here", toml=toml, test=test,
                       dockerfile="RUN mkdir /work && chmod 777 /work && ln -s /etc/passwd /work/link\nUSER daemon\n")
    (folder / "tests/test.sh").write_text(test)            # as in public sets, which find the folder of the reward
    done = Runner(None, docker, "test-set", verify="strict").run(Job(load_task(folder, "t", BASE), "oracle"), tmp_path)
    assert (done.outcome, done.reward) == ("ok", 1), done
    assert (tmp_path / "t.oracle.0.artifacts/work-here").read_text() == "/work e\n"


@pytest.mark.parametrize("where", ["bubblewrap", "docker"])
def test_the_oracle_finds_the_mode(tmp_path, request, monkeypatch, where):
    """Would catch a public task that looks outside the workspace, or needs its history, and can therefore not be used;
    one that is verified more laxly than it needs; a mode that is not remembered, or for another content."""
    monkeypatch.setenv("HARNESS_RL_CACHE", str(tmp_path / "cache"))
    kind = request.getfixturevalue(where)
    options = {"strict": dict(solution="touch f", test=f"[ -e f ] && [ ! -e /home/x ] && echo 1 {REWARD}"),
               "compat": dict(solution="touch f /home/x", test=f"[ -e f ] && [ -e /home/x ] && echo 1 {REWARD}"),
               "history": dict(solution="cat .git/refs/tags/t > f", test=f"[ -s f ] && echo 1 {REWARD}")}
    tasks = {}
    for mode, parts in options.items():
        folder = make_task(tmp_path / mode, **parts)
        if mode == "history":
            (folder / "environment/files/.git/refs/tags").mkdir(parents=True)
            (folder / "environment/files/.git/refs/tags/t").write_text("commit")
        tasks[mode] = load_task(folder, mode, BASE)
    runner = Runner(None, kind, "test-modes")
    for mode, task in tasks.items():
        done = runner.run(Job(task, "oracle"), tmp_path)
        assert (done.outcome, done.reward, done.verify) == ("ok", 1, mode), done
        assert ("tamper" in done.more) == (mode == "compat")
        assert runner.run(Job(task, "nop"), tmp_path).verify == mode
    for text, mode in ("", "strict"), ("compat\n", "compat"), ("lax", "strict"):
        tasks["compat"].mode_file(kind).write_text(text)    # of a kill between two writes, or by hand
        assert runner.modes(Job(tasks["compat"], "nop")) == (mode,)
    (tmp_path / "compat/instruction.md").write_text("Another task.")
    assert runner.run(Job(load_task(tmp_path / "compat", "compat", BASE), "nop"), tmp_path).verify == "strict"
    assert not remains("test-modes")


def test_a_slow_verifier_makes_no_task_lax(tmp_path, bubblewrap, monkeypatch):
    """Would catch a task that is verified laxly ever after, since its verifier met a busy machine once."""
    monkeypatch.setenv("HARNESS_RL_CACHE", str(tmp_path / "cache"))
    folder = make_task(tmp_path / "slow", solution="touch f /home/x", toml="[verifier]\ntimeout_sec = 10",
                       test=f"[ -e /home/x ] || sleep 60; echo 1 {REWARD}")
    task = load_task(folder, "slow", BASE)
    done = Runner(None, bubblewrap, "test-slow").run(Job(task, "oracle"), tmp_path)
    assert (done.reward, done.verify) == (1, "compat") and not task.mode_file(bubblewrap).exists()


@pytest.mark.parametrize("break_it, proof_s, reward", [
    ("exit 3", "", 0), (f"echo nonsense {REWARD}; exit", "", 0), ("sleep 60", "0.4", 0), ("sleep 60", "0.6", None),
    ("kill -9 $$", "", None), (f"echo '{{\"other\": 1}}' > {JSON}; exit", "", None),
    (f"echo '{{\"reward\": 1, \"call_9\": 1}}' > {JSON}; exit", "", None)])
def test_breaking_a_verifier(scripted, tmp_path, bubblewrap, monkeypatch, break_it, proof_s, reward):
    """Would catch an agent that escapes its 0 by files over which the verifier hangs or falls; and what is held against
    the policy: a verifier that nobody has seen to work, or no longer, one that is slow itself, is killed from outside,
    or writes what the oracle never makes it write."""
    rollout.harnesses.load("bash").mounts()                 # its runtimes are remembered, so not built once more
    monkeypatch.setenv("HARNESS_RL_CACHE", str(tmp_path / "cache"))
    folder = make_task(tmp_path / "t", solution="echo right > f", toml="[verifier]\ntimeout_sec = 5", test=(
        f"if [ $(cat f) = right ]; then echo 1 {REWARD}; else {break_it}; fi"))
    task, runner = load_task(folder, "t", BASE), Runner(scripted, bubblewrap, "test-broken", model="tiny")
    proof = task.mode_file(bubblewrap, "strict")
    fall = lambda i: runner.run(Job(task, "bash", i, script=("echo wrong > f", "DONE")), tmp_path / "out")
    assert ((done := fall(0)).outcome, done.reward) == ("verifier_error", None)
    assert runner.run(Job(task, "oracle"), tmp_path / "out").reward == 1 and 0 < float(proof.read_text()) < 5
    if proof_s: proof.write_text(proof_s)
    assert ((done := fall(1)).outcome, done.reward) == ("verifier_error", reward)
    if JSON in break_it: return
    assert runner.run(Job(task, "nop"), tmp_path / "out").reward is None, "nop is asked whether the task is right"
    (folder / "tests/test.sh").write_text(f"echo 0 {REWARD}")
    assert runner.run(Job(task, "oracle"), tmp_path / "out").reward == 0 and not proof.exists()


@pytest.mark.parametrize("where", ["bubblewrap", "docker"])
def test_the_verifier_has_room_of_its_own(tmp_path, request, where):
    """Would catch a workspace within its disk limit that leaves the tests too little of theirs: a right solution loses
    its reward, and a wrong one its 0."""
    folder = make_task(tmp_path / "t", solution="head -c 50M /dev/zero > f", toml="[environment]\nstorage_mb = 64",
                       test=f"head -c 30M /dev/zero > g; sleep 5; [ -s f ] && echo 1 {REWARD}")
    for mode in ("strict", "compat"):
        runner = Runner(None, request.getfixturevalue(where), "test-room", verify=mode)
        done = runner.run(Job(load_task(folder, "t", BASE), "oracle"), tmp_path / mode)
        assert (done.outcome, done.reward) == ("ok", 1), (mode, done)


def test_the_image_s_own_tests_stay(tmp_path, docker):
    """Would catch a folder /tests of the image that a laxer verification deletes with what the agent left in it."""
    folder = make_task(tmp_path / "t", solution="rm -r /tests; mkdir /tests; echo x > /tests/data; touch /tests/more",
                       test=f"[ $(cat /tests/data) = image ] && [ ! -e /tests/more ] && echo 1 {REWARD}",
                       dockerfile="COPY files/data /tests/data\n")
    (folder / "environment/files/data").write_text("image")
    for mode in ("strict", "compat"):
        done = Runner(None, docker, "test-own", verify=mode).run(Job(load_task(folder, "t", BASE), "oracle"), tmp_path)
        assert (done.outcome, done.reward) == ("ok", 1), (mode, done)


def test_a_record_that_cannot_be_ended_is_an_infra_error(run, monkeypatch, capsys):
    """Would catch a full disk under one rollout's record that ends the run and all other rollouts with it."""
    append = tree.append

    def full(path, line):
        if line["type"] == "end": raise OSError(28, "No space left on device", str(path))
        append(path, line)
    monkeypatch.setattr(tree, "append", full)
    done = run(solution="touch f", test=f"echo 1 {REWARD}")
    assert (done.outcome, done.reward) == ("infra_error", None) and "No space left" in done.detail
    assert "No space left" in capsys.readouterr().err


def test_a_call_that_is_not_on_record_is_a_fault_of_ours(run, scripted, monkeypatch):
    """Would catch a disk that is full for a moment: the agent asked again, and its rollout was trained without what it
    had sampled before, or with a reward of 0 for its failure."""
    append, failed = tree.append, []

    def full(path, line):
        if line["type"] == "call" and not failed:
            failed.append(line)
            raise OSError(28, "No space left on device", str(path))
        append(path, line)
    monkeypatch.setattr(tree, "append", full)
    done = run(scripted, ("true", "true", "DONE"), test=f"echo 1 {REWARD}")
    assert failed and (done.outcome, done.reward) == ("infra_error", None) and "No space left" in done.detail


def test_weights_of_several_rewards():
    """Would catch rewards that are added up unasked, a name that is missing and counts 0, and hand values."""
    parse, text = rollout.parse_reward, '{"a": 1, "b": 0.5, "calls": [1, 2]}'
    assert parse(text, True, {"a": 1, "b": -2}) == (0, {"a": 1, "b": 0.5})
    assert parse('{"reward": 0.25, "b": 1}', True, None) == (0.25, {"reward": 0.25, "b": 1})
    for weights in (None, {"c": 1}):
        with pytest.raises(KeyError): parse(text, True, weights)
    assert parse("1", False, {"a": 3}) == (1, {})


def test_records_have_names_of_their_own(tmp_path):
    """Would catch two tasks that write into one file: a/b-c and a-b/c, or names with other characters."""
    env = sandbox.Environment("x")
    ids = ["a/b-c", "a-b/c", "a/b/c", "a-b-c", "a b-c", "a/b c", "a.b-c", "ab/c", "a/b" + "x" * 300, "a/b" + "x" * 301]
    jobs = [Job(rollout.Task(id, tmp_path, "", env, 1, 1, {}, ""), h, i) for id in ids for h in "xy" for i in (0, 1)]
    paths = [rollout.record_path(tmp_path, job) for job in jobs]
    assert len(set(paths)) == len(jobs) and all(p.parent == tmp_path and len(p.name) < 250 for p in paths)
    assert paths[0].name == "a-b-c.x.0.jsonl"


def test_sandboxes_wait_for_their_turn(bubblewrap, tmp_path):
    """Would catch a warm sandbox whose agent begins before its turn, and a pool that starts none ahead of time."""
    folder = make_task(tmp_path / "t", solution="date +%s%N > t; sleep 0.4; date +%s%N >> t",
                       toml='artifacts = ["/app/t"]')
    class Full(Runner):                                     # its first agent waits until three more are warm
        def run_agent(self, *args):
            if next(turn) == 0: until(lambda: len(remains("test-warm")) >= 4)
            return super().run_agent(*args)
    task, turn = load_task(folder, "t", {}), itertools.count()
    runner = Full(None, bubblewrap, "test-warm", num_parallel=1, num_warm=3)
    runner.run_all([Job(task, "oracle", i) for i in range(5)], tmp_path / "out", "", quiet=True)
    spans = sorted([*map(int, p.read_text().split())] for p in (tmp_path / "out").glob("*.artifacts/*"))
    assert len(spans) == 5 and all(a[1] < b[0] for a, b in zip(spans, spans[1:]))


# ---- faults ----

class Killer(Runner):
    """Of most agents and verifiers something is killed while they run: what they run, or the sandbox under it."""
    def __init__(self, *args, seed, **options):
        super().__init__(*args, **options)
        self.draw, self.hits, self.killers = random.Random(seed), Counter(), []

    def run_agent(self, job, harness, session, box, log):
        self.aim(box)
        return super().run_agent(job, harness, session, box, log)

    def run_tests(self, job, session, box, log):
        self.aim(box)
        return super().run_tests(job, session, box, log)

    def aim(self, box):
        if self.draw.random() < 0.4: return
        how, after_s = self.draw.choice(["processes", "sandbox", "removed"]), self.draw.uniform(0, 1.5)
        hit = self.hit_container if self.kind == "docker" else self.hit_bwrap
        self.killers.append(threading.Timer(after_s, lambda: hit(box, how)))
        self.killers[-1].start()

    def hit_container(self, box, how):
        api, label = sandbox._client().api, f"harness_rl.run={self.run_id}"
        with contextlib.suppress(APIError, ProcessLookupError):         # its stage has ended
            (row,) = api.containers(filters={"label": label, "name": box.container})
            if how == "processes":      # all but process 1 and its sleep, by their ids on this machine
                for pid in [int(line[1]) for line in api.top(row["Id"])["Processes"] if "sleep 86400" not in line[-1]]:
                    os.kill(pid, signal.SIGKILL)
                    self.hits[box.name] += 1
            elif how == "sandbox": api.kill(row["Id"])
            else: api.remove_container(row["Id"], force=True)
            self.hits[box.name] += 1

    def hit_bwrap(self, box, how):
        before = list(box.running)
        alive = [process for process in before if process.poll() is None]
        with contextlib.suppress(OSError, sandbox.SandboxError):
            if how == "processes": box.kill()
            elif how == "sandbox" and alive: self.draw.choice(alive).kill()
            elif how == "removed":
                self.hits[box.name] += box.folder is not None           # also between two commands
                box.stop()
            self.hits[box.name] += bool(alive) or any(p not in before for p in box.running)     # or begun meanwhile


@pytest.mark.parametrize("num, where", [(50, "bubblewrap"), *(
    pytest.param(*case, marks=pytest.mark.slow) for case in ((250, "bubblewrap"), (50, "docker")))])
def test_random_kills(scripted, tmp_path, request, num, where):
    """Would catch a rollout that hangs, has no outcome, or the wrong reward after a kill of its harness, container or
    verifier, and a sandbox that is left."""
    folder = make_task(tmp_path / "t", toml="[agent]\ntimeout_sec = 60\n[verifier]\ntimeout_sec = 60",
                       test=f"sleep 0.5; [ -e right ]; echo $((1 - $?)) {REWARD}")
    task = load_task(folder, "t", BASE)
    runner = Killer(scripted, request.getfixturevalue(where), f"test-kills-{num}", model="tiny", seed=num)
    jobs = [Job(task, "bash", i, script=(f"sleep 0.5; touch {'right' if i % 2 else 'wrong'}", "DONE"))
            for i in range(num)]
    started = time.monotonic()
    try: done = runner.run_all(jobs, tmp_path / "out", "", quiet=True)
    finally:
        for killer in runner.killers: killer.cancel()
        for killer in runner.killers: killer.join()
    hit = {job.sample for job in jobs if runner.hits[f"{job.id}.agent"] + runner.hits[f"{job.id}.verify"]}
    print(f"{where}: {num} rollouts in {time.monotonic() - started:.0f} s, {len(hit)} hit: "
          f"{dict(Counter(r.outcome for r in done))}")
    assert len(done) == num and len(hit) > num / 10
    assert {r.outcome for r in done} <= {"ok", "harness_error", "verifier_error", "infra_error", "no_calls"}
    for job, r in zip(jobs, done):
        right = job.sample % 2
        if job.sample in hit: assert r.reward in (0, right, None) and "carried over" not in r.detail, r
        else: assert (r.outcome, r.reward) == ("ok", right), r
    assert not sandbox.reap(runner.run_id) and not scripted.sessions


def certain_model(folder, tiny):
    """The tiny model, made to say DONE to anything: of each token of the chain its head knows the next."""
    import torch
    from transformers import AutoTokenizer, LlamaForCausalLM
    model = LlamaForCausalLM.from_pretrained(tiny, tie_word_embeddings=False)
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    encode = lambda text: tokenizer.encode(text, add_special_tokens=False)
    chain = [encode("<|im_start|>assistant\n")[-1], *encode("DONE"), tokenizer.eos_token_id]
    with torch.no_grad():
        for layer in model.model.layers: layer.self_attn.o_proj.weight.zero_(), layer.mlp.down_proj.weight.zero_()
        known = model.model.norm(model.model.embed_tokens.weight[chain[:-1]])
        model.lm_head.weight = torch.nn.Parameter(torch.zeros_like(model.model.embed_tokens.weight))
        model.lm_head.weight[chain[1:]] = known
    model.save_pretrained(folder), tokenizer.save_pretrained(folder)
    return str(folder)


class Mortal(Killer):
    """Kills vLLM's engine, too, when so many rollouts have begun."""
    def __init__(self, *args, deaths, **options):
        super().__init__(*args, **options)
        self.deaths, self.begun = list(deaths), itertools.count(1)

    def run(self, job, out, replay=None):
        if next(self.begun) in self.deaths:
            self.killers.append(threading.Timer(self.draw.uniform(0, 1), self.kill_engine))
            self.killers[-1].start()
        return super().run(job, out, replay)

    def kill_engine(self):
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if "EngineCore" in process.name() + "".join(process.cmdline()): process.kill()


@pytest.mark.slow
@pytest.mark.parametrize("num, deaths, where", [
    (24, [16], "bubblewrap"), (500, [100, 300, 450], "bubblewrap"), (60, [30], "docker")])
def test_random_kills_of_the_engine_too(tiny, tmp_path, request, num, deaths, where):
    """Would catch an engine that dies and leaves all later rollouts without a reward, harnesses that ask a dead one for
    minutes, one that is replaced and not used, and a rollout that is lost or wrong since it was run twice."""
    import proxy
    make_proxy = lambda: proxy.Proxy(model, max_model_len=512, engine_args=ENGINE)
    model, kind, tasks = certain_model(tmp_path / "model", tiny), request.getfixturevalue(where), []
    for name in ("here.txt", "missing"):
        folder = make_task(tmp_path / name, test=f"sleep 0.5; [ -e {name} ]; echo $((1 - $?)) {REWARD}",
                           toml="[agent]\ntimeout_sec = 60\n[verifier]\ntimeout_sec = 60")
        tasks.append(load_task(folder, name, BASE))
    runner = Mortal(make_proxy(), kind, f"test-mortal-{num}", model="tiny", seed=num, deaths=deaths)
    jobs, started, first = [Job(tasks[i % 2], "bash", i) for i in range(num)], time.monotonic(), runner.proxy
    try: done = rollout.run_on_engines(runner, make_proxy, jobs, tmp_path / "out", "")
    finally:
        for killer in runner.killers: killer.cancel()
        for killer in runner.killers: killer.join()
        runner.proxy.close()
    hit = {job.id for job in jobs if runner.hits[f"{job.id}.agent"] + runner.hits[f"{job.id}.verify"]}
    print(f"{where}: {num} rollouts, {len(deaths)} dead engines, {len(hit)} hit, in "
          f"{time.monotonic() - started:.0f} s: {dict(Counter(r.outcome for r in done))}")
    assert first.engine.errored and runner.proxy is not first and num / 4 < len(hit) < num
    for job, r in zip(jobs, done):
        right = 1 - job.sample % 2
        if job.id in hit: assert r.reward in (0, right, None) and r.outcome and "carried over" not in r.detail, r
        else: assert (r.outcome, r.reward) == ("ok", right), r
    assert not sandbox.reap(runner.run_id)


@pytest.mark.parametrize("gains, num_starts, is_broken", [([6], 1, False), ([1, 1, 1], 1, False), ([4, 2], 2, False),
                                                          ([6], 1, True)])
def test_another_engine_is_worth_its_start(tmp_path, gains, num_starts, is_broken):
    """Would catch an engine started for each rollout of a task that kills it, and one that does not start and takes
    what is done with it. gains: how many of six lost rollouts each further engine ends before it dies, too."""
    class Dying:
        proxy = SimpleNamespace(engine=SimpleNamespace(errored=True), close=lambda: None)
        left = [1, *gains]
        def run_all(self, jobs, out, what):
            num = self.left.pop(0)
            return [SimpleNamespace(outcome="ok" if i < num else "infra_error") for i in range(len(jobs))]

    starts = []
    def make_proxy():
        starts.append(1)
        if is_broken: raise RuntimeError("no memory")
        return Dying.proxy
    done = rollout.run_on_engines(Dying(), make_proxy, list(range(7)), tmp_path, "")
    assert len(starts) == num_starts and len(done) == 7
    assert sum(r.outcome == "ok" for r in done) == 1 + (0 if is_broken else sum(gains[:num_starts]))


@pytest.fixture
def mortal_daemon(docker, monkeypatch):
    """-> a Docker daemon of our own that sees our files, and starts anew when it ends, as under systemd: kill(signal,
    seconds until it starts). With a network of its own: one that has no bridge removes docker0, whosever it is."""
    if os.geteuid() or not shutil.which("dockerd"): pytest.skip("needs root and dockerd")
    with tempfile.TemporaryDirectory(prefix="d", ignore_cleanup_errors=True) as folder:
        start = f"""cd {folder}; while [ ! -e end ]; do
                rm -f pid; sleep $(cat pause || echo 0)
                dockerd --host unix://{folder}/docker.sock --bridge none --iptables=false --data-root {folder}/data \\
                    --exec-root {folder}/exec --pidfile {folder}/pid
            done"""
        with open(f"{folder}/log", "w") as log:     # vLLM's LD_PRELOAD: see conftest.far_daemon
            top = subprocess.Popen(
                ["unshare", "-m", "-n", "-p", "-f", "--mount-proc", "--kill-child", "bash", "-c", start],
                stdout=log, stderr=log, env={k: v for k, v in os.environ.items() if k != "LD_PRELOAD"})
        children = lambda pid: map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())

        def kill(how, pause_s):
            Path(folder, "pause").write_text(str(pause_s))
            (shell,) = children(top.pid)
            for pid in children(shell):             # a container's shim may have become another child of it
                if Path(f"/proc/{pid}/comm").read_text().strip() == "dockerd": os.kill(pid, how)

        def wait_for_it():
            deadline = time.monotonic() + 60
            while sandbox.SANDBOXES["docker"].problem():
                assert time.monotonic() < deadline and top.poll() is None, Path(folder, "log").read_text()[-2000:]
                time.sleep(0.1)
        monkeypatch.setenv("DOCKER_HOST", f"unix://{folder}/docker.sock")
        save = ["env", "-u", "DOCKER_HOST", "docker", "save", "harness-rl/base"]
        image = subprocess.Popen(save, stdout=subprocess.PIPE)
        try:
            wait_for_it()
            subprocess.run(["docker", "load", "-q"], stdin=image.stdout, check=True)
            sandbox._client.cache_clear()
            yield SimpleNamespace(kill=kill, wait_for_it=wait_for_it)
        finally:
            sandbox._client.cache_clear()
            image.kill(), image.wait()
            Path(folder, "end").touch()
            with contextlib.suppress(OSError, ValueError): kill(signal.SIGTERM, 0)
            try: top.wait(20)
            except subprocess.TimeoutExpired: top.kill(), top.wait()


@pytest.mark.parametrize("num, num_kills", [(8, 1), pytest.param(60, 12, marks=pytest.mark.slow)])
def test_the_daemon_is_killed(scripted, mortal_daemon, tmp_path, num, num_kills):
    """Would catch a rollout that hangs, has no outcome or is paid 0 when Docker's daemon dies under it, or is told to
    end (then it ends the containers first), and what is left of it when the daemon is back."""
    tasks = [load_task(make_task(tmp_path / mode, test=f"sleep 0.3; [ -e right ]; echo $((1 - $?)) {REWARD}", toml=f"""
                [metadata]\nverify = "{mode}"\n[agent]\ntimeout_sec = 30\n[verifier]\ntimeout_sec = 30"""), mode, BASE)
             for mode in ("strict", "compat")]
    jobs = [Job(tasks[i // 2 % 2], "bash", i, script=(f"sleep 0.5; touch {'right' if i % 2 else 'wrong'}", "DONE"))
            for i in range(num)]
    runner = Runner(scripted, "docker", f"test-daemon-{num}", num_parallel=3, num_warm=1)
    draw, is_over = random.Random(num), threading.Event()

    def kill():
        for i in range(num_kills):
            while not i and not any(s.seen for s in list(scripted.sessions.values())) and not is_over.wait(0.01): pass
            if is_over.wait(draw.uniform(2, 14) if i else 0): return
            mortal_daemon.kill(signal.SIGTERM if i % 3 == 2 else signal.SIGKILL, draw.choice([0, 0.5, 2]))
            mortal_daemon.wait_for_it()
    killer, started = threading.Thread(target=kill), time.monotonic()
    killer.start()
    try: done = runner.run_all(jobs, tmp_path / "out", "", quiet=True)
    finally:
        is_over.set()
        killer.join()
    print(f"{num} rollouts in {time.monotonic() - started:.0f} s: "
          f"{dict(Counter(r.detail.partition(' ')[0] or r.outcome for r in done))}")
    mortal_daemon.wait_for_it()
    sandbox.reap(runner.run_id)
    api, label = sandbox._client().api, {"label": f"harness_rl.run={runner.run_id}"}
    assert not [*api.containers(all=True), *api.images(filters=label), *(api.volumes()["Volumes"] or [])]
    assert not remains(runner.run_id) and not scripted.sessions and not list(Path(scripted.folder).glob("*.sock"))
    assert len(done) == num and 0 < sum(r.outcome == "ok" for r in done) < num
    for job, r in zip(jobs, done):
        assert (r.outcome, r.reward) in (("ok", job.sample % 2), ("infra_error", None)), r


@pytest.mark.slow
@pytest.mark.parametrize("where", ["bubblewrap", "docker"])
def test_sixty_four_at_once(scripted, tmp_path, request, where):
    """Would catch a limit of descriptors, threads, connections or sockets that a full node meets first."""
    folder = make_task(tmp_path / "t", dockerfile="ENV COMMAND_TIMEOUT_S=200", toml="[agent]\ntimeout_sec = 900",
                       test=f"[ -e right ]; echo $((1 - $?)) {REWARD}")
    task = load_task(folder, "t", BASE)
    alive, most, started = set(), [0], time.monotonic()

    class Counted(Runner):
        def run_agent(self, job, harness, session, box, log):
            alive.add(job.sample)
            try: return super().run_agent(job, harness, session, box, log)
            finally:
                most[0] = max(most[0], len(alive))
                alive.discard(job.sample)
    runner = Counted(scripted, request.getfixturevalue(where), f"test-load-{where}", model="tiny", num_parallel=64,
                     num_warm=0)
    jobs = [Job(task, "bash", i, script=("sleep 60; touch right", "DONE")) for i in range(64)]
    done = runner.run_all(jobs, tmp_path / "out", "", quiet=True)
    seconds = {stage: sorted(r.seconds[stage] for r in done) for stage in ("start", "agent", "verify") if done}
    print(f"{where}: 64 rollouts, {most[0]} agents at once, in {time.monotonic() - started:.0f} s; median and most of "
          + ", ".join(f"{stage} {s[32]:.1f} {s[-1]:.1f}" for stage, s in seconds.items()))
    assert [(r.outcome, r.reward) for r in done] == [("ok", 1)] * 64 and most[0] == 64
    assert not sandbox.reap(runner.run_id) and not scripted.sessions


def test_summary():
    """Would catch a pass rate over rollouts without a reward, or an interval that is not Wilson's (hand values: 8
    of 10)."""
    r = [tree.Rollout(str(i), "t", "h", "m", 1.0, 0.0, outcome="ok", reward=float(i < 8)) for i in range(10)]
    r += [tree.Rollout("x", "t", "h", "m", 1.0, 0.0, outcome="infra_error")]
    s = rollout.summary(r)
    assert (s["num"], s["num_judged"], s["solved"], s["pass_rate"]) == (11, 10, 8, 0.8)
    assert abs(s["low"] - 0.490) < 1e-3 and abs(s["high"] - 0.943) < 1e-3
    assert s["outcomes"] == {"ok": 10, "infra_error": 1}
    assert "80.0 % of 10" in rollout.show(s)


def test_pass_at_k_and_its_interval():
    """Would catch a biased pass@k (against all choices of k samples), samples of one task counted as independent tasks,
    and an interval that misses the truth too often (300 sets of 30 tasks each, drawn from a fixed seed)."""
    for n in range(1, 7):
        for c in range(n + 1):
            for k in range(1, n + 1):
                every = [max(s) for s in itertools.combinations([1] * c + [0] * (n - c), k)]
                assert rollout.pass_at_k(n, c, k) == pytest.approx(sum(every) / len(every))
    assert rollout.rate([(1, 1)] * 8 + [(1, 0)] * 2)[1:] == pytest.approx(rollout.wilson(8, 10))     # a sample a task
    half = [(10, 10)] * 5 + [(10, 0)] * 5                   # ten tasks, not a hundred samples
    assert rollout.rate(half)[1:] == pytest.approx(rollout.wilson(5, 10))
    assert rollout.rate([(4, 0)] * 10)[1:] == pytest.approx(rollout.wilson(0, 10))
    assert rollout.rate([(4, 1), (1, 1)], 2)[0] == pytest.approx(0.5)       # the second task has no two samples
    rng, hits = np.random.default_rng(0), Counter()
    for n, k, a in ((1, 1, .3), (8, 1, .3), (8, 4, .3), (8, 1, 1.), (8, 8, 1.)):
        truth = (1 - (1 - rng.beta(a, 2 * a, 200_000))**k).mean()
        for _ in range(300):
            solved = rng.binomial(n, rng.beta(a, 2 * a, 30))
            p, low, high = rollout.rate([(n, int(c)) for c in solved], k)
            assert 0 <= low <= p <= high <= 1
            hits[n, k, a] += low <= truth <= high
    assert all(0.91 < x / 300 <= 0.99 for x in hits.values()), hits


def test_paired_comparison():
    """Would catch a p that is not McNemar's exact one for a sample a task, one from draws that differs from the exact,
    a comparison that ignores the pairing, one that is not the mirror image when A and B change places, and an interval
    of no width where nothing was solved."""
    tasks = [str(i) for i in range(20)]
    counts = lambda solved: {t: (1, int(int(t) in solved)) for t in tasks}
    a, b = counts(range(8)), counts([*range(7), *range(8, 14)])             # 7 of both, 1 of a alone, 6 of b alone
    r, mirror = rollout.compare(a, b), rollout.compare(b, a)
    assert (r["num_tasks"], r["a"], r["b"]) == (20, 0.4, 0.65) and r["p"] == pytest.approx(2 * (1 + 7) / 2**7)
    assert [mirror[k] for k in ("difference", "low", "high", "p")] == pytest.approx(
        [-r["difference"], -r["high"], -r["low"], r["p"]])
    unpaired = rollout.compare(a, {str(19 - int(t)): c for t, c in b.items()})
    assert r["low"] < 0.25 < r["high"] and r["high"] - r["low"] < unpaired["high"] - unpaired["low"]
    none = rollout.compare(counts([]), counts([]))
    assert none["p"] == 1 and none["low"] < 0 < none["high"] and none["high"] == -none["low"]
    d = np.random.default_rng(0).normal(0.3, 1, 17)
    exact = np.mean([abs(sum(s * d)) >= abs(d.sum()) for s in itertools.product((-1, 1), repeat=17)])
    assert abs(rollout.sign_flip_p(d) - exact) < 0.015


# ---- the commands ----

def command(*words, **env):
    return subprocess.run([sys.executable, *map(str, words)], cwd=ROOT, env=os.environ | env, capture_output=True,
                          text=True, timeout=300)


def test_compare_command(tmp_path, capsys):
    """Would catch folders that are paired by anything but the task and the harness, a run whose last evaluation is not
    the one taken, rollouts without a reward in the rates, folders with nothing in common told as a result, and ones
    that were sampled otherwise compared without a word."""
    def record(folder, task, harness, rewards):
        for i, reward in enumerate(rewards):
            path = folder / f"{task}.{harness}.{i}.jsonl"
            path.parent.mkdir(parents=True, exist_ok=True)
            head = {"type": "rollout", "format": 1, "id": path.stem, "task": task, "harness": harness, "model": "m",
                    "temperature": 1.0, "started_s": 0.0, "settings": {"max_tokens": 48 + (folder.name == "a")}}
            end = {"type": "end", "outcome": "ok", "reward": reward}
            path.write_text(json.dumps(head) + "\n" + json.dumps(end) + "\n")
    for i in range(6):
        record(tmp_path / "a", f"t{i}", "bash", [0, int(i == 0)])
        for when in ("bare", "step-2", "step-10"):
            record(tmp_path / "run/rollouts" / f"eval-{when}", f"t{i}", "bash", [int(when == "step-10"), 1])
    record(tmp_path / "a", "alone", "bash", [1, 1])
    record(tmp_path / "a", "t0", "pi", [1])
    record(tmp_path / "run/rollouts/eval-step-10", "t5", "bash", [None, 1])
    (tmp_path / "run/metrics.jsonl").write_text("{}\n")
    rollout.main(rollout.parse(["compare", str(tmp_path / "a"), str(tmp_path / "run"), "--json"]))
    (one,) = json.loads(capsys.readouterr().out)
    assert (one["harness"], one["k"], one["num_tasks"], one["left_out"]) == ("bash", 1, 6, 1)
    assert one["a"] == pytest.approx(1 / 12) and one["b"] == 1 and one["p"] == pytest.approx(2 / 2**6)
    result = command("rollout.py", "compare", tmp_path / "a", tmp_path / "run")
    assert result.returncode == 0 and "B - A +91.7 points" in result.stdout, result
    assert result.stderr == "warning: max_tokens was 49 in A, 48 in B: not the same test\n"
    record(tmp_path / "other", "t0", "codex", [1])
    for folder, says in ((tmp_path / "other", "no task that both"), (tmp_path / "none", "no records")):
        with pytest.raises((ValueError, OSError), match=says):
            rollout.main(rollout.parse(["compare", str(tmp_path / "a"), str(folder)]))


def test_compare_checkpoints_by_harness(tmp_path, capsys):
    """Would catch harnesses that are pooled, one that is left out, a task paired with another harness's, and two
    checkpoints of one run that cannot be compared."""
    rewards = {"cold": {"bash": [0, 0, 0, 1], "pi": [0, 1, 1, 1]}, "end": {"bash": [1, 1, 1, 1], "pi": [0, 1, 1, 0]}}
    for when, by_harness in rewards.items():
        folder = tmp_path / "run/rollouts" / f"eval-{when}"
        folder.mkdir(parents=True)
        for harness, i in itertools.product(by_harness, range(4)):
            head = {"type": "rollout", "format": 1, "id": f"t{i}", "task": f"t{i}", "harness": harness, "model": "m",
                    "temperature": 1.0, "started_s": 0.0}
            lines = head, {"type": "end", "outcome": "ok", "reward": by_harness[harness][i]}
            (folder / f"t{i}.{harness}.0.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    folders = [str(tmp_path / "run/rollouts" / f"eval-{when}") for when in rewards]
    rollout.main(rollout.parse(["compare", *folders, "--json"]))
    rows = json.loads(capsys.readouterr().out)
    assert [(r["harness"], r["k"], r["num_tasks"], r["a"], r["b"]) for r in rows] == [
        ("bash", 1, 4, 0.25, 1.0), ("pi", 1, 4, 0.75, 0.5), ("all", 1, 4, 0.5, 0.75)]
    assert [r["p"] for r in rows] == [0.25, 1.0, 0.625]     # of 3, 1 and 4 tasks that differ: 2 / 2^3, 1, 10 / 2^4


def test_rollout_command(shell_tasks, bubblewrap, tiny, tmp_path):
    """Would catch a command that ends well without its records or its summary, or in another way than status 0."""
    result = command("rollout.py", "--tasks", shell_tasks / "heldout", "--limit", 2, "--harness", "bash,nop",
                     "--model", tiny, "--engine", "scripted", "--script", "solution", "--sandbox", "bubblewrap",
                     "--out", tmp_path / "out")
    assert result.returncode == 0, result.stderr
    assert "bash in bubblewrap: 100.0 % of 2 solved" in result.stdout
    assert "nop in bubblewrap: 0.0 % of 2" in result.stdout
    assert json.loads((tmp_path / "out/summary.bash.json").read_text())["solved"] == 2
    assert len(list((tmp_path / "out").glob("*.jsonl"))) == len(list((tmp_path / "out").glob("*.log"))) == 4


def test_rollouts_on_another_machine(shell_tasks, far_daemon, tiny, tmp_path):
    """Would catch a step of a rollout that needs the daemon's files to be ours: image, runtimes, socket, copies."""
    result = command("rollout.py", "--tasks", shell_tasks / "heldout", "--limit", 2, "--harness", "bash,nop",
                     "--model", tiny, "--engine", "scripted", "--script", "solution", "--sandbox", "docker",
                     "--base_image", "debian:bookworm-slim=harness-rl/base", "--out", tmp_path / "out", **far_daemon)
    assert result.returncode == 0, result.stderr
    assert "bash in docker: 100.0 % of 2 solved" in result.stdout and "nop in docker: 0.0 % of 2" in result.stdout
    left = subprocess.run(["docker", "ps", "-aq"], env=os.environ | far_daemon, capture_output=True, text=True)
    assert (left.returncode, left.stdout) == (0, "")


def in_process(capsys, *words):
    """Exit status and output of rollout.py."""
    status = rollout.main(rollout.parse([*map(str, words)]))
    return status, *capsys.readouterr()


def test_validation_fails_loudly(bubblewrap, tmp_path, monkeypatch, capsys):
    """Would catch a set that does not validate and a command that ends with status 0, or does not say which task and
    why; and a good one that ends with another."""
    monkeypatch.setenv("HARNESS_RL_CACHE", str(tmp_path / "cache"))
    for name, test in {"good": "[ -e f ]", "bad": "echo why not; [ -e g ]", "free": "true"}.items():
        make_task(tmp_path / "set" / name, solution="touch f", test=f"{test}; echo $((1 - $?)) {REWARD}")
    options = ("--sandbox", "bubblewrap", "--tasks", tmp_path / "set")
    for harness, wrong, good in (("oracle", "bad", "free"), ("nop", "free", "bad")):
        status, output, _ = in_process(capsys, *options, "--harness", harness, "--out", tmp_path / harness)
        assert status == 1 and f"set/{wrong}" in output and f"set/{good}" not in output, output
        assert ("why not" in output) == (harness == "oracle")
    assert in_process(capsys, *options, "--harness", "oracle", "--out", tmp_path / "x", "--tasks",
                      tmp_path / "set/good")[0] == 0


def test_the_verifier_of_each_sample_is_quoted(bubblewrap, tmp_path, capsys):
    """Would catch the first sample's words given as the reason why another one failed."""
    make_task(tmp_path / "set/t", test=f"echo said $(cat /proc/sys/kernel/random/uuid); echo 0 {REWARD}")
    _, output, _ = in_process(capsys, "--sandbox", "bubblewrap", "--tasks", tmp_path / "set", "--harness", "oracle",
                              "--n", 2, "--verify", "strict", "--out", tmp_path / "out")
    said = {p.read_text().split("said ")[1].strip() for p in (tmp_path / "out").glob("*.log")}
    assert len(said) == 2 and all(word in output for word in said), output


def test_prebuild(docker, tmp_path, capsys):
    """Would catch a run that builds in its first rollouts what was built before, a failed build that is not named."""
    for name, line in {"good": f"RUN echo {tmp_path}", "bad": "RUN echo why; exit 3"}.items():
        make_task(tmp_path / "set" / name, dockerfile=line)
    options = ("--tasks", tmp_path / "set", "--prebuild", "--base_image", "debian:bookworm-slim=harness-rl/base")
    status, output, _ = in_process(capsys, *options)
    assert status == 1 and "1 of 2 images are ready" in output and "task bad" in output, output
    shutil.rmtree(tmp_path / "set/bad")
    status, _, errors = in_process(capsys, *options)
    assert status == 0 and "building" not in errors
    sandbox._client().images.remove(sandbox.image(load_tasks(tmp_path / "set", BASE)[0].env)["Id"], force=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Good and bad tasks, one folder each."""
    root = tmp_path_factory.mktemp("bad")
    make_task(root / "good/one")
    (root / "empty").mkdir()
    (root / "old/one").mkdir(parents=True)
    (root / "old/one/task.yaml").touch()
    for name, (file, text, _) in BAD_TASKS.items():
        path = make_task(root / name / "one") / file
        if text is None: path.unlink()
        else: path.write_bytes(text.encode("latin-1"))
    return root


BAD_TASKS = {       # folder -> file of the task, what it holds (None: it is missing), what the message must name
    "no_tests": ("tests/test.sh", None, "tests/test.sh"), "no_instruction": ("instruction.md", None, "instruction.md"),
    "no_docker": ("environment/Dockerfile", None, "environment/Dockerfile"),
    "no_copy": ("environment/Dockerfile", "FROM debian\nCOPY x /", "COPY x"),
    "latin": ("instruction.md", "café", "instruction.md"), "broken": ("task.toml", "agent = [", "task.toml"),
    "types": ("task.toml", "[agent]\ntimeout_sec = 'long'", "'long'"), "flat": ("task.toml", "agent = 5", "agent"),
    "negative": ("task.toml", "[environment]\ncpus = -1", "-1"),
    "endless": ("task.toml", "[agent]\ntimeout_sec = inf", "inf"),
    "online": ("task.toml", "[environment]\nallow_internet = true", "allow_internet"),
    "image": ("task.toml", "[environment]\ndocker_image = 5", "docker_image"),
    "text": ("task.toml", "[environment]\nallow_internet = 'false'", "allow_internet"),
    "relative": ("task.toml", "[environment]\nworkdir = 'app'", "workdir"),
    "no_limit": ("task.toml", "[environment]\ncpus = 1e-10", "1e-10"),
    "letters": ("task.toml", "artifacts = '/app/out'", "artifacts"),
    "nameless": ("task.toml", "artifacts = [{}]", "artifacts"),
    "compose": ("environment/docker-compose.yaml", "services: {}", "docker-compose.yaml"),
    "hosts": ("task.toml", "[environment]\nallowed_hosts = ['a.org']", "[environment] allowed_hosts"),
    "gpus": ("task.toml", "[environment]\ngpus = 1", "gpus"), "steps": ("task.toml", "[[steps]]\nname = 'a'", "steps"),
    "apart": ("task.toml", "[verifier.environment]\ncpus = 1", "[verifier.environment]"),
    "separate": ("task.toml", "[verifier]\nenvironment_mode = 'separate'", "[verifier] environment_mode"),
    "health": ("task.toml", "[environment.healthcheck]\ncommand = 'true'", "[environment] healthcheck"),
    "windows": ("task.toml", "[environment]\nos = 'windows'", "windows"),
    "future": ("task.toml", "schema_version = '2.0'", "2.0"),
    "size": ("task.toml", "[environment]\nmemory = 'big'", "big"),
    "mode": ("task.toml", "[metadata]\nverify = 'lax'", "'lax'"),
    "variable": ("task.toml", "[verifier]\nenv = {A = '${NOT_SET_HERE}'}", "NOT_SET_HERE"),
    "public": ("task.toml", "[environment]\nnetwork_mode = 'public'", "--internet on")}


NOP = "rollout.py --harness nop --out {out} --tasks {tasks}/"
ROLLOUT = NOP + "good"
BASH = "rollout.py --harness bash --out {out} --tasks {tasks}/good"
TRAIN = "train.py --tasks {tasks}/good --eval_tasks  --tasks_per_step 1 --model {model} --out {out}"
PROXY = "proxy.py --model {model} --session s --record {out} --max_model_len 512"
BAD = {     # command line -> what its message must name
    ROLLOUT + " --bogus 1": "--bogus", TRAIN + " --bogus 1": "--bogus", PROXY + " --port 1 --bogus": "--bogus",
    ROLLOUT + " --num 3": "--num", TRAIN + " --warmup 1": "--warmup",                           # abbreviated
    ROLLOUT + " --n many": "many", ROLLOUT + " --n 0": "--n 0", ROLLOUT + " --temperature -1": "-1",
    ROLLOUT + " --harness basch": "basch", ROLLOUT + " --base_image x": "x: NAME=LOCAL",
    ROLLOUT + " --out {tasks}/good/one/task.toml": "task.toml",
    NOP + "nowhere": "nowhere", NOP + "empty": "empty", NOP + "old": "harbor tasks migrate",
    ROLLOUT + " --off gti": "gti", ROLLOUT + " --reward_weights a": "--reward_weights a",
    "rollout.py --tasks {tasks}/good": "--harness",
    **{NOP + name: says for name, (_, _, says) in BAD_TASKS.items()},
    BASH + " --model {tasks}": "--model", BASH + " --model {model} --max_model_len 9000": "9000",
    BASH + " --model {model} --engine scripted": "--script",
    BASH + " --model {model} --engine scripted --script {tasks}/none": "none",
    TRAIN + " --algo ppo2": "ppo2", TRAIN + " --group_size 0": "--group_size 0", TRAIN + " --dtype float16": "float16",
    TRAIN + " --algo gspo --loss_mean token": "gspo", TRAIN + " --temperature 0": "--temperature 0",
    TRAIN + " --model {tasks}": "--model",
    TRAIN + " --tasks {tasks}/nowhere": "nowhere", TRAIN + " --eval_tasks {tasks}/broken": "task.toml",
    TRAIN + " --tasks_per_step 2": "--tasks_per_step 2", TRAIN + " --max_model_len 9000": "9000",
    PROXY + " --port 99999": "99999", PROXY + " --port {port}": "{port}",
    PROXY + " --port 0 --engine scripted": "--script",
    PROXY + " --port 0 --engine scripted --script {tasks}/none": "none", PROXY + " --port 0 --session a/b": "a/b",
    PROXY + " --port 0 --max_model_len 9000": "9000",
}


def fill(line, folder, tiny, out, port):
    return [word.format(tasks=folder, model=tiny, out=out, port=port) for word in line.split(" ")]


@pytest.fixture(scope="module")
def taken():
    """A port that someone listens on."""
    with socket.create_server(("127.0.0.1", 0)) as server: yield server.getsockname()[1]


@pytest.mark.parametrize("line", BAD)
def test_bad_input(folder, tiny, taken, bubblewrap, tmp_path, capsys, line):
    """Would catch a bad flag, file or value that is found late (after the engine's start, among its messages), not
    named, explained in many lines, or that leaves a half-written run folder, which the next attempt would
    refuse."""
    name, *words = fill(line, folder, tiny, tmp_path / "out", taken)
    module = importlib.import_module(name.removesuffix(".py"))
    try: module.main(module.parse(words))
    except SystemExit as e: message, is_bad = capsys.readouterr().err.splitlines()[-1], e.code == 2
    except (ValueError, OSError, AssertionError, sandbox.SandboxError) as e: message, is_bad = str(e), True
    assert is_bad and BAD[line].format(port=taken) in message, message
    assert "\n" not in message and "Errno" not in message, message
    told = capsys.readouterr()
    assert not (tmp_path / "out").exists() and not told.out and "engine starts" not in told.err, told


@pytest.mark.parametrize("line", [ROLLOUT + " --bogus 1", TRAIN + " --bogus 1", PROXY + " --port {port}",
                                  TRAIN + " --algo ppo2", NOP + "types", "tree.py {tasks}/none"])
def test_bad_input_on_the_command_line(folder, tiny, taken, bubblewrap, tmp_path, line):
    """Would catch a traceback, a status of 0, noise before the message, and a command that imports for long before
    it looks."""
    result = command(*fill(line, folder, tiny, tmp_path / "out", taken))
    lines, says = result.stderr.strip().splitlines(), BAD.get(line, "none").format(port=taken)
    assert result.returncode == 2 and not result.stdout and says in lines[-1], result.stderr
    assert len(lines) == 1 or lines[0].startswith("usage:"), result.stderr
    assert not (tmp_path / "out").exists()


def test_no_sandbox(folder, tmp_path):
    """Would catch a run that starts its engine before it knows that it has no sandbox, or that falls back to none."""
    dead = dict(PATH="/nonexistent", DOCKER_HOST="unix:///nonexistent/docker.sock")
    for line, says in ((ROLLOUT, "bubblewrap does not run"), (ROLLOUT + " --sandbox docker", "docker daemon")):
        result = command(*fill(line, folder, "", tmp_path / "out", 0), **dead)
        assert result.returncode == 2 and says in result.stderr and result.stderr.count("\n") == 1, result.stderr
        assert not (tmp_path / "out").exists()


def test_a_folder_in_use_is_spared(folder, tiny, bubblewrap, tmp_path):
    """Would catch records of an earlier run that are overwritten or mixed with the new ones."""
    (tmp_path / "out").mkdir()
    for name in ("metrics.jsonl", "one.nop.0.jsonl"): (tmp_path / "out" / name).write_text("precious")
    (tmp_path / "out/good-one.nop.0.jsonl").write_text("precious")
    for line, says in ((ROLLOUT, "good-one.nop.0.jsonl"), (TRAIN, "--out")):
        result = command(*fill(line, folder, tiny, tmp_path / "out", 0))
        assert result.returncode == 2 and says in result.stderr and result.stderr.count("\n") == 1, result.stderr
    assert {p.read_text() for p in (tmp_path / "out").iterdir()} == {"precious"}


def test_bad_flags_answer_at_once():
    """Would catch an import of transformers or vLLM, which takes many seconds, on the way to a usage message."""
    code = """if 1:
        import sys, proxy, rollout
        try: rollout.parse(["--bogus"])
        except SystemExit: print({"vllm", "transformers", "uvicorn"} & set(sys.modules))"""
    assert command("-c", code).stdout == "set()\n"
