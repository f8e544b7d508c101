"""Recorded traffic of real harnesses (tests/wire: their prose is masked, their structure is not) through the proxy. The
scripted engine says what the model had said then; what a harness made of it comes back as it did then."""
import asyncio
import dataclasses
import gzip
import json
import os
import re
from pathlib import Path

import pytest

from conftest import ENGINE, engine_prompts, make_task
from test_viewer import serve, tab
import harnesses
import rollout
import tree

WIRE = sorted((Path(__file__).parent / "wire").glob("*.jsonl.gz"))


def call_text(name, arguments):
    return f'<tool_call>\n{{"name": {json.dumps(name)}, "arguments": {arguments or "{}"}}}\n</tool_call>'


def reply(message, think=False):
    """A recorded answer, in any protocol -> the text that the policy would have sampled."""
    parts = []
    for b in message.get("content") if isinstance(message.get("content"), list) else []:            # messages
        if b["type"] == "thinking" and think: parts.append(f"<think>\n{b['thinking']}\n</think>\n\n")
        if b["type"] == "text": parts.append(b["text"])
        if b["type"] == "tool_use": parts.append(call_text(b["name"], b["raw"]))
    for item in message.get("output", []):                                                          # responses
        if item["type"] == "message": parts += [c["text"] for c in item["content"]]
        if item["type"] == "function_call":                                                         # vLLM's flat names
            name = "__".join(filter(None, (item.get("namespace"), item["name"])))
            parts.append(call_text(name, item["arguments"]))
    if "choices" in message: message = message["choices"][0]["message"]
    if isinstance(message.get("content"), str): parts.append(message["content"])                    # chat
    parts += [call_text(t["function"]["name"], t["function"]["arguments"]) for t in message.get("tool_calls") or []]
    return "".join(parts)


def replay(path, proxy, connect, **kw):
    """-> (request, answer) pairs and the record. Requests that were answered by an error then are left out."""
    traffic = [json.loads(line) for line in gzip.open(path, "rt")]
    traffic = [t for t in traffic if t["method"] == "POST" and "message" in (t["response"] or {})]
    session = connect(proxy, [reply(t["response"]["message"]) for t in traffic], **kw)
    client, answers = connect.client(session), []
    for t in traffic:
        body = t["body"] if t["body"].get("stream") else t["body"] | {"stream": False}
        headers = {k: v for k, v in t["headers"].items() if k.lower() not in ("content-type", "accept")}
        answer = client.post(t["path"], json=body, headers=headers)
        assert answer.status_code == 200, f"{path.name} {t['i']}: {answer.text[:500]}"
        answers.append((t, answer))
    return answers, tree.read(session.record)


@pytest.fixture(scope="module")
def roomy_proxy(roomy):
    import proxy
    with proxy.Proxy(roomy, max_model_len=131072, engine="scripted", engine_args=ENGINE) as p: yield p


# what each recording must become: kinds (main, Subagent, Compaction, siDe) and causes of the calls, in order
def chain(n): return "m" * n, [None] * n


REWRITTEN, EDITED, VOLATILE = "tool_call_rewritten", "history_edited", "volatile_tail"
EXPECTED = {
    "claude-ctx400": ("mc", [None, "compaction"]),
    "claude-malformed": ("mmmm", [None, REWRITTEN, None, None]),
    "claude-subagent": ("mmsmsm", [None, None, "subagent", None, None, None]),
    "codex-compact": ("mmcmm", [None, None, "compaction", "compaction", None]),
    "codex-malformed": ("mmmm", [None, REWRITTEN, None, None]),
    "codex-subagent": ("mmsms", [None, None, "subagent", None, None]),
    "mini-malformed": ("mmm", [None, EDITED, EDITED]),                      # drops the reply, says why
    "openclaw-base": ("mmm", [None, VOLATILE, VOLATILE]),                   # the last message goes at each turn
    "openclaw-dropx1": ("mmm", [None, VOLATILE, VOLATILE]),
    "openclaw-mix": ("mmmmm", [None] + [VOLATILE] * 4),
    "opencode-base": ("dmmm", [None] * 4),
    "opencode-compact": ("dmmcm", [None, None, None, "side", "compaction"]),
    "opencode-malformed": ("dmmmm", [None, None, REWRITTEN, REWRITTEN, None]),
    "opencode-mix": ("dmmmmm", [None] * 6),
    "opencode-subagent": ("dmssmm", [None, None, "subagent", None, None, None]),
    "openhands-malformed": ("mmmm", [None, REWRITTEN, None, REWRITTEN])}
LETTER = {"main": "m", "subagent": "s", "compaction": "c", "side": "d"}


