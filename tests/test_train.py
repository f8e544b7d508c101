"""train.py end to end on a tiny random model: real engine, sandboxes, harness and updates."""
import dataclasses
import datetime
import functools
import itertools
import json
import math
import multiprocessing
import os
import queue
import random
import re
import resource
import shutil
import signal
import struct
import subprocess
import sys
import time
import traceback
import types

import numpy as np
import psutil
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from transformers import AutoModelForCausalLM, AutoTokenizer

from conftest import ROOT, make_task
import algos
import harnesses
import rollout
import train as loop
import tree
import viewer

# a tiny model solves nothing, and equal rewards give no update
COIN = "echo $((RANDOM % 2)) > /logs/verifier/reward.txt"


@pytest.fixture(scope="module")
def tasks(tmp_path_factory, bubblewrap):
    """Four tasks that a coin decides, whatever the policy did. They ask for the same and are solved differently, so a
    policy that has learnt the solutions still samples: one that is certain of its tokens has no gradient."""
    folder = tmp_path_factory.mktemp("coins")
    for i in range(4):
        make_task(folder / f"coin-{i}", instruction="Write a digit.", solution=f"echo {i} > out.txt", test=COIN)
    return folder


def command(tiny, tasks, out, *flags, launcher=(sys.executable,)):
    small = {"model": tiny, "tasks": tasks, "eval_tasks": "", "out": out, "sandbox": "bubblewrap", "dtype": "float32",
             "max_model_len": 256, "max_tokens": 8, "steps": 2, "warmup_steps": 0, "tasks_per_step": 2, "group_size": 4,
             "num_parallel": 8, "engine_args": "--enforce-eager"}
    return [*map(str, launcher), str(ROOT / "train.py"), *(f"--{k}={v}" for k, v in small.items()), *flags]


def train(*args, **kw):
    """-> exit status, stderr, the lines of metrics.jsonl."""
    result = subprocess.run(command(*args, **kw), cwd=ROOT, capture_output=True, text=True, timeout=600)
    metrics = args[2] / "metrics.jsonl"
    rows = [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else []
    unknown = {k for k in set().union(*rows) if not any(re.fullmatch(p, k) for p in readme_metrics().values())}
    assert not unknown, f"README's table of metrics lacks {unknown}"
    return result.returncode, result.stderr, rows


@functools.cache
def readme_metrics():
    """Of README's table of metrics: name -> pattern of what is written, capitals standing for what they may be."""
    table = (ROOT / "README.md").read_text().partition("## Metrics\n")[2].partition("\n\nThe page")[0]
    stand_for = {"HARNESS": "|".join(harnesses.names()), "NAME": "|".join(filter(None, viewer.OUTCOMES)), "K": r"\d+",
                 "CAUSE": "[a-z_]+(?<!_tokens)", "PART": "gap|interior|boundary"}
    names = []
    for cell in re.findall(r"^\| (`.*?) \|", table, re.M):
        before = ""                                         # `a/b_c, _d, e` names a/b_c, a/b_d and a/e
        for item in ", ".join(re.findall("`(.*?)`", cell)).split(", "):
            before = before[:before.rfind("_")] + item if item[0] == "_" else before[:before.rfind("/") + 1] * (
                "/" not in item) + item
            names.append(before)
    return {n: re.sub("[A-Z]+", lambda m: f"({stand_for[m[0]]})", n) for n in names}


# Metrics of README that few runs write, by who is seen to; those of a GPU and of a model that cannot be packed by none.
RARE = {"canary": "when set harness num num_tasks num_judged solved outcomes pass_rate low high pass@K pass@K_low "
                  "pass@K_high",
        "ppo": "train/kl_ref packing/logp_error packing/gradient_error train/value_loss train/value_grad_norm "
               "train/value_clipped train/return train/explained_variance",
        "carry": "groups/carried groups/unfinished fidelity/stale_gap_mean",
        "harnesses": "reward/HARNESS outcome/HARNESS/NAME fidelity/HARNESS/PART_mean fidelity/HARNESS/PART_p99 "
                     "fidelity/HARNESS/PART_max fidelity/HARNESS/PART_pearson fidelity/HARNESS/PART_ess",
        "forks": "forks/CAUSE forks/CAUSE_tokens",
        "none": "why memory/gpu_rollout_gb memory/gpu_train_gb memory/gpu_weights_gb"}


def lacking(rows, names):
    """Those of README's metrics that no row holds."""
    keys = set().union(*rows)
    return [n for n in names if not any(re.fullmatch(readme_metrics()[n], k) for k in keys)]


def alive(marker):
    """Processes whose environment holds the marker."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try: found += [pid] if marker.encode() in open(f"/proc/{pid}/environ", "rb").read() else []
        except OSError: pass
    return found


def weights(folder):
    from safetensors.torch import load_file
    return load_file(f"{folder}/model.safetensors")


@pytest.fixture(scope="module")
def learnt(tiny, tasks, tmp_path_factory):
    """-> run folder and metrics of a cold start, after which the tiny model says DONE and so is rewarded at times,
    and two RL steps."""
    out = tmp_path_factory.mktemp("learnt") / "run"
    status, stderr, rows = train(tiny, tasks, out, "--warmup_steps=40", "--warmup_rollouts=4", "--warmup_lr=1e-2",
                                 "--lr=1e-4", "--num_epochs=2", "--group_size=8", "--max_tokens=16")
    assert status == 0, stderr[-3000:]
    return out, rows


def test_the_page_shows_what_training_made_of_each_token(learnt):
    """Would catch saved tokens that stand at another call or place than they were sampled at (the gap over all of them
    is then not the one that the step measured), advantages of other rollouts, and a ratio that is not of the update."""
    out, rows = learnt
    page, num = viewer.Viewer([out]), 0
    for m in (m for m in rows if m["phase"] == "rl" and "fidelity/gap_mean" in m):
        gaps, changes, adv = [], [], {}
        for path in sorted((out / "rollouts" / f"step-{m['step']:04}").glob("*.jsonl")):
            record, id = tree.read(path), f"run/rollouts/step-{m['step']:04}/{path.stem}"
            for c in record.calls:
                t = page.tokens(id, c.id, len(c.prompt_ids), len(c.ids))
                if not any(t["mask"]): continue             # cut off by a time limit: not trained
                gaps += [abs(a - b) for a, b in zip(t["old"], t["logp"]) if a is not None]
                changes += [abs(a - b) for a, b in zip(t["old"], t["now"]) if a is not None]
                adv.setdefault((record.task, record.reward), set()).update(t["adv"])
        assert np.mean(gaps) == pytest.approx(m["fidelity/gap_mean"], rel=1e-3) and max(changes) > 1e-4, m
        assert all(len(x) == 1 and (max(x) > 0) == (reward > 0 and max(x) != 0) for (_, reward), x in adv.items()), adv
        num += len(gaps)
    assert num > 0


def test_readme_documents_every_metric(learnt):
    """Would catch a metric of README's table that no run writes any more, or under another name. (One that README
    lacks fails the test whose run writes it.)"""
    rare = " ".join(RARE.values()).split()
    assert len(readme_metrics()) > 80 and not set(rare) - readme_metrics().keys()
    assert not lacking(learnt[1], readme_metrics().keys() - rare)


def test_metrics_of_a_mixed_run():
    """Would catch rewards, outcomes and gaps of one harness that stand under another's name, or under none that README
    knows."""
    names, more = ["bash", "pi"], [[7, 8, 9], [9, 8, 7], [8, 7, 9]]
    rollouts = [dataclasses.replace(forked(r, more), harness=h, outcome=o)
                for h, r, o in (("bash", 1., "ok"), ("pi", 0., "timeout"), ("bash", 0., "ok"))]
    for c in (c for r in rollouts for c in r.calls): c.received_s, c.finished_s = 0., 1.
    m = loop.step_metrics(rollouts, rollouts, torch.tensor([1., 0., 0.]), names)
    assert (m["reward/bash"], m["reward/pi"], m["outcome/bash/ok"], m["outcome/pi/timeout"]) == (0.5, 0., 2, 1)
    batch = loop.make_batch([tree.build(r) for r in rollouts], None)
    batch.logp_rollout = torch.linspace(-3, -.1, len(batch.rollout))
    logp = batch.logp_rollout - 0.05 * (batch.rollout == 1)
    m |= loop.fidelity(batch, logp, torch.ones(len(logp), dtype=torch.bool), rollouts, 0.1)
    assert m["fidelity/bash/gap_max"] == 0 and m["fidelity/pi/boundary_mean"] == pytest.approx(0.05, rel=1e-4)
    assert not lacking([m], RARE["harnesses"].split())


def test_cold_start_rl_and_checkpoint(tiny, learnt):
    """Would catch a loop that does not learn its demonstrations, weights that never reach the engine (the gap after
    the updates), a fidelity that is not measured, and a checkpoint that is not the trained model."""
    out, rows = learnt
    nll = [r["train/nll"] for r in rows if r["phase"] == "warmup"]
    assert len(nll) == 40 and nll[-1] < nll[0] / 2, nll
    rl = [r for r in rows if r["phase"] == "rl"]
    updated = [r for r in rl if "fidelity/gap_mean" in r]
    assert len(rl) == 2 and updated, rl
    for r in updated:
        assert r["fidelity/gap_mean"] < 1e-3 and r["fidelity/missing_tokens"] == r["fidelity/older_tokens"] == 0, r
        assert 0 < r["train/grad_norm"] < float("inf") and r["train/kl"] > 0      # no sum that cancels, as ratios' may
    before, after = weights(tiny), weights(out / "checkpoint")
    assert before.keys() == after.keys() and all(before[k].shape == after[k].shape for k in before)
    assert any(not before[k].equal(after[k]) for k in before)
    loaded = AutoModelForCausalLM.from_pretrained(out / "checkpoint").state_dict()
    assert all(loaded[k].equal(v) for k, v in after.items())
    record = next((out / "rollouts").glob("step-0001/*.jsonl")).read_text().splitlines()
    assert json.loads(record[1])["versions"][0][0] == 2, "sampled by the weights of the cold start and one step"


def test_an_update_favours_what_was_rewarded(tiny, tasks, launch, tmp_path):
    """Would catch a wrong sign, advantages given to other rollouts than their own, or log-probabilities of other
    tokens: one step from fresh Adam, sum over rollouts of advantage x mean logp must have risen (before: the engine's
    own word for it). To first order Adam's first step cannot lower it; a later one, with the last batch's momentum, can.
    A policy that is untrained, so that all replies differ, and rewards by hand, so that no coin makes them equal."""
    flags = "--steps=1", "--lr=1e-4", "--lr_warmup_steps=1", "--group_size=8", "--max_tokens=16"
    start = tmp_path / "start"
    status, stderr, rows = train(tiny, tasks, start, *flags)
    assert status == 0, stderr[-3000:]
    paths = sorted((start / "rollouts/step-0000").glob("*.jsonl"))
    for i, path in enumerate(paths):
        *lines, end = path.read_text().splitlines()
        end = json.dumps(json.loads(end) | {"outcome": "ok", "reward": float(i % 3 == 0)})
        path.write_text("\n".join([*lines, end, ""]))
    rank, = launch(command(tiny, tasks, tmp_path / "run", *flags, f"--rollouts={start}"), None)
    rank.join(300)
    assert rank.exitcode == 0 and len(paths) == 16
    rollouts = [tree.read(path) for path in paths]
    adv = algos.group_advantages(torch.tensor([r.reward for r in rollouts]), torch.arange(16) // 8)
    model, gain = AutoModelForCausalLM.from_pretrained(tmp_path / "run/checkpoint", dtype=torch.float32), []
    for t in map(tree.build, rollouts):
        forest = tree.pack(t.paths, t.trained)
        with torch.no_grad(): after = tree.logprobs(model, forest)[torch.cat(forest.where)]
        gain.append((after - torch.cat([torch.tensor(x) for x in t.logp_rollout])).mean().item())
    assert (adv * torch.tensor(gain)).sum() > 0.1, (adv, gain)


RECIPES = {
    "ppo": ["--value_warmup_steps=1", "--value_lr=1e-3", "--lam=0.95", "--kl_reward=0.01", "--loss_mean=token"],
    "gspo": ["--correction=geometric+tis", "--num_epochs=2", "--kl_loss=0.01", "--overlong_buffer=64"]}


@pytest.mark.parametrize("algo", RECIPES)
def test_other_algorithms(learnt, tasks, tmp_path, algo):
    """Would catch an algorithm whose parts do not fit the loop: a critic or a reference that FSDP cannot gather, a
    critic that stays as it was or lets the policy move in its warm-up, a reference that is not the policy of the start,
    half a rollout in a micro-batch, sums that reach no metric, and best weights that are the last, or another
    evaluation's. The packing checks itself before the first update."""
    flags = ("--check_packing", "--max_resample=1", "--steps=3", "--lr=1e-3", "--micro_batch_tokens=512",
             "--eval_every=1", "--eval_n=2", f"--eval_tasks={tasks}", "--save_every=1", "--keep_saved=3")
    status, stderr, rows = train(learnt[0] / "checkpoint", tasks, tmp_path / "run", f"--algo={algo}", *flags,
                                 *RECIPES[algo])
    assert status == 0, stderr[-3000:]
    rl = [r for r in rows if r["phase"] == "rl"]
    moved = [r for r in rl if "train/grad_norm" in r]
    assert len(rl) == 3 and moved and max(r["packing/gradient_error"] for r in rl if "packing/logp_error" in r) < 1e-4
    for r in rl: assert 1 <= r["groups/rounds"] <= 2 and r["groups/dropped"] < r["groups/num"] or r not in moved, r
    for r in moved:
        assert np.isfinite([r["train/loss"], r["train/kl_ref"]]).all() and 0 < r["train/ess"] < 1 + 1e-6, r
    if algo == "gspo":                                      # the second epoch: what was favoured is likelier by now
        assert moved[0]["train/kl"] > 0 and max(r["train/clipped_high"] + r["train/clipped_low"] for r in moved) > 0
    if algo == "ppo":
        assert moved[0]["train/kl_ref"] < 1e-6
        critic = [r for r in rl if "train/value_loss" in r]
        assert rl[0] not in moved and len(critic) > 1, "in its warm-up the critic alone learns"
        assert all(np.isfinite(r["train/value_loss"]) and r["train/value_grad_norm"] > 0 for r in critic)
        known = [abs(r["train/explained_variance"]) for r in critic]
        assert known[0] < 1e-6 < known[1], "a critic that is 0 at first has not moved"
        values, policy = weights(tmp_path / "run/checkpoint/critic"), weights(tmp_path / "run/checkpoint")
        assert values["lm_head.weight"].shape == (1, 64) and values["lm_head.weight"].any()
        assert all(values[k].shape == v.shape and not values[k].equal(v) for k, v in policy.items() if "proj" in k)
        again = loop.Critic(AutoModelForCausalLM.from_pretrained(tmp_path / "run/checkpoint"))
        again.model.load_state_dict(values)
        assert not lacking(rows, RARE["ppo"].split())
    before, after = weights(learnt[0] / "checkpoint"), weights(tmp_path / "run" / "checkpoint")
    assert any(not before[k].equal(after[k]) for k in before)
    rates = [r["pass_rate"] for r in rows if r["phase"] == "eval" and r["when"] != "bare"]      # of a coin
    best = torch.cat([v.flatten() for _, v in sorted(weights(tmp_path / "run/best").items())])
    assert len(rates) == 3 and saved(tmp_path / "run", rates.index(max(rates)) + 1, "").float().equal(best), rates


