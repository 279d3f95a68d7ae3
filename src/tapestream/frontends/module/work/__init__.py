"""What a streamed model does between its blocks: traced, and run again with the blocks."""
