"""OpenCode 1.18.33: a native binary (bun) that needs glibc; chat completions, streamed, about 7k tokens of prompt.

Quirks: a session without a title asks the model for one, so it is given one here; a broken or unknown tool call comes
back renamed to `invalid`; a reply cut off by max_tokens is a final answer; status 1 also after a compaction that went
well. A prompt in its arguments would be quoted: it comes on standard input. Its limits of 300 s for headers and for
silence are lifted: a policy that is being updated answers late. At each start it tries to install a plugin package,
and shrugs when it cannot.
"""
import json

from harnesses import ARCH, MODULES, Harness, launch, tool_calls

BINARY = f"{MODULES}/opencode-linux-{ARCH}/bin/opencode"
MODEL = {"name": "policy", "tool_call": True, "reasoning": True,
         "limit": {"context": "@CONTEXT_TOKENS@", "output": "@REPLY_TOKENS@"}}
OPTIONS = {"baseURL": "http://127.0.0.1:8000/v1", "apiKey": "none", "timeout": False, "headerTimeout": False,
           "chunkTimeout": 36000000}
CONFIG = {"autoupdate": False, "share": "disabled", "permission": "allow", "model": "proxy/policy",
          "small_model": "proxy/policy", "enabled_providers": ["proxy"],
          "provider": {"proxy": {"npm": "@ai-sdk/openai-compatible", "name": "proxy", "options": OPTIONS,
                                 "models": {"policy": MODEL}}}}

HARNESS = Harness(
    argv=launch({"config/opencode/opencode.json": json.dumps(CONFIG)},
                BINARY, "run", "--format", "json", "--title", "task"),
    env={"XDG_CONFIG_HOME": "@STATE@/config", "XDG_DATA_HOME": "@STATE@/data", "XDG_CACHE_HOME": "@STATE@/cache",
         "XDG_STATE_HOME": "@STATE@/state", "OPENCODE_DISABLE_MODELS_FETCH": "1", "OPENCODE_DISABLE_AUTOUPDATE": "1",
         "OPENCODE_DISABLE_LSP_DOWNLOAD": "1", "OPENCODE_DISABLE_DEFAULT_PLUGINS": "1"},
    package=f"npm:opencode-linux-{ARCH}@1.18.33",
    memory_mb=6144,
    version=(BINARY, "--version"),
    demonstrate=tool_calls("bash", "command"),
)
