"""What a prompt goes on from: pure functions over what a session's calls said and what a new request shows.

1. `graft`: the prompt that the policy gets, from the chat template's rendering and the recorded calls.
2. `kind_of`, `quotes`: main, subagent, side or compaction, from structure; harness headers come first.
3. `cause_of`: why a call does not simply go on from an earlier one. A reply came back otherwise: retokenised (the same
   text), tool_call_rewritten, thinking_dropped, history_edited. What stands before it changed: system_changed,
   tools_changed, nonce (numbers alone), volatile_tail (a last message is taken away and comes back at the new end).
   The same prompt again: retry. Another history: compaction, subagent, side. unknown: a fault here, please report it.
Messages are vLLM's, in the form of chat completions, for all protocols. Nothing here imports vLLM."""
import hashlib, itertools, json, re

import tree

GRAFTS = "off", "exact", "canonical", "full"
# of a turn that came back to what was sampled; the first four are what the four kinds of graft take for the same
RELATIONS = "same", "retokenised", "respelt", "thinking_dropped", "tool_call_rewritten", "history_edited", None


def meaning(text: str) -> str:
    """A turn's text without what harnesses lose: outer white space, that around the marks of a thought, and the
    spacing, escapes, key order and 1.0 for 1 of JSON in tool calls. Linear: a policy may say a mark or a line feed
    30,000 times, and no pattern may then try each of them against all behind it."""
    def spelt(call):
        number = lambda x: int(float(x)) if float(x).is_integer() else float(x)
        try: return json.dumps(json.loads(call, parse_float=number), sort_keys=True)
        except (ValueError, RecursionError): return call.strip()
    for mark in ("<think>", "</think>"): text = mark.join(map(str.strip, text.split(mark)))
    first, *rest = text.split("<tool_call>")
    parts = [first.strip()]
    for call, end, after in (piece.partition("</tool_call>") for piece in rest):
        parts.append((spelt(call) if end else call.strip()) + end + after.strip())
    return "<tool_call>".join(parts)


def graft(template_ids: list, calls: list, continues: dict, eos_ids: set, decode, mode: str, told={}) -> tuple:
    """-> (prompt ids, continued call or None, cause or None): generate from what was sampled, where the text came back
    unchanged.

    Walks the session's calls turn by turn. A call adds harness text to what it continues (`continues`: id -> id or
    None); where that text stands next in this rendering, and the turn behind it, up to the first end-of-turn token,
    says what the call sampled, the walk goes on with the calls that continue it. Saying the same is: the same tokens
    (`off`), the same text (`exact`), the same meaning (`canonical`), or that but for a thought that is missing
    (`full`). The prompt is then the recorded ids of the deepest call reached, and behind them the rest of the
    rendering. The cause says what became of the nearest turn that differs; it is None where nothing else continues the
    call. A reply that begins with white space may have merged with the last token of its prompt: the two are compared
    as one text then. told: id -> what the harness was told of a reply whose end a stop word cut off; it may come back
    with or without that end, which is what was sampled either way."""
    children, by_id = {}, {c.id: c for c in calls}
    for c in calls: children.setdefault(continues.get(c.id), []).append(c)

    def taken(c):
        """How many of the prompt's ids are those of the call that it continues (all, or all but the end of turn)."""
        if continues.get(c.id) is None: return 0
        parent = by_id[continues[c.id]]
        n = len(parent.prompt_ids) + len(parent.sampled_ids)
        return n - (c.prompt_ids[n - 1:n] != (parent.sampled_ids or parent.prompt_ids)[-1:])

    def is_near(c, start, own):
        """Do the last tokens before the opening of its turn stand here? A history that is another's costs no more."""
        at = next((i for i in range(len(c.prompt_ids), max(len(c.prompt_ids) - 64, own), -1)
                   if c.prompt_ids[i - 1] in eos_ids), own)
        first = max(at - 16, own)
        return template_ids[start + first - own:start + at - own] == c.prompt_ids[first:at]

    best, position, keep, nearest, cause = None, 0, 0, -1, None
    # most renderings begin with that of the latest call: what came before it need not be compared again. The last
    # tokens alone tell most others apart
    begins = lambda ids: (template_ids[len(ids) - 16:len(ids)] == ids[-16:]
                          and tree.lcp(template_ids, ids) == len(ids))
    known = next((c for c in reversed(calls) if begins(c.template_ids)), None)
    if known is not None:
        best, keep = by_id.get(continues.get(known.id)), taken(known)
        position = len(known.template_ids) - len(known.prompt_ids) + keep
    frontier = [(c, position) for c in children.get(best and best.id, ())]
    while frontier:
        c, start = frontier.pop()
        own = taken(c)
        if not is_near(c, start, own): continue
        added = c.prompt_ids[own:]
        at = start + tree.lcp(template_ids[start:start + len(added)], added)
        if at == len(template_ids) == start + len(added): return c.prompt_ids[:], None, "retry"
        opening = added[at - start:]                        # empty, but for a merged token
        if eos_ids & set(opening): continue
        end = next((i for i in range(at, len(template_ids)) if template_ids[i] in eos_ids), len(template_ids))
        has_end = bool(c.sampled_ids) and c.sampled_ids[-1] in eos_ids
        said, turn = c.sampled_ids[:-1] if has_end else c.sampled_ids, template_ids[at:end]
        relation = "same" if turn == said and not opening else compare(
            decode(opening), decode(turn), decode(opening + said))
        if relation != "same" and c.id in told: relation = min(
            relation, compare(decode(opening), decode(turn), decode(opening) + told[c.id]), key=RELATIONS.index)
        if relation is None: continue                       # another role's turn
        if RELATIONS.index(relation) <= GRAFTS.index(mode):
            is_open = has_end and end == len(template_ids)  # the end of turn that was sampled is not there yet
            end += has_end and not is_open and template_ids[end] == c.sampled_ids[-1]      # another end stays behind it
            if end > position: best, position, keep = c, end, len(c.prompt_ids) + len(c.sampled_ids) - is_open
            frontier += [(d, end) for d in children.get(c.id, ())]
        elif at > nearest:
            nearest, cause = at, {"respelt": "tool_call_rewritten" if "<tool_call>" in decode(said)
                                  else "history_edited"}.get(relation, relation)
    if best is None: return template_ids, None, cause or ("unknown" if calls else None)
    is_branch = any(continues.get(c.id) == best.id for c in calls)
    prompt_ids = best.prompt_ids + best.sampled_ids[:keep - len(best.prompt_ids)]
    prompt_ids += template_ids[position:]
    return prompt_ids, best, (cause or "history_edited") if is_branch else None


