"""A page over run folders, as they grow: curves, health in words, every rollout's tree, calls and tokens.

    python viewer.py RUN_DIR...                     http://127.0.0.1:8765, for this machine alone
    python viewer.py RUN_DIR --export out.html      one file, for a colleague or an appendix

RUN_DIR: an --out of train.py or rollout.py, or any folder of records (tree.py). Read only: nothing is written there. An
exported page lacks the search of logs and replies, and of the rollouts beyond --export_rollouts all but their rows.
Covered: a rollout's text only ever becomes text (the page builds no HTML from data, and its content security policy
runs its own script alone); on loopback a request must name that as its Host (DNS rebinding); an id is looked up.
Not covered: there is no password. Who reaches --host reads every prompt; other users of this machine reach loopback."""
import argparse, base64, contextlib, hashlib, json, math, re, threading, time, uuid, zipfile, zlib
from collections import Counter
from dataclasses import replace
from functools import lru_cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace
from urllib.parse import parse_qsl, urlsplit

import msgspec
import numpy as np

import proxy, rollout, tree

LOOPBACK = ("127.0.0.1", "localhost")
LOG_BYTES = 100_000                         # shown of each end of what a harness, or a verifier, printed
OUTCOMES = {"ok": "The harness ended normally", "overlong": "The harness ran out of turns or of its token budget",
            "timeout": "The agent's time limit ended it", "harness_error": "The harness ended with an error status",
            "verifier_error": "The verifier wrote no number", "infra_error": "Sandbox, image or disk failed",
            "no_calls": "The harness never reached the model", "stale": "It outlived --max_staleness",
            None: "Not finished"}

# what the list needs of a record's line; token lists stay unparsed
Line = msgspec.defstruct("Line", [
    ("type", str), ("id", int | str | None, None), ("task", str, ""), ("category", str, ""),
    ("harness", str, ""), ("model", str, ""),
    ("started_s", float | None, None), ("kind", str, ""), ("cause", str | None, None), ("parent", int | None, None),
    ("shared", int, 0), ("tail", msgspec.Raw, msgspec.Raw(b"[]")), ("sampled", msgspec.Raw, msgspec.Raw(b"[]")),
    ("finish", str, ""), ("received_s", float | None, None), ("finished_s", float | None, None), ("detail", str, ""),
    ("outcome", str | None, None), ("reward", float | None, None), ("seconds", dict[str, float], {}),
    ("verifier_at", int | None, None)])
decode_line = msgspec.json.Decoder(Line).decode


def decode(text: bytes):
    """A record's line. Half a surrogate pair (json's way to write a byte that is no UTF-8) msgspec refuses."""
    try: return decode_line(text)
    except msgspec.MsgspecError:
        return decode_line(json.dumps(json.loads(text), ensure_ascii=False).encode(errors="replace"))


count = lambda raw: 0 if len(raw) < 3 else bytes(raw).count(b",") + 1       # numbers in an unparsed JSON list


def clean(x):
    """NaN and infinities become null: JSON knows none."""
    if isinstance(x, float): return x if math.isfinite(x) else None
    if isinstance(x, dict): return {k: clean(v) for k, v in x.items()}
    return [clean(v) for v in x] if isinstance(x, list) else x


whole_lines = lambda path: path.read_bytes().split(b"\n")[:-1]              # the last may be in the writing
state_of = lambda path: ((s := path.stat()).st_mtime_ns, s.st_size)


