"""graft.py as pure functions: harnesses at random, thoughts, hostile texts, kinds, and what a long session costs."""
import json
import re
import tracemalloc
from array import array
from types import SimpleNamespace

import pytest
from hypothesis import given, settings, strategies as st

import bench
import graft
import proxy
import tree

HEADER, END = "<|im_start|>assistant\n", "<|im_end|>"
WORDS = st.text(st.sampled_from("ab  \n\t.{}\"'/-é≥✓0<"), max_size=10)
CALL_TEXT = '{"name":"run" ,  "arguments":{"limit_s": 1.0,"command":"ls \\u2265 1"} }'     # as no client spells it
RESPELT = json.dumps({"arguments": {"command": "ls ≥ 1", "limit_s": 1}, "name": "run"}, ensure_ascii=False)
many = settings(max_examples=200, deadline=None)


def chatml(messages, strips=False):
    """strips: as Qwen3's template, thoughts before the last user message are left out, later ones trimmed."""
    last = max((i for i, (role, _) in enumerate(messages) if role == "user"), default=0)
    text = ""
    for i, (role, said) in enumerate(messages):
        if strips and role == "assistant" and "</think>" in said:
            thought, said = said.split("</think>", 1)
            thought, said = thought.removeprefix("<think>").strip("\n"), said.lstrip("\n")
            if i > last: said = f"<think>\n{thought}\n</think>\n\n{said}"
        text += f"<|im_start|>{role}\n{said}{END}\n"
    return text + HEADER


class Policy:
    """What the proxy does around `graft`: calls, and what each of them continues."""

    def __init__(self, tokenizer, mode, strips=False):
        self.tokenizer, self.mode, self.strips, self.calls, self.continues = tokenizer, mode, strips, [], {}

    def encode(self, text): return array("i", self.tokenizer.encode(text, add_special_tokens=False))

    def decode(self, ids): return self.tokenizer.decode(list(ids), skip_special_tokens=True)

    def ask(self, messages, text, cuts=(), is_cut=False):
        """-> the call, recorded with `text` as its reply in a tokenisation of its own; what it continues; the cause."""
        template = self.encode(chatml(messages, self.strips))
        prompt, parent, cause = graft.graft(template, self.calls, self.continues, {self.tokenizer.eos_token_id},
                                            self.decode, self.mode)
        bounds = [0, *sorted({min(c, len(text)) for c in cuts}), len(text)]
        sampled = array("i", [t for a, b in zip(bounds, bounds[1:]) for t in self.encode(text[a:b])])
        if not is_cut or not sampled: sampled.append(self.tokenizer.eos_token_id)
        call = tree.Call(len(self.calls), "main", cause, prompt, template, sampled, [-1.] * len(sampled), "stop")
        twin = next((c for c in self.calls if c.prompt_ids == prompt), None) if cause == "retry" else None
        self.continues[call.id] = self.continues[twin.id] if twin else parent and parent.id
        self.calls.append(call)
        return call, parent, cause


def told(text, mode):
    """What a prompt says, as far as a mode keeps it; written apart from graft.py."""
    if mode == "full": text = re.sub(r"(?s)<think>.*?</think>", "", text)
    if mode in ("canonical", "full"):
        text = text.replace(CALL_TEXT, RESPELT)
        text = re.sub(r"\s", "", text)
    return text


THOUGHTS = st.sampled_from(["", "", "<think>\nhm\n</think>\n\n", "<think>hm </think>"])
STEP = st.tuples(st.integers(0, 2), THOUGHTS, WORDS, st.booleans(), st.lists(st.integers(0, 30), max_size=5),
                 st.booleans(), st.sampled_from(["keep", "respell", "strip", "forget", "edit", "drop", "retry"]))


