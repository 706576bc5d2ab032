#!/usr/bin/env bash
# Real Slurm with GPUs as gres on one node, or on NODES=2 and more nodes that divide the GPUs, on a GPU host without network (see benchmarks/async/gpu_host.sh for its packages).
#
#   gpu_slurm.sh pack            on Debian 12 with apptainer and a network: .carry/slurm.tar.xz (< 55 MB): packages of Slurm and Apptainer,
#                                Snakemake's packages for Python 3.12, and an image that holds no file and mounts the host's folders
#   gpu_slurm.sh install         there, as root, once: unpacks it; copies only libraries that the host lacks
#   gpu_slurm.sh up | down       there: munged, slurmctld and slurmd, without accounting, on a machine that nothing can reach;
#                                without /dev/nvidia0 the GPU is /dev/null
#   gpu_slurm.sh probe           there: what srun --gres=gpu:1 sees; whether a container sees the GPU
#   gpu_slurm.sh crash NODE      there, with NODES=2: a power cut; `start NODE` boots it again
#   gpu_slurm.sh run RUN …       there: snakemake --profile slurm RUN …; CONTAINERS=1 runs the roles in the image with --nv
#
# NODES above 1 are gpu1, gpu2, …: each has its own network (10.78.0.x, a bridge on this machine), host name, processes and /dev/shm. CPUS is
# what a node claims to have.
# After `run`, $OUT/slurm.tar.gz holds the runs' logs, receipts and metrics, Slurm's logs and scontrol's view of each job.
set -euo pipefail
cd "$(dirname "$0")/../.."
host=${ORRERY_HOST_FOLDER:-/tmp/orrery-host} checkout=$PWD nodes=${NODES:-1} network=10.78.0 bridge=orrery0
cpus=${CPUS:-$(($(nproc) / nodes))}
root=${ORRERY_SLURM_FOLDER:-/srv/orrery-slurm}
export SLURM_CONF=$root/etc/slurm.conf PATH=$PATH:/usr/sbin

programs=(slurmctld slurmd slurm-client slurm-wlm-basic-plugins munge libmunge2 squashfuse fuse2fs squashfs-tools iproute2)
libraries=(libhwloc15 liblua5.1-0 libjson-c5 libyaml-0-2 libdbus-1-3 liblz4-1 libreadline8 libnuma1 libgcrypt20 libgpg-error0 libpam0g
           libsquashfuse0 libfuse3-3 libfuse2 liblzo2-2 libseccomp2 libbpf1 libelf1 libmnl0 libcap2 libbsd0 libmd0)
apptainer_deb=pool/main/a/apptainer/apptainer_1.4.5-2_amd64.deb # needs glibc 2.38, which the host has
snakemake=(argparse-dataclass conda-inject configargparse connection-pool docutils dpath fastjsonschema gitdb gitpython greenlet humanfriendly
           immutables jupyter-core nbformat platformdirs pulp smart-open smmap snakemake snakemake-interface-common
           snakemake-interface-executor-plugins snakemake-interface-logger-plugins snakemake-interface-report-plugins
           snakemake-interface-scheduler-plugins snakemake-interface-storage-plugins sqlalchemy sqlmodel tenacity throttler tomlkit traitlets yte)
mounts=(/usr /opt) # of the host, beside its site and this checkout

