# SPDX-License-Identifier: Apache-2.0
"""Settings of ReFrame for weft_checks.py: this machine, and two examples that a centre replaces by its own systems.

ReFrame takes the first system of which `hostnames` matches the name of the host; --system=slurm takes another one.
"""


# Without a GPU, the checks that need one fail in a partition with these devices; they are skipped elsewhere.
GPUS = [{"type": "gpu", "num_devices": 4}]


def partition(name, scheduler, launcher, **more):
    return {"name": name, "scheduler": scheduler, "launcher": launcher, "environs": ["weft"], **more}


site_configuration = {
    "systems": [
        {
            "name": "slurm",
            "hostnames": ["login-node-of-a-slurm-cluster"],
            # "slurm" needs sacct; without it: "squeue".
            "partitions": [
                partition("cpu", "slurm", "srun", access=["--partition=cpu"]),
                partition("gpu", "slurm", "srun", access=["--partition=gpu"], devices=GPUS,
                          resources=[{"name": "_rfm_gpu", "options": ["--gpus-per-node={num_gpus_per_node}"]}]),
            ],
        },
        {
            "name": "pbs",
            "hostnames": ["login-node-of-a-pbs-cluster"],
            "partitions": [
                partition("gpu", "pbs", "mpirun", access=["-q gpu"], devices=GPUS,
                          resources=[{"name": "_rfm_gpu", "options": ["ngpus={num_gpus_per_node}"]}]),
            ],
        },
        {
            "name": "local",
            "hostnames": [".*"],
            # More ranks than cores: Open MPI 4, Open MPI 5.
            "env_vars": [["OMPI_MCA_rmaps_base_oversubscribe", "1"], ["PRTE_MCA_rmaps_default_mapping_policy", ":oversubscribe"]],
            # One check at a time: others would disturb the measurement of speed.
            "partitions": [partition("host", "local", "mpirun", max_jobs=1)],
        },
    ],
    # With modules: {"name": "weft", "modules": ["weft"]}, and "modules_system" in the system: "lmod", "tmod4", "envmod" or "spack".
    "environments": [{"name": "weft"}],
}
