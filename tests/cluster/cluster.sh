#!/usr/bin/env bash
# A Slurm cluster on one Debian 12 machine, as root:
# cluster.sh install | up | down | status | start NODE | crash NODE | exec NODE COMMAND... | user [COMMAND...]
#
# - Every node (head, node1..node5) has its own namespaces: network (10.77.0.x on eth0, a bridge in the
#   head's namespace, no way out), host name, processes, System V IPC, and mounts (/tmp, /var/tmp,
#   /dev/shm, /run). No server of the cluster listens on an interface of this machine.
# - All other folders under / are the shared file system. Users live in $ROOT/users. $ROOT/small is a
#   shared disk of 160 MB for tests that fill it.
# - `crash` is a power cut: every process of the node ends at once. `start` boots it again. `down`
#   crashes all nodes and removes all files.
# - `user` runs a command (default: a shell) as the unprivileged user on the head, in the user's copy of
#   the checkout, with a login's environment.
# Slurm 22.05 runs with munge, slurmdbd and MariaDB. The GPUs are device nodes that no program reads.
set -euo pipefail

ROOT=${ORRERY_CLUSTER_ROOT:-/srv/orrery-cluster}
LOGIN=${ORRERY_CLUSTER_USER:-orrery}
CHECKOUT=$ROOT/users/$LOGIN/orrery # where copy.sh puts the working tree
NODES=(node1 node2 node3 node4 node5)
HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

fail() { printf 'cluster: %s\n' "$*" >&2; exit 1; }

address() { [ "$1" = head ] && echo 10.77.0.10 || echo "10.77.0.1${1#node}"; }

init_of() { [ -s "$ROOT/run/$1.init" ] && cat "$ROOT/run/$1.init"; }

runs() { local pid; pid=$(init_of "$1") && [ "$(cat "/proc/$pid/comm" 2>/dev/null)" = "orrery-$1" ]; }

within() { # NODE COMMAND...: as root on that node
    local node=$1
    shift
    runs "$node" || fail "$node does not run; type: bash tests/cluster/cluster.sh $([ -s "$ROOT/run/head.init" ] && echo "start $node" || echo up)"
    nsenter -t "$(init_of "$node")" -m -u -i -n -p -- "$@"
}

soon() { # COMMAND...: tries it for 20 seconds
    local deadline=$((SECONDS + 20))
    while [ $SECONDS -lt $deadline ]; do
        "$@" >/dev/null 2>&1 && return
        sleep 0.1
    done
    fail "20 s passed and this still fails: $*; the daemons' logs are in $ROOT/log"
}

install() {
    export DEBIAN_FRONTEND=noninteractive
    local packages=(slurmctld slurmd slurm-client munge slurmdbd mariadb-server-core mariadb-client-core iproute2 iputils-ping rsync curl procps python3 python3-pip) policy=/usr/sbin/policy-rc.d
    if ! dpkg-query -W "${packages[@]}" >/dev/null 2>&1; then
        local kept=yes
        [ -e $policy ] || { kept=no; printf '#!/bin/sh\nexit 101\n' >$policy; chmod 755 $policy; } # Debian would start the daemons on this machine
        apt-get -qq -o DPkg::Lock::Timeout=120 -o Acquire::Retries=3 update
        apt-get -qq -o DPkg::Lock::Timeout=120 -o Acquire::Retries=3 install -y --no-install-recommends "${packages[@]}" >/dev/null
        [ $kept = yes ] || rm $policy
    fi
    command -v apptainer >/dev/null || bash "$HERE/install_apptainer.sh"
    mkdir -p "$ROOT/users"
    id "$LOGIN" >/dev/null 2>&1 || useradd --create-home --home-dir "$ROOT/users/$LOGIN" --shell /bin/bash "$LOGIN"
}

