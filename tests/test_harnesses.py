"""Real harnesses, unmodified, live: each through the scripted engine and a bubblewrap sandbox to reward 1."""
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))
from conftest import ENGINE, make_task

import harnesses
import proxy
import rollout

CONTEXT_TOKENS = 131072
LIGHT, HEAVY = ("pi", "codex", "claude_code", "opencode", "qwen_code"), ("mini_swe_agent", "openhands", "openclaw")
COMMANDS = ["cat here.txt && echo \"größe: ✓ 'a' \\\\ $((1 + 1))\" > out.txt",
            "test -z \"$INSTRUCTION$CONTEXT_TOKENS\" || rm out.txt; cat out.txt"]
TEST = """
if [ "$(ls -A /app | tr '\\n' ' ')" = "here.txt out.txt " ] && [ "$(cat /app/out.txt)" = "größe: ✓ 'a' \\\\ 2" ]
then echo 1; else echo 0; fi > /logs/verifier/reward.txt"""


@pytest.fixture(scope="module")
def runner(tiny, bubblewrap, tmp_path_factory):
    model = shutil.copytree(tiny, tmp_path_factory.mktemp("model") / "long")    # the scripted engine computes nothing
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"max_position_embeddings": CONTEXT_TOKENS}))
    with proxy.Proxy(model, max_model_len=CONTEXT_TOKENS, engine="scripted", engine_args=ENGINE) as boundary:
        yield rollout.Runner(boundary, bubblewrap, "test-harnesses", num_parallel=1)


@pytest.mark.parametrize("name", [*LIGHT, *(pytest.param(name, marks=pytest.mark.slow) for name in HEAVY)])
def test_live(name, runner, tmp_path):
    """Would catch a runtime that lacks something in the sandbox, a configuration that the harness ignores or leaves in
    the workspace, a tool call that it does not run, and a launch that waits for the network or for a user."""
    harness = harnesses.load(name)
    script = harness.demonstrate(COMMANDS)
    make_task(tmp_path / "task", "Look at here.txt, then write out.txt.", test=TEST)
    task = rollout.load_task(tmp_path / "task", "task", {"debian:bookworm-slim": "host"})
    harness.mounts()
    started = time.time()
    record = runner.run(rollout.Job(task, name, script=(f"I look first.\n{script[0]}", *script[1:])), tmp_path / "out")
    log = (tmp_path / "out" / f"task.{name}.0.log").read_text()
    print(name, record.outcome, record.reward, [(c.kind, c.cause, len(c.prompt_ids), c.finish) for c in record.calls],
          f"first call {record.calls[0].received_s - started if record.calls else 0:.2f} s", json.dumps(record.more))
    assert record.reward == 1 and record.outcome == "ok", (record, log)
    assert len(record.calls) == len(script) and {c.kind for c in record.calls} == {"main"}, record
    if name != "openclaw":          # it ends each request with a message that it does not keep: every turn forks
        assert [c.cause for c in record.calls] == [None] * len(script), record


def test_launch(tmp_path):
    """Would catch a configuration that a path or an instruction breaks, one that lands in the workspace, an instruction
    that is taken for a template, and variables of the launch that reach the agent's commands."""
    workdir, instruction = tmp_path / 'it\'s "here"', 'Say "@STATE@" and -- \\n ✓\n' * 500
    workdir.mkdir()
    show = "import json, os, sys; print(json.dumps([sys.argv[1:], sys.stdin.read(), dict(os.environ)]))"
    env = {"INSTRUCTION": instruction, "CONTEXT_TOKENS": "8192", "HOME": "/nowhere", "HERE": "@STATE@/x"}
    text = '{"all": "@CONTEXT_TOKENS@", "reply": "@REPLY_TOKENS@", "where": "@WORKDIR@", "asked": "@INSTRUCTION@"}'

    def launch(*words):
        command = [sys.executable, harnesses.runtime("code") / "launch.py", json.dumps({"a/b.json": text}),
                   sys.executable, "-c", show, *words]
        result = subprocess.run(command, cwd=workdir, env=env, stdin=subprocess.DEVNULL,
                                capture_output=True, text=True, check=True)
        return json.loads(result.stdout)
    (state,), asked, seen = launch("@STATE@")
    assert asked == instruction and seen["HERE"] == f"{state}/x" and seen["HOME"] == state
    assert set(seen) <= {"HERE", "HOME", "LC_CTYPE"} and list(workdir.iterdir()) == []
    assert json.loads(Path(state, "a/b.json").read_text()) == {"all": 8192, "reply": 2048, "where": str(workdir),
                                                               "asked": instruction}
    words, asked, seen = launch("@INSTRUCTION@")
    assert words == [instruction] and asked == ""
    for folder in (state, seen["HOME"]):
        shutil.rmtree(folder)
