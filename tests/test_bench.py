"""bench.py: hand values of the headline and of the shapes, and a short form of each benchmark as a command."""
import json
import math
import subprocess
import sys

import numpy as np
import pytest
import torch

from conftest import ROOT
import bench
import rollout
import tree


def command(*words):
    return subprocess.run([sys.executable, ROOT / "bench.py", *map(str, words)], capture_output=True, text=True)


def result(*words):
    """What `bench.py ... --json` prints: one object, in JSON proper."""
    done = command(*words, "--json")
    assert done.returncode == 0, done.stderr

    def refuse(name): raise AssertionError(f"{name} is no JSON")
    return json.loads(done.stdout, parse_constant=refuse)


def evaluation(when, solved, num, time_s):
    low, high = rollout.wilson(solved, num)
    return {"phase": "eval", "when": when, "set": "heldout", "harness": "bash", "time_s": time_s, "num": num, "num_judged": num,
            "solved": solved, "pass_rate": solved / num, "low": low, "high": high, "outcomes": {"ok": num}}


def step(number, total_s, gap, **other):
    return {"phase": "rl", "step": number, "time/rollout_s": 10., "time/train_s": 6., "time/weights_s": 2., "time/total_s": total_s,
            "stage/start_s": 5., "stage/agent_s": 80., "stage/verify_s": 15., "calls/engine_s": 60., "memory/all_gb": 3. + number,
            "fidelity/gap_mean": gap, "fidelity/gap_pearson": 1 - gap} | other


@pytest.fixture
def make_run(tmp_path):
    def make(seed, cold, end, torn="", **config):
        """A run folder as train.py leaves it: cold and end are solved of 80; torn is what stands behind the last newline."""
        rows = [{"phase": "ready", "time_s": 40.}, evaluation("bare", 0, 80, 100.), {"phase": "warmup", "step": 0}, evaluation("cold", cold, 80, 200.),
                step(0, 220., 0.02), step(1, 240., 0.04), evaluation("end", end, 80, 300.), {"phase": "checkpoint", "time_s": 360.}]
        folder = tmp_path / f"seed{seed}"
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps({"out": str(folder), "seed": seed, "steps": 2, "lr": 1e-5} | config))
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + torn)
        return folder
    return make


def test_runs_by_hand(make_run):
    """Would catch a wrong base of the gain, an unpaired or normal interval, evaluation time counted as a step's, shares of the wrong whole."""
    folders = make_run(0, 16, 40), make_run(1, 24, 56)
    got = result("runs", *folders)
    rate = {(r["when"], r["run"]): r for r in got["pass_rate"]}
    assert len(rate) == 9 and rate["end", str(folders[1])]["mean"] == 0.7 and rate["bare", "all"]["mean"] == 0
    assert (rate["cold", str(folders[0])]["low"], rate["cold", str(folders[0])]["high"]) == rollout.wilson(16, 80)
    end = rate["end", "all"]                                # of two values the t-interval is mean -+ 12.706 |difference| / 2
    assert end["mean"] == pytest.approx(0.6) and end["high"] - end["mean"] == pytest.approx(12.706 * 0.2 / 2)
    one, two, both = got["gain_points"]
    assert (one["mean"], two["mean"], both["mean"]) == pytest.approx((30, 40, 35)) and both["mean"] - both["low"] == pytest.approx(12.706 * 10 / 2)
    assert [(job["minutes"], job["steps"], job["is_finished"]) for job in got["minutes"]] == [(6, 2, True)] * 2
    a_step = {r["phase"]: r for r in got["seconds"]["a_step"]}
    assert {p: r["mean"] for p, r in a_step.items()} == {"rollout": 10, "train": 6, "weights": 2, "other": 2} and a_step["rollout"]["share"] == 0.5
    assert {r["part"]: r["share"] for r in got["seconds"]["in_rollout"]} == {"sampling": 0.6, "harness": 0.2, "sandbox_start": 0.05, "verify": 0.15}
    assert got["fidelity"] == pytest.approx({"gap_mean": 0.03, "gap_max": 0.04, "pearson_mean": 0.97, "pearson_min": 0.96}) and got["memory_gb"] == 4
    table = command("runs", *folders).stdout
    assert all(word in table for word in ("pass_rate:", "t, 2 runs", "Newcombe", "seconds.in_rollout:", "memory_gb: 4"))


def test_intervals_agree_with_the_literature():
    """Would catch swapped bounds and a mistyped quantile. 56/70 - 48/80 is Newcombe's own first example, method 10."""
    rate = lambda k, n: {"run": "r", "num": n, "mean": k / n} | dict(zip(("low", "high"), rollout.wilson(k, n)))
    got = bench.gain(rate(48, 80), rate(56, 70))
    assert (got["low"], got["mean"], got["high"]) == pytest.approx((5.24, 20, 33.39), abs=0.01)
    for n, t in enumerate(bench.T_95, 1):                   # Student's density from 0 to t holds 47.5 %
        x = np.linspace(0, t, 200_001)
        density = math.gamma((n + 1) / 2) / math.gamma(n / 2) / math.sqrt(n * math.pi) * (1 + x * x / n) ** (-(n + 1) / 2)
        assert np.trapezoid(density, x) == pytest.approx(0.475, abs=2e-5)


