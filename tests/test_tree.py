"""tree.py: the record's exact round trip, what is trained, packing and its gradients against plain transformers."""
import copy, json, math, os, resource, sys
from array import array
from collections import Counter
from dataclasses import fields, replace
import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings, strategies as st
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen3Config, Qwen3MoeConfig, Qwen3NextConfig

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from algos import grpo_loss, token_weights
from tree import (Call, Ids, Rollout, append, block_mask, build, call_line, chains, check_packing, encode, lcp, logprobs, main,
                  pack, parse, read, records, split, why_flat)

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
    halves = [(e[:len(e) // 2], e[len(e) // 2:]) for e in earlier]
    assert encode(ids, halves) == (index, best, ids[best:])


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


def test_a_line_is_whole_or_not_there(tmp_path):
    """Catches: a disk that was full for a moment and left half a line, to which the next one hangs on: the record could
    not be read, and with it the whole run ended. And a name that is no UTF-8, which not every JSON reader takes."""
    path, full = tmp_path / "r.jsonl", resource.getrlimit(resource.RLIMIT_FSIZE)
    write(path, rollout_of([call(0, [1], [2])]), end=False)
    whole = path.read_bytes()
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(whole) + 20, full[1]))
    try:
        with pytest.raises(OSError, match="r.jsonl"): append(path, {"type": "end", "outcome": "x" * 100})
    finally: resource.setrlimit(resource.RLIMIT_FSIZE, full)
    assert path.read_bytes() == whole
    append(path, {"type": "end", "outcome": "ok", "detail": os.fsdecode(b"\xff\xc3\xa9")})
    assert (read(path).outcome, read(path).detail) == ("ok", "?\u00e9")


def test_records_are_no_artifacts(tmp_path):
    """Catches: a file that an agent left, and that is kept, which passes for a record of the run: its reward would be
    compared and shown."""
    for name in ("b/two.jsonl", "one.jsonl", "one.artifacts/forged.jsonl", "one.artifacts/a/forged.jsonl", "one.log"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    assert [p.name for p in records(tmp_path)] == ["one.jsonl", "two.jsonl"]


def test_routing_travels_with_its_tokens(tmp_path):
    """Catches: rows of another call's tokens, one token with two records on two paths, records that repeat a prefix,
    the last sampled token (which only the next call runs) taken as known."""
    random = np.random.default_rng(0)
    calls = [call(0, [1, 2, 3], [4, 5]), call(1, [1, 2, 3, 4, 5, 6], [7]), call(2, [1, 2, 9], [8, 8]),
             call(3, [1, 2, 3, 4, 5, 6], [], finish="abort"), call(4, [1, 2, 3, 4, 5, 6, 7, 6], [5])]
    for c in calls:
        if c.finish != "abort": c.routing = random.integers(0, 300, (len(c.ids) - 1, 2, 3)).astype(np.int16)
    ran = [None if c.routing is None else c.routing.copy() for c in calls]
    lines = write(tmp_path / "r.jsonl", rollout_of(calls))
    back = read(tmp_path / "r.jsonl")
    assert back.calls[3].routing is None and "routing" not in lines[4]
    want = {0: ran[0], 1: np.concatenate([ran[0], ran[1][4:]]), 2: np.concatenate([ran[0][:2], ran[2][2:]]),
            4: np.concatenate([ran[0], ran[1][4:], ran[4][6:]])}
    for i, rows in want.items():
        assert np.array_equal(back.calls[i].routing, rows) and np.array_equal(calls[i].routing, rows)
    tree = build(back)
    assert [len(p) - 1 for p in tree.paths] == [len(r) for r in tree.routing]
    assert np.array_equal(tree.routing[0][:2], tree.routing[1][:2]) and len(tree.routing) == 2
    lines[2]["routing"][2] = lines[1]["routing"][2]
    (tmp_path / "bad.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(ValueError, match="bad.jsonl:3: .*routing"): read(tmp_path / "bad.jsonl")


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


@quick
@given(rollouts(), st.data())
def test_a_dead_branch_or_an_untrained_call_changes_nothing(rollout, data):
    """Catches: an aborted answer or another kind's call in the loss, a fork that cuts a path or doubles its tokens."""
    tree = build(rollout)
    base = data.draw(st.sampled_from(rollout.calls)).ids
    prompt = base[:data.draw(st.integers(0, len(base)))] + data.draw(IDS(1, 3))
    assume(not any(c.sampled_ids and prompt[:len(c.ids)] == c.ids for c in rollout.calls))   # what goes on is not dead
    kind, finish = data.draw(st.sampled_from([("main", "abort"), ("main", "error"), ("subagent", "stop")]))
    extra = call(len(rollout.calls), prompt, data.draw(IDS(1, 3)), kind, finish)
    assume(not any(c.prompt_ids[:len(extra.ids)] == extra.ids for c in rollout.calls))       # nor what was gone on from
    after = build(rollout_of(rollout.calls + [extra]))
    assert tokens(after) == tokens(tree) and after.paths == tree.paths
    assert sum(after.left_out.values()) == sum(tree.left_out.values()) + 1


@quick
@given(rollouts(), rollouts())
def test_rollouts_share_computation_but_no_loss_terms(one, two):
    """Catches: a pack of several rollouts that computes a token twice, or lets one term stand for two rollouts."""
    trees = build(one), build(two)
    paths, scored = [p for t in trees for p in t.paths], [s for t in trees for s in t.trained]
    assume(paths)
    forest = pack(paths, scored)
    assert len(forest.ids) == len({tuple(p[:n]) for p in paths for n in range(1, len(p) + 1)})
    assert len(forest.src) == len({tuple(p[:t + 1]) for p, at in zip(paths, scored) for t in at})
    assert sum(map(len, forest.where)) == sum(t.num_trained for t in trees)


@quick
@given(rollouts(), st.integers(0, 5))
def test_chains_hold_every_trained_token_from_root_to_leaf(rollout, start):
    """Catches: chains that end where another path trains the tokens, that hold the sibling's sample in the place of
    their own or both of two equal ones, tokens out of order, and an offset that is forgotten."""
    tree, trained_at, number = build(rollout), {}, start    # (prefix, token) -> numbers of those who train it, in order
    for i, (path, at) in enumerate(zip(tree.paths, tree.trained)):
        for t in at: trained_at.setdefault(tuple(path[:t + 1]), []).append((i, number)); number += 1
    want = []
    for i, path in enumerate(tree.paths):
        owners = [trained_at[key] for t in range(len(path)) if (key := tuple(path[:t + 1])) in trained_at]
        want.append([dict(o).get(i, o[0][1]) for o in owners])
    assert [c.tolist() for c in chains(tree, start)] == want


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


@pytest.mark.parametrize("window", [None, 70, 300])
@pytest.mark.parametrize("seed", range(5))
def test_blocks_of_the_gpu_mask_are_the_rule(seed, window):
    """Catches: a block that the kernel skips though a pair in it is visible, or takes whole though one is not."""
    random = np.random.default_rng(seed)
    new = lambda: random.integers(0, 99, random.choice([127, 128, 129, 255, 256, 257])).tolist()      # at blocks' edges
    paths = [new()]
    while len(paths) < 8: paths.append(paths[random.integers(len(paths))][:len(new())] + new())
    f = pack(paths, [[]] * 8)
    num, at = len(f.ids) // 128, torch.arange(len(f.ids) // 128 * 128)
    last, pos = f.last[:len(at)], f.pos[:len(at)]
    mask = block_mask(last, pos, window)
    sees = (at <= at[:, None]) & (at[:, None] < last) & (pos[:, None] - pos < (window or len(at)))
    assert torch.equal(mask.mask_mod(0, 0, at[:, None], at[None]), sees)
    blocks = sees.view(num, 128, num, 128).transpose(1, 2).flatten(2)                      # (queries, keys, pairs)
    part, full = torch.zeros(2, num, num, dtype=torch.bool)
    for listed, count, index in ((part, mask.kv_num_blocks, mask.kv_indices),
                                 (full, mask.full_kv_num_blocks, mask.full_kv_indices)):
        for row, n, i in zip(listed, count[0, 0], index[0, 0]): row[i[:n].long()] = True
    assert not (part & full).any() and (full <= blocks.all(-1)).all() and (blocks.any(-1) <= part | full).all()
    assert window or torch.equal(full, blocks.all(-1)) and torch.equal(part | full, blocks.any(-1))


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
EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=8, head_dim=8,
               experts_implementation="eager")
CONFIGS = {"llama": lambda: LlamaConfig(**SMALL), "qwen3": lambda: Qwen3Config(**SMALL, head_dim=8),
           "qwen3_moe": lambda: Qwen3MoeConfig(**SMALL, **EXPERTS),
           "mistral": lambda: MistralConfig(**SMALL, sliding_window=4),
           "qwen3_next": lambda: Qwen3NextConfig(
               **SMALL, **EXPERTS, layer_types=["linear_attention", "full_attention"], linear_num_key_heads=2,
               linear_num_value_heads=2, linear_key_head_dim=8, linear_value_head_dim=8,
               shared_expert_intermediate_size=8)}


class Router(torch.nn.Module):
    """Top-k of the softmax, renormalised, in the dtype of its input."""
    def __init__(self, theirs):
        super().__init__()
        self.weight, self.top_k = theirs.weight, theirs.top_k

    def forward(self, x):
        logits = x.reshape(-1, x.shape[-1]) @ self.weight.T
        value, index = logits.softmax(-1).topk(self.top_k, -1)
        return logits, value / value.sum(-1, keepdim=True), index


def model_of(name, dtype=torch.float64, device="cpu", **sizes):
    """A tiny model whose norms and routers keep float64 (transformers' own round to float32, which hides errors below
    1e-7)."""
    torch.manual_seed(0)
    config = CONFIGS[name]()
    config.update(sizes)
    model = AutoModelForCausalLM.from_config(config).to(device, dtype)
    for parent in list(model.modules()):
        for key, m in list(parent.named_children()):
            if type(m).__name__ in ("LlamaRMSNorm", "Qwen3RMSNorm", "Qwen3MoeRMSNorm", "MistralRMSNorm"):
                setattr(parent, key, torch.nn.RMSNorm(len(m.weight), m.variance_epsilon).to(device, dtype))
            if type(m).__name__ == "Qwen3MoeTopKRouter": setattr(parent, key, Router(m))
    for p in model.parameters(): p.data = torch.randn_like(p) * 0.3
    return model


def plain_logp(model, path, at, temperature=1.0):
    """What one path scores by itself, through the model's own forward."""
    logits = model(torch.tensor([path], device=model.device), use_cache=False).logits[0] / temperature
    return logits.log_softmax(-1)[torch.as_tensor(at) - 1, torch.as_tensor(path)[at]]


def batch_loss(logps, rollout, which, old):
    """GRPO over the paths in `which`; the normaliser and the weights are those of the whole batch."""
    counts = [len(x) for x in old]
    norm = token_weights(torch.cat([torch.full((n,), r) for n, r in zip(counts, rollout)])).double().split(counts)
    cat = lambda xs: torch.cat([xs[i] for i in which])
    adv = [torch.full((n,), [1.0, -0.7, 0.4][r], dtype=torch.float64) for n, r in zip(counts, rollout)]
    ids = torch.cat([torch.full((counts[i],), rollout[i]) for i in which])
    old = cat(old)
    return grpo_loss(torch.cat(logps), old, cat(adv), torch.ones_like(old), cat(norm), ids, 3.0)[0]


def gradient(model, loss_of, checkpointed=False):
    """All gradients of the sum of losses that loss_of(model) yields, as one vector."""
    model.zero_grad()
    model.train(checkpointed)
    if checkpointed: model.gradient_checkpointing_enable()
    else: model.gradient_checkpointing_disable()
    for loss in loss_of(model): loss.backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()])


