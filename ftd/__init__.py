"""ftd: serves Mixture-of-Experts models on the machine you own."""

__version__ = "0.1.0"
