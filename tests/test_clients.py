"""What odd, hostile and thinking clients make of a session, through vLLM's own server: stop words, thoughts in each
protocol, parameters of all sorts, raw connections. The scripted engine stands in for what the model says alone."""
import asyncio
import contextvars
import functools
import gzip
import json
import socket
import time
from array import array
from types import SimpleNamespace

import pytest
from hypothesis import example, given, settings, strategies as st

from conftest import ENGINE, TEMPLATE, engine_prompts, make_model
from test_proxy import (CHAT, MESSAGES, RESPONSES, TOOL_CALL, TOOLS, USER, ask, gaps, raw_connection, render, say,
                        slow, trainer, until)
import proxy
import tree

FUNCTION = TOOLS[0]["function"]
TOOLS_IN = {CHAT: TOOLS, RESPONSES: [{"type": "function", **FUNCTION}],
            MESSAGES: [{"name": "run", "input_schema": FUNCTION["parameters"]}]}


def post(client, path, history, **body):
    """A request in any protocol; the history is in its own form."""
    name = "input" if path == RESPONSES else "messages"
    limit = {"max_tokens": 300} if path == MESSAGES else {}
    return client.post(path, json={"model": "policy", name: history} | limit | body)


def told(path, answer):
    """-> what the client makes of an answer, streamed or not: a list of items that it sends back as they are."""
    if answer.text.lstrip().startswith("{"):
        data = answer.json()
        if path == RESPONSES: return data["output"]
        if path == MESSAGES: return [{"role": "assistant", "content": data["content"]}]
        return [{k: v for k, v in data["choices"][0]["message"].items() if v}]
    events = [json.loads(x[6:]) for x in answer.text.splitlines() if x.startswith("data: {")]
    if path == RESPONSES: return events[-1]["response"]["output"]
    if path == CHAT:
        deltas, message = [e["choices"][0]["delta"] for e in events if e["choices"]], {"role": "assistant"}
        for d in deltas:
            for name in "reasoning", "content":
                if d.get(name): message[name] = message.get(name, "") + d[name]
            if d.get("tool_calls"): message["tool_calls"] = d["tool_calls"]         # they come in one piece
        return [message]
    blocks = {e["index"]: e["content_block"] for e in events if e["type"] == "content_block_start"}
    for e in events:
        if e["type"] != "content_block_delta": continue
        for name in "text", "thinking", "partial_json", "signature":
            if name in e["delta"]: blocks[e["index"]][name] = blocks[e["index"]].get(name, "") + e["delta"][name]
    for b in blocks.values():
        if text := b.pop("partial_json", None): b["input"] = json.loads(text)
    return [{"role": "assistant", "content": list(blocks.values())}]


# ---- stop words ----

@pytest.mark.parametrize("path", [CHAT, MESSAGES, RESPONSES])
@pytest.mark.parametrize("stream", [False, True])
def test_null_is_not_said(scripted, connect, path, stream):
    """Would catch a parameter given as null that is sampled for and then answered as an error (responses' truncation
    and parallel_tool_calls), or that is no longer what its absence is."""
    nothing = dict.fromkeys(["truncation", "parallel_tool_calls", "tools", "tool_choice", "temperature", "metadata",
                             "system" if path == MESSAGES else "user", "stop_sequences", "reasoning"])
    session = connect(scripted, ["fine"])
    body = {"model": "policy", "messages": USER, "input": USER, "max_tokens": 50, "stream": stream}
    del body["messages" if path == RESPONSES else "input"]
    answer = connect.client(session).post(path, json=nothing | body)
    assert answer.status_code == 200 and "fine" in answer.text, answer.text
    call, = tree.read(session.record).calls
    assert call.finish == "stop" and call.kind == "main"


