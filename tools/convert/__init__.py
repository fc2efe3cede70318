"""Converts weights between DCP, torch.save and safetensors: ``python3 -m tools.convert``."""
