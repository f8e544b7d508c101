"""Real harnesses, unmodified, live, in real sandboxes without network: the model's words are scripted, or those of a
random model in the real engine. `-s` prints what each rollout came to."""
import contextlib
import json
import math
import os
import shlex
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from conftest import ENGINE, ROOT, engine_prompts, make_task

import graft
import harnesses
import proxy
import rollout
import tree

CONTEXT_TOKENS, REPLY_TOKENS = 131072, 250
ASKED = "Look at here.txt, then write out.txt."
LIGHT, HEAVY = ("pi", "codex", "claude_code", "opencode", "qwen_code"), ("mini_swe_agent", "openhands", "openclaw")
slow = pytest.mark.slow
heavy = lambda *names: [pytest.param(name, marks=slow) for name in names]
FULL = f"This model's maximum context length is {CONTEXT_TOKENS} tokens. However, your prompt has {CONTEXT_TOKENS + 9}"
LETTER = {"main": "m", "subagent": "s", "compaction": "c", "side": "d"}


class Faults:
    """Between the proxy and a harness's connections. plan: number of a request -> "full", refused as one that does not
    fit, or "drop", whose answer breaks off: after a stream's first event, before another answer's body."""

    def __init__(self, app, sessions): self.app, self.sessions, self.plan, self.num = app, sessions, {}, 0

    async def __call__(self, scope, receive, send):
        fault, self.num = self.plan.get(self.num), self.num + (scope.get("method") == "POST")
        if fault == "full":
            while (await receive()).get("more_body"): pass
            for session in self.sessions.values(): session.refused = f"status 400: {FULL}"      # as Front does
            return await proxy.answer_error(send, scope["path"], 400, FULL)
        has_begun = False

        async def cut(message):
            nonlocal has_begun
            if message["type"] == "http.response.body":
                if has_begun or not message.get("more_body"): raise ConnectionResetError("as the test wants it")
                has_begun = True
            await send(message)
        await self.app(scope, receive, cut if fault == "drop" else send)


@pytest.fixture(scope="module")
def boundary(roomy):
    with proxy.Proxy(roomy, max_model_len=CONTEXT_TOKENS, engine="scripted", engine_args=ENGINE) as boundary:
        boundary.uvicorn.loaded_app = boundary.faults = Faults(boundary.uvicorn.loaded_app, boundary.sessions)
        yield boundary


def play(boundary, kind, name, tmp_path, script=None, test="echo 1", toml="", plan=(), **options):
    """One rollout of a harness -> its record, with the log. test: its output is the reward. Its prompts are those that
    the engine got, each once, and its forks have causes."""
    place = {"docker": "harness-rl/base", "bubblewrap": "host"}[kind]
    folder = make_task(tmp_path / "task", ASKED, test=f"( {test}\n) > /logs/verifier/reward.txt", toml=toml)
    task = rollout.load_task(folder, "task", {"debian:bookworm-slim": place})
    harnesses.load(name).mounts()                           # are built, if need be
    if hasattr(boundary, "faults"): boundary.faults.plan, boundary.faults.num = dict(plan), 0
    runner, started = rollout.Runner(boundary, kind, "test-harnesses", num_parallel=1, **options), time.time()
    num_replayed = len(options.get("replay", ()))
    with engine_prompts(boundary) as given, memory() as peak:
        record = runner.run(rollout.Job(task, name, script=script), tmp_path / "out")
    t, record.log = tree.build(record), (tmp_path / "out" / f"task.{name}.0.log").read_text()
    print(f"\n{name} in {kind}: {record.outcome} {record.reward} {record.detail} {kinds(record)} {causes(record)}",
          f"first call {record.calls[0].received_s - started if record.calls else math.nan:.2f} s,",
          f"{peak[0]} MB," if kind == "bubblewrap" else "",
          f"prompts {[len(c.prompt_ids) for c in record.calls]}, unique {t.num_unique} of {t.num_flat}, {t.forks}")
    assert [c.prompt_ids for c in record.calls[num_replayed:]] == given and "unknown" not in t.forks, record
    return record


