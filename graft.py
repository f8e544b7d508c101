"""What a prompt goes on from: pure functions over what a session's calls said and what a new request shows.

1. `graft`: the prompt that the policy gets, from the chat template's rendering and the recorded calls.
2. `kind_of`, `quotes`: main, subagent, side or compaction, from structure; harness headers come first.
3. `cause_of`: why a call does not simply go on from an earlier one (the fork causes that the README lists).
Messages are vLLM's, in the form of chat completions, for all protocols. Nothing here imports vLLM."""
import hashlib, json, re

import tree

GRAFTS = "off", "exact", "canonical", "full"
THOUGHT = re.compile(r"(?s)^\s*(<think>)?.*?</think>")


def meaning(text: str) -> str:
    """A turn's text without what harnesses lose: outer white space, that around the end of a thought, and the spacing,
    escapes and key order of JSON in tool calls."""
    def call(match):
        try: return json.dumps(json.loads(match[1]), sort_keys=True)
        except (ValueError, RecursionError): return match[1]
    text = re.sub(r"\s*</think>\s*", "</think>", text)
    return re.sub(r"(?s)\s*<tool_call>(.*?)</tool_call>\s*", lambda m: f"<tool_call>{call(m)}</tool_call>",
                  text).strip()


def graft(template_ids: list, calls: list, continues: dict, eos_ids: set, decode, mode: str) -> tuple:
    """-> (prompt ids, continued call or None, cause or None): generate from what was sampled, where the text came back
    unchanged.

    Walks the session's calls turn by turn. A call adds harness text to what it continues (`continues`: id -> id or
    None); where that text stands next in this rendering, and the turn behind it, up to the first end-of-turn token,
    says what the call sampled, the walk goes on with the calls that continue it. Saying the same is: the same tokens
    (`off`), the same text (`exact`), the same meaning (`canonical`), or that but for a thought that is missing
    (`full`). The prompt is then the recorded ids of the deepest call reached, and behind them the rest of the
    rendering. The cause says what became of the nearest turn that differs; it is None where nothing else continues the
    call. A reply that begins with white space may have merged with the last token of its prompt: the two are compared
    as one text then."""
    children, by_id = {}, {c.id: c for c in calls}
    for c in calls: children.setdefault(continues.get(c.id), []).append(c)

    def taken(c):
        """How many of the prompt's ids are those of the call that it continues (all, or all but the end of turn)."""
        if continues.get(c.id) is None: return 0
        ids = by_id[continues[c.id]].ids
        return len(ids) - (c.prompt_ids[len(ids) - 1:len(ids)] != ids[-1:])

    best, position, keep, nearest, cause = None, 0, 0, -1, None
    # most renderings begin with that of the latest call: what came before it need not be compared again
    known = max((c for c in calls if template_ids[:len(c.template_ids)] == c.template_ids),
                key=lambda c: (len(c.template_ids), c.id), default=None)
    if known is not None:
        best, keep = by_id.get(continues.get(known.id)), taken(known)
        position = len(known.template_ids) - len(known.prompt_ids) + keep
    frontier = [(c, position) for c in children.get(best and best.id, ())]
    while frontier:
        c, start = frontier.pop()
        added = c.prompt_ids[taken(c):]
        at = start + tree.lcp(template_ids[start:start + len(added)], added)
        if at == len(template_ids) == start + len(added): return c.prompt_ids, None, "retry"
        opening = added[at - start:]                        # empty, but for a merged token
        if eos_ids & set(opening): continue
        end = next((i for i in range(at, len(template_ids)) if template_ids[i] in eos_ids), len(template_ids))
        has_end = bool(c.sampled_ids) and c.sampled_ids[-1] in eos_ids
        said, turn = c.sampled_ids[:-1] if has_end else c.sampled_ids, template_ids[at:end]
        relation = "same" if turn == said and not opening else compare(
            decode(opening), decode(turn), decode(opening + said))
        if relation is None: continue                       # another role's turn
        reach = {"same": 0, "retokenised": 1, "respelt": 2, "thinking_dropped": 3}.get(relation, 4)
        if reach <= GRAFTS.index(mode):
            is_open = has_end and end == len(template_ids)  # the end of turn that was sampled is not there yet
            end += has_end and not is_open
            if end > position: best, position, keep = c, end, len(c.ids) - is_open
            frontier += [(d, end) for d in children.get(c.id, ())]
        elif at > nearest:
            nearest, cause = at, {"respelt": "tool_call_rewritten" if "<tool_call>" in decode(said)
                                  else "history_edited"}.get(relation, relation)
    if best is None: return template_ids, None, cause or ("unknown" if calls else None)
    is_branch = any(continues.get(c.id) == best.id for c in calls)
    return best.ids[:keep] + template_ids[position:], best, (cause or "history_edited") if is_branch else None


def compare(opening: str, got: str, meant: str):
    """How a turn that came back relates to what was sampled behind `opening`: retokenised (same text), respelt (same
    meaning), thinking_dropped, tool_call_rewritten, history_edited; None: no turn of the policy."""
    plain = lambda text: meaning(THOUGHT.sub("", text, count=1))
    is_turn = got.startswith(opening)
    if got == meant: return "retokenised"
    if is_turn and meaning(got[len(opening):]) == meaning(meant[len(opening):]): return "respelt"
    if "</think>" in meant and plain(got) == plain(meant): return "thinking_dropped"
    if is_turn: return "tool_call_rewritten" if "<tool_call>" in meant else "history_edited"


