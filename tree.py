"""The prefix tree of a rollout: recorded calls -> tree -> typed forks -> packed forest -> log-probabilities.

    python tree.py FILE.jsonl [--json]      explains one recorded rollout

Record format 1, one JSONL file a rollout; keys of the header and the end that are not named here are kept in `more`:
    {"type": "rollout", "format": 1, "id", "task", "harness", "model": str, "temperature": float, "started_s": time,
     "category": str, the task's; "settings": {...}, what a comparison should hold equal: both of rollout.py and
     train.py; "weights_id": of train.py}
    {"type": "call", "id": int, in order of arrival; the lines stand in order of completion
     "kind": "main" | "subagent" | "compaction" | "side", "cause": null | why it forked (graft.py lists the causes)
     "parent": null | id of an earlier line's call, "shared": n, "tail": [ids]
                                            prompt ids = (prompt + sampled ids of the parent)[:n] + tail
     "template": null | [parent, n, [ids]]  null: same as the prompt; else against the parent's template ids
     "sampled": [ids], "logp": [float | null], "finish": "stop" | "length" | "abort" | "error" | ...
     "versions": [[policy version, num_tokens], ...], in order of the sampled tokens; [] = unknown
     "sampling": {...}, "tools": hash | null, "received_s", "first_token_s", "finished_s": time | null     (unix)
     "routing": [layers, experts a token, base64 of int16]}     only from MoE engines: of the ids but the last, less
                                             those that the parent's rows tell of; null or no such key = unknown
    {"type": "kind", "id", "kind"}         a later call showed that this one was of another kind
    {"type": "end", "outcome", "detail", "sandbox", "verify": str, "reward": float | null, "seconds": {...},
     "verifier_at": where in the log beside the record the verifier's words begin, if one ran;
     "call_rewards": null | [float], a reward for each call by id, beside that of the rollout}
No end line = an unfinished rollout (`outcome` is None).  A torn last line is ignored; any other bad line is an error.

Dimension letters: T tokens of a packed forest, N its scored tokens, H heads, D size of a head, V vocabulary.
Invariant: every trained token of a rollout stands in exactly one path, every path in exactly one micro-batch."""
import argparse, base64, errno, json, math, os, sys
from array import array
from bisect import bisect_left, bisect_right
from dataclasses import dataclass, field, fields, replace
from functools import cache, cached_property
from itertools import accumulate, groupby
from pathlib import Path
import numpy as np
import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint

UNTRAINED_FINISH = ("abort", "error")


# ---- the record ----------------------------------------------------------------------------------------------------

@dataclass
class Call:
    id: int                              # order of arrival in the rollout
    kind: str                            # main, subagent, compaction, side
    cause: str | None                    # why its prompt extends no earlier call; None = it does, or is the first
    prompt_ids: list                     # as the policy saw them
    template_ids: list                   # as the chat template rendered them, before grafting
    sampled_ids: list
    logp_rollout: list                   # of the sampled ids, by the engine; NaN = missing
    finish: str                          # stop, length, abort, error, ...
    versions: list = field(default_factory=list)       # [[policy version, num_tokens], ...]
    sampling: dict = field(default_factory=dict)
    tools: str | None = None             # hash of the tool list
    received_s: float | None = None
    first_token_s: float | None = None
    finished_s: float | None = None
    routing: np.ndarray | None = None    # (len(ids) - 1, layers, experts a token) int16: experts that each id went to
    parent: int | None = None            # id of the call that shares the longest prefix; set by call_line and read
    shared: int = 0                      # length of that prefix, tokens

    @cached_property
    def ids(self):
        """Prompt and sampled ids.  Computed once: do not change a call after it has been asked for."""
        return self.prompt_ids + self.sampled_ids


@dataclass
class Rollout:
    id: str
    task: str
    harness: str
    model: str
    temperature: float
    started_s: float
    calls: list = field(default_factory=list)          # of Call, by id
    outcome: str | None = None           # ok, timeout, harness_error, ...; None = no end line
    reward: float | None = None
    call_rewards: list | None = None     # of float, by the id of the call; None = the verifier paid no single call
    detail: str = ""
    seconds: dict = field(default_factory=dict)        # of each stage
    sandbox: str = ""
    verify: str = ""
    more: dict = field(default_factory=dict)           # what other keys the header and the end line hold


class Ids:
    """Token ids of a call on record, in memory as on disk: pieces (arrays), most of them an earlier call's own,
    so that a session takes memory for new tokens only.  A slice is an array of its own."""

    def __init__(self, before, after, shared, tail):
        """(before + after)[:shared] + tail, 0 < shared.  before: array or Ids; after, tail: array."""
        pieces, surplus = list(before.pieces) if isinstance(before, Ids) else [before], len(before) - shared
        while surplus > 0 and surplus >= len(pieces[-1]): surplus -= len(pieces.pop())
        if surplus > 0: pieces[-1] = pieces[-1][:-surplus]
        own = after[:max(shared - len(before), 0)] + tail
        self.pieces = [*pieces, own] if own else pieces
        self.ends = [*accumulate(map(len, self.pieces))]

    def __len__(self): return self.ends[-1]

    def __eq__(self, other): return len(self) == len(other) and self[:] == other[:]

    def __add__(self, more): return self[:] + more

    def __iter__(self): return iter(self[:])

    def __getitem__(self, at):
        if not isinstance(at, slice):
            i = bisect_right(self.ends, at := range(len(self))[at])
            return self.pieces[i][at - self.ends[i]]                   # from the piece's end
        start, end, step = at.indices(len(self))
        assert step == 1, f"{at}: token ids are sliced in their order"
        i, ids = bisect_right(self.ends, start), array("i")
        for piece in self.pieces[i:bisect_left(self.ends, end) + 1]: ids += piece
        low = start - (self.ends[i - 1] if i else 0)
        return ids if len(ids) == end - start else ids[low:low + max(end - start, 0)]