def read_row(path: Path, id: str) -> dict:
    """What the list shows of a record, finished or not."""
    (folder, _, name), sizes, kinds = id.rpartition("/"), {}, {}
    row = {"id": id, "folder": folder.removeprefix("rollouts/"), "name": name, "task": "", "category": "",
           "harness": "", "started_s": None, "outcome": None, "reward": None, "detail": "", "seconds": {}, "calls": 0,
           "sampled": 0, "tokens": 0, "cut": 0, "engine_s": 0., "forks": {}, "cost": 0, "verifier_at": None}
    copied = {"rollout": ("task", "category", "harness", "started_s"),
              "end": ("outcome", "reward", "detail", "seconds", "verifier_at")}
    for i, text in enumerate(whole_lines(path), 1):
        try: line = decode(text)
        except ValueError as e:
            row.setdefault("error", f"line {i}: {e}")
            continue
        row |= {k: getattr(line, k) for k in copied.get(line.type, ())}
        if line.type in ("call", "kind"): kinds[line.id] = line.kind           # a later call may retype an earlier one
        if line.type != "call": continue
        prompt, sampled, fork = line.shared + count(line.tail), count(line.sampled), row["forks"]
        if line.cause:
            num, tokens = fork.get(line.cause, (0, 0))
            cost = tree.fork_cost(prompt, sizes.get(line.parent, 0), line.shared)
            fork[line.cause], row["cost"] = (num + 1, tokens + cost), row["cost"] + cost
        sizes[line.id] = prompt + sampled
        row["tokens"] = max(row["tokens"], prompt + sampled)
        took_s = line.finished_s - line.received_s if line.finished_s and line.received_s else 0.
        for k, v in (("calls", 1), ("sampled", sampled), ("cut", line.finish == "length"), ("engine_s", took_s)):
            row[k] += v
    return row | {"kinds": list(dict.fromkeys(kinds.values()))}


class Run:
    def __init__(self, root: Path, name: str):
        self.root, self.name, self.rows, self.metrics, self.config, self.gen = root, name, {}, [], {}, 0
        self.states, self.metrics_gen, self.gone = {}, 0, {}        # states: of files when they were read

    def refresh(self, gen: int) -> bool:
        """Reads what is new and marks it, and the run, with gen. -> is anything?"""
        before, rows, states = self.gen, {}, {}

        def is_new(path: Path) -> bool:                     # as of before it is read
            return states.setdefault(path, state_of(path)) != self.states.get(path)
        with contextlib.suppress(FileNotFoundError, ValueError):
            if is_new(path := self.root / "config.json"): self.config, self.gen = json.loads(path.read_text()), gen
        with contextlib.suppress(FileNotFoundError):
            if is_new(path := self.root / "metrics.jsonl"):
                self.metrics, self.metrics_gen, self.gen = [], gen, gen
                for text in whole_lines(path):
                    with contextlib.suppress(ValueError): self.metrics.append(clean(json.loads(text)))
        for path in tree.records(self.root):
            with contextlib.suppress(FileNotFoundError):
                if not is_new(path):
                    if path in self.rows: rows[path] = self.rows[path]
                    continue
                if path not in self.rows:
                    with open(path, "rb") as f: head = f.readline(65536)
                    if not re.match(rb'\s*\{\s*"type":\s*"rollout".*\n', head): continue      # no record, or not yet
                id = path.relative_to(self.root).as_posix().removesuffix(".jsonl")
                rows[path], self.gen = read_row(path, id) | {"gen": gen}, gen
        gone = {self.rows[path]["id"]: gen for path in self.rows.keys() - rows.keys()}
        if gone: self.gone, self.gen = self.gone | gone, gen
        self.rows, self.states = rows, states               # new ones: other threads may be reading the old
        return self.gen > before

    def news(self, since: int) -> dict:
        own = [x for x in self.rows.values() if x["folder"] != "demonstrations"]        # these are no evidence, nor is
        own = [x for x in own if x["folder"] != "eval-bare"] or own     # the bare model, once there is another
        of = lambda harness: [SimpleNamespace(**x) for x in own if x["harness"] == harness]
        return {"name": self.name, "config": self.config, "rows": [x for x in self.rows.values() if x["gen"] > since],
                "gone": [id for id, gen in self.gone.items() if gen > since],
                "metrics": self.metrics if self.metrics_gen > since else None, "metrics_gen": self.metrics_gen,
                "health": health(self.config, self.metrics, own),
                "summary": {h: rollout.summary(of(h)) for h in {x["harness"] for x in own}}}


# --- what to say of it ------------------------------------------------------------------------------------------------
def health(config: dict, metrics: list, rows: list) -> list:
    """Warnings in words: (how bad (1 look, 2 act), text), the worst first."""
    broken, ended = [x for x in rows if "error" in x], [x for x in rows if x["outcome"]]
    out = [(2, f"{len(broken)} records are broken: {x['id']}: {x['error']}") for x in broken[:1]]
    out += of_training(config, [m for m in metrics if m.get("phase") == "rl"])
    out += of_rollouts(sorted(ended, key=lambda x: x["started_s"] or 0)[-256:])
    return sorted(out, key=lambda x: -x[0])


