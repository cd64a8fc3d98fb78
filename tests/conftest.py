"""Profiles of property tests, and what all tests share; torch stays on one core."""

import atexit
import gc
import os
import sys
from functools import cache

import pytest

from tests.explore.browser import chromium, find_browser


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config):
    from hypothesis import HealthCheck, settings  # noqa: PLC0415

    # `make test-slow` asks for the second. Examples are others in each run, and a failure prints
    # how to see its own again; what lands is decided by the same examples for everybody.
    for profile, examples in (("bilens", 6), ("nightly", 100)):
        settings.register_profile(
            profile,
            deadline=None,
            max_examples=examples,
            derandomize="CI" in os.environ,
            print_blob=True,
            suppress_health_check=[HealthCheck.too_slow],
        )
    settings.load_profile("bilens")
    if config.option.dist != "no" and not hasattr(config, "workerinput"):
        return  # this process hands tests to others, and runs none itself
    # Threads without work do not take the cores of other tests; read when torch is imported.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    import torch  # noqa: PLC0415

    torch.set_num_threads(1)
    if not torch.cuda.is_available():
        # Triton runs its kernels in an interpreter then; it looks when it is first imported.
        os.environ["TRITON_INTERPRET"] = "1"
    from tests import models  # noqa: PLC0415

    config.pluginmanager.register(models)


def pytest_make_parametrize_id(val, argname):
    # Bytes may hold the time at which they were packed; all processes must give a test one name.
    return argname if isinstance(val, bytes) else None


@pytest.hookimpl(wrapper=True)
def pytest_runtestloop():
    # What imports made stays until the end: no collection of garbage walks through all of it.
    gc.freeze()
    # Python itself looks for leaks as it ends.
    atexit.register(gc.unfreeze)
    return (yield)


@pytest.fixture(scope="session", autouse=True)
def work_is_done_once():
    import sklearn.datasets  # noqa: PLC0415

    with pytest.MonkeyPatch.context() as patch:
        # Hundreds of commands and fixtures take the digits.
        patch.setattr(sklearn.datasets, "load_digits", cache(sklearn.datasets.load_digits))
        # Accelerate asks for a collection after each training, for the memory of GPUs.
        if memory := sys.modules.get("accelerate.utils.memory"):
            patch.setattr(memory, "clear_device_cache", lambda *_, **__: None)
        yield


@pytest.fixture(scope="session")
def work_of_processes(tmp_path_factory, testrun_uid):
    """Return the folder that `tests/two_processes.py` fills."""
    from filelock import FileLock  # noqa: PLC0415

    from tests.command_line import ROOT, run_python  # noqa: PLC0415

    # Workers of one run of the suite share the folder; the first of them fills it.
    folder = tmp_path_factory.getbasetemp().parent / f"two-{testrun_uid}"
    with FileLock(f"{folder}.lock"):
        if not folder.exists():
            run_python(ROOT / "tests" / "two_processes.py", folder)
    return folder


@pytest.fixture(scope="module", autouse=True)
def freeze_what_stays():
    """Keep what a file's tests imported out of the collections that every training asks for."""
    yield
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Mark the tests that need a browser, by their fixtures, and skip them if there is none."""
    is_missing = find_browser() is None
    for item in items:
        if "chrome" in getattr(item, "fixturenames", ()):
            item.add_marker("browser")
            if is_missing:
                # The fixture would skip too, but after those of servers and models.
                item.add_marker(pytest.mark.skip(reason=NO_BROWSER))


NO_BROWSER = "no browser: install Chromium by the system's packages, and unset BILENS_NO_BROWSER"


@pytest.fixture(scope="session")
def chrome():
    """Return the path of Chrome or Chromium."""
    return find_browser() or pytest.skip(NO_BROWSER)


@pytest.fixture(scope="session")
def browser(chrome):
    with chromium(chrome) as result:
        yield result
