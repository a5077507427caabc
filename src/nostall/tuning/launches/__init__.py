"""Launch files: check against the kernel, templates, and recorded launches."""
