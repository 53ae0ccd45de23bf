"""Files that start a planned run with the engines that exist: torchrun, Slurm, Kubernetes. They are generated, then
yours.

    files = launch_files(plan, Cluster(instance("trn2.48xlarge"), nodes=4), command=("apps/train", "qwen3_8b"))
    for name, text in files.items(): Path(name).write_text(text)

Environment variables are those of Neuron SDK 2.33 and TorchNeuron 2.14; where one rests on field reports alone, the
file says so.
"""

import re
import shlex
from collections.abc import Sequence

from neuron_parallel.hardware import Cluster
from neuron_parallel.plan import TORCHTITAN_NAMES, ParallelPlan, Training

__all__ = [
    "PROCESS_VARIABLES",
    "check_visible_cores",
    "degrees_as_arguments",
    "environment",
    "launch_files",
    "torchrun",
]

PORT = 29500
RESTARTS = 3
PROCESS_VARIABLES = {
    "TORCH_NEURONX_SKIP_OP_PRECONDITIONS": ("1", "no wait for bounds checks of indices [pre-release sources]"),
}
"""Variable -> (value, why) of every process that uses the device; apps/train sets them for its own ranks."""
SHARED = "/shared"
"""Where every host sees the same files: compiled graphs, and what the run writes."""


def environment(cluster: Cluster, cache: str = f"{SHARED}/neuron-cache") -> dict[str, tuple[str, str]]:
    """Variable -> (value, why), for every host of the run."""
    found = {
        # NEURON_RT_VISIBLE_CORES is not here: a process reserves every core that it lists, and torch-neuronx gives each
        # rank the core of its LOCAL_RANK where the variable is unset.
        "NEURON_LOGICAL_NC_CONFIG": (
            str(cluster.lnc),
            "physical cores in a logical one; the compiler's --lnc has to agree",
        ),
        "NEURON_PLATFORM_TARGET_OVERRIDE": (
            f"trn{cluster.instance.chip.name[-1]}",
            "else a kernel's call may fork neuron-ls [field report]",
        ),
        **PROCESS_VARIABLES,
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": ("1", "a restarted rank 0 has a store of its own"),
        "TORCH_NEURONX_NEFF_CACHE_DIR": (cache, "compiled graphs, kept and shared between hosts"),
        "TORCH_NEURONX_ENABLE_HOST_CC": ("1", "containers need it; harmless outside [field report]"),
        "OMP_NUM_THREADS": ("1", "one rank a core: thread pools would fight"),
    }
    if cluster.nodes * cluster.instance.hosts > 1:
        found |= {
            "FI_PROVIDER": ("efa", "collectives between hosts run over EFA"),
            "FI_EFA_USE_DEVICE_RDMA": ("1", "straight from device memory"),
            "FI_EFA_FORK_SAFE": ("1", "data loading forks"),
        }
    return found


def torchrun(cluster: Cluster, command: Sequence[str], rendezvous: str = "$HEAD_NODE") -> str:
    """The torchrun line of each host. `command`: the script and its arguments."""
    hosts, cores = _hosts(cluster)
    where = (
        ["--standalone"] if hosts == 1 else ["--nnodes", str(hosts), "--rdzv-backend", "c10d", "--rdzv-id", "$JOB_ID"]
    )
    line = ["torchrun", *where, "--nproc-per-node", str(cores), "--max-restarts", str(RESTARTS)]
    if hosts > 1:
        line += ["--rdzv-endpoint", f'"{rendezvous}:{PORT}"']
    return " ".join([*line, *(shlex.quote(word) for word in command)])


def degrees_as_arguments(plan: ParallelPlan) -> tuple[str, ...]:
    """The plan as TorchTitan's options: all of them, since a recipe has degrees of its own."""
    local = plan.micro_batch * (plan.micro_batches if plan.pp > 1 else 1)
    names = ("dp_replicate", "dp_shard", "cp", "tp", "pp", "ep")
    options = {
        **{f"parallelism.{TORCHTITAN_NAMES[name]}": getattr(plan, name) for name in names},
        "parallelism.pipeline_parallel_microbatch_size": plan.micro_batch if plan.pp > 1 else 1,
        "training.local_batch_size": local,
        "training.global_batch_size": plan.global_batch,
        "training.seq_len": plan.seq_len,
    }
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    return (*words, f"--parallelism.{'' if plan.sequence_parallel else 'no-'}enable-sequence-parallel")