@many
@given(steps=st.lists(STEP, min_size=2, max_size=7), mode=st.sampled_from(graft.GRAFTS))
def test_whatever_the_harness_does(tokenizer, steps, mode):
    """Would catch a prompt that is spliced wrongly (harness text lost, doubled or altered, an end of turn too many),
    one that says other things than the harness's rendering beyond what the mode allows, a chain broken although
    the mode could keep it, and a graft over an edit. Three agents take turns in one session: two of them begin alike
    (a branch), each has its replies echoed, re-spelt, trimmed, robbed of their thought, edited, dropped or asked
    again."""
    policy = Policy(tokenizer, mode)
    lines = [[[("user", "Go.")], None, 0] for _ in range(2)] + [[[("system", "sub"), ("user", "Look.")], None, 0]]
    eos = tokenizer.eos_token_id
    for where, thought, words, has_tool, cuts, is_cut, echo in steps:
        line = lines[where]
        messages, last, loss = line
        text = thought + words + (f"<tool_call>\n{CALL_TEXT}\n</tool_call>" if has_tool else "")
        call, parent, cause = policy.ask(messages, text, cuts, is_cut)
        prompt, template = call.prompt_ids, call.template_ids
        if cause == "retry":
            assert any(c.prompt_ids == prompt and c.template_ids == template for c in policy.calls[:-1])
        elif parent is None: assert prompt == template and (cause is None) == (call.id == 0)
        else:
            starts = [n for n in (len(parent.ids), len(parent.ids) - 1) if prompt[:n] == parent.ids[:n]]
            assert any(template[len(template) - len(prompt) + n:] == prompt[n:] and
                       (n == len(parent.ids) or parent.ids[-1] == eos) for n in starts)
        if mode == "off": assert prompt == template
        whole = lambda ids: told(tokenizer.decode(list(ids)), mode)
        assert whole(prompt) == whole(template)
        if last is not None and cause != "retry":
            if 0 < loss <= graft.GRAFTS.index(mode):        # a twin that says the same will do
                assert parent is not None and parent.template_ids == last.template_ids
            elif loss == 4: assert parent is not last
        said = {"respell": text.replace(CALL_TEXT, RESPELT), "strip": text.strip(), "edit": text + "EDITED",
                "forget": re.sub(r"(?s)^<think>.*?</think>\s*", "", text)}.get(echo, text)
        if echo == "retry": continue
        kept = [] if echo == "drop" else [("assistant", said)]
        loss = (4 if echo in ("drop", "edit") else 1 if said == text else 3 if echo == "forget" else 2)
        line[:] = messages + kept + [("user", f"next {len(policy.calls)}")], call, loss


@many
@given(steps=st.lists(STEP, min_size=2, max_size=6), mode=st.sampled_from(graft.GRAFTS[1:]))
def test_text_that_comes_back_makes_one_chain(tokenizer, steps, mode):
    """Would catch a mode under which a text-preserving harness forks: all but `off` must keep it in one path."""
    policy, messages = Policy(tokenizer, mode), [("user", "Go.")]
    for i, (_, thought, words, _, cuts, is_cut, _) in enumerate(steps):
        call, parent, cause = policy.ask(messages, thought + words, cuts, is_cut)
        assert cause is None and (parent and parent.id) == (i - 1 if i else None)
        messages = [*messages, ("assistant", thought + words), ("user", f"next {i}")]
    as_lists = [tree.Call(c.id, "main", None, list(c.prompt_ids), list(c.template_ids), list(c.sampled_ids),
                          c.logp_rollout, "stop") for c in policy.calls]
    assert len(tree.build(tree.Rollout("r", "t", "h", "m", 1., 0., as_lists)).paths) == 1


@pytest.mark.parametrize("strips", [False, True])
@pytest.mark.parametrize("mode", graft.GRAFTS)
@pytest.mark.parametrize("thought", ["<think>\nI look.\n</think>\n\n", "<think>I look.</think>",
                                     "<think>\n\nI look.  \n</think>"])
