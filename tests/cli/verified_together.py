"""What torchrun starts in `test_cli_ranks`: the command."""

from tapestream_command import main

if __name__ == "__main__":
    main()
