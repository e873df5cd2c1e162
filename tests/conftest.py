"""Set-up for all tests: where there is no GPU, Triton kernels run in Triton's interpreter, and PyTorch on one thread.
No test reads the user's measurements. Random numbers are the same in every run, whichever tests ran before in the process."""

import contextlib
import gc
import logging
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import settings

from tests.interpreter import make_faster
from tests.stop_after import StopAfter

# The same for all processes of pytest-xdist: one takes the traces that another has kept (``traces_kept``).
RUN = os.environ.get("PYTEST_XDIST_TESTRUNUID", str(os.getpid()))

# What was measured on this machine for attention="auto" must not decide what a test sees.
os.environ["QUIRE_CACHE_DIR"] = str(Path(tempfile.gettempdir()) / f"quire-no-measurements-{RUN}")

# A test traces what it serves: on a GPU traces are kept by default.
os.environ.setdefault("QUIRE_TRACE_CACHE", "0")

# Nor does a test wait until an engine has measured matrix shapes, unless it asks for it.
os.environ.setdefault("QUIRE_TUNE", "0")

# pytest attaches its handlers to loggers that do not propagate, and with a handler torch writes a trace of each compilation.
logging.getLogger("torch.__trace").propagate = True

# Each process of pytest-xdist has another one of the visible GPUs as its first.
if (worker := os.environ.get("PYTEST_XDIST_WORKER", "")).startswith("gw") and "," in os.environ.get("CUDA_VISIBLE_DEVICES", ""):
    gpus = os.environ["CUDA_VISIBLE_DEVICES"].split(",")
    first = int(worker[2:]) % len(gpus)
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus[first:] + gpus[:first])

if not torch.cuda.is_available():
    # Triton reads it when kernels are defined, that is before the first import of a module that has some (or of torch._dynamo).
    os.environ.setdefault("TRITON_INTERPRET", "1")
    with contextlib.suppress(ImportError):  # no Triton: tests of its kernels are skipped
        make_faster()
    torch.set_num_threads(1)  # the models are tiny: more threads would only wait for each other, on a busy machine for long
    import torch._dynamo

    # A trace of one or two layers hardly repeats itself: entries of this cache took a quarter of the time of such tests. The
    # zoo has it on, as users have, and so have tests on a GPU.
    torch._dynamo.config.fake_tensor_cache_enabled = False

# More examples, others each time: --hypothesis-profile=default
settings.register_profile("same-each-time", derandomize=True, deadline=None)
settings.load_profile("same-each-time")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--passed", metavar="FILE", help="leave out the tests that FILE names, and add those that pass to it: a "
                     "run that was cut off goes on")
    parser.addoption("--stop-after", metavar="SECONDS", type=float, help="begin no test later, and say how many were left; "
                     "the first file is another one for each commit")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--stop-after") is not None:
        config.pluginmanager.register(StopAfter(config.getoption("--stop-after")))
    if config.getoption("--passed") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Passed(Path(config.getoption("--passed"))))


class _Passed:
    """Writes the names of tests that passed, their teardown included, as they end; and to the terminal why one failed, which
    pytest prints at the end, where a run may not come."""

    def __init__(self, file: Path) -> None:
        self._file, self._called = file, set[str]()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            print(f"\n{report.nodeid}, {report.when}:\n{report.longreprtext}", flush=True)
        if report.when == "call" and report.passed:
            self._called.add(report.nodeid)
        elif report.when == "teardown" and report.passed and report.nodeid in self._called:
            with self._file.open("a") as file:
                file.write(f"{report.nodeid}\n")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    file = config.getoption("--passed")
    passed = set(Path(file).read_text().splitlines()) if file and Path(file).is_file() else set()
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid in passed])
    items[:] = [item for item in items if item.nodeid not in passed]


def pytest_collection_finish() -> None:
    _freeze()


@pytest.fixture(autouse=True, scope="module")
def small_heap() -> Iterator[None]:
    """What torch keeps of a file's models is dropped after the file. All that is left then is frozen, and so is what was
    imported: a collection that walks all of torch and transformers takes seconds. Tests of freezing unfreeze first."""
    torch.manual_seed(0)  # for the fixtures of the file
    yield
    torch._dynamo.reset()
    torch._subclasses.FakeTensorMode.cache_clear()
    _freeze()


def _freeze() -> None:
    """Freeze all objects. Counting them then takes as long as a small test, and an engine counts when it starts and serves: as
    long as they stay frozen, the count of now is given."""
    gc.collect()
    gc.freeze()
    frozen, gc.get_freeze_count = _counted(), lambda: frozen
    gc.unfreeze = _unfreeze


_counted, _unfrozen = gc.get_freeze_count, gc.unfreeze


def _unfreeze() -> None:
    _unfrozen()
    gc.get_freeze_count, gc.unfreeze = _counted, _unfrozen


@pytest.fixture(scope="module")
def tokens_unchecked() -> Iterator[None]:
    """For a file about what comes after the proof (``pytestmark``): no graph is searched for operations in which tokens meet,
    which takes up to a third of a trace. tests/passes/verify, tests/adversarial and tests/zoo have the proof, and engines with
    it are in tests/graph_runner/test_schedules.py, test_lifecycle.py, test_live_model.py and others."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("quire.passes.pipeline.check_tokens", lambda *args: None)
        # Nor is it noted with the trace that it passed.
        patch.setattr("quire.passes.capture.traced.proving_once", lambda trace_file: lambda graph, run: run())
        yield


@pytest.fixture(scope="module")
def traces_kept() -> Iterator[None]:
    """For a file that serves one model in many ways (``pytestmark``): its later engines, and those of other such files, take
    the trace of the first from the disk, as a later process of a user with a GPU does."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("QUIRE_TRACE_CACHE", "1")
        yield


@pytest.fixture(autouse=True)
def same_numbers() -> None:
    torch.manual_seed(0)
