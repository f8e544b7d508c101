# make train   the main job: SmolLM2-135M learns shell tasks through the bash harness; ARGS="--steps 60 ..." goes to train.py
# make test    all tests, on real parts; ARGS="-k tree" goes to pytest
# Both set up what they need and may be run again. PYTHON=... names another interpreter for .venv.
OUT ?= runs/$(shell date +%Y%m%d-%H%M%S)

train:
	bash setup.sh
	.venv/bin/python train.py --out $(OUT) $$(docker image inspect harness-rl/base >/dev/null 2>&1 && echo --base_image debian:bookworm-slim=harness-rl/base) $(ARGS)

test:
	bash setup.sh docker
	.venv/bin/python -m pytest tests $(ARGS)

.PHONY: train test
