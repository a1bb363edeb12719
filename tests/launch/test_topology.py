"""Chips and hosts of topologies, against the tables of the cloud's documentation."""

from __future__ import annotations

import pytest

from orchestra_jax.config import ConfigError
from orchestra_jax.launch.topology import parse_topology

# Chips, hosts (virtual machines), machine type. v5p and v6e: the tables of cloud.google.com/tpu/docs/v5p (Hosts) and
# /v6e (VMs); the others: XPK 1.16.0's `system_characteristics.py`, which agrees on those two. It lacks 1x1 and 2x2 of
# v5e, and takes 2x4 as two machines of 4 chips: the documentation has both ways, and we take the one machine of 8.
TABLE = [
    ("v4:2x2x1", 4, 1, "ct4p-hightpu-4t"),
    ("v4:2x2x2", 8, 2, "ct4p-hightpu-4t"),
    ("v4:2x2x4", 16, 4, "ct4p-hightpu-4t"),
    ("v4:2x4x4", 32, 8, "ct4p-hightpu-4t"),
    ("v4:4x4x4", 64, 16, "ct4p-hightpu-4t"),
    ("v5e:1x1", 1, 1, "ct5lp-hightpu-1t"),
    ("v5e:2x2", 4, 1, "ct5lp-hightpu-4t"),
    ("v5e:2x4", 8, 1, "ct5lp-hightpu-8t"),
    ("v5e:4x4", 16, 4, "ct5lp-hightpu-4t"),
    ("v5e:4x8", 32, 8, "ct5lp-hightpu-4t"),
    ("v5e:8x8", 64, 16, "ct5lp-hightpu-4t"),
    ("v5e:8x16", 128, 32, "ct5lp-hightpu-4t"),
    ("v5e:16x16", 256, 64, "ct5lp-hightpu-4t"),
    ("v5p:2x2x1", 4, 1, "ct5p-hightpu-4t"),
    ("v5p:2x2x2", 8, 2, "ct5p-hightpu-4t"),
    ("v5p:2x4x4", 32, 8, "ct5p-hightpu-4t"),
    ("v5p:4x4x4", 64, 16, "ct5p-hightpu-4t"),
    ("v5p:4x4x8", 128, 32, "ct5p-hightpu-4t"),
    ("v5p:4x8x8", 256, 64, "ct5p-hightpu-4t"),
    ("v5p:8x8x16", 1024, 256, "ct5p-hightpu-4t"),
    ("v5p:16x16x24", 6144, 1536, "ct5p-hightpu-4t"),
    ("v6e:1x1", 1, 1, "ct6e-standard-1t"),
    ("v6e:2x2", 4, 1, "ct6e-standard-4t"),
    ("v6e:2x4", 8, 1, "ct6e-standard-8t"),
    ("v6e:4x4", 16, 4, "ct6e-standard-4t"),
    ("v6e:4x8", 32, 8, "ct6e-standard-4t"),
    ("v6e:8x8", 64, 16, "ct6e-standard-4t"),
    ("v6e:8x16", 128, 32, "ct6e-standard-4t"),
    ("v6e:16x16", 256, 64, "ct6e-standard-4t"),
    ("tpu7x:2x2x1", 4, 1, "tpu7x-standard-4t"),
    ("tpu7x:2x2x2", 8, 2, "tpu7x-standard-4t"),
    ("tpu7x:4x4x4", 64, 16, "tpu7x-standard-4t"),
    ("tpu7x:4x8x8", 256, 64, "tpu7x-standard-4t"),
]


@pytest.mark.parametrize(("text", "chips", "hosts", "machine"), TABLE)
def test_chips_and_hosts_are_those_of_the_documentation(text, chips, hosts, machine):
    found = parse_topology(text)
    assert (found.num_chips, found.num_hosts, found.machine_type) == (chips, hosts, machine)
    assert found.chips_per_host * found.num_hosts == chips


def test_gpus_are_counted_by_the_node():
    found = parse_topology("h100:8")
    assert (found.num_chips, found.num_hosts, found.tpu) == (8, 1, None)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("v5p-128", "must look like v5p:4x4x4"),
        ("v5p:", "must look like"),
        ("v5p:4x4x0", "must look like"),
        ("v7:4x4x4", "no accelerator 'v7'; there are: v4, v5e"),
        ("v5p:4x4", "comes as 2x2x1, 2x2x2, 2x2x4, 2x4x4, or as AxBxC"),
        ("v5p:4x4x6", "multiples of 4"),
        ("v5p:8x4x4", "A <= B <= C"),
        ("v5p:16x16x28", "at most 6144 chips in a slice, this is 7168"),
        ("v4:16x16x16", "at most 3072 chips"),
        ("v5e:4x16", "comes as 1x1, 2x2, 2x4"),
        ("v6e:4x4x4", "comes as 1x1"),
        ("h100:16", "GPUs of one node, 1 to 8"),
        ("h100:2x8", "--num-slices is the number of nodes"),
    ],
)
def test_a_topology_that_does_not_exist_is_refused_with_those_that_do(text, message):
    with pytest.raises(ConfigError, match=message):
        parse_topology(text)