def test_thoughts(tokenizer, strips, mode, thought):
    """Would catch reasoning that is echoed, trimmed or dropped and does not become the graft or the typed fork that
    --graft names: canonical keeps what is only trimmed, full also brings back what is gone, else `thinking_dropped`."""
    reply, results = thought + "ls", {}
    trimmed = "<think>" + re.search("I look.", thought)[0] + "</think>ls"
    for echo, said in ("echoed", reply), ("trimmed", trimmed), ("dropped", "ls"):
        policy = Policy(tokenizer, mode, strips)
        first, _, _ = policy.ask([("user", "Go.")], reply)
        call, parent, cause = policy.ask([("user", "Go."), ("assistant", said), ("tool", "a.txt")], "cat")
        results[echo] = "graft" if parent is first else cause
        if parent is first: assert call.prompt_ids[:len(first.ids)] == first.ids and "a.txt" in policy.decode(
            call.prompt_ids[len(first.ids):])
    level, fork = graft.GRAFTS.index(mode), {0: "retokenised", 1: "history_edited"}
    canonical = "graft" if level >= 2 else "history_edited"
    exact = ("graft" if not strips or reply == "<think>\nI look.\n</think>\n\nls" else canonical)
    assert results["echoed"] == exact
    assert results["trimmed"] in ({canonical} if reply != trimmed or strips else {"graft"}) | (
        {"graft"} if strips and exact == "graft" else set())
    assert results["dropped"] == ("graft" if mode == "full" else "thinking_dropped")


@pytest.mark.parametrize("mode", graft.GRAFTS)
def test_a_template_that_strips_old_thoughts(tokenizer, mode):
    """Would catch a new user message under a Qwen3-like template that is blamed on the harness, or, under `full`, the
    old thought left out of the prompt."""
    policy, reply = Policy(tokenizer, mode, strips=True), "<think>\nI look.\n</think>\n\nls"
    first, _, _ = policy.ask([("user", "Go.")], reply)
    call, parent, cause = policy.ask([("user", "Go."), ("assistant", reply), ("user", "More.")], "cat")
    assert ("I look." in policy.decode(call.prompt_ids)) == (mode == "full")
    assert (parent, cause) == ((first, None) if mode == "full" else (None, "thinking_dropped"))


def test_hostile_texts_end():
    """Would catch a policy that repeats a line feed or a mark until its limit and, by a pattern that backtracks, stops
    the proxy for all sessions (it would not end here; `bench.py graft` has the growth)."""
    for unit in "\n\n\n", "<tool_call>\n", " <think>", "</think> ", "<analysis>":
        text = unit * 20_000
        graft.meaning(text), graft.asks_for_summary(text), graft.compare("", text, "x</think>" + text)
        graft.quotes([], row([]), row([("user", text)], kind="side"), lambda _: text)


def test_another_end_of_turn_stays():
    """Would catch a turn that the policy ended otherwise than the template does, in whose place the template's end is
    left out of the next prompt."""
    call = SimpleNamespace(id=0, prompt_ids=[1, 5], template_ids=[1, 5], sampled_ids=[7, 8, 0])
    decode = lambda ids: " ".join(map(str, ids))
    for end, expected in (2, [1, 5, 7, 8, 0, 2, 9]), (0, [1, 5, 7, 8, 0, 9]):
        assert graft.graft([1, 5, 7, 8, end, 9], [call], {0: None}, {0, 2}, decode, "exact") == (expected, call, None)


def row(messages, kind="main", tools=3, id=0, **kw):
    call = proxy.Pending(None, 0., kind=kind, num_tools=tools, id=id, **kw)
    call.outline = graft.outline([{"role": r, "content": c} for r, c in messages], {})
    return call


def kind(seen, messages, tools=3, **kw):
    """The kind of a further call; a retyping is done to `seen`."""
    retype = lambda s, k: setattr(s, "kind", k)
    return graft.kind_of(row(messages, tools=tools, **kw), SimpleNamespace(seen=seen, retype=retype),
                         [{"role": r, "content": c} for r, c in messages])


TASK = [("system", "You are an agent. It is 12:01."), ("user", "Fix it at 12:01.")]
LATER = [*TASK, ("assistant", "I look."), ("tool", "a.txt")]