def compare(opening: str, got: str, meant: str):
    """How a turn that came back relates to what was sampled behind `opening`: retokenised (same text), respelt (same
    meaning), thinking_dropped, tool_call_rewritten, history_edited; None: no turn of the policy."""
    plain = lambda text: meaning(text.split("</think>", 1)[-1])
    is_turn = got.startswith(opening)
    if got == meant: return "retokenised"
    if is_turn and meaning(got[len(opening):]) == meaning(meant[len(opening):]): return "respelt"
    if "</think>" in meant and plain(got) == plain(meant): return "thinking_dropped"
    if is_turn: return "tool_call_rewritten" if "<tool_call>" in meant else "history_edited"


# --- kinds and causes: calls are proxy.Pending, `seen` those of a session in order of arrival -------------------------
def text_of(message) -> str:
    content = message.get("content")
    if isinstance(content, list): content = "\n".join(str(p.get("text") or "") for p in content if isinstance(p, dict))
    return content if isinstance(content, str) else ""


def digest(x) -> str:
    return hashlib.sha256(json.dumps(x, sort_keys=True, default=str).encode()).hexdigest()[:16]


def outline(messages, known: dict) -> list:
    """(role, hash, hash without digits, hash of the first line) of each message. known: place in the list -> the
    messages seen there and their rows, new ones are entered: to compare texts is faster by far than to hash them."""
    def row(i, m):
        seen = known.setdefault(i, [])
        for old, row in reversed(seen):
            if old == m: return row
        role, text = m.get("role"), text_of(m)
        row = (role, digest(m), hash((role, re.sub(r"[0-9a-f]{6,}|\d+", "0", text))), hash(text.partition("\n")[0]))
        seen.append((m, row))
        return row
    return [row(i, m) for i, m in enumerate(messages)]


TAIL = "<<<BEGIN_OPENCLAW_INTERNAL_CONTEXT>>>"


def with_tails(messages: list, tails: dict, known: dict) -> list:
    """OpenClaw ends each request with a message that the next one lacks. Here each of them stays where it once stood,
    so that the history only grows. tails: hash of the messages before it -> tail; the new one is entered. known: as for
    `outline`."""
    history, last = (messages[:-1], messages[-1]) if messages else ([], {})
    is_tail = last.get("role") == "user" and text_of(last).startswith(TAIL) and len(text_of(last)) < 100_000    # kept
    if not is_tail: history = messages
    out, before = [], ""
    for m, row in zip(history, outline(history, known)):
        before = digest([before, row])
        out += [m, tails[before]] if before in tails and m is not history[-1] else [m]
    if is_tail: tails[before] = last
    return out + [last] * is_tail


def quotes(messages: list, call, earlier, reply) -> bool:
    """Does this later, shorter history hold an earlier reply outside the policy's own turns, in a message that the
    policy had not seen when it said so? Then the reply was a summary. All its longer lines must stand there: one of
    them may well come back in what a command printed. reply: call -> text, None where its sampling failed."""
    if earlier.kind != "side" and (earlier.kind != "main" or len(messages) > len(earlier.outline)): return False
    if (text := reply(earlier)) is None: return False
    text = re.sub("</?summary>", "", text.split("</analysis>")[-1]).strip()
    lines = [line.strip() for line in text.splitlines() if len(line.strip()) >= 20]
    seen = {row[1] for row in earlier.outline}
    new = [(row[0], text_of(m)) for m, row in zip(messages, call.outline) if row[1] not in seen]
    return any(text == told.strip() if role == "assistant" and earlier.kind == "side" else
               lines and role not in ("assistant", "tool") and all(line in told for line in lines)
               for role, told in new)