def test_rewards_by_call_are_trained_on(learnt, bubblewrap, tmp_path):
    """Would catch rewards of calls that end in the record: every rollout's own reward is 0, and only what the verifier
    pays first calls can move the weights."""
    paid = """echo '{"reward": 0, "call_0": 0.1'$RANDOM'}' > /logs/verifier/reward.json"""
    for i in range(2): make_task(tmp_path / f"tasks/paid-{i}", instruction=f"Write {i} to out.txt.", test=paid)
    status, stderr, rows = train(learnt[0] / "checkpoint", tmp_path / "tasks", tmp_path / "run", "--call_rewards",
                                 "--group_size=8", "--no_checkpoint")
    assert status == 0, stderr[-3000:]
    rl, records = [r for r in rows if r["phase"] == "rl"], []
    for path in (tmp_path / "run/rollouts").glob("step-*/*.jsonl"): records.append(tree.read(path))
    assert len(records) == 32 and [r["reward/mean"] for r in rl] == [0, 0]
    ok = [r for r in records if r.outcome == "ok"]
    assert ok and all(r.call_rewards[0] > 0 and r.call_rewards[1:] == [0.] * (len(r.calls) - 1) for r in ok)
    assert sum(r["reward/calls"] for r in rl) * 16 == pytest.approx(sum(sum(r.call_rewards or ()) for r in records))
    assert all("train/grad_norm" in r for r in rl if r["groups/zero_variance"] < 2)
    assert any(r.get("train/grad_norm", 0) > 0 for r in rl)


# ---- pure parts

def forked(reward, sampled):
    """A rollout of two calls that part after the prompt, of the given sampled ids each."""
    call = lambda i, ids: tree.Call(i, "main", None, [5, 6], [5, 6], ids, [-1.] * len(ids), "stop")
    return tree.Rollout("r", "t", "h", "m", 1., 0., [call(i, ids) for i, ids in enumerate(sampled)], "ok", reward)