@pytest.mark.parametrize("seen, messages, tools, expected", [
    ([row(TASK)], [("system", "You are an agent. It is 12:07."), ("user", "Fix it at 12:07.")], 3, "main"),
    ([row(TASK)], [("system", "You search."), ("user", "Find x.")], 3, "subagent"),
    ([row(TASK), row(LATER, kind="compaction")], [("system", "It is noon."), ("user", "Summary: x")], 3, "main"),
    ([row(TASK), row(LATER, kind="subagent")], LATER, 3, "main"),                   # that one began as a copy of it
    ([row(TASK), row(LATER, kind="subagent")], [("system", "You search."), ("user", "x")], 3, "subagent"),
    ([row(LATER)], [*LATER, ("tool", "<analysis> and <summary>")], 3, "main"),      # what a file held
    ([row(LATER)], [*LATER, ("user", "<analysis> then <summary>")], 3, "compaction"),
    ([row(LATER, tools=0)], [("system", "You search."), ("user", "x")], 3, "main"),  # no title: it had a history
    ([row(TASK)], [("system", "Write a title."), ("user", "x")], 0, "side"),
    ([row(LATER)], [*LATER, ("user", "Last words?")], 0, "compaction")])            # until it is settled
def test_kinds(seen, messages, tools, expected):
    """Would catch main calls that are silently not trained: a clock in the system prompt, a history after compaction,
    a subagent that shares the main agent's opening, a tool result that holds the words of a summary's request."""
    assert kind(seen, messages, tools) == expected and all(s.kind != "side" for s in seen)


def test_what_is_a_summary():
    """Would catch a reply that is taken for a summary, and not trained, since the task's own text, an example in it or
    a tool's output holds the same line; and a summary that is not recognised."""
    line = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
    asked = [("system", "s"), ("user", f"End with {line}"), ("assistant", "x"), ("user", "out")]
    earlier = row(asked)
    def is_summary(messages, reply):
        call = row(messages)
        return graft.quotes([{"role": r, "content": c} for r, c in messages], call, earlier, lambda _: reply)
    assert not is_summary(asked[:2], line)                                          # it had always stood there
    assert not is_summary([asked[0], ("tool", f"$ {line}")], line)
    script = f"cat > a.sh <<'END_OF_FILE'\n{line}\nEND_OF_FILE"
    assert not is_summary([asked[0], ("user", f"$ cat a.sh\n{line}")], script)      # printed by a text-only harness
    summary = "The file a.txt was made and read back.\nNext: count its letters.\nok"
    assert is_summary([asked[0], ("user", f"Summary of what came before:\n{summary}")],
                      f"<analysis>I think about it for long.</analysis>\n<summary>{summary}</summary>")
    assert not is_summary([*asked, ("user", summary)], summary)                     # no shorter history


def test_a_long_session_is_one_chain_on_record(tmp_path):
    """Would catch a graft or a record that loses its place in 200 calls of up to 120,000 tokens, and a record, on disk
    or in memory, that grows with the history (`bench.py graft` has the time)."""
    tracemalloc.start()
    try:
        session, _ = bench.grow_session(tmp_path / "record", 200)
        num_bytes, _ = tracemalloc.get_traced_memory()
    finally: tracemalloc.stop()
    assert num_bytes < 8e6                                  # of it 0.7 for its ids; each prompt by itself: 50
    assert [s.continues for s in session.seen] == [None, *range(199)]
    session.record.write_text('{"type":"rollout","format":1,"id":"r","task":"t","harness":"h","model":"m",'
                              '"temperature":1,"started_s":0}\n' + session.record.read_text())
    assert tree.read(session.record).calls[-1].prompt_ids == list(session.seen[-1].prompt_ids)
    assert session.record.stat().st_size < 3e6


@many
@given(lists=st.lists(st.lists(st.tuples(st.sampled_from(["user", "assistant", "system"]),
                                         st.sampled_from(["a1", "a2", "a\nb", "", "x" * 50])), max_size=5), max_size=6))
def test_outlines_are_the_same_with_and_without_memory(lists):
    """Would catch a message that gets the row of another: kinds and causes are read off these rows."""
    known = {}
    for messages in lists:
        messages = [{"role": r, "content": c} for r, c in messages]
        assert graft.outline(messages, known) == graft.outline(json.loads(json.dumps(messages)), {})


