"""The command line: one thin file a subcommand, loaded only when that subcommand runs."""
