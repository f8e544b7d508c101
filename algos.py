"""The mathematics: advantages, corrections and losses.  Pure functions of tensors; every variant beside its siblings.

Letters and symbols: R rollouts of a batch; K calls of its longest rollout; N trained tokens of a batch, or of one
micro-batch of it; L leaves (paths) of its trees.
    logp (N,)           log pi_theta(token), with gradient
    logp_old (N,)       the same by the trainer when the update began; ratio = exp(logp - logp_old)
    logp_rollout (N,)   by the engine when it sampled; NaN = missing
    logp_ref (N,)       by the frozen reference policy
    adv (N,)            advantage of the token: that of its rollout, of its call, or its own (PPO)
    rollout (N,)        long: which rollout of the batch the token belongs to
    weight (N,)         what `correction` returns
    norm (N,)           what `token_weights` returns, taken over the whole batch, before it is split
    denom               float: the loss's normaliser, of the whole batch, over all ranks
Contract of the losses: loss = -sum_t norm_t weight_t surrogate_t / denom, a sum over the tokens given, so that losses
and gradients of micro-batches with the same denom add up to those of the batch.  Which denom goes with which norm:
    rollout   norm = 1 / tokens of its rollout, denom = rollouts in the loss     (GRPO, GSPO)
    token     norm = 1,                         denom = trained tokens           (DAPO, 2503.14476, eq. 8; CISPO)
    constant  norm = 1,                         denom = rollouts * a constant    (Dr.GRPO, 2503.20783; RLOO)
Metrics come as sums (0-dim tensors, detached): a batch's mean is the sum of sums over the sum of "tokens", the share of
its effective sample size "weight"^2 / ("weight_sq" "tokens").

What the first update (all ratios 1) follows on average, with n rollouts a group; the tests show it exactly, over every
outcome of a small tree of calls.  J = mean reward; P, R, T = a rollout's probability, reward, trained tokens:
    leave-one-out or no baseline, constant   grad J; also by calls, with KL in the reward, with gae at gamma = lam = 1
    mean that includes the rollout itself    (n - 1) / n of it: smaller, same direction
    std_norm                                 another direction; n = 2: sum grad P (P(worse) - P(better)), ranks alone
    rollout norm                             another; with leave-one-out sum grad P (R - J) / T, long ones count less
    token norm                               another: a rollout's own length is in the denominator of all
    a shared token counted once a path       another: what came before a fork counts too much"""
import torch


# ---- advantages: rewards -> (R,), (R, K) or (N,) --------------------------------------------------------------------

SAME = 1e-9                              # rewards apart by less, as a share of what they were summed from, are equal


def is_informative(rewards, group, size=None):
    """-> (R,) bool: the rollout has a reward, and its group two that differ by more than rounding: SAME times the
    group's greatest size.  size (R,): sum of the absolute terms that a reward was summed from; None = |reward|.
    Dynamic sampling, DAPO, 2503.14476, eq. 11, samples groups until enough are.  Differs from the paper: any rewards,
    not right or wrong alone; the caller samples again, and bounds how often."""
    is_known = ~rewards.isnan()
    values, index = torch.unique(group, return_inverse=True)
    extreme = lambda how, start, x=rewards: x.new_full((len(values),), start).scatter_reduce(
        0, index, x.masked_fill(~is_known, start), how)
    spread = extreme("amax", -torch.inf) - extreme("amin", torch.inf)
    return is_known & (spread > SAME * extreme("amax", 0., rewards.abs() if size is None else size))[index]


def group_advantages(rewards,            # (R,) float, NaN = no reward (infra error)
                     group,              # (R,) long, the (task, harness) group of each rollout
                     std_norm=True,      # divide by the group's std
                     leave_one_out=False,        # baseline = mean of the others
                     eps=1e-6,
                     size=None):         # (R,) of is_informative
    """GRPO, 2402.03300, section 4.1.2: A_i = (R_i - mean) / (std + eps) over the rollouts of a group.  std_norm=False
    is Dr.GRPO's, 2503.20783; leave_one_out too is RLOO's, 2402.14740: A_i = R_i - mean of the others
    = (R_i - mean) n / (n - 1).
    Differs from the paper: population std; NaN leaves the statistics and gets 0, so a group may be short of rollouts;
    groups of one or of equal rewards get exactly 0.  Computed in float64."""
    is_known = ~rewards.isnan()
    r = rewards[is_known].double()
    _, index, n = torch.unique(group[is_known], return_inverse=True, return_counts=True)
    mean = lambda x: torch.zeros_like(n, dtype=torch.float64).index_add(0, index, x) / n
    centred = adv = r - mean(r)[index]
    if leave_one_out: adv = adv * (n.double() / (n - 1).clamp(min=1))[index]
    if std_norm: adv = adv / (mean(centred ** 2).sqrt() + eps)[index]
    out = torch.zeros_like(rewards)
    out[is_known] = adv.to(rewards.dtype)
    return out.masked_fill(~is_informative(rewards, group, size), 0)  # a mean of equal numbers need not be that number