configure() {
    local node i
    rm -rf "$ROOT"/{etc,run,log,state,spool,database,gpu}
    mkdir -p "$ROOT"/{etc,run,log,state,spool,database,gpu,munge,small,users/"$LOGIN"}
    chown "$LOGIN": "$ROOT/users/$LOGIN"
    for i in {0..7}; do mknod -m 666 "$ROOT/gpu/nvidia$i" c 1 3; done # Slurm refuses anything but a device; this one is /dev/null
    {
        echo '127.0.0.1 localhost'
        for node in head "${NODES[@]}"; do echo "$(address "$node") $node"; done
    } >"$ROOT/etc/hosts"
    local track=linuxproc confine=none
    [ ! -d /sys/fs/cgroup/freezer ] || track=cgroup
    [ ! -d /sys/fs/cgroup/memory ] || confine=cgroup
    cat >"$ROOT/etc/slurm.conf" <<END
ClusterName=simulated
SlurmctldHost=head($(address head))
SlurmUser=slurm
# cred_expire: the least wait of a requeued job. With less than KillWait + 10 s it meets old steps.
AuthInfo=cred_expire=15
SlurmctldPidFile=$ROOT/run/slurmctld.pid
SlurmdPidFile=$ROOT/run/slurmd.%n.pid
SlurmctldLogFile=$ROOT/log/slurmctld.log
SlurmdLogFile=$ROOT/log/slurmd.%n.log
StateSaveLocation=$ROOT/state
SlurmdSpoolDir=$ROOT/spool/%n
# Nodes have more cores than this machine. Daemons get a higher priority than jobs.
SlurmdParameters=config_overrides
PropagatePrioProcess=1
ProctrackType=proctrack/$track
TaskPlugin=task/$confine
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
GresTypes=gpu
SchedulerParameters=sched_interval=1,sched_min_interval=0,bf_interval=1,bf_resolution=1,batch_sched_delay=0
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmctldParameters=preempt_send_user_signal
JobRequeue=1
ReturnToService=2
KillWait=5
SlurmdTimeout=15
SlurmctldTimeout=15
MinJobAge=3600
DefMemPerCPU=512
JobAcctGatherType=jobacct_gather/linux
JobAcctGatherFrequency=task=1
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=head
AccountingStorageTRES=gres/gpu
AccountingStorageEnforce=associations,limits,qos
$(for node in "${NODES[@]}"; do echo "NodeName=$node NodeAddr=$(address "$node") CPUs=64 RealMemory=65536 Gres=gpu:h200:8"; done)
PartitionName=gpu Nodes=ALL Default=YES MaxTime=1-0 DefaultTime=10 PriorityTier=10 PreemptMode=OFF
PartitionName=spot Nodes=ALL MaxTime=1-0 DefaultTime=10 PriorityTier=1 PreemptMode=REQUEUE GraceTime=20
END
    echo "Name=gpu Type=h200 File=$ROOT/gpu/nvidia[0-7]" >"$ROOT/etc/gres.conf"
    # ConstrainDevices would take /dev/null away, and the GPUs are /dev/null
    printf '%s\n' CgroupPlugin=cgroup/v1 CgroupMountpoint=/sys/fs/cgroup ConstrainRAMSpace=yes ConstrainCores=no ConstrainDevices=no >"$ROOT/etc/cgroup.conf"
    printf '%s\n' DbdHost=head SlurmUser=slurm LogFile="$ROOT/log/slurmdbd.log" PidFile="$ROOT/run/slurmdbd.pid" \
        StorageType=accounting_storage/mysql StorageHost=localhost StorageUser=slurm StorageLoc=accounting >"$ROOT/etc/slurmdbd.conf"
    chmod 600 "$ROOT/etc/slurmdbd.conf"
    dd if=/dev/urandom of="$ROOT/munge/key" bs=128 count=1 status=none
    chmod 400 "$ROOT/munge/key"
    chown -R munge: "$ROOT/munge"
    chown -R slurm: "$ROOT"/{etc/slurmdbd.conf,state,run,log,database}
}

# The first process of a node: hides the folders that nodes do not share, and reaps orphans.
FIRST_PROCESS='
set -eu
hostname "$1"
for folder in /tmp /var/tmp /dev/shm; do mount -t tmpfs -o mode=1777,size=4g,nosuid,nodev tmpfs $folder; done
mount --rbind /sys/fs/cgroup "$2/run/$1.cgroup"
mount -t sysfs sysfs /sys
mount --move "$2/run/$1.cgroup" /sys/fs/cgroup
mount -t tmpfs -o mode=755,nosuid,nodev tmpfs /run
mkdir /run/munge
mount --bind "$2/munge" /run/munge
mount --bind "$2/etc" /etc/slurm
mount --bind "$2/etc/hosts" /etc/hosts
printf "orrery-%s" "$1" >/proc/self/comm
touch "$2/run/$1.ready"
exec >/dev/null 2>&1
while :; do sleep 3600 & wait $! || true; done'

boot() { # NODE: its namespaces and its address; no daemon yet
    local node=$1 outer first
    rm -f "$ROOT/run/$node".{init,ready}
    mkdir -p "$ROOT/run/$node.cgroup"
    setsid unshare --mount --uts --ipc --net --pid --fork --kill-child --mount-proc \
        bash -c "$FIRST_PROCESS" first "$node" "$ROOT" </dev/null >"$ROOT/log/$node.log" 2>&1 &
    outer=$!
    soon test -e "$ROOT/run/$node.ready"
    read -ra first -d '' <"/proc/$outer/task/$outer/children" || true
    echo "${first[0]}" >"$ROOT/run/$node.init"
    within "$node" ip link set lo up
    if [ "$node" = head ]; then
        within head ip link add eth0 type bridge
    else
        within head ip link delete "$node" 2>/dev/null || true
        nsenter -t "$(init_of head)" -n ip link add "$node" type veth peer name eth0 netns "$(init_of "$node")"
        within head ip link set "$node" master eth0 up
    fi
    within "$node" ip address add "$(address "$node")/24" dev eth0
    within "$node" ip link set eth0 up
}

