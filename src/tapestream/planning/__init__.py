"""From a program to a Plan: profile it, try candidates and passes, simulate, choose."""