def reinforce_advantages(rewards, baseline="batch"):
    """REINFORCE, Williams, 1992: A_i = R_i - b.  none: b = 0; batch: the mean reward of the batch, whatever the group.
    rewards (R,), or (R, K) by call as in `call_advantages`.  NaN gets 0."""
    assert baseline in ("none", "batch"), f"baseline {baseline!r}: none or batch"
    by_call = rewards if rewards.dim() == 2 else rewards[:, None]
    adv = to_go(by_call).nan_to_num(0.) if baseline == "none" else call_advantages(
        by_call, torch.zeros(len(rewards), dtype=torch.long, device=rewards.device), std_norm=False)
    return adv.to(rewards.dtype).view_as(rewards)


def to_go(rewards):
    """(R, K) -> (R, K) float64: sum of the rewards of this call and of those after it."""
    return rewards.double().flip(1).cumsum(1).flip(1)


def call_advantages(rewards,             # (R, K) float, reward of the rollout's k-th call; 0 where it has fewer calls.
                                         # float64: in float32 equal sums of other terms differ by more than SAME
                    group,               # (R,) long
                    **options):          # of group_advantages
    """Rewards a call: -> (R, K), for every token of the call.  A_ik = (G_ik - mean_j G_jk) / (std_j G_jk + eps) over
    the rollouts j of the group, of the reward to go G_ik = sum_{l >= k} r_il.  Compares turns of one number as MT-GRPO,
    2505.11821, by returns as GTPO, 2511.14846.  An outcome in column K - 1 alone gives each call group_advantages(it).
    Calls go by time of arrival, also over forks: what a harness does follows on all that it was told.
    Differs from the papers: no discount; a rollout that ended has 0 to go and stays in the statistics, so leave-one-out
    is unbiased.  NaN: that call and those before it get 0 and leave the statistics."""
    num_calls = rewards.shape[1]
    cell = group[:, None] * num_calls + torch.arange(num_calls, device=group.device)
    adv = group_advantages(to_go(rewards).flatten(), cell.flatten(), size=to_go(rewards.abs()).flatten(), **options)
    return adv.to(rewards.dtype).view_as(rewards)


def gae(values,                          # (N,) float, V(s_t): of what stands before token t, when the update began
        rewards,                         # (L,) float, outcome of each leaf's rollout; NaN = none
        chains,                          # L long tensors: the trained tokens from root to leaf, as indices into (N,)
        gamma=1.0, lam=1.0,
        token_rewards=None):             # (N,) float, further rewards at tokens (of a call: at its last), or None
    """-> adv, returns (N,), without gradient.  GAE, 1506.02438, eq. 16, in its backward form: along a chain
        G_t = r_t + gamma ((1 - lam) V(s_t+1) + lam G_t+1),   G_last = r_last + R,   A_t = G_t - V(s_t)
    and a token of several chains has the mean of their G.  At gamma = lam = 1 A_t is R - V(s_t), to the bit; a chain
    sees nothing beyond a fork.  A chain holds the tokens that other paths train too (a token stands in one path's
    `trained`, but in the chain of every leaf below it), and nothing of other rollouts.
    Differs from the paper: the mean over leaves; time passes at trained tokens alone.  A chain without a reward counts
    in no mean; tokens on no other get A = 0, G = V.  Loops in Python, in float64: some 0.5 s a million tokens."""
    v = values.tolist()
    r = [0.] * len(v) if token_rewards is None else token_rewards.tolist()
    mean, count = [0.] * len(v), [0] * len(v)
    for chain, to_go in zip(chains, rewards.tolist(), strict=True):
        if to_go != to_go: continue
        for t in reversed(chain.tolist()):
            ret = r[t] + to_go
            count[t] += 1
            mean[t] += (ret - mean[t]) / count[t]                     # exact where all are equal
            to_go = gamma * ((1 - lam) * v[t] + lam * ret)
    returns = torch.tensor(mean, dtype=torch.float64, device=values.device)
    returns = torch.where(torch.tensor(count, device=values.device) > 0, returns, values.detach().double())
    return (returns - values.detach()).to(values.dtype), returns.to(values.dtype)


