import os

# By default waiting OpenMP threads spin, and take cores from other tests and roles.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
