"""What all commands show on a terminal: tables, progress, errors and Ctrl-C."""