# words by which a harness asks for a summary of the history
SUMMARISE = re.compile("CONTEXT CHECKPOINT COMPACTION|context summarization a(?:gent|ssistant)|"
                       "component that summarizes|maintaining a context-aware state")


def asks_for_summary(text: str) -> bool:
    return bool(SUMMARISE.search(text)) or "<summary>" in text.partition("<analysis>")[2]


def is_next(before: list, now: list) -> bool:
    """Outlines: does a history hold an earlier one, numbers apart, and then a turn of the policy, whatever became of
    it?"""
    plain = lambda rows: [row[2] for row in rows]
    return plain(now[:len(before)]) == plain(before) and [row[0] for row in now[len(before):][:1]] == ["assistant"]


def kind_of(call, session, messages: list) -> str:
    """The kind of a call that is about to start. What is called main and is not costs little; what is main and is
    called otherwise is not trained: in doubt, main. From structure:
    side         no tools, although the session's main calls have some; one that goes on from a call without tools is
                 main, and so is that call (`Session.settle`)
    compaction   the same behind the history of a main call, and later calls leave it out: one that goes on from it, or
                 the session's end (`Session.settle`), makes it a last word without tools, which is main
    subagent     its system prompt and its first user message are both new (digits apart, and not right after a
                 compaction), or are those of an earlier subagent call
    compaction   later calls quote it (`quotes`), or it goes on from a call that asked for a summary and was cut off
    and before that what harnesses say of themselves: headers (subagent) and the words by which they ask."""
    who = lambda s: tuple(plain for _, plain in s.openings)
    roles = lambda s: [row[0] for row in s.outline]
    mains = [s for s in session.seen if s.kind == "main"]
    if call.is_labelled: return "subagent"
    if not mains: return "main"
    if any(s.is_asked and call.outline[:len(s.outline)] == s.outline for s in session.seen):
        call.is_asked = True
        return "compaction"
    has_tools = any(s.num_tools for s in mains)
    if has_tools and not call.num_tools:
        call.is_asked = any(asks_for_summary(text_of(m)) for m in messages if m.get("role") in ("system", "developer")
                            or m is messages[-1] and m.get("role") == "user")
        before = next((s for s in reversed(session.seen) if s.kind in ("main", "side") and not s.num_tools
                       and (s.id == call.continues or is_next(s.outline, call.outline))), None)
        if before and not call.is_asked:                    # others' tools say nothing of a harness that has none
            if before.kind == "side": session.retype(before, "main")
            return "main"
        is_behind = any("assistant" in roles(s) and call.outline[:len(s.outline)] == s.outline for s in mains)
        return "compaction" if call.is_asked or is_behind else "side"
    openings = [who(s) for s in mains]
    is_new = all(a not in known for a, known in zip(who(call), zip(*openings)))
    if call.num_tools and not has_tools:
        if who(call)[1] != openings[0][1] and not any("assistant" in roles(s) for s in mains):  # a title came first
            for s in mains: session.retype(s, "side")
        return "main"
    if who(call) not in openings and who(call) in [who(s) for s in session.seen if s.kind == "subagent"]:
        return "subagent"
    latest = next(s.kind for s in reversed(session.seen) if s.kind in ("main", "compaction"))
    if has_tools and is_new and latest == "main": return "subagent"
    call.is_asked = ("assistant" in roles(call) and messages[-1].get("role") == "user"
                     and latest == "main"                   # behind a compaction these words are a quotation
                     and asks_for_summary(text_of(messages[-1])))
    return "compaction" if call.is_asked else "main"


def cause_of(call, seen: list, cause: str):
    """Why a call does not simply go on from the one before it: what the graft saw, made precise by the messages."""
    start = lambda s: [row[2] for row in itertools.takewhile(lambda row: row[0] != "assistant", s.outline)]
    alike = [s for s in seen if s.kind == call.kind and (call.kind != "subagent" or start(s) == start(call))]
    if call.kind in ("side", "compaction") or not alike and call.kind == "subagent":
        return call.kind if call.continues is None or cause else None
    if not alike: return None                               # the first main call
    if call.kind == "main" and any(s.kind == "compaction" for s in seen[seen.index(alike[-1]):]) and cause:
        return "compaction"
    if cause not in ("unknown", "history_edited"): return cause
    before = alike[-1].outline
    changed = [(a, b) for a, b in zip(before, call.outline) if a[1] != b[1]]
    if changed and len(call.outline) >= len(before) and all(a[2] == b[2] for a, b in changed): return "nonce"
    # the reply stands in the place of its last message, and one of that role and first line is the last again
    *history, (role, _, _, line) = before or [(None,) * 4]
    now = call.outline
    if now[:len(history)] == history and [role_ for role_, *_ in now[len(history):][:1]] == ["assistant"] and (
            role, line) == (now[-1][0], now[-1][3]): return "volatile_tail"
    if cause == "history_edited": return cause
    return ("tools_changed" if all(s.tools != call.tools for s in alike) else
            "system_changed" if all(s.openings[0][0] != call.openings[0][0] for s in alike) else "history_edited")