@contextlib.contextmanager
def memory():
    """-> [peak of what the processes that begin below this one take, MB: shares of shared pages, every 0.2 s]"""
    children = lambda: psutil.Process().children(recursive=True)
    before, peak, has_ended, own = set(children()), [0], threading.Event(), psutil.Process().cmdline()

    def watch():
        while not has_ended.wait(0.2):
            now = 0
            for process in children():
                with contextlib.suppress(psutil.Error):
                    if process in before or process.cmdline() == own: continue      # own: a fork before its exec
                    now += process.memory_full_info().pss
            peak[0] = max(peak[0], round(now / 1e6))
    thread = threading.Thread(target=watch)
    thread.start()
    try: yield peak
    finally:
        has_ended.set()
        thread.join()


def kinds(record): return "".join(LETTER[c.kind] for c in record.calls)


def causes(record): return [c.cause for c in record.calls]


def text(boundary, ids): return boundary.tokenizer.decode(ids, skip_special_tokens=True)


def said(boundary, record): return [text(boundary, c.sampled_ids) for c in record.calls]


def shell(name): return lambda command: harnesses.load(name).demonstrate([command])[0]


def call(tool, **arguments):
    return f"<tool_call>\n{json.dumps({'name': tool, 'arguments': arguments})}\n</tool_call>"


def rich(name):
    """-> what the policy says: text and a call; two calls; arguments spelt oddly; a tool and an argument that there are
    not; a reply of which the connection loses the first copy; one that is cut off; and last words, for those who ask
    again then."""
    sh = shell(name)
    tool = json.loads(sh("x").split("\n")[1])["name"]
    odd = json.dumps(f"printf %s {shlex.quote(ODD)} > out.txt").replace("\\u2713", "✓")
    leaks = "env | grep -cE '^(INSTRUCTION|CONTEXT_TOKENS|[A-Z_]*API_KEY)=' > leaks"
    return [f"I look first. ✓\n{sh('cat here.txt')}", sh("echo 1 > one; sleep 0.3") + "\n" + sh("echo 2 > two"),
            sh("ODD").replace('"ODD"', f"  {odd} ").replace('{"name"', '{ "name"'), call("nosuchtool", x=1),
            call(tool, nosuch="y"),
            *[f"Cleaning.\n{sh(f'cat one two > both; rm one two; {leaks}; env')}"] * (1 + (name == "openclaw")),
            "word " * 300,
            *harnesses.load(name).demonstrate([])]


# no tab in it: OpenHands types into a terminal, which completes words at one
ODD = "größe: 😀 ✓ 'a' \\ $((1 + 1)) </tool> ."
RICH = f"""cd /app; [ "$(ls -A | tr '\\n' ' ')" = "both here.txt leaks out.txt " ] && [ "$(cat leaks)" = 0 ] \\
 && [ "$(tr '\\n' ' ' < both)" = "1 2 " ] && [ "$(cat out.txt)" = {shlex.quote(ODD)} ] && echo 1 || echo 0"""
EDITED, REWRITTEN = "history_edited", "tool_call_rewritten"
RICH_CAUSES = {"opencode": {4: REWRITTEN},                                  # an unknown tool is renamed
               "mini_swe_agent": {4: EDITED, 5: EDITED, 7: EDITED}}         # a reply that it cannot use is dropped