# --- kinds and causes: calls are proxy.Pending, `seen` those of a session in order of arrival -------------------------
def text_of(message) -> str:
    content = message.get("content") if isinstance(message, dict) else getattr(message, "content", None)
    if isinstance(content, list): content = "\n".join(p.get("text") or "" for p in content if isinstance(p, dict))
    return content if isinstance(content, str) else ""


def role_of(message) -> str:
    return message.get("role") if isinstance(message, dict) else getattr(message, "role", None)


def digest(x) -> str:
    return hashlib.sha256(json.dumps(x, sort_keys=True, default=str).encode()).hexdigest()[:16]


def outline(messages) -> list:
    plain = lambda m: m if isinstance(m, dict) else getattr(m, "__dict__", str(m))
    def row(m):
        text = re.sub(r"[0-9a-f]{6,}|\d+", "0", text_of(m))
        return role_of(m), digest(plain(m)), digest([role_of(m), text])
    return [row(m) for m in messages]


TAIL = "<<<BEGIN_OPENCLAW_INTERNAL_CONTEXT>>>"


def with_tails(messages: list, tails: dict) -> list:
    """OpenClaw ends each request with a message that the next one lacks. Here each of them stays where it once stood,
    so that the history only grows. tails: hash of the messages before it -> tail; the new one is entered."""
    history, last = (messages[:-1], messages[-1]) if messages else ([], {})
    is_tail = role_of(last) == "user" and text_of(last).startswith(TAIL)
    if not is_tail: history = messages
    out, before = [], ""
    for m, row in zip(history, outline(history)):
        before = digest([before, row])
        out += [m, tails[before]] if before in tails and m is not history[-1] else [m]
    if is_tail: tails[before] = last
    return out + [last] * is_tail


def quotes(messages: list, call, reply: str) -> bool:
    """Does a later, shorter history hold this reply outside the policy's own turns? Then the reply was a summary."""
    if call.kind != "side" and (call.kind != "main" or len(messages) > len(call.outline)): return False
    reply = re.sub(r"(?s)<analysis>.*?</analysis>|</?summary>", "", reply).strip()
    mark = max(reply.splitlines(), key=len, default="").strip()
    return any(len(mark) >= 20 and mark in text_of(m) if role_of(m) != "assistant" else
               call.kind == "side" and reply == text_of(m).strip() for m in messages)


# words by which a harness asks for a summary of the history
SUMMARISE = re.compile(r"(?s)<analysis>.*<summary>|CONTEXT CHECKPOINT COMPACTION|context summarization agent|"
                       "component that summarizes|maintaining a context-aware state")


def kind_of(call, session, messages: list) -> str:
    """The kind of a call that is about to start. From structure:
    side         no tools, although the session's main calls have some
    compaction   the same, behind the history of a main call; later calls show others (`quotes`)
    subagent     its system prompt and its first user message both are new, or are those of an earlier subagent call
    and before and after that what harnesses say of themselves: headers (subagent) and SUMMARISE."""
    who = lambda s: (s.opening(("system", "developer")), s.opening(("user",)))
    mains = [s for s in session.seen if s.kind == "main"]
    if call.is_labelled: return "subagent"
    if not mains: return "main"
    if any(s.num_tools for s in mains) and not call.num_tools:
        goes_on = any("assistant" in [row[0] for row in s.outline] and call.outline[:len(s.outline)] == s.outline
                      for s in mains)
        asked = [text_of(m) for m in messages if role_of(m) in ("system", "developer")] + [text_of(messages[-1])]
        return "compaction" if goes_on or any(map(SUMMARISE.search, asked)) else "side"
    if call.num_tools and not mains[0].num_tools and who(call)[1] != who(mains[0])[1]:    # a title came first
        for s in mains: session.retype(s, "side")
        return "main"
    if who(call) in [who(s) for s in session.seen if s.kind == "subagent"]: return "subagent"
    if call.num_tools and all(a != b for a, b in zip(who(call), who(mains[0]))): return "subagent"
    is_asked = "assistant" in [row[0] for row in call.outline] and SUMMARISE.search(text_of(messages[-1]))
    return "compaction" if is_asked else "main"


def cause_of(call, seen: list, cause: str):
    """Why a call does not simply go on from the one before it: what the graft saw, made precise by the messages."""
    alike = [s for s in seen if s.kind == call.kind]
    if call.kind in ("side", "compaction") or not alike and call.kind == "subagent":
        return call.kind if call.continues is None else cause
    if not alike: return None                               # the first main call
    if call.kind == "main" and any(s.kind == "compaction" for s in seen[seen.index(alike[-1]):]) and cause:
        return "compaction"
    if cause not in ("unknown", "history_edited"): return cause
    changed = [(a, b) for a, b in zip(alike[-1].outline, call.outline) if a[1] != b[1]]
    if changed and len(call.outline) >= len(alike[-1].outline) and all(a[2] == b[2] for a, b in changed): return "nonce"
    if cause == "history_edited": return cause
    system = lambda s: s.opening(("system", "developer"))
    return ("tools_changed" if all(s.tools != call.tools for s in alike) else
            "system_changed" if all(system(s) != system(call) for s in alike) else "history_edited")
