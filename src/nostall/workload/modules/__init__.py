"""Features of a job from a PyTorch module and a batch, without running it on data."""

from nostall.workload.modules.features import ModuleFeatures, job_of, module_features

__all__ = ["ModuleFeatures", "job_of", "module_features"]