def of_training(config: dict, steps: list):
    """Yields what there is to say of the steps' metrics."""
    got = lambda name: [m[name] for m in steps if isinstance(m.get(name), (int, float))]
    now = lambda name: (got(name) or [math.nan])[-1]            # NaN is on no side of a limit
    gap, limit, r, ess = (now("fidelity/gap_mean"), config.get("max_logp_gap") or 0.1, now("fidelity/gap_pearson"),
                          now("train/ess"))
    if gap > limit / 2:
        yield 2, f"Fidelity is low: engine and trainer are {gap:.3f} nats a token apart; {limit:g} is too much."
    elif r < 0.99: yield 1, f"Fidelity: probabilities of engine and trainer correlate by {r:.4f} only."
    if ess < 0.5: yield 1, f"The correction leaves {100 * ess:.0f} % of the tokens' worth."
    if len(entropy := got("train/entropy")) >= 6:
        first, last = fmean(entropy[:3]), fmean(entropy[-3:])
        told = f"{first:.3f} at first, {last:.3f} now"
        if last < 0.3 * first: yield 2, f"Entropy is collapsing: {told}: little is explored."
        if last > 3 * first > 0: yield 2, f"Entropy is rising: {told}: the policy falls apart."
    num, equal = (sum(got(k)[-3:]) for k in ("groups/num", "groups/zero_variance"))
    if num and equal >= 0.7 * num and (reward := got("reward/mean")[-3:]):
        mean = fmean(reward)
        which = "too easy" if mean > 0.7 else "too hard" if mean < 0.3 else "some too easy, others too hard"
        yield 2, (f"Groups are all equal: {equal:g} of the last {num:g} have one reward throughout and teach nothing; "
                  f"mean {mean:.2f}: the tasks are {which}.")
    for name, what in (("memory/all_gb", "Memory, GB,"), ("sandboxes/alive", "The number of sandboxes alive")):
        x = got(name)[1:]
        if len(x) >= 5 and x[-1] > 1.2 * x[0] and sum(b >= a for a, b in zip(x, x[1:])) >= 0.8 * (len(x) - 1):
            yield 2, f"{what} grew at nearly every step, from {x[0]:.1f} to {x[-1]:.1f}: a leak?"


def of_rollouts(last: list):
    """Yields what there is to say of the last rollouts' rows, harness by harness."""
    of = {h: [x for x in last if x["harness"] == h] for h in sorted({x["harness"] for x in last})}
    mean = {h: fmean([x["reward"] or 0. for x in xs]) for h, xs in of.items()}
    for h, xs in of.items():
        bad = [x for x in xs if x["outcome"] not in ("ok", "overlong")]
        num, detail = (Counter(x.get(k) for x in bad if x.get(k)).most_common() for k in ("outcome", "detail"))
        told, is_failing = ", ".join(f"{n} {k}" for k, n in num), len(bad) > max(1, 0.2 * len(xs))
        if detail: told += f" ({'mostly' if 2 * detail[0][1] > len(bad) else 'one'}: {detail[0][0][:160]})"
        if bad: yield 1 + is_failing, f"Harness {h}{' is failing' * is_failing}: of its last {len(xs)} rollouts {told}."
        if len(xs) >= 4 and mean[h] == 0 and max(mean.values()) > 0.1 and h != "nop":
            yield 2, f"Harness {h} solves nothing in {len(xs)} rollouts, others do."
        if (long := sum(x["outcome"] == "overlong" for x in xs)) > max(1, len(xs) / 3):
            yield 1, f"Harness {h}: {long} of its last {len(xs)} rollouts ran out of turns or of their token budget."
        cost, used = (sum(x[k] for x in xs) for k in ("cost", "tokens"))
        unknown = sum(x["forks"].get("unknown", (0, 0))[0] for x in xs)
        if unknown: yield 1, f"Harness {h}: {unknown} forks of unknown cause: worth a bug report."
        if cost > 0.3 * used: yield 1, f"Harness {h} forks dearly: {cost:,} tokens again, for paths of {used:,}."
    calls, cut = (sum(x[k] for x in last) for k in ("calls", "cut"))
    if cut > 0.2 * calls: yield 1, f"{cut} of the last {calls} replies were cut at max_tokens."


