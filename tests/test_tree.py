"""tree.py: the record's exact round trip, what is trained, packing and its gradients against plain transformers."""
import copy, json, math, os, sys
from collections import Counter
from dataclasses import fields, replace
import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings, strategies as st
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen3Config

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from algos import grpo_loss, token_weights
from tree import Call, Rollout, build, call_line, encode, lcp, logprobs, main, pack, parse, read, split

IDS = lambda low, high: st.lists(st.integers(0, 2), min_size=low, max_size=high)      # three tokens: they collide often
quick = settings(max_examples=150, deadline=None)


def rollout_of(calls, **kw):
    return Rollout("r", "t", "h", "m", 1.0, 0.0, calls, **kw)


def call(id, prompt, sampled, kind="main", finish="stop", cause=None, **kw):
    logp = [-0.5 - id - i / 64 for i in range(len(sampled))]
    return Call(id, kind, cause, prompt, prompt, sampled, logp, finish, **kw)


def write(path, rollout, order=None, end=True):
    """Records the calls in the given order of completion."""
    lines = [{"type": "rollout", "format": 1, "id": rollout.id, "task": "t", "harness": "h", "model": "m",
              "temperature": 1.0, "started_s": 0.0}]
    done = []
    for i in order if order is not None else range(len(rollout.calls)):
        lines.append(call_line(rollout.calls[i], done))
        done.append(rollout.calls[i])
    if end: lines.append({"type": "end", "outcome": "ok", "reward": 0.5, "detail": "", "seconds": {"agent": 1.0},
                          "sandbox": "docker", "verify": "strict", "mode": "new key"})
    path.write_text("".join(json.dumps(line, allow_nan=False) + "\n" for line in lines))
    return lines


