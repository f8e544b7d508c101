"""algos.py against the formulas written out rollout by rollout, and the invariances that its docstring promises."""
import math, os, sys
import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from algos import LOSSES, correction, group_advantages, grpo_loss, gspo_loss, token_weights

quick = settings(max_examples=150, deadline=None)
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
@given(st.lists(st.tuples(REWARD, st.sampled_from([0, 3, 7])), min_size=1, max_size=14), st.booleans(), st.booleans())
def test_group_advantages_are_the_formula(rows, std_norm, leave_one_out):
    """Catches: sample std, statistics over the batch and not the group, NaN in the mean, float32 factors, a rollout in
    its own baseline, residues of rounding where all rewards are equal (divided by eps they are real gradients)."""
    rewards, groups = [r for r, _ in rows], [g for _, g in rows]
    got = group_advantages(torch.tensor(rewards, dtype=torch.float64), torch.tensor(groups), std_norm, leave_one_out)
    for a, b in zip(got.tolist(), naive_advantages(rewards, groups, std_norm, leave_one_out)):
        assert a == 0 if b is None else a == pytest.approx(b, rel=1e-9, abs=1e-9)


def test_group_advantages_by_hand():
    """Catches: residues for three times 0.1 (their mean is not 0.1), dtype or order of the rewards changed."""
    rewards = torch.tensor([0.1, 1.0, 0.1, 0.0, 0.1, math.nan, 5.0])
    adv = group_advantages(rewards, torch.tensor([0, 1, 0, 1, 0, 1, 2]), eps=0.0)
    assert adv.tolist() == [0, 1, 0, -1, 0, 0, 0] and adv.dtype == torch.float32
    assert group_advantages(torch.tensor([]), torch.tensor([], dtype=torch.long)).shape == (0,)


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
    assert close(correction(old, only_4, "icepop", high=4, rollout=ids), [mean, mean, 0, mean, 0])


def batch(seed, num_rollouts=4, spread=0.3):
    """logp, logp_old, adv, weight, norm, rollout of a random batch whose ratios lie on both sides of every clip."""
    random = np.random.default_rng(seed)
    rollout = torch.from_numpy(np.concatenate([np.arange(num_rollouts), random.integers(0, num_rollouts, 30)]))
    rollout = rollout[torch.from_numpy(random.permutation(len(rollout)))]
    n = len(rollout)
    logp_old = torch.from_numpy(random.normal(-1, 1, n))
    logp = (logp_old + torch.from_numpy(random.normal(0, spread, n))).requires_grad_()
    adv = torch.from_numpy(random.normal(0, 1, num_rollouts))[rollout]
    weight = torch.from_numpy(random.uniform(0, 2, n))
    return logp, logp_old, adv, weight, token_weights(rollout, num_rollouts).double(), rollout


def naive_loss(name, logp, old, adv, weight, rollout, low, high, dual):
    """Mean over rollouts of the mean over their tokens, one token after the other."""
    total = 0.0
    for r in rollout.unique():
        tokens = (rollout == r).nonzero()[:, 0]
        terms = []
        for t in tokens:
            s = (logp[t] - old[t]).exp() if name == "grpo" else (logp[tokens] - old[tokens]).mean().exp()
            kept = min(max(s, 1 - low), 1 + high) if not 1 - low <= s <= 1 + high else s
            value = torch.min(s * adv[t], kept * adv[t])
            if dual and adv[t] < 0: value = torch.max(value, dual * adv[t])
            terms.append(weight[t] * value)
        total = total + sum(terms) / len(terms)
    return -total / len(rollout.unique())


@pytest.mark.parametrize("name", ["grpo", "gspo"])
@pytest.mark.parametrize("dual", [0.0, 1.2])
@pytest.mark.parametrize("seed", range(6))
def test_losses_and_gradients_are_the_formula(name, dual, seed):
    """Catches: clip bounds swapped, max for min where A < 0, dual clip on the wrong sign, GSPO's mean without gradient
    or a sum in its place, a weight or normaliser left out."""
    logp, old, adv, weight, norm, rollout = batch(seed)
    low, high = (0.2, 0.28) if name == "grpo" else (0.02, 0.05)
    loss, _ = LOSSES[name](logp, old, adv, weight, norm, rollout, 4.0, low, high, dual)
    want = naive_loss(name, logp, old, adv, weight, rollout, low, high, dual)
    got_grad, want_grad = (torch.autograd.grad(x, logp)[0] for x in (loss, want))
    assert torch.allclose(loss, want, rtol=1e-6) and torch.allclose(got_grad, want_grad, rtol=1e-6, atol=1e-9)
    assert got_grad.any()