def why(row: dict, verifier: str, left_out: dict) -> list:
    """Sentences: why this rollout got what it got."""
    reward, took_s = row["reward"], sum(row["seconds"].values())
    out = [f"{OUTCOMES.get(row['outcome'], row['outcome'])}; {'no reward' if reward is None else f'reward {reward:g}'}"
           + f", {took_s:.1f} s in its sandbox" * bool(took_s)]
    if row["detail"]: out.append(row["detail"])
    said = [t for t in verifier.splitlines() if t.strip()]
    if reward is not None and reward < 1:
        out.append(f"The verifier's last words: {said[-1][:200]}" if said else "The verifier printed nothing")
    if row["cut"]: out.append(f"{row['cut']} of {row['calls']} replies were cut at max_tokens")
    out += [f"Forked {n} x ({cause}): {cost:,} tokens computed again" for cause, (n, cost) in row["forks"].items()]
    return out + [f"Not trained: {n} calls ({cause})" for cause, n in left_out.items()]


# --- what it reads ----------------------------------------------------------------------------------------------------
@lru_cache(8)
def load(path: Path, state: tuple): return tree.read(path)          # state: the cache forgets what has changed


@lru_cache(2)
def tokens_file(path: Path, state: tuple):
    with np.load(path) as f: return dict(f)


def grow(run: Run, folder: str, record) -> tuple:
    """-> the tree by the run's flags, as train.py grows it, and what `token_columns` returns. Of an evaluation, as of
    all of rollout.py, nothing is trained, nor of a group whose rewards are equal: no update computed its tokens."""
    flag = run.config.get
    kinds = "main", *["subagent"] * flag("train_subagents", False), *["compaction"] * flag("train_compaction", False)
    built, (columns, broken) = tree.build(record, kinds, flag("keep", "all")), token_columns(run, folder, record)
    old = [c["old"] for c in columns.values() if c]
    cause = "evaluation" if not run.config or folder.startswith("eval") else (
        "a group of equal rewards" if old and np.isnan(np.concatenate(old)).all() else None)
    if cause: built = replace(built, call=[], num_trained=0, left_out={cause: len(record.calls)})
    return built, columns, broken


def token_columns(run: Run, folder: str, record) -> tuple:
    """-> call -> old, now, adv of its sampled tokens, NaN where train.py (--save_tokens) computed none; sentences on
    files that cannot be read."""
    begun, out, broken = re.match(r"step-(\d+)", folder), {}, []
    last = run.config.get("max_staleness", 0) if run.config.get("carry_over") else 0    # trained so many steps later
    for step in range(int(begun[1]), int(begun[1]) + last + 1) if begun else ():
        file = run.root / "tokens" / f"step-{step:04}.npz"
        if not file.is_file(): continue
        try: t = tokens_file(file, state_of(file))
        except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error) as e:
            broken.append(f"What training made of its tokens is not shown: tokens/{file.name} cannot be read: {e}")
            continue
        mine = np.flatnonzero((t["id"] == record.id) & (t["started_s"] == record.started_s))
        if len(mine): break
    else: return {}, broken
    for c in record.calls:
        at = np.flatnonzero(np.isin(t["rollout"], mine) & (t["call"] == c.id))
        out[c.id] = {name: np.full(len(c.sampled_ids), np.nan) for name in ("old", "now", "adv") if len(at)}
        for name, column in out[c.id].items():
            column[t["pos"][at] - len(c.prompt_ids)] = t[{"old": "logp_old", "now": "logp"}.get(name, name)][at]
    return out, broken


@lru_cache
def load_tokenizer(model: str):
    from tokenizers import Tokenizer
    if model == "smollm2": model = proxy.SMOLLM2
    file = Path(model, "tokenizer.json")
    return Tokenizer.from_file(str(file)) if model and file.is_file() else None


def logs(path: Path, row: dict) -> tuple:
    """-> the harness's output and the verifier's; of a long one both ends."""
    raw, at = path.read_bytes() if path.is_file() else b"", row["verifier_at"]

    def ends(x):
        if len(x) <= 2 * LOG_BYTES: return x.decode(errors="replace")
        more = f"\n[... {len(x) - 2 * LOG_BYTES:,} bytes left out ...]\n".encode()
        return (x[:LOG_BYTES] + more + x[-LOG_BYTES:]).decode(errors="replace")
    return (ends(raw[:at].removesuffix(b"\n")), ends(raw[at:].partition(b"\n")[2])) if at else (ends(raw), "")


