"""Real harnesses, unmodified, live: each through the scripted engine and a bubblewrap sandbox to reward 1."""
import json
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
LIGHT, HEAVY = ("pi", "codex", "claude_code", "opencode", "qwen_code"), ()
COMMANDS = ["cat here.txt && echo \"größe: ✓ 'a' \\\\ $((1 + 1))\" > out.txt", "test -z \"$INSTRUCTION\" && env > /tmp/env; cat out.txt"]
TEST = """
if [ "$(ls -A /app | tr '\\n' ' ')" = "here.txt out.txt " ] && [ "$(cat /app/out.txt)" = "größe: ✓ 'a' \\\\ 2" ]
then echo 1; else echo 0; fi > /logs/verifier/reward.txt"""


@pytest.fixture(scope="module")
def runner(tiny, bubblewrap):
    with proxy.Proxy(tiny, max_model_len=CONTEXT_TOKENS, engine="scripted", engine_args=ENGINE) as boundary:
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
    assert [c.cause for c in record.calls] == [None] * len(script), record