pack() {
  local work mirror
  work=$(mktemp -d)
  # shellcheck disable=SC2064
  trap "rm -rf '$work'" EXIT
  mkdir -p "$work"/pack/{programs,libraries} "$work/root"
  mirror=${DEBIAN_MIRROR:-$(sed -n 's/^URIs: *\([^ ]*\).*/\1/p' /etc/apt/sources.list.d/*.sources | head -n 1)}
  chmod 755 "$work" "$work"/pack
  (cd "$work/pack/programs" && apt-get -qq download "${programs[@]}")
  (cd "$work/pack/libraries" && apt-get -qq download "${libraries[@]}")
  curl -fsS "$mirror/$apptainer_deb" -o "$work/pack/programs/apptainer.deb"
  UV_NO_CONFIG=1 UV_FIND_LINKS='' uv pip install -q --no-deps --python-platform x86_64-manylinux_2_39 --python-version 3.12 --target "$work/pack/snakemake" \
    $(for one in "${snakemake[@]}"; do grep -oE -m 1 "^$one==[^ ]+" locks/login.txt; done)
  skeleton "$work/root"
  apptainer -s build --userns --mksquashfs-args='-comp zstd' "$work/pack/host.sif" "$work/root"
  mkdir -p .carry
  tar c -C "$work/pack" . | xz -T0 -2 >.carry/slurm.tar.xz
  du -h .carry/slurm.tar.xz
}

skeleton() { # FOLDER: the root of an image that holds no file of its own
  local folder
  for folder in usr opt etc proc sys dev tmp var run root site orrery/code; do mkdir -p "$1/$folder"; done
  for folder in bin sbin lib lib64; do ln -s "usr/$folder" "$1/$folder"; done
  mkdir -p "$1/.singularity.d/env"
  cat >"$1/.singularity.d/env/90-environment.sh" <<'END'
export PATH=/usr/local/bin:/usr/bin:/usr/sbin
export LANG=C.UTF-8 PYTHONNOUSERSITE=1 PYTHONDONTWRITEBYTECODE=1
export PYTHONPATH=/orrery/code:/site:/site/nvidia_cutlass_dsl/dsl_packages
export LD_LIBRARY_PATH=/site/nvidia/nccl/lib
END
}

install() {
  local work=$root/packages file program soname found
  mkdir -p "$work/tree" "$root"/bin
  tar xJ -C "$work" -f "${1:-$host/parts/slurm.tar.xz}"
  for file in "$work"/programs/*.deb; do dpkg-deb -x "$file" "$work/new"; done
  tar c -C "$work/new" . | tar x -C / --keep-directory-symlink --skip-old-files # every file of the host stays
  for file in /usr/sbin/slurm{ctld,d,stepd}-wlm; do ln -sfn "$(basename "$file")" "${file%-wlm}"; done # Debian makes them by update-alternatives
  for file in "$work"/libraries/*.deb; do dpkg-deb -x "$file" "$work/tree"; done
  for program in /usr/sbin/{slurmctld,slurmd,slurmstepd,munged} /usr/bin/{srun,scontrol,squashfuse,fuse2fs,mksquashfs,apptainer,ip} \
    /usr/lib/x86_64-linux-gnu/slurm-wlm/*.so; do
    { [ -e "$program" ] && ldd "$program" 2>/dev/null || true; } | sed -n 's/^\t\(.*\) => not found/\1/p'
  done | sort -u | while read -r soname; do
    found=$(find "$work/tree" -name "$soname" | head -n 1)
    if [ -n "$found" ]; then cp -n "$(readlink -f "$found")" "/usr/lib/x86_64-linux-gnu/$soname" && echo "added $soname"; else echo "nothing has $soname"; fi
  done
  ldconfig
  getent passwd munge >/dev/null || useradd --system --no-create-home munge || true
  printf '#!/bin/sh\nexec python3 -m orrery.launcher.cli "$@"\n' >"$root/bin/orrery"
  chmod 755 "$root/bin/orrery"
  slurmd -V
  apptainer --version || echo 'apptainer does not start here'
}

names() { seq -f 'gpu%g' "$nodes"; }

address() { if [ "$nodes" = 1 ]; then echo 127.0.0.1; else echo "$network.$((10 + ${1#gpu}))"; fi; } # gpu0 is this machine

configure() {
  local gpus=(/dev/nvidia[0-9]*) kind node number=0 each
  mkdir -p "$root"/{etc,run,log,state,spool,munge}
  chmod 700 "$root/munge"
  if [ ! -e "${gpus[0]}" ]; then # a device of the same kind as /dev/null, since Slurm refuses plain files
    gpus=()
    for ((number = 0; number < nodes; number++)); do
      [ -e "$root/nvidia$number" ] || mknod -m 666 "$root/nvidia$number" c 1 3
      gpus+=("$root/nvidia$number")
    done
  fi
  each=$((${#gpus[@]} / nodes))
  kind=$(nvidia-smi --query-gpu=name --format=csv,noheader 2>/dev/null | head -n 1 | grep -oE '[ABHL][0-9]+' | tr '[:upper:]' '[:lower:]' || echo gpu)
  # cred_expire: the least wait of a requeued job. Slurm signals a lost node again after 60 s, and would end a new step there.
  cat >"$SLURM_CONF" <<END
ClusterName=host
SlurmctldHost=$(hostname)($(address gpu0))
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket=$root/munge/socket,cred_expire=75
CryptoType=crypto/munge
SlurmctldPidFile=$root/run/slurmctld.pid
SlurmdPidFile=$root/run/slurmd.%n.pid
SlurmctldLogFile=$root/log/slurmctld.log
SlurmdLogFile=$root/log/slurmd.%n.log
StateSaveLocation=$root/state
SlurmdSpoolDir=$root/spool/%n
SlurmdTimeout=15
KillWait=5
JobRequeue=1
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
GresTypes=gpu
SchedulerParameters=sched_interval=1,sched_min_interval=0,bf_interval=1,batch_sched_delay=0
ReturnToService=2
MinJobAge=36000
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
$(for node in $(names); do
    echo "NodeName=$node NodeHostname=$([ "$nodes" = 1 ] && hostname || echo "$node") NodeAddr=$(address "$node") CPUs=$cpus RealMemory=$(memory_mb) Gres=gpu:$kind:$each"
  done)
$([ "$nodes" = 1 ] || echo "TaskProlog=$root/etc/devices.sh")
PartitionName=gpu Nodes=ALL Default=YES MaxTime=1-0 DefaultTime=10
END
  number=0
  for node in $(names); do
    printf 'NodeName=%s Name=gpu Type=%s File=%s\n' "$node" "$kind" "$(printf '%s,' "${gpus[@]:number:each}" | sed 's/,$//')"
    number=$((number + each))
  done >"$root/etc/gres.conf"
  cat >"$root/etc/devices.sh" <<END
#!/bin/bash
# Slurm counts the GPUs of a node from 0, CUDA those of this machine.
[ -z "\$CUDA_VISIBLE_DEVICES" ] || tr , '\n' <<<"\$CUDA_VISIBLE_DEVICES" |
  awk -v first=\$(($each * (\${SLURMD_NODENAME#gpu} - 1))) '{all = all sep \$1 + first; sep = ","} END {print "export CUDA_VISIBLE_DEVICES=" all}'
END
  chmod 755 "$root/etc/devices.sh"
  echo 'CgroupPlugin=cgroup/v1' >"$root/etc/cgroup.conf"
  [ -e "$root/munge/key" ] || dd if=/dev/urandom of="$root/munge/key" bs=128 count=1 status=none
  chmod 400 "$root/munge/key"
  {
    printf '[slurm]\npartition = "gpu"\ntime_limit_min = 30\nwarning_s = 60\ngpu_type = "%s"\n' "$kind"
    printf 'cpus_per_node = %s\nmemory_per_node_mb = %s\npoll_s = 1\n' "$cpus" "$(memory_mb)"
    [ "$nodes" = 1 ] || printf '[network]\ninterface = "eth0"\n'
    if [ -n "${CONTAINERS:-}" ]; then
      printf '[containers]\nimages = "%s/images"\nscratch = "/tmp"\nmounts = [' "$root"
      printf '"%s", ' "${mounts[@]}"
      printf '"%s:/site:ro", "%s"]\n' "$host/site" "$checkout"
    fi
    printf '[environment]\nPYTORCH_SKIP_CUDNN_COMPATIBILITY_CHECK = "1"\nVLLM_USE_FLASHINFER_SAMPLER = "0"\nHF_HUB_OFFLINE = "1"\n'
  } >"$root/site.toml"
}

second_address() { # Slurm resolves names with AI_ADDRCONFIG, which takes a machine that has 127.0.0.1 alone for one without IPv4
  python3 - <<'PYTHON'
import fcntl, socket, struct
try:
    socket.getaddrinfo(None, 6817, socket.AF_INET, flags=socket.AI_ADDRCONFIG | socket.AI_PASSIVE)
except socket.gaierror:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as wire:
        address = struct.pack("16sHH4s8x", b"lo:1", socket.AF_INET, 0, socket.inet_aton("127.0.0.2"))
        fcntl.ioctl(wire, 0x8916, address)  # SIOCSIFADDR
PYTHON
}

memory_mb() { awk -v n="$nodes" '/^MemTotal/ {print int($2 / 1024 / n)}' /proc/meminfo; }

# The first process of a node hides what nodes do not share.
first_process='
set -eu
hostname "$1"
mount -t tmpfs -o mode=1777,nosuid,nodev tmpfs /dev/shm
mount --bind "$2/etc/hosts" /etc/hosts
printf "orrery-%s" "$1" >/proc/self/comm
touch "$2/run/$1.ready"
exec >/dev/null 2>&1
while :; do sleep 3600 & wait $! || true; done'

within() { # NODE COMMAND…
  local node=$1
  shift
  nsenter -t "$(cat "$root/run/$node.init")" -m -u -i -n -p -- "$@"
}

join_network() { # the bridge of the nodes, with this machine on it
  local node
  { echo '127.0.0.1 localhost' && for node in gpu0 $(names); do echo "$(address "$node") $([ "$node" = gpu0 ] && hostname || echo "$node")"; done; } >"$root/etc/hosts"
  ip link add "$bridge" type bridge || { echo "gpu_slurm.sh: NODES=$nodes needs network namespaces and a bridge, and this machine makes none" >&2 && exit 1; }
  ip address add "$(address gpu0)/24" dev "$bridge"
  ip link set "$bridge" up
}

start() { # NODE: its namespaces and its slurmd
  local node=$1 outer first deadline=$((SECONDS + 20))
  rm -f "$root/run/$node".{init,ready}
  setsid unshare --mount --uts --ipc --net --pid --fork --kill-child --mount-proc bash -c "$first_process" first "$node" "$root" \
    </dev/null >"$root/log/$node.log" 2>&1 &
  outer=$!
  until [ -e "$root/run/$node.ready" ]; do [ $SECONDS -lt $deadline ] || { cat "$root/log/$node.log" >&2 && exit 1; } && sleep 0.1; done
  read -ra first -d '' <"/proc/$outer/task/$outer/children" || true
  echo "${first[0]}" >"$root/run/$node.init"
  ip link delete "o-$node" 2>/dev/null || true
  ip link add "o-$node" type veth peer name eth0 netns "${first[0]}"
  ip link set "o-$node" master "$bridge" up
  within "$node" ip address add "$(address "$node")/24" dev eth0
  within "$node" ip link set lo up
  within "$node" ip link set eth0 up
  within "$node" slurmd -N "$node"
}

crash() { # NODE: every process of it ends at once
  kill -9 "$(cat "$root/run/$1.init")"
  rm -f "$root/run/$1.init"
}

up() {
  down
  rm -rf "$root"/{state,spool,log} # of an earlier cluster
  configure
  chown -R root: "$root/munge"
  munged --force --key-file="$root/munge/key" --socket="$root/munge/socket" --pid-file="$root/munge/pid" \
    --log-file="$root/munge/log" --seed-file="$root/munge/seed"
  getent hosts "$(hostname)" >/dev/null || echo "127.0.0.1 $(hostname)" >>/etc/hosts
  if [ "$nodes" = 1 ]; then
    second_address
    slurmctld
    slurmd -N gpu1
  else
    join_network
    slurmctld
    local node
    for node in $(names); do start "$node"; done
  fi
  local deadline=$((SECONDS + 30))
  until [ "$(timeout 5 sinfo -h -o %T 2>/dev/null)" = idle ] || [ $SECONDS -ge $deadline ]; do sleep 0.2; done
  timeout 5 sinfo -N -o '%N %T %G %c %m' || true
  [ "$(timeout 5 sinfo -h -o %T)" = idle ] || { for log in "$root"/log/slurm*.log; do tail -n 20 "$log" >&2; done && exit 1; }
}

down() {
  local file
  for file in "$root"/run/*.init; do [ ! -s "$file" ] || crash "$(basename "$file" .init)"; done
  ip link delete "$bridge" 2>/dev/null || true
  for file in "$root"/run/slurm*.pid "$root/munge/pid"; do
    [ ! -s "$file" ] || kill "$(cat "$file")" 2>/dev/null || true
    rm -f "$file"
  done
}

probe() {
  srun --gres=gpu:1 bash -c 'echo "CUDA_VISIBLE_DEVICES=$CUDA_VISIBLE_DEVICES on $SLURMD_NODENAME"; nvidia-smi -L || echo "no nvidia-smi"'
  srun --gres=gpu:99 true 2>&1 | tail -n 1 || true
  [ ! -e "$root/packages/host.sif" ] || srun --gres=gpu:1 apptainer -s exec --nv --cleanenv --no-home --bind /usr,/opt "$root/packages/host.sif" \
    bash -c 'nvidia-smi -L; python3 -c "import torch; print(torch.cuda.is_available(), torch.cuda.device_count())"' || echo 'no container here'
}

images() { # the host's image as every role's, named by this checkout's lock
  mkdir -p "$root/images"
  in_site - "$root/packages/host.sif" "$root/images" <<'PYTHON'
import json, shutil, sys
from pathlib import Path
from orrery.launcher.containers import LOCK, file_name, recipe
from orrery.manifest.identity import find_workspace
from orrery.manifest.publish import sha256
sif, folder = Path(sys.argv[1]), Path(sys.argv[2])
workspace, digest = find_workspace(), sha256(sif)
path = workspace.root / LOCK
lock = json.loads(path.read_text())
for image in ("trainer", "inference", "orchestrator"):
    for hardware in ("cpu", "cuda"):
        lock[f"{hardware}/{image}"] = {"recipe": recipe(workspace, image, hardware), "sif": digest}
        shutil.copy(sif, folder / file_name(image, hardware, digest))
path.write_text(json.dumps(lock, indent=2) + "\n")
PYTHON
}

in_site() { # python3 with the site, where there is one, and Snakemake's packages
  if [ -d "$host/site" ]; then
    [ -e "$host/site/snakemake" ] || cp -an "$root/packages/snakemake/." "$host/site/"
    bash benchmarks/async/gpu_host.sh python "$@"
  else
    python3 "$@"
  fi
}

run() {
  local code=0
  export APPTAINERENV_PREPEND_PATH # the image has no Python; the host's stands in a mounted folder
  APPTAINERENV_PREPEND_PATH=$(dirname "$(command -v python3)")
  export PATH=$root/bin:$PATH ORRERY_SITE=$root/site.toml
  configure
  [ -z "${CONTAINERS:-}" ] || images
  in_site -m snakemake --profile slurm "$@" || code=$?
  scontrol show jobs >"$root/log/jobs.txt" || true
  grep -E 'JobId=|JobState=|Gres|TresPerNode|RunTime' "$root/log/jobs.txt" || true
  tar --exclude='*/weights' --exclude='*/checkpoints' --exclude='*/rollouts/step_*' -czf "${OUT:-/tmp}/slurm.tar.gz" -C / "${root#/}/log" "${root#/}/etc" \
    "${root#/}/site.toml" "${checkout#/}/runs" || [ $? -eq 1 ] # 1: a file grew while it was read
  return $code
}

verb=${1:?pack, install, up, down, start, crash, probe or run}
shift
case $verb in
pack | install | up | down | start | crash | probe | run) "$verb" "$@" ;;
*) echo "gpu_slurm.sh: there is no $verb; choose from pack, install, up, down, start, crash, probe, run" >&2 && exit 2 ;;
esac
