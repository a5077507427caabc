"""Job features of a PyTorch module, counted on fake tensors without computing anything."""

from nostall.workload.modules.features import ModuleFeatures, job_from_features, module_features

__all__ = ["ModuleFeatures", "job_from_features", "module_features"]
