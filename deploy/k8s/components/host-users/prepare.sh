#!/bin/sh
# Prepares the worker's container for sandboxes without a user namespace of the pod, then executes the
# given command.
set -eu

# The kernel lets a sandbox mount a /proc only if a complete one is mounted: the pod's is masked.
proc=/run/codelia-proc
mkdir -p "$proc"
chmod 0700 "$proc"
mount -t proc -o nosuid,nodev,noexec proc "$proc"

# Runtimes mount cgroups read-only.
while read -r _ path type _; do
    case $type in cgroup | cgroup2) mount -o remount,bind,rw "$path" ;; esac
done </proc/self/mounts

exec "$@"