def test_gradients_by_finite_differences():
    """Catches: a detach on the way from logp to the loss (the naive form could have it too)."""
    for name, (low, high) in (("grpo", (0.2, 0.28)), ("gspo", (0.02, 0.05))):
        logp, *rest = batch(11, spread=0.1)
        assert torch.autograd.gradcheck(lambda x: LOSSES[name](x, *rest, 4.0, low, high)[0], logp)


def test_on_policy_gradient_is_reinforce():
    """Catches: a sign, and any bias of the first update, where every ratio is one."""
    logp, old, adv, _, norm, rollout = batch(1)
    for loss_of in LOSSES.values():
        loss, sums = loss_of(logp, logp.detach(), adv, torch.ones_like(adv), norm, rollout, 4.0)
        grad = torch.autograd.grad(loss, logp)[0]
        assert torch.allclose(grad, -adv * norm / 4, rtol=1e-6)
        assert sums["clipped_low"] == sums["clipped_high"] == sums["kl"] == 0


@quick
@given(st.integers(0, 10**6), st.integers(1, 5), st.sampled_from(["grpo", "gspo"]), st.booleans())
def test_micro_batches_add_up_to_the_batch(seed, num_parts, name, by_token):
    """Catches: means inside a micro-batch (of the loss, of a metric), NaN or an error from an empty micro-batch."""
    logp, old, adv, weight, norm, rollout = batch(seed)
    part = torch.from_numpy(np.random.default_rng(seed).integers(0, num_parts, len(logp)))
    if name == "gspo": part = part[:4][rollout]                        # whole rollouts
    elif by_token: norm = token_weights(rollout, 4, "token").double()
    whole, sums = LOSSES[name](logp, old, adv, weight, norm, rollout, 4.0)
    batch_of = lambda p: (x[part == p] for x in (logp, old, adv, weight, norm, rollout))
    pieces = [LOSSES[name](*batch_of(p), 4.0) for p in range(num_parts + 1)]             # the last is empty
    total = sum(p[0] for p in pieces)
    assert torch.allclose(total, whole)
    assert torch.allclose(torch.autograd.grad(total, logp)[0], torch.autograd.grad(whole, logp)[0])
    for k in sums: assert torch.allclose(sum(p[1][k] for p in pieces).double(), sums[k].double()), k


def test_gspo_refuses_part_of_a_rollout():
    """Catches: a sequence ratio computed in silence from the tokens that happen to be in the micro-batch."""
    logp, old, adv, weight, norm, rollout = batch(2)
    half = slice(0, len(logp) // 2)
    with pytest.raises(AssertionError, match="whole rollouts"):
        gspo_loss(*(x[half] for x in (logp, old, adv, weight, norm, rollout)), 4.0)


def test_sums_by_hand():
    """Catches: clip fractions that count tokens whose gradient is kept, kl the wrong way round, dropped miscounted."""
    ratio = torch.tensor([1.5, 1.5, 0.5, 0.5, 4.0, 1.0], dtype=torch.float64)
    adv = torch.tensor([1.0, -1.0, 1.0, -1.0, -1.0, 1.0], dtype=torch.float64)
    weight = torch.tensor([1.0, 1.0, 1.0, 1.0, 1.0, 0.0], dtype=torch.float64)
    rollout = torch.zeros(6, dtype=torch.long)
    norm, old = token_weights(rollout, 1), torch.zeros(6, dtype=torch.float64)
    loss, sums = grpo_loss(ratio.log(), old, adv, weight, norm, rollout, 1.0, dual_clip=3.0)
    assert torch.isclose(loss, -torch.tensor((1.2 - 1.5 + 0.5 - 0.8 - 3.0) / 6, dtype=torch.float64), rtol=1e-6)
    got = {k: float(v) for k, v in sums.items()}
    assert (got["tokens"], got["clipped_low"], got["clipped_high"], got["dual"], got["dropped"]) == (6, 1, 1, 1, 1)
    assert got["ratio"] == pytest.approx(9) and got["weight"] == 5
    assert got["kl"] == pytest.approx(sum(r - 1 - math.log(r) for r in ratio.tolist()))
    assert token_weights(torch.tensor([2, 0, 2]), 3).tolist() == [0.5, 1.0, 0.5]


def test_a_token_without_behaviour_probability_leaves_loss_and_gradient():
    """Catches: NaN reaching the loss through 0 * NaN, or such a token trained as if it were on policy."""
    logp, old, adv, _, norm, rollout = batch(3)
    logp_rollout = old.clone()
    logp_rollout[::3] = math.nan
    loss, sums = grpo_loss(logp, old, adv, correction(old, logp_rollout), norm, rollout, 4.0)
    grad = torch.autograd.grad(loss, logp)[0]
    assert loss.isfinite() and not grad[::3].any() and grad[1::3].any() and sums["dropped"] == len(logp[::3])
