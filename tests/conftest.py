"""One thread a process: the tests are many and small, and several run at a time."""

import os

import torch

torch.set_num_threads(1)
# Before anything imports triton: its kernels then run as Python, on CPU tensors.
os.environ["TRITON_INTERPRET"] = "1"
