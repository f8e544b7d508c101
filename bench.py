"""The benchmarks that the README quotes: each prints a table, or with --json one JSON object.

    python bench.py runs runs/seed0 runs/seed1 runs/seed2    # the headline, from the folders of runs of train.py
    python bench.py tree | packing | sandbox | proxy | graft | weights | carry

Ratios are within one process, medians of interleaved rounds. tree, packing: CPU seconds of one thread (packing on a
GPU: seconds).
runs: pass rates by eval set, harness and moment (bare; cold: after the cold start; end: after RL), per run with
    the interval of rollout.rate (tasks are clusters), over runs ("all") mean and t-interval. gain_points: end
    - cold (no cold start: end - bare), per run with Newcombe's interval, over runs paired. seconds: means a step;
    other: from one log entry to the next less the named phases, where the entry before has a time. in_rollout: shares
    of the summed seconds of all rollouts, which run in parallel; sampling: received to finished over all calls, waiting
    included; harness: the agent's time less that. memory_gb: trainer and engine, the greatest after a step.
tree: 200 calls up to 100k context. linear: each call extends the last; forking: the last 500 tokens of each prompt are
    new. tokens: of prompt and reply, summed over the calls. tokens_per_s: tree.read + tree.build of the record;
    encode_s: tree.call_line of all calls.
packing: `shapes` with token counts times --scale; forward and backward. CPU: float32, 1 of SmolLM2's 30 layers and
    1/30 of its vocabulary, so that the head keeps its share, its chunks scaled like the tokens. GPU: bfloat16, Qwen3
    with Qwen2.5-0.5B's sizes and random weights, checkpointed. flat: each path its own sequence, same code (GPU:
    FlexAttention too). ideal = time of all but attention x unique / flat tokens + time of attention x visible pairs
    of tree / flat, both from flat (all but attention: the values in attention's place; queries and keys still cost
    theirs). The head works on scored tokens, as many packed as flat: where it or launching kernels takes long, ideal
    cannot be reached. memory_ratio: peak above the idle process (GPU: above weights and gradients), per token, packed
    over flat. per_call: each call its own sequence. tokens_per_s: unique ones, packed. mfu: 6 x weights x tokens
    (head: scored ones) + 12 x layers x heads x head size x visible pairs, recomputation not counted, over an H200's
    989 TFLOP/s.
sandbox: start_s: start, a `true` and removal of a sandbox less `docker run --rm` or `bwrap` of it; rollouts_ratio:
    rollouts of nop a second through rollout.Runner over bare pairs of the same commands (`true`, tests/test.sh), as
    many at once; leaked: left at the end.
proxy: chat completions over unix sockets, by clients and prompt length: through the proxy (a session a client, recorded
    and grafted) and through vLLM's unmodified server over the same engine. load: each of --clients holds a conversation
    of --num calls (0 = 4) of 8 to 24 tokens, with short prompts and with 20k tokens; session: the last 4 of 20 calls of
    one that grows to 100k. Short prompts are SmolLM2's, longer ones (a CPU takes minutes for one of 20k tokens, and it
    has 8,192 positions) those of a model with two small layers and random weights, in which the server's own time is
    not hidden behind the engine's. --model puts one in place of both (two-layer: that one). throughput_ratio: sampled
    tokens a second, ours over plain; added_ms: median time of a call, ours less plain; added_cpu_ms: the same in CPU
    time of this process, clients included. of_logprobs, ms_of_logprobs: what of it the engine's log-probabilities cost:
    the same ratio and difference of the plain server with them over that without.
graft: CPU time. session_growth: of a call (graft, record) of a session that grows to 120k tokens, the last 20 of 200
    over calls 21 to 40; text_growth: to compare a turn of 40,000 repeated marks, over 4 x that of 10,000 (1 = linear).
weights: SmolLM2 sharded by FSDP2 on one rank into the engine, as train.py hands it over. over_copy: its time over that
    of a plain copy of the same bytes; gather_over_copy: of what the trainer does of it, float32 weights into the
    memory that the engine opens; the rest is vLLM's, which loads and packs them.
carry: --num (0 = 8) steps of 4 groups of 4 scripted rollouts through the `bash` harness, and an update of 1 s after
    each; 1 rollout of 16, by chance, runs a command of 8 s times --scale, the others one of 0.5 s. ratio: seconds a
    trained group, with train.py's --carry_over 0.5 (6 groups in flight) over those without; the last step waits for
    all. carried: groups that outlived an update; most_updates: the most that one did."""