def lcp(a, b):
    """Length of the longest common prefix of two lists or texts: gallops, then bisects, in slices compared at C speed.
    Arrays are compared where they are."""
    a, b = (x[:] if isinstance(x, Ids) else x for x in (a, b))
    n, step, end = 0, 64, min(len(a), len(b))
    if end > 4096 and isinstance(a, array) and isinstance(b, array):
        differ = np.frombuffer(a, a.typecode, end) != np.frombuffer(b, b.typecode, end)
        return int(differ.argmax()) if differ.any() else end
    while n < end and a[n:min(n + step, end)] == b[n:min(n + step, end)]: n, step = min(n + step, end), 2 * step
    hi = min(n + step, end)
    while n < hi:
        mid = (n + hi + 1) // 2
        if a[n:mid] == b[n:mid]: n = mid
        else: hi = mid - 1
    return n


def encode(ids, earlier):
    """-> (index, shared, tail) with ids == sum(earlier[index])[:shared] + tail, shared as long as can be; ties: the
    latest. index is None where nothing is shared. earlier: pairs of lists."""
    index, shared = None, 0
    for i in range(len(earlier) - 1, -1, -1):
        a, b = earlier[i]
        if shared < min(len(a) + len(b), len(ids)) and ids[shared] == (
                a[shared] if shared < len(a) else b[shared - len(a)]):
            n = lcp(a, ids)
            if n == len(a): n += lcp(b, ids[n:n + len(b)])
            if n > shared: index, shared = i, n
    return index, shared, ids[shared:]


def call_line(call, earlier):
    """The record of a call, given the calls of the lines before it.  Sets call.parent, call.shared, and the routing of
    what it shares to that of the call that ran it first."""
    index, call.shared, tail = encode(call.prompt_ids, [(c.prompt_ids, c.sampled_ids) for c in earlier])
    call.parent = None if index is None else earlier[index].id
    template, routing = None, {}
    if call.routing is not None:
        known = None if index is None else earlier[index].routing
        known = call.routing[:0] if known is None else known[:call.shared]
        own = np.asarray(call.routing[len(known):], "<i2")
        call.routing = np.concatenate([known, own])
        routing = {"routing": [*own.shape[1:], base64.b64encode(own.tobytes()).decode()]}
    if call.template_ids is not call.prompt_ids and call.template_ids != call.prompt_ids:
        index, shared, rest = encode(call.template_ids, [(c.template_ids, ()) for c in earlier])
        template = [None if index is None else earlier[index].id, shared, rest]
    return {"type": "call", "id": call.id, "kind": call.kind, "cause": call.cause, "parent": call.parent,
            "shared": call.shared, "tail": tail, "template": template, "sampled": call.sampled_ids,
            "logp": [x if math.isfinite(x) else None for x in call.logp_rollout], "finish": call.finish,
            "versions": call.versions, "sampling": call.sampling, "tools": call.tools, "received_s": call.received_s,
            "first_token_s": call.first_token_s, "finished_s": call.finished_s} | routing


def share(call, line, earlier):
    """A call's ids become pieces (Ids) that it shares with earlier ones, as its line says."""
    by_id = {c.id: c for c in earlier}
    if line["parent"] is not None:
        parent = by_id[line["parent"]]
        call.prompt_ids = Ids(parent.prompt_ids, parent.sampled_ids, line["shared"], line["tail"])
    if line["template"] is None: call.template_ids = call.prompt_ids
    elif line["template"][0] is not None:
        before, shared, tail = line["template"]
        call.template_ids = Ids(by_id[before].template_ids, tail[:0], shared, tail)


