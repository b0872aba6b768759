"""autofuse: profile-guided optimisation for PyTorch."""

__version__ = "0.1.0"