import argparse, asyncio, concurrent.futures, ctypes, functools, json, math, os, random, subprocess, sys, tempfile, \
    time, uuid
from array import array
from pathlib import Path
from statistics import mean, median, stdev
from types import SimpleNamespace

import numpy as np
import torch

import graft, proxy as boundary, rollout, sandbox, tree

# 97.5 % quantile of Student's t, 1 to 9 degrees of freedom
T_95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
IS_GPU = torch.cuda.is_available()
H200_FLOPS = 989e12                                           # dense bfloat16, by the datasheet


def timed(work, *args, clock=time.perf_counter) -> tuple:     # seconds, what work(*args) returned
    begin, result = clock(), work(*args)
    if IS_GPU: torch.cuda.synchronize()
    return clock() - begin, result


def with_mean(rows: list) -> list:                 # the runs' rows and, of several, their mean with its 95 % t-interval
    if len(rows) < 2: return rows
    values = [r["mean"] for r in rows]
    half, what = T_95[len(rows) - 2] * stdev(values) / math.sqrt(len(rows)), f"t, {len(rows)} runs"
    return rows + [{"run": "all", "mean": mean(values), "low": mean(values) - half, "high": mean(values) + half,
                    "interval": what}]


def gain(a: dict, b: dict) -> dict:                         # b - a in points, its 95 % interval out of Wilson's
    apart = rollout.newcombe(*((x["mean"], x["low"], x["high"]) for x in (a, b)))
    return b | {"mean": 100 * apart["difference"], "low": 100 * apart["low"], "high": 100 * apart["high"],
                "interval": "Newcombe"}


def bench_runs(args) -> dict:
    assert 0 < len(set(args.runs)) == len(args.runs) <= 10, (
        f"runs: name 1 to 10 different folders of runs of train.py, not {args.runs}")
    configs = [json.loads(Path(run, "config.json").read_text()) for run in args.runs]
    apart = "out", "seed", "wandb", "git", "versions", "resume", "deadline_s", "keep_saved"
    differ = [k for k in configs[0] if k not in apart and len({str(c.get(k)) for c in configs}) > 1]
    assert not differ, f"the runs differ in {', '.join(differ)}: give runs of one configuration at a time"
    rates, gains, jobs, steps, at = {}, {}, [], [], lambda row: row.get("time_s", row.get("time/total_s", math.nan))
    for run, config in zip(args.runs, configs):
        # the last: still being written
        mine, rows = {}, [json.loads(t) for t in Path(run, "metrics.jsonl").read_text().split("\n")[:-1]]
        for before, m in zip([{}] + rows, rows):
            if m["phase"] == "rl":
                steps.append(m | {"time/other_s": at(m) - at(before)
                                  - sum(m[f"time/{p}_s"] for p in ("rollout", "train", "weights"))})
            if m["phase"] != "eval": continue
            key, when = (m["set"], m["harness"]), m["when"]
            mine[key, when] = {"run": run, "num": m["num_judged"], "mean": m["pass_rate"], "low": m["low"],
                               "high": m["high"], "interval": "Wilson"}
            rates.setdefault((*key, when), []).append(mine[key, when])
            base = mine.get((key, "cold")) or mine.get((key, "bare"))
            if when == "end" and base: gains.setdefault(key, []).append(gain(base, mine[key, when]))
        num, is_end = (sum(m["phase"] == "rl" for m in rows),
                       any(m["phase"] == "checkpoint" or m.get("when") == "end" for m in rows))
        jobs.append({"run": run, "seed": config["seed"],
                     "minutes": max([at(m) / 60 for m in rows if at(m) > 0], default=math.nan),
                     "steps": num, "is_finished": is_end and num == config["steps"]})
    got = lambda name: [m[name] for m in steps if math.isfinite(m.get(name, math.nan))] or [math.nan]
    phases = {p: mean(got(f"time/{p}_s")) for p in ("rollout", "train", "weights", "other")}
    start, agent, verify, engine = (
        sum(got(k)) for k in ("stage/start_s", "stage/agent_s", "stage/verify_s", "calls/engine_s"))
    parts = {"sampling": engine, "harness": agent - engine, "sandbox_start": start, "verify": verify}
    gap, pearson, step_s = (got("fidelity/gap_mean"), got("fidelity/gap_pearson"),
                            sum(s for s in phases.values() if s > 0) or math.nan)
    return {"pass_rate": [dict(zip(("set", "harness", "when"), k)) | r
                          for k, rows in rates.items() for r in with_mean(rows)],
            "gain_points": [dict(zip(("set", "harness"), k)) | r for k, rows in gains.items() for r in with_mean(rows)],
            "minutes": jobs,
            "seconds": {"a_step": [{"phase": p, "mean": s, "share": s / step_s} for p, s in phases.items()],
                        "in_rollout": [{"part": p, "share": s / (start + agent + verify)} for p, s in parts.items()]},
            "fidelity": {"gap_mean": mean(gap), "gap_max": max(gap), "pearson_mean": mean(pearson),
                         "pearson_min": min(pearson)},
            "memory_gb": max(got("memory/all_gb"))}


