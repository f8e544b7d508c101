"""The bash harness: bash_agent.py, one shell command a reply, for models too small for tool calls."""
from harnesses import PATHS, PYTHON, Harness

HARNESS = Harness(
    argv=[*PYTHON, f"{PATHS['code']}/forward.py", *PYTHON, f"{PATHS['code']}/bash_agent.py"],
    env={"OPENAI_BASE_URL": "http://127.0.0.1:8000/v1", "MAX_TURNS": "3"},
    overlong_exit=4,
    demonstrate=lambda commands: [*commands, "DONE"],
)
