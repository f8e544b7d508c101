"""train.py end to end on a tiny random model: real engine, sandboxes, harness and updates."""
import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from conftest import ROOT, make_task
import algos
import train as loop
import tree

QUICK = "--enforce-eager --distributed-executor-backend uni"
# a tiny model solves nothing, and equal rewards give no update
COIN = "echo $((RANDOM % 2)) > /logs/verifier/reward.txt"


@pytest.fixture(scope="module")
def tasks(tmp_path_factory, bubblewrap):
    """Four tasks that a coin decides, whatever the policy did; their solution is a command."""
    folder = tmp_path_factory.mktemp("coins")
    for i in range(4):
        make_task(folder / f"coin-{i}", instruction=f"Write {i} to out.txt.", solution=f"echo {i} > out.txt", test=COIN)
    return folder


def command(tiny, tasks, out, *flags, launcher=(sys.executable,)):
    small = {"model": tiny, "tasks": tasks, "eval_tasks": "", "out": out, "sandbox": "bubblewrap", "dtype": "float32",
             "max_model_len": 256, "max_tokens": 8, "steps": 2, "warmup_steps": 0, "tasks_per_step": 2, "group_size": 4,
             "num_parallel": 8, "engine_args": "--enforce-eager"}
    return [*map(str, launcher), str(ROOT / "train.py"), *(f"--{k}={v}" for k, v in small.items()), *flags]


