"""GPUs, servers, and what it takes to move bytes between them."""

from nostall.parallel.cluster.cluster import Cluster, Duplex
from nostall.parallel.cluster.files import load_cluster, parse_cluster

__all__ = ["Cluster", "Duplex", "load_cluster", "parse_cluster"]