def credited(rewards, group=None, logp=0., ref=0., value=0., **flags):
    """-> adv, returns of rollouts with 3 trained tokens each, on two paths: 2 and 1."""
    cfg = loop.Config(max_model_len=8, **flags)
    trees = [tree.build(forked(r, [[7, 8], [9]])) for r in rewards]
    batch = loop.make_batch(trees, 0)
    full = lambda x: torch.tensor(x).expand(len(batch.rollout))
    group = torch.zeros(len(rewards), dtype=torch.long) if group is None else torch.tensor(group)
    norm = algos.token_weights(batch.rollout, cfg.loss_mean)
    old = {"logp": full(logp), "ref": full(ref), "value": full(value)}
    adv, returns = loop.credit(trees, batch, torch.tensor(rewards), group, norm, old, cfg)
    return adv.tolist(), returns if returns is None else returns.tolist()


def test_credit_by_hand():
    """Would catch advantages of another algorithm than asked for, penalties with the wrong sign or off by a token, a
    KL a token where it belongs to the rollout (or the other way round), and a critic whose chains mix rollouts."""
    near = lambda x: pytest.approx(x, abs=1e-5)
    assert credited([1., 0.], std_norm=False)[0] == [.5] * 3 + [-.5] * 3
    assert credited([1., 0.], algo="gspo")[0] == near([1.] * 3 + [-1.] * 3)
    assert credited([1., 0.], algo="rloo")[0] == [1.] * 3 + [-1.] * 3
    assert credited([1., 0.], algo="reinforce", baseline="none")[0] == [1.] * 3 + [0.] * 3
    assert credited([1., 0.], [0, 1], algo="reinforce")[0] == [.5] * 3 + [-.5] * 3
    assert credited([1., 0.], [0, 1])[0] == [0.] * 6, "a group of one compares with nothing"
    none = {"algo": "reinforce", "baseline": "none"}
    assert credited([1., 0.], overlong_buffer=6, **none)[0] == near([1 - 2 / 6] * 3 + [-2 / 6] * 3)
    assert credited([1., 0.], logp=-1., ref=-1.5, kl_reward=.1, **none)[0] == near([.85] * 3 + [-.15] * 3)
    unlike = {"logp": [-1.] * 3 + [-2.] * 3, "ref": -1.5, "kl_reward": .1}
    assert credited([1., 1.], **unlike)[0] == near([-.15] * 3 + [.15] * 3), "KL alone, and times what was asked"
    assert credited([1., 0.], **unlike)[0] == near([.85] * 3 + [-.85] * 3), "std_norm is of the rewards, 0.5"
    ppo = {"algo": "ppo", "value": .25, "whiten": False}
    assert credited([1., 0.], **ppo) == ([.75] * 3 + [-.25] * 3, [1.] * 3 + [0.] * 3)
    assert credited([1.], gamma=.5, **ppo)[1] == [.5, 1., 1.], "the second token of a path, and a path of one, end it"
    assert credited([1.], logp=-1., ref=-1.5, kl_reward=.1, **ppo)[1] == near([.9, .95, .95])
    adv, _ = credited([1., 0.], algo="ppo", value=.25)
    assert np.mean(adv) == near(0) and np.std(adv) == near(1), "whitened"


def test_loss_by_hand():
    """Would catch a flag of the loss that does not reach it, or reaches another algorithm's: cap and kind of the
    correction, each clip, KL to the reference; and a cold start that minimises anything but -logp."""
    def loss(adv=1., ratio=1., older=1., ref=1., is_supervised=False, **flags):
        """Of one token whose probability was 1 / e, is `ratio` times that now, was 1 / `older` of it to the engine and
        is `ref` times the present one to the reference."""
        tensor = lambda x: torch.tensor([float(x)])
        t = {"norm": tensor(1), "rollout": torch.tensor([0]), "adv": tensor(adv), "logp": tensor(-1),
             "logp_rollout": tensor(-1 - math.log(older)), "ref": tensor(-1 + math.log(ratio * ref))}
        total, _ = loop.policy_loss(tensor(-1 + math.log(ratio)), t, 2., loop.Config(**flags), is_supervised)
        return 2 * total.item()
    logp, k3 = -1 + math.log(1.5), 3 - 1 - math.log(3)
    for want, adv, flags in (
            (-2, 1, {"older": 4}), (-3, 1, {"older": 4, "correction_cap": 3.}),
            (-1, 1, {"older": 4, "correction": "off"}),
            (0, 1, {"older": 100, "correction": "icepop"}), (-1.5, 1, {"older": 1.5, "correction": "icepop"}),
            (0, 1, {"older": 100, "correction": "geometric+tis"}), (-1, 1, {"older": 1.005, "correction": "geometric"}),
            (-1.005, 1, {"older": 1.005, "correction": "geometric+tis"}),
            (-1.2, 1, {"ratio": 1.5}), (-1.4, 1, {"ratio": 1.5, "clip_high": .4}),
            (-1.4, 1, {"ratio": 1.5, "clip_high": .4, "algo": "ppo"}), (-.5, 1, {"ratio": .5}), (.8, -1, {"ratio": .5}),
            (.7, -1, {"ratio": .5, "clip_low": .3}), (9, -1, {"ratio": 9}), (3, -1, {"ratio": 9, "dual_clip": 3.}),
            (3, -1, {"ratio": 9, "dual_clip": 3., "algo": "gspo"}), (-1.0004, 1, {"ratio": 1.5, "algo": "gspo"}),
            (-1.1, 1, {"ratio": 1.5, "clip_high": .1, "algo": "gspo"}),
            (-1.5 * logp, 1, {"ratio": 1.5, "algo": "cispo"}),
            (-1.1 * logp, 1, {"ratio": 1.5, "clip_high": .1, "algo": "cispo"}),
            (-logp, 1, {"ratio": 1.5, "algo": "rloo"}), (-logp, 1, {"ratio": 1.5, "algo": "reinforce"}),
            (-1 + .1 * k3, 1, {"ref": 3, "kl_loss": .1}), (-1, 1, {"ref": 3, "kl_reward": .1}),
            (1, 1, {"is_supervised": True, "older": 4, "ref": 3, "kl_loss": .1})):
        assert loss(adv, **flags) == pytest.approx(want, abs=1e-5), flags


def random_rollout(random, **kw):
    """Calls that go on from others or stand alone, aborted or a subagent's some of them, each paid something."""
    calls = []
    for i in range(random.integers(1, 6)):
        base = [5] if not calls or random.random() < 0.3 else calls[random.integers(len(calls))].ids
        prompt, ids = base + random.integers(9, 99, 2).tolist(), random.integers(9, 99, random.integers(1, 4)).tolist()
        kind, finish = random.choice(["main"] * 3 + ["subagent"]), random.choice(["stop"] * 3 + ["abort"])
        calls.append(tree.Call(i, kind, None, prompt, prompt, ids, [-1.] * len(ids), finish))
    paid = random.choice([0., 0.5, 1., -2.], len(calls)).tolist() if random.random() < 0.8 else None
    return tree.Rollout("r", "t", "h", "m", 1., 0., calls, "ok", float(random.integers(2)), paid, **kw)


def credited_by_call(rollouts, group, value=0., **flags):
    """-> the batch and its advantages, with the calls' rewards."""
    cfg = loop.Config(call_rewards=True, whiten=False, **flags)
    trees = [loop.grow(r, cfg) for r in rollouts]
    batch = loop.make_batch(trees, 0)
    norm = algos.token_weights(batch.rollout, cfg.loss_mean)
    rewards, old = loop.judge(rollouts, cfg)[0], {"value": torch.full_like(norm, value)}
    return batch, loop.credit(trees, batch, rewards, torch.tensor(group), norm, old, cfg,
                              [r.call_rewards for r in rollouts])[0]


@pytest.mark.parametrize("algo", ["grpo", "rloo", "reinforce", "ppo"])
@pytest.mark.parametrize("seed", range(8))
def test_credit_by_call_is_the_formula(algo, seed):
    """Would catch a call credited with what came before it, turns of other numbers or groups compared, rewards of
    untrained calls lost, a rollout that has ended missing from the others' baseline, an outcome on some calls only, and
    a critic's chain paid at another token than a call's last. Call by call, in Python's floats."""
    random = np.random.default_rng(seed)
    rollouts, group = [random_rollout(random) for _ in range(6)], [0, 0, 0, 0, 7, 7]
    batch, adv = credited_by_call(rollouts, group, value=0.25, algo=algo, gamma=1., lam=1.)
    trained = [[c for c in r.calls if c.kind == "main" and c.finish == "stop"] for r in rollouts]

    def bucket(i, k):                                       # what the k-th trained call is paid
        later = [c.id for c in trained[i]][k + 1:] + [99]
        return sum(x for n, x in enumerate(rollouts[i].call_rewards or []) if trained[i][k].id <= n < later[0])

    def to_go(i, k): return rollouts[i].reward + sum(bucket(i, n) for n in range(k, len(trained[i])))

    def want(i, call):
        k = [c.id for c in trained[i]].index(call)
        if algo == "ppo":                                   # each leaf below the call: what its path is paid from here
            at, found = trained[i][k].ids, []
            for leaf in (c.ids for c in trained[i]):
                if leaf[:len(at)] != at or any(d.ids[:len(leaf)] == leaf != d.ids for d in trained[i]): continue
                found.append(sum(bucket(i, n) for n, d in enumerate(trained[i])
                                 if leaf[:len(d.ids)] == d.ids and len(d.ids) >= len(at)))
            return rollouts[i].reward + sum(found) / len(found) - 0.25
        others = [to_go(j, k) for j in range(6) if group[j] == group[i] or algo == "reinforce"]
        mean = sum(others) / len(others)
        if algo == "rloo": return (to_go(i, k) - mean) * len(others) / (len(others) - 1)
        if algo == "reinforce": return to_go(i, k) - mean
        return (to_go(i, k) - mean) / ((sum((x - mean) ** 2 for x in others) / len(others)) ** 0.5 + 1e-6)
    assert len(adv) and adv.tolist() == pytest.approx(
        [want(i, c) for i, c in zip(batch.rollout.tolist(), batch.call.tolist())], rel=1e-5, abs=1e-5)