start() { # NODE
    [[ " ${NODES[*]} " = *" $1 "* ]] || fail "start: no node $1; there are: ${NODES[*]}"
    runs "$1" || boot "$1"
    within "$1" nice -n -10 slurmd -N "$1"
}

crash() { # NODE
    local pid
    pid=$(init_of "$1") || return 0
    ! runs "$1" || kill -9 "$pid"
    while [ -e "/proc/$pid" ] && runs "$1"; do sleep 0.05; done
    rm -f "$ROOT/run/$1.init"
}

up() {
    down
    [ ! -e /dev/fuse ] || chmod 666 /dev/fuse # apptainer mounts images through it as the user
    configure
    mount -t tmpfs -o mode=1777,size=160m tmpfs "$ROOT/small"
    local node as_slurm=(within head runuser -u slurm --) mariadb=(mariadb --no-defaults --socket="$ROOT/database/socket")
    for node in head "${NODES[@]}"; do boot "$node"; done
    within head runuser -u munge -- munged --key-file="$ROOT/munge/key" --seed-file="$ROOT/munge/seed" \
        --pid-file="$ROOT/munge/pid" --log-file="$ROOT/munge/log"
    "${as_slurm[@]}" mariadb-install-db --no-defaults --datadir="$ROOT/database" --auth-root-authentication-method=socket \
        --auth-root-socket-user=slurm --skip-test-db >"$ROOT/log/mariadb.log" 2>&1
    "${as_slurm[@]}" setsid mariadbd --no-defaults --datadir="$ROOT/database" --socket="$ROOT/database/socket" --skip-networking \
        --innodb-flush-log-at-trx-commit=0 </dev/null >>"$ROOT/log/mariadb.log" 2>&1 &
    soon "${as_slurm[@]}" "${mariadb[@]}" --execute='create database if not exists accounting'
    "${as_slurm[@]}" env MYSQL_UNIX_PORT="$ROOT/database/socket" slurmdbd
    soon within head sacctmgr -n show cluster
    within head sacctmgr -Q -i add cluster simulated >>"$ROOT/log/accounting.log"
    within head sacctmgr -Q -i add account lab >>"$ROOT/log/accounting.log"
    within head sacctmgr -Q -i add user root,"$LOGIN" account=lab >>"$ROOT/log/accounting.log"
    within head nice -n -10 runuser -u slurm -- slurmctld
    soon within head scontrol ping
    for node in "${NODES[@]}"; do start "$node"; done
    soon all_idle
}

all_idle() { [ "$(within head sinfo -h -p gpu -N -o %T | grep -c '^idle$')" = ${#NODES[@]} ]; }

down() {
    local node
    for node in "${NODES[@]}" head; do crash "$node"; done
    ! mountpoint -q "$ROOT/small" || umount "$ROOT/small"
    for node in "${NODES[@]}"; do find /sys/fs/cgroup -depth -type d -path "*/slurm_$node*" -exec rmdir {} + 2>/dev/null || true; done
}

user() {
    [ $# -gt 0 ] || set -- bash
    local home="$ROOT/users/$LOGIN" folder=$CHECKOUT
    [ -d "$folder" ] || folder=$home
    within head runuser -u "$LOGIN" -- setsid --wait env -i -C "$folder" HOME="$home" USER="$LOGIN" LOGNAME="$LOGIN" SHELL=/bin/bash \
        PATH="$CHECKOUT/.venv/bin:/usr/local/bin:/usr/bin:/bin" LANG=C.UTF-8 TERM="${TERM:-dumb}" "$@"
}

[ "$(id -u)" = 0 ] || fail "making namespaces needs root; type: sudo bash tests/cluster/cluster.sh ${1:-up}"
case ${1:-} in
    install | up | down) "$1" ;;
    start | crash) [ $# = 2 ] || fail "$1: which node? type: cluster.sh $1 node2"; "$1" "$2" ;;
    status) within head sinfo -N -o '%N %P %T %G %c %m' ;;
    exec) shift; within "$@" ;;
    user) shift; user "$@" ;;
    *) sed -n 2,3p "${BASH_SOURCE[0]}" >&2; exit 2 ;;
esac
