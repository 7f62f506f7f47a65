"""RL post-training of a language model: `torchrun pretrain_rl.py --help`."""

import sys

from megatron.rl.arguments import parse_config
from megatron.rl.build import build_trainer
from megatron.rl.data import dry_run
from megatron.rl.initialize import distributed, read_world
from megatron.rl.logging import setup_messages
from megatron.rl.stopping import EXIT_OK, exit_with_message


def main() -> int:
    """Parse, build, train; returns the exit code."""
    world = read_world()
    setup_messages(world.rank)
    with exit_with_message(world):
        config = parse_config(sys.argv[1:], world)
        if config.runtime.dry_run:
            dry_run(config, world)
            return EXIT_OK
        with distributed(config, world) as grid:
            return build_trainer(config, grid).run()


if __name__ == "__main__":
    sys.exit(main())