def read_call(line, earlier):
    """One call line -> Call; earlier: id -> Call of the lines before it."""
    def rebuild(parent, shared, tail, name):
        if parent is None: return list(tail)
        if parent not in earlier: raise ValueError(f"call {line['id']}: parent {parent} is no earlier line's call")
        base = getattr(earlier[parent], name)
        if not 0 <= shared <= len(base):
            raise ValueError(f"call {line['id']}: shares {shared} tokens, but its parent {parent} has {len(base)}")
        return base[:shared] + tail
    if line["id"] in earlier: raise ValueError(f"call {line['id']} is recorded twice")
    prompt = rebuild(line["parent"], line["shared"], line["tail"], "ids")
    template = prompt if line["template"] is None else rebuild(*line["template"], "template_ids")
    sampled, versions = line["sampled"], line["versions"]
    if len(line["logp"]) != len(sampled) or versions and sum(n for _, n in versions) != len(sampled):
        raise ValueError(f"call {line['id']}: {len(sampled)} sampled tokens, but {len(line['logp'])} log-probabilities "
                         f"and versions of {sum(n for _, n in versions)}")
    logp, routing = [math.nan if x is None else x for x in line["logp"]], None
    if line.get("routing"):
        *shape, text = line["routing"]
        routing = np.frombuffer(base64.b64decode(text), "<i2").reshape(-1, *shape)
        known = None if line["parent"] is None else earlier[line["parent"]].routing
        if known is not None: routing = np.concatenate([known[:line["shared"]], routing])
        if len(routing) != len(prompt) + len(sampled) - 1:
            raise ValueError(f"call {line['id']}: routing of {len(routing)} tokens, prompt and sampled less the last "
                             f"are {len(prompt) + len(sampled) - 1}")
    rebuilt = {"prompt_ids": prompt, "template_ids": template, "sampled_ids": sampled, "logp_rollout": logp,
               "routing": routing}
    return Call(**rebuilt, **{f.name: line[f.name] for f in fields(Call) if f.name not in rebuilt})


def append(path, line: dict):
    """A line behind a record, whole or not at all. OSError where the disk is full. What is no UTF-8 becomes "?"."""
    data = json.dumps(line, default=list, ensure_ascii=False).encode(errors="replace") + b"\n"
    with open(path, "ab", 0) as f:
        size = os.fstat(f.fileno()).st_size
        if f.write(data) == len(data): return
        f.truncate(size)                                   # the next line would hang on to a torn one
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))


def records(folder):
    """Paths of the records below a folder; what agents left there as artifacts is none."""
    for place, folders, files in os.walk(folder):          # rglob raises where a folder is renamed meanwhile
        folders[:] = sorted(f for f in folders if not f.endswith(".artifacts"))
        yield from (Path(place, f) for f in sorted(files) if f.endswith(".jsonl"))


def read(path):
    """A recorded rollout, with the exact prompt and template ids of every call."""
    with open(path, "rb") as f: raw = f.read().split(b"\n")
    rollout, calls = None, {}
    for number, text in enumerate(raw, 1):
        if not text.strip(): continue
        try:
            line = json.loads(text)
            if rollout is None:
                if line["type"] != "rollout": raise ValueError("the first line is no rollout header")
                if line["format"] != 1: raise ValueError(f"format {line['format']!r} is not known here (known: 1)")
                keys = "id", "task", "harness", "model", "temperature", "started_s"
                rollout = Rollout(**{k: line[k] for k in keys})
            elif line["type"] == "call": calls[line["id"]] = read_call(line, calls)
            elif line["type"] == "kind": calls[line["id"]].kind = line["kind"]
            elif line["type"] == "end":
                for k in ("outcome", "reward", "call_rewards", "detail", "seconds", "sandbox", "verify"):
                    if k in line: setattr(rollout, k, line[k])
            else: raise ValueError(f"unknown type of line {line['type']!r}")
            if line["type"] not in ("call", "kind"):
                known = {f.name for f in fields(Rollout)} | {"type", "format"}
                rollout.more.update({k: v for k, v in line.items() if k not in known})
        except (ValueError, KeyError, TypeError) as e:
            is_torn = number == len(raw) and isinstance(e, (json.JSONDecodeError, UnicodeDecodeError))
            if is_torn and rollout is not None: break          # killed while it wrote: the last line has no newline
            what = f"the key {e} is missing" if isinstance(e, KeyError) else e
            raise ValueError(f"{path}:{number}: {what}") from e
    if rollout is None: raise ValueError(f"{path}: no rollout header, the file is empty")
    rollout.calls = [calls[i] for i in sorted(calls)]
    return rollout


# ---- the tree ------------------------------------------------------------------------------------------------------

@dataclass
class Tree:
    paths: list          # token lists, root to leaf; a leaf ends with the sampled tokens of a trained call
    trained: list        # per path: positions (int64, ascending) whose token is trained HERE; the next four align
    logp_rollout: list   # per path: float64, NaN = missing
    version: list        # per path: int64, policy version that sampled the token; -1 = unknown
    call: list           # per path: int64, id of the call that sampled the token
    is_boundary: list    # per path: bool, first sampled token of a call
    forks: dict          # cause -> (count, tokens it cost)
    left_out: dict       # why (a kind, abort, error, empty, superseded, shorter_leaf) -> number of calls not trained
    num_unique: int      # (prefix, token) pairs of the paths: what a pack computes
    num_flat: int        # sum of the lengths of the paths: each path its own sequence
    num_per_call: int    # sum of prompt + sampled over the trained calls: each call its own sequence
    num_trained: int
    routing: list        # per path: None or (len(path) - 1, layers, experts a token) int16, by the calls that ran them


