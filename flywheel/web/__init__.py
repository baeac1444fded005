"""The page: `flywheel web` shows the state in a browser. It reads and changes nothing."""
