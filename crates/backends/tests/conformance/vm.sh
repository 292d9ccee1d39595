#!/bin/sh
# The first process of the machine that vm.rs boots: makes it a host whose controllers are all of
# version 2, runs the cases there, tells how they ended on the console, and turns the machine off.
if [ "$1" != pivotable ]; then
    # A sandbox changes its root, which the first mount of a kernel does not allow; one on top of it does.
    mount --bind / /mnt && cd /mnt && mount --move . / && exec chroot . /init pivotable
fi
set -e
export PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/root TMPDIR=/tmp
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t devtmpfs dev /dev
mkdir -p /dev/pts /dev/shm
mount -t devpts -o ptmxmode=666 pts /dev/pts
mount -t tmpfs shm /dev/shm
mount /dev/nvme0n1 /tmp
chmod 1777 /tmp
mount -t cgroup2 -o nsdelegate groups /sys/fs/cgroup

# As a service manager does: a delegated group, and one in it for the processes that use it.
echo "+memory +pids +cpu +cpuset +io" >/sys/fs/cgroup/cgroup.subtree_control
mkdir -p /sys/fs/cgroup/service/worker/first
echo "+memory +pids +cpu +cpuset +io" >/sys/fs/cgroup/service/cgroup.subtree_control
echo $$ >/sys/fs/cgroup/service/worker/first/cgroup.procs

set +e
cd /
. /codelia/settings
xargs /codelia/suite --color never --test-threads 1 --exact </codelia/cases
echo "machine: the suite ended with $?"
echo o >/proc/sysrq-trigger
sleep 60