# --- the answers, as JSON-able objects; an export holds the same ------------------------------------------------------
class Viewer:
    def __init__(self, folders: list, tokenizer=""):
        self.tokenizer, self.pieces, self.boot, self.gen = tokenizer, {}, uuid.uuid4().hex, 0
        self.checked, self.took_s = 0., 0.
        self.lock, self.runs = threading.Lock(), {}
        for root in map(Path, folders):
            if not root.is_dir(): raise FileNotFoundError(f"{root}: no such folder; name an --out of train.py")
            name = re.sub(r"[^\w.-]", "-", root.resolve().name)
            name += f"~{len(self.runs)}" * (name in self.runs)
            self.runs[name] = Run(root, name)
        self.answers = {"state": self.state, "rollout": self.rollout, "tokens": self.tokens, "search": self.search}
        self.state()

    def state(self, since="0", boot="") -> dict:
        """What changed after generation `since` of this server's start (`boot`)."""
        with self.lock:
            if (begin := time.monotonic()) > self.checked + max(0.5, 9 * self.took_s):     # a tenth of a core at most
                self.gen += any([run.refresh(self.gen + 1) for run in self.runs.values()])
                self.checked, self.took_s = time.monotonic(), time.monotonic() - begin
            since = int(since) if boot == self.boot else -1
            runs = [run.news(since) for run in self.runs.values() if run.gen > since]
            return clean({"boot": self.boot, "gen": self.gen, "runs": runs})

    def find(self, id: str) -> tuple:
        """-> run, path of the record, its row, the record."""
        run, _, name = id.partition("/")
        run = self.runs.get(run)
        path = run and run.root / f"{name}.jsonl"
        if not run or (row := run.rows.get(path)) is None: raise LookupError(f"no rollout {id}")
        return run, path, row, load(path, state_of(path))

    def rollout(self, id: str) -> dict:
        run, path, row, record = self.find(id)
        (built, columns, broken), by_id = grow(run, row["folder"], record), {c.id: c for c in record.calls}
        asked = record.calls[0].prompt_ids if record.calls else []
        trained = {i for a in built.call for i in a.tolist()}
        text = lambda ids: "".join(self.text(record.model, ids))
        harness_log, verifier = logs(path.with_suffix(".log"), row)
        mean = lambda x: x[~np.isnan(x)].mean().item() if not np.isnan(x).all() else None

        def show(c):
            parent, n, column = by_id.get(c.parent), c.shared, columns.get(c.id)
            return {**tree.call_row(c), "trained": c.id in trained,
                    "wait_s": c.received_s and c.received_s - record.started_s,
                    "took_s": c.finished_s and c.received_s and c.finished_s - c.received_s,
                    "cost": tree.fork_cost(len(c.prompt_ids), len(parent.ids), n) if c.cause and parent else 0,
                    "fork": {"before": text(c.prompt_ids[max(0, n - 24):n]), "then": text(parent.ids[n:n + 48]),
                             "now": text(c.prompt_ids[n:n + 48])} if c.cause and parent else None,
                    "reply": text(c.sampled_ids[:200]), "adv": mean(column["adv"]) if column else None,
                    "gap": mean(abs(column["old"] - c.logp_rollout)) if column else None}
        told = f"no tokenizer.json for model {record.model}: tokens are shown as their ids; give --tokenizer DIR"
        return clean({"row": row | {"run": run.name}, "calls": [show(c) for c in record.calls],
                      "num_unique": built.num_unique, "num_flat": built.num_flat, "num_trained": built.num_trained,
                      "why": why(row, verifier, built.left_out) + broken, "more": record.more,
                      "harness_log": harness_log, "verifier": verifier,
                      "asked": text(asked if len(asked) <= 1000 else asked[-120:]),
                      "tokenizer": None if self.decoder(record.model) else told})

    def tokens(self, id: str, call: str, start="0", end="0") -> dict:
        """Tokens [start, end) of a call's prompt and reply: text; and of what was sampled the engine's logp, the
        trainer's before the update (old) and when last computed (now), adv, mask (is it trained?)."""
        run, _, row, record = self.find(id)
        c = {c.id: c for c in record.calls}.get(int(call))
        if c is None: raise LookupError(f"no call {call} in {id}")
        start, n = max(0, int(start)), len(c.prompt_ids)
        built, made, _ = grow(run, row["folder"], record)
        ids, is_trained = c.ids[start:max(0, int(end))], any(c.id in a for a in built.call)
        columns = {"logp": c.logp_rollout, "mask": [int(is_trained)] * len(c.sampled_ids), **made.get(c.id, {})}
        return clean({"start": start, "ids": ids, "text": self.text(record.model, ids),
                      **{k: ([None] * n + list(map(float, v)))[start:start + len(ids)] for k, v in columns.items()}})

    def search(self, run: str, q: str, after="0") -> dict:
        """Rollouts whose logs or replies hold q (any case), from the after-th on; next: where it had to stop."""
        if run not in self.runs: raise LookupError(f"no run {run}")
        hits, begin, records = [], time.monotonic(), sorted(self.runs[run].rows.items(), reverse=True)
        for i, (path, row) in enumerate(records[int(after):], int(after)):
            if time.monotonic() - begin > 2: return {"hits": hits, "next": i, "of": len(records)}
            for where, text in {"log": "\n".join(logs(path.with_suffix(".log"), row)), **self.replies(path)}.items():
                if (at := text.lower().find(q.lower())) >= 0:
                    hits.append({"id": row["id"], "where": where, "text": text[max(0, at - 60):at + 100]})
                    break
        return {"hits": hits, "next": None, "of": len(records)}

    def replies(self, path: Path) -> dict:
        """call -> what was sampled."""
        lines = []
        for text in whole_lines(path):
            with contextlib.suppress(ValueError): lines.append(decode(text))
        tok, calls = self.decoder(next((x.model for x in lines), "")), [x for x in lines if x.type == "call"]
        if tok is None: return {}
        texts = tok.decode_batch([msgspec.json.decode(x.sampled) for x in calls], skip_special_tokens=False)
        return {f"call {x.id}": text for x, text in zip(calls, texts)}

    def decoder(self, model: str): return load_tokenizer(self.tokenizer or model)

    def text(self, model: str, ids: list) -> list:
        """A text for each token; of a character in several tokens the first has it all."""
        tok, known, out, i = self.decoder(model), self.pieces.setdefault(model, {}), [], 0
        if tok is None: return [f"⟨{i}⟩" for i in ids]
        decode = lambda x: tok.decode(x, skip_special_tokens=False)
        base = tok.encode("a", add_special_tokens=False).ids        # after it: some drop a space where a text begins
        for t in set(ids) - known.keys(): known[t] = decode(base + [t])[len(decode(base)):]
        while i < len(ids):
            piece, n = known[ids[i]], 1
            if "\ufffd" in piece:
                n = next((n for n in range(2, 8) if "\ufffd" not in decode(base + ids[i:i + n])), 1)
                piece = decode(base + ids[i:i + n])[len(decode(base)):]
            out += [piece] + [""] * (min(n, len(ids) - i) - 1)
            i += n
        return out


