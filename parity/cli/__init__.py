"""The command line: one file a command. A command converts and delegates; engines are imported inside it."""
