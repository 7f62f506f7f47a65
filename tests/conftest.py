"""The runtime type checker on `slime_loss`, and one thread a process."""

import torch
from jaxtyping import install_import_hook

install_import_hook("slime_loss", "beartype.beartype")
torch.set_num_threads(1)
