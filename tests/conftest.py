"""One thread a process: the tests are many and small, and several run at a time."""

import torch

torch.set_num_threads(1)