def whiten(adv, norm, eps=1e-6):
    """PPO's usual option (no paper's): adv (N,) -> mean 0, std 1 over the batch in the measure norm, that of the loss.
    Computed in float64, over the whole batch, before it is split."""
    mean = lambda x: (norm * x).sum() / norm.sum()
    centred = adv.double() - mean(adv.double())
    return (centred / (mean(centred ** 2).sqrt() + eps)).to(adv.dtype)


# ---- what is added to rewards: -> (R,) ------------------------------------------------------------------------------

def overlong_penalty(lengths,            # (R,) tokens
                     max_tokens,         # L_max, where a rollout is cut off
                     buffer):            # L_cache, over which the penalty rises, tokens
    """DAPO's soft punishment, 2503.14476, eq. 13, to be added to the reward: 0 up to L_max - L_cache, then falling
    linearly to -1 at L_max, -1 beyond.  Differs from the paper: the caller says what a length is (of the context of the
    rollout's longest path, say)."""
    assert 0 < buffer <= max_tokens, f"buffer {buffer} of {max_tokens} tokens: above 0, at most all of them"
    return -((lengths - (max_tokens - buffer)) / buffer).clamp(0, 1)


def kl_penalty(logp_old, logp_ref, rollout, num_rollouts):
    """k1 in the reward, InstructGPT, 2203.02155, eq. 2: -> (R,) sum over the rollout's tokens of logp_old - logp_ref,
    beta times which is to be subtracted from the reward before advantages are taken.  Its mean is KL(pi || ref) of
    whole rollouts, the reverse KL, whose gradient the advantages then follow.  Differs from frameworks that subtract it
    first: with std_norm it is centred in the group but not divided by the std, which in a group of equal rewards would
    be its own, and give it an advantage of full size whatever beta.
    With a critic it goes token by token: token_rewards = -beta (logp_old - logp_ref)."""
    return logp_old.new_zeros(num_rollouts).index_add(0, rollout, logp_old - logp_ref)


# ---- correction for the engine's other probabilities: -> (N,) weights, without gradient ------------------------------

BOUNDS = {"icepop": (0.5, 5.0), "geometric": (0.99, 1.01)}


def correction(logp_old,                 # (N,) float
               logp_rollout,             # (N,) float, NaN = missing
               kind="tis",               # tis, icepop, geometric, off
               cap=2.0,                  # tis: greatest weight
               rollout=None):            # (N,) long: r of a rollout, its geometric mean (GSPO); None = of each token
    """r = exp(logp_old - logp_rollout).
    tis: min(r, cap) ("Your Efficient RL Framework Secretly Brings You Off-Policy RL Training", Yao et al., blog, 2025).
    icepop: r within BOUNDS, 0 outside (Ring-1T, 2510.18855).  off: 1.
    geometric: 1 where the rollout's r is within BOUNDS, else 0 for all of it ("When Speed Kills Stability", part 3,
    Liu et al., blog, 2025, whose bounds are ten times tighter: ours must let rollouts of a few tokens pass); it needs
    `rollout`.  Weights multiply: geometric * tis is the blog's rejection with token weights.
    A token without logp_rollout cannot be corrected: weight 0 (the losses count it as "dropped"); with `rollout` it is
    only left out of the mean, and a rollout without any gets 0.  With `rollout`, give whole rollouts.
    Differs from the sources: `rollout` for tis and icepop."""
    assert kind in ("tis", "icepop", "geometric", "off"), f"correction {kind!r}: tis, icepop, geometric or off"
    assert kind != "geometric" or rollout is not None, "correction geometric is of rollouts: give `rollout`"
    if kind == "off": return torch.ones_like(logp_old)
    gap = (logp_old - logp_rollout).detach()
    is_known = ~gap.isnan()
    gap = gap.nan_to_num(0.)
    if rollout is not None:
        total, index = rollout_sums(torch.stack([gap, is_known.to(gap.dtype)], 1), rollout)
        gap, is_known = (total[:, 0] / total[:, 1].clamp(min=1))[index], (total[:, 1] > 0)[index]
    r = gap.exp()
    if kind == "tis": return r.clamp(max=cap) * is_known
    low, high = BOUNDS[kind]
    return torch.where((r >= low) & (r <= high) & is_known, torch.ones_like(r) if kind == "geometric" else r, 0.)


def rollout_sums(x, rollout):
    """x (N, ...), rollout (N,) long -> sums over each rollout present, and each token's row in them (N,)."""
    values, index = torch.unique(rollout, return_inverse=True)
    return x.new_zeros(len(values), *x.shape[1:]).index_add(0, index, x), index


