"""algos.py against the formulas written out token by token, the invariances that its docstring promises, and the bias
of each choice, exactly, over every outcome of a small tree of calls."""
import itertools, math, os, sys
import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from algos import BOUNDS, LOSSES, call_advantages, correction, explained_variance, gae, group_advantages, grpo_loss, \
    gspo_loss, is_informative, kl_loss, kl_penalty, overlong_penalty, reinforce_advantages, reinforce_loss, \
    token_weights, value_loss, whiten
import tree

quick = settings(max_examples=100, deadline=None)
GROUPS = st.sampled_from([0, 3, 7])
f64 = lambda x: torch.tensor(x, dtype=torch.float64)
REWARD = st.one_of(st.just(math.nan), st.sampled_from([0.0, 0.1, 1.0]), st.floats(-5, 5, width=16))


def naive_advantages(rewards, groups, std_norm, leave_one_out, eps=1e-6):
    """None = exactly zero."""
    out = []
    for r, g in zip(rewards, groups):
        known = [x for x, h in zip(rewards, groups) if h == g and not math.isnan(x)]
        if math.isnan(r) or len(set(known)) < 2:
            out.append(None)
            continue
        mean = sum(known) / len(known)
        others = known[:known.index(r)] + known[known.index(r) + 1:]
        a = r - (sum(others) / len(others) if leave_one_out else mean)
        out.append(a / (math.sqrt(sum((x - mean) ** 2 for x in known) / len(known)) + eps) if std_norm else a)
    return out


@quick
@given(st.lists(st.tuples(REWARD, GROUPS), min_size=1, max_size=14), st.booleans(), st.booleans())
def test_group_advantages_are_the_formula(rows, std_norm, leave_one_out):
    """Catches: sample std, statistics over the batch and not the group, NaN in the mean, float32 factors, a rollout in
    its own baseline, residues of rounding where all rewards are equal (divided by eps they are real gradients)."""
    rewards, groups = [r for r, _ in rows], [g for _, g in rows]
    got = group_advantages(f64(rewards), torch.tensor(groups), std_norm, leave_one_out)
    want = naive_advantages(rewards, groups, std_norm, leave_one_out)
    for a, b in zip(got.tolist(), want): assert a == 0 if b is None else a == pytest.approx(b, rel=1e-9, abs=1e-9)
    informative = is_informative(f64(rewards), torch.tensor(groups))
    assert informative.tolist() == [b is not None for b in want]
    group_of = lambda i: [j for j, g in enumerate(groups) if g == groups[i]]
    known = lambda i: {rewards[j] for j in group_of(i) if not math.isnan(rewards[j])}
    assert informative.tolist() == [not math.isnan(rewards[i]) and len(known(i)) > 1 for i in range(len(rewards))]


def test_group_advantages_by_hand():
    """Catches: residues for three times 0.1 (their mean is not 0.1), dtype or order of the rewards changed."""
    rewards = torch.tensor([0.1, 1.0, 0.1, 0.0, 0.1, math.nan, 5.0])
    adv = group_advantages(rewards, torch.tensor([0, 1, 0, 1, 0, 1, 2]), eps=0.0)
    assert adv.tolist() == [0, 1, 0, -1, 0, 0, 0] and adv.dtype == torch.float32
    empty = torch.tensor([]), torch.tensor([], dtype=torch.long)
    assert group_advantages(*empty).shape == is_informative(*empty).shape == (0,)
    assert reinforce_advantages(empty[0]).shape == (0,)


def test_reinforce_advantages_by_hand():
    """Catches: a missing reward taken for a reward of 0 in the batch's mean, or trained with minus that mean; the mean
    of a group; residues where all are equal."""
    rewards = f64([1.0, math.nan, 0.0, 5.0])
    assert reinforce_advantages(rewards).tolist() == [-1, 0, -2, 3]
    by_call = f64([[1.0, 2.0], [0.0, 1.0]])
    assert reinforce_advantages(by_call, "none").tolist() == [[3, 2], [1, 1]]
    assert reinforce_advantages(by_call).tolist() == [[1, 0.5], [-1, -0.5]]
    assert reinforce_advantages(rewards, "none").tolist() == [1, 0, 0, 5]
    assert reinforce_advantages(f64([0.1, 0.1, 0.1])).tolist() == [0, 0, 0]
    with pytest.raises(AssertionError, match="'mean'"): reinforce_advantages(rewards, "mean")


def naive_call_advantages(rewards, groups, std_norm, leave_one_out):
    to_go = [[sum(row[k:]) for k in range(len(row))] for row in rewards]
    columns = [naive_advantages([row[k] for row in to_go], groups, std_norm, leave_one_out)
               for k in range(len(rewards[0]))]
    return [list(row) for row in zip(*columns)]


@quick
@given(st.integers(1, 4).flatmap(lambda k: st.lists(st.tuples(st.lists(st.sampled_from([0.0, 0.5, 1.0, -2.0, math.nan]),
       min_size=k, max_size=k), GROUPS), min_size=1, max_size=8)), st.booleans(), st.booleans())