@pytest.mark.parametrize("path", WIRE, ids=lambda p: p.name.removesuffix(".jsonl.gz"))
def test_recorded_traffic(path, roomy_proxy, connect):
    """Would catch a request that vLLM refuses; a chain that breaks over what a harness does to replies that it leaves
    intact (spelling of arguments, ids, lists of text blocks, moving cache_control, billing headers); a subagent, title
    or summary taken for the main agent; a fork without its cause; a prompt in the record that is not the engine's; and
    tool calls lost between the reply's text and the client."""
    with engine_prompts(roomy_proxy) as given: answers, record = replay(path, roomy_proxy, connect)
    kinds, causes = EXPECTED.get(path.name.removesuffix(".jsonl.gz")) or chain(len(answers))
    assert "".join(LETTER[c.kind] for c in record.calls) == kinds and [c.cause for c in record.calls] == causes
    assert [c.prompt_ids for c in record.calls] == given
    for (t, answer), c in zip(answers, record.calls):
        message = t["response"]["message"]
        for name in valid_tools(message): assert f'"name":"{name}"' in answer.text.replace('": "', '":"')
    t = tree.build(record)
    assert t.num_trained == sum(len(c.sampled_ids) for c in record.calls if c.kind == "main")


def valid_tools(message):
    """Names of the tool calls whose arguments are JSON."""
    calls = [(b["name"], b["raw"]) for b in message.get("content") or () if isinstance(b, dict) and "raw" in b]
    calls += [(i["name"], i["arguments"]) for i in message.get("output", ()) if i["type"] == "function_call"]
    if "choices" in message: message = message["choices"][0]["message"]
    calls += [(c["function"]["name"], c["function"]["arguments"]) for c in message.get("tool_calls") or ()]
    for name, arguments in calls:
        try: json.loads(arguments)
        except ValueError: continue
        yield name


def test_openclaw_with_its_tails_kept(roomy_proxy, connect):
    """Would catch tails that are put back at another place or not at all: the chain would still break."""
    path = next(p for p in WIRE if "openclaw-mix" in p.name)
    _, forking = replay(path, roomy_proxy, connect)
    _, stable = replay(path, roomy_proxy, connect, openclaw_stable=True)
    assert [c.cause for c in stable.calls] == [None] * 5 and len(tree.build(stable).paths) == 1
    cost = lambda record: sum(n for _, n in tree.build(record).forks.values())
    assert cost(stable) == 0 < cost(forking)
    new = lambda record: tree.build(record).num_unique
    print("forked tokens", cost(forking), cost(stable), "unique tokens", new(forking), new(stable), "last prompt",
          len(forking.calls[-1].prompt_ids), len(stable.calls[-1].prompt_ids))
    assert new(stable) < new(forking)                       # tokens computed in training


def test_the_page_shows_what_real_harnesses_did(roomy_proxy, roomy, connect, tab, tmp_path):
    """Would catch a page on which a real harness's fork, its cause or its cost is missing or another than tree.py's, or
    whose tree or rows lack a call; and one that a real prompt of 20,000 tokens breaks, or makes wider than a phone."""
    names = ("claude-subagent", "codex-compact", "mini-malformed", "openclaw-mix", "opencode-compact",
             "openhands-malformed")
    folder, records = tmp_path / "run" / "rollouts" / "step-0000", {}
    folder.mkdir(parents=True)
    for i, name in enumerate(names):
        _, records[name] = replay(next(p for p in WIRE if name in p.name), roomy_proxy, connect)
        head, calls = (tmp_path / f"s{i}.jsonl").read_text().split("\n", 1)
        head = json.dumps(json.loads(head) | {"harness": name, "model": roomy})
        end = json.dumps({"type": "end", "outcome": "ok", "reward": 0.0, "seconds": {}})
        (folder / f"{name}.jsonl").write_text(f"{head}\n{calls}{end}\n")
    with serve(tmp_path / "run") as address:
        tab.open(address + "#view=overview", f"all(`tbody tr`).length === {len(names)}")
        for name, record in records.items():
            tab.open(f"{address}#view=rollout&id=run/rollouts/step-0000/{name}", "text(`.tok`).length > 9")
            rows = tab.js("all(`.calls tbody tr`).map(r => [...r.cells].slice(0, 3).map(c => c.innerText))")
            assert rows == [[str(c.id), c.kind, c.cause or ""] for c in record.calls], name
            drawn, why = tab.js("all(`article svg`)[0].textContent"), tab.js("text(`.why`)")
            assert tab.js("all(`article svg circle`).length") == len(rows)
            for cause, (num, cost) in tree.build(record).forks.items():
                assert f"Forked {num} x ({cause}): {cost:,} tokens" in why and cause in drawn, (name, why, drawn)
            tab.size(360, 740)
            assert tab.js("document.documentElement.scrollWidth") <= 360, name
            tab.size(1280, 900)
    assert not tab.problems


# ---- live: the harness itself, in a sandbox ----

COMMANDS = ["cat here.txt > out.txt; cat out.txt", "echo two >> out.txt", "cat out.txt"]
TEST = '[ "$(tail -n 1 /app/out.txt)" = two ]; echo $((1 - $?)) > /logs/verifier/reward.txt'
STALL_S = float(os.environ.get("HARNESS_RL_STALL_S", 600))