# ---- losses of the policy: one signature ----------------------------------------------------------------------------

def token_weights(rollout,               # (N,) long, of the WHOLE batch
                  mode="rollout"):       # rollout: mean over each rollout's tokens; token, constant: all tokens alike
    """-> (N,) float32 norm; see the module's table for the denom that goes with it."""
    assert mode in ("rollout", "token", "constant"), f"mode {mode!r}: rollout, token or constant"
    if mode != "rollout": return torch.ones(len(rollout), device=rollout.device)
    return 1. / torch.bincount(rollout)[rollout]


def grpo_loss(logp, logp_old, adv, weight, norm, rollout, denom, clip_low=0.2, clip_high=0.2, dual_clip=0.0):
    """-> loss, sums.  GRPO, 2402.03300, eq. 3, with PPO's clip, 1707.06347, eq. 7, on the ratio of each token:
        surrogate_t = min(ratio_t A_t, clip(ratio_t, 1 - clip_low, 1 + clip_high) A_t)
    With adv of `gae` it is PPO's.  clip_high > clip_low is DAPO's clip-higher, 2503.14476.  dual_clip c > 1,
    1912.09729: at least c A_t where A_t < 0.  Differs from the paper: KL is `kl_loss`, to be added; weight."""
    log_ratio = logp - logp_old
    return clipped(log_ratio, log_ratio, adv, weight, norm, denom, clip_low, clip_high, dual_clip)


def gspo_loss(logp, logp_old, adv, weight, norm, rollout, denom, clip_low=3e-4, clip_high=4e-4, dual_clip=0.0):
    """-> loss, sums.  GSPO, 2507.18071, eqs. 5 and 7: the ratio of a rollout, in log space, in place of each token's:
        s_i = exp(mean over the rollout's trained tokens of (logp - logp_old))
    in the form of eq. 14 (GSPO-token), sg(s_i) pi_t / sg(pi_t): the same where a rollout has one advantage, and right
    where its calls have their own.
    Needs the rollout norm, whole rollouts in a micro-batch (`split(..., unit=...)`) and `correction(..., rollout=...)`.
    Differs from the paper: a sequence is every trained token of the rollout's tree; weight."""
    log_ratio = logp - logp_old
    share, index = rollout_sums(norm.double(), rollout)     # in float32 1e5 terms of 1e-5 are off by more than 1e-3
    assert ((share - 1).abs() < 1e-3).all(), \
        f"GSPO got {share.min().item():.3f} of a rollout: it needs whole rollouts in a micro-batch, norm mode rollout"
    total, _ = rollout_sums(torch.stack([log_ratio, torch.ones_like(log_ratio)], 1), rollout)
    log_s = (total[:, 0] / total[:, 1])[index].detach() + log_ratio - log_ratio.detach()
    return clipped(log_s, log_ratio, adv, weight, norm, denom, clip_low, clip_high, dual_clip)


def cispo_loss(logp, logp_old, adv, weight, norm, rollout, denom, clip_low=1.0, clip_high=4.0, dual_clip=0.0):
    """-> loss, sums.  CISPO, MiniMax-M1, 2506.13585, eqs. 4 and 5: the clip bounds a token's weight, and removes no
    token's gradient (sg = stop gradient; clip_low 1 = no lower bound, as the paper's runs):
        surrogate_t = sg(clip(ratio_t, 1 - clip_low, 1 + clip_high)) A_t logp_t
    Differs from the paper: norm (the paper's is token); weight; the paper does not tell its clip_high."""
    assert not dual_clip, f"dual_clip {dual_clip}: CISPO has none"
    log_ratio = logp - logp_old
    ratio = log_ratio.detach().exp()
    return finish(ratio.clamp(1 - clip_low, 1 + clip_high) * adv * logp, log_ratio, ratio, weight, norm, denom,
                  clipped_low=ratio < 1 - clip_low, clipped_high=ratio > 1 + clip_high)


def reinforce_loss(logp, logp_old, adv, weight, norm, rollout, denom, clip_low=0.0, clip_high=0.0, dual_clip=0.0):
    """-> loss, sums.  REINFORCE, Williams, 1992; with leave-one-out advantages and the constant norm RLOO, 2402.14740:
        surrogate_t = A_t logp_t
    It has no ratio and so no clip: logp_old is for the sums, and the estimate is off policy from a batch's second
    update on (cispo_loss with wide bounds is its correction).  Differs from the papers: norm, weight."""
    log_ratio = logp - logp_old
    return finish(adv * logp, log_ratio, log_ratio.exp(), weight, norm, denom)


