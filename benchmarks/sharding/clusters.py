"""Clusters of the sharding benchmarks, and the rates of their GPUs."""

from __future__ import annotations

from nostall.cli.planning.sharding import device_rates
from nostall.parallel.cluster import Cluster, parse_cluster
from nostall.parallel.sharding.cost.rates import DeviceRates
from nostall.workload.hardware.file import load_hardware

MEMORY_GIB = 80
LATENCY_US = 5
NETWORK_LATENCY_US = 10


def one_server(gpus: int, gbytes: float) -> Cluster:
    """GPUs of one server whose links have ``gbytes`` GB/s."""
    return parse_cluster(
        f'name = "1x{gpus}, {gbytes:g} GB/s"\n[[servers]]\ngpus = {gpus}\n'
        f"memory_gib = {MEMORY_GIB}\n"
        f"link = {{ bandwidth_gbytes = {gbytes}, latency_us = {LATENCY_US} }}\n"
    )


def servers(count: int, gpus: int, gbytes: float, network_gbytes: float) -> Cluster:
    """Servers with a network port of ``network_gbytes`` GB/s each."""
    return parse_cluster(
        f'name = "{count}x{gpus}, {gbytes:g} and {network_gbytes:g} GB/s"\n[[servers]]\n'
        f"count = {count}\ngpus = {gpus}\nmemory_gib = {MEMORY_GIB}\n"
        f"link = {{ bandwidth_gbytes = {gbytes}, latency_us = {LATENCY_US} }}\n"
        f"[network]\nbandwidth_gbytes = {network_gbytes}\nlatency_us = {NETWORK_LATENCY_US}\n"
    )


def h100() -> DeviceRates:
    """Rates of the preset h100-dgx."""
    return device_rates(load_hardware("h100-dgx"))