def live(name, script, proxy, bubblewrap, folder, here="one\n", timeout_s=600, **options):
    """One rollout of a real harness on a task whose here.txt says `here` -> its record, the harness's output."""
    make_task(folder / "task", "Write out.txt.", test=TEST, toml=f"[agent]\ntimeout_sec = {timeout_s}")
    (folder / "task/environment/files/here.txt").write_text(here)
    task = rollout.load_task(folder / "task", "task", {"debian:bookworm-slim": "host"})
    runner = rollout.Runner(proxy, bubblewrap, "test-wire", **options)
    harnesses.load(name).mounts()
    (folder / "out").mkdir()
    record = runner.run(rollout.Job(task, name, script=tuple(script)), folder / "out")
    return record, (folder / "out" / f"task.{name}.0.log").read_text()


def union(*records):
    """The tree of several rollouts of one task as if they were one."""
    calls = [dataclasses.replace(c, id=i) for i, c in enumerate(c for r in records for c in r.calls)]
    return tree.build(dataclasses.replace(records[0], calls=calls))


@pytest.mark.parametrize("name", ["pi", pytest.param("opencode", marks=pytest.mark.slow)])
def test_a_real_harness_replayed_to_a_call_goes_on_live(name, roomy_proxy, bubblewrap, tmp_path):
    """Would catch a replay that real prompts do not match (dates, ids, places that change from run to run), that
    samples anew what is on record, that repeats or skips a reply where it goes live, or whose record is no second
    branch of the first one's tree: at the reply where the record ends, at the tool's output where the world differs.
    (Codex cannot be replayed so: each output of its tools has a random chunk id and a time in it.)"""
    script = harnesses.load(name).demonstrate(COMMANDS)
    first, log = live(name, script, roomy_proxy, bubblewrap, tmp_path / "first")
    assert first.reward == 1 and len(first.calls) == len(script) == 4, log
    never = "This is never said."
    for k in 1, 2:                                          # killed after k calls: the rest is lived again, otherwise
        other = [never] * k + harnesses.load(name).demonstrate(["echo other >> out.txt", COMMANDS[1]])
        record, log = live(name, other, roomy_proxy, bubblewrap, tmp_path / f"killed{k}", replay=first.calls[:k])
        assert record.reward == 1 and [c.cause for c in record.calls] == [None] * (k + 3), log
        for old, new in zip(first.calls[:k], record.calls):
            assert (old.prompt_ids, old.template_ids, old.sampled_ids) == (
                new.prompt_ids, new.template_ids, new.sampled_ids)
        both, fork = union(first, record), first.calls[k]
        assert record.calls[k].prompt_ids == fork.prompt_ids and len(both.paths) == 2
        shared = tree.lcp(*both.paths)
        assert len(fork.prompt_ids) <= shared < min(len(fork.ids), len(record.calls[k].ids))
        assert both.num_unique == sum(map(len, both.paths)) - shared                # one branch, there
    record, log = live(name, [never, *script[1:]], roomy_proxy, bubblewrap, tmp_path / "elsewhere", "uno\n",
                       replay=list(first.calls))
    assert record.reward == 1 and len(record.calls) == 4, log
    both = union(first, record)
    assert len(both.paths) == 2 and len(first.calls[0].ids) < tree.lcp(*both.paths) < len(first.calls[1].prompt_ids)
    record, log = live(name, [never] * 4, roomy_proxy, bubblewrap, tmp_path / "strict", "uno\n",
                       replay=list(first.calls), is_strict=True)
    assert len(record.calls) == 1 and re.search(r"replay: call 1: token \d+ of the prompt begins '.*uno.*recorded in "
                                                r"call 1: '.*one", log), log


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in harnesses.names() if name != "bash"])
def test_a_reply_that_takes_ten_minutes(name, roomy_proxy, bubblewrap, tmp_path):
    """Would catch signs of life that this client does not count: it would hang up and ask again (a decision sampled
    twice), or end. HARNESS_RL_STALL_S: seconds that the second reply takes."""
    core, asked = roomy_proxy.engine.engine_core, []

    class Stalling(type(core)):
        async def add_request_async(self, request):
            asked.append(request)
            if len(asked) == 2: await asyncio.sleep(STALL_S)
            await super().add_request_async(request)
    core.__class__ = Stalling
    script = harnesses.load(name).demonstrate(COMMANDS)
    try: record, log = live(name, script, roomy_proxy, bubblewrap, tmp_path, timeout_s=STALL_S + 300)
    finally: core.__class__ = Stalling.__bases__[0]
    calls = record.calls
    print(name, record.outcome, record.reward, [(c.cause, c.finish, round(c.finished_s - c.received_s)) for c in calls])
    assert (record.outcome, record.reward) == ("ok", 1) and len(asked) == len(calls) == len(script), (record, log)
    assert calls[1].finished_s - calls[1].received_s >= STALL_S