@pytest.mark.parametrize("path, name", [(CHAT, "stop"), (MESSAGES, "stop_sequences"), (RESPONSES, "stop")])
@pytest.mark.parametrize("echo", ["as told", "with the word", "trimmed", "half a character"])
def test_a_stop_word_that_is_not_told(scripted, connect, path, name, echo):
    """Would catch a harness with stop words that forks at every call: what ends a reply is sampled and not told, so it
    never comes back. And a replay that tells it."""
    record, end = None, "\ufffd" if echo == "half a character" else "\n"
    for first in f"I look. {end}Observation: none", "never":
        session = connect(scripted, [first, "cat"], replay=record and tree.read(record).calls[:1])
        record = session.record
        client, history = connect.client(session), list(USER)
        answer = post(client, path, history, **{name: ["Observation:"]})
        text = json.dumps(told(path, answer)[0])
        assert "I look. " in text and "Observation" not in text, text
        said = {"with the word": "I look. \nObservation:", "trimmed": "I look."}.get(echo, f"I look. {end}")
        history += [{"role": "assistant", "content": said}, {"role": "user", "content": "a.txt"}]
        post(client, path, history, **{name: ["Observation:"]})
        first, second = tree.read(session.record).calls
        assert scripted.tokenizer.decode(first.sampled_ids).endswith("Observation:") and first.finish == "stop"
        assert second.cause is None and second.prompt_ids[:len(first.ids)] == first.ids
        rest = render(scripted.tokenizer, history)
        assert second.prompt_ids[len(first.ids):] == rest[-(len(second.prompt_ids) - len(first.ids)):]
        assert scripted.tokenizer.decode(second.prompt_ids[len(first.ids):]).startswith("<|im_end|>\n<|im_start|>user")


def test_stop_words_over_vllm_itself(real, connect, tiny):
    """Would catch a stop word whose tokens the next prompt holds, and the engine was not given: log-probabilities
    would be those behind another prompt; and a stop token of the harness's own that forks."""
    session = connect(real)
    client, history = connect.client(session), list(USER)
    for i in range(8):
        stop = {"stop": ["e", "a"]} if i % 2 else {"stop_token_ids": list(range(300, 9000))}
        text, history = say(client, history, max_tokens=20, **stop)
        history = [*history, {"role": "user", "content": f"{i}?"}]
    record = tree.read(session.record)
    assert [c.cause for c in record.calls] == [None] * 8 and len(tree.build(record).paths) == 1
    assert sum(c.finish == "stop" for c in record.calls) >= 6
    assert gaps(trainer(tiny), [record]).max() < 0.02


# ---- a tokenizer of another kind ----

@pytest.fixture(scope="module")
def spaced(tmp_path_factory):
    """As Mistral has it: a space is part of the token behind it, the first one of a text is lost, bytes fall back, and
    special tokens alone part the turns."""
    from tokenizers import Tokenizer, decoders, models, normalizers
    from transformers import PreTrainedTokenizerFast
    folder, template = make_model(tmp_path_factory.mktemp("model") / "spaced", 4096), "<|im_start|>".join(
        ("{% for m in messages %}", "{{ m.content }}<|im_end|>{% endfor %}", ""))
    names = ["<unk>", "<|im_start|>", "<|im_end|>", *(f"<0x{i:02X}>" for i in range(256)), "▁", *"abcdefghijklm"]
    inner = Tokenizer(models.BPE({n: i for i, n in enumerate(names)}, [], unk_token="<unk>", byte_fallback=True))
    inner.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    inner.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(),
                                       decoders.Strip(" ", 1, 0)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>", bos_token="<|im_start|>",
                                        eos_token="<|im_end|>", pad_token="<|im_end|>", chat_template=template)
    tokenizer.save_pretrained(folder)
    with proxy.Proxy(folder, max_model_len=1024, engine="scripted", engine_args=ENGINE) as p: yield p


def test_a_reply_is_told_as_behind_its_whole_prompt(spaced, scripted, connect):
    """Would catch a reply that loses its first space or gains half a character or what the user said, as its text is
    made behind the last tokens of a long prompt alone, wherever these begin; and vLLM's own fault, which begins a reply
    with the prompt if that ends in U+FFFD."""
    from tokenizers import decoders
    replies = [" a b", "a  b ", "é\U0001f642 c", "\n\n", "  "]
    for p in spaced, scripted:
        for content in "ab", "a\ufffd", "<|im_end|>" * 40, "\U0001f642" * 20, "x" * 60 + "é" * 9, " " * 40, "b\U0001f642" * 9:
            session = connect(p, replies)
            for i, reply in enumerate(replies):
                asked = [{"role": "user", "content": content * (i + 1)}]
                message, = told(CHAT, post(connect.client(session), CHAT, asked))
                call = tree.read(session.record).calls[i]
                stream = decoders.DecodeStream(ids=list(call.prompt_ids), skip_special_tokens=True)
                whole = "".join(stream.step(p.tokenizer._tokenizer, t) or "" for t in call.sampled_ids[:-1])
                if p is spaced and content[-1] == "\ufffd": assert content in whole and message["content"] == reply
                else: assert message.get("content", "") == whole and whole.lstrip(" ") == reply.lstrip(" ")
                if content == "ab": assert whole == (" " if p is spaced else "") + reply


