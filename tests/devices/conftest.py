"""Tests on eight virtual devices. XLA makes them when it starts, so these tests have a process of their own:

python -m pytest tests/devices        # alone; tests/test_devices.py does the same as one test of all others
"""

import os

import jax

os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8".strip()
jax.config.update("jax_platforms", "cpu")
