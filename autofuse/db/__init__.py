"""The store: models, migrations, what scripts append, the queue, decisions and the kernel cache."""
