#!/bin/bash
# A peer on a virtual machine of EC2 or GCP: EC2 user data, or GCP metadata startup-script. Both run it as root, GCP at
# every boot. It starts the container that is there, or makes it; the volume keeps identity and checkpoints.
# The machine: Debian or Ubuntu; for a GPU with NVIDIA's driver and container toolkit (the clouds' deep learning images
# have them). Open TCP 31338 and 31339 in its security group or firewall. Change the next four lines.
set -euo pipefail
IMAGE=noloco-peer:0.2.0 # in your registry
ADDRESS=/ip4/203.0.113.7/tcp/31337/p2p/QmYb... # of the bootstrap node, or of any member
export TZ=Etc/UTC # the zone of peer.hours, for example Europe/Berlin
export HF_TOKEN="" # of the Hugging Face hub, if the run needs it; who may read this machine's user data can read it

command -v docker >/dev/null || { apt-get -qq update && apt-get -qq install --yes --no-install-recommends docker.io; }
if docker container inspect noloco >/dev/null 2>&1; then
    exec docker start noloco
fi
gpus=()
if command -v nvidia-smi >/dev/null; then
    gpus=(--gpus all)
fi
memory=$(awk '/^MemTotal/ {print int($2 * 0.9)}' /proc/meminfo) # KiB: nine tenths of the machine's
exec docker run --detach --name noloco --init "${gpus[@]}" \
    --read-only --tmpfs /tmp --cap-drop ALL --security-opt no-new-privileges:true \
    --memory "${memory}k" --pids-limit 4096 --ulimit nofile=16384 \
    --restart on-failure --stop-timeout 900 --env TZ --env HF_TOKEN \
    --publish 31338-31339:31338-31339 --volume noloco:/data --hostname "$(hostname -s)" \
    "$IMAGE" join "$ADDRESS" --set peer.network.port=31338 --set peer.network.upnp=false