@pytest.mark.parametrize("outcomes, paid", [
    ([0., 0.], [[9.7, 9.9], [19.6, 0.]]), ([0., 0.], [[0.1, 5.7], [5.8, 0.]]), ([0.3, 0.1], [[0., 0.], [0.1, 0.1]])])
def test_equal_returns_get_no_credit(outcomes, paid):
    """Would catch sums of one amount that float32 tells apart: divided by their tiny spread they are advantages."""
    rollouts = [dataclasses.replace(forked(r, [[7, 8], [9]]), call_rewards=x) for r, x in zip(outcomes, paid)]
    batch, adv = credited_by_call(rollouts, [0, 0])
    assert adv.dtype == torch.float32 and not adv[batch.call == 0].any() and adv[batch.call == 1].all()


@pytest.mark.parametrize("algo", ["grpo", "ppo"])
@pytest.mark.parametrize("seed", range(8))
def test_untrained_calls_change_no_credit(algo, seed):
    """Would catch turns that are counted by all calls: a retry, a dead branch or a subagent would then compare a
    rollout's turns with other ones of its group."""
    random, extra = np.random.default_rng(seed), np.random.default_rng(100 + seed)
    rollouts = [random_rollout(random) for _ in range(4)]
    before = credited_by_call(rollouts, [0] * 4, algo=algo)[1]
    r = rollouts[0]
    at, goes_on = int(extra.integers(len(r.calls) + 1)), r.calls[extra.integers(len(r.calls))]
    kind, finish, prompt = [("subagent", "stop", [5, 5]), ("main", "abort", goes_on.ids + [5]),
                            ("main", "error", goes_on.prompt_ids)][seed % 3]
    calls = r.calls[:at] + [tree.Call(0, kind, None, prompt, prompt, [5, 5], [-1., -1.], finish)] + r.calls[at:]
    paid = r.call_rewards and r.call_rewards[:at] + [0.] + r.call_rewards[at:]
    more = dataclasses.replace(r, calls=[dataclasses.replace(c, id=i) for i, c in enumerate(calls)], call_rewards=paid)
    assert credited_by_call([more, *rollouts[1:]], [0] * 4, algo=algo)[1].equal(before)


def test_what_verifiers_said_by_hand():
    """Would catch groups of one outcome dropped though their calls were paid unlike, or kept for rewards that do not
    count; and rollouts of too many leaves in the statistics."""
    say = lambda reward, paid=None, sampled=([7, 8],): dataclasses.replace(forked(reward, sampled), call_rewards=paid)
    rollouts = [say(1.), say(1., [0.]), say(1., [0.5]), say(0., [0.5]), say(None, [0.5]), say(1., None, [[7, 8], [9]])]
    for flags, alike in (({}, [0, 0, 0, 3, None, 0]), ({"call_rewards": True}, [0, 0, 2, 3, None, 0])):
        rewards, verdict = loop.judge(rollouts, loop.Config(**flags))
        assert rewards.tolist()[:4] == [1, 1, 1, 0] and rewards.isnan().tolist() == [x is None for x in alike]
        for i, j in itertools.combinations(range(6), 2):
            assert (verdict[i] == verdict[j]).item() == (alike[i] == alike[j]), (flags, i, j)
    rewards, verdict = loop.judge(rollouts, loop.Config(max_leaves=1))
    assert rewards.isnan().tolist() == verdict.isnan().tolist() == [False] * 4 + [True, True]
    for far in (1e39, math.inf, math.nan):                  # what no advantage can be computed from is named
        with pytest.raises(AssertionError, match="rollout r: its reward"): loop.judge([say(far)], loop.Config())


@pytest.mark.parametrize("flags", [{"algo": "gspo"}, {"correction": "geometric+tis"}, {}])
def test_micro_batches_keep_rollouts_whole_where_needed(flags):
    """Would catch GSPO and geometric rejection over parts of rollouts, and ranks with unequal numbers of turns."""
    cfg = loop.Config(micro_batch_tokens=4, **flags)
    batch = loop.make_batch([tree.build(forked(1., [[i, 8], [i, 9, 9]])) for i in (7, 8, 9)], 0)
    turns = [loop.micro_batches(batch, [0, 2], cfg, rank, 2) for rank in (0, 1)]
    assert len(turns[0]) == len(turns[1])
    groups = [g for t in turns for g in t if g is not None]
    assert sorted(sum(groups, [])) == [i for i, r in enumerate(batch.path_rollout) if r in (0, 2)]
    homes = {r: {n for n, g in enumerate(groups) for i in g if batch.path_rollout[i] == r} for r in (0, 2)}
    assert all(len(h) == 1 for h in homes.values()) == bool(flags), homes


