# SPDX-License-Identifier: Apache-2.0
"""Small and read-only disks, in a mount namespace of their own: shared by the fault tests."""
import subprocess


def mounts_are_possible(folder):
    place = folder / "mount_probe"
    place.mkdir()
    command = ["unshare", "--mount", "mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(place)]
    try:
        return subprocess.run(command, check=False, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).returncode == 0
    except FileNotFoundError:
        return False


def inside(mount, at):
    """Prefix that runs a command in a separate namespace with `mount` mounted at `at`."""
    return ("unshare", "--mount", "sh", "-c", f'mount {mount} tmpfs "{at}" && exec "$@"', "sh")
