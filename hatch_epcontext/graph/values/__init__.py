"""What is known of values: which are constant, and which values an input accepts."""