@pytest.mark.parametrize("world", [1, 2, 3, 4, 8])
def test_ranks_get_as_many_turns_and_like_tokens(world):
    """Would catch ranks that idle while one computes, a path that is left out or computed twice, budgets that balance
    breaks: 40 rollouts of 20 to 400 tokens."""
    chance, cfg = random.Random(world), loop.Config(micro_batch_tokens=1000)
    sampled = [[chance.randrange(10, 10**4) for _ in range(chance.randrange(20, 400))] for _ in range(40)]
    batch = loop.make_batch([tree.build(forked(1., [ids])) for ids in sampled], 0)
    turns = [loop.micro_batches(batch, range(40), cfg, rank, world) for rank in range(world)]
    assert len(set(map(len, turns))) == 1 and None not in sum(turns, [])
    assert sorted(i for t in turns for g in t for i in g) == list(range(40))
    tokens = np.array([[len(tree.pack([batch.paths[i] for i in g], [[1]] * len(g)).ids) for g in t] for t in turns])
    assert tokens.max() <= 1000 and len(turns[0]) <= -(-tokens.sum() // 1000 // world) + 1
    assert tokens.sum(1).max() <= 1.15 * tokens.sum(1).mean(), tokens


def test_a_small_budget_is_dealt_too():
    """Would catch a search for even turns that never ends: below 64 tokens its steps are less than one."""
    batch = loop.make_batch([tree.build(forked(1., [[10 * i + k for k in range(8)]])) for i in range(10)], 0)
    turns = [loop.micro_batches(batch, range(10), loop.Config(micro_batch_tokens=32), rank, 2) for rank in (0, 1)]
    assert sorted(i for t in turns for g in t for i in g or ()) == list(range(10))


def test_metrics_of_an_update_by_hand():
    """Would catch means of ranks' means, losses that grow with the number of updates, and an ess that is not
    (sum w)^2 / (n sum w^2): two ranks, two epochs of one update, 3 + 1 tokens each time."""
    sums = [{"tokens": 6, "unique": 10, "loss": .5, "weight": 9., "weight_sq": 15., "ratio": 6.6},
            {"tokens": 2, "unique": 4, "loss": .1, "weight": 1., "weight_sq": 1., "ratio": 1.4}]
    assert loop.train_metrics(sums, 2, 2) == pytest.approx({
        "tokens/unique": 7, "train/loss": .3, "train/weight": 10 / 8, "train/ratio": 1., "train/ess": 100 / (16 * 8)})
    s = {"tokens": 4, "unique": 4, "value_tokens": 4, "value_loss": 2., "return": 4., "return_sq": 8., "rest": 0.,
         "rest_sq": 1.}
    m = loop.train_metrics([s], 1, 1)
    assert m == pytest.approx({"tokens/unique": 4, "train/value_loss": 2., "train/return": 1.,
                               "train/explained_variance": algos.explained_variance(s)})
    assert m["train/explained_variance"] == pytest.approx(1 - 1 / 4)


@pytest.mark.parametrize("wrong", [
    {"carry_over": 1.5}, {"carry_over": 0.5, "max_resample": 1}, {"max_staleness": 3},
    {"correction": "tis+none"}, {"dual_clip": 3., "algo": "cispo"}, {"group_size": 1},
    {"lam": 1.5, "algo": "ppo"}, {"lam": 0.9}, {"clip_low": 0.1, "algo": "rloo"}, {"baseline": "none"},
    {"group_size": 1, "algo": "ppo", "max_resample": 1}, {"overlong_buffer": 5000}, {"max_resample": -1},
    {"loss_mean": "token", "algo": "gspo"}, {"baseline": "group"},
    {"check_packing": True, "dtype": "bfloat16"}])
def test_flags_that_do_not_fit_are_refused(wrong, tmp_path):
    """Would catch a run of hours whose flags are ignored, or fail only at the first update."""
    loop.check(loop.Config(out=str(tmp_path), algo="ppo", group_size=1, correction="geometric+tis"))
    with pytest.raises(AssertionError, match=f"--({'|'.join(wrong)})"):
        loop.check(loop.Config(out=str(tmp_path), **wrong))


def test_canary(learnt, tasks, tmp_path, monkeypatch):
    """Would catch an update that moves weights beside the learning rate (decay, a stray copy), drift between engine
    and trainer, the best weights that are not kept, a sandbox that outlives its step, and a --wandb that needs a
    network, or holds other numbers than metrics.jsonl or two harnesses' evaluations under one name."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    status, stderr, rows = train(learnt[0] / "checkpoint", tasks, tmp_path / "run", "--lr=0", "--steps=3", "--wandb",
                                 "--eval_every=2", "--eval_n=2", f"--eval_tasks={tasks}")
    assert status == 0, stderr[-3000:]
    before, *after = (weights(path / name) for path, name in (
        (learnt[0], "checkpoint"), (tmp_path / "run", "checkpoint"), (tmp_path / "run", "best")))
    assert all(before[k].equal(x[k]) for k in before for x in after)
    assert {r["sandboxes/alive"] for r in rows if r["phase"] == "rl"} == {0}
    gaps = [r["fidelity/gap_mean"] for r in rows if "fidelity/gap_mean" in r]
    assert gaps and max(gaps) < 1e-3
    assert not lacking(rows, RARE["canary"].split())
    (file,) = (tmp_path / "run").glob("wandb/offline-run-*/run-*.wandb")
    of = lambda r: f"eval/{r['set']}/bash/" if r["phase"] == "eval" else ""
    flat = lambda k, v: {f"{k}/{n}": x for n, x in v.items()} if isinstance(v, dict) else {k: v}
    assert sent_to_wandb(file) == [{of(r) + n: x for k, v in r.items() for n, x in flat(k, v).items()} for r in rows]


def sent_to_wandb(file):
    """What an offline file holds of each wandb.log, without wandb's own. The file is a log of LevelDB's form behind 7
    bytes: records in blocks of 32 KiB, those that cross a block's end in parts of kind 2, 3, .., 4."""
    from wandb.proto.wandb_internal_pb2 import Record
    data, at, whole, found = file.read_bytes(), 7, b"", []
    while at + 7 <= len(data):
        if (left := -at % 2**15) and left < 7: at += left
        _, size, kind = struct.unpack_from("<IHB", data, at)
        whole, at = whole + data[at + 7:at + 7 + size], at + 7 + size
        if kind not in (1, 4): continue
        items = {"/".join(x.nested_key) or x.key: x.value_json for x in Record.FromString(whole).history.item}
        whole = b""
        if items: found.append({k: json.loads(v) for k, v in items.items() if k[0] != "_"})
    return found


def test_the_fidelity_gate_refuses(learnt, tasks, tmp_path):
    """Would catch a gate that only reports: with a bound of next to nothing no update may happen but on numbers that
    are equal (of tokens that are all but certain they can be), and the run ends with the reason."""
    flags = "--max_logp_gap=1e-12", "--steps=20"
    status, stderr, rows = train(learnt[0] / "checkpoint", tasks, tmp_path / "run", *flags)
    assert status == 2 and "update refused" in stderr and "--max_logp_gap" in stderr, stderr[-3000:]
    assert all(r["fidelity/gap_mean"] <= 1e-12 for r in rows if "train/grad_norm" in r)
    assert not (tmp_path / "run" / "checkpoint").exists()


def test_agreement_by_hand():
    """Would catch an ess or r that is not the formula; a shift or made-up zeros passed since a policy that is nearly
    certain leaves the mean small; r judged where all probabilities are alike, or of a handful of tokens."""
    random = np.random.default_rng(0)
    logp = torch.from_numpy(np.where(random.random(400) < 0.04, -1.5, -1e-4) + random.normal(0, 1e-5, 400)).float()
    noisy = logp + torch.from_numpy(random.normal(0, 0.01, 400)).float()
    s, why = loop.agreement(logp, noisy, 0.2)
    gap, w = (logp - noisy).double().numpy(), (logp - noisy).double().exp().numpy()
    assert why is None and s == pytest.approx({
        "mean": abs(gap).mean(), "p99": np.quantile(abs(gap), 0.99), "max": abs(gap).max(),
        "ess": w.sum()**2 / (w**2).sum() / 400,
        "pearson": np.corrcoef(logp.double().exp(), noisy.double().exp())[0, 1]}, rel=1e-4)
    s, why = loop.agreement(logp, logp.roll(1), 0.2)
    assert s["mean"] < 0.15 and why.startswith("r ")
    assert loop.agreement(logp[:50], logp[:50].roll(1), 1.)[1] is None, "of 50 tokens"
    assert "are 0" in loop.agreement(logp, torch.zeros(400), 0.2)[1]
    assert loop.agreement(torch.full((400,), -1e-9), torch.zeros(400), 0.2)[1] is None, "certain, and rightly so"
    for wrong in (logp - 0.3, torch.full((400,), -math.inf), torch.full((400,), math.nan)):
        assert "mean" in loop.agreement(wrong, logp, 0.2)[1]


def test_recorded_tokens_are_judged_whatever_their_version():
    """Would catch a gate that takes the tokens of a recorded run, which counted its updates from another start (a cold
    start that this one has not, or the other way round), for ones of other weights, and passes with nothing judged."""
    r = forked(1., [[7, 8], [9]])
    for c in r.calls: c.versions = [[3, len(c.sampled_ids)]]
    batch = loop.make_batch([tree.build(r)], None)
    seen, logp = torch.ones(3, dtype=torch.bool), batch.logp_rollout
    assert loop.fidelity(batch, logp, seen, [r], 0.1)["fidelity/gap_mean"] == 0
    with pytest.raises(ValueError, match="update refused"): loop.fidelity(batch, logp - 1, seen, [r], 0.1)
    assert len(loop.make_batch([tree.build(dataclasses.replace(r, calls=[]))], None).behind) == 0


@pytest.mark.parametrize("tp", [1, 2])
def test_two_ranks(learnt, tasks, tmp_path, tp):
    """Would catch ranks that wait for each other (unequal micro-batches), engines that take torchrun's variables
    for their own, metrics that every rank writes; with one engine for both, a rank that waits for an engine that it
    has not, workers that take each other's weights."""
    launcher = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    status, stderr, rows = train(learnt[0] / "checkpoint", tasks, tmp_path / "run", "--micro_batch_tokens=64",
                                 "--group_size=8", f"--tp={tp}", launcher=launcher)
    assert status == 0, stderr[-3000:]
    rl = [r for r in rows if r["phase"] == "rl"]
    assert [r["step"] for r in rl] == [0, 1] and all(r["calls/num"] >= 8 for r in rl)
    updated = [r for r in rl if "train/grad_norm" in r]
    assert all(r["train/ratio"] == 1 and r["train/clipped_low"] == r["train/clipped_high"] == 0 for r in updated), (
        "one update a batch: no ratio is another than 1, no clip acts")
    assert max(r["fidelity/gap_mean"] for r in rl if "fidelity/gap_mean" in r) < 1e-3


def test_ctrl_c_leaves_nothing(tiny, tasks, tmp_path):
    """Would catch engines, sandboxes or sockets that outlive an interrupted run."""
    marker = f"HARNESS_RL_TEST_{os.getpid()}"
    env = {**os.environ, marker: "1", "TMPDIR": str(tmp_path)}
    heeding = "env", "--default-signal=INT", sys.executable         # in a script's background it is ignored
    process = subprocess.Popen(command(tiny, tasks, tmp_path / "run", "--steps=1000", launcher=heeding), cwd=ROOT,
                               text=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=env)
    metrics, deadline = tmp_path / "run" / "metrics.jsonl", time.monotonic() + 300
    while not (metrics.exists() and '"rl"' in metrics.read_text()) and time.monotonic() < deadline:
        if process.poll() is not None: break
        time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=300)
    assert process.returncode == 130, stderr[-3000:]
    deadline = time.monotonic() + 300
    while alive(marker) and time.monotonic() < deadline: time.sleep(0.2)
    assert not alive(marker) and not list(tmp_path.glob("harness-rl_*")) and not list(tmp_path.glob("hrl-*"))
    assert not [path for path in tmp_path.iterdir() if path.is_socket()]


