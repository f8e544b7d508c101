"""viewer.py: its list against tree.py, and the page in headless Chromium over records of real rollouts."""
import contextlib
import http.client
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import tracemalloc
import urllib.request
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import urlencode

import numpy as np
import pytest
import torch
from websockets.sync.client import connect as open_socket

from conftest import make_task
import rollout
import train
import tree
import viewer

NASTY = '</script><script>window.pwned = 1</script><img src=x onerror="window.pwned = 1">\u2028<svg onload=pwned=1>'
CHROMIUM = next(filter(None, map(shutil.which, ("chromium-headless-shell", "chromium", "google-chrome"))), None)
TEST = ('if [ "$(cat /app/out.txt)" = hi ]; then echo 1; else echo "out.txt should hold hi"; echo 0; fi '
        '| tee /tmp/said; tail -n 1 /tmp/said > /logs/verifier/reward.txt')


def write(path, calls, header={}, end={}, log=None):
    """A record of hand-made calls."""
    path.parent.mkdir(parents=True, exist_ok=True)
    head = {"type": "rollout", "format": 1, "id": path.stem, "task": "t", "harness": "h", "model": "none",
            "temperature": 1.0, "started_s": 1000.0} | header
    lines = [head, *(tree.call_line(c, calls[:i]) for i, c in enumerate(calls))]
    lines += [{"type": "end", "outcome": "ok", "reward": 0.0, "detail": "", "seconds": {"agent": 1.0}} | end]
    path.write_text("".join(json.dumps(x) + "\n" for x in lines))
    if log is not None: path.with_suffix(".log").write_text(log)
    return path


def call(id, prompt, sampled, cause=None, **kw):
    return tree.Call(id, "main", cause, prompt, prompt, sampled, [-0.5] * len(sampled), "stop", received_s=1000. + id,
                     finished_s=1000.5 + id, **kw)


def grown(rng, num):
    """Calls that continue one another, or fork from some place."""
    calls, history = [], [int(x) for x in rng.integers(3, 9, 6)]
    for i in range(num):
        forks = i and rng.random() < 0.4
        if forks: history = history[:int(rng.integers(0, len(history)))]
        prompt = history + [int(x) for x in rng.integers(3, 9, rng.integers(1, 5))]
        calls.append(call(i, prompt, [int(x) for x in rng.integers(3, 9, rng.integers(0, 5))],
                          str(rng.choice(["nonce", "history_edited"])) if forks else None))
        history = calls[-1].ids
    return calls


