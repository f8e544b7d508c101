#!/bin/bash
# Make a minimal Debian base for tasks, where images cannot be pulled: Docker image harness-rl/base, or a folder.
#   bash tasks/base_image.sh            -> docker image harness-rl/base (skipped when it exists)
#   bash tasks/base_image.sh FOLDER     -> a root folder for bubblewrap (skipped when it is complete)
# SUITE (default bookworm) and MIRROR (default: the first source in this machine's /etc/apt) can be set in the environment.
set -euo pipefail
image=harness-rl/base
folder=${1:-}
suite=${SUITE:-bookworm}
die() { echo "base_image.sh: $*" >&2; exit 2; }

if [ -n "$folder" ]; then
    if [ -e "$folder/.harness-rl-base" ]; then echo "$folder is there already"; exit 0; fi
    if [ -d "$folder" ] && [ -n "$(ls -A "$folder")" ]; then die "$folder is not empty; name a new folder"; fi
else
    command -v docker > /dev/null || die "no docker client; apt-get install docker.io, or name a folder for bubblewrap"
    docker info > /dev/null 2>&1 || die "the docker daemon does not answer; start it (dockerd &), or name a folder for bubblewrap"
    if docker image inspect $image > /dev/null 2>&1; then echo "$image is there already"; exit 0; fi
fi
[ "$(id -u)" = 0 ] || die "debootstrap needs root; run: sudo bash tasks/base_image.sh${folder:+ $folder}"
command -v debootstrap > /dev/null || die "debootstrap is missing; run: apt-get install -y debootstrap"

mirror=${MIRROR:-$(cat /etc/apt/sources.list.d/*.sources /etc/apt/sources.list /etc/apt/sources.list.d/*.list 2> /dev/null |
    awk '$1 == "URIs:" { print $2; exit }
         $1 == "deb" { for (i = 2; i <= NF; i++) if ($i ~ /^[a-z+]+:\//) { print $i; exit } }')} || true
[ -n "$mirror" ] || die "no package source in /etc/apt; run: MIRROR=<address of a Debian mirror> bash tasks/base_image.sh"

root=$(mktemp -d)
trap 'rm -rf "$root"' EXIT
debootstrap --variant=minbase "$suite" "$root" "$mirror" > "$root.log" 2>&1 ||
    { tail -n 5 "$root.log" >&2; die "debootstrap $suite from $mirror failed (log: $root.log); set SUITE or MIRROR"; }
rm -f "$root.log"
chmod 755 "$root"
rm -rf "$root"/var/cache/apt/*.bin "$root"/var/cache/apt/archives/*.deb "$root"/var/lib/apt/lists/* "$root"/var/cache/debconf/*-old \
    "$root"/var/log/*.log "$root"/usr/share/{doc,man,info}/* "$root"/usr/share/locale/*
rm -rf "$root"/dev && mkdir "$root"/dev
if [ -n "$folder" ]; then
    mkdir -p "$folder"
    cp -a "$root/." "$folder/"
    touch "$folder/.harness-rl-base"    # last: now it is complete
    echo "made $folder, $(du -sh "$folder" | cut -f1)"
else
    tar -C "$root" -c . | docker import --change 'CMD ["bash"]' - $image > /dev/null
    echo "made $image, $(docker image inspect -f '{{.Size}}' $image | numfmt --to=iec)"
fi