# ---- recorded rollouts, other numbers of ranks, kills

AS_LEARNT = ["--warmup_steps=40", "--warmup_rollouts=4", "--warmup_lr=1e-2", "--lr=1e-4", "--num_epochs=2",
             "--group_size=8", "--max_tokens=16"]


def go_on(learnt, out):
    """A copy of the run `learnt` as it stood after its cold start."""
    shutil.copytree(learnt[0], out, ignore=shutil.ignore_patterns("rollouts", "checkpoint", "step-0002"))
    return out


def as_rank(rank, world, store, argv):
    """One of several ranks without torchrun, in a process that has imported everything already."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world)}
    if world > 1: dist.init_process_group("gloo", store=dist.FileStore(str(store), world), rank=rank, world_size=world)
    rollout.command(loop.main, loop.parse(argv))


@pytest.fixture(scope="module")
def launch():
    """launch(command, world) -> processes of the ranks, started."""
    context = multiprocessing.get_context("forkserver")
    old, os.environ["PYTHONPATH"] = os.environ.get("PYTHONPATH"), f"{ROOT}:{ROOT}/tests"
    os.environ["OMP_NUM_THREADS"] = "1"         # the sums come in one order; and no thread pool stands before a fork
    context.set_forkserver_preload(["test_train", "transformers.models.llama.modeling_llama"])

    def launch(words, store, world=1):
        ranks = [context.Process(target=as_rank, args=(i, world, store, words[2:])) for i in range(world)]
        for p in ranks: p.start()
        return ranks
    yield launch
    del os.environ["OMP_NUM_THREADS"]
    if old is None: del os.environ["PYTHONPATH"]
    else: os.environ["PYTHONPATH"] = old


def rows_of(out):
    """metrics.jsonl without times and memory."""
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in r.items() if not k.startswith(("time", "memory"))} for r in rows]


def close(x, **tolerance):
    return pytest.approx(x, nan_ok=True, **tolerance) if isinstance(x, (int, float)) else x


def compare(got, want):
    """Rows of metrics that other numbers of ranks may have computed, in float64: of a gradient that is all rounding,
    Adam in float32 makes a full step in either direction."""
    assert [(r["phase"], r.get("step")) for r in got] == [(r["phase"], r.get("step")) for r in want]
    for g, w in zip(got, want):
        w = {k: v for k, v in w.items() if k != "tokens/unique"}    # depends on the cut into micro-batches
        assert {k: g[k] for k in w} == {k: close(v, rel=1e-6, abs=1e-7) for k, v in w.items()}


def saved(out, step, what):
    """Of the state after a step, one vector, whatever the number of ranks that saved: the policy's weights (what: "")
    or Adam's mean of their gradients (exp_avg)."""
    tensors, folder = {}, out / "saved" / f"step-{step:04}"
    for name, about in dcp.FileSystemReader(folder).read_metadata().state_dict_metadata.items():
        if name.startswith("policy.") and name.partition("/")[2] == what:
            tensors[name] = torch.empty(about.size, dtype=torch.float64)
    dcp.load(tensors, checkpoint_id=folder, no_dist=True)
    return torch.cat([t.flatten() for _, t in sorted(tensors.items())])


def test_recorded_rollouts_give_the_same_on_1_2_and_4_ranks(tiny, tasks, learnt, launch, tmp_path):
    """Would catch a loss or gradient that depends on how the batch is dealt to ranks, empty turns that count, a saved
    state that only fits its own number of ranks, moments or task order that a resumed run has lost, and a replay that
    is not the recorded run: metrics of the run itself, the gradients over its four updates, its last weights."""
    want, base, double = learnt[0], saved(learnt[0], 0, ""), ["--dtype=float64", "--micro_batch_tokens=256"]
    for world, flags in ((1, []), (1, double), (2, [*double, "--activation_checkpointing"]), (4, double)):
        out = go_on(learnt, tmp_path / f"{world}-{len(flags)}")
        words = command(tiny, tasks, out, *AS_LEARNT, "--resume", f"--rollouts={learnt[0]}", "--save_every=1",
                        "--keep_saved=3", *flags)
        for p in launch(words, tmp_path / f"store-{world}", world):
            p.join(900)
            assert p.exitcode == 0, world
        if flags == double and world == 1:                  # what the others are compared with
            want = out
            continue
        compare(rows_of(out), rows_of(want))
        moved = saved(want, 2, "") - base
        assert moved.norm() > 1e-5 * base.norm() and (saved(out, 2, "") - base - moved).norm() <= 1e-5 * moved.norm()
        if not flags: continue
        for step in (1, 2):
            g = saved(want, step, "exp_avg")
            assert (saved(out, step, "exp_avg") - g).norm() <= 1e-6 * g.norm(), (world, step)


@pytest.mark.parametrize("num_kills", [3, pytest.param(20, marks=pytest.mark.slow)])
def test_killed_at_any_point_and_resumed(tiny, tasks, learnt, launch, tmp_path, num_kills):
    """Would catch whatever a saved state leaves out (a moment, the critic, the reference, the order of tasks or of
    minibatches), states that are not whole, lines of metrics that come twice or are torn, and a checkpoint that a kill
    leaves half written: PPO with a reference on recorded rollouts, kill -9, the same command again, until it ends."""
    make = lambda out: command(
        tiny, tasks, out, *AS_LEARNT, f"--rollouts={learnt[0]}", "--warmup_steps=4", "--algo=ppo", "--kl_loss=0.01",
        "--num_epochs=3", "--num_minibatches=2", "--value_warmup_steps=1", "--value_lr=1e-3", "--max_logp_gap=0",
        "--save_every=1", "--keep_saved=1", "--resume")
    begin = time.monotonic()
    p, = launch(make(tmp_path / "whole"), None)
    p.join(900)
    assert p.exitcode == 0
    length, out, chance = time.monotonic() - begin, tmp_path / "run", random.Random(num_kills)
    rows, saved = rows_of(tmp_path / "whole"), out / "saved"
    whole = weights(tmp_path / "whole" / "checkpoint")
    order = lambda run: json.loads((run / "saved/step-0002/loop.json").read_text())["order"]
    assert order(tmp_path / "whole") == order(learnt[0]), "what is learnt how decides which tasks come next"
    points = [lambda: (saved / "step-0000").exists() and (saved / "tmp").exists(),       # while it writes a state
              lambda: '"rl", "step": 1,' in (out / "metrics.jsonl").read_text() and not (saved / "step-0002").exists(),
              lambda: (out / "checkpoint.tmp").exists()]

    def check():
        assert rows_of(out) == [{k: close(v, rel=1e-5, abs=1e-7) for k, v in r.items()} for r in rows]
        assert [x.name for x in saved.glob("step-*")] == ["step-0002"]
        got = weights(out / "checkpoint")
        assert got.keys() == whole.keys() and all(torch.allclose(got[k], whole[k], rtol=1e-4, atol=1e-6) for k in got)
    for i in range(num_kills):
        p, = launch(make(out), None)
        if i >= len(points): p.join(chance.uniform(0, length))
        while i < len(points) and p.is_alive() and not ((out / "metrics.jsonl").exists() and points[i]()):
            time.sleep(0.001)
        p.kill()
        p.join()
        if (out / "checkpoint").exists():
            check()
            shutil.rmtree(out)
    p, = launch(make(out), None)
    p.join(900)
    assert p.exitcode == 0
    check()
    p, = launch(make(out), None)                            # a run that is complete stays as it is
    p.join(900)
    assert p.exitcode == 0
    check()


def test_a_resumed_run_reads_what_its_weights_sampled(learnt, tasks, tmp_path):
    """Would catch rollouts that are sampled again although they are there, and ones that other weights sampled taken
    for the present ones': after a rollout that was learnt from is run again, or a flag changes."""
    out = tmp_path / "run"
    at = lambda found, step: {p.name: s for p, s in found.items() if p.parent.name == f"step-{step:04}"}

    def go(*flags):
        """From the state after the first of three steps, if there is one -> when each recorded rollout began."""
        for name in ("checkpoint", "saved/step-0002", "saved/step-0003"): shutil.rmtree(out / name, ignore_errors=True)
        status, stderr, _ = train(learnt[0] / "checkpoint", tasks, out, "--resume", "--save_every=1", "--keep_saved=3",
                                  "--steps=3", "--lr=1e-4", *flags)
        assert status == 0, stderr[-3000:]
        return {p: tree.read(p).started_s for p in (out / "rollouts").glob("step-*/*.jsonl")}
    first = go()
    assert len(first) == 24 and go("--eval_n=3", "--num_parallel=4") == first
    broken = sorted(p for p in first if p.parent.name == "step-0001")[0]
    broken.write_text(re.sub(r'"outcome": "\w+"', '"outcome": "infra_error"', broken.read_text()))
    second = go()
    assert at(second, 0) == at(first, 0)
    assert {p for p in at(first, 1) if at(second, 1)[p] != at(first, 1)[p]} == {broken.name}
    assert not set(at(second, 2).values()) & set(at(first, 2).values())
    third = go("--clip_high=0.3")
    assert at(third, 0) == at(first, 0) and not set(third.values()) & {*at(second, 1).values(), *at(second, 2).values()}