HISTORY = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 3), st.lists(st.sampled_from(
    ["a", " ", "  b", "\n", "<|im_end|>", "<|im_end", "|>", "<|im_start|>", "é", "e\u0301", "\U0001f642", "\ufffd",
     "<|im_end|>\n<|im_start|>assistant\n"]), max_size=6)), min_size=1, max_size=8)


@pytest.mark.parametrize("kind", ["as Mistral", "as SmolLM2"])
def test_a_history_is_tokenised_as_a_whole(spaced, scripted, connect, kind):
    """Would catch token ids that are others, or stand elsewhere, since the beginning of a prompt was tokenised with an
    earlier one: histories that grow, fork, shrink, hold marks of turns of their own, or are too long."""
    p = {"as Mistral": spaced, "as SmolLM2": scripted}[kind]

    @example(steps=[(0, 0, ["a"]), (0, 1, ["a", "<|im_end", "a"])], length=0)   # one begins as the other's end of turn
    @example(steps=[(9, 0, ["a"]), (0, 0, ["a"])], length=3000)
    @given(steps=HISTORY, length=st.sampled_from([0, 3000]))
    @settings(max_examples=60, deadline=None)
    def check(steps, length):
        session, history = connect(p, lambda call: "fine"), list(USER)
        client = connect.client(session)
        for at, keep, pieces in steps:
            del history[max(len(history) - keep, 1):]
            history.append({"role": ["user", "assistant"][len(history) % 2], "content": "".join(pieces)})
            if at == 9:
                answer = post(client, CHAT, [*history, {"role": "user", "content": "x y " * length}, *history])
                assert answer.status_code == (400 if length else 200)
            assert post(client, CHAT, history).status_code == 200
            assert list(session.calls[-1].template_ids) == render(p.tokenizer, history)
    check()


@pytest.mark.parametrize("end, unk, more, kind", [
    ("<|end|>", None, [], {}), ("<|end|>", None, [], {"single_word": True}), ("##", None, [], {}),
    ("<|end|>", None, [], {"lstrip": True, "rstrip": True}), ("<|end|>", None, [], {"normalized": True}),
    ("<|end|>", "<|end|>", [], {}), ("<|end|>", None, ["a<|end|>a"], {})])
