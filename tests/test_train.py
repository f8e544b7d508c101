"""train.py end to end on a tiny random model: real engine, sandboxes, harness and updates."""
import json
import os
import signal
import subprocess
import sys
import time

import pytest
import torch
from transformers import AutoModelForCausalLM

from conftest import ROOT, make_task
import algos
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


def test_an_update_favours_what_was_rewarded(learnt):
    """Would catch a wrong sign, advantages given to other rollouts than their own, or log-probabilities of other
    tokens: over the last step's update, recorded rollouts with reward must have become likelier than those without
    (before: the engine's own word for it)."""
    folder, path = learnt[0] / "checkpoint", learnt[0] / "rollouts/step-0001"
    rollouts = [r for r in map(tree.read, sorted(path.glob("*.jsonl"))) if r.reward is not None and r.calls]
    tasks = sorted({r.task for r in rollouts})
    rewards = torch.tensor([r.reward for r in rollouts])
    adv = algos.group_advantages(rewards, torch.tensor([tasks.index(r.task) for r in rollouts]))
    model, gain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), []
    for t in map(tree.build, rollouts):
        forest = tree.pack(t.paths, t.trained)
        with torch.no_grad(): after = tree.logprobs(model, forest)[torch.cat(forest.where)]
        gain.append((after - torch.cat([torch.tensor(x) for x in t.logp_rollout])).mean().item())
    gain = torch.tensor(gain)
    assert (adv > 0).any() and gain[adv > 0].mean() > gain[adv < 0].mean() and (adv * gain).sum() > 0, (adv, gain)


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