def as_rollout(calls: list) -> tree.Rollout:                  # of (prompt ids, sampled ids)
    return tree.Rollout("", "", "", "", 1., 0., [
        tree.Call(i, "main", None, p, p, s, [-1.] * len(s), "stop") for i, (p, s) in enumerate(calls)])


def maker(scale: float, vocab: int):                          # n -> n * scale new tokens
    return lambda n, rng=np.random.default_rng(0): rng.integers(vocab, size=n and max(1, round(n * scale))).tolist()


def talk(new, prompt: list, num: int, num_sampled: int, num_returned: int, num_volatile=0) -> list:
    """`num` calls of which each extends the last, but for num_volatile tokens at the end of each prompt."""
    calls = []
    for _ in range(num):
        calls.append((prompt + new(num_volatile), new(num_sampled)))
        prompt = prompt + calls[-1][1] + new(num_returned)
    return calls


def bench_tree(args) -> dict:
    rows, new, timed_cpu = [], maker(args.scale or 1., 100_000), lambda *a: timed(*a, clock=time.process_time)
    for shape, num_volatile in (("linear", 0), ("forking", 500)):
        calls, times = as_rollout(talk(new, new(20_000), 200, 100, 300, num_volatile)).calls, []
        num_tokens = sum(len(c.prompt_ids) + len(c.sampled_ids) for c in calls)
        encode_s, lines = timed_cpu(lambda: [tree.call_line(c, calls[:i]) for i, c in enumerate(calls)])
        header = {"type": "rollout", "format": 1, "id": "", "task": "", "harness": "", "model": "", "temperature": 1.,
                  "started_s": 0.}
        with tempfile.NamedTemporaryFile("w") as f:
            print(*map(json.dumps, [header, *lines]), sep="\n", file=f, flush=True)
            for _ in range(5):
                read_s, read = timed_cpu(tree.read, f.name)
                build_s, built = timed_cpu(tree.build, read)
                times.append((num_tokens / (read_s + build_s), read_s, build_s))
            rows.append({"shape": shape, "calls": len(calls), "context": len(calls[-1].ids), "paths": len(built.paths),
                         "tokens": num_tokens}
                        | dict(zip(("tokens_per_s", "read_s", "build_s"), map(median, zip(*times))))
                        | {"encode_s": encode_s, "record_mb": os.path.getsize(f.name) / 1e6})
    return {"scale": args.scale or 1., "shapes": rows}


def shapes(scale: float, vocab: int) -> dict:               # name -> rollouts, each a list of (prompt ids, sampled ids)
    new = maker(scale, vocab)

    def compacting(start, helper):                   # three segments, each from the last one's summary; three subagents
        calls, prompt = [], start
        for _ in range(3):
            calls += talk(new, prompt, 6, 100, 200)
            calls.append((calls[-1][0] + calls[-1][1] + new(200), new(300)))
            prompt = start + calls[-1][1]
        return calls + [c for _ in range(3) for c in talk(new, helper + new(300), 5, 100, 200)]

    def tree_of_4(prompt, levels):
        calls = [(prompt, new(128)) for _ in range(4)] if levels else []
        return calls + [c for p, s in calls for c in tree_of_4(p + s, levels - 1)]
    shared, main, helper, trunk = new(4000), new(1500), new(1000), (new(2000), new(4000))
    branches = [((trunk[0] + trunk[1])[:round(n * scale)], new(6000 - n)) for n in (3000, 4000, 5000)]
    return {"i linear": [talk(new, new(1000), 20, 75, 125)],
            "ii group of 8": [talk(new, shared, 5, 200, 200) for _ in range(8)],
            "iii compaction": [compacting(main, helper)], "iii x 4": [compacting(main, helper) for _ in range(4)],
            "iv branches": [[trunk, *branches]], "iv 4-ary": [tree_of_4(new(2000), 3)],
            "unshared": [talk(new, new(4000), 5, 200, 200) for _ in range(4)]}


