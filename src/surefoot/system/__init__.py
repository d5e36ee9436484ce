"""The machine: hardware, processes, files that survive a crash, the hub, errors, secrets."""