def clipped(log_s, log_ratio, adv, weight, norm, denom, clip_low, clip_high, dual_clip):
    """The surrogate of GRPO and GSPO; log_s (N,) is what is clipped."""
    assert not 0 < dual_clip <= 1, f"dual_clip {dual_clip}: above 1, or 0 = off"
    s = log_s.exp()
    surrogate = torch.minimum(s * adv, s.clamp(1 - clip_low, 1 + clip_high) * adv)
    is_dual = (adv < 0) & (s > dual_clip) if dual_clip else torch.zeros_like(adv, dtype=torch.bool)
    if dual_clip: surrogate = torch.where(is_dual, dual_clip * adv, surrogate)
    return finish(surrogate, log_ratio, s, weight, norm, denom, clipped_low=(s < 1 - clip_low) & (adv < 0),
                  clipped_high=(s > 1 + clip_high) & (adv > 0), dual=is_dual)


def finish(surrogate, log_ratio, ratio, weight, norm, denom, **flags):
    """-> loss, sums: tokens; ratio (that is clipped); clipped_low, clipped_high, dual: tokens whose gradient that clip
    removes (CISPO: bounds); kl: the k3 estimate of KL(old || new), ratio - 1 - log ratio of each token; weight and its
    square; dropped: tokens of weight 0."""
    loss = -(norm * weight * surrogate).sum() / denom
    with torch.no_grad():
        sums = {"tokens": torch.ones_like(weight), "ratio": ratio, "kl": log_ratio.expm1() - log_ratio,
                "weight": weight, "weight_sq": weight ** 2, "dropped": weight == 0, **flags}
        return loss, {k: v.sum() for k, v in sums.items()}


LOSSES = {"grpo": grpo_loss, "gspo": gspo_loss, "cispo": cispo_loss, "reinforce": reinforce_loss,
          "rloo": reinforce_loss, "ppo": grpo_loss}


# ---- losses beside it: of the distance to a reference, of a critic --------------------------------------------------

def kl_loss(logp, logp_ref, weight, norm, denom):
    """-> loss, sums; beta times it is to be added to the policy's.  k3 in the loss, GRPO, 2402.03300, eq. 4:
        sum_t norm_t weight_t (ratio_t - 1 - log ratio_t) / denom,   ratio = exp(logp_ref - logp)
    On policy its value estimates KL(pi || ref) of each token's distribution, but its gradient is not that one's: it
    estimates the gradient of KL(ref || pi), the forward KL, at the states met (2510.01555).  For the reverse KL use
    `kl_penalty`.  Differs from the paper: weight; like it, not corrected for ratios of later updates."""
    log_ratio = logp_ref - logp
    k3 = log_ratio.expm1() - log_ratio
    return (norm * weight * k3).sum() / denom, {"kl_ref": k3.detach().sum()}


def value_loss(value, value_old, returns, norm, denom, clip=0.2):
    """-> loss, sums.  The critic's, as in OpenAI's baselines (`ppo2`; 1707.06347, eq. 9, has no clip; clip=0 = none):
        sum_t norm_t max((V - G)^2, (V_old + clip(V - V_old, -clip, clip) - G)^2) / (2 denom)
    value (N,) with gradient, value_old when the update began, returns G of `gae`.  Sums: value_clipped (tokens whose
    gradient the clip removes), and in float64 what `explained_variance` needs."""
    step = value - value_old
    error, near = value - returns, value_old + step.clamp(-clip, clip) - returns
    is_flat = (near ** 2 > error ** 2) & (step.abs() > clip) & bool(clip)
    loss = (norm * torch.where(is_flat, near, error) ** 2).sum() / (2 * denom)
    with torch.no_grad():
        g, rest = returns.double(), (returns - value_old).double()
        return loss, {"value_clipped": is_flat.sum(), "value_tokens": g.new_tensor(len(g)), "return": g.sum(),
                      "return_sq": (g ** 2).sum(), "rest": rest.sum(), "rest_sq": (rest ** 2).sum()}


def explained_variance(sums):
    """1 - Var(G - V_old) / Var(G) of a batch, from the floats that the sums of value_loss add up to; NaN where all
    returns are equal.  1: the critic knows all; 0: no more than the mean does."""
    n = max(sums["value_tokens"], 1)
    variance = lambda name: sums[f"{name}_sq"] / n - (sums[name] / n) ** 2
    return 1 - variance("rest") / variance("return") if variance("return") > 1e-12 else float("nan")
