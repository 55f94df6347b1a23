"""``python -m lightning_megatron`` is ``lightning-megatron``, also where the script is not on the path."""

from lightning_megatron.tools.commands.cli import main

if __name__ == "__main__":
    main()
