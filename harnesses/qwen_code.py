"""Qwen Code 0.24.4, on Node: chat completions, streamed, about 20k tokens of prompt, 14 tools; up to 1.9 GB of memory.

Quirks: a reply cut off by max_tokens or with broken arguments is thrown away and asked for again, with max_tokens
64000; after a dropped stream the partial text stays as a turn; reasoning comes back right-trimmed; subagents run beside
the main agent, unlabelled. Its time limits (120 s to the first byte, 240 s of silence) are lifted here.
"""
import json

from harnesses import MODULES, NODE, Harness, launch, tool_calls

CLI = f"{MODULES}/@qwen-code/qwen-code/cli-entry.js"
GENERATION = {"contextWindowSize": "@CONTEXT_TOKENS@", "timeout": 36000000}
SETTINGS = {"$version": 3, "general": {"enableAutoUpdate": False, "disableAutoUpdate": True},
            "privacy": {"usageStatisticsEnabled": False}, "telemetry": {"enabled": False},
            "security": {"auth": {"selectedType": "openai", "apiKey": "none", "baseUrl": "http://127.0.0.1:8000/v1"}},
            "model": {"name": "policy", "generationConfig": GENERATION}}

HARNESS = Harness(
    argv=launch({"settings.json": json.dumps(SETTINGS)},
                NODE, CLI, "--yolo", "--auth-type", "openai", "--output-format", "stream-json"),
    env={"QWEN_HOME": "@STATE@", "QWEN_CODE_MAX_OUTPUT_TOKENS": "@REPLY_TOKENS@",
         "QWEN_STREAM_IDLE_TIMEOUT_MS": "36000000", "QWEN_STREAM_MAX_LIFETIME_MS": "36000000"},
    needs=("python", "node"),
    package="npm:@qwen-code/qwen-code@0.24.4",
    memory_mb=3072,
    version=(NODE, CLI, "--version"),
    demonstrate=tool_calls("run_shell_command", "command", is_background=False),
)