# --- page, export, server ---------------------------------------------------------------------------------------------
def page(data="null") -> tuple:
    """-> the page with data in it, and the content security policy that lets its own script and style run alone."""
    html = Path(__file__).with_name("viewer.html").read_text()
    inline = [re.search(f"<{tag}>(.*?)</{tag}>", html, re.S)[1].encode() for tag in ("script", "style")]
    script, style = (base64.b64encode(hashlib.sha256(text).digest()).decode() for text in inline)
    policy = (f"default-src 'none'; script-src 'sha256-{script}'; style-src 'sha256-{style}'; connect-src 'self'; "
              "base-uri 'none'; form-action 'none'")
    return html.replace("@CSP@", policy).replace("@DATA@", data.replace("<", "\\u003c")), policy


def export(viewer: Viewer, file: Path, limit: int):
    """All but rollouts, and of these at most `limit`, whole: in turn by harness, outcome and reward, failures first. Of
    a call it holds the tokens from where its parent's end; the page takes those before from the parent."""
    state, turns, num, left_out, num_whole = viewer.state(), [], Counter(), [], 0
    answers = {"state": state}
    for run in state["runs"]:
        for row in sorted(run["rows"], key=lambda r: (r["reward"] or 0, -(r["started_s"] or 0))):
            kind = run["name"], row["harness"], row["outcome"], row["reward"]
            turns.append((num[kind], f"{run['name']}/{row['id']}"))
            num[kind] += 1
    for _, id in sorted(turns, key=lambda t: t[0]):
        if num_whole >= limit: break
        try:
            whole = {f"rollout?id={id}": viewer.rollout(id)}
            for c in whole[f"rollout?id={id}"]["calls"]:
                start = 0 if c["parent"] is None else c["shared"]
                whole[f"tokens?id={id}&call={c['id']}"] = viewer.tokens(id, c["id"], start, 1 << 30)
        except (LookupError, ValueError, OSError) as e: left_out.append(f"{id}: {e}")
        else:
            answers |= whole
            num_whole += 1
    file.write_text(page(json.dumps(answers, separators=(",", ":")))[0])
    told = f"; {len(left_out)} left out, as they cannot be read: {left_out[0]}" if left_out else ""
    print(f"{file}: {file.stat().st_size / 1e6:.1f} MB, {num_whole} of {len(turns)} rollouts in full{told}")