def peak_bytes(work, *args) -> int:                       # the most that work(*args) takes beyond what was there before
    size = lambda key: next(int(line.split()[1]) << 10 for line in open("/proc/self/status") if line.startswith(key))
    if IS_GPU: torch.cuda.reset_peak_memory_stats()
    else:                                                   # the process's peak starts anew
        ctypes.CDLL(None).malloc_trim(0), Path("/proc/self/clear_refs").write_text("5")
    before = torch.cuda.memory_allocated() if IS_GPU else size("VmRSS")
    work(*args)
    return (torch.cuda.max_memory_allocated() if IS_GPU else size("VmHWM")) - before


def bench_packing(args) -> dict:
    from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config
    torch.set_num_threads(1)
    config = Qwen3Config(
        hidden_size=896, intermediate_size=4864, num_hidden_layers=24, num_attention_heads=14, num_key_value_heads=2,
        head_dim=64, vocab_size=151936, tie_word_embeddings=True) if IS_GPU else LlamaConfig(
        hidden_size=576, intermediate_size=1536, num_hidden_layers=1, num_attention_heads=9, num_key_value_heads=3,
        vocab_size=49152 // 30, tie_word_embeddings=True)
    scale, vocab, rows, attend = args.scale or (1. if IS_GPU else 0.1), config.vocab_size, [], tree.attend
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16 if IS_GPU else torch.float32)
    if IS_GPU: model.cuda().train().gradient_checkpointing_enable()
    in_layers = sum(p.numel() for p in model.model.layers.parameters())

    def values(module, q, k, v, mask, **_):          # q and k keep their gradients, so their projections all their cost
        return ((v + 0 * k).repeat_interleave(q.shape[1] // k.shape[1], 1) + 0 * q).transpose(1, 2), None

    def go(paths, scored, share, attention=attend):
        tree.attend = attention
        forest = tree.pack(paths, scored, share).to(model.device)
        tree.logprobs(model, forest, chunk=max(1, round(1024 * scale))).sum().backward()
        tree.attend = attend
        model.zero_grad(set_to_none=False)
    cost = lambda *a: timed(go, *a, clock=time.perf_counter if IS_GPU else time.process_time)[0]
    # tensors that glibc keeps in its heap leave holes, half as large as they: until memory is measured it maps each
    map_above = functools.partial(ctypes.CDLL(None).mallopt, -3)        # M_MMAP_THRESHOLD, bytes
    map_above(1 << 16)
    of_shape, loads, memory = shapes(scale, vocab), {}, {}
    for name, rollouts in of_shape.items():
        trees = [tree.build(as_rollout(calls)) for calls in rollouts]
        both = loads[name] = [p for t in trees for p in t.paths], [s for t in trees for s in t.trained]
        go(*both, True)                                     # warm-up; gradients are there from now on
        memory[name] = peak_bytes(go, *both, True) / peak_bytes(go, *both, False)
    map_above(1 << 25)                                      # the most that glibc itself would come to
    for name, rollouts in of_shape.items():
        both, times = loads[name], []
        calls = [(p + s, np.arange(len(p), len(p) + len(s))) for calls in rollouts for p, s in calls]
        packed, flat = tree.pack(*both, True), tree.pack(*both, False)
        num_pairs, num_flat_pairs = ((f.pos + 1).sum().item() for f in (packed, flat))
        pairs, tokens = num_pairs / num_flat_pairs, len(packed.ids) / len(flat.ids)
        flops = (6 * (in_layers * len(packed.ids) + vocab * config.hidden_size * len(packed.src))
                 + 12 * config.num_hidden_layers * config.num_attention_heads * config.head_dim * num_pairs)
        for _ in range(5):
            flat_s, rest_s, packed_s = cost(*both, False), cost(*both, False, values), cost(*both, True)
            times.append({"ideal_over_time": (rest_s * tokens + (flat_s - rest_s) * pairs) / packed_s,
                          "flat_over_packed": flat_s / packed_s, "tokens_per_s": len(packed.ids) / packed_s,
                          "per_call_over_packed": cost(*zip(*calls), False) / packed_s
                          if name in ("i linear", "iii compaction") else math.nan
                          } | ({"mfu": flops / packed_s / H200_FLOPS} if IS_GPU else {}))
        rows.append({"shape": name, "flat_tokens": len(flat.ids), "unique_tokens": len(packed.ids)}
                    | {k: median(t[k] for t in times) for k in times[0]} | {"memory_ratio": memory[name] / tokens})
    return {"scale": scale, "shapes": rows[:-1], "over_flat_when_unshared": 1 / rows[-1]["flat_over_packed"]}


BARE = {"docker": "docker run --rm --network none -v {}:/tests:ro harness-rl/base",
        "bubblewrap": "bwrap --unshare-all --die-with-parent --ro-bind /usr /usr --symlink usr/bin /bin "
                      "--symlink usr/lib /lib "
                      "--symlink usr/lib64 /lib64 --proc /proc --dev /dev --tmpfs /logs --ro-bind {} /tests"}


def write_task(folder: Path):
    for name, text in {"instruction.md": "-", "task.toml": "",
                       "environment/Dockerfile": "FROM harness-rl/base\nWORKDIR /app\n",
                       "tests/test.sh": "mkdir -p /logs/verifier && echo 0 > /logs/verifier/reward.txt\n"}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def bench_sandbox(args) -> dict:
    num, rows, problems = args.num or 16, [], {kind: make.problem() for kind, make in sandbox.SANDBOXES.items()}
    assert None in problems.values(), f"neither kind of sandbox runs here: {problems}"
    with tempfile.TemporaryDirectory() as tmp:
        write_task(Path(tmp))
        task = rollout.load_task(Path(tmp), "bench", {})
        for kind in (k for k, problem in problems.items() if not problem):
            runner, bare = rollout.Runner(None, kind, uuid.uuid4().hex[:12]), BARE[kind].format(f"{tmp}/tests").split()
            run = lambda *argv: subprocess.run([*bare, *argv], check=True)

            def ours():
                with sandbox.SANDBOXES[kind](task.env, run_id=runner.run_id, name="bench") as box:
                    assert box.exec(["true"]).exit_code == 0
            def pairs():
                with concurrent.futures.ThreadPoolExecutor(runner.num_parallel) as pool:
                    list(pool.map(lambda _: (run("true"), run("bash", "/tests/test.sh")), range(num)))
            def rollouts():
                done = runner.run_all([rollout.Job(task, "nop", i) for i in range(num)], Path(tmp, kind), "nop",
                                      quiet=True)
                assert all(r.outcome == "ok" and r.reward == 0 for r in done), (
                    f"nop in {kind}: {rollout.show(rollout.summary(done))}")
            starts = [(timed(ours)[0], timed(run, "true")[0]) for _ in range(7)]
            ratios = [timed(pairs)[0] / timed(rollouts)[0] for _ in range(3)]
            rows.append({"kind": kind, "start_s": median(a - b for a, b in starts),
                         "bare_s": median(b for _, b in starts),
                         "rollouts_ratio": median(ratios), "leaked": sandbox.reap(runner.run_id)})
    return {"rollouts": num} | {k: rows[0][k] for k in ("start_s", "rollouts_ratio", "leaked")} | {"kinds": rows}


def make_engine(model: str, max_model_len: int):
    extra = [] if IS_GPU else ["--block-size", "32", "--max-num-seqs", "64"]        # as train.py
    return boundary.Proxy(boundary.resolve_model(model, max_model_len), max_model_len=max_model_len, engine_args=extra)


def random_model(folder: str):                              # 2 small layers behind SmolLM2's tokenizer, 128k context
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM
    tokenizer = AutoTokenizer.from_pretrained(boundary.resolve_model("smollm2"))
    LlamaForCausalLM(LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=2**17, bos_token_id=1, eos_token_id=2)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


async def plain_server(proxy, path: str, logprobs: bool):
    """vLLM's own app over the same engine, without what our Recorder does around `generate`; logprobs: the engine is
    asked for those of the sampled tokens, as ours asks, and nobody reads them."""
    import prometheus_client, uvicorn
    from vllm.entrypoints.serve.instrumentator import metrics
    from vllm.entrypoints.launchers.api_server.app_state import init_app_state
    from vllm.entrypoints.launchers.app import build_app
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser
    from vllm.v1.engine.async_llm import AsyncLLM

    class Plain:
        def __getattr__(self, name): return getattr(proxy.engine, name)
        def generate(self, prompt, p, *args, **kw):
            if logprobs: p.logprobs = 0
            return AsyncLLM.generate(proxy.engine, prompt, p, *args, **kw)
    options = make_arg_parser(FlexibleArgumentParser()).parse_args(proxy.args)
    tasks = await proxy.engine.get_supported_tasks()
    metrics.get_prometheus_registry = prometheus_client.CollectorRegistry       # a process's second app counts nothing
    app = build_app(options, tasks, proxy.engine.model_config)
    await init_app_state(Plain(), app.state, options, tasks)
    config = uvicorn.Config(app, lifespan="off", log_config=None, access_log=False)
    config.load()
    protocol = lambda: config.http_protocol_class(config=config, server_state=proxy.state, app_state={})
    return await proxy.loop.create_unix_server(protocol, path)


async def converse(addresses: list, num_words: int, num_calls: int, num_added=0) -> tuple:
    """A conversation an address, of replies of 8 to 24 tokens -> sampled tokens, seconds, median seconds of a call,
    median prompt tokens, CPU seconds of this process (clients and server, not the engine) a call. num_added: words that
    each call adds; then only the last 4 count."""
    import aiohttp
    calls, begin, begin_cpu = [], time.perf_counter(), time.process_time()

    async def client(i, address):
        nonlocal begin, begin_cpu
        messages = [{"role": "user", "content": "word " * num_words + str(i)}]      # one prefix, as in a group
        chance = random.Random(i)                           # replies of one length would keep all clients in step
        async with aiohttp.ClientSession(connector=aiohttp.UnixConnector(address)) as http:
            for k in range(num_calls):
                if num_added and k == num_calls - 4:
                    calls[:], begin, begin_cpu = [], time.perf_counter(), time.process_time()
                body = {"model": "policy", "messages": messages, "max_tokens": chance.randint(8, 24),
                        "ignore_eos": True}
                sent = time.perf_counter()
                async with http.post("http://policy/v1/chat/completions", json=body) as response:
                    answer = await response.json()
                    assert response.status == 200, answer
                usage, text = answer["usage"], answer["choices"][0]["message"]["content"] or ""
                calls.append((usage["completion_tokens"], time.perf_counter() - sent, usage["prompt_tokens"]))
                messages += [{"role": "assistant", "content": text},
                             {"role": "user", "content": "Go on." + " word" * num_added}]
    await asyncio.gather(*map(client, range(len(addresses)), addresses))
    num_tokens, seconds, prompt_tokens = zip(*calls)
    return (sum(num_tokens), time.perf_counter() - begin, median(seconds), median(prompt_tokens),
            (time.process_time() - begin_cpu) / len(calls))


def compare_servers(model: str, loads: list, budget_s: float) -> list:
    """loads: (clients, words of the first message, words that each call adds, calls) -> a row each: medians of 3 to 9
    rounds, as many as budget_s holds, behind one to warm up; of a session, whose calls take seconds, of 1 or more."""
    rows, context = [], 512 + max(words + num_calls * (64 + added) for _, words, added, num_calls in loads)
    with (tempfile.TemporaryDirectory() as tmp,
          make_engine(random_model(f"{tmp}/model") if model == "two-layer" else model, context) as proxy):
        plain = [f"{tmp}/plain.sock", f"{tmp}/logprobs.sock"]
        servers = [proxy.wait_for(plain_server(proxy, path, path != plain[0])) for path in plain]
        for clients, num_words, num_added, num_calls in loads:
            rounds, begin = [], time.monotonic()
            num_before, least = (0, 1) if num_added else (1, 3)
            while (num := len(rounds) - num_before) < least or num < 9 and time.monotonic() < begin + budget_s:
                sessions = [proxy.open_session(str(c), f"{tmp}/{c}.jsonl", {}) for c in range(clients)]
                sides, got = [[s.address for s in sessions], *([path] * clients for path in plain)], {}
                for i in sorted(range(3), key=lambda i: (i + len(rounds)) % 3):     # each comes first in its turn
                    assert proxy.wait_for(proxy.engine.reset_prefix_cache()), "the prefix cache could not be reset"
                    got[i] = asyncio.run(converse(sides[i], num_words, num_calls, num_added))
                assert all(len(s.calls) == num_calls for s in sessions), "a call was not recorded"
                assert len({got[i][0] for i in range(3)}) == 1, "replies of other lengths"
                for s in sessions: proxy.close_session(s)
                rounds.append([got[i] for i in range(3)])
            tokens, seconds, of_call, prompt_tokens, cpu = np.array(rounds[num_before:]).transpose(2, 1, 0)
            speed, more = tokens / seconds, lambda x, i, than: 1000 * median(x[i] - x[than])
            rows.append({"model": model, "clients": clients, "prompt_tokens": prompt_tokens[0, 0],
                         "throughput_ratio": median(speed[0] / speed[1]), "added_ms": more(of_call, 0, 1),
                         "added_cpu_ms": more(cpu, 0, 1), "of_logprobs": median(speed[2] / speed[1]),
                         "ms_of_logprobs": more(of_call, 2, 1),
                         "plain_cpu_ms": 1000 * median(cpu[1]), "plain_ms": 1000 * median(of_call[1]),
                         "plain_tokens_per_s": median(speed[1]), "rounds": len(seconds[0])})
            print(f"{time.monotonic() - begin:.0f} s:", *show([rows[-1]], "proxy"), sep="\n", file=sys.stderr)
        for server in servers: proxy.loop.call_soon_threadsafe(server.close)
    return rows


def bench_proxy(args) -> dict:
    boundary.HARNESS_CHOOSES += "ignore_eos",               # else replies through the proxy alone would end early
    num_calls, scale = args.num or 4, args.scale or 1.
    long, grown, budget_s = round(20_000 * scale), round(5000 * scale), 40 * scale
    short = [(c, 8, 0, num_calls) for c in args.clients]
    more = [*((c, long, 0, num_calls) for c in args.clients), (1, grown, grown, 20)]
    loads = {args.model: short + more} if args.model else {"smollm2": short, "two-layer": more}
    *load, session = [row for model, x in loads.items() for row in compare_servers(model, x, budget_s)]
    return {"load": load, "session": [session]}


def grow_session(record: Path, num_calls: int) -> tuple:
    """A session of calls that each add 600 tokens -> session, CPU seconds of each call."""
    session, history, seconds, ids = boundary.Session("s", record), array("i", [5] * 100), [], [*range(100, 400), 2]

    def serve(call):
        continues = {s.id: s.continues for s in session.seen}
        call.prompt_ids, parent, call.cause = graft.graft(call.template_ids, session.calls, continues, {2}, str,
                                                          "canonical")
        call.continues = parent and parent.id
        if call.prompt_ids == call.template_ids: call.prompt_ids = call.template_ids        # as the proxy does
        session.seen.append(call)
        session.put(call, ids, [0.] * len(ids), "stop", [], SimpleNamespace(temperature=1., max_tokens=9), 0.)
    for i in range(num_calls):
        call = boundary.Pending(session, 0., id=i, template_ids=history + array("i", [9]))
        seconds.append(timed(serve, call, clock=time.thread_time)[0])
        history = call.template_ids + array("i", ids) + array("i", range(300))
    return session, seconds


def bench_graft(args) -> dict:
    def compare(n):
        for unit in "\n\n\n", "<tool_call>\n", " <think>", "</think> ", "<analysis>":
            text = unit * n
            graft.meaning(text), graft.asks_for_summary(text), graft.compare("", text, "x</think>" + text)
    spent = lambda n: median(timed(compare, n, clock=time.thread_time)[0] for _ in range(5))
    with tempfile.TemporaryDirectory() as tmp: _, seconds = grow_session(Path(tmp, "record"), 200)
    early, late = mean(seconds[20:40]), mean(seconds[180:])
    return {"session_growth": late / early, "early_call_ms": 1000 * early, "late_call_ms": 1000 * late,
            "text_growth": spent(40_000) / (4 * spent(10_000))}


def bench_weights(args) -> dict:
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard
    from transformers import AutoModelForCausalLM

    import train
    dist.init_process_group("nccl" if IS_GPU else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    device, memory = torch.device("cuda" if IS_GPU else "cpu"), []
    with make_engine("smollm2", 1024) as proxy:
        model = AutoModelForCausalLM.from_pretrained(proxy.args[1], dtype=torch.float32).to(device)
        for layer in [*model.model.layers, model]: fully_shard(layer)
        dtype = getattr(torch, tree.native_dtype())
        hand_over = lambda to: train.hand_over(to, 0, model, memory, dtype, device)
        hand_over(proxy)
        plain = memory[0].clone()
        times = [(timed(hand_over, proxy)[0], timed(hand_over, None)[0], timed(plain.copy_, memory[0])[0])
                 for _ in range(args.num or 9)]
    whole, gather, copy = (median(t) for t in zip(*times))
    return {"over_copy": median(t[0] / t[2] for t in times), "gather_over_copy": median(t[1] / t[2] for t in times),
            "hand_over_s": whole, "gather_s": gather, "copy_s": copy, "gb": plain.nbytes / 1e9}


def carry_steps(runner, task, out: Path, num_steps: int, share: float, tail_s: float) -> dict:
    """Steps as train.py's, with what it does to runner and engine around an update."""
    chance, flying, num_begun, spans, begin = random.Random(0), [], 0, [], time.perf_counter()
    for step in range(num_steps):
        is_last = step + 1 == num_steps
        while len(flying) < 4 + int(4 * share) * (not is_last):
            sleeps = [tail_s if chance.random() < 1 / 16 else 0.5 for _ in range(4)]
            jobs = [rollout.Job(task, "bash", 4 * num_begun + i, (f"sleep {s}", "DONE")) for i, s in enumerate(sleeps)]
            flying.append((step, runner.begin(jobs, out)))
            num_begun += 1
        has_ended = lambda group: all(f.done() for f in group[1])
        while sum(map(has_ended, flying)) < (len(flying) if is_last else 4): time.sleep(0.02)
        spans += [step - first for first, _ in filter(has_ended, flying)]
        flying = [group for group in flying if not has_ended(group)]
        runner.hold(), runner.proxy.sleep()
        time.sleep(1)
        runner.proxy.wait_for(runner.proxy.engine.resume_generation()), runner.go_on()
    took = time.perf_counter() - begin
    assert all(tree.read(p).outcome == "ok" for p in out.glob("*.jsonl")), f"not all rollouts in {out} ended well"
    return {"carry_over": share, "groups": len(spans), "group_s": took / len(spans), "step_s": took / num_steps,
            "carried": sum(n > 0 for n in spans), "most_updates": max(spans)}


def bench_carry(args) -> dict:
    kind = sandbox.choose("auto")
    with tempfile.TemporaryDirectory() as tmp:
        write_task(Path(tmp, "task"))
        task, rows = rollout.load_task(Path(tmp, "task"), "bench", {}), []
        with boundary.Proxy(random_model(f"{tmp}/model"), max_model_len=1024, engine="scripted") as proxy:
            for share in (0., 0.5):
                runner = rollout.Runner(proxy, kind, uuid.uuid4().hex[:12], num_parallel=24)
                try: rows.append(carry_steps(runner, task, Path(tmp, str(share)), args.num or 8, share,
                                             8 * (args.scale or 1.)))
                finally: runner.stop()
    return {"ratio": rows[1]["group_s"] / rows[0]["group_s"], "runs": rows}


BENCHMARKS = {"runs": bench_runs, "tree": bench_tree, "packing": bench_packing, "sandbox": bench_sandbox,
              "proxy": bench_proxy, "graft": bench_graft, "weights": bench_weights, "carry": bench_carry}


def show(x, name=""):
    """Lines of text: a list of rows is a table, all else one line a number."""
    text = lambda v: ("-" if v is None else f"{v:,.0f}" if isinstance(v, float) and abs(v) >= 1000 else
                      f"{v:.4g}" if isinstance(v, float) else str(v))
    if isinstance(x, dict):
        for k, v in x.items(): yield from show(v, f"{name}.{k}" if name else k)
    elif isinstance(x, list):
        columns = list(dict.fromkeys(k for row in x for k in row))
        cells = [columns, *([text(row.get(k)) for k in columns] for row in x)]
        width = [max(map(len, column)) for column in zip(*cells)]
        yield from [f"{name}:", *("  " + "  ".join(v.ljust(w) for v, w in zip(row, width)).rstrip()
                                  for row in cells if x)]
    else: yield f"{name}: {text(x)}"


def parse(argv=None):
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                                allow_abbrev=False)
    p.add_argument("name", help=f"one of {', '.join(BENCHMARKS)}")
    p.add_argument("runs", nargs="*", metavar="RUN_DIR", help="runs: folders of train.py, of one configuration")
    p.add_argument("--scale", type=float, default=0.,
                   help="tree, packing, proxy: token counts times this (0 = 1; packing on a CPU 0.1); carry: the tail")
    p.add_argument("--num", type=int, default=0, help="sandbox: rollouts (0 = 16); proxy: calls; weights: rounds; "
                                                           "carry: steps")
    p.add_argument("--clients", type=lambda text: [*map(int, text.split(","))], default=[1, 16, 64],
                   help="proxy: numbers of them, as 1,16,64")
    p.add_argument("--model", help="proxy: a Hugging Face folder, smollm2 or two-layer for all of it")
    p.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    return p.parse_args(argv)


def main(args):
    if args.name not in BENCHMARKS: raise ValueError(f"{args.name}: no such benchmark; one of {', '.join(BENCHMARKS)}")
    if args.runs and args.name != "runs": raise ValueError(f"{args.name} takes no folders: {' '.join(args.runs)}")
    # JSON knows no NaN
    result = json.loads(json.dumps(BENCHMARKS[args.name](args)), parse_constant=lambda _: None)
    print(json.dumps(result) if args.json else "\n".join(show(result)))


if __name__ == "__main__": rollout.command(main, parse())