def build(rollout, train_kinds=("main",), keep="all"):
    """The tree of a rollout's trained calls.  Other calls appear as context only, where a trained call continues them.

    Trained: each sampled token of each call of a kind in train_kinds that was not aborted, failed or superseded (same
    prompt as a call that was continued, itself not continued).  Continued: a prompt of this rollout starts with the
    prompt and sampled ids of the call.  A call whose ids begin a deeper trained call's prompt shares its path; two that
    sampled the same ids at the same place get a path each: `pack` shares the computation, never the loss terms.
    keep="longest_leaf" keeps the longest path alone (ties: more trained tokens, then greater ids).

    Cost of a fork: min(len(prompt), len(parent)) - shared, parent being the ids of the call with the longest shared
    prefix: how many more tokens had to be computed than for a prompt of this length that continues the parent."""
    assert keep in ("all", "longest_leaf"), f"keep={keep!r}: all or longest_leaf"
    calls = rollout.calls
    key = {c.id: np.asarray(c.ids, ">i4").tobytes() for c in calls}    # big-endian: sorts as the ids do, but by memcmp
    prompt = {c.id: key[c.id][:4 * len(c.prompt_ids)] for c in calls}
    prompts = sorted(prompt.values())
    is_continued = {c.id: bool(c.sampled_ids) and starts_any(prompts, key[c.id]) for c in calls}
    continued_prompts = {prompt[c.id] for c in calls if is_continued[c.id]}
    kept, left_out = [], {}
    for c in calls:
        why = (c.kind if c.kind not in train_kinds else c.finish if c.finish in UNTRAINED_FINISH
               else "empty" if not c.sampled_ids
               else "superseded" if prompt[c.id] in continued_prompts and not is_continued[c.id] else None)
        if why: left_out[why] = left_out.get(why, 0) + 1
        else: kept.append(c)

    chains = []                                                        # the calls of each path, leaf first
    for c in sorted(kept, key=lambda c: (len(c.ids), key[c.id], c.id), reverse=True):
        chain = next((p for p in chains if prompt[p[-1].id].startswith(key[c.id])), None)
        if chain is None: chains.append([c])
        else: chain.append(c)
    chains.sort(key=lambda p: p[0].id)
    if keep == "longest_leaf" and len(chains) > 1:
        longest = max(chains, key=lambda p: (len(p[0].ids), sum(len(c.sampled_ids) for c in p), key[p[0].id]))
        left_out["shorter_leaf"] = len(kept) - len(longest)
        chains = [longest]

    columns = [np.concatenate([trained_tokens(c) for c in reversed(p)], 1) for p in chains]
    paths = [p[0].ids for p in chains]
    forks = {}
    sizes = {c.id: len(c.ids) for c in calls}
    for c in calls:
        if c.cause is None: continue
        count, cost = forks.get(c.cause, (0, 0))
        forks[c.cause] = count + 1, cost + fork_cost(len(c.prompt_ids), sizes.get(c.parent, 0), c.shared)
    position, logp, version, call, first = zip(*columns) if columns else [()] * 5
    whole = lambda arrays: [a.astype(np.int64) for a in arrays]
    num_flat = sum(map(len, paths))
    return Tree(paths, whole(position), list(logp), whole(version), whole(call), [a.astype(bool) for a in first], forks,
                left_out, num_flat - sum(dfs(paths)[1]), num_flat, sum(len(c.ids) for p in chains for c in p),
                sum(map(len, position)), [p[0].routing for p in chains])


def fork_cost(num_prompt, num_parent, shared):
    """Tokens of a prompt that are computed again although the parent's ids reach as far."""
    return min(num_prompt, num_parent) - shared


def starts_any(keys, start):
    """Does any of the sorted keys begin with start?"""
    i = bisect_left(keys, start)
    return i < len(keys) and keys[i].startswith(start)


def trained_tokens(c):
    """(5, len(sampled)) float64: position, logp_rollout, version, call id, is_boundary of each sampled token."""
    n = len(c.sampled_ids)
    assert len(c.logp_rollout) == n, f"call {c.id}: {n} sampled tokens, {len(c.logp_rollout)} logp: fill up with NaN"
    version = np.repeat([v for v, _ in c.versions], [k for _, k in c.versions]) if c.versions else np.full(n, -1)
    return np.stack([len(c.prompt_ids) + np.arange(n), c.logp_rollout, version, np.full(n, c.id), np.arange(n) == 0])


def chains(tree, start=0):
    """For each path, the trained tokens from root to leaf, whichever path trains them: what GAE runs over.  As indices
    into token vectors over the paths in order, and in each over its trained positions, from `start` on."""
    order, shared = dfs(tree.paths)
    rows, row, size = [None] * len(tree.paths), np.zeros(0, np.int64), 0
    for i, n in zip(order, shared):                                    # one row for each (prefix, token)
        own = len(tree.paths[i]) - n
        row = rows[i] = np.concatenate([row[:n], np.arange(size, size + own)])
        size += own
    ends, owner, out = start + np.cumsum([0, *map(len, tree.trained)]), np.full(size, -1), []
    mine = [np.arange(a, b) for a, b in zip(ends, ends[1:])]
    for i in reversed(range(len(rows))): owner[rows[i][tree.trained[i]]] = mine[i]      # the first path's stays
    for r, at, own in zip(rows, tree.trained, mine):
        chain = owner[r]
        chain[at] = own                                                # two calls may have sampled the same
        out.append(torch.from_numpy(chain[chain >= 0]))
    return out