@pytest.mark.parametrize("name,dtype,num,bound", [
    ("llama", torch.float64, 50, 1e-12), ("qwen3", torch.float64, 50, 1e-12), ("qwen3_moe", torch.float64, 50, 1e-12),
    ("llama", torch.float32, 5, 1e-5), ("qwen3", torch.float32, 5, 1e-5), ("qwen3_moe", torch.float32, 5, 1e-5)])
def test_gradients_of_packed_micro_batches_are_those_of_separate_paths(name, dtype, num, bound):
    """Catches: any leak between branches, a wrong merge of the attention's parts or their backward, a shared token
    counted once where it stands in two rollouts, terms lost at a micro-batch's edge, layers recomputed with another
    attention, tokens routed with their neighbours' experts.  Relative error of the whole gradient of a clipped loss."""
    model, random = model_of(name, dtype), np.random.default_rng(len(name))
    clipped = 0
    for i in range(num):
        paths, scored = random_paths(random, 5)
        rollout = random.integers(0, 3, len(paths)).tolist()
        model.set_attn_implementation("sdpa")
        with torch.no_grad(): logp = [plain_logp(model, p, at) for p, at in zip(paths, scored)]
        old = [x + torch.from_numpy(random.normal(0, 0.2, len(x))).to(dtype) for x in logp]
        clipped += sum(((x - o).exp() - 1).abs().gt(0.2).sum() for x, o in zip(logp, old))

        def separate(model):
            logp = [plain_logp(model, p, at) for p, at in zip(paths, scored)]
            yield batch_loss(logp, rollout, range(len(paths)), old)

        def packed(budget, share):
            def losses(model):
                for group in split(paths, budget):
                    forest = pack([paths[i] for i in group], [scored[i] for i in group], share)
                    logp = logprobs(model, forest, chunk=5)
                    yield batch_loss([logp[w] for w in forest.where], rollout, group, old)
            return losses
        want = gradient(model, separate)
        for budget, share, checkpointed in ((10**6, True, False), (10**6, True, True), (12, True, False),
                                            (12, True, True), (30, False, False))[:4 if i % 5 else 5]:
            got = gradient(model, packed(budget, share), checkpointed)
            assert (got - want).norm() <= bound * want.norm(), (budget, share, checkpointed)
    assert clipped


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("name", ["llama", "qwen3", "mistral"])
def test_gradients_on_a_gpu(name, head_dim, device="cuda"):
    """Catches: a mask function that the compiler does not trace, blocks that the kernel skips, padding rows that are
    seen, windows ignored, dense attention past the limit of recompilations, TF32."""
    model, random = model_of(name, torch.float32, device, head_dim=head_dim), np.random.default_rng(head_dim)
    for num in (7, 60, 150):                                           # 30 to 700 tokens
        paths, scored = random_paths(random, num)
        weigh = lambda x, i: (x * (torch.arange(len(x), device=x.device) + i).cos()).sum()

        def separate(model):
            for i, (p, at) in enumerate(zip(paths, scored)): yield weigh(plain_logp(model, p, at), i)

        def packed(model):
            forest = pack(paths, scored).to(device)
            logp = logprobs(model, forest, chunk=100)
            yield sum(weigh(logp[w], i) for i, w in enumerate(forest.where))
        model.set_attn_implementation("sdpa")
        want = gradient(model, separate)
        for checkpointed in (False, True):
            assert (gradient(model, packed, checkpointed) - want).norm() <= 1e-5 * want.norm(), (num, checkpointed)


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


