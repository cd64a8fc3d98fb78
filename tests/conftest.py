"""Profiles of property tests, and what all tests share; torch stays on one core."""

import gc
import os

import pytest
import torch
from hypothesis import HealthCheck, settings

from tests.explore.browser import chromium

torch.set_num_threads(1)
if not torch.cuda.is_available():
    # Triton runs its kernels in an interpreter then; it looks when it is first imported.
    os.environ["TRITON_INTERPRET"] = "1"
# `make test-slow` asks for the second.
for profile, examples in (("bilens", 10), ("nightly", 100)):
    settings.register_profile(
        profile,
        deadline=None,
        max_examples=examples,
        derandomize=True,
        suppress_health_check=[HealthCheck.too_slow],
    )
settings.load_profile("bilens")


@pytest.hookimpl(wrapper=True)
def pytest_runtestloop():
    # What imports made stays until the end: no collection of garbage walks through all of it.
    gc.freeze()
    result = yield
    gc.unfreeze()
    return result


@pytest.fixture(scope="session")
def browser():
    with chromium() as result:
        yield result