# ---- packing -------------------------------------------------------------------------------------------------------

@dataclass
class Forest:
    ids: torch.Tensor      # (T,) long, tokens in DFS preorder
    pos: torch.Tensor      # (T,) long, depth in the path = position id
    last: torch.Tensor     # (T,) long, end of the subtree below each token: q sees k exactly when k <= q < last[k]
    nodes: list            # [(start, end, last)] runs without a branch inside, in DFS preorder
    src: torch.Tensor      # (N,) long, the hidden state at row src predicts ...
    tgt: torch.Tensor      # (N,) long, ... token tgt (a branch point predicts several)
    where: list            # per path: long, index into N of each scored position: logp[where[i]] aligns with scored[i]
    masks: dict = field(default_factory=dict)      # GPU: sliding window or None -> block mask, made at first use

    def to(self, device):
        moved = {k: getattr(self, k).to(device) for k in ("ids", "pos", "last", "src", "tgt")}
        return replace(self, where=[w.to(device) for w in self.where], masks={}, **moved)


def dfs(paths):
    """-> order of the paths in a DFS, and how many tokens each shares with the one before it."""
    order = sorted(range(len(paths)), key=paths.__getitem__)
    return order, [0] * bool(order) + [lcp(paths[a], paths[b]) for a, b in zip(order, order[1:])]