@pytest.mark.slow
def test_two_nodes(tiny, tasks, learnt, launch, tmp_path):
    """Would catch what holds on one machine alone: ranks that find each other by local names or ports, a run folder
    that each node writes. Two network namespaces with a cable between, torchrun --nnodes 2."""
    nodes, out, one = [f"hrl{os.getpid() % 10**6}{x}" for x in "ab"], tmp_path / "run", tmp_path / "one"
    words, alone = (command(tiny, tasks, go_on(learnt, x), *AS_LEARNT, "--resume", f"--rollouts={learnt[0]}",
                            "--dtype=float64") for x in (out, one))
    p, = launch(alone, None)
    p.join(900)
    ip = lambda *words: subprocess.run(["ip", *words], check=True)
    for node in nodes: ip("netns", "add", node)
    try:
        ip("link", "add", nodes[0], "netns", nodes[0], "type", "veth", "peer", "name", nodes[1], "netns", nodes[1])
        for i, node in enumerate(nodes):
            ip("-n", node, "addr", "add", f"10.77.0.{i + 1}/24", "dev", node)
            for name in (node, "lo"): ip("-n", node, "link", "set", name, "up")
        ranks = [subprocess.Popen(
            ["ip", "netns", "exec", node, sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--node-rank",
             str(i), "--nproc-per-node", "1", "--master-addr", "10.77.0.1", "--master-port", "29500", *words[1:]],
            cwd=ROOT, env={**os.environ, "GLOO_SOCKET_IFNAME": node}) for i, node in enumerate(nodes)]
        try: assert [p.wait(300) for p in ranks] == [0, 0]
        finally:
            for p in ranks: p.kill()
    finally:
        for node in nodes: ip("netns", "delete", node)
    compare(rows_of(out), rows_of(one))


@pytest.mark.slow
def test_a_killed_run_and_a_dead_engine(learnt, tasks, tmp_path):
    """Would catch an engine that dies and takes the run with it, rollouts that are sampled again although they were
    done, an engine that outlives its killed trainer (and keeps its memory), and a resumed engine with old weights (the
    gap)."""
    out, marker = tmp_path / "run", f"HARNESS_RL_TEST_{os.getpid()}_kill"
    words = command(learnt[0] / "checkpoint", tasks, out, "--save_every=1", "--resume", "--lr=1e-3", "--group_size=8")
    with open(tmp_path / "stdout", "w") as f:
        process = psutil.Popen(words, cwd=ROOT, stdout=f, stderr=f, env={**os.environ, marker: "1"})
    until = lambda folder, mark: any(mark in x.read_text() for x in (out / "rollouts" / folder).glob("*.jsonl"))

    def wait(condition):
        deadline = time.monotonic() + 300
        while not condition() and process.is_running() and process.status() != "zombie" and time.monotonic() < deadline:
            time.sleep(0.02)
        assert condition(), (tmp_path / "stdout").read_text()[-3000:]
    wait(lambda: until("step-0000", '"rollout"'))
    engine, = [p for p in process.children(recursive=True) if "EngineCore" in p.name() + "".join(p.cmdline())]
    engine.kill()
    wait(lambda: until("step-0001", '"end"'))
    process.kill()
    process.wait(30)
    assert "engine died during step-0000" in (tmp_path / "stdout").read_text()
    ended = {p: p.read_text() for p in (out / "rollouts").glob("step-*/*.jsonl") if '"end"' in p.read_text()}
    deadline = time.monotonic() + 60
    while alive(marker) and time.monotonic() < deadline: time.sleep(0.1)
    assert not alive(marker)
    status, stderr, rows = train(learnt[0] / "checkpoint", tasks, out, *words[-4:])     # the same flags
    assert status == 0, stderr[-3000:]
    assert all(p.read_text() == text for p, text in ended.items())
    rl = [r for r in rows if r["phase"] == "rl"]
    assert [r["step"] for r in rl] == [0, 1] and sum(r["phase"] == "ready" for r in rows) == 1
    assert not any("outcome/infra_error" in r for r in rl), rl
    gaps = [r["fidelity/gap_mean"] for r in rl if "fidelity/gap_mean" in r]
    assert gaps and max(gaps) < 1e-3


def test_a_full_disk_is_an_error(tmp_path):
    """Would catch what torch raises over a state that it cannot write or read: no Exception, so that no handler ends
    the engine's threads, and many lines of stack in the place of the folder and the reason."""
    limits, tensors = resource.getrlimit(resource.RLIMIT_FSIZE), {"x": torch.zeros(10**4)}
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    try:
        with pytest.raises(OSError, match="full: rank 0: .*too large"), loop.state_in(tmp_path / "full"):
            dcp.save(tensors, checkpoint_id=tmp_path / "full")
    finally: resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    dcp.save(tensors, checkpoint_id=tmp_path / "torn")
    for part in (tmp_path / "torn").glob("*.distcp"): part.unlink()
    with pytest.raises(OSError, match="torn: rank 0: "), loop.state_in(tmp_path / "torn"):
        dcp.load(tensors, checkpoint_id=tmp_path / "torn")


def test_whatever_ends_a_command_ends_its_process():
    """Would catch an exception that is no Exception (torch has some) and leaves vLLM's threads to hold the process."""
    code = """if 1:
        import atexit, rollout
        def main(_): raise GeneratorExit
        atexit.register(print, "stays")
        rollout.command(main, None)"""
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert (result.returncode, result.stdout) == (1, "") and "GeneratorExit" in result.stderr, result


# ---- one update of made-up records: what it does is known exactly

def record_step(out, tasks, rounds, seed=0):
    """A run folder for --rollouts. rounds: of each round of sampling, for each of the four tasks the rewards of its
    group. -> rollouts of each round and task: a call or two of 1 to 30 random tokens."""
    chance, made, times = random.Random(seed), [], {k: 0. for k in ("received_s", "first_token_s", "finished_s")}
    ids = lambda low, high: [chance.randrange(10, 40_000) for _ in range(chance.randint(low, high))]
    for turn, rewards in enumerate(rounds):
        folder = out / "rollouts" / ("step-0000" + f".{turn}" * bool(turn))
        folder.mkdir(parents=True)
        made.append([])
        for task, paid in zip(rollout.load_tasks(str(tasks)), rewards):
            made[-1].append([])
            for job, reward in zip(rollout.make_jobs([task], ["bash"], len(paid)), paid):
                prompt, calls = ids(5, 20), []
                for i in range(chance.randint(1, 2)):       # the second goes on from the first one's prompt alone
                    asked, said = prompt + ids(1, 5), ids(1, 30)
                    logp, versions = [-9.] * len(said), [[3, len(said)]]
                    calls.append(tree.Call(i, "main", None, asked, asked, said, logp, "stop", versions, **times))
                head = {"type": "rollout", "format": 1, "id": job.id, "task": task.id, "harness": "bash", "model": "m",
                        "temperature": 1., "started_s": float(turn)}
                lines = [head, *(tree.call_line(c, calls[:c.id]) for c in calls),
                         {"type": "end", "outcome": "ok", "reward": reward}]
                rollout.record_path(folder, job).write_text("".join(json.dumps(x) + "\n" for x in lines))
                made[-1][-1].append((calls, reward))
    return made


def plain_gradient(model, groups, loss_mean):
    """Of the loss over all groups' tokens, call by call with transformers alone, in float64: one vector."""
    model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64)
    lengths = [sum(len(c.sampled_ids) for c in calls) for group in groups for calls, _ in group]
    for group in groups:
        rewards = [reward for _, reward in group]
        for calls, reward in group:
            adv = (reward - np.mean(rewards)) / (np.std(rewards) + 1e-6)
            own = sum(len(c.sampled_ids) for c in calls)
            denom = {"rollout": own * len(lengths), "token": sum(lengths), "constant": 256 * len(lengths)}[loss_mean]
            for c in calls:
                logp = model(torch.tensor([c.ids[:-1]])).logits[0].log_softmax(1)[len(c.prompt_ids) - 1:]
                (-adv * logp.gather(1, torch.tensor(c.sampled_ids)[:, None]).sum() / denom).backward()
    return torch.cat([p.grad.flatten() for _, p in sorted(model.named_parameters())])


UPDATE = ["--steps=1", "--tasks_per_step=4", "--group_size=3", "--priority_floor=1", "--correction=off",
          "--max_logp_gap=0", "--grad_clip=1e9", "--save_every=1", "--no_checkpoint"]