@pytest.mark.parametrize("name", [*LIGHT, *heavy(*HEAVY)])
def test_what_a_policy_may_say(name, boundary, docker, tmp_path):
    """Would catch a runtime that lacks something in a bare image, a configuration that is ignored, left in the
    workspace or seen by the commands (keys, the launch's own variables), a tool call that is lost or damaged on its
    way, a chain that breaks over what a harness does to unusual replies, a reply that is sampled twice because a
    connection broke, a launch that waits for the network or a user, and an exit status that is taken at its word."""
    script = rich(name)
    record = play(boundary, docker, name, tmp_path, script, RICH, plan={5: "drop"}, max_tokens=REPLY_TOKENS)
    assert (record.reward, record.outcome, record.more["exit_code"]) == (1, "ok", 0), (record, record.log)
    num = len(script) - (name not in ("claude_code", "mini_swe_agent"))     # the others take a cut reply for the last
    expected = [RICH_CAUSES.get(name, {}).get(i) for i in range(num)]
    assert kinds(record) == "m" * num, record
    if name == "openclaw": assert None not in causes(record)[1:]            # the last message goes at each turn
    else: assert causes(record) == expected and (any(expected) or len(tree.build(record).paths) == 1), record
    assert boundary.faults.num == num + (name != "openclaw")                # which asks otherwise after a fault
    cut = [c.finish == "length" for c in record.calls]
    assert cut == ["word word" in line for line in script[:num]], record
    for line, got, is_cut in zip(script, said(boundary, record), cut): assert got == line or is_cut and got in line


BROKEN = '<tool_call>\n{"name": "bash", "arguments": {"comm\n</tool_call>'
SUMMARY = "<analysis>\nFine.\n</analysis>\n<summary>\nThe file out.txt was written, as it was asked for.\n</summary>"
# what becomes of a request that does not fit: kinds of the calls; m alone: the run ends there (pi: such a short history
# holds nothing to sum up)
FULL_RUNS = {"pi": "m", "codex": "m", "claude_code": "mcmm", "opencode": "mcmm", "qwen_code": "mcmm",
             "mini_swe_agent": "m", "openhands": "mcmm", "openclaw": "m"}


@pytest.mark.parametrize("name", [*LIGHT, *heavy(*HEAVY)])
def test_a_request_that_does_not_fit(name, boundary, bubblewrap, tmp_path):
    """Would catch an error that harnesses do not know for a full context, a summary or what follows it typed as
    something else, a reply with broken JSON that ends in an error, and outcomes by exit status: OpenCode ends with 1
    after a compaction that went well, pi with 0 after a failure."""
    sh = shell(name)
    script = [sh("echo one > out.txt; cat here.txt"), SUMMARY, sh("cat out.txt"), BROKEN, "Done.", "Done.", "Done."]
    record = play(boundary, bubblewrap, name, tmp_path, script, "cat /app/out.txt | grep -c one", plan={1: "full"})
    expected = FULL_RUNS[name]
    assert kinds(record) == expected and record.reward == 1, (record, record.log)
    assert record.outcome == ("ok" if len(expected) > 1 else "harness_error"), (record, record.log)
    if len(expected) > 1: assert causes(record)[2] == "compaction", record


SPAWN = {"claude_code": lambda what: call("Agent", description="look", prompt=what, subagent_type="general-purpose"),
         "codex": lambda what: call("multi_agent_v1__spawn_agent", message=what),
         "opencode": lambda what: call("task", description="look", prompt=what, subagent_type="general"),
         "qwen_code": lambda what: call("agent", description="look", prompt=what, subagent_type="general-purpose")}


@pytest.mark.parametrize("name", ["claude_code", "opencode", *heavy("codex", "qwen_code")])
def test_subagents(name, boundary, bubblewrap, tmp_path):
    """Would catch calls of two subagents, which may come between those of the main agent and each other's, that are
    taken for its own or break its chain."""
    sh, tasks = shell(name), ("Tell the red line of here.txt.", "Tell the blue line of here.txt.")
    left = {ASKED: [SPAWN[name](tasks[0]) + "\n" + SPAWN[name](tasks[1]), sh("echo one > out.txt"), sh("cat here.txt")],
            tasks[0]: [sh("cat here.txt"), "It says here."], tasks[1]: [sh("head -1 here.txt"), "It says here, too."]}
    speaker = lambda c: next(who for who in left if who in text(boundary, c.template_ids))

    def script(c): return left[speaker(c)].pop(0) if left[speaker(c)] else "Done."
    record = play(boundary, bubblewrap, name, tmp_path, script, "grep -c one /app/out.txt")
    assert record.reward == 1 and record.outcome == "ok", (record, record.log)
    who = [speaker(c) for c in record.calls]
    assert set(who) == set(left) and [c.kind == "main" for c in record.calls] == [w == ASKED for w in who], record
    assert set(kinds(record)) == {"m", "s"} and len(tree.build(record).paths) == 1, record
    for w in left:
        own = [c.cause for c in record.calls if speaker(c) == w]
        assert set(own[1:]) <= {None} and own[0] == (None if w == ASKED else "subagent"), record


