"""What runs with tapestream and what does not, found by running it: docs/compatibility.md is written from that."""
