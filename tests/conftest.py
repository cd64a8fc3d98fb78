"""Nightly runs check shapes against the annotations of jaxtyping; torch stays on one core."""

import gc
import os

import jaxtyping
import pytest
import torch
from hypothesis import HealthCheck, settings

import tests.checked  # noqa: F401  the hook finds it by its name
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


def pytest_configure(config):
    # It adds two thirds to the time of the suite. What a public function is given is checked by day
    # too, by the function.
    if config.getoption("hypothesis_profile") == "nightly":
        jaxtyping.install_import_hook("bilens", "tests.checked.check")


@pytest.hookimpl(wrapper=True)
def pytest_runtestloop():
    # What imports made stays until the end: no collection of garbage walks through all of it.
    gc.freeze()
    result = yield
    gc.unfreeze()
    return result


@pytest.fixture
def unchecked():
    """Check shapes as outside of the tests, with bilens's own messages only."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture(scope="session")
def browser():
    with chromium() as result:
        yield result