@slow
@pytest.mark.parametrize("name", ["pi", "codex", "claude_code", "opencode", "qwen_code", "openhands"])
def test_compaction_in_time(name, roomy, bubblewrap, tmp_path):
    """Would catch a context limit that a harness was not told, or that it understands as another one: it must sum up
    its history before a request is refused; and a summary that is taken for something else until it is quoted."""
    sh, context_tokens = shell(name), 49152

    def script(c):
        if c.kind != "main": return SUMMARY
        if any(s.kind != "main" for s in c.session.seen): return "Done."
        return sh(f"seq {c.id * 10000} {c.id * 10000 + 1500}; echo one > out.txt")
    with proxy.Proxy(roomy, max_model_len=context_tokens, engine="scripted", engine_args=ENGINE) as boundary:
        record = play(boundary, bubblewrap, name, tmp_path, script, "grep -c one /app/out.txt", max_calls=60)
    assert record.outcome == "ok" and record.reward == 1 and set(kinds(record)) == {"m", "c"}, (record, record.log)
    first = kinds(record).index("c")
    assert set(causes(record)[:first]) == {None} and "compaction" in causes(record)[first + 1:], record
    assert set(causes(record)[first:]) <= {None, "compaction"}, record


LIMITS = {"calls": {"max_calls": 2}, "tokens": {"max_rollout_tokens": 100},
          "time": {"toml": "[agent]\ntimeout_sec = 45"}}


@pytest.mark.parametrize("name,limit", [
    ("pi", "tokens"), ("pi", "time"), ("claude_code", "calls"),
    *(pytest.param(name, "calls", marks=slow) for name in (*LIGHT, *HEAVY) if name != "claude_code")])
def test_a_limit_ends_it_all(name, limit, boundary, docker, bubblewrap, tmp_path):
    """Would catch a harness that goes on asking when its calls, tokens or seconds are used up (mini-swe-agent: for
    minutes), and children that outlive it."""
    sleeps = [f"{1e6 + os.getpid() + i / 10:.1f}" for i in range(2)]
    line = shell(name)(f"setsid sleep {sleeps[0]} > f 2>&1 & sleep {sleeps[1]} > f 2>&1 & cat here.txt"
                       + "; sleep 600" * (limit == "time"))
    kind = docker if limit == "calls" else bubblewrap
    record = play(boundary, kind, name, tmp_path, [line] * 9, **LIMITS[limit])
    expected = ("timeout", 1, 1) if limit == "time" else ("overlong", 0, 2)
    assert (record.outcome, record.reward, len(record.calls)) == expected, (record, record.log)
    if limit != "time":
        shared = tree.lcp(record.calls[0].ids, record.calls[1].prompt_ids)
        assert "here" in text(boundary, record.calls[1].prompt_ids[shared:])
    assert not [c for c in commands() if any(f"sleep\0{s}".encode() in c for s in sleeps)]


def commands():
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError): yield Path(f"/proc/{pid}/cmdline").read_bytes()


@pytest.fixture(scope="module")
def sampling(roomy):
    """vLLM itself, with a random model and a context that real harnesses fit into."""
    with proxy.Proxy(roomy, max_model_len=65536, engine="vllm", engine_args=ENGINE) as boundary: yield boundary


class Anything:
    def __eq__(self, other): return True


