"""The mathematics: advantages, corrections and losses.  Pure functions of tensors; every variant beside its siblings.

Letters and symbols: R rollouts of a batch; N trained tokens of a batch, or of one micro-batch of it.
    logp (N,)           log pi_theta(token), with gradient
    logp_old (N,)       the same by the trainer when the update began; ratio = exp(logp - logp_old)
    logp_rollout (N,)   by the engine when it sampled; NaN = missing
    adv (N,)            advantage of the token's rollout
    rollout (N,)        long: which rollout of the batch the token belongs to
    weight (N,)         what `correction` returns
    norm (N,)           what `token_weights` returns, taken over the whole batch, before it is split
    denom               float: the loss's normaliser, of the whole batch, over all ranks
Contract of the losses: loss = -sum_t norm_t weight_t surrogate_t / denom, a sum over the tokens given, so that losses
and gradients of micro-batches with the same denom add up to those of the batch.  Which denom goes with which norm:
    rollout   norm = 1 / tokens of its rollout, denom = rollouts in the loss     (GRPO, GSPO)
    token     norm = 1,                         denom = trained tokens           (DAPO, 2503.14476)
    constant  norm = 1,                         denom = rollouts * a constant    (Dr.GRPO, 2503.20783)
Metrics come as sums (0-dim tensors, detached): a batch's mean is the sum of sums over the sum of "tokens"."""
import torch


# ---- advantages: rewards -> (R,) ------------------------------------------------------------------------------------

def group_advantages(rewards,            # (R,) float, NaN = no reward (infra error)
                     group,              # (R,) long, the (task, harness) group of each rollout
                     std_norm=True,      # divide by the group's std
                     leave_one_out=False,        # baseline = mean of the others
                     eps=1e-6):
    """GRPO, 2402.03300: A_i = (R_i - mean) / (std + eps) over the rollouts of a group.  std_norm=False is Dr.GRPO's,
    2503.20783; leave_one_out is RLOO's, 2402.14740: A_i = R_i - mean of the others = (R_i - mean) n / (n - 1).
    Differs from the paper: population std; NaN leaves the statistics and gets 0; groups of one or of equal rewards get
    exactly 0.  Computed in float64."""
    is_known = ~rewards.isnan()
    r = rewards[is_known].double()
    _, index, n = torch.unique(group[is_known], return_inverse=True, return_counts=True)
    mean = lambda x: torch.zeros_like(n, dtype=torch.float64).index_add(0, index, x) / n
    centred = r - mean(r)[index]
    adv = centred
    if leave_one_out: adv = adv * (n.double() / (n - 1).clamp(min=1))[index]
    if std_norm: adv = adv / (mean(centred ** 2).sqrt() + eps)[index]
    extreme = lambda how: torch.zeros_like(n, dtype=torch.float64).scatter_reduce(0, index, r, how, include_self=False)
    is_flat = (extreme("amax") == extreme("amin"))[index]      # a mean of equal numbers is not always that number
    out = torch.zeros_like(rewards)
    out[is_known] = adv.masked_fill(is_flat, 0).to(rewards.dtype)
    return out


# ---- correction for the engine's other probabilities: -> (N,) weights, without gradient ------------------------------

def correction(logp_old,                 # (N,) float
               logp_rollout,             # (N,) float, NaN = missing
               kind="tis",               # tis, icepop, off
               cap=2.0,                  # tis: greatest weight
               low=0.5, high=5.0,        # icepop: where the ratio counts
               rollout=None):            # (N,) long: a weight a rollout, its geometric mean r (GSPO); None = a token
    """r = exp(logp_old - logp_rollout).
    tis: min(r, cap) ("Your Efficient RL Framework Secretly Brings You Off-Policy RL Training", Yao et al., blog, 2025).
    icepop: r in [low, high], 0 outside ("Small Leak Can Sink a Great Ship", Ling team, blog, 2025).  off: 1.
    A token without logp_rollout cannot be corrected: weight 0 (the losses count it as "dropped"); with `rollout` it is
    only left out of the mean, and a rollout without any gets 0.  Differs from the sources: `rollout`."""
    assert kind in ("tis", "icepop", "off"), f"correction {kind!r}: tis, icepop or off"
    if kind == "off": return torch.ones_like(logp_old)
    gap = (logp_old - logp_rollout).detach()
    is_known = ~gap.isnan()
    gap = gap.nan_to_num(0.)
    if rollout is not None:
        total, index = rollout_sums(torch.stack([gap, is_known.to(gap.dtype)], 1), rollout)
        gap, is_known = (total[:, 0] / total[:, 1].clamp(min=1))[index], (total[:, 1] > 0)[index]
    r = gap.exp()
    w = r.clamp(max=cap) if kind == "tis" else r * ((r >= low) & (r <= high))
    return w * is_known


