#!/bin/sh
# First process of the VM that vm.rs boots: mounts cgroup v2, runs the cases, prints the exit code on
# the console, and turns the VM off.
if [ "$1" != pivotable ]; then
    # pivot_root does not work on the initramfs: move to a mount on top of it.
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
for module in overlay quota_tree quota_v2; do
    perl -e '$o = ""; open(M, "<", $ARGV[0]) and syscall(313, fileno(M), $o, 0) == 0 or die "$ARGV[0]: $!"' /codelia/$module.ko
done
mount -o usrquota,prjquota /dev/nvme0n1 /tmp
chmod 1777 /tmp
mount -t cgroup2 -o nsdelegate groups /sys/fs/cgroup

# Delegate a group as a service manager does, with a leaf for the processes that use it.
echo "+memory +pids +cpu +cpuset +io" >/sys/fs/cgroup/cgroup.subtree_control
mkdir -p /sys/fs/cgroup/service/worker/first
echo "+memory +pids +cpu +cpuset +io" >/sys/fs/cgroup/service/cgroup.subtree_control
echo $$ >/sys/fs/cgroup/service/worker/first/cgroup.procs

set +e
cd /
. /codelia/settings
run() {
    xargs "/codelia/$1" --color never --test-threads 1 --exact <"/codelia/$2"
}
run worker-suite worker-cases && run suite cases
echo "vm: the suite exited with $?"
echo o >/proc/sysrq-trigger
sleep 60
