"""How it runs: the command line, the supervisor, the local broker and the demo."""
