"""mini-swe-agent 2.4.6, on Python: chat completions, not streamed, about 800 tokens of prompt, one tool.

Quirks: it ends only when a command prints COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT; a reply without a tool call, or with a
broken one, is dropped from the history and a user message complains; a full context ends it at once: it never compacts.
The history comes back byte for byte. It retries failed requests for minutes. Commands run in sh, each in a new one.
"""
from harnesses import Harness, launch, python_app, tool_calls

END = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"

HARNESS = Harness(
    argv=launch({}, *python_app("from minisweagent.run.mini import app; app()"), "-y", "--exit-immediately",
                "-t", "@INSTRUCTION@", "-m", "openai/policy", "-c", "mini.yaml",
                "-c", "model.model_kwargs.api_base=http://127.0.0.1:8000/v1", "-c", "model.model_kwargs.api_key=none",
                "-o", "@STATE@/trajectory.json"),
    env={"MSWEA_GLOBAL_CONFIG_DIR": "@STATE@", "MSWEA_CONFIGURED": "true", "MSWEA_COST_TRACKING": "ignore_errors",
         "MSWEA_SILENT_STARTUP": "1", "LITELLM_LOCAL_MODEL_COST_MAP": "True"},
    package="pip:mini-swe-agent==2.4.6 litellm==1.110.2",
    memory_mb=512,
    version=tuple(python_app("from importlib.metadata import version; print(version('mini-swe-agent'))")),
    demonstrate=lambda commands: tool_calls("bash", "command")([*commands, END])[:-1],
)