def train(*args, is_quick=True, **kw):
    """-> exit status, stderr, the lines of metrics.jsonl. Quick: vLLM's worker in its engine's process, 5 s less to
    start."""
    words, env = command(*args, **kw), os.environ
    if is_quick: words, env = [*words, f"--engine_args={QUICK}"], {**env, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    result = subprocess.run(words, cwd=ROOT, env=env, capture_output=True, text=True, timeout=600)
    metrics = args[2] / "metrics.jsonl"
    lines = metrics.read_text().splitlines() if metrics.exists() else []
    return result.returncode, result.stderr, [json.loads(line) for line in lines]


def weights(folder):
    from safetensors.torch import load_file
    return load_file(f"{folder}/model.safetensors")


@pytest.fixture(scope="module")
def learnt(tiny, tasks, tmp_path_factory):
    """-> run folder and metrics of a cold start, after which the tiny model says DONE and so is rewarded at times,
    and two RL steps."""
    out = tmp_path_factory.mktemp("learnt") / "run"
    status, stderr, rows = train(tiny, tasks, out, "--warmup_steps=40", "--warmup_rollouts=4", "--warmup_lr=1e-2",
                                 "--lr=1e-3", "--num_epochs=2", "--group_size=8", "--max_tokens=16", is_quick=False)
    assert status == 0, stderr[-3000:]
    return out, rows


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
        assert 0 < r["train/grad_norm"] < float("inf") and r["train/ratio"] != 1
    before, after = weights(tiny), weights(out / "checkpoint")
    assert before.keys() == after.keys() and all(before[k].shape == after[k].shape for k in before)
    assert any(not before[k].equal(after[k]) for k in before)
    loaded = AutoModelForCausalLM.from_pretrained(out / "checkpoint").state_dict()
    assert all(loaded[k].equal(v) for k, v in after.items())
    record = next((out / "rollouts").glob("step-0001/*.jsonl")).read_text().splitlines()
    assert json.loads(record[1])["versions"][0][0] == 2, "sampled by the weights of the cold start and one step"


def test_an_update_favours_what_was_rewarded(learnt, tasks, tmp_path):
    """Would catch a wrong sign, advantages given to other rollouts than their own, or log-probabilities of other
    tokens: one step from fresh Adam, sum over rollouts of advantage x mean logp must have risen (before: the engine's
    own word for it). To first order Adam's first step cannot lower it; a later one, with the last batch's momentum, can."""
    status, stderr, rows = train(learnt[0] / "checkpoint", tasks, tmp_path / "run", "--steps=1", "--lr=1e-4",
                                 "--lr_warmup_steps=1", "--group_size=8", "--max_tokens=16")
    assert status == 0, stderr[-3000:]
    rollouts = [r for r in map(tree.read, sorted((tmp_path / "run/rollouts/step-0000").glob("*.jsonl")))
                if r.reward is not None and r.calls]
    tasks = sorted({r.task for r in rollouts})
    rewards = torch.tensor([r.reward for r in rollouts])
    adv = algos.group_advantages(rewards, torch.tensor([tasks.index(r.task) for r in rollouts]))
    model, gain = AutoModelForCausalLM.from_pretrained(tmp_path / "run/checkpoint", dtype=torch.float32), []
    for t in map(tree.build, rollouts):
        forest = tree.pack(t.paths, t.trained)
        with torch.no_grad(): after = tree.logprobs(model, forest)[torch.cat(forest.where)]
        gain.append((after - torch.cat([torch.tensor(x) for x in t.logp_rollout])).mean().item())
    assert len(rollouts) == 16 and (adv > 0).any() and (adv * torch.tensor(gain)).sum() > 1e-4, (adv, gain)


RECIPES = {
    "ppo": ["--value_warmup_steps=1", "--value_lr=1e-3", "--lam=0.95", "--kl_reward=0.01", "--loss_mean=token"],
    "gspo": ["--correction=geometric+tis", "--num_epochs=2", "--kl_loss=0.01", "--overlong_buffer=64"]}


@pytest.mark.parametrize("algo", RECIPES)
def test_other_algorithms(learnt, tasks, tmp_path, algo):
    """Would catch an algorithm whose parts do not fit the loop: a critic or a reference that FSDP cannot gather, a
    critic that stays as it was or lets the policy move in its warm-up, a reference that is not the policy of the start,
    half a rollout in a micro-batch, sums that reach no metric. The packing checks itself before the first update."""
    flags = "--check_packing", "--max_resample=1", "--steps=3", "--lr=1e-3", "--micro_batch_tokens=512"
    status, stderr, rows = train(learnt[0] / "checkpoint", tasks, tmp_path / "run", f"--algo={algo}", *flags,
                                 *RECIPES[algo])
    assert status == 0, stderr[-3000:]
    rl = [r for r in rows if r["phase"] == "rl"]
    moved = [r for r in rl if "train/grad_norm" in r]
    assert len(rl) == 3 and moved and max(r["packing/gradient_error"] for r in rl if "packing/logp_error" in r) < 1e-4
    for r in rl: assert 1 <= r["groups/rounds"] <= 2 and r["groups/dropped"] < r["groups/num"] or r not in moved, r
    for r in moved: assert np.isfinite([r["train/loss"], r["train/kl_ref"]]).all() and 0 < r["train/ess"] <= 1, r
    assert moved[0]["train/kl_ref"] < 1e-6 if algo == "ppo" else moved[0]["train/ratio"] != 1
    if algo == "ppo":
        critic = [r for r in rl if "train/value_loss" in r]
        assert rl[0] not in moved and len(critic) > 1, "in its warm-up the critic alone learns"
        assert all(np.isfinite(r["train/value_loss"]) and r["train/value_grad_norm"] > 0 for r in critic)
        known = [abs(r["train/explained_variance"]) for r in critic]
        assert known[0] < 1e-6 < known[1], "a critic that is 0 at first has not moved"
    before, after = weights(learnt[0] / "checkpoint"), weights(tmp_path / "run" / "checkpoint")
    assert any(not before[k].equal(after[k]) for k in before)


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
    full = lambda x: torch.full((len(batch.rollout),), x)
    group = torch.zeros(len(rewards), dtype=torch.long) if group is None else torch.tensor(group)
    norm = algos.token_weights(batch.rollout, len(rewards), cfg.loss_mean)
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
    ppo = {"algo": "ppo", "value": .25, "whiten": False}
    assert credited([1., 0.], **ppo) == ([.75] * 3 + [-.25] * 3, [1.] * 3 + [0.] * 3)
    assert credited([1.], gamma=.5, **ppo)[1] == [.5, 1., 1.], "the second token of a path, and a path of one, end it"
    assert credited([1.], logp=-1., ref=-1.5, kl_reward=.1, **ppo)[1] == near([.9, .95, .95])
    adv, _ = credited([1., 0.], algo="ppo", value=.25)
    assert np.mean(adv) == near(0) and np.std(adv) == near(1), "whitened"


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


@pytest.mark.parametrize("wrong", [
    {"correction": "tis+none"}, {"dual_clip": 3., "algo": "cispo"}, {"group_size": 1}, {"lam": 1.5},
    {"group_size": 1, "algo": "ppo", "max_resample": 1}, {"overlong_buffer": 5000}, {"max_resample": -1},
    {"loss_mean": "token", "algo": "gspo"}, {"baseline": "group"}, {"check_packing": True}])
def test_flags_that_do_not_fit_are_refused(wrong, tmp_path):
    """Would catch a run of hours whose flags are ignored, or fail only at the first update."""
    loop.check(loop.Config(out=str(tmp_path), algo="ppo", group_size=1, correction="geometric+tis"))
    with pytest.raises(AssertionError, match=f"--({'|'.join(wrong)})"):
        loop.check(loop.Config(out=str(tmp_path), **wrong))


def test_canary(learnt, tasks, tmp_path):
    """Would catch an update that moves weights beside the learning rate (decay, a stray copy), and drift between
    engine and trainer."""
    status, stderr, rows = train(learnt[0] / "checkpoint", tasks, tmp_path / "run", "--lr=0", "--steps=3")
    assert status == 0, stderr[-3000:]
    before, after = weights(learnt[0] / "checkpoint"), weights(tmp_path / "run" / "checkpoint")
    assert all(before[k].equal(after[k]) for k in before)
    gaps = [r["fidelity/gap_mean"] for r in rows if "fidelity/gap_mean" in r]
    assert gaps and max(gaps) < 1e-3


def test_the_fidelity_gate_refuses(learnt, tasks, tmp_path):
    """Would catch a gate that only reports: with a bound that nothing meets no update may happen, and the run ends
    with the reason."""
    flags = "--max_logp_gap=1e-12", "--steps=20"
    status, stderr, rows = train(learnt[0] / "checkpoint", tasks, tmp_path / "run", *flags)
    assert status == 2 and "update refused" in stderr and "--max_logp_gap" in stderr, stderr[-3000:]
    assert not any("train/grad_norm" in r for r in rows) and not (tmp_path / "run" / "checkpoint").exists()


def test_two_ranks(learnt, tasks, tmp_path):
    """Would catch ranks that wait for each other (unequal micro-batches), engines that take torchrun's variables
    for their own, and metrics that every rank writes."""
    launcher = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    status, stderr, rows = train(learnt[0] / "checkpoint", tasks, tmp_path / "run", "--micro_batch_tokens=64",
                                 launcher=launcher)
    assert status == 0, stderr[-3000:]
    rl = [r for r in rows if r["phase"] == "rl"]
    assert [r["step"] for r in rl] == [0, 1] and all(r["calls/num"] >= 8 for r in rl)
    assert max(r["fidelity/gap_mean"] for r in rl if "fidelity/gap_mean" in r) < 1e-3


def test_ctrl_c_leaves_nothing(tiny, tasks, tmp_path):
    """Would catch engines, sandboxes or sockets that outlive an interrupted run."""
    marker = f"HARNESS_RL_TEST_{os.getpid()}"
    env = {**os.environ, marker: "1", "TMPDIR": str(tmp_path)}
    process = subprocess.Popen(command(tiny, tasks, tmp_path / "run", "--steps=1000"), cwd=ROOT, stderr=subprocess.PIPE,
                               text=True, stdout=subprocess.DEVNULL, env=env)
    metrics, deadline = tmp_path / "run" / "metrics.jsonl", time.monotonic() + 300
    while not (metrics.exists() and '"rl"' in metrics.read_text()) and time.monotonic() < deadline:
        if process.poll() is not None: break
        time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 130, stderr[-3000:]

    def alive():
        found = []
        for pid in filter(str.isdigit, os.listdir("/proc")):
            try: found += [pid] if marker.encode() in open(f"/proc/{pid}/environ", "rb").read() else []
            except OSError: pass
        return found
    deadline = time.monotonic() + 30
    while alive() and time.monotonic() < deadline: time.sleep(0.2)
    assert not alive() and not list(tmp_path.glob("harness-rl_*")) and not list(tmp_path.glob("hrl-*"))
    assert not [path for path in tmp_path.iterdir() if path.is_socket()]