@pytest.mark.parametrize("name,kind", [("mistral", "sliding_attention"), ("qwen3_next", "linear_attention")])
def test_layers_that_cannot_share_need_share_false_and_are_then_right(name, kind):
    """Catches: windows ignored in silence; a flat pack in which one path's state reaches the next, as it does where a
    linear-attention layer ignores the borders of sequences: its gradient would be wrong by the half."""
    model = model_of(name)
    paths, scored = random_paths(np.random.default_rng(6))
    assert kind in why_flat(model)
    with pytest.raises(AssertionError, match=f"{kind}.*share=False"): logprobs(model, pack(paths, scored))

    def separate(model):
        for p, at in zip(paths, scored): yield plain_logp(model, p, at).sum()

    def flat(model):
        forest = pack(paths, scored, share=False)
        yield logprobs(model, forest)[torch.cat(forest.where)].sum()
    want, got = gradient(model, separate), gradient(model, flat)
    assert (got - want).norm() <= (1e-12 if name == "mistral" else 1e-5) * want.norm()     # its norms are in float32


def test_why_flat_is_told_from_the_model():
    """Catches: a hybrid or a model with a balancing loss packed as if its prefixes could be shared, and full attention
    held back."""
    assert why_flat(model_of("llama")) is why_flat(model_of("qwen3")) is why_flat(model_of("qwen3_moe")) is None
    model = model_of("qwen3_moe")
    model.config.output_router_logits = True
    assert "balancing" in why_flat(model)
    paths, scored = random_paths(np.random.default_rng(6))
    with pytest.raises(AssertionError, match="balancing.*share=False"): logprobs(model, pack(paths, scored))
    assert logprobs(model, pack(paths, scored, share=False)).isfinite().all()