@pytest.mark.parametrize("name", ["pi", "codex", "claude_code", *heavy("opencode", "qwen_code", *HEAVY)])
def test_a_real_engine(name, sampling, roomy, bubblewrap, tmp_path):
    """Would catch a prompt that the policy never saw: the trainer's log-probabilities over the tree must be those that
    the engine had when it sampled. The first reply is laid into the policy's mouth, in tokens that no tokeniser would
    choose; what the engine samples then, at random, goes on from them and from what the command printed."""
    from transformers import AutoModelForCausalLM
    encode = lambda text: sampling.tokenizer.encode(text, add_special_tokens=False)
    ids = [i for c in "I look first." for i in encode(c)] + encode("\n" + shell(name)("cat here.txt; echo two"))
    ids += [sampling.tokenizer.eos_token_id]
    first = tree.Call(0, "main", None, Anything(), [], ids, [math.nan] * len(ids), "stop", versions=[[0, len(ids)]])
    record = play(sampling, bubblewrap, name, tmp_path, max_tokens=48, max_calls=4, replay=[first])
    (given, *live), t = record.calls, tree.build(record)
    assert list(given.sampled_ids) == ids and live and all(c.finish in ("stop", "length") for c in live), record
    shared = tree.lcp(live[0].prompt_ids, given.ids)        # OpenClaw forks over its last message
    assert shared == len(given.ids) or (name, live[0].cause) == ("openclaw", "volatile_tail"), record
    assert "two" in text(sampling, live[0].prompt_ids[shared:]), record
    model = AutoModelForCausalLM.from_pretrained(roomy, dtype=torch.float32)
    forest = tree.pack(t.paths, t.trained)
    with torch.no_grad(): logp = tree.logprobs(model, forest)[torch.cat(forest.where)]
    gap = (logp - torch.cat([torch.tensor(x) for x in t.logp_rollout])).abs()
    gap = gap[~gap.isnan()]                                 # of the first reply there are none
    print(f"mean |dlogp| {gap.mean():.1e}, greatest {gap.max():.1e}, {len(gap)} tokens of {len(live)} calls")
    assert len(gap) == sum(len(c.sampled_ids) for c in live) and gap.mean() < 1e-3, gap


@slow
def test_training_through_several(roomy, bubblewrap, tmp_path):
    """Would catch a mixed run whose groups, prompts of 12,000 tokens or metrics mix the harnesses up."""
    for i in range(2):
        make_task(tmp_path / f"tasks/coin-{i}", ASKED, test="echo $((RANDOM % 2)) > /logs/verifier/reward.txt")
    flags = {"model": roomy, "tasks": tmp_path / "tasks", "eval_tasks": "", "out": tmp_path / "run", "steps": 2,
             "sandbox": bubblewrap, "dtype": "float32", "harness": "claude_code,pi,bash", "max_model_len": 65536,
             "max_tokens": 16, "warmup_steps": 0, "tasks_per_step": 1, "group_size": 4, "num_parallel": 4,
             "micro_batch_tokens": 65536, "lr": 1e-3, "engine_args": "--enforce-eager"}
    words = [sys.executable, ROOT / "train.py", *(f"--{k}={v}" for k, v in flags.items())]
    result = subprocess.run(list(map(str, words)), cwd=ROOT, capture_output=True, text=True, timeout=3000)
    assert result.returncode == 0, result.stderr[-3000:]
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if row["phase"] == "rl"]
    print(json.dumps(rows, indent=1))
    assert [row["groups/num"] for row in rows] == [3, 3] and any("train/loss" in row for row in rows)
    for row in rows:
        assert all(math.isfinite(row[f"reward/{h}"]) for h in ("claude_code", "pi", "bash"))
        if "train/loss" in row: assert math.isfinite(row["train/loss"]) and row["fidelity/gap_mean"] < 1e-3
    seen = {key.split("/")[1] for row in rows for key in row if key.startswith("fidelity/")}
    assert {"claude_code", "pi", "bash"} & seen
    checkpoint = tmp_path / "run/checkpoint"
    assert (checkpoint / "model.safetensors").exists()


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


