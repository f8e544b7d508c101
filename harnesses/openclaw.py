"""OpenClaw 2026.9.6, on Node: chat completions, streamed, about 10k tokens of prompt, 12 tools; up to 1.5 GB of memory.

Quirks: 14 to 55 s to its first request; each request ends with a user message of internal context that is not kept, so
that every turn forks; `_` is taken out of tool call ids; a broken tool call is thrown away and asked for again, an
empty one ends the run; after a dropped stream it adds a user message; a reply cut off by max_tokens is a final answer.
"""
import json

from harnesses import MODULES, NODE, Harness, launch, tool_calls

CLI = f"{MODULES}/openclaw/openclaw.mjs"
MODEL = {"id": "policy", "name": "policy", "reasoning": True, "input": ["text"], "contextWindow": "@CONTEXT_TOKENS@",
         "maxTokens": "@REPLY_TOKENS@", "cost": {"input": 0, "output": 0, "cacheRead": 0, "cacheWrite": 0}}
PROVIDER = {"baseUrl": "http://127.0.0.1:8000/v1", "api": "openai-completions", "apiKey": "none", "models": [MODEL]}
CONFIG = {"models": {"mode": "replace", "providers": {"proxy": PROVIDER}}, "update": {"checkOnStart": False},
          "agents": {"defaults": {"model": {"primary": "proxy/policy"}, "workspace": "@WORKDIR@",
                                  "skipBootstrap": True}}}

HARNESS = Harness(
    argv=launch({"openclaw.json": json.dumps(CONFIG)},
                NODE, CLI, "agent", "--local", "--agent", "main", "--message", "@INSTRUCTION@", "--json"),
    env={"OPENCLAW_STATE_DIR": "@STATE@", "OPENCLAW_CONFIG_PATH": "@STATE@/openclaw.json",
         "NODE_DISABLE_COMPILE_CACHE": "1",             # it would write 5,000 files at each start
         "XDG_CACHE_HOME": "@STATE@/cache", "OPENCLAW_SKIP_CHANNELS": "1", "OPENCLAW_SKIP_CRON": "1"},
    needs=("python", "node"),
    package="npm:openclaw@2026.9.6",
    memory_mb=6144,
    version=(NODE, CLI, "--version"),
    demonstrate=tool_calls("exec", "command"),
)