def test_runs_that_are_young_torn_or_never_gained(make_run):
    """Would catch a crash on a running job, NaN in the JSON, and a share of evaluation or warm-up time in `other`."""
    folder = make_run(0, 0, 0, torn='{"phase": "rl", "st')
    lines = (folder / "metrics.jsonl").read_text().splitlines(True)
    assert result("runs", folder)["minutes"][0]["is_finished"]
    (folder / "metrics.jsonl").write_text("".join(lines[:3]) + json.dumps(step(0, 220., math.nan)) + "\n")
    young = result("runs", folder)
    assert not young["minutes"][0]["is_finished"] and young["gain_points"] == [] and young["fidelity"]["gap_mean"] is None
    assert young["seconds"]["a_step"][3] == {"phase": "other", "mean": None, "share": None}     # the warm-up before it has no time
    (folder / "metrics.jsonl").write_text("".join(lines[:1]))
    assert result("runs", folder)["memory_gb"] is None


def test_bad_input_is_one_line(make_run, tmp_path):
    """Would catch runs of two configurations averaged as one, and a traceback for a typing error."""
    one, two = make_run(0, 8, 8), make_run(1, 8, 8, lr=1e-4)
    for words, said in ((("nothing",), "one of runs, tree"), (("tree", "x"), "takes no folders"), (("runs",), "1 to 10 different folders"),
                        (("runs", one, one), "different"), (("runs", one, two), "differ in lr"), (("runs", tmp_path), "config.json")):
        done = command(*words)
        assert done.returncode == 2 and said in done.stderr and done.stderr.count("\n") == 1 and not done.stdout, done


def test_shapes_are_those_of_the_definition():
    """Would catch a shape that shares more, or less, than it says: the ratios would speak of another one."""
    sizes = {}
    for name, rollouts in bench.shapes(1, 1638).items():
        trees = [tree.build(bench.as_rollout(calls)) for calls in rollouts]
        assert sum(t.num_trained for t in trees) == sum(len(s) for calls in rollouts for _, s in calls) and not any(t.left_out for t in trees)
        paths = [p for t in trees for p in t.paths]
        sizes[name] = len(paths), sum(map(len, paths)), sum(map(len, paths)) - sum(tree.dfs(paths)[1])
    near = lambda n: pytest.approx(n, abs=20)               # siblings begin with the same token by chance
    assert sizes == {"i linear": (1, 4875, 4875), "ii group of 8": (8, 8 * 5800, near(4000 + 8 * 1800)),
                     "iii compaction": (6, 19200, near(14200)), "iii x 4": (24, 4 * 19200, near(4 * 11700 + 2500)),
                     "iv branches": (4, 24000, near(12000)), "iv 4-ary": (64, 64 * 2384, near(2000 + 84 * 128)), "unshared": (4, 4 * 5800, near(4 * 5800))}


def test_peak_memory_is_in_bytes():
    """Would catch kilobytes taken for bytes, and a peak that an earlier, larger one hides."""
    torch.ones(100 << 20)
    for size in (50 << 20, 25 << 20):
        assert bench.peak_bytes(lambda: torch.ones(size)) == pytest.approx(4 * size, rel=0.1)


def test_tree():
    got = result("tree", "--scale", 0.01)
    linear, forking = got["shapes"]
    assert got["scale"] == 0.01 and (linear["paths"], forking["paths"]) == (1, 200) and linear["calls"] == forking["calls"] == 200
    assert linear["tokens"] == sum(200 + 4 * i + 1 for i in range(200)) and forking["tokens"] == linear["tokens"] + 200 * 5
    assert all(row[key] > 0 for row in got["shapes"] for key in ("tokens_per_s", "read_s", "build_s", "encode_s", "record_mb"))


def test_packing():
    got = result("packing", "--scale", 0.005)
    assert got["scale"] == 0.005 and len(got["shapes"]) == 6 and got["over_flat_when_unshared"] > 0
    for row in got["shapes"]:
        assert row["unique_tokens"] <= row["flat_tokens"] and (row["per_call_over_packed"] is None) == (row["shape"] not in ("i linear", "iii compaction"))
        assert row["ideal_over_time"] > 0 and row["flat_over_packed"] > 0 and row["memory_ratio"] > 0, row


def test_sandbox():
    """Would catch a benchmark that leaves containers or folders behind."""
    got = result("sandbox", "--num", 2)
    assert got["rollouts"] == 2 and {row["kind"] for row in got["kinds"]} <= {"docker", "bubblewrap"}
    assert all(row["leaked"] == 0 and row["bare_s"] > 0 and row["rollouts_ratio"] > 0 for row in got["kinds"])


def test_proxy_and_weights():
    """Would catch a comparison in which a call went past the recorder, and a benchmark that no longer finds the engine."""
    rows = result("proxy", "--model", "two-layer", "--scale", 0.005, "--num", 2, "--clients", "1,8")["load"]
    assert [row["clients"] for row in rows] == [1, 8] * 2
    assert all(row["throughput_ratio"] > 0 and row["plain_ms"] > 0 for row in rows)
    got = result("weights", "--num", 1)
    assert got["gb"] == pytest.approx(0.538, abs=0.02) and got["over_copy"] > 0


def test_graft():
    got = result("graft")
    assert all(got[k] > 0 for k in ("session_growth", "text_growth", "early_call_ms", "late_call_ms"))


def test_carry():
    """Would catch a benchmark that no longer runs, one whose groups get lost, and a side without that carries."""
    got = result("carry", "--num", 2)
    without, over = got["runs"]
    assert without["groups"] == 8 <= over["groups"] <= 10 and without["carried"] == 0 < got["ratio"]