def rollout_sums(x, rollout):
    """x (N, ...), rollout (N,) long -> sums over each rollout present, and each token's row in them (N,)."""
    values, index = torch.unique(rollout, return_inverse=True)
    return x.new_zeros(len(values), *x.shape[1:]).index_add(0, index, x), index


# ---- losses: one signature ------------------------------------------------------------------------------------------

def token_weights(rollout,               # (N,) long, of the WHOLE batch
                  num_rollouts,          # rollout ids are below this
                  mode="rollout"):       # rollout: mean over each rollout's tokens; token: every token alike
    """-> (N,) float32 norm; see the module's table for the denom that goes with it."""
    assert mode in ("rollout", "token"), f"mode {mode!r}: rollout or token"
    if mode == "token": return torch.ones(len(rollout), device=rollout.device)
    return 1. / torch.bincount(rollout, minlength=num_rollouts)[rollout]


def grpo_loss(logp, logp_old, adv, weight, norm, rollout, denom, clip_low=0.2, clip_high=0.2, dual_clip=0.0):
    """-> loss, sums.  GRPO, 2402.03300, with PPO's clip, 1707.06347, on the ratio of each token:
        surrogate_t = min(ratio_t A_t, clip(ratio_t, 1 - clip_low, 1 + clip_high) A_t)
    clip_high > clip_low is DAPO's clip-higher, 2503.14476.  dual_clip c > 1, 1912.09729: at least c A_t where A_t < 0.
    Differs from the paper: no KL term; weight."""
    log_ratio = logp - logp_old
    return clipped(log_ratio, log_ratio, adv, weight, norm, denom, clip_low, clip_high, dual_clip)


def gspo_loss(logp, logp_old, adv, weight, norm, rollout, denom, clip_low=3e-4, clip_high=4e-4, dual_clip=0.0):
    """-> loss, sums.  GSPO, 2507.18071: the ratio of a rollout, computed in log space, in place of each token's:
        s_i = exp(mean over the rollout's trained tokens of (logp - logp_old))
    Needs the rollout norm, whole rollouts in a micro-batch (`split(..., unit=...)`) and `correction(..., rollout=...)`.
    Differs from the paper: a sequence is every trained token of the rollout's tree; weight."""
    log_ratio = logp - logp_old
    share, index = rollout_sums(norm, rollout)
    assert ((share - 1).abs() < 1e-3).all(), \
        f"GSPO got {share.min().item():.3f} of a rollout: it needs whole rollouts in a micro-batch, norm mode rollout"
    total, _ = rollout_sums(torch.stack([log_ratio, torch.ones_like(log_ratio)], 1), rollout)
    log_s = (total[:, 0] / total[:, 1])[index]
    return clipped(log_s, log_ratio, adv, weight, norm, denom, clip_low, clip_high, dual_clip)


def clipped(log_s, log_ratio, adv, weight, norm, denom, clip_low, clip_high, dual_clip):
    """The surrogate that the losses share; log_s (N,) is what is clipped.  Sums: tokens; ratio (that is clipped);
    clipped_low, clipped_high, dual: tokens whose gradient that clip removes; kl: the k3 estimate of KL(old || new),
    ratio - 1 - log ratio of each token; weight; dropped: tokens of weight 0."""
    assert not 0 < dual_clip <= 1, f"dual_clip {dual_clip}: above 1, or 0 = off"
    s = log_s.exp()
    surrogate = torch.minimum(s * adv, s.clamp(1 - clip_low, 1 + clip_high) * adv)
    is_dual = (adv < 0) & (s > dual_clip) if dual_clip else torch.zeros_like(adv, dtype=torch.bool)
    if dual_clip: surrogate = torch.where(is_dual, dual_clip * adv, surrogate)
    loss = -(norm * weight * surrogate).sum() / denom
    with torch.no_grad():
        sums = {"tokens": torch.ones_like(s), "ratio": s, "clipped_low": (s < 1 - clip_low) & (adv < 0),
                "clipped_high": (s > 1 + clip_high) & (adv > 0), "dual": is_dual, "kl": log_ratio.exp() - 1 - log_ratio,
                "weight": weight, "dropped": weight == 0}
        return loss, {k: v.sum() for k, v in sums.items()}


LOSSES = {"grpo": grpo_loss, "gspo": gspo_loss}