def test_ends_of_turn_of_other_kinds(end, unk, more, kind):
    """Would catch ids that are others since a prompt was cut at the text of an end of turn that is none there: inside a
    word, across or in another token, in what is not known; or that takes the spaces around it."""
    from tokenizers import AddedToken, Tokenizer, models
    from transformers import PreTrainedTokenizerFast
    token = AddedToken(end, special=True, **{"normalized": False} | kind)
    names = [*"abend<|>#. ", " <", *filter(None, [unk])]
    inner = Tokenizer(models.BPE({n: i for i, n in enumerate(names)}, [(" ", "<")], unk_token=unk))
    inner.add_special_tokens([token])
    inner.add_tokens([AddedToken(t, normalized=False) for t in ("b<|", *more)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token=token, unk_token=unk)
    encode = functools.partial(tokenizer.encode, add_special_tokens=False)

    async def tokenize(prompt, params): return {"prompt_token_ids": encode(prompt["prompt"])}
    wrapped = proxy.Proxy.tokenizing(SimpleNamespace(tokenizer=tokenizer), tokenize)
    params = SimpleNamespace(add_special_tokens=False, truncate_prompt_tokens=None, max_input_tokens=None)

    @example(edits=[(0, ["a <|end|>."]), (1, ["a"])])
    @example(edits=[(0, ["a<|end|>b"]), (1, ["a"])])
    @given(edits=st.lists(st.tuples(st.integers(0, 9), st.lists(st.sampled_from(
        [end, end[:1], end[-1:], "a", "b", ".", " ", "?", f"a{end}b", f" {end} "]), max_size=6)), max_size=6))
    @settings(max_examples=300, deadline=None)
    def check(edits):
        text, session = "", SimpleNamespace(rendered=("", array("i")))
        for back, pieces in edits:
            text = text[:max(len(text) - back, 0)] + "".join(pieces)
            call = contextvars.copy_context()
            call.run(proxy.CALL.set, SimpleNamespace(session=session))
            assert call.run(asyncio.run, wrapped({"prompt": text}, params))["prompt_token_ids"] == encode(text)
    check()


def test_after_a_prompt_that_was_too_long(spaced, scripted, connect):
    """Would catch prompts that silently lack their beginning: vLLM cuts one that is too long on the left before it
    refuses it, and what it cut is not what the harness's next prompt, compacted, begins with."""
    for p in spaced, scripted:
        statuses, history = [], [{"role": "system", "content": "a b " * 25}]
        for length in range(100, 1100):
            long = {"role": "user", "content": "c d " * length}
            if not 1000 < len(render(p.tokenizer, [*history, long])) < 1150: continue
            session = connect(p, lambda call: "fine")
            client = connect.client(session)
            statuses.append(post(client, CHAT, [*history, long]).status_code)
            assert post(client, CHAT, [*history, *USER]).status_code == 200
            assert list(session.calls[-1].template_ids) == render(p.tokenizer, [*history, *USER])
        assert {*statuses} == {200, 400}


# ---- thinking models ----

THINKING = """{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}{% endfor %}<|im_end|>
{% endif %}
{%- set ns = namespace(last=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}
    {%- if m.role == 'assistant' %}
        {%- set content = m.content if m.content is string else '' %}
        {%- set thought = m.reasoning_content if m.reasoning_content is string else '' %}
        {%- if not thought and '</think>' in content %}
            {%- set thought = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if loop.index0 > ns.last and (loop.last or thought) %}
            {{- '<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}
        {%- else %}{{ content }}{% endif %}
        {%- for c in m.tool_calls or [] %}
            {%- if content or not loop.first %}{{ '\\n' }}{% endif %}
            {{- '<tool_call>\\n{"name": "' + c.function.name + '", "arguments": ' }}
            {{- c.function.arguments if c.function.arguments is string else c.function.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}{{ '<|im_end|>\\n' }}
    {%- elif m.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + m.content + '\\n</tool_response><|im_end|>\\n' }}
    {%- else %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""         # as Qwen3's


@pytest.fixture(scope="module")
def thinking(tmp_path_factory):
    folder = make_model(tmp_path_factory.mktemp("model") / "thinking", 4096, THINKING, ["<think>", "</think>"])
    with proxy.Proxy(folder, max_model_len=1024, engine="scripted",
                     engine_args=[*ENGINE, "--reasoning-parser", "qwen3"]) as p: yield p


def echoed(path, items, how):
    """A reply as a harness sends it back: its thought as it is, trimmed, dropped, or under the older name."""
    new = {"echoed": lambda x: x, "trimmed": str.strip}.get(how)
    if path == MESSAGES:
        blocks = [b if b["type"] != "thinking" else b | {"thinking": new(b["thinking"])} for b in items[0]["content"]
                  if new or b["type"] != "thinking"]
        return [{"role": "assistant", "content": blocks}]
    if path == RESPONSES:
        change = lambda i: i if i["type"] != "reasoning" else i | {"content": [
            c | {"text": new(c["text"])} for c in i["content"]]}
        return [change(i) for i in items if new or i["type"] != "reasoning"]
    message = dict(items[0])
    thought = message.pop("reasoning")
    return [message | ({"reasoning_content": new(thought)} if new else {})]


@pytest.mark.parametrize("mode", ["off", "canonical", "full"])
@pytest.mark.parametrize("how", ["echoed", "trimmed", "dropped"])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [CHAT, MESSAGES, RESPONSES])
def test_thoughts_through_the_server(thinking, connect, path, how, stream, mode):
    """Would catch a thought that a protocol's conversion loses, or changes beyond what the graft knows: behind a tool's
    result the template keeps it, so what is echoed or trimmed is one chain and what is dropped is typed; behind a new
    message of the user the template drops it. `full` brings it back in either case."""
    thinking.mode = mode
    session = connect(thinking, ["<think>\n I look. \n</think>\n\nWell.\n" + TOOL_CALL,
                                 "<think>\nhm\n</think>\n\nDone.", "<think>\n\n</think>\n\nBye."])
    client, history, tools = connect.client(session), list(USER), {"tools": TOOLS_IN[path], "stream": stream}
    with engine_prompts(thinking) as given:
        items = told(path, post(client, path, history, **tools))
        assert "I look." in json.dumps(items) and "think>" not in json.dumps(items)
        history += echoed(path, items, how)
        call = next((b for b in items[0].get("content") or () if path == MESSAGES and b["type"] == "tool_use"), None)
        if path == CHAT:
            history += [{"role": "tool", "tool_call_id": items[0]["tool_calls"][0]["id"], "content": "a.txt"}]
        elif path == MESSAGES:
            history += [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": call["id"],
                                                      "content": "a.txt"}]}]
        else: history += [{"type": "function_call_output", "call_id": items[-1]["call_id"], "output": "a.txt"}]
        answer = post(client, path, history, **tools)
        history += [*echoed(path, told(path, answer), how), {"role": "user", "content": "And now?"}]
        assert post(client, path, history, **tools).status_code == 200
    record = tree.read(session.record)
    assert [c.prompt_ids for c in record.calls] == given
    first, second, third = record.calls
    chained = lambda a, b: b.prompt_ids[:len(a.ids)] == a.ids
    assert chained(first, second) == (mode == "full" or mode == "canonical" and how != "dropped")
    fork = "thinking_dropped" if how == "dropped" else "tool_call_rewritten"     # it is spelt as no client does
    assert second.cause == (None if chained(first, second) else fork)
    assert chained(second, third) == (mode == "full")
    assert third.cause == (None if mode == "full" else "thinking_dropped")
    assert ("I look." in thinking.tokenizer.decode(third.prompt_ids)) == (mode == "full")


def test_a_forged_request_with_tools_where_thoughts_are_stripped(thinking, connect):
    """Would catch an agent that sends a request with tools from inside the sandbox of a harness that has none: where
    the template drops old thoughts no prompt continues an earlier one's tokens, and all its calls were titles."""
    thinking.mode = "canonical"
    session = connect(thinking, ["<think>\nhm\n</think>\n\nls", "forged"] + ["<think>\nhm\n</think>\n\ncat"] * 3)
    client, history = connect.client(session), list(USER)
    for i in range(4):
        history += told(CHAT, post(client, CHAT, history))
        history += [{"role": "user", "content": f"result {i}"}]
        if i == 0: post(client, CHAT, [{"role": "user", "content": "forged"}], tools=TOOLS)
    assert [c.kind for c in tree.read(session.record).calls] == ["main"] * 5


# ---- what a harness asks for ----

@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path, asked", [
    (CHAT, {"parallel_tool_calls": False}), (RESPONSES, {"parallel_tool_calls": False}),
    (MESSAGES, {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}})])