def test_the_self_check_tells_a_right_pack_from_a_leaking_one():
    """Catches: a check that compares the pack with itself, whose errors cancel, or that leaves gradients behind."""
    model = model_of("llama")
    paths, scored = random_paths(np.random.default_rng(8))
    check = lambda run: check_packing(run, model.parameters(), paths, scored, 10**6)
    assert max(check(lambda f: logprobs(model, f))) < 1e-13 and all(p.grad is None for p in model.parameters())

    def leaking(forest):                                   # the last node sees the one before it too
        *nodes, (s, e, l), (s2, e2, l2) = forest.nodes
        return logprobs(model, replace(forest, nodes=[*nodes, (s, e, e2), (s2, e2, l2)]))
    assert min(check(leaking)) > 1e-3
    seen = []
    check_packing(lambda f: seen.append(len(f.where)) or logprobs(model, f), model.parameters(), paths, scored, 1)
    assert seen == [2, 2]

    def where(forest): raise LookupError(forest.ids.device)
    with pytest.raises(LookupError, match="meta"):         # not where the weights lie, which --offload keeps elsewhere
        check_packing(where, model.parameters(), paths, scored, 1, "meta")


def test_a_pack_without_scores_still_reaches_every_parameter():
    """Catches: a rank that has no micro-batch left (it runs a dummy) breaking the others' collectives."""
    model = model_of("llama")
    logprobs(model, pack([[0, 1]], [[]])).sum().backward()
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())


@quick
@given(steps=st.lists(st.tuples(*[st.integers(0, 30)] * 4), min_size=1, max_size=8), at=st.integers(-40, 40),
       end=st.integers(-40, 40))
def test_ids_in_pieces(steps, at, end):
    """Would catch ids that are others once a session keeps them as pieces of earlier calls' own."""
    kept, whole = [array("i", range(20))], [list(range(20))]
    for which, shared, num_after, num in steps:
        before, after = kept[which % len(kept)], array("i", range(50, 50 + num_after))
        plain = [*whole[which % len(kept)], *after]
        shared = 1 + shared % len(plain)
        tail = array("i", range(80, 80 + num))
        kept.append(Ids(before, after, shared, tail))
        whole.append(plain[:shared] + [*tail])
        ids, plain = kept[-1], whole[-1]
        assert list(ids) == plain and len(ids) == len(plain) and ids[-1] == plain[-1] and ids == array("i", plain)
        assert list(ids[at:end]) == plain[at:end] and list(ids[at:]) == plain[at:] and isinstance(ids[:3], array)
        assert [lcp(ids, x) for x in kept] == [lcp(plain, x) for x in whole]