@pytest.fixture(scope="module")
def run(scripted, tiny, tokenizer, bubblewrap, tmp_path_factory):
    """A run's folder: rollouts of the bash harness in sandboxes, one that solves its task and one that does not; one
    whose client rewrites what stood before; one full of markup; one of 100,000 tokens; a harness that always fails."""
    import httpx
    root = tmp_path_factory.mktemp("view") / "run"
    step = root / "rollouts" / "step-0000"
    task = rollout.load_task(make_task(tmp_path_factory.mktemp("tasks") / "say", "Say hi.", test=TEST), "say",
                             {"debian:bookworm-slim": "host"})
    jobs = [rollout.Job(task, "bash", i, (f"```bash\necho {word} > out.txt\n```", "DONE"))
            for i, word in enumerate(("no", "hi"))]
    rollout.Runner(scripted, bubblewrap, "test-view", model=tiny).run_all(jobs, step, "", quiet=True)
    for path in step.glob("say*.jsonl"):                    # a scripted engine has no log-probabilities
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        for line in lines:
            if "logp" in line: line["logp"] = [-0.5 - i / 64 for i in range(len(line["sampled"]))]
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    solved = tree.read(step / "say.bash.1.jsonl")
    assert solved.reward == 1 and tree.read(step / "say.bash.0.jsonl").reward == 0, solved

    def talk(name, script, requests, header, end, log):
        path = step / f"{name}.jsonl"
        session = scripted.open_session(name, path, header | {"model": tiny}, script=script)
        with httpx.Client(transport=httpx.HTTPTransport(uds=session.address), base_url="http://m", timeout=60) as c:
            for messages in requests: c.post("/v1/chat/completions", json={"model": "m", "messages": messages})
        scripted.close_session(session)
        with open(path, "a") as f: f.write(json.dumps({"type": "end", "outcome": "ok", "seconds": {}} | end) + "\n")
        path.with_suffix(".log").write_text(log)
    said = lambda *texts: [{"role": ("user", "assistant")[i % 2], "content": t} for i, t in enumerate(texts)]
    talk("forked", ["one größe 🦊", "two", "three"],
         [said("Count."), said("Count.", "one größe 🦊", "on"),
          said("Count to three.", "one größe 🦊", "on", "two", "on")],
         {"task": "count", "harness": "editor"}, {"reward": 0.0, "detail": "exit status 3", "verifier_at": 1},
         "\n=== verifier\nno\n")
    talk("hostile", [NASTY] * 2, [said(NASTY), said("<b>" + NASTY)], {"task": NASTY, "harness": '"><b id=b>'},
         {"reward": 0.0, "detail": NASTY, "verifier_at": len(NASTY.encode()) + 1}, NASTY + "\n=== verifier\n" + NASTY)
    words = tokenizer.encode("The quick brown fox jumps over the lazy dog.\n") * 10_000
    write(step / "long.jsonl", [call(0, words[:99_000], words[:1000])], {"model": tiny, "task": "long"})
    for i in range(4):
        write(step / f"fail{i}.jsonl", [], {"task": f"f{i}", "harness": "crasher"}, {"outcome": "harness_error"})
    (root / "config.json").write_text(json.dumps({"steps": 2, "algo": "grpo", "model": "tiny"}))
    rows = [{"phase": "rl", "step": i, "reward/mean": 0.5, "train/entropy": 1.0 - 0.1 * i, "groups/num": 4,
             "groups/zero_variance": 1, "time/rollout_s": 2.0, "time/train_s": 1.0, "time/weights_s": float("nan"),
             "fidelity/gap_mean": 0.01} for i in range(2)]
    rows.append({"phase": "eval", "when": "end", "set": "s", "harness": "bash"} | rollout.summary([solved]))
    (root / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    records = [tree.read(step / f"say.bash.{i}.jsonl") for i in range(2)]
    trees = [tree.build(r) for r in records]
    batch = train.make_batch(trees, 0)
    adv, old = batch.rollout * 2.0 - 1, batch.logp_rollout - 0.25
    train.save_tokens(root / "tokens" / "step-0000.npz", records, batch, np.ones(len(adv), bool), adv=adv,
                      logp_old=old, logp=old + 0.1)
    return root


# ---- what the page is told ----

def test_list_agrees_with_the_tree(tmp_path):
    """Would catch a count, a cost of a fork or a length that differs from tree.py's, and a record that grows in pieces
    of any size and is read twice, or not on."""
    rng = np.random.default_rng(0)
    for i in range(30):
        calls = grown(rng, int(rng.integers(1, 8)))
        raw = write(tmp_path / "whole.jsonl", calls, {"id": str(i)}).read_bytes()
        path = tmp_path / f"run{i}" / "r.jsonl"
        path.parent.mkdir()
        cuts = sorted({*rng.integers(1, len(raw), 5).tolist(), len(raw)})
        path.write_bytes(raw[:cuts[0]])
        run = viewer.Run(tmp_path / f"run{i}", "run")
        for a, b in zip([0] + cuts, cuts):
            with open(path, "ab") as f: f.write(raw[max(a, cuts[0] if a else b):b])
            run.refresh(b)
        row, whole = run.rows[path], tree.read(path)
        forks = tree.build(whole).forks
        assert {k: tuple(v) for k, v in row["forks"].items()} == forks
        assert row["cost"] == sum(cost for _, cost in forks.values())
        assert (row["calls"], row["sampled"], row["tokens"]) == (
            len(calls), sum(len(c.sampled_ids) for c in calls), max(len(c.ids) for c in calls))
        assert row["outcome"] == "ok" and "error" not in row and not run.refresh(len(raw) + 1)


def test_only_news_is_sent_and_no_record_is_opened_for_a_list(tmp_path):
    """Would catch a list that parses every rollout or sends all of it at each poll, metrics or a configuration (of a
    run resumed with more steps) that are lost when the file is written anew, a torn line taken for a record, a broken
    record that takes the list down, and a removed one that stays, or for ever stays away."""
    for i in range(2000): write(tmp_path / "run" / f"{i}.jsonl", [call(0, [5] * 9, [6] * 3)])
    page, misses = viewer.Viewer([tmp_path / "run"]), viewer.load.cache_info().misses
    first = page.state()
    assert len(first["runs"][0]["rows"]) == 2000 and viewer.load.cache_info().misses == misses

    def news(since):
        page.checked = 0.0
        return page.state(since["gen"], first["boot"])
    assert news(first)["runs"] == []
    (tmp_path / "run" / "torn.jsonl").write_text('{"type": "roll')
    (tmp_path / "run" / "metrics.jsonl").write_text('{"phase": "rl", "step": 0}\n{"phase": "r')
    (tmp_path / "run" / "7.jsonl").rename(tmp_path / "7")
    with open(tmp_path / "run" / "9.jsonl", "a") as f: f.write("{broken\n")
    second = news(first)
    (run,) = second["runs"]
    assert [r["id"] for r in run["rows"]] == ["9"] and "error" in run["rows"][0]
    assert run["gone"] == ["7"] and run["metrics"] == [{"phase": "rl", "step": 0}]
    assert any("broken" in text for _, text in run["health"])
    (tmp_path / "run" / "metrics.jsonl").write_text('{"step": 5}\n')
    assert news(second)["runs"][0]["metrics"] == [{"step": 5}] and news(first)["runs"][0]["rows"] == run["rows"]
    (tmp_path / "7").rename(tmp_path / "run" / "7.jsonl")
    third = news(second)
    assert [r["id"] for r in third["runs"][0]["rows"]] == ["7"] and third["runs"][0]["gone"] == []
    assert len(page.state(second["gen"], "another start")["runs"][0]["rows"]) == 2000
    for steps in (40, 60):
        (tmp_path / "run" / "config.json").write_text(json.dumps({"steps": steps}))
        third = news(third)
        assert third["runs"][0]["config"] == {"steps": steps} and third["runs"][0]["rows"] == []


def test_what_is_no_record_is_left_alone(tmp_path):
    """Would catch an agent's own file (an artifact) listed as a rollout of the run, and another program's that is read
    whole, or again at each poll."""
    root = tmp_path / "run"
    record = write(root / "a.jsonl", [call(0, [5], [6])])
    (root / "a.artifacts" / "logs").mkdir(parents=True)
    for fake in (root / "a.artifacts" / "b.jsonl", root / "a.artifacts" / "logs" / "c.jsonl"): shutil.copy(record, fake)
    other = root / "other.jsonl"
    with open(other, "wb") as f: f.truncate(2**26)
    run = viewer.Run(root, "run")
    tracemalloc.start()
    run.refresh(1)
    assert tracemalloc.get_traced_memory()[1] < 2**23
    tracemalloc.stop()
    assert list(run.rows) == [record]
    was = other.stat()
    with open(other, "r+b") as f: f.write(record.read_bytes())
    os.utime(other, ns=(was.st_atime_ns, was.st_mtime_ns))          # as if nothing had changed
    assert not run.refresh(2) and list(run.rows) == [record]
    other.touch()
    assert run.refresh(3) and list(run.rows) == [record, other]


def test_a_scan_goes_on_while_the_run_does(tmp_path):
    """Would catch a folder that is renamed during a scan, as a checkpoint is, and ends it with an error; and a rollout
    that is asked for while the list grows under it."""
    root, is_over = tmp_path / "run", threading.Event()
    write(root / "a.jsonl", [])
    for i in range(50): (root / f"folder{i}" / "below").mkdir(parents=True)

    def rename():
        while not is_over.is_set():
            for a, b in (("folder", "renamed"), ("renamed", "folder")):
                for i in range(50): (root / f"{a}{i}").rename(root / f"{b}{i}")
    thread = threading.Thread(target=rename)
    thread.start()
    run = viewer.Run(root, "run")
    try:
        for gen in range(100): run.refresh(gen)
    finally:
        is_over.set()
        thread.join()
    reader = iter(run.rows.values())
    write(root / "b.jsonl", [])
    assert run.refresh(101) and [x["id"] for x in reader] == ["a"] and len(run.rows) == 2


def test_odd_lines(tmp_path):
    """Would catch a call that keeps the kind it was first given, a record that loses its end because a name in it is no
    UTF-8, and bytes that are no UTF-8, in a line of their own, which end the server without a word of the file."""
    path = write(tmp_path / "run" / "odd.jsonl", [call(0, [5], [6]), call(1, [5, 6, 7], [8])],
                 end={"reward": 1.0, "detail": "wrote größe 🦊 \udcff"})
    *lines, end = path.read_text().splitlines(keepends=True)
    path.write_text("".join([*lines, '{"type": "kind", "id": 1, "kind": "compaction"}\n', end]))
    page = viewer.Viewer([tmp_path / "run"])
    row = page.rollout("run/odd")["row"]
    assert row["kinds"] == ["main", "compaction"] and (row["outcome"], row["reward"]) == ("ok", 1.0), row
    assert row["detail"] == "wrote größe 🦊 ?" and "error" not in row
    with open(path, "ab") as f: f.write(b'{"type": "end", "detail": "\xff"}\n{"ty\xff": 1}\n')
    (told,) = viewer.Viewer([tmp_path / "run"]).state()["runs"]
    assert any(t.startswith("1 records are broken: odd: line 6") for _, t in told["health"]), told["health"]


def test_who_said_it(tmp_path):
    """Would catch a verifier's words that are lost between a long log of the harness and its own, and a harness that
    prints the mark and so speaks for a verifier: before it, or where none ran."""
    mark, told = "\n=== verifier\n", lambda **end: viewer.read_row(write(path, [], end=end), "r")
    path = tmp_path / "r.jsonl"
    harness, verifier = "harness 🦊\n" * 30_000 + mark + "harness", "verifier\n" * 30_000
    raw = (harness + mark + verifier).encode()
    path.with_suffix(".log").write_bytes(raw)
    a, b = viewer.logs(path.with_suffix(".log"), told(verifier_at=len(harness.encode()) + 1))
    assert a.startswith("harness 🦊\n") and a.endswith(mark + "harness") and set(b.split()[:9]) == {"verifier"}
    assert b.endswith("verifier\n") and f"{len(verifier) - 200_000:,} bytes left out" in b and len(b) < 201_000
    assert f"{len(harness.encode()) - 200_000:,} bytes left out" in a
    path.with_suffix(".log").write_text("a" + mark + "b" + mark + "c")
    split = lambda **end: viewer.logs(path.with_suffix(".log"), told(**end))
    assert split(verifier_at=2) == ("a", "b" + mark + "c")
    assert split() == ("a" + mark + "b" + mark + "c", ""), "no verifier ran: the harness printed the mark"


def test_trained_is_what_the_run_trains(tmp_path):
    """Would catch subagents' calls shown as left out where the run trains them, leaves that --keep leaves out shown as
    trained, and an evaluation, or a group of equal rewards, whose tokens look trained."""
    calls = [call(0, [5, 6], [7, 8, 9]), call(1, [5, 4], [3], "nonce"), call(2, [4, 4], [3], "subagent")]
    calls[2].kind = "subagent"
    for config, folder, trained in (({"algo": "grpo"}, "step-0000", [0, 1]), ({}, "step-0000", []), ({"train_subagents": True}, "step-0000", [0, 1, 2]),
                                    ({"keep": "longest_leaf"}, "step-0000", [0]),
                                    ({"algo": "grpo"}, "eval-end", [])):
        root = tmp_path / f"{folder}{len(config)}{len(trained)}"
        write(root / "rollouts" / folder / "a.jsonl", calls)
        if config: (root / "config.json").write_text(json.dumps(config))        # rollout.py writes none
        page, id = viewer.Viewer([root]), f"{root.name}/rollouts/{folder}/a"
        told = page.rollout(id)
        assert [c["id"] for c in told["calls"] if c["trained"]] == trained, config
        assert [i for i in range(3) if page.tokens(id, i, 0, 9)["mask"][-1]] == trained
        assert told["num_trained"] == sum(len(calls[i].sampled_ids) for i in trained)
    assert "Not trained: 3 calls (evaluation)" in told["why"] and told["num_unique"] == 7
    root = tmp_path / "step-000012"                         # of an update that computed it, and of one that did not
    record = tree.read(root / "rollouts/step-0000/a.jsonl")
    batch, column = train.make_batch([tree.build(record)], 0), np.zeros(4)
    for is_computed in (True, False):
        train.save_tokens(root / "tokens/step-0000.npz", [record], batch, np.full(4, is_computed), adv=column,
                          logp_old=column, logp=column)
        page, id = viewer.Viewer([root]), "step-000012/rollouts/step-0000/a"
        told = page.rollout(id)
        assert told["num_trained"] == 4 * is_computed == sum(page.tokens(id, i, 0, 9)["mask"][-1] for i in (0, 1)) * 2
        assert ("Not trained: 3 calls (a group of equal rewards)" in told["why"]) != is_computed


def test_a_half_written_file_of_tokens(run, tmp_path):
    """Would catch a step's file of tokens that is there before it is whole, or spoilt when its successor cannot be
    written; and one that was cut short, which then hides the rollout instead of its columns alone."""
    file, save = tmp_path / "step-0000.npz", lambda started_s: train.save_tokens(
        file, [SimpleNamespace(id="a", started_s=started_s)],
        SimpleNamespace(rollout=torch.zeros(0), call=torch.zeros(0), trained=[]), np.zeros(0, bool))
    save(5.0)
    whole = file.read_bytes()
    with pytest.raises(Exception): save(lambda: "numpy cannot write this")
    assert file.read_bytes() == whole and [f.name for f in tmp_path.glob("*.npz")] == [file.name]
    shutil.copytree(run, tmp_path / "run")
    file, id = tmp_path / "run" / "tokens" / "step-0000.npz", "run/rollouts/step-0000/say.bash.0"
    raw = file.read_bytes()
    for cut in (0, len(raw) // 2, len(raw) - 9):
        file.write_bytes(raw[:cut])
        page = viewer.Viewer([tmp_path / "run"])
        told = page.rollout(id)
        assert "step-0000.npz cannot be read" in told["why"][-1] and told["calls"][0]["adv"] is None, cut
        assert "adv" not in page.tokens(id, 0, 0, 9)


def test_export_leaves_out_what_cannot_be_read(tmp_path, capsys):
    """Would catch one broken record that ends an export, or is left out without a word, and a history that is stored
    again for each call that goes on from it."""
    history, calls = [5] * 9, []
    for i in range(50):
        calls.append(call(i, history + [4] * 40, [6] * 10))
        history = calls[-1].ids
    for name in "abc": path = write(tmp_path / "run" / f"{name}.jsonl", calls, {"started_s": float(ord(name))})
    path.write_text(path.read_text().replace('"shared": 59', '"shared": 59000'))       # valid, but it makes no sense
    viewer.export(viewer.Viewer([tmp_path / "run"]), tmp_path / "out.html", 2)
    said = capsys.readouterr().out
    assert "2 of 3 rollouts in full; 1 left out, as they cannot be read: run/c: " in said, said
    data = json.loads(re.search('json">(.*?)</script>', (tmp_path / "out.html").read_text())[1])
    for name in "ab":
        held = [v["ids"] for k, v in data.items() if k.startswith(f"tokens?id=run/{name}&")]
        assert len(held) == 50 and sum(map(len, held)) == len(history)


def test_tokens(run, tokenizer):
    """Would catch text that is not what the tokens say (characters of several tokens), a slice that shifts the columns,
    advantages and log-probabilities of another token, call or rollout, and harness text taken for sampled."""
    page = viewer.Viewer([run])
    page.state()
    for name, adv in (("say.bash.0", -1), ("say.bash.1", 1), ("forked", None)):
        id = f"run/rollouts/step-0000/{name}"
        record, told = tree.read(run.parent / f"{id}.jsonl"), page.rollout(id)
        for c, shown in zip(record.calls, told["calls"]):
            n, size = len(c.prompt_ids), len(c.ids)
            whole = page.tokens(id, c.id, 0, size)
            assert "".join(whole["text"]) == tokenizer.decode(c.ids) and whole["ids"] == c.ids and shown["trained"]
            assert whole["logp"] == [None] * n + viewer.clean(c.logp_rollout)
            assert whole["mask"] == [None] * n + [1] * (size - n)
            if adv is None: assert "old" not in whole and shown["gap"] is None
            else:
                assert whole["adv"] == [None] * n + [adv] * (size - n) and shown["adv"] == adv
                assert whole["old"][n:] == pytest.approx([x - 0.25 for x in c.logp_rollout])
                assert whole["now"][n:] == pytest.approx([x - 0.15 for x in c.logp_rollout])
                assert shown["gap"] == pytest.approx(0.25)
            for start, end in ((n - 2, n + 1), (n + 1, size), (0, n), (size, size + 5)):
                part = page.tokens(id, c.id, start, end)
                for k in whole.keys() - {"start", "text"}: assert part[k] == whole[k][start:end], (k, start, end)
    (fork,) = [c for c in told["calls"] if c["fork"]]
    assert fork["cause"] == "history_edited" and fork["cost"] > 0
    assert "to three" in fork["fork"]["now"] and "to three" not in fork["fork"]["then"]
    assert "🦊" in told["calls"][0]["reply"]


def test_why_and_health(run):
    """Would catch a rollout without its reason in words, and warnings that stay out or come without cause."""
    page = viewer.Viewer([run])
    (told,) = page.state()["runs"]
    assert "Harness crasher is failing: of its last 4 rollouts 4 harness_error." in [t for _, t in told["health"]], told
    why = page.rollout("run/rollouts/step-0000/say.bash.0")["why"]
    assert "reward 0" in why[0] and any("out.txt should hold hi" in t or "last words: 0" in t for t in why), why
    fine = [{"phase": "rl", "train/entropy": 1.0, "fidelity/gap_mean": 0.01, "fidelity/gap_pearson": 0.999,
             "memory/all_gb": 5.0, "groups/num": 8, "groups/zero_variance": 3, "reward/mean": 0.4, "train/ess": 1.}] * 8
    assert viewer.health({}, fine, []) == []
    for name, values, word in (
            ("fidelity/gap_mean", [0.01] * 7 + [0.08], "Fidelity"), ("fidelity/gap_pearson", [0.9] * 8, "Fidelity"),
            ("train/entropy", [1, 1, 1, .5, .4, .2, .1, .1], "collapsing"), ("train/ess", [0.2] * 8, "correction"),
            ("groups/zero_variance", [7] * 8, "all equal"), ("memory/all_gb", [5, 5, 6, 7, 8, 9, 10, 11], "leak"),
            ("sandboxes/alive", range(8), "leak"), ("train/entropy", [1, 1, 1, 2, 3, 4, 5, 6], "rising")):
        warned = viewer.health({}, [m | {name: float(v)} for m, v in zip(fine, values)], [])
        assert len(warned) == 1 and word in warned[0][1], (name, warned)
    for name, values in (("fidelity/gap_mean", [0.01] * 7 + [0.05]), ("train/entropy", [1, 1, 1, .5, .4, .3, .3, .3]),
                         ("groups/zero_variance", [5] * 8), ("memory/all_gb", [5, 9, 9, 10, 9, 10, 10, 10]),
                         ("sandboxes/alive", [0, 8, 9, 7, 9, 8, 9, 9]), ("train/entropy", [1, 1, 1, 2, 3, 3, 3, 3])):
        assert viewer.health({}, [m | {name: float(v)} for m, v in zip(fine, values)], []) == [], name
    for mean, which in ((0.1, "too hard"), (0.5, "some too easy, others too hard"), (0.9, "too easy")):
        ((_, text),) = viewer.health({}, [m | {"groups/zero_variance": 7, "reward/mean": mean} for m in fine], [])
        assert text.endswith(f"the tasks are {which}."), text
    row = {"outcome": "ok", "reward": 1.0, "started_s": 0.0, "forks": {}, "cost": 0, "tokens": 9, "calls": 1, "cut": 0}
    rows = [row | {"harness": "good"}] * 8 + [row | {"harness": "poor", "reward": 0.0}] * 8
    assert viewer.health({}, [], rows) == [(2, "Harness poor solves nothing in 8 rollouts, others do.")]
    odd = [x | {"outcome": "no_calls", "detail": d} for x, d in zip(rows, ("no module", "no disk", "no module"))]
    assert viewer.health({}, [], rows[:8] + odd) == [
        (2, "Harness good is failing: of its last 11 rollouts 3 no_calls (mostly: no module).")]
    for more, word in (({"cost": 5}, "forks dearly"), ({"forks": {"unknown": [1, 0]}}, "unknown cause"),
                       ({"cut": 1}, "cut at max_tokens"), ({"outcome": "overlong"}, "ran out of turns"),
                       ({"error": "line 3", "id": "x"}, "records are broken")):
        ((_, text),) = viewer.health({}, [], [x | more for x in rows[:8]])
        assert word in text, text


# ---- the server ----

@contextlib.contextmanager
def serve(*folders):
    with viewer.Server(viewer.Viewer(folders), "127.0.0.1", 0) as s:
        threading.Thread(target=s.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{s.server_address[1]}"
        s.shutdown()


@pytest.fixture(scope="module")
def server(run, tmp_path_factory):
    """-> the address of the page over the run and a second one, which grows."""
    other = tmp_path_factory.mktemp("second") / "grows"
    write(other / "rollouts" / "step-0000" / "a.jsonl", [call(0, [5] * 9, [6] * 3)])
    write(other / "rollouts" / "step-0002" / "overlap.jsonl",
          [call(1, [5, 6], [7, 8]), call(0, [5, 6, 7, 4], [3], "retry")], log="a größe 🦊 of its own")
    for i in range(700): write(other / "rollouts" / "step-0001" / f"many-{i}.jsonl", [], {"started_s": 5.0})
    with serve(run, other) as address: yield address, other


def test_what_the_server_gives_out(server, run):
    """Would catch an answer to another site's name for this address, a file outside the run, a script that the page's
    policy lets in from anywhere, a bad request that ends the server, and a default that is more than loopback."""
    address = server[0].removeprefix("http://")

    def get(path, **headers):
        c = http.client.HTTPConnection(address, timeout=30)
        c.request("GET", path, headers=headers)
        answer = c.getresponse()
        return answer.status, answer.headers, answer.read().decode()
    status, headers, body = get("/")
    assert status == 200 and "unsafe" not in headers["Content-Security-Policy"]
    assert headers["Content-Security-Policy"].startswith("default-src 'none'; script-src 'sha256-")
    assert not re.search(r"(src|href)=[\"']?(https?:)?//", body)
    assert get("/api/state", Host="evil.example")[0] == 403 and get("/", Host="evil.example:80")[0] == 403
    assert get("/", Host="localhost:9000")[0] == 200        # a forwarded port
    call = "/api/tokens?id=run/rollouts/step-0000/forked&call="
    for path, expected in ((call + "0", 200), (call + "77", 404), (call + "x", 400), ("/api/state?since=0", 200),
                           ("/x", 404), ("/api/rollout?id=run/../../etc/passwd", 404),
                           ("/api/rollout?id=run/config", 404),
                           ("/../viewer.py", 404), ("/api/rollout", 400)):
        assert get(path)[0] == expected, path
    assert viewer.parse(["x"]).host == "127.0.0.1"


# ---- the page ----

class Tab:
    """One page of a headless Chromium, over its DevTools protocol."""
    def __init__(self, folder):
        self.process = subprocess.Popen(
            [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
             "--remote-debugging-port=0", f"--user-data-dir={folder}", "about:blank"], stderr=subprocess.DEVNULL,
            start_new_session=True)                         # Debian's command is a script, with the browser below it
        file, self.num, self.problems = Path(folder, "DevToolsActivePort"), 0, []
        while not (file.is_file() and "\n" in file.read_text()):
            assert self.process.poll() is None, "Chromium ended"
            time.sleep(0.05)
        url, pages = f"http://127.0.0.1:{file.read_text().split()[0]}/json", []
        while not pages:
            assert self.process.poll() is None, "Chromium ended"
            with urllib.request.urlopen(url) as f: pages = [p for p in json.load(f) if p["type"] == "page"]
        self.socket = open_socket(pages[0]["webSocketDebuggerUrl"], max_size=None)
        for domain in ("Page", "Runtime", "Log"): self.send(f"{domain}.enable")
        self.size(1280, 900)

    def send(self, method, **params):
        self.num += 1
        self.socket.send(json.dumps({"id": self.num, "method": method, "params": params}))
        while (m := json.loads(self.socket.recv(timeout=120))).get("id") != self.num:
            if m["method"] == "Runtime.exceptionThrown" or m.get("params", {}).get("entry", {}).get("level") == "error":
                self.problems.append(m["params"])
        is_leaving = re.search("context|navigated", str(m.get("error")))       # asked of a page that just gave way
        assert "error" not in m or is_leaving, m
        return m.get("result", {})

    def size(self, width, height):
        self.send("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def js(self, expression):
        """Its value; all(selector) are elements, text(selector) is what the first shows."""
        helpers = "all = s => [...document.querySelectorAll(s)], text = s => document.querySelector(s)?.innerText ?? ''"
        result = self.send("Runtime.evaluate", expression=f"(() => {{ const {helpers}; return {expression} }})()",
                           awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in result, result
        return result.get("result", {}).get("value")

    def wait(self, expression):
        """Until the expression holds."""
        for _ in range(1200):
            if self.js(expression): return
            time.sleep(0.1)
        raise AssertionError(f"never so: {expression}; {self.problems}; {self.js('text(`body`)')[:2000]}")

    def open(self, url, until):
        self.send("Page.navigate", url="about:blank")
        self.send("Page.navigate", url=url)
        self.wait(until)

    def key(self, key):
        for kind in ("keyDown", "keyUp"): self.send("Input.dispatchKeyEvent", type=kind, key=key)

    def click(self, selector):
        self.wait(f"all(`{selector}`).length")
        self.js(f"all(`{selector}`)[0].dispatchEvent(new MouseEvent('click', {{bubbles: true, cancelable: true}}))")


@pytest.fixture(scope="module")
def tab(tmp_path_factory):
    if CHROMIUM is None and not os.environ.get("CI"): pytest.skip("no Chromium: bash setup.sh docker")
    tab = Tab(tmp_path_factory.mktemp("chromium"))
    yield tab
    tab.socket.close()
    os.killpg(tab.process.pid, signal.SIGKILL)
    tab.process.wait()


AT = "#view=rollout&id=run/rollouts/step-0000/"
ROWS = "all(`tbody tr`).length"


def test_overview_says_which_harness_fails(tab, server):
    """Would catch a page that shows nothing, that does not name the harness that fails, and links that lead nowhere."""
    tab.open(server[0] + "#view=overview&run=run", "all(`svg`).length > 3")
    shown = tab.js("text(`main`)")
    assert "crasher is failing" in shown and "harness_error 4" in shown and "pass@1" in shown
    assert tab.js("all(`tbody tr`)[0].cells[0].innerText") == "crasher"         # the worst stands first
    tab.click("a.tag[href*=crasher]")
    tab.wait(f"location.hash.includes('outcome%3Aharness_error') && {ROWS} === 4")
    assert tab.js("all(`header input`)[0].value") == "harness:crasher outcome:harness_error" and not tab.problems


def test_overview_says_which_kind_of_task_fails(tab, server):
    """Would catch kinds that mix in rollouts without a reward, take the record's order in the folder for that in time,
    or whose link shows others; rollouts that do not record their task's category (the first run's are real); and
    evaluations, or those of the bare model, that are counted as the rollouts trained on or another time's."""
    for i, reward in enumerate([0., 0., 1., None, 1.]):      # the later by name began earlier
        head = {"category": "grep", "task": f"grep-{i % 2}", "started_s": 2000. - i}
        write(server[1] / f"kind{i}.jsonl", [], head, {"reward": reward, "outcome": "ok" if i != 3 else "infra_error"})
    tab.open(server[0] + "#view=overview&run=grows", "text(`main`).includes('Kinds of tasks')")
    tab.wait("all(`a[href*='category%3Agrep']`).length === 1")
    row = "all(`a[href*='category%3Agrep']`)[0]?.closest('tr')"
    texts = "[...(%s?.cells ?? [])].map(c => c.innerText).slice(%s).join()"
    shows = lambda row, at, *cells: tab.wait(f"{texts % (row, at)} === '{','.join(cells)}'")    # when all files are seen
    shows(row, 0, "grep", "2", "4", "100.0 %", "0.0 %")
    tab.click("a[href*='category%3Agrep']")
    tab.wait(f"{ROWS} === 5")
    (server[1] / "metrics.jsonl").write_text("".join(
        json.dumps({"phase": "eval", "when": w, "set": "s", "harness": "h", "pass_rate": 0}) + "\n"
        for w in ("bare", "cold", "step-0004", "end")))
    for when, rewards in (("bare", "0000"), ("cold", "0100"), ("step-0004", "1111"), ("end", "1101")):
        for i, reward in enumerate(map(float, rewards)):
            head = {"category": "grep", "harness": "evaluated"}
            write(server[1] / f"rollouts/eval-{when}/e{i}.jsonl", [], head, {"reward": reward})
    tab.open(server[0] + "#view=overview&run=grows", "text(`main`).includes('evaluation end')")
    tab.wait("text(`main`).includes('evaluated')")
    shows(row, 0, "grep", "2", "4", "100.0 %", "0.0 %", "25.0 %", "75.0 %")
    shows("all(`a[href*='harness%3Aevaluated']`)[0]?.closest('tr')", "1, 3", "12", "66.7 %")
    shutil.rmtree(server[1] / "rollouts/eval-bare")
    for when in ("cold", "step-0004", "end"): shutil.rmtree(server[1] / f"rollouts/eval-{when}")
    (server[1] / "metrics.jsonl").unlink()
    for i in range(5): (server[1] / f"kind{i}.jsonl").unlink()
    tab.open(server[0] + "#view=overview&run=run", "all(`a[href*='category%3Asay']`).length === 1")
    assert not tab.problems


def test_grid_list_and_search(tab, server):
    """Would catch a cell without its rollouts, also where many tasks are shown by kind; a filter that shows others, or
    is lost at a rollout; a list that builds 700 rows at once, a search that does not find what a log or a reply holds,
    shows the first run's hits alone, or is lost by a reload, as is an order; and words of a filter that JavaScript's
    objects know."""
    tab.open(server[0] + "#view=grid&run=run", "all(`.cell .sq`).length === 9 && all(`.cell`).length === 8")
    tab.click(".sq[title^='say.bash.0']")
    tab.wait("location.hash.includes('say.bash.0') && all(`article`).length")
    tab.open(server[0] + "#view=list&run=grows", f"{ROWS} >= 200")
    assert tab.js(ROWS) <= 400                              # at most one more batch, come into view
    for i in range(41): write(server[1] / f"task{i}.jsonl", [], {"category": f"kind {i % 2}", "task": f"task{i}"})
    tab.open(server[0] + "#view=grid&run=grows", "all(`.grid a.name`).some(a => a.innerText.startsWith('kind'))")
    tab.wait("all(`.sq[title^='task']`).length === 41")
    tab.click("a.name[title='kind 0']")
    tab.wait(f"params().view === 'list' && {ROWS} === 21")
    tab.open(server[0] + "#view=grid&run=grows&by=task", "all(`a.name[title='task40']`).length === 1")
    for i in range(41): (server[1] / f"task{i}.jsonl").unlink()
    tab.open(server[0] + "#view=list&run=run&q=harness:bash+reward:0", f"{ROWS} === 1")
    tab.click("tbody a")
    tab.wait("params().view === 'rollout' && all(`article`).length")
    tab.key("l")
    tab.wait(f"params().view === 'list' && params().q === 'harness:bash reward:0' && {ROWS} === 1")
    for word, name in (("out.txt should hold", "say.bash.0"), ("größe 🦊", "forked")):
        tab.open(server[0] + "#view=list&run=run", f"{ROWS} > 5")
        for event in ("new Event('input')", "new KeyboardEvent('keydown', {key: 'Enter'})"):
            tab.js(f"(all(`header input`)[0].value = '{word}', all(`header input`)[0].dispatchEvent({event}))")
        tab.wait(f"text(`main`).includes('in logs or replies') && text(`tbody`).includes('{name}') && {ROWS} === 1")
    tab.open(server[0] + "#view=list&q=größe+🦊&deep=1", f"text(`main`).includes('logs or replies') && {ROWS} === 2")
    assert {"forked", "overlap"} == set(tab.js("all(`tbody a`).map(a => a.innerText)"))
    tab.open(server[0] + "#view=list&run=run&sort=tokens", f"{ROWS} > 5")
    assert tab.js("all(`tbody a`)[0].innerText") == "long"
    write(server[1] / "x.jsonl", [], end={"detail": "constructor:x"})
    tab.open(server[0] + "#view=list&q=constructor:x", f"{ROWS} === 1")
    (server[1] / "x.jsonl").unlink()
    tab.open(server[0] + "#view=list&run=none&q=x&deep=1", "text(`main`).includes('the search failed: no run none')")
    tab.problems.clear()                                    # the answer's status 404


def test_a_rollout_shows_its_fork_and_what_it_cost(tab, server):
    """Would catch a tree without the branch (also of a call whose parent began later), causes in one colour, a call
    whose text or tokens do not appear, colours that do not follow the data, and a deep link that opens another call."""
    tab.open(server[0] + AT + "forked", "all(`article svg g`).length >= 6 && text(`.tok`).includes('three')")
    fork = tab.js("text(`.fork`)")
    assert "history_edited" in fork and "to three" in fork and re.search(r"[1-9]\d* tokens were computed again", fork)
    assert "history_edited: " in tab.js("all(`article svg`)[0].textContent")
    assert "Count." in tab.js("all(`h2`).find(e => e.innerText === 'Asked').nextSibling.innerText")
    tab.open(server[0] + AT + "forked&mode=tokens&color=gap", "text(`.panel`).includes('they have no gap')")
    tab.open(server[0] + AT + "forked", "all(`article svg g`).length >= 6")
    tab.click("article svg g[data-call='0']")
    tab.wait("location.hash.includes('call=0') && text(`.tok`).includes('größe 🦊')")
    for color, seen in (("advantage", "26, 154, 108, 0.5"), ("gap", "217, 72, 15, 0.5"), ("ratio", "26, 154, 108, 0.5"),
                        ("mask", "59, 130, 196, 0.6")):
        tab.open(f"{server[0]}{AT}say.bash.1&call=0&mode=tokens&color={color}", "all(`.tok .sampled`).length > 3")
        assert set(tab.js("all(`.tok .sampled`).map(e => e.style.background)")) == {f"rgba({seen})"}, color
    assert "advantage 1," in tab.js("all(`.tok .sampled`)[0].title")
    causes = "history_edited compaction nonce retokenised retry side subagent system_changed thinking_dropped " \
             "tool_call_rewritten tools_changed unknown volatile_tail".split()
    colors = np.array([[int(c[i:i + 2], 16) for i in (1, 3, 5)] for c in tab.js(f"{causes}.map(causeColor)")])
    assert min(np.linalg.norm(a - b) for i, a in enumerate(colors) for b in colors[:i]) > 60
    tab.key("j")
    tab.wait("location.hash.includes('call=1') && text(`.panel h2`).startsWith('Call 1')")
    tab.key("t")
    tab.wait("location.hash.includes('mode=text')")
    tab.key("s")
    tab.wait("all(`article`).length === 2")
    whys = " ".join(tab.js("all(`.why`).map(e => e.innerText)"))
    assert "reward 0" in whys and "reward 1" in whys
    beside = "&with=" + AT.removeprefix("#view=rollout&id=") + "say.bash.0"
    tab.open(f"{server[0]}{AT}say.bash.1&call=1{beside}&call2=0", "all(`.panel`).length === 2")
    assert [t[:6] for t in tab.js("all(`.panel h2`).map(e => e.innerText)")] == ["Call 1", "Call 0"]
    tab.open(server[0] + "#view=rollout&id=grows/rollouts/step-0002/overlap", "all(`article svg g`).length >= 4")
    assert tab.js("all(`article svg path`).length") == 1 and "retry" in tab.js("all(`article svg`)[0].textContent")
    assert not tab.problems


def test_keys(tab, server):
    """Would catch a key of the page's last line that does nothing, or something else."""
    at = lambda **q: tab.wait(" && ".join(["drawn === location.hash", *(f"params().{k} === '{q[k]}'" for k in q)]))
    tab.open(server[0] + "#view=overview&run=run", "all(`svg`).length > 3")
    tab.key("g")
    at(view="grid", run="run")
    tab.key("l")
    at(view="list", run="run")
    names = tab.js("all(`tbody a`).map(a => a.innerText)")
    for key, i in (("j", 0), ("j", 1), ("j", 2), ("k", 1)):
        tab.key(key)
        assert tab.js("document.activeElement.innerText") == names[i]
    tab.key("/")
    assert tab.js("document.activeElement === all(`header input`)[0]")
    tab.js("(all(`header input`)[0].value = 'kept', 0)")
    tab.key("Escape")
    assert tab.js("all(`header input`)[0].value") == "kept", "the list is filtered by it"
    tab.js("(all(`header input`)[0].value = '', 0)")
    tab.key("g")
    at(view="grid")
    for key, i in (("ArrowRight", 0), ("ArrowRight", 1), ("ArrowLeft", 0)):
        tab.key(key)
        assert tab.js(f"document.activeElement === all(`.grid .sq`)[{i}]"), key
    tab.key("j")
    assert tab.js("document.activeElement === all(`a.name`)[0]")
    tab.key("o")
    at(view="overview")
    me, other = (AT.removeprefix("#view=rollout&id=") + f"say.bash.{i}" for i in range(2))
    tab.open(server[0] + AT + "say.bash.0&call=0", "all(`article`).length")
    for key, q in (("j", {"call": 1}), ("k", {"call": 0}), ("n", {"id": other}), ("n", {"id": other}),
                   ("p", {"id": me}), ("c", {"mode": "tokens", "color": "gap"}), ("c", {"color": "advantage"}),
                   ("t", {"mode": "text"}), ("t", {"mode": "tokens"})):
        tab.key(key)
        at(**q)
    tab.wait("all(`.tok [title]`).length")
    for key, i in (("ArrowRight", 0), ("ArrowRight", 1), ("ArrowLeft", 0)):
        tab.key(key)
        assert tab.js(f"document.activeElement === all(`.tok [title]`)[{i}]"), key
        assert tab.js("text(`.panel .key[aria-live]`) === document.activeElement.title")
    assert not tab.problems


def test_a_page_grows_with_its_run(tab, server):
    """Would catch a page that shows a rollout, its next call, its end, its group's or its advantages only after a
    reload, keeps one that was removed, or throws the reader off the page, the row, or the place in a call's text, when
    something else changes."""
    folder = server[1] / "rollouts" / "step-0000"
    tab.open(server[0] + "#view=list&run=grows&q=step-0000", f"{ROWS} === 1")
    tab.key("j")
    path = write(folder / "late.jsonl", [call(0, [5] * 9, [6] * 3), call(1, [5] * 9 + [6] * 3 + [7], [8])])
    whole = path.read_text().splitlines(keepends=True)
    path.write_text("".join(whole[:2]))
    tab.wait(f"{ROWS} === 2 && text(`main`).includes('unfinished')")
    assert tab.js("document.activeElement.innerText") == "a"
    tab.open(server[0] + "#view=rollout&id=grows/rollouts/step-0000/late", "all(`.calls tbody tr`).length === 1")
    with open(path, "a") as f: f.write(whole[2])
    tab.wait("all(`.calls tbody tr`).length === 2")
    tab.js("window.mark = all(`article`)[0], 0")
    write(folder / "another.jsonl", [], {"task": "of another group"})
    tab.wait("S.runs.get('grows').rows.has('rollouts/step-0000/another')")
    assert tab.js("window.mark.isConnected")
    tab.js("window.mark = all(`.panel`)[0], 0")
    peer = write(folder / "peer.jsonl", [], end={"reward": 1.0})
    tab.wait("text(`article .key`) && all(`article .sq[title^=peer]`).length")
    peer.unlink()
    tab.wait("!all(`article .sq[title^=peer]`).length")
    assert tab.js("window.mark.isConnected")                # what was unfolded in it stays so
    with open(path, "a") as f: f.write("".join(whole[3:]))
    tab.wait("text(`.why`).includes('reward 0')")
    record, column = tree.read(path), np.full(4, 0.125)
    trees = [tree.build(record)]
    train.save_tokens(server[1] / "tokens" / "step-0000.npz", [record], train.make_batch(trees, 0), column > 0,
                      adv=column, logp_old=column, logp=column)
    (server[1] / "metrics.jsonl").write_text('{"phase": "rl", "step": 0}\n')
    tab.wait("text(`.calls tbody`).includes('0.125')")
    tab.js("location.hash = 'view=list&run=grows&q=step-0000'")
    tab.wait(f"{ROWS} === 3")
    (folder / "another.jsonl").unlink()
    tab.wait(f"{ROWS} === 2")
    num = "all(`.sq`).length - S.runs.get('grows').rows.size"
    tab.open(server[0] + "#view=grid&run=grows", f"all(`.sq`).length > 700 && {num} === 0")
    tab.key("ArrowRight")
    write(folder / "another.jsonl", [], {"harness": "new"}, {"outcome": "harness_error"})
    tab.wait(f"text(`main`).includes('new:') && {num} === 0")
    assert tab.js("document.activeElement === all(`.sq`)[0]")
    tab.open(server[0] + "#view=overview&run=grows", "all(`tbody tr`).length === 2")
    tab.key("j")
    write(folder / "third.jsonl", [], {"harness": "third"}, {"outcome": "infra_error", "reward": None})
    with open(server[1] / "metrics.jsonl", "a") as f:
        f.write("".join(json.dumps({"phase": "rl", "step": i, "train/entropy": 1 - i / 6}) + "\n" for i in range(1, 7)))
    tab.wait("text(`main`).includes('third') && text(`.health`).includes('is collapsing') && all(`figure`).length")
    assert tab.js("document.activeElement.innerText") == "new"
    for file in ("another", "third"): (folder / f"{file}.jsonl").unlink()
    assert not tab.problems


def test_a_hostile_rollout_stays_text(tab, server, run, tmp_path):
    """Would catch text of a prompt, reply, log, task, harness or detail that becomes markup or runs, in any view, in a
    live page or an exported one, which also must not need anything outside itself."""
    file = tmp_path / "out.html"
    viewer.export(viewer.Viewer([run]), file, 40)
    hostile = AT.removeprefix("#") + "hostile"
    for base in (server[0], f"file://{file}"):
        for view in ("view=overview", "view=grid", "view=list", hostile, hostile + "&mode=tokens&call=0",
                     hostile + "&with=run/rollouts/step-0000/forked", "view=<img src=x onerror=pwned=1>&q=" + NASTY):
            tab.open(f"{base}#{view}", "all(`main > *`).length")
            if hostile in view: tab.wait("all(`.tok`)[0]?.innerText.includes('pwned = 1')")
            assert tab.js("window.pwned === undefined && !all(`img, #b, main script, iframe, [onload]`).length"), view
    assert not tab.problems
    tab.open(f"file://{file}{AT}forked", "text(`.fork`).includes('to three')")
    assert "exported" in tab.js("text(`#note`)")
    tab.open(f"file://{file}#view=list&q=hi&deep=1", "text(`main`).includes('the search failed: this exported page')")
    assert not re.search(r"(src|href)=[\"']?https?:", file.read_text())


def test_hostile_names_stay_text(tab, tmp_path):
    """Would catch a name that becomes markup or a style, or takes a view down: of a run, folder, file, task, harness,
    outcome, kind, cause, finish, model, metric, evaluation or flag, as markup and as what JavaScript's objects have."""
    name = NASTY.replace("/", "")
    for odd in (NASTY, "__proto__", "constructor", "red;background:url(http://x/)"):
        root, file = tmp_path / str(len(odd)) / name[:60], tmp_path / "out.html"
        calls = [call(0, [5, 6], [7]), call(1, [5, 4], [3], odd)]
        for c in calls: c.kind = c.finish = odd
        folder = root / "rollouts" / f"step-0000{name[:80]}"
        for i in range(2):
            write(folder / f"{name[:80]}.{i}.jsonl", calls, {"task": odd, "harness": odd, "model": odd, odd: odd},
                  {"outcome": odd, "reward": 0.0, "detail": odd, "seconds": {odd: 1.0},
                   "verifier_at": len(odd.encode()) + 1}, f"{odd}\n=== verifier\n{odd}")
        (root / "config.json").write_text(json.dumps({"algo": odd, "model": odd, "steps": odd, odd: odd}))
        rows = [{"phase": "rl", "step": i, **{f"{group}/{odd}": 1.0 + i for group in ("outcome", "train", odd)},
                 f"forks/{odd}_tokens": 5} for i in range(2)]
        rows.append({"phase": "eval", "when": odd, "set": odd, "harness": odd, "pass_rate": 0.5, f"pass@{odd}": 1})
        (root / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in [*rows, {"phase": odd}]))
        page = viewer.Viewer([root])
        viewer.export(page, file, 40)
        me, other = (f"{next(iter(page.runs))}/{row['id']}" for row in page.state()["runs"][0]["rows"])
        with serve(root) as address:
            for base in (address, f"file://{file}"):
                for q in ({"view": "overview"}, {"view": "grid"}, {"view": "list"},
                          {"view": "list", "q": f"task:{odd}"},
                          {"view": "rollout", "id": me, "with": other, "mode": "tokens", "color": odd},
                          {"view": odd, "sort": odd}, {"view": "rollout", "id": odd}):
                    tab.open(f"{base}#{urlencode(q)}", "all(`main > *`).length && drawn === location.hash")
                    if q["view"] == "overview": tab.js("(all(`#all`)[0].open = true, 0)")
                    if "with" in q: tab.wait("all(`article`).length === 2 && all(`.fork`).length")
                    elif "sort" not in q and "id" not in q: assert odd in tab.js("text(`main`)"), (q, odd)
                    tab.wait("window.pwned === undefined && !all(`img, #b, main script, iframe, [onload]`).length")
            tab.problems = [x for x in tab.problems if "404" not in str(x)]         # the last two, to the live page
            assert not tab.problems


def test_a_long_rollout_is_drawn_in_part(tab, server):
    """Would catch a page that lays out 100,000 tokens at once, and the rest of them out of reach."""
    tab.open(server[0] + AT + "long&mode=tokens", "text(`.tok`).includes('97,000 more tokens')")
    assert 1000 < tab.js("all(`.tok span`).length") < 5000 and not tab.problems
    tab.click(".tok button")
    tab.wait("text(`.tok`).includes('94,000 more')")


def test_two_thousand_rollouts_of_fifty_calls(tab, tmp_path):
    """Would catch a page that asks for every rollout, or for all of a call's tokens; one that builds 2,000 rows, or is
    sent them all at each poll; and a server that parses calls for a list, or reads again what has not grown."""
    history, calls = [5] * 9, []
    for i in range(50):
        calls.append(call(i, history + [4] * 20, [6] * 20))
        history = calls[-1].ids
    text, root = write(tmp_path / "one.jsonl", calls).read_text(), tmp_path / "run"
    for i in range(2000):
        path = root / "rollouts" / f"step-{i // 64:04}" / f"t{i // 8 % 8}.h.{i % 8}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text.replace('"task": "t"', f'"task": "t{i // 8 % 8}"', 1))
    (root / "metrics.jsonl").write_text('{"phase": "rl", "step": 0, "reward/mean": 0.5}\n')
    read = lambda: int(re.match(r"rchar: (\d+)", Path("/proc/self/io").read_text())[1])
    before, parsed = read(), viewer.load.cache_info().misses
    page = viewer.Viewer([root])
    assert read() - before < 1.5 * 2000 * len(text)
    first, page.checked, before = page.state(), 0., read()
    with open(path, "a") as f: f.write('{"type": "kind", "id": 49, "kind": "compaction"}\n')
    news = page.state(first["gen"], first["boot"])
    assert [x["id"] for x in news["runs"][0]["rows"]] == ["rollouts/step-0031/t1.h.7"]
    assert read() - before < 3 * len(text) and len(json.dumps(news)) < 5000
    with serve(root) as address:
        asked = ("performance.getEntriesByType('resource').map(x => [new URL(x.name).pathname, x.transferSize])"
                 ".filter(x => x[0] !== '/favicon.ico')")
        tab.open(address + "#view=overview", "text(`main`).includes('2000 rollouts') && all(`figure`).length")
        tab.wait(f"{asked}.length > 1")
        (name, size), *later = tab.js(asked)
        assert name == "/api/state" and size < 2000 * 800 and all(x[0] == name and x[1] < 1000 for x in later), later
        assert tab.js("all(`*`).length") < 1000
        tab.open(address + "#view=grid", "all(`.grid .sq`).length === 2000")
        assert tab.js("all(`*`).length") < 5000
        tab.open(address + "#view=list", f"{ROWS} >= 200")
        assert tab.js(ROWS) <= 400 and viewer.load.cache_info().misses == parsed
        tab.click("tbody a")
        tab.wait("text(`.tok`).length > 50 && all(`.calls tr`).length === 51")
        told = [x for x in tab.js(asked) if x[0] != "/api/state"]
        assert [x[0] for x in told] == ["/api/rollout", "/api/tokens"] and sum(x[1] for x in told) < 200_000, told
        assert viewer.load.cache_info().misses == parsed + 1 and not tab.problems


def test_an_export_answers_as_the_server_does(tab, run, tmp_path):
    """Would catch a long call whose end an exported page lacks, and tokens before a fork that it cannot show."""
    write(tmp_path / "chain" / "a.jsonl", [call(i, [5] * (3 + 2 * i), [5, 6][:1 + i % 2]) for i in range(9)])
    page, file = viewer.Viewer([run, tmp_path / "chain"]), tmp_path / "out.html"
    viewer.export(page, file, 40)
    tab.open(f"file://{file}#view=overview", "all(`main > *`).length")
    chain, forked, long = "chain/a", "run/rollouts/step-0000/forked", "run/rollouts/step-0000/long"
    for id, num, ranges in ((chain, 9, [(0, 99), (2, 7), (8, 9)]), (forked, 3, [(0, 10), (0, 999), (40, 60)]),
                            (long, 1, [(0, 3000), (98_000, 101_000)])):
        for i, (start, end) in [(i, r) for i in range(num) for r in ranges]:
            told = tab.js(f"api('tokens', {{id: '{id}', call: {i}, start: {start}, end: {end}}})")
            assert told == page.tokens(id, i, start, end), (id, i, start, end)
    tab.open(f"file://{file}{AT}forked&call=2", "text(`.tok button`).includes('show')")
    tab.click(".tok button")
    tab.wait("text(`.tok`).includes('Count')")
    assert not tab.problems


def test_narrow_screens(tab, server, run, tmp_path):
    """Would catch a page that is wider than a telephone, in any view, or has a control beside it; a mean in the grid
    that loses digits at the edge of its name; and an axis that has no room for a small number or a large one."""
    file = tmp_path / "out.html"
    viewer.export(viewer.Viewer([run]), file, 40)
    views = {"overview": "figure", "grid": ".sq", "list": "tbody a", "list&q=größe&deep=1": "tbody a"}
    rollouts = {"forked": ".fork", "hostile": ".tok", "long": ".tok button", "forked&mode=tokens": "select",
                "say.bash.0": ".key", "say.bash.0&mode=tokens&with=run/rollouts/step-0000/say.bash.1": "article + article"}
    views = {f"#view={view}&run=run": part for view, part in views.items()} | {AT + k: v for k, v in rollouts.items()}
    tab.size(360, 740)
    try:
        for base in (server[0], f"file://{file}"):
            for view, part in views.items():
                if "deep" in view and base != server[0]: continue
                tab.open(base + view, f"all(`main {part}`).length")
                assert tab.js("document.documentElement.scrollWidth") <= 360, view
                beside = "e => e.getBoundingClientRect().right > 360 && !e.closest('.scroll')"
                assert not tab.js(f"all('a, button, input, select').filter({beside}).map(e => e.outerHTML)"), view
                assert tab.js("all('.name').every(e => e.scrollWidth <= e.clientWidth)"), view
        axis = tab.js("[...chart('', [{points: [[1, 3.2e-5], [2, 1234567]]}]).querySelectorAll('[text-anchor=end]')]"
                      ".map(e => e.textContent)")
        assert axis[:3] == ["0", "617K", "1.2M"] and tab.js("num(0.0000321, 2)") == "3.2e-5", axis
    finally: tab.size(1280, 900)


def test_command(run, tmp_path):
    """Would catch a command that does not say where it listens, or answers a wrong folder with a traceback."""
    words = [sys.executable, str(Path(viewer.__file__))]
    with subprocess.Popen([*words, str(run), "--port", "0"], stdout=subprocess.PIPE, text=True) as process:
        line = process.stdout.readline()
        assert re.match(r"http://127\.0\.0\.1:\d+/ .*loopback", line), line
        with urllib.request.urlopen(line.split()[0]) as f: assert b"harness-rl" in f.read()
        process.terminate()
    result = subprocess.run([*words, str(tmp_path / "none")], capture_output=True, text=True)
    assert result.returncode == 2 and "no such folder" in result.stderr and "Traceback" not in result.stderr