def test_several_calls_where_one_was_asked_for(scripted, connect, path, asked, stream):
    """Would catch a tool call that the policy sampled and the harness was never told: the next prompt lacks it, a fork
    that reads as the harness's doing."""
    session = connect(scripted, [f"{TOOL_CALL}\n{TOOL_CALL.replace('ls', 'cat')}", "on"])
    client, history = connect.client(session), list(USER)
    items = told(path, post(client, path, history, tools=TOOLS_IN[path], stream=stream, **asked))
    assert json.dumps(items).count("limit_s") == 2
    ids = [x.get("call_id") or x.get("id") for x in items[0].get("tool_calls") or items[0].get("content") or items]
    answers = {CHAT: [{"role": "tool", "tool_call_id": i, "content": "x"} for i in ids],
               RESPONSES: [{"type": "function_call_output", "call_id": i, "output": "x"} for i in ids],
               MESSAGES: [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": i, "content": "x"}
                                                       for i in ids]}]}[path]
    assert post(client, path, history + items + answers, tools=TOOLS_IN[path], **asked).status_code == 200
    first, second = tree.read(session.record).calls
    assert second.cause is None and second.prompt_ids[:len(first.ids)] == first.ids
    assert first.sampling["forced"] == "parallel_tool_calls: false"


def test_what_a_session_remembers_is_bounded(scripted, connect):
    """Would catch an agent that fills the trainer's memory with what no template renders: ids of 30 MB, in calls of a
    few tokens."""
    session, size = connect(scripted, ["fine"] * 9), 30 * 2**20
    for i in range(4):
        history = [*USER, {"role": "tool", "tool_call_id": f"{i}" * size, "content": "a.txt"}]
        assert ask(connect.client(session), history).status_code == 200
    assert sum(len(m.get("tool_call_id", "")) for seen in session.rows.values() for m, _ in seen) <= 2 * size
    assert session.record.stat().st_size < size


# ---- connections ----

def request(body, head=b"", version=b"1.1", has_length=True):
    length = b"Content-Length: %d\r\n" % len(body) if has_length else b""
    return b"POST %s HTTP/%s\r\nHost: x\r\n%s%s\r\n%s" % (CHAT.encode(), version, head, length, body)


