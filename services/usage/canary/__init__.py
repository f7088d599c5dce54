"""A new version under trial: evidence and judge (pure), and the controller that moves its weights."""
