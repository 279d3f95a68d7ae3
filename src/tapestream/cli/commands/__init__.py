"""What each command is called with: options, and checks of them. What it does is imported when it does it."""