def test_call_advantages_are_the_formula(rows, std_norm, leave_one_out):
    """Catches: reward from before a call credited to it, calls of different numbers or groups compared, an unknown
    reward that spoils later calls or counts as 0 for earlier ones."""
    rewards, groups = [r for r, _ in rows], [g for _, g in rows]
    got = call_advantages(f64(rewards), torch.tensor(groups), std_norm=std_norm, leave_one_out=leave_one_out)
    want = naive_call_advantages(rewards, groups, std_norm, leave_one_out)
    for a, b in zip(sum(got.tolist(), []), sum(want, [])): assert a == pytest.approx(b or 0, rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("a, b", [([9.7, 9.9], [19.6, 0]), ([0.1, 5.7], [5.8, 0]), ([0.1, 0.2, -0.3], [0, 0, 0]),
                                  ([1e6, 0.1, -1e6], [0.1, 0, 0])])
def test_equal_returns_compare_as_equal(a, b):
    """Catches: returns that are equal but for the rounding of their sums, which eps makes half an advantage of."""
    rewards, group = f64([a + [0], b + [0]] if len(a) < 3 else [a, b]), torch.tensor([0, 0])
    for options in ({}, {"std_norm": False}, {"leave_one_out": True}):
        adv = call_advantages(rewards, group, **options)
        assert adv[:, 0].tolist() == [0, 0] and adv[:, 1].all()
    assert reinforce_advantages(rewards)[:, 0].tolist() == [0, 0]
    little = call_advantages(f64([[1e6, 0.01], [1e6, 0]]), group)      # as exact as it was
    assert little[:, 0].tolist() == pytest.approx([1, -1], abs=1e-3)


def test_an_outcome_in_the_last_column_is_the_rollouts_reward():
    """Catches: calls of one rollout that get different credit where there is only an outcome to share."""
    rewards, group = f64([1.0, 0.1, 3.0, math.nan, 2.0]), torch.tensor([0, 0, 0, 0, 1])
    by_call = torch.cat([torch.zeros(5, 3, dtype=torch.float64), rewards[:, None]], 1)
    assert call_advantages(by_call, group).equal(group_advantages(rewards, group)[:, None].expand(5, 4))


@quick
@given(st.integers(1, 50), st.integers(1, 50), st.lists(st.integers(0, 120), min_size=1))
def test_overlong_penalty_is_the_formula(a, b, lengths):
    """Catches: a penalty before the buffer begins, below -1 beyond the end, or with a jump."""
    max_tokens, buffer = max(a, b), min(a, b)
    for got, n in zip(overlong_penalty(torch.tensor(lengths), max_tokens, buffer).tolist(), lengths):
        want = 0 if n <= max_tokens - buffer else -1 if n > max_tokens else ((max_tokens - buffer) - n) / buffer
        assert got == pytest.approx(want, abs=1e-6)
    with pytest.raises(AssertionError, match="buffer 0"): overlong_penalty(torch.tensor(lengths), max_tokens, 0)


# ---- PPO ------------------------------------------------------------------------------------------------------------

@st.composite
def token_trees(draw):
    """values, token rewards, chains, outcomes: a random tree of trained tokens, every leaf the end of a chain, every
    inner token in those of all its leaves; of some leaves a rollout of its own, so that outcomes differ."""
    parent = [-1] + [draw(st.integers(-1, i)) for i in range(draw(st.integers(0, 9)))]
    leaves = sorted(set(range(len(parent))) - set(parent))
    def chain(t): return [] if t < 0 else chain(parent[t]) + [t]
    number = st.floats(-3, 3, width=32)
    several = lambda n, of=number: draw(st.lists(of, min_size=n, max_size=n))
    return several(len(parent)), several(len(parent)), [chain(t) for t in leaves], several(len(leaves), REWARD)


def naive_gae(values, rewards, chains, gamma, lam, token_rewards):
    """As the paper has it: a sum of discounted temporal differences, for each token of each chain; then the mean."""
    found = [[] for _ in values]
    for chain, outcome in zip(chains, rewards):
        if math.isnan(outcome): continue
        reward = [token_rewards[t] for t in chain]
        reward[-1] += outcome
        following = [values[t] for t in chain[1:]] + [0.0]
        delta = [r + gamma * after - values[t] for r, after, t in zip(reward, following, chain)]
        for i, t in enumerate(chain):
            found[t].append(sum((gamma * lam) ** k * d for k, d in enumerate(delta[i:])))
    return [sum(a) / len(a) if a else 0.0 for a in found]


@quick
@given(token_trees(), st.sampled_from([0.0, 0.9, 1.0]), st.sampled_from([0.0, 0.5, 0.95, 1.0]))
def test_gae_is_the_formula(tokens, gamma, lam):
    """Catches: gamma for gamma * lam, a value beyond the last token, the outcome on every token, one leaf's estimate
    in place of the mean, rewards of calls left out, a leaf without reward counted as 0."""
    values, token_rewards, chains, outcomes = tokens
    adv, returns = gae(f64(values), f64(outcomes), [torch.tensor(c) for c in chains], gamma, lam, f64(token_rewards))
    want = naive_gae(values, outcomes, chains, gamma, lam, token_rewards)
    assert adv.tolist() == pytest.approx(want, rel=1e-9, abs=1e-9)
    assert returns.tolist() == pytest.approx([a + v for a, v in zip(want, values)], rel=1e-9, abs=1e-9)


def test_gae_by_hand():
    """Catches: an error that the naive form has too.  A chain of two tokens, then the same with a second leaf."""
    values, chain = f64([0.5, 0.25, 0.0]), torch.tensor([0, 1])
    adv, returns = gae(values, f64([1.0]), [chain], gamma=0.9, lam=0.5)
    last, first = 1 - 0.25, 0.9 * 0.25 - 0.5
    assert adv.tolist() == pytest.approx([first + 0.45 * last, last, 0]) and returns.tolist()[1:] == [1, 0]
    adv, _ = gae(values, f64([1.0, 1.0]), [chain, torch.tensor([0, 2])], gamma=0.9, lam=0.5)
    other = 0.9 * 0.0 - 0.5 + 0.45 * (1 - 0.0)
    assert adv.tolist() == pytest.approx([(first + 0.45 * last + other) / 2, last, 1])


@quick
@given(token_trees(), REWARD.filter(math.isfinite))
def test_gae_without_discount_is_reward_minus_value(tokens, outcome):
    """Catches: any share of V(s_t+1), or a mean over leaves that is not the number which all of them have: this is the
    default, and has to be R - V to the last bit."""
    values, _, chains, _ = tokens
    chains = [torch.tensor(c) for c in chains]
    adv, returns = gae(f64(values), f64([outcome] * len(chains)), chains)
    assert adv.equal(outcome - f64(values)) and returns.eq(outcome).all()


@quick
@given(token_trees(), st.data())
def test_nothing_crosses_a_fork(tokens, data):
    """Catches: chains that run on from one leaf into the next, where a critic's error or a reward in one branch would
    reach the tokens of another."""
    values, token_rewards, chains, outcomes = tokens
    t = data.draw(st.integers(0, len(values) - 1))
    related = {x for c in chains if t in c for x in c}
    results = []
    for delta in (0.0, 1.0):
        v, r = list(values), list(token_rewards)
        v[t], r[t] = v[t] + delta, r[t] + delta
        results.append(gae(f64(v), f64(outcomes), [torch.tensor(c) for c in chains], 0.9, 0.5, f64(r))[0])
    for x in set(range(len(values))) - related: assert results[0][x] == results[1][x]


def test_whitening():
    """Catches: statistics in another measure than the loss's, sample std, NaN or noise from equal advantages."""
    _, _, adv, _, norm, _ = batch(5)
    adv = adv + f64(np.random.default_rng(0).normal(size=len(adv)))
    white = whiten(adv, norm, eps=0.0)
    mean = sum(n * a for n, a in zip(norm.tolist(), adv.tolist())) / norm.sum().item()
    std = math.sqrt(sum(n * (a - mean) ** 2 for n, a in zip(norm.tolist(), adv.tolist())) / norm.sum().item())
    assert torch.allclose(white, (adv - mean) / std, rtol=1e-12)
    assert whiten(torch.full((3,), 0.1), torch.ones(3)).abs().max() < 1e-6


def critic(seed, n=40):
    random = np.random.default_rng(seed)
    old, step, g, norm = (f64(random.normal(0, s, n)) for s in (1, 0.3, 1, 1))
    return (old + step).requires_grad_(), old, g, norm.abs()


@pytest.mark.parametrize("clip", [0.0, 0.2])
def test_value_loss_is_the_formula(clip):
    """Catches: min for max, the clip around the return, a factor of 2, a gradient through the return; gradients are
    also taken by finite differences."""
    value, old, g, norm = critic(1)
    loss, sums = value_loss(value, old, g, norm, 7.0, clip)
    want, num_clipped = 0.0, 0
    for v, o, r, n in zip(value.tolist(), old.tolist(), g.tolist(), norm.tolist()):
        plain, near = (v - r) ** 2, (o + min(max(v - o, -clip), clip) - r) ** 2
        want += n * (max(plain, near) if clip else plain) / 14
        num_clipped += bool(clip) and near > plain
    assert loss.item() == pytest.approx(want, rel=1e-12) and sums["value_clipped"] == num_clipped
    assert torch.autograd.gradcheck(lambda v: value_loss(v, old, g, norm, 7.0, clip)[0], value)
    grad = torch.autograd.grad(loss, value)[0]
    assert (grad == 0).sum() == num_clipped and (num_clipped > 3) == bool(clip)


def test_explained_variance_adds_up():
    """Catches: a mean of the micro-batches' explained variances, the new value in the old one's place, NaN from
    dividing by the variance of equal returns."""
    value, old, g, norm = critic(2)
    parts = [value_loss(value[p], old[p], g[p], norm[p], 1.0)[1] for p in (slice(0, 3), slice(3, 40), slice(40, 40))]
    total = {k: sum(p[k].item() for p in parts) for k in parts[0]}
    want = 1 - (g - old).var(correction=0) / g.var(correction=0)
    assert explained_variance(total) == pytest.approx(want.item(), rel=1e-12)
    equal = value_loss(old, old, torch.full_like(old, 0.1), norm, 1.0)[1]
    assert math.isnan(explained_variance({k: v.item() for k, v in equal.items()}))


# ---- corrections and losses -----------------------------------------------------------------------------------------


def test_corrections_by_hand():
    """Catches: the ratio upside down, a cap that scales, IcePop clamping where it should drop, a missing probability
    taken for one, gradient through the weight."""
    old = torch.tensor([math.log(x) for x in (0.5, 0.9, 0.1, 0.6, 0.3)], dtype=torch.float64, requires_grad=True)
    rollout = torch.tensor([math.log(x) for x in (0.4, 0.1, 0.9, 0.2)] + [math.nan], dtype=torch.float64)
    close = lambda w, want: torch.allclose(w, torch.tensor(want, dtype=torch.float64)) and not w.requires_grad
    assert close(correction(old, rollout, "tis"), [1.25, 2, 1 / 9, 2, 0])
    assert close(correction(old, rollout, "icepop"), [1.25, 0, 0, 3, 0])
    assert close(correction(old, rollout, "off"), [1, 1, 1, 1, 1])
    with pytest.raises(AssertionError, match="'none'"): correction(old, rollout, "none")
    ids = torch.tensor([4, 4, 1, 4, 2])                                # one weight a rollout: the geometric mean
    mean = (1.25 * 9 * 3) ** (1 / 3)
    assert close(correction(old, rollout, "tis", cap=100, rollout=ids), [mean, mean, 1 / 9, mean, 0])
    only_4 = torch.where(ids == 4, rollout, math.nan)
    assert close(correction(old, only_4, "icepop", rollout=ids), [mean, mean, 0, mean, 0])
    assert close(correction(old, rollout, "geometric", rollout=ids), [0, 0, 0, 0, 0])
    near = rollout + torch.where(ids == 4, math.log(mean / 1.005), 0.)      # its mean is in the bounds, no token's is
    assert close(correction(old, near, "geometric", rollout=ids), [1, 1, 0, 1, 0])
    with pytest.raises(AssertionError, match="of rollouts"): correction(old, rollout, "geometric")


@quick
@given(st.integers(0, 10**6), st.sampled_from(["tis", "icepop", "geometric"]), st.booleans())
def test_corrections_are_the_formula(seed, kind, by_rollout):
    """Catches: a mean over the micro-batch and not the rollout, over missing tokens, of ratios and not of their
    logarithms; a result that depends on the order of the tokens."""
    random = np.random.default_rng(seed)
    n, by_rollout = random.integers(1, 20), by_rollout or kind == "geometric"
    ids, old, new = random.integers(0, 4, n), random.normal(-1, 1, n), random.normal(-1, 1, n)
    if kind == "geometric": new = old + random.normal(0, 0.02, n)
    new[random.random(n) < 0.2] = math.nan
    got = correction(f64(old), f64(new), kind, rollout=torch.tensor(ids) if by_rollout else None)
    for t in range(n):
        gaps = [old[u] - new[u] for u in range(n) if u == t or by_rollout and ids[u] == ids[t]]
        gaps = [g for g in gaps if not math.isnan(g)]
        r = math.exp(sum(gaps) / len(gaps)) if gaps else 0.0
        low, high = BOUNDS.get(kind, (0, math.inf))
        want = min(r, 2.0) if kind == "tis" else (r if kind == "icepop" else 1.0) if low <= r <= high else 0.0
        assert got[t].item() == pytest.approx(want, rel=1e-12)


@pytest.mark.parametrize("kind", ["tis", "icepop", "geometric"])
def test_a_ratio_beyond_floats_is_cut_like_any_other(kind):
    """Catches: inf * 0, a NaN that would end the run."""
    weight = correction(torch.zeros(1), torch.tensor([-200.]), kind, rollout=torch.zeros(1, dtype=torch.long))
    assert weight.tolist() == [2. if kind == "tis" else 0.]


def batch(seed, num_rollouts=4, spread=0.3, by_rollout=False):
    """logp, logp_old, adv, weight, norm, rollout of a random batch whose ratios lie on both sides of every clip.
    by_rollout: weights as GSPO's correction has them, one a rollout."""
    random = np.random.default_rng(seed)
    rollout = torch.from_numpy(np.concatenate([np.arange(num_rollouts), random.integers(0, num_rollouts, 30)]))
    rollout = rollout[torch.from_numpy(random.permutation(len(rollout)))]
    n = len(rollout)
    logp_old = torch.from_numpy(random.normal(-1, 1, n))
    logp = (logp_old + torch.from_numpy(random.normal(0, spread, n))).requires_grad_()
    adv = torch.from_numpy(random.normal(0, 1, num_rollouts))[rollout]
    weight = torch.from_numpy(random.uniform(0, 2, n))
    if by_rollout: weight = weight[:num_rollouts][rollout]
    norm = torch.stack([1 / (rollout == r).sum().double() for r in rollout])
    return logp, logp_old, adv, weight, norm, rollout


BOUND = {"grpo": (0.2, 0.28), "gspo": (0.02, 0.05), "cispo": (0.1, 0.3), "reinforce": (0.0, 0.0), "rloo": (0.0, 0.0),
         "ppo": (0.2, 0.2)}


def naive_loss(name, logp, old, adv, weight, rollout, low, high, dual):
    """Mean over rollouts of the mean over their tokens, one token after the other."""
    total = 0.0
    for r in rollout.unique():
        tokens = (rollout == r).nonzero()[:, 0]
        terms = []
        for t in tokens:
            s = (logp[tokens] - old[tokens]).mean().exp() if name == "gspo" else (logp[t] - old[t]).exp()
            kept = s if 1 - low <= s <= 1 + high else f64(1 - low if s < 1 - low else 1 + high)
            value = torch.min(s * adv[t], kept * adv[t])
            if dual and adv[t] < 0: value = torch.max(value, dual * adv[t])
            if name == "cispo": value = kept.detach() * adv[t] * logp[t]
            if name in ("reinforce", "rloo"): value = adv[t] * logp[t]
            terms.append(weight[t] * value)
        total = total + sum(terms) / len(terms)
    return -total / len(rollout.unique())


@settings(quick, max_examples=60)
@given(st.integers(0, 10**6), st.sampled_from(sorted(LOSSES)), st.sampled_from([0.0, 1.2]))
def test_losses_and_gradients_are_the_formula(seed, name, dual):
    """Catches: clip bounds swapped, max for min where A < 0, dual clip on the wrong sign, GSPO's mean without gradient
    or a sum in its place, CISPO's weight with a gradient or its tokens dropped, a weight or normaliser left out."""
    logp, old, adv, weight, norm, rollout = batch(seed, by_rollout=name == "gspo")
    (low, high), dual = BOUND[name], dual if name in ("grpo", "gspo", "ppo") else 0.0
    loss, _ = LOSSES[name](logp, old, adv, weight, norm, rollout, 4.0, low, high, dual)
    want = naive_loss(name, logp, old, adv, weight, rollout, low, high, dual)
    got_grad, want_grad = (torch.autograd.grad(x, logp)[0] for x in (loss, want))
    assert torch.allclose(loss, want, rtol=1e-12, atol=1e-14)
    assert torch.allclose(got_grad, want_grad, rtol=1e-12, atol=1e-14)
    assert got_grad.any() or name == "gspo"


def test_gradients_by_finite_differences():
    """Catches: a detach on the way from logp to the loss (the naive form could have it too).  CISPO has one: its
    gradient is that of GRPO where neither clips."""
    for name in ("grpo", "gspo", "reinforce"):
        logp, *rest = batch(11, spread=0.1, by_rollout=name == "gspo")
        assert torch.autograd.gradcheck(lambda x: LOSSES[name](x, *rest, 4.0, *BOUND[name])[0], logp)
    logp, old, adv, weight, norm, rollout = batch(11)
    assert torch.autograd.gradcheck(lambda x: kl_loss(x, old, weight, norm, 4.0)[0], logp)
    wide = [LOSSES[n](logp, old, adv, weight, norm, rollout, 4.0, 1.0, 1e9)[0] for n in ("grpo", "cispo")]
    assert torch.allclose(*(torch.autograd.grad(x, logp)[0] for x in wide), rtol=1e-12)


def test_on_policy_gradient_is_reinforce():
    """Catches: a sign, and any bias of the first update, where every ratio is one."""
    logp, old, adv, _, norm, rollout = batch(1)
    for loss_of in LOSSES.values():
        loss, sums = loss_of(logp, logp.detach(), adv, torch.ones_like(adv), norm, rollout, 4.0)
        grad = torch.autograd.grad(loss, logp)[0]
        assert torch.allclose(grad, -adv * norm / 4, rtol=1e-12)
        assert sums["kl"] == sums.get("clipped_low", 0) == sums.get("clipped_high", 0) == 0


def test_kl_loss_is_the_formula():
    """Catches: the ratio upside down (which has the same value to second order), a weight or normaliser left out."""
    logp, ref, _, weight, norm, _ = batch(4)
    loss, sums = kl_loss(logp, ref, weight, norm, 3.0)
    k3 = [math.exp(r - p) - 1 - (r - p) for p, r in zip(logp.tolist(), ref.tolist())]
    assert sums["kl_ref"].item() == pytest.approx(sum(k3), rel=1e-12)
    want = sum(n * w * k for n, w, k in zip(norm.tolist(), weight.tolist(), k3)) / 3
    assert loss.item() == pytest.approx(want, rel=1e-12)


@quick
@given(st.integers(0, 10**6), st.integers(1, 5), st.sampled_from(sorted(LOSSES)), st.booleans())
def test_micro_batches_add_up_to_the_batch(seed, num_parts, name, by_token):
    """Catches: means inside a micro-batch (of the loss, of a metric), NaN or an error from an empty micro-batch, a
    share of effective samples that is a mean of shares.  Ranks are micro-batches too."""
    logp, old, adv, weight, norm, rollout = batch(seed)
    part = torch.from_numpy(np.random.default_rng(seed).integers(0, num_parts, len(logp)))
    if name == "gspo": part = part[:4][rollout]                        # whole rollouts
    elif by_token: norm = token_weights(rollout, "token").double()
    whole, sums = LOSSES[name](logp, old, adv, weight, norm, rollout, 4.0)
    batch_of = lambda p: (x[part == p] for x in (logp, old, adv, weight, norm, rollout))
    pieces = [LOSSES[name](*batch_of(p), 4.0) for p in range(num_parts + 1)]             # the last is empty
    total = sum(p[0] for p in pieces)
    assert torch.allclose(total, whole)
    assert torch.allclose(torch.autograd.grad(total, logp)[0], torch.autograd.grad(whole, logp)[0])
    added = {k: sum(p[1][k] for p in pieces).double() for k in sums}
    for k in sums: assert torch.allclose(added[k], sums[k].double()), k
    share = added["weight"] ** 2 / (added["weight_sq"] * added["tokens"])
    assert torch.allclose(share, sum(weight) ** 2 / sum(w * w for w in weight) / len(weight))
    near = kl_loss(logp, old, weight, norm, 4.0)[0]
    assert torch.allclose(sum(kl_loss(logp[part == p], old[part == p], weight[part == p], norm[part == p], 4.0)[0]
                              for p in range(num_parts + 1)), near)


@quick
@given(st.integers(0, 10**6), st.sampled_from(sorted(LOSSES)), st.sampled_from(["rollout", "token", "constant"]))
def test_padding_and_order_change_nothing(seed, name, mode):
    """Catches: a normaliser that counts what it is given (tokens of a pack, padding of norm 0, rollouts without
    advantage, which are never computed) and not the batch; a result that depends on the order of the tokens."""
    logp, old, adv, weight, norm, rollout = batch(seed)
    if name != "gspo": norm = norm if mode == "rollout" else token_weights(rollout, mode).double()
    adv = torch.where(rollout == 1, 0.0, adv)
    args = logp, old, adv, weight, norm, rollout
    loss, sums = LOSSES[name](*args, 9.0)
    grad = torch.autograd.grad(loss, logp)[0]
    order = torch.from_numpy(np.random.default_rng(seed).permutation(len(logp)))
    for index in (order, order[rollout[order] != 1]):
        other, _ = LOSSES[name](*(x[index] for x in args), 9.0)
        assert torch.allclose(other, loss) and torch.allclose(torch.autograd.grad(other, logp)[0], grad)
    if name == "gspo": return                                          # has no token of norm 0
    pad = lambda x, value: torch.cat([x, x.new_full((3,), value)])
    padded, _ = LOSSES[name](*(pad(x, v) for x, v in zip(args, (-1.0, -2.0, 5.0, 1.0, 0.0, 0))), 9.0)
    assert torch.allclose(padded, loss) and torch.allclose(torch.autograd.grad(padded, logp)[0], grad)


def test_gspo_gives_each_call_its_own_advantage():
    """Catches: a ratio whose gradient spreads over the rollout, so that the credit of one call trains all of them."""
    logp, old, adv, weight, norm, rollout = batch(6, by_rollout=True)
    adv = f64(np.random.default_rng(6).normal(size=len(adv)))
    grad = torch.autograd.grad(gspo_loss(logp, old, adv, weight, norm, rollout, 4.0, 1.0, 1e9)[0], logp)[0]
    for t in range(len(logp)):
        s = math.exp((logp - old)[rollout == rollout[t]].mean().item())
        assert grad[t].item() == pytest.approx((-norm * weight * s * adv / 4)[t].item(), rel=1e-12)


def test_gspo_refuses_part_of_a_rollout():
    """Catches: a sequence ratio computed in silence from the tokens that happen to be in the micro-batch."""
    logp, old, adv, weight, norm, rollout = batch(2)
    half = slice(0, len(logp) // 2)
    with pytest.raises(AssertionError, match="whole rollouts"):
        gspo_loss(*(x[half] for x in (logp, old, adv, weight, norm, rollout)), 4.0)


def test_gspo_takes_rollouts_of_any_length():
    """Catches: the sum of 1/n over a whole long rollout, rounded at each term, taken for a part of one."""
    zeros = torch.zeros(85_802)
    gspo_loss(zeros, zeros, zeros, zeros, token_weights(zeros.long()), zeros.long(), 1.0)


def test_sums_by_hand():
    """Catches: clip fractions that count tokens whose gradient is kept, kl the wrong way round, dropped miscounted."""
    ratio = torch.tensor([1.5, 1.5, 0.5, 0.5, 4.0, 1.0], dtype=torch.float64)
    adv = torch.tensor([1.0, -1.0, 1.0, -1.0, -1.0, 1.0], dtype=torch.float64)
    weight = torch.tensor([1.0, 1.0, 1.0, 1.0, 1.0, 0.0], dtype=torch.float64)
    rollout = torch.zeros(6, dtype=torch.long)
    norm, old = token_weights(rollout), torch.zeros(6, dtype=torch.float64)
    loss, sums = grpo_loss(ratio.log(), old, adv, weight, norm, rollout, 1.0, dual_clip=3.0)
    assert torch.isclose(loss, -torch.tensor((1.2 - 1.5 + 0.5 - 0.8 - 3.0) / 6, dtype=torch.float64), rtol=1e-6)
    got = {k: float(v) for k, v in sums.items()}
    assert (got["tokens"], got["clipped_low"], got["clipped_high"], got["dual"], got["dropped"]) == (6, 1, 1, 1, 1)
    assert got["ratio"] == pytest.approx(9) and got["weight"] == got["weight_sq"] == 5
    args = ratio.log(), old, adv, weight, norm, rollout
    sums = LOSSES["cispo"](*args, 1.0, 0.4, 0.4)[1]
    assert (sums["clipped_low"], sums["clipped_high"]) == (2, 3) and "dual" not in sums
    with pytest.raises(AssertionError, match="has none"): LOSSES["cispo"](*args, 1.0, dual_clip=3.0)
    with pytest.raises(AssertionError, match="dual_clip 0.5"): grpo_loss(*args, 1.0, dual_clip=0.5)
    assert got["kl"] == pytest.approx(sum(r - 1 - math.log(r) for r in ratio.tolist()))
    weights = lambda mode: token_weights(torch.tensor([2, 0, 2]), mode).tolist()
    assert weights("rollout") == [0.5, 1, 0.5] and weights("token") == weights("constant") == [1, 1, 1]
    with pytest.raises(AssertionError, match="'mean'"): weights("mean")


def test_a_token_without_behaviour_probability_leaves_loss_and_gradient():
    """Catches: NaN reaching the loss through 0 * NaN, or such a token trained as if it were on policy."""
    logp, old, adv, _, norm, rollout = batch(3)
    logp_rollout = old.clone()
    logp_rollout[::3] = math.nan
    loss, sums = grpo_loss(logp, old, adv, correction(old, logp_rollout), norm, rollout, 4.0)
    grad = torch.autograd.grad(loss, logp)[0]
    assert loss.isfinite() and not grad[::3].any() and grad[1::3].any() and sums["dropped"] == len(logp[::3])


# ---- every outcome of a small tree of calls: what each choice estimates ---------------------------------------------

STOP, GO = 0, 1                          # what is sampled; other tokens are the harness's


def every_rollout():
    """All rollouts of a harness that asks once, and if it is told GO GO asks twice more: once on from there, once with
    the end of the reply rewritten, so that a token before the fork has two leaves.  A call ends at STOP or full."""
    def reply(most): return [(STOP,), (GO,)] if most == 1 else [(STOP,)] + [(GO, *r) for r in reply(most - 1)]
    for first in reply(2):
        asked = [([9], first)]
        if first != (GO, GO): yield asked
        else: yield from ([*asked, ([9, GO, GO, 7], b), ([9, GO, 8], c)] for b in reply(2) for c in reply(1))


class World:
    """The rollouts as trees, each token's state (all that stands before it), and a random policy over those states."""
    def __init__(self, seed):
        self.trees = []
        for asked in every_rollout():
            calls = [tree.Call(i, "main", None, p, p, list(reply), [-0.7] * len(reply), "stop")
                     for i, (p, reply) in enumerate(asked)]
            self.trees.append(tree.build(tree.Rollout("", "", "", "", 1.0, 0.0, calls, "ok", 0.0)))
        tokens = [[(tuple(p[:i]), p[i]) for p, at in zip(t.paths, t.trained) for i in at] for t in self.trees]
        self.states = sorted({s for x in tokens for s, _ in x})
        self.state = [torch.tensor([self.states.index(s) for s, _ in x]) for x in tokens]
        self.token = [torch.tensor([a for _, a in x]) for x in tokens]
        self.call = [torch.from_numpy(np.concatenate(t.call)) for t in self.trees]
        random = np.random.default_rng(seed)
        self.theta, self.ref = (f64(random.normal(0, 0.7, (len(self.states), 2))) for _ in range(2))
        self.theta.requires_grad_()
        self.reward = f64(random.normal(0, 1, len(self.trees)))
        self.length = f64([len(x) for x in self.token])
        self.logp = [self.log_pi()[s, a] for s, a in zip(self.state, self.token)]
        self.P = torch.stack([x.sum() for x in self.logp]).exp()

    def log_pi(self): return self.theta.log_softmax(1)

    def grad(self, x): return torch.autograd.grad(x, self.theta, retain_graph=True)[0]

    def expected(self, n, term):
        """Expected gradient of term(indices of n rollouts) -> loss, over every n that can be drawn."""
        total = 0.0
        for drawn in map(list, itertools.product(range(len(self.trees)), repeat=n)):
            total = total + self.P[drawn].detach().prod() * term(drawn)
        return self.grad(total)

    def estimate(self, n, advantages, mode="constant", times=None):
        """-> the expected gradient of algos' first update, with the sign and scale of an ascent (constant = 1)."""
        def term(drawn):
            cat = lambda x: torch.cat([x[i] for i in drawn])
            rollout = torch.repeat_interleave(torch.arange(n), self.length[drawn].long())
            adv = advantages(drawn, rollout)
            norm = token_weights(rollout, mode).double()
            if times: norm = norm * cat(times)
            logp, denom = cat(self.logp), {"token": len(rollout)}.get(mode, n)
            return -reinforce_loss(logp, logp.detach(), adv, torch.ones_like(norm), norm, rollout, denom)[0]
        return self.expected(n, term)

    def by_group(self, std_norm=False, leave_one_out=True, reward=None):
        reward = self.reward if reward is None else reward
        return lambda drawn, rollout: group_advantages(
            reward[drawn], torch.zeros(len(drawn), dtype=torch.long), std_norm, leave_one_out, eps=0.0)[rollout]


@pytest.fixture(scope="module")
def world(): return World(0)


def same(a, b, rtol=1e-9): return torch.allclose(a, b, rtol=rtol, atol=1e-12)


def cosine(a, b): return torch.cosine_similarity(a.flatten(), b.flatten(), 0).item()


def test_the_tree_holds_every_decision_once(world):
    """Catches: a token lost or trained twice at a fork: the probabilities of all rollouts, from the tokens that their
    trees train, would not add up to 1."""
    assert len(world.trees) == 8 and max(len(t.paths) for t in world.trees) == 2
    assert world.P.sum().item() == pytest.approx(1, rel=1e-12)


def test_leave_one_out_with_a_constant_denominator_is_unbiased_on_trees(world):
    """Catches: any bias of the estimator that algos.py calls unbiased.  REINFORCE without baseline too; a baseline that
    holds the rollout itself only shrinks the gradient, by (n - 1) / n."""
    truth = world.grad((world.P * world.reward).sum())
    for n in (2, 3):
        assert same(world.estimate(n, world.by_group()), truth)
        assert same(world.estimate(n, world.by_group(leave_one_out=False)), truth * (n - 1) / n)
    batch_mean = lambda drawn, rollout: reinforce_advantages(world.reward[drawn])[rollout]
    assert same(world.estimate(2, batch_mean), truth / 2)
    no_baseline = lambda drawn, rollout: reinforce_advantages(world.reward[drawn], "none")[rollout]
    assert same(world.estimate(1, no_baseline), truth)


def test_the_bias_of_every_other_choice(world):
    """Catches: a documented bias that is not the one which the code has: each is compared with its own closed form, and
    must not point where the gradient of the mean reward does."""
    truth = world.grad((world.P * world.reward).sum())
    P, R, T = world.P, world.reward, world.length
    p, J = P.detach(), (P * world.reward).sum().detach()
    better = (R[:, None] > R).double() - (R[:, None] < R).double()     # of a pair only the order counts
    by_std = world.estimate(2, world.by_group(std_norm=True, leave_one_out=False))
    assert same(by_std, world.grad((P * (better @ p)).sum()))
    by_rollout = world.estimate(2, world.by_group(), "rollout")
    assert same(by_rollout, world.grad((P * (R - J) / T).sum()), 1e-6)  # its norm is float32
    by_token = world.estimate(2, world.by_group(), "token")
    assert same(by_token, world.grad((P * (((R[:, None] - R) / (T[:, None] + T)) @ p)).sum() * 2))
    begins = lambda path, state, token: path[:len(state) + 1] == [*state, token]
    num_leaves = [f64([sum(begins(p, world.states[s], int(a)) for p in t.paths) for s, a in zip(states, tokens)])
                  for t, states, tokens in zip(world.trees, world.state, world.token)]
    assert max(x.max() for x in num_leaves) == 2
    by_path = world.estimate(2, world.by_group(), times=num_leaves)
    for name, biased in (("std", by_std), ("rollout", by_rollout), ("token", by_token), ("path", by_path)):
        assert cosine(biased, truth) < 0.999, name


def test_rewards_by_call_are_unbiased(world):
    """Catches: a call credited with what came before it, or compared with a group from which ended rollouts are
    missing: both would show as bias."""
    random = np.random.default_rng(1)
    reward = torch.zeros(len(world.trees), 3, dtype=torch.float64)
    seen = {}                                                          # of a call: what all calls so far said
    for i, asked in enumerate(every_rollout()):
        for k in range(len(asked)):
            reward[i, k] = seen.setdefault(str(asked[:k + 1]), random.normal())
    advantages = lambda drawn, rollout: call_advantages(
        reward[drawn], torch.zeros(len(drawn), dtype=torch.long), std_norm=False, leave_one_out=True)[
        rollout, torch.cat([world.call[i] for i in drawn])]
    assert same(world.estimate(2, advantages), world.grad((world.P * reward.sum(1)).sum()))


def test_a_critic_without_discount_is_unbiased(world):
    """Catches: a value of the state after the token, or a share of another branch, which a critic that is wrong turns
    into bias: here it is random."""
    critic = f64(np.random.default_rng(2).normal(size=len(world.states)))

    def advantages(drawn, rollout):
        t, state = world.trees[drawn[0]], world.state[drawn[0]]
        ends = np.cumsum([0, *map(len, t.trained)])
        index = {str(p[:i + 1]): int(n + k) for p, at, n in zip(t.paths, t.trained, ends) for k, i in enumerate(at)}
        chains = [torch.tensor([index[key] for i in range(len(p)) if (key := str(p[:i + 1])) in index])
                  for p in t.paths]
        return gae(critic[state], world.reward[drawn].expand(len(chains)), chains)[0]
    assert same(world.estimate(1, advantages), world.grad((world.P * world.reward).sum()))


def test_k1_in_the_reward_and_k3_in_the_loss(world):
    """Catches: k3 taken for the reverse KL (its gradient is the forward one's, at the states met), k1 with the sign
    turned or counted once a path."""
    log_pi, log_ref = world.log_pi(), world.ref.log_softmax(1)
    logp_ref = [log_ref[s, a] for s, a in zip(world.state, world.token)]
    log_ratio = torch.stack([(x - y).sum() for x, y in zip(world.logp, logp_ref)])
    k1 = torch.cat([kl_penalty(x.detach(), y, torch.zeros(len(x), dtype=torch.long), 1)
                    for x, y in zip(world.logp, logp_ref)])
    assert same(k1, log_ratio.detach())
    truth = world.grad((world.P * (world.reward - 0.3 * log_ratio)).sum())
    assert same(world.estimate(2, world.by_group(reward=world.reward - 0.3 * k1)), truth)

    def k3(drawn):
        logp = world.logp[drawn[0]]
        return kl_loss(logp, logp_ref[drawn[0]], torch.ones_like(logp), torch.ones_like(logp), 1.0)[0]
    visits = sum(p * torch.bincount(s, minlength=len(world.states)) for p, s in zip(world.P.detach(), world.state))
    forward = (log_ref.exp() * (log_ref - log_pi)).sum(1)
    reverse = (log_pi.exp() * (log_pi - log_ref)).sum(1)
    assert same(world.expected(1, k3), world.grad((visits * forward).sum()))
    assert cosine(world.expected(1, k3), world.grad((visits * reverse).sum())) < 0.999