EXACT = [*UPDATE, "--dtype=float64", "--micro_batch_tokens=96"]


def test_the_gradient_is_that_of_the_formula(tiny, tasks, launch, tmp_path):
    """Would catch a normaliser that counts only what is computed (groups of equal rewards, which are not), counts
    tokens or rollouts of a micro-batch, or splits the batch wrongly: against transformers, a call at a time. And
    dynamic sampling that takes other groups than it should, or goes on when it has enough; a cold start that divides
    its mean by --loss_mean's constant."""
    mixed, equal = [[0., 1., 0.], [1.] * 3, [0., 0.5, 2.], [0.] * 3], [[1., 0., 0.]] * 4
    once, = record_step(tmp_path / "once", tasks, [mixed])
    first, second = record_step(tmp_path / "twice", tasks, [mixed, equal])
    runs, twice = {}, [*EXACT, "--max_resample=2", f"--rollouts={tmp_path / 'twice'}"]
    for how in ("rollout", "token", "constant"):
        flags = [*EXACT, f"--loss_mean={how}", f"--rollouts={tmp_path / 'once'}"]
        runs[how] = launch(command(tiny, tasks, tmp_path / how, *flags), None)
    shutil.copytree(tmp_path / "once/rollouts/step-0000", tmp_path / "demos/rollouts/demonstrations")
    cold = ["--steps=0", "--warmup_steps=1", "--loss_mean=constant", f"--rollouts={tmp_path / 'demos'}"]
    runs["cold"] = launch(command(tiny, tasks, tmp_path / "cold", *EXACT, *cold), None)
    runs["resampled"] = launch(command(tiny, tasks, tmp_path / "resampled", *twice), None)
    for p, in runs.values():
        p.join(900)
        assert p.exitcode == 0
    row = next(r for r in rows_of(tmp_path / "cold") if r["phase"] == "warmup")
    assert row["train/loss"] == pytest.approx(row["train/nll"], rel=1e-6)
    row, = rows_of(tmp_path / "resampled")[1:]
    with np.load(tmp_path / "resampled/tokens/step-0000.npz") as t: late = t["id"][t["started_s"] == 1].tolist()
    names = [task.id for task in rollout.load_tasks(str(tasks))]
    chosen = [second[names.index(id.split(".bash")[0])] for id in late[::3]]
    assert len(chosen) == 2 and (row["groups/rounds"], row["groups/num"], row["groups/dropped"]) == (2, 6, 2)
    for run, groups in {**dict.fromkeys(("rollout", "token", "constant"), once),
                        "resampled": [first[0], first[2], *chosen]}.items():
        want = plain_gradient(tiny, groups, run if run in ("token", "constant") else "rollout")
        got = saved(tmp_path / run, 1, "exp_avg") / (1 - 0.9)
        assert (got - want).norm() <= 1e-6 * want.norm(), run      # transformers norms in float32


class Mute:
    """In the engine's place: takes weights, and whatever they are says the same."""
    def __init__(self, model, **_):
        self.tokenizer, self.engine = AutoTokenizer.from_pretrained(model), types.SimpleNamespace(errored=None)

    def load_weights(self, buckets, version): assert sum(len(named) for _, named in buckets) > 10
    def greedy(self, ids, num): return [7] * num
    def close(self): pass


def ends(rank, world, store, argv, answers, engine=None):
    """A run in this process -> why it stopped, and whether its weights were still the model's."""
    import proxy
    proxy.Proxy = engine or proxy.Proxy
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world)}
    if world > 1: dist.init_process_group("gloo", store=dist.FileStore(str(store), world), rank=rank, world_size=world)
    cfg = loop.parse(argv)
    try: loop.main(cfg)
    except Exception as e:
        own = next(f.f_locals.get("model") for f, _ in traceback.walk_tb(e.__traceback__) if f.f_code.co_name == "main")
        first = AutoModelForCausalLM.from_pretrained(cfg.model).state_dict()
        is_first = own is not None and world == 1 and all(
            loop.full(p).equal(first[k]) for k, p in own.state_dict().items())
        answers.put((str(e), is_first))
    else: answers.put(("nothing: it ended well", False))
    answers.close(), answers.join_thread()
    os._exit(0)                                             # not past a peer that is dead


def started(runs):
    """Lists of arguments of `ends`, each with its queue -> processes, queues."""
    context = multiprocessing.get_context("forkserver")
    queues = [context.Queue() for _ in runs]
    ranks = [context.Process(target=ends, args=(*run[:4], q, *run[4:])) for run, q in zip(runs, queues)]
    for p in ranks: p.start()
    return ranks, queues


def test_no_step_is_made_with_what_is_wrong(tiny, tasks, launch, learnt, tmp_path):
    """Would catch weights that change before a gradient is known to be finite; records of another policy's, all of
    them of a later version than this run's, that pass the gate; and an engine that says other things than the trainer
    would, at its wake, and is asked all the same."""
    record_step(tmp_path / "far", tasks, [[[0., 9e29, 0.]] * 4])
    record_step(tmp_path / "other", tasks, [[[0., 1., 0.]] * 4])
    runs = {"gradient norm inf: no step": ["--no_std_norm", f"--rollouts={tmp_path / 'far'}"],
            "update refused": ["--max_logp_gap=0.1", f"--rollouts={tmp_path / 'other'}"],
            "self-test of version 1: the engine of rank 0 prefers": [*AS_LEARNT, "--resume", "--steps=2"]}
    go_on(learnt, tmp_path / "2")
    argv = [command(tiny, tasks, tmp_path / str(i), *UPDATE, *flags)[2:] for i, flags in enumerate(runs.values())]
    ranks, queues = started([(0, 1, None, words, *[Mute] * (i == 2)) for i, words in enumerate(argv)])
    for why, p, q in zip(runs, ranks, queues):
        said, is_first = q.get(timeout=900)
        p.join()
        assert why in said and is_first == ("self-test" not in why), said


def late(rank, store, answers):
    dist.init_process_group("gloo", store=dist.FileStore(str(store), 2), rank=rank, world_size=2,
                            timeout=datetime.timedelta(minutes=5))
    loop.peers()
    if rank == 0:
        try: loop.gather("here", 2, deadline_s=1.)
        except TimeoutError as e: answers.put(str(e))
    time.sleep(600)


def test_a_rank_that_does_not_come_is_named(launch, tmp_path):
    """Would catch ranks that wait for a hanging one for ever, or that end without telling for whom they waited."""
    context = multiprocessing.get_context("forkserver")
    answers = context.Queue()
    ranks = [context.Process(target=late, args=(i, tmp_path / "store", answers)) for i in (0, 1)]
    for p in ranks: p.start()
    try: answer = answers.get(timeout=300)
    finally:
        for p in ranks: p.kill(), p.join()
    assert "Ranks 1" in answer, answer


def test_a_killed_rank_ends_the_run(tiny, tasks, learnt, launch, tmp_path):
    """Would catch ranks that wait for a dead one for as long as for a slow one: killed in the middle of the cold start,
    while the others compute or wait for its part."""
    for i in range(3):          # after one kill of fifty to two hundred gloo itself waits on, for a send to the dead
        out, store = tmp_path / f"run{i}", tmp_path / f"store{i}"
        argv = command(tiny, tasks, out, *AS_LEARNT, "--resume", f"--rollouts={learnt[0]}")[2:]
        ranks, queues = started([(rank, 2, store, argv) for rank in (0, 1)])
        deadline = time.monotonic() + 900
        while not (out / "metrics.jsonl").exists() and time.monotonic() < deadline: time.sleep(0.05)
        time.sleep(0.5)
        ranks[1].kill()
        try: why, _ = queues[0].get(timeout=300)            # for a slow one it is half an hour
        except queue.Empty: ranks[0].kill()
        else: break
    else: why = "three times it waited for over 300 s"
    ranks[0].join(300)
    assert "by peer" in why or "rank is dead" in why, why


def test_resume_refuses_what_does_not_fit(tmp_path):
    """Would catch a run written over another, flags under which a saved state means something else, and records asked
    for that are not there."""
    out, cfg = tmp_path / "run", loop.Config
    (out / "rollouts").mkdir(parents=True)
    with pytest.raises(AssertionError, match="--resume"): loop.check(cfg(out=str(out)))
    (out / "config.json").write_text(json.dumps({"seed": 1, "lr": 1.}))
    loop.check(cfg(out=str(out), resume=True, seed=1))
    with pytest.raises(AssertionError, match="--seed 0: .* began with 1"): loop.check(cfg(out=str(out), resume=True))
    with pytest.raises(AssertionError, match="0 steps"): loop.check(cfg(out=str(tmp_path / "a"), rollouts=str(out)))
    with pytest.raises(AssertionError, match="itself"):
        loop.check(cfg(out=str(out), resume=True, seed=1, steps=0, rollouts=str(out)))