def launch_files(
    plan: ParallelPlan,
    cluster: Cluster,
    command: Sequence[str],
    name: str = "qwen3",
    image: str = "REPLACE/neuron-torchtitan:2.33",
    folder: str = ".",
    training: Training | None = None,
) -> dict[str, str]:
    """File name -> content: env.sh, bind.sh (where the NUMA map is known), run.sh, job.sbatch, pytorchjob.yaml.

    `command` is the training script and its own arguments; the plan's degrees are appended. `folder` is where the files
    will be, seen from where the command is to run: they are started from there. `training` is what the plan was made
    with, which is the recipe's to say: run.sh repeats it. Raises ValueError for a plan of another size than the
    cluster, and for a name that Kubernetes would not take.
    """
    if plan.world != cluster.cores:
        raise ValueError(f"the plan is for {plan.world} cores, the cluster has {cluster.cores}")
    if not re.fullmatch(r"[a-z0-9]([-a-z0-9]{0,50}[a-z0-9])?", name):
        raise ValueError(f"job name {name!r}: lower-case letters, digits and dashes, at most 52, as Kubernetes asks")
    words = (*command, *degrees_as_arguments(plan))
    bound = bool(cluster.instance.chip_numa) and cluster.per_node == cluster.instance.cores(cluster.lnc)
    if bound:
        words = ("--no-python", f"{folder}/bind.sh", "python", *words)
    files = {"env.sh": _env_sh(cluster), "run.sh": _run_sh(cluster, words, folder, training)}
    if bound:
        files["bind.sh"] = _bind_sh(cluster)
    return files | {
        "job.sbatch": _sbatch(cluster, name, folder),
        "pytorchjob.yaml": _pytorchjob(cluster, words, name, image, f"{folder}/bind.sh" if bound else ""),
    }


def check_visible_cores(value: str, ranks: int) -> tuple[int, ...]:
    """The cores of a NEURON_RT_VISIBLE_CORES value; ValueError unless there is one for each of a host's `ranks`."""
    from neuron_parallel.hardware import parse_cores

    cores = parse_cores(value)
    if len(cores) != ranks:
        raise ValueError(
            f"NEURON_RT_VISIBLE_CORES={value!r} names {len(cores)} cores for {ranks} ranks on this host; start "
            f"{len(cores)} ranks or name {ranks} cores"
        )
    return cores


def _hosts(cluster: Cluster) -> tuple[int, int]:
    """(hosts, logical cores of each)."""
    whole = cluster.per_node == cluster.instance.core_counts(cluster.lnc)[-1]
    hosts = cluster.nodes * (cluster.instance.hosts if whole else 1)
    return hosts, cluster.cores // hosts


def _env_sh(cluster: Cluster) -> str:
    lines = [f"export {name}={shlex.quote(value)}  # {why}" for name, (value, why) in environment(cluster).items()]
    return "\n".join(["# sourced on every host before the run", *lines]) + "\n"


def _bind_sh(cluster: Cluster) -> str:
    per_chip = cluster.cores_per_chip
    cases = "\n".join(f"  {'|'.join(map(str, chips))}) cpus={cpus} ;;" for chips, cpus in cluster.instance.chip_numa)
    return (
        "#!/bin/sh\n"
        "# Run a rank on the CPUs beside its chip [field report: it mattered a lot].\n"
        f"case $((LOCAL_RANK / {per_chip})) in\n{cases}\nesac\n"
        'exec taskset --cpu-list "$cpus" "$@"\n'
    )


def _run_sh(cluster: Cluster, words: Sequence[str], folder: str, training: Training | None) -> str:
    hosts, _ = _hosts(cluster)
    run = f"bash {shlex.quote(f'{folder}/run.sh')}, from the folder that the training script's path starts in"
    usage = f"# {run}" if hosts == 1 else f"# on each host: HEAD_NODE=first-host JOB_ID=any-number {run}"
    if training:
        names = ("checkpointing", "attention", "loss_chunks", "dispatcher")
        how = ", ".join(f"{name} {getattr(training, name)}" for name in names)
        usage += f"\n# planned with {how}: the recipe has to say the same"
    need = "" if hosts == 1 else ': "${HEAD_NODE:?name of the first host}" "${JOB_ID:?one number for all hosts}"\n'
    return (
        f"#!/bin/bash\n{usage}\nset -euo pipefail\n{need}source "
        f"{shlex.quote(f'{folder}/env.sh')}\n{torchrun(cluster, words)}\n"
    )