@slow
def test_a_python_that_cannot_be_had():
    """Would catch a machine without Python >= 3.12 on which OpenHands ends in a traceback: uv is asked for one, and
    where it has none, too, the error says what to do."""
    with pytest.raises(FileNotFoundError, match=r"no Python >= 3\.19 .*on PATH: .*uv: .*No download found"):
        harnesses.interpreter("3.19")


def test_what_is_a_final_answer(tmp_path):
    """Would catch outcomes by exit status: a crash in mid-task that passes for its end, or the reverse."""
    def has_final_answer(num_tools=3, num_tool_calls=0, finish="stop", refused=None, kind="main"):
        session = proxy.Session("s", tmp_path / "s.jsonl", refused=refused)
        session.seen = [proxy.Pending(session, 0., id=0, kind=kind, num_tools=num_tools, num_tool_calls=num_tool_calls)]
        session.calls = [tree.Call(0, kind, None, [1], [1], [2], [-1.], finish)]
        return session.has_final_answer()
    assert has_final_answer() and not proxy.Session("s", tmp_path / "s.jsonl").has_final_answer()
    for wrong in ({"num_tools": 0}, {"num_tool_calls": 1}, {"num_tool_calls": None}, {"finish": "length"},
                  {"refused": "status 400: full"}, {"kind": "subagent"}): assert not has_final_answer(**wrong), wrong


def test_a_spent_budget_is_told_once(tmp_path):
    """Would catch a harness that is not ended when its budget is used up, or a timer that is started twice."""
    told = []
    session = proxy.Session("s", tmp_path / "s.jsonl", max_calls=1, when_spent=lambda: told.append(session.is_spent))
    assert session.problem() is None and not session.is_spent
    session.seen.append(None)
    for _ in range(3): assert session.problem() == "this session has used up its 1 calls"
    assert told == [False] and session.is_spent


def test_each_subagent_begins_as_one():
    """Would catch the first call of a second subagent that is compared with those of another one: an edited history, it
    would seem."""
    def pending(id, kind, *said, continues=None):
        messages = [{"role": r, "content": text} for r, text in zip(["system", "user", "assistant", "tool"], said)]
        outline = graft.outline(messages, {})
        return proxy.Pending(None, 0., id=id, kind=kind, continues=continues, tools="t", outline=outline)
    seen = [pending(0, "main", "You work.", "Do it."), pending(1, "subagent", "You help.", "Read the red one.")]
    other = pending(2, "subagent", "You help.", "Read the blue one.")
    assert graft.cause_of(other, seen, "unknown") == "subagent"
    seen.append(other)
    later = pending(3, "subagent", "You help.", "Read the red one.", "I read.", "red", continues=1)
    assert graft.cause_of(later, seen, None) is None
    edited = pending(4, "subagent", "You help.", "Read the blue one.", "I never read.", "blue")
    assert graft.cause_of(edited, seen, "unknown") == "history_edited"


def test_a_summary_that_was_cut_off_goes_on_as_one():
    """Would catch Claude Code's "Output token limit hit. Resume directly" behind half a summary that passes for a call
    of the main agent, and is trained."""
    session = proxy.Session("s", None)

    def kind(num_tools, *said):
        messages = [{"role": r, "content": text} for r, text in zip(["user", "assistant"] * 3, said)]
        call = proxy.Pending(session, 0., num_tools=num_tools, outline=graft.outline(messages, {}))
        call.kind = graft.kind_of(call, session, messages)
        session.seen.append(call)
        return call.kind
    ask = "Sum up: an <analysis> block, then a <summary> block."
    assert [kind(3, "Do it."), kind(3, "Do it.", "Word", ask), kind(3, "Do it.", "Word", ask, "<analysis>", "Go on."),
            kind(3, "We did this so far.")] == ["main", "compaction", "compaction", "main"]
