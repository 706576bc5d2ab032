import gc
import os

# By default waiting OpenMP threads spin, and take cores from other tests and roles.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
gc.disable()  # speeds up the imports


def pytest_collection_finish() -> None:
    gc.freeze()  # speeds up each collection, which need not search the modules
    gc.enable()
