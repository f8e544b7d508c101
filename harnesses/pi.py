"""pi 1.6.0: a small coding agent on Node; chat completions, streamed, about 1.2k tokens of prompt, 4 tools.

Quirks: exit status 0 also after failed requests and on a reply cut off by max_tokens; empty or broken tool arguments
are echoed as {}; arguments come back re-serialised, all else of the history exactly. Its own defaults (16k tokens
reserved, 20k kept) would compact a small context at once, so both are told as shares of the context.
"""
import json

from harnesses import MODULES, NODE, Harness, launch, tool_calls

CLI = f"{MODULES}/@earendil-works/pi-coding-agent/dist/bundle/cli.js"
MODEL = {"id": "policy", "name": "policy", "reasoning": True, "input": ["text"], "contextWindow": "@CONTEXT_TOKENS@",
         "maxTokens": "@REPLY_TOKENS@", "cost": {"input": 0, "output": 0, "cacheRead": 0, "cacheWrite": 0}}
PROVIDER = {"baseUrl": "http://127.0.0.1:8000/v1", "api": "openai-completions", "apiKey": "none", "models": [MODEL]}
SETTINGS = {"compaction": {"reserveTokens": "@REPLY_TOKENS@", "keepRecentTokens": "@REPLY_TOKENS@"}}

HARNESS = Harness(
    argv=launch({"models.json": json.dumps({"providers": {"proxy": PROVIDER}}), "settings.json": json.dumps(SETTINGS)},
                NODE, CLI, "-p", "--mode", "json", "--provider", "proxy", "--model", "policy"),
    env={"PI_CODING_AGENT_DIR": "@STATE@", "PI_OFFLINE": "1", "PI_SKIP_VERSION_CHECK": "1", "PI_TELEMETRY": "0"},
    needs=("python", "node"),
    package="npm:@earendil-works/pi-coding-agent@1.6.0",
    memory_mb=1024,
    version=(NODE, CLI, "--version"),
    demonstrate=tool_calls("bash", "command"),
)