@st.composite
def rollouts(draw, kinds=("main", "main", "main", "subagent", "side")):
    """Calls that continue, retry, fork off, or stand alone; some aborted; templates that differ from prompts."""
    calls = []
    for id in range(draw(st.integers(1, 9))):
        move, prompt = draw(st.sampled_from(["continue", "retry", "fork", "root"])), []
        if calls and move != "root":
            base = draw(st.sampled_from(calls))
            prompt = list(base.prompt_ids if move == "retry" else base.ids)
            if move == "fork": prompt = prompt[:draw(st.integers(0, len(prompt)))]
        if move != "retry" or not prompt: prompt = prompt + draw(IDS(0 if prompt else 1, 4))
        finish = draw(st.sampled_from(["stop", "length", "abort"]))
        c = call(id, prompt, draw(IDS(0, 4)), draw(st.sampled_from(kinds)), finish)
        c.template_ids = draw(st.sampled_from([prompt, prompt[:len(prompt) // 2] + draw(IDS(0, 3))]))
        c.versions = draw(st.sampled_from([[], [[7, len(c.sampled_ids)]]]))
        if c.logp_rollout and draw(st.booleans()): c.logp_rollout[0] = math.nan
        calls.append(c)
    return rollout_of(calls)


def plain(c):
    """A call as comparable values (NaN is not equal to itself)."""
    return repr([getattr(c, f.name) for f in fields(c)])


# ---- the record

@quick
@given(rollouts(), st.randoms(use_true_random=False))
def test_record_round_trip_is_exact(tmp_path_factory, rollout, random):
    """Catches: ids rebuilt wrongly (parents in another order than lines, shared off by one), a field forgotten."""
    path = tmp_path_factory.mktemp("r") / "r.jsonl"
    order = list(range(len(rollout.calls)))
    random.shuffle(order)                                              # calls end in another order than they came
    write(path, rollout, order)
    back = read(path)
    assert [plain(c) for c in back.calls] == [plain(c) for c in rollout.calls]
    assert (back.outcome, back.reward, back.more) == ("ok", 0.5, {"mode": "new key"})


def test_record_grows_with_new_tokens_only(tmp_path):
    """Catches: a record that repeats the history in each call (quadratic files)."""
    calls = [call(0, list(range(1000)), [1, 2])]
    for i in range(1, 20): calls.append(call(i, calls[-1].ids + [5] * 10, [1, 2]))
    lines = write(tmp_path / "r.jsonl", rollout_of(calls))
    assert [len(line["tail"]) for line in lines[2:-1]] == [10] * 19 and all(line["template"] is None or
        len(line["template"][2]) <= 12 for line in lines[1:-1])


@quick
@given(IDS(0, 12), st.lists(IDS(0, 12), max_size=5))
def test_encode_takes_the_longest_prefix_and_the_latest(ids, earlier):
    """Catches: a galloping search that stops early, ties given to the first."""
    shared = [next((n for n in range(min(len(e), len(ids)), 0, -1) if e[:n] == ids[:n]), 0) for e in earlier]
    best = max(shared, default=0)
    index = None if not best else max(i for i, n in enumerate(shared) if n == best)
    assert encode(ids, earlier) == (index, best, ids[best:])


@given(st.integers(0, 700), st.integers(0, 700), st.integers(0, 700))
@quick
def test_lcp_of_long_lists(n, more_a, more_b):
    """Catches: a wrong end or step of the gallop, which lists shorter than its first step never reach."""
    a, b = list(range(n)) + [-1] * more_a, list(range(n)) + [-2] * more_b
    assert lcp(a, b) == lcp(b, a) == n


def test_read_ignores_a_torn_last_line_and_names_any_other_bad_one(tmp_path):
    """Catches: a killed run whose record cannot be read, and a damaged one that is read as if it were whole."""
    path = tmp_path / "r.jsonl"
    write(path, rollout_of([call(0, [1], [2]), call(1, [1, 2], [3])]))
    whole = path.read_text()
    path.write_text(whole[:whole.rindex('"outcome"')])
    torn = read(path)
    assert len(torn.calls) == 2 and torn.outcome is None and torn.reward is None
    bad = whole.splitlines()
    for number, line in ((3, bad[2][:-9]), (3, bad[2].replace('"parent": 0', '"parent": 9')), (1, bad[1]), (2, "{}"),
                         (2, bad[1].replace("[2]", "[2, 2]")), (1, bad[0].replace('"format": 1', '"format": 2')),
                         (4, '{"type": "other"}'), (3, bad[1]), (3, bad[2].replace('"shared": 2', '"shared": 3'))):
        lines = list(bad)
        lines[number - 1] = line
        path.write_text("\n".join(lines) + "\n")
        with pytest.raises(ValueError, match=rf"r\.jsonl:{number}: "): read(path)
    path.write_text("")
    with pytest.raises(ValueError, match="empty"): read(path)


# ---- the tree

def tokens(tree):
    """Multiset of everything trained: (prefix, token, logp, version, call, is_boundary)."""
    columns = zip(tree.paths, tree.trained, tree.logp_rollout, tree.version, tree.call, tree.is_boundary)
    return Counter((tuple(p[:t]), p[t], repr(float(x)), int(v), int(c), bool(f))
                   for p, *column in columns for t, x, v, c, f in zip(*column))


def expected(rollout, kinds):
    """The same from the definition, call by call."""
    continued = lambda c: c.sampled_ids and any(d.prompt_ids[:len(c.ids)] == c.ids for d in rollout.calls)
    taken = [d.prompt_ids for d in rollout.calls if continued(d)]
    superseded = lambda c: not continued(c) and c.prompt_ids in taken
    out = Counter()
    for c in rollout.calls:
        if c.kind in kinds and c.finish not in ("abort", "error") and not superseded(c):
            for i, token in enumerate(c.sampled_ids):
                prefix, version = tuple(c.ids[:len(c.prompt_ids) + i]), c.versions[0][0] if c.versions else -1
                out[prefix, token, repr(c.logp_rollout[i]), version, c.id, i == 0] += 1
    return out


@quick
@given(rollouts(), st.sampled_from([("main",), ("main", "subagent")]))
def test_each_sampled_token_is_trained_exactly_once(rollout, kinds):
    """Catches: tokens lost at a fork or trained twice on shared paths, two equal samples merged into one loss term,
    untrained kinds, aborted and superseded calls in the loss, columns out of step with positions."""
    tree = build(rollout, kinds)
    want = expected(rollout, kinds)
    assert tokens(tree) == want and tree.num_trained == sum(want.values())
    for path, t in zip(tree.paths, tree.trained):
        assert len(t) and (np.diff(t) > 0).all() and t[-1] == len(path) - 1          # a path ends with a trained token
    assert tree.num_unique == len({tuple(p[:n]) for p in tree.paths for n in range(1, len(p) + 1)})
    assert tree.num_flat == sum(map(len, tree.paths)) and tree.num_unique <= tree.num_flat <= tree.num_per_call
    assert sum(tree.left_out.values()) == len(rollout.calls) - len({k[4] for k in want})


@quick
@given(rollouts(), st.randoms(use_true_random=False))
def test_order_of_arrival_does_not_matter(rollout, random):
    """Catches: a tree that depends on which parallel call the proxy saw first."""
    tree = build(rollout)
    calls = [replace(c) for c in rollout.calls]
    ids = list(range(len(calls)))
    random.shuffle(ids)
    for c, i in zip(calls, ids): c.id = i
    other = build(rollout_of(sorted(calls, key=lambda c: c.id)))
    anonymous = lambda t: Counter((*k[:4], k[5]) for k in tokens(t).elements())          # without the call's id
    assert anonymous(tree) == anonymous(other) and sorted(tree.paths) == sorted(other.paths)


@quick
@given(rollouts(kinds=("main",)), IDS(1, 3), st.data())
def test_a_superseded_retry_changes_nothing(rollout, sampled, data):
    """Catches: an answer that the client never got (it asked again) being trained."""
    tree = build(rollout)
    goes_on = lambda c: c.sampled_ids and any(d.prompt_ids[:len(c.ids)] == c.ids for d in rollout.calls)
    continued = [c for c in rollout.calls if goes_on(c)]
    assume(continued)
    retry = call(len(rollout.calls), data.draw(st.sampled_from(continued)).prompt_ids, sampled)
    assume(not goes_on(retry))
    after = build(rollout_of(rollout.calls + [retry]))
    assert tokens(after) == tokens(tree) and after.paths == tree.paths
    assert after.left_out.get("superseded", 0) == tree.left_out.get("superseded", 0) + 1


def test_an_empty_aborted_call_supersedes_nothing():
    """Catches: a call without tokens counting as "continued" by its own retry, which would then be left out."""
    tree = build(rollout_of([call(0, [1, 2], [], finish="abort"), call(1, [1, 2], [3])]))
    assert tree.paths == [[1, 2, 3]] and tree.left_out == {"abort": 1}


def test_equal_samples_of_one_rollout_and_of_two_are_both_in_the_loss():
    """Catches: sharing of computation that also drops a loss term."""
    twice = build(rollout_of([call(0, [1, 2], [3, 4]), call(1, [1, 2], [3, 4]), call(2, [1, 2, 3, 4, 5], [6])]))
    assert twice.num_trained == 5 and twice.num_unique == 6
    paths, scored = twice.paths + twice.paths, twice.trained + twice.trained
    forest = pack(paths, scored)
    assert len(forest.ids) == 6 and len(forest.src) == 3 and sum(map(len, forest.where)) == 10


def test_longest_leaf_keeps_one_path():
    """Catches: keep= having no effect, or keeping the leaf with the most calls and not the longest."""
    calls = [call(0, [1], [2]), call(1, [1, 2, 3], [4]), call(2, [1, 9, 9, 9, 9], [5])]
    tree = build(rollout_of(calls), keep="longest_leaf")
    assert tree.paths == [[1, 9, 9, 9, 9, 5]] and tree.left_out == {"shorter_leaf": 2} and tree.num_trained == 1


def test_versions_and_fork_costs_by_hand(tmp_path):
    """Catches: versions of a call that spans an update misaligned; cost counting text that is new in any case."""
    first = call(0, [1] * 100, [2] * 50, versions=[[3, 20], [4, 30]])
    retokenised = call(1, [1] * 100 + [2] * 10 + [8] * 45, [3], cause="retokenised")        # 140 + 15 new text
    again = call(2, [1] * 20 + [7] * 30, [3], cause="system_changed")
    rollout = rollout_of([first, retokenised, again])
    write(tmp_path / "r.jsonl", rollout)
    tree = build(read(tmp_path / "r.jsonl"))
    assert tree.forks == {"retokenised": (1, 40), "system_changed": (1, 30)}
    assert tree.version[0].tolist() == [3] * 20 + [4] * 30 and tree.version[1].tolist() == [-1]


def test_the_command_explains_a_record_and_refuses_a_bad_one(tmp_path, capsys):
    """Catches: a command that dies on forks, unfinished rollouts or None, or prints a traceback for a bad file."""
    calls = [call(0, [1] * 10, [2] * 5), call(1, [1] * 10 + [2] * 5 + [3] * 4, [4] * 6),
             call(2, [1] * 5 + [9], [5], kind="subagent", cause="subagent"),
             call(3, [1] * 10 + [2] * 3 + [8], [4], cause="retokenised")]
    write(tmp_path / "r.jsonl", rollout_of(calls), end=False)
    run = lambda *a: (main(parse([str(x) for x in a])), *capsys.readouterr())
    code, out, _ = run(tmp_path / "r.jsonl")
    assert code == 0 and "unfinished" in out and "├─● 5..7  call 2 subagent (subagent)" in out
    told = json.loads(run(tmp_path / "r.jsonl", "--json")[1])
    assert told["num_trained"] == 12 and told["forks"]["retokenised"] == [1, 1] and told["left_out"] == {"subagent": 1}
    (tmp_path / "bad.jsonl").write_text("{}\n")
    for name in ("bad.jsonl", "none.jsonl"):
        code, out, err = run(tmp_path / name)
        assert code == 2 and not out and err.count("\n") == 1 and name in err


# ---- packing

def random_paths(random, num=7, vocab=11):
    """Paths of a random tree, with duplicates, prefixes of one another and several roots; scored positions of each."""
    paths = [random.integers(0, vocab, random.integers(2, 9)).tolist()]
    while len(paths) < num:
        base = paths[random.integers(len(paths))]
        keep = random.integers(0, len(base) + 1)
        path = base[:keep] + random.integers(0, vocab, random.integers(0, 9)).tolist()
        if len(path) > 1: paths.append(path)
    return paths, [np.flatnonzero(random.random(len(p) - 1) < 0.6) + 1 for p in paths]


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("seed", range(20))
def test_a_pack_is_its_paths(seed, share):
    """Catches: a token that sees another branch or not all of its own, wrong depths, scores read from the wrong row."""
    paths, scored = random_paths(np.random.default_rng(seed))
    f = pack(paths, scored, share)
    T = len(f.ids)
    sees = (torch.arange(T)[None] <= torch.arange(T)[:, None]) & (torch.arange(T)[:, None] < f.last[None])     # (T, T)
    history = [f.ids[s].tolist() for s in sees]
    assert [len(h) - 1 for h in history] == f.pos.tolist()
    for path, at, where in zip(paths, scored, f.where):
        assert [history[s] for s in f.src[where].tolist()] == [path[:t] for t in at]
        assert f.tgt[where].tolist() == [path[t] for t in at]
    if share: assert T == len({tuple(h) for h in history})
    covered = torch.zeros(T, T, dtype=torch.bool)                      # blocks and rectangles of the CPU: the same rule
    for s, e, l in f.nodes:
        covered[s:e, s:e] |= torch.ones(e - s, e - s, dtype=torch.bool).tril()
        covered[e:l, s:e] = True
    assert torch.equal(covered, sees)


@pytest.mark.parametrize("seed", range(20))
def test_split_covers_each_path_once_within_the_budget(seed):
    """Catches: lost or doubled paths, budgets overrun by groups that could be cut, rollouts cut though told not to."""
    random = np.random.default_rng(seed)
    paths, scored = random_paths(random, 12)
    size = lambda g: len(pack([paths[i] for i in g], [[]] * len(g)).ids)
    for budget in (1, 12, 25, 1000):
        groups = split(paths, budget)
        assert sorted(sum(groups, [])) == list(range(12))
        assert all(len(g) == 1 or size(g) <= budget for g in groups)
        unit = random.integers(0, 4, 12)
        groups = split(paths, budget, unit)
        assert sorted(sum(groups, [])) == list(range(12))
        assert all(len({unit[i] for i in g}) == 1 or size(g) <= budget for g in groups)
        assert sum(len({unit[i] for i in g}) for g in groups) == len(set(unit))
    assert len(split(paths, 1000)) == 1 and split([], 10) == []


# ---- log-probabilities and gradients

SMALL = dict(vocab_size=11, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2, max_position_embeddings=128, attn_implementation="sdpa")
CONFIGS = {"llama": lambda: LlamaConfig(**SMALL), "qwen3": lambda: Qwen3Config(**SMALL, head_dim=8),
           "mistral": lambda: MistralConfig(**SMALL, sliding_window=4)}


def model_of(name, dtype=torch.float64):
    """A tiny model whose norms keep float64 (transformers' own round to float32, which hides errors below 1e-7)."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[name]()).to(dtype)
    for parent in list(model.modules()):
        for key, m in list(parent.named_children()):
            if type(m).__name__.endswith("RMSNorm"):
                setattr(parent, key, torch.nn.RMSNorm(len(m.weight), m.variance_epsilon, dtype=dtype))
    for p in model.parameters(): p.data = torch.randn_like(p) * 0.3
    return model


def plain_logp(model, path, at, temperature=1.0):
    """What one path scores by itself, through the model's own forward."""
    logits = model(torch.tensor([path]), use_cache=False).logits[0] / temperature
    return logits.log_softmax(-1)[torch.as_tensor(at) - 1, torch.as_tensor(path)[at]]


def batch_loss(logps, rollout, which, old):
    """GRPO over the paths in `which`; the normaliser and the weights are those of the whole batch."""
    counts = [len(x) for x in old]
    norm = token_weights(torch.cat([torch.full((n,), r) for n, r in zip(counts, rollout)]), 3).double().split(counts)
    cat = lambda xs: torch.cat([xs[i] for i in which])
    adv = [torch.full((n,), [1.0, -0.7, 0.4][r], dtype=torch.float64) for n, r in zip(counts, rollout)]
    ids = torch.cat([torch.full((counts[i],), rollout[i]) for i in which])
    old = cat(old)
    return grpo_loss(torch.cat(logps), old, cat(adv), torch.ones_like(old), cat(norm), ids, 3.0)[0]


@pytest.mark.parametrize("name", ["llama", "qwen3"])
@pytest.mark.parametrize("share,budget", [(True, 10**6), (True, 20), (False, 30)])
def test_gradients_of_packed_micro_batches_are_those_of_separate_paths(name, share, budget):
    """Catches: any leak between branches, a wrong merge of the attention's parts or their backward, a shared token
    counted once where it stands in two rollouts, terms lost at a micro-batch's edge."""
    model = model_of(name)
    random = np.random.default_rng(len(name) + budget)
    for _ in range(3):
        paths, scored = random_paths(random, 9)
        rollout = random.integers(0, 3, 9).tolist()
        with torch.no_grad(): old = [plain_logp(model, p, at) + torch.from_numpy(random.normal(0, 0.2, len(at)))
                                     for p, at in zip(paths, scored)]
        separate = copy.deepcopy(model)
        batch_loss([plain_logp(separate, p, at) for p, at in zip(paths, scored)], rollout, range(9), old).backward()
        packed = copy.deepcopy(model)
        for group in split(paths, budget):
            forest = pack([paths[i] for i in group], [scored[i] for i in group], share)
            logp = logprobs(packed, forest, chunk=5)
            batch_loss([logp[w] for w in forest.where], rollout, group, old).backward()
        for (key, a), b in zip(separate.named_parameters(), packed.parameters()):
            assert (a.grad - b.grad).abs().max() <= 1e-12 * max(1, a.grad.abs().max()), key


def test_temperature_and_entropy_by_hand():
    """Catches: temperature forgotten or applied to log-probabilities, entropy at temperature 1 or with gradient."""
    model = model_of("llama")
    paths, scored = random_paths(np.random.default_rng(3))
    forest = pack(paths, scored)
    logp, entropy = logprobs(model, forest, temperature=0.7, entropy=True)
    for p, at, w in zip(paths, scored, forest.where):
        plain_model = copy.deepcopy(model)
        plain_model.set_attn_implementation("sdpa")
        assert torch.allclose(logp[w], plain_logp(plain_model, p, at, 0.7), atol=1e-12)
        full = (plain_model(torch.tensor([p]), use_cache=False).logits[0] / 0.7).log_softmax(-1)[at - 1]
        assert torch.allclose(entropy[w], -(full.exp() * full).sum(-1), atol=1e-12)
    assert logp.requires_grad and not entropy.requires_grad


@pytest.mark.parametrize("how", ["bfloat16", "autocast", "checkpointed"])
def test_other_precisions_and_checkpointing(how):
    """Catches: mixed dtypes that the kernel refuses, merges in bfloat16, layers recomputed with another attention."""
    model = model_of("llama", torch.float32)
    paths, scored = random_paths(np.random.default_rng(5))
    forest = pack(paths, scored)
    want = logprobs(model, forest)
    want.sum().backward()
    other = copy.deepcopy(model).to(torch.bfloat16 if how == "bfloat16" else torch.float32)
    other.zero_grad()
    if how == "checkpointed": other.train().gradient_checkpointing_enable()
    with torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"): got = logprobs(other, forest)
    got.sum().backward()
    assert got.dtype == torch.float32
    near = 1e-5 if how == "checkpointed" else 0.15
    assert (got - want).abs().max() < near * want.abs().max()
    a, b = (m.model.layers[0].self_attn.q_proj.weight.grad.float() for m in (model, other))
    assert (a - b).norm() < 2 * near * a.norm()


def test_sliding_windows_need_share_false_and_are_then_right():
    """Catches: windows ignored in silence, a flat pack in which one path's state reaches the next."""
    model = model_of("mistral")
    paths, scored = random_paths(np.random.default_rng(6))
    with pytest.raises(AssertionError, match="sliding_attention.*share=False"): logprobs(model, pack(paths, scored))
    forest = pack(paths, scored, share=False)
    logp = logprobs(model, forest)
    for p, at, w in zip(paths, scored, forest.where):
        assert torch.allclose(logp[w], plain_logp(model, p, at), atol=1e-12)


def test_a_pack_without_scores_still_reaches_every_parameter():
    """Catches: a rank that has no micro-batch left (it runs a dummy) breaking the others' collectives."""
    model = model_of("llama")
    logprobs(model, pack([[0, 1]], [[]])).sum().backward()
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())