class Server(ThreadingHTTPServer):
    def __init__(self, viewer: Viewer, host: str, port: int):
        super().__init__((host, port), Handler)
        self.viewer, self.is_local = viewer, host in LOOPBACK


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        url, answers = urlsplit(self.path), self.server.viewer.answers
        name = url.path.removeprefix("/api/")
        host = re.sub(r":\d+$", "", self.headers.get("Host", ""))      # any port: it may be forwarded
        if self.server.is_local and host not in LOOPBACK: return self.reply(403, {"error": f"not this Host: {host}"})
        if url.path == "/":
            html, policy = page()
            return self.reply(200, html, "text/html; charset=utf-8", policy + "; frame-ancestors 'none'")
        if name == url.path or name not in answers: return self.reply(404, {"error": f"no {url.path}"})
        try: self.reply(200, answers[name](**dict(parse_qsl(url.query))))
        except LookupError as e: self.reply(404, {"error": str(e)})
        except (ValueError, TypeError, OSError) as e: self.reply(400, {"error": str(e)})

    def reply(self, status: int, body, kind="application/json", policy="default-src 'none'"):
        body = (body if isinstance(body, str) else json.dumps(body)).encode()
        self.send_response(status)
        for k, v in {"Content-Type": kind, "Content-Length": str(len(body)), "Content-Security-Policy": policy,
                     "X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer", "Cache-Control": "no-store",
                     "Cross-Origin-Resource-Policy": "same-origin"}.items(): self.send_header(k, v)
        with contextlib.suppress(ConnectionError):          # the reader has gone
            self.end_headers()
            self.wfile.write(body)

    def log_message(self, *_): pass         # http.server's own, a line a request


def parse(argv=None):
    p = argparse.ArgumentParser(description="A page over run folders, as they grow.", allow_abbrev=False)
    p.add_argument("folders", nargs="+", metavar="RUN_DIR", help="an --out of train.py or rollout.py")
    p.add_argument("--host", default="127.0.0.1", help="address to listen on; by default only this machine reaches it")
    p.add_argument("--port", type=int, default=8765, help="0 = any free one")
    p.add_argument("--tokenizer", default="", help="folder with a tokenizer.json (default: the recorded model's)")
    p.add_argument("--export", metavar="FILE", help="write one self-contained page instead of serving")
    p.add_argument("--export_rollouts", type=int, default=40, help="rollouts in full in an export, at most")
    return p.parse_args(argv)


def main(args):
    viewer = Viewer(args.folders, args.tokenizer)
    if args.export: return export(viewer, Path(args.export), args.export_rollouts)
    server = Server(viewer, args.host, args.port)
    told = "on loopback: for this machine alone" if server.is_local else "NOT on loopback: who reaches it reads it all"
    print(f"http://{args.host}:{server.server_address[1]}/  listens {told}", flush=True)
    server.serve_forever()


if __name__ == "__main__": rollout.command(main, parse())