def pack(paths, scored, share=True):
    """paths: token lists, of one rollout or of many; scored: for each path the positions (>= 1) whose logp is wanted.
    A pair (row, token) that several paths score is computed once and stands in `where` of each.
    share=False: each path is its own root."""
    order, shared = dfs(paths) if share else (range(len(paths)), [0] * len(paths))
    size, row, cuts = 0, np.zeros(0, np.int64), {0}
    last = np.zeros(sum(map(len, paths)) - sum(shared), np.int64)
    ids, pos, src, tgt = [], [], [None] * len(paths), [None] * len(paths)
    for i, n in zip(order, shared):
        path, at = np.asarray(paths[i], np.int64), np.asarray(scored[i], np.int64)
        assert at.size == 0 or at.min() > 0, f"path {i} scores position {at.min()}, which nothing predicts: start at 1"
        if n < len(row):                                               # leaving rows row[n:]: their subtrees end here
            last[row[n:]] = size
            cuts |= {int(row[n]), size}
        row = np.concatenate([row[:n], np.arange(size, size + len(path) - n)])
        ids.append(path[n:]); pos.append(np.arange(n, len(path)))
        src[i], tgt[i] = row[at - 1], path[at]
        size += len(path) - n
    last[row] = size
    bounds = sorted(cuts | {size})
    nodes = [(s, e, int(last[s])) for s, e in zip(bounds, bounds[1:])]
    ids, base = np.concatenate(ids), max(map(max, paths)) + 1
    pairs, where = np.unique(np.concatenate(src) * base + np.concatenate(tgt), return_inverse=True)
    where = np.split(where.reshape(-1), np.cumsum([len(s) for s in src])[:-1])
    ids, pos, last, src, tgt = map(torch.from_numpy, (ids, np.concatenate(pos), last, pairs // base, pairs % base))
    return Forest(ids, pos, last, nodes, src, tgt, [torch.from_numpy(w) for w in where])


def split(paths, budget, unit=None):
    """Micro-batches: groups of paths (indices) with <= budget unique tokens each and the fewest tokens in all (then the
    fewest groups), by dynamic programming over the DFS order.  What is over the budget alone gets a group of its own.
    unit: for each path, what it must stay together with (GSPO: its rollout); None = nothing.  Sharing between units is
    then counted by their first paths only: an upper bound of the tokens."""
    units = {}
    for i in dfs(paths)[0]: units.setdefault(i if unit is None else unit[i], []).append(i)
    units = list(units.values())
    size = [sum(len(paths[i]) for i in u) - sum(dfs([paths[i] for i in u])[1]) for u in units]
    overlap = [0] + [lcp(paths[a[0]], paths[b[0]]) for a, b in zip(units, units[1:])]
    new = [n - same for n, same in zip(size, overlap)]                 # of a unit after the one before it
    best, cut = [(0, 0)] + [(math.inf, 0)] * len(units), [0] * (len(units) + 1)      # (tokens, groups)
    for j in range(1, len(units) + 1):
        tail = 0                                                       # sum(new[i + 1:j])
        for i in range(j - 1, -1, -1):
            cost = size[i] + tail
            option = best[i][0] + cost, best[i][1] + 1
            if (cost <= budget or i == j - 1) and option < best[j]: best[j], cut[j] = option, i
            tail += new[i]
            if tail > budget: break
    groups, j = [], len(units)
    while j: groups, j = groups + [sum(units[cut[j]:j], [])], cut[j]
    return groups[::-1]


# ---- log-probabilities ---------------------------------------------------------------------------------------------

def native_dtype() -> str:
    """bfloat16 on a GPU that computes in it; else float32: engine and trainer then agree to 1e-6, no small update is
    rounded away, and many CPUs take five times as long for bfloat16."""
    return "bfloat16" if torch.cuda.is_available() and torch.cuda.is_bf16_supported(False) else "float32"


cpu_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
cpu_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class TreeAttention(torch.autograd.Function):
    """CPU.  Each node attends causally to itself, and everything below it attends to it as one full rectangle; the
    parts are merged by log-sum-exp.  Backward of each with the FINAL output and log-sum-exp is exact (ring attention).
    q, k, v: (1, H, T, D) of one dtype; parts are merged and summed in float32 (float64 stays)."""
    @staticmethod
    def forward(ctx, q, k, v, nodes, scale):
        wide = torch.promote_types(q.dtype, torch.float32)
        out, lse = q.new_empty(q.shape, dtype=wide), q.new_empty(q.shape[:3], dtype=wide)
        ctx.parts = [(slice(s, e), slice(s, e), True) for s, e, _ in nodes]
        ctx.parts += [(slice(e, l), slice(s, e), False) for s, e, l in nodes if l > e]
        for a, b, causal in ctx.parts:
            o, m = cpu_forward(q[:, :, a], k[:, :, b], v[:, :, b], 0., causal, scale=scale)
            if causal: out[:, :, a], lse[:, :, a] = o, m
            else:                                           # in place: `below` may be nearly all rows
                below, both = out[:, :, a], torch.logaddexp(lse[:, :, a], m)
                below.mul_((lse[:, :, a] - both).exp()[..., None]).addcmul_(o, (m - both).exp()[..., None])
                lse[:, :, a] = both
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.scale = scale
        return out

    @staticmethod
    def backward(ctx, g):
        q, k, v, out, lse = ctx.saved_tensors
        grads = [torch.zeros_like(t, dtype=lse.dtype) for t in (q, k, v)]
        for a, b, causal in ctx.parts:
            parts = cpu_backward(g[:, :, a], q[:, :, a], k[:, :, b], v[:, :, b], out[:, :, a],
                                 lse[:, :, a].contiguous(), 0., causal, scale=ctx.scale)
            for grad, part, rows in zip(grads, parts, (a, b, b)): grad[:, :, rows] += part
        return *(t.to(q.dtype) for t in grads), None, None


@cache
def flex():
    """GPU; PyTorch has no flex backward on CPU.  Compiled at first use: the compiler takes seconds to import.
    fullgraph: past the limit of recompilations PyTorch else goes over to dense T x T attention, with but a warning."""
    return torch.compile(flex_attention, dynamic=True, fullgraph=True)


def block_mask(last, pos, window=None):
    """GPU: the rule as FlexAttention wants it.  last, pos: (T,), T a multiple of 128; window: tokens a layer sees.
    Subtrees nest, so `last` alone tells of each block of 128 x 128 whether some or all of its queries see some or all
    of its keys: no kernel looks at the T x T pairs.  share=False is a forest of roots under the same rule: what lies
    between paths is skipped as a varlen kernel would, and flash-attn is no dependency."""
    start = torch.arange(0, len(last), 128, device=last.device)
    q, low, high = start[:, None], *(f(last.view(-1, 128), 1) for f in (torch.amin, torch.amax))
    some, full = (start <= q) & (q < high), (start < q) & (q + 128 <= low)
    if window:                                             # a bound for the block: the kernel asks `sees` where unsure
        near, far = (f(pos.view(-1, 128), 1) for f in (torch.amin, torch.amax))
        some, full = some & (near[:, None] - far < window), full & (far[:, None] - near < window)

    @torch._dynamo.dont_skip_tracing                       # PyTorch traces no module named "tree", which a library is
    def sees(b, h, q, k):
        rule = (k <= q) & (q < last[k])
        return rule & (pos[q] - pos[k] < window) if window else rule
    blocks = [x for m in (some & ~full, full) for x in (m.sum(1), m.int().argsort(dim=1, descending=True, stable=True))]
    return BlockMask.from_kv_blocks(*(x.int()[None, None] for x in blocks), BLOCK_SIZE=128, mask_mod=sees)


def attend(module, q, k, v, attention_mask, scaling=None, dropout=0., forest=None, **kw):
    """The attention function registered with transformers as "tree".  q: (1, H, T, D); k, v: (1, H / groups, T, D)."""
    assert forest is not None, "no forest: for a plain forward, call model.set_attn_implementation('sdpa') first"
    odd = [k for k in ("softcap", "s_aux", "position_bias", "indices", "block_indices") if kw.get(k) is not None]
    assert not dropout and not odd, f"dropout {dropout}, {', '.join(odd)}: attention that a pack does not compute"
    window = kw.get("sliding_window")
    q, k = q.to(v.dtype), k.to(v.dtype)                                # under autocast rotation leaves them in float32
    if q.is_cuda:
        if window not in forest.masks: forest.masks[window] = block_mask(forest.last, forest.pos, window)
        out = flex()(q, k, v, block_mask=forest.masks[window], scale=scaling, enable_gqa=q.shape[1] != k.shape[1])
    else:
        assert not window, f"sliding_window {window}: not on the CPU"
        k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
        out = TreeAttention.apply(q, k, v, forest.nodes, scaling)
    return out.transpose(1, 2), None


def other_layers(model):
    """Name of a kind of layer that `attend` does not compute, or None."""
    config = model.config.get_text_config()
    types = set(getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None) or ())
    if not types and getattr(config, "sliding_window", None): types = {"sliding_attention"}
    if getattr(model, "_is_stateful", False): types.add("recurrent")
    on_gpu = {"sliding_attention"} if model.device.type == "cuda" else set()
    return min(types - {"full_attention", "attention"} - on_gpu, default=None)


def why_flat(model):
    """Why this model's prefixes cannot be shared, so that `pack` needs share=False; None = they can.  Recurrent and
    convolutional layers carry a state from row to row: a pack would have to hand each node its parent's, with gradient,
    through arguments that each model's layers name (or lack) in their own way.  A balancing loss counts what is
    computed, so shared tokens once; no such loss is added here."""
    kind = other_layers(model)
    if kind: return f"{model.config.model_type} has {kind} layers"
    if getattr(model.config.get_text_config(), "output_router_logits", False):
        return "output_router_logits is set: a load-balancing loss counts a shared token once"


def hidden_states(model, forest):
    """-> (T, width of the model): last hidden state of every row; a critic's head reads the rows `forest.src` too."""
    why = why_flat(model)
    assert not why or all(e == l for _, e, l in forest.nodes), f"{why}: pack with share=False"
    if other_layers(model):                                # a sequence a row: no state crosses; right padding is causal
        rows = forest.ids.split([e - s for s, e, _ in forest.nodes])
        h = model.model(input_ids=pad_sequence(rows, batch_first=True), use_cache=False).last_hidden_state
        return torch.cat([x[:len(r)] for x, r in zip(h, rows)])
    from transformers import AttentionInterface                        # here: explaining a file must not wait for it
    AttentionInterface.register("tree", attend)                        # has no mask function: no mask is built
    model.config._attn_implementation = "tree"                         # stays: checkpointed layers read it in backward
    T = len(forest.ids)
    pad = 0, max(-T % 128, 256 - T)            # whole blocks are a fifth faster; a single one would compile by itself
    if forest.ids.is_cuda and pad[1]:                                  # a padding row sees itself
        forest = replace(forest, ids=F.pad(forest.ids, pad), pos=F.pad(forest.pos, pad), masks={},
                         last=torch.cat([forest.last, torch.arange(T, T + pad[1], device=forest.last.device) + 1]))
    return model.model(input_ids=forest.ids[None], position_ids=forest.pos[None], use_cache=False,
                       forest=forest).last_hidden_state[0, :T]


def logprobs(model, forest, temperature=1.0, chunk=1024, entropy=False):
    """-> (N,) float32 (float64 for a float64 model): logp of every scored pair at the temperature, with gradient; with
    entropy=True also the entropies (N,), without.  model: a transformers *ForCausalLM.  Logits exist for `chunk` scored
    rows at a time.  Reaches past model.forward: under FSDP, call it in the forward of a module that holds the model."""
    for name in ("final_logit_softcapping", "logits_scaling", "logit_scale"):
        value = getattr(model.config.get_text_config(), name, None)
        assert value in (None, 1), f"{model.config.model_type} has {name}={value}, which logprobs does not apply"
    assert temperature > 0, f"temperature {temperature}: log-probabilities need one above 0"
    h = hidden_states(model, forest)[forest.src]                       # (N, width)

    def head(x, target):
        logits = model.lm_head(x)                                      # (chunk, V), float32 from the next line on
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if temperature != 1: logits = logits / temperature             # a copy of the largest tensor: not for nothing
        logp = -F.cross_entropy(logits, target, reduction="none")
        if not entropy: return logp, logp.detach()
        with torch.no_grad(): return logp, torch.distributions.Categorical(logits=logits, validate_args=False).entropy()

    parts = [checkpoint(head, x, t, use_reentrant=False) for x, t in zip(h.split(chunk), forest.tgt.split(chunk))]
    logp, entropies = (torch.cat(p) for p in zip(*parts))
    return (logp, entropies) if entropy else logp


def check_packing(logprobs, parameters, paths, scored, budget, device="cpu"):
    """Self-check of a batch: the first paths of at most `budget` tokens in all (two at least) as a pack, against the
    same with share=False.  logprobs: forest -> (N,), as training calls it (under FSDP: on every rank).  -> greatest
    |difference| of the log-probabilities, and of the gradient, relative (of this rank's shards).  Each term has its
    own weight, so that no two errors cancel.  Gradients must be None or zero before, and are None after.  device: where
    to compute; parameters may lie elsewhere (--offload)."""
    order, parameters = dfs(paths)[0], list(parameters)
    chosen = order[:max(2, sum(n <= budget for n in np.cumsum([len(paths[i]) for i in order])))]
    results = []
    for share in (True, False):
        forest = pack([paths[i] for i in chosen], [scored[i] for i in chosen], share).to(device)
        logp = logprobs(forest)[torch.cat(forest.where)]
        (logp * torch.arange(len(logp), device=logp.device).cos()).sum().backward()
        grads = [p.grad for p in parameters if p.grad is not None]
        results.append((logp.detach(), [g.to_local() if hasattr(g, "to_local") else g for g in grads]))
        for p in parameters: p.grad = None
    (logp, grads), (flat_logp, flat_grads) = results
    norm = lambda tensors: math.hypot(*(t.double().norm().item() for t in tensors))
    return (logp - flat_logp).abs().max().item(), (
        norm(a - b for a, b in zip(grads, flat_grads)) / max(norm(flat_grads), 1e-30))


# ---- the command ---------------------------------------------------------------------------------------------------

def mean_logp(c):
    known = [x for x in c.logp_rollout if not math.isnan(x)]
    return sum(known) / len(known) if known else None


def picture(calls):
    """Lines of text: the prefix tree, a line for each run of tokens with the calls that end there.  Branches are
    indented; the one with the latest main call goes straight on."""
    def draw(group, start, left):                                      # group: calls sorted by ids, alike up to start
        while group:
            end = lcp(group[0].ids, group[-1].ids)
            here = [c for c in group if len(c.ids) == end]
            told = (f"call {c.id} {c.kind}{c.cause and f' ({c.cause})' or ''}, {len(c.sampled_ids)} sampled, {c.finish}"
                    for c in here)
            yield f"{left}● {start}..{end}  {'; '.join(told)}".rstrip()
            branches = [list(g) for _, g in groupby(group[len(here):], lambda c: c.ids[end])]
            *branches, group = sorted(branches, key=lambda b: max((c.kind == "main", c.id) for c in b)) or [[]]
            for branch in branches:
                first, *rest = draw(branch, end, "")
                yield f"{left}├─{first}"
                yield from (f"{left}│ {line}" for line in rest)
            start = end
    return list(draw(sorted(calls, key=lambda c: c.ids), 0, ""))


def call_row(c):
    return {"id": c.id, "kind": c.kind, "cause": c.cause, "parent": c.parent, "prompt": len(c.prompt_ids),
            "shared": c.shared, "sampled": len(c.sampled_ids), "finish": c.finish, "mean_logp": mean_logp(c)}


def explain(rollout, tree):
    """The rollout and its tree as one JSON-able dict."""
    head = {f.name: getattr(rollout, f.name) for f in fields(Rollout) if f.name != "calls"}
    calls = [call_row(c) for c in rollout.calls]
    paths = [{"tokens": len(p), "trained": len(t), "calls": list(dict.fromkeys(c.tolist()))}
             for p, t, c in zip(tree.paths, tree.trained, tree.call)]
    keys = "forks", "left_out", "num_unique", "num_flat", "num_per_call", "num_trained"
    numbers = {k: getattr(tree, k) for k in keys}
    return {**head, "calls": calls, "paths": paths, **numbers, "picture": picture(rollout.calls)}


def show(e):
    """The text that the command prints, from `explain`."""
    reward = "none" if e["reward"] is None else f"{e['reward']:g}"
    yield "rollout {id}: task {task}, harness {harness}, model {model}, temperature {temperature:g}".format(**e)
    yield f"outcome {e['outcome'] or 'unfinished'}, reward {reward}{', ' + e['detail'] if e['detail'] else ''}\n"
    columns = ("id", "kind", "cause", "parent", "prompt", "shared", "sampled", "finish", "mean_logp")
    text = lambda v: "-" if v is None else f"{v:.3f}" if isinstance(v, float) else str(v)
    rows = [columns] + [tuple(text(c[k]) for k in columns) for c in e["calls"]]
    width = [max(len(r[i]) for r in rows) for i in range(len(columns))]
    yield from ("  ".join(x.rjust(w) for x, w in zip(r, width)) for r in rows)
    yield ""
    yield from e["picture"]
    yield ""
    for i, p in enumerate(e["paths"]):
        yield f"path {i}: {p['tokens']} tokens, {p['trained']} trained, calls {' '.join(map(str, p['calls']))}"
    for cause, (count, cost) in sorted(e["forks"].items()): yield f"fork {cause}: {count}, cost {cost} tokens"
    for why, count in sorted(e["left_out"].items()): yield f"not trained, {why}: {count} calls"
    yield ("tokens: {num_unique} unique, {num_flat} as separate paths, {num_per_call} as separate calls, "
           "{num_trained} trained").format(**e)


def parse(argv=None):
    p = argparse.ArgumentParser(description="Explains a recorded rollout.", allow_abbrev=False)
    p.add_argument("file", help="rollout record, JSONL")
    p.add_argument("--json", action="store_true", help="one JSON object instead of text")
    return p.parse_args(argv)


def main(args):
    try: rollout = read(args.file)
    except (OSError, ValueError) as e:
        print(f"cannot explain {args.file}: {e}", file=sys.stderr)
        return 2
    e = explain(rollout, build(rollout))
    print(json.dumps(e) if args.json else "\n".join(show(e)))
    return 0


if __name__ == "__main__": sys.exit(main(parse()))
