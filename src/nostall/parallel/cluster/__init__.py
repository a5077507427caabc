"""Clusters: GPUs on servers, the links between them, and the time to move bytes over these."""

from nostall.parallel.cluster.cluster import Cluster
from nostall.parallel.cluster.cluster_file import load_cluster, parse_cluster

__all__ = ["Cluster", "load_cluster", "parse_cluster"]