def _sbatch(cluster: Cluster, name: str, folder: str) -> str:
    hosts, _ = _hosts(cluster)
    return (
        "#!/bin/bash\n"
        f"#SBATCH --job-name={name}\n#SBATCH --nodes={hosts}\n#SBATCH --ntasks-per-node=1\n#SBATCH --exclusive\n"
        "#SBATCH --output=%x-%j.log\n#SBATCH --open-mode=append\n"
        "#SBATCH --requeue\n#SBATCH --signal=TERM@600\n"
        "set -euo pipefail\n"
        # No pipe into head: of thousands of hosts it would end scontrol by SIGPIPE, and pipefail the job.
        "HOSTS=$(scontrol show hostnames \"$SLURM_JOB_NODELIST\")\nHEAD_NODE=${HOSTS%%$'\\n'*}\n"
        "export HEAD_NODE JOB_ID=$SLURM_JOB_ID\n"
        f"srun --kill-on-bad-exit=1 bash {shlex.quote(f'{folder}/run.sh')}\n"
    )


def _pytorchjob(cluster: Cluster, words: Sequence[str], name: str, image: str, bind_sh: str) -> str:
    hosts, cores = _hosts(cluster)
    chips = max(1, cores // cluster.cores_per_chip)
    variables = "\n".join(
        f"                - {{name: {key}, value: {_yaml(value)}}}" for key, (value, _) in environment(cluster).items()
    )
    efa = round(cluster.instance.efa_bandwidth / (200e9 / 8) / cluster.instance.hosts) if hosts > 1 else 0
    # AWS's EFA samples ask for huge pages, locked memory and a /dev/shm in memory.
    fabric = f", vpc.amazonaws.com/efa: {efa}, hugepages-2Mi: 5120Mi, memory: 1500Gi" if efa else ""
    limits = f"{{aws.amazon.com/neuron: {chips}{fabric}}}"
    arguments = ["--nproc-per-node", str(cores), "--max-restarts", str(RESTARTS), *words]
    if hosts > 1:
        rendezvous = ["--rdzv-backend", "c10d", "--rdzv-id", name, "--rdzv-endpoint", f"{name}-master-0:{PORT}"]
        arguments = ["--nnodes", str(hosts), *rendezvous, *arguments]
    bind = f"# {bind_sh} is looked for from the image's working folder\n" if bind_sh else ""

    def replica(kind: str, count: int) -> str:
        return (
            f"    {kind}:\n      replicas: {count}\n      restartPolicy: OnFailure\n      template:\n        spec:\n"
            f"          containers:\n            - name: pytorch\n              image: {_yaml(image)}\n"
            f"              command: [torchrun]\n              args: [{', '.join(_yaml(word) for word in arguments)}]\n"
            f"              env:\n{variables}\n              resources: {{limits: {limits}}}\n"
            "              securityContext: {capabilities: {add: [IPC_LOCK]}}\n"
            "              volumeMounts:\n                - {name: shm, mountPath: /dev/shm}\n"
            f"                - {{name: shared, mountPath: {SHARED}}}\n"
            "          volumes:\n            - {name: shm, emptyDir: {medium: Memory}}\n"
            "            - {name: shared, persistentVolumeClaim: {claimName: REPLACE-shared-claim}}\n"
        )

    workers = replica("Worker", hosts - 1) if hosts > 1 else ""
    return (
        "# kubectl apply -f pytorchjob.yaml (Kubeflow training operator; the cache folder has to be a shared volume)\n"
        f"{bind}apiVersion: kubeflow.org/v1\nkind: PyTorchJob\nmetadata: {{name: {name}}}\nspec:\n  "
        "pytorchReplicaSpecs:\n"
        f"{replica('Master', 1)}{workers}"
    )


def _yaml(text: str) -> str:
    """A YAML string that is never taken for anything else."""
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