BODY = json.dumps({"model": "policy", "messages": USER, "max_tokens": 40}).encode()
CHUNKED = b"Transfer-Encoding: chunked\r\n"
CHUNKS = b"".join(b"%x\r\n%s\r\n" % (len(c), c) for c in (BODY[:9], BODY[9:], b""))


@pytest.mark.parametrize("sent, status", [
    (request(BODY, version=b"1.0"), 200), (request(CHUNKS, CHUNKED, has_length=False), 200),
    (request(BODY, b"Connection: close\r\n"), 200), (request(BODY, b"X: a\r\nX: b\r\nHost: y\r\n"), 200),
    (request(BODY, b"Content-Type: text/plain\r\n"), 200), (request(BODY.decode().encode("utf-16")), 200),
    (request(gzip.compress(BODY), b"Content-Encoding: gzip\r\n"), 400), (request(BODY, CHUNKED), 400),
    (request(BODY, b"Content-Length: 5\r\n"), 400), (b"\x16\x03\x01\x02\x00\x01" + b"x" * 200, 400),
    (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400), (b"PUT / HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n", 404)])
def test_odd_requests(scripted, connect, sent, status):
    """Would catch a client of another kind that is not answered, or whose request ends the server or hides a second
    one."""
    session = connect(scripted, ["fine"] * 9)
    with raw_connection(session) as raw:
        raw.sendall(sent)
        got = b""
        while b"\r\n\r\n" not in got: got += raw.recv(65536)
    assert int(got.split()[1]) == status, got
    assert len(session.seen) == (status == 200)
    assert ask(connect.client(session)).status_code == 200


def test_a_client_that_asks_before_it_sends(scripted, connect):
    """Would catch a body that is never sent since nobody asked for it, of a request that is served and of one that is
    not."""
    session = connect(scripted, ["fine"])
    with raw_connection(session) as raw:
        raw.sendall(request(b"", b"Expect: 100-continue\r\nContent-Length: %d\r\n" % len(BODY), has_length=False))
        assert raw.recv(999).startswith(b"HTTP/1.1 100")
        raw.sendall(BODY)
        assert raw.recv(65536).startswith(b"HTTP/1.1 200")


def test_a_client_that_closes_its_sending_side_has_gone(scripted, connect):
    """Would catch a call that goes on for ever for a client that has closed, which looks like one that only sends no
    more."""
    session, scripted.grace_s = connect(scripted, ["lost", "fine"]), 0.2
    try:
        with raw_connection(session) as raw, slow(scripted):
            raw.sendall(request(BODY))
            until(lambda: session.seen)
            raw.shutdown(socket.SHUT_WR)
            until(lambda: [c.finish for c in session.calls] == ["abort"])
    finally: scripted.grace_s = 30.
    assert ask(connect.client(session)).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_at_any_moment_and_returns(real, connect, stream):
    """Would catch a moment (read, rendered, queued, sampled, told) at which a client that hangs up and asks again, with
    its keys in another order, is not answered, is answered twice, or gets an error. Only a reply that had gone out
    whole may be sampled anew."""
    real.grace_s, body = 20., json.loads(BODY) | {"stream": stream}
    again = {k: body[k] for k in reversed(body)} | {"messages": [dict(reversed(m.items())) for m in USER]}
    for i in range(25):
        session = connect(real)
        with raw_connection(session) as raw:
            raw.sendall(request(json.dumps(body).encode()))
            time.sleep(0.008 * i)
        assert connect.client(session).post(CHAT, json=again).status_code == 200
        calls = tree.read(session.record).calls
        assert [c.cause for c in calls] == [None, "retry"][:len(calls)] and not session.orphans
        assert all(c.finish in ("stop", "length") and c.kind == "main" for c in calls)


def test_an_answer_that_cannot_be_told_is_no_failure_of_the_engine(scripted, connect, monkeypatch):
    """Would catch a policy whose words, or an agent whose parameters, break the making of an answer, here the parser,
    and so take back a reward of 0: a status of 5xx in the last call is ours, and the rollout has no reward."""
    def broken(*args, **kw): raise RuntimeError("cannot be told")
    monkeypatch.setattr(scripted.uvicorn.app.app.state.openai_serving_chat.parser_cls, "parse", broken)
    session = connect(scripted, ["fine"])
    assert ask(connect.client(session), tools=TOOLS).status_code == 400
    assert session.refused.startswith("status 4") and [c.finish for c in session.calls] == ["stop"]