def test_a_request_with_tools_does_not_untrain_a_harness_without():
    """Would catch an agent that sends a request with tools of its own from inside the sandbox, as long as its harness
    has none: what it did, and all that it does from then on, would count as titles, which nobody trains."""
    seen = [row(TASK, tools=0)]
    assert kind(seen, [("user", "forged")], 3, id=1) == "main" and seen[0].kind == "side"       # a title, it seems
    seen.append(row([("user", "forged")], tools=3, id=1))
    assert kind(seen, LATER, 0, continues=0) == "main"
    assert kind(seen, [("system", "Write a title."), ("user", "x")], 0) == "side"               # it goes on from none
    seen[0].kind = "side"
    assert kind(seen, LATER, 0) == "main" and seen[0].kind == "main"        # though no tokens do: thoughts are stripped
    asked = [*LATER, ("user", "You are performing a CONTEXT CHECKPOINT COMPACTION. Write a handoff summary.")]
    assert kind(seen, asked, 0, continues=0) == "compaction"                # it says so itself


TAIL = "<<<BEGIN>>>\nExec sessions: "


@pytest.mark.parametrize("then, cause", [
    ([("assistant", "ok"), ("tool", "out"), ("user", TAIL + "one")], "volatile_tail"),
    ([("assistant", "ok"), ("user", TAIL + "none")], "volatile_tail"),
    ([("assistant", "ok"), ("user", "Go on.")], "history_edited"),                      # another message
    ([("assistant", "ok"), ("tool", "out")], "history_edited"),                         # it does not come back
    ([("user", TAIL + "one")], "history_edited")])                                      # it changes in its place
def test_a_last_message_that_moves(then, cause):
    """Would catch a harness whose last message is taken away and put at the end again that counts as one that edits its
    history, and edits that pass for that."""
    call = row([*TASK, *then], id=1)
    assert graft.cause_of(call, [row([*TASK, ("user", TAIL + "none")])], "unknown") == cause


@many
@given(a=st.integers(0, 9000), b=st.integers(0, 9000), at=st.integers(0, 9000))
def test_lcp_of_arrays(a, b, at):
    """Would catch a comparison of arrays in place that is off at an end, or sees other lengths."""
    one, two = array("i", range(a)), array("i", range(b))
    if at < b: two[at] = -1
    assert tree.lcp(one, two) == min(a, b, at if at < b else b)


def test_forks_at_each_turn_stay_cheap_to_tell_apart():
    """Would catch a history that is compared with each earlier call of a session that forks at every turn: with numbers
    of tokens that are looked at, not with seconds."""
    looked = []

    class Ids(array):
        def __getitem__(self, i):
            if isinstance(i, slice): looked.append(len(range(*i.indices(len(self)))))
            got = super().__getitem__(i)
            return Ids("i", got) if isinstance(i, slice) else got
    calls, history = [], Ids("i", range(10, 10_010))
    for i in range(50):
        prompt = Ids("i", [*history, 7, 7, 7, 2, 9])
        before = sum(looked)
        _, _, cause = graft.graft(prompt, calls, {c.id: None for c in calls}, {2}, str, "canonical")
        assert cause == ("unknown" if i else None)
        assert sum(looked) - before < 100 * (i + 1)
        calls.append(tree.Call(i, "main", None, prompt, prompt, Ids("i", [5, 2]), [0., 0.], "stop"))
        history = Ids("i", [*history, 2, 9, 5, 2, 8, 8, 8, 2, 9])


@pytest.mark.parametrize("mode", graft.GRAFTS)
def test_what_a_stop_word_cut_off(tokenizer, mode):
    """Would catch a reply that comes back without the stop word that ended it, as it was told, and is not grafted or
    has no cause; and the word left out of the prompt."""
    policy = Policy(tokenizer, mode)
    first, _, _ = policy.ask([("user", "Go.")], "I look.\nStop:", is_cut=True)
    again = [("user", "Go."), ("assistant", "I look.\n"), ("user", "on")]
    told = graft.graft(policy.encode(chatml(again)), policy.calls, policy.continues, {tokenizer.eos_token_id},
                       policy.decode, mode, {first.id: "I look.\n"})
    if mode == "off": assert told == (policy.encode(chatml(again)), None, "retokenised")
    else:
        prompt, parent, cause = told
        assert parent is first and cause is None and prompt[:len(first.ids)] == first.ids
        assert tokenizer.decode(prompt[len(first.ids):]) == f"{END}\n<|im_start|>user\non{END}\n{HEADER}"
